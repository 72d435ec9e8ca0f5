//! `liburnic.so`: the plug-in that presents an RDMA device to programs.
//!
//! When it is preloaded, it answers the requests of libibverbs to the kernel ([`interpose`], on top
//! of `urnic_presence`), registers with every libibverbs in the process ([`register`]), and
//! implements the verbs of the contexts that libibverbs opens ([`opening`], [`verbs`]). The same
//! file under a `liburnic-rdmavNN.so` name is an ordinary provider that libibverbs loads by itself.

mod call_site;
mod context;
mod copy_on_fork;
mod exit;
mod file;
mod files;
mod first_search;
mod from_c;
mod guard;
mod interpose;
mod library;
mod log;
mod opening;
mod probes;
mod race_detector;
mod real;
mod refusals;
mod register;
mod sanitizer;
mod start;
mod strict;
mod trace;
mod verbs;
