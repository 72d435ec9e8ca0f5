//! libibverbs for the stress program: loaded at run time, so that the build does not require it,
//! and called as any program calls it. Objects are destroyed when dropped, and a destruction that
//! fails ends the program.

mod completions;
mod device;
mod extended;
mod library;
mod memory;
mod queues;

pub(crate) use completions::{Completion, Cq, Manner};
pub(crate) use device::Device;
pub(crate) use memory::{Binding, Mr, Mw};
pub(crate) use queues::{Qp, Receive, Request, Shape, Srq, Work};
