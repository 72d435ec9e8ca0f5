//! `liburnic.so`: the plug-in that shows programs an RDMA device.
//!
//! Preloaded, it answers what libibverbs would ask a kernel ([`interpose`], on top of
//! `urnic_presence`), registers with every libibverbs in the process ([`register`]), and implements
//! the verbs of the contexts they open ([`opening`], [`verbs`]). The same file under a
//! `liburnic-rdmavNN.so` name is an ordinary provider that libibverbs loads by itself.

mod context;
mod device;
mod file;
mod first_look;
mod guard;
mod interpose;
mod library;
mod log;
mod opening;
mod race_detector;
mod real;
mod register;
mod sanitizer;
mod start;
mod verbs;
