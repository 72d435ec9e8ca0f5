//! The driver, which takes the place of a kernel module between verbs and a device: commands,
//! events, shared memory, and the lifecycle of objects.
//!
//! One [`Driver`] serves one device for the whole process. Its own thread takes asynchronous events
//! and makes connections; completions notify their channel on the thread on which the device raised
//! them.
//!
//! `driver` has the [`Driver`] and its objects. Their parts have files of their own: `command.rs`
//! the command queue, `events.rs` the event queues and the choice of the thread that handles them,
//! `connections.rs` the connection engines, `objects.rs` the tables of objects, `gate.rs` the gate
//! of a queue pair. `dispatch.rs` defines the meaning of each event, and finds the owner of a
//! stream.
//!
//! Order of locks: a queue pair's attributes, then native connections or the connection manager,
//! then the command queue. [`ContextEvents`] and [`Poster`] are called with none of these locks
//! held.

mod attributes;
mod command;
mod connections;
mod datagrams;
mod dispatch;
mod dma;
mod driver;
mod events;
mod gate;
mod loss;
mod manager;
mod memory;
mod message_queues;
mod native;
mod objects;
mod paths;
mod planned;
mod process;
mod rdma_cm;
mod refusal;
mod resident;
mod resources;
pub mod rings;
mod snapshot;
mod streams;
#[cfg(test)]
mod testing;
mod thread;
mod transition;
pub mod watch;

pub use attributes::Attributes;
pub use datagrams::{CountedHandle, Destination, MAX_ADDRESS_HANDLES};
pub use dma::{Anywhere, DmaMemory, RingPlacement};
pub use driver::qp::QpInit;
pub use driver::{Cq, DoorbellWrite, Driver, Qp, Srq};
pub use events::now;
pub use gate::{Completed, Poster};
pub use memory::{Mr, Reregistration, prefetch};
pub use objects::{AsyncEvent, Context, ContextEvents, Pd};
pub use process::{abandon_in_child, addresses, exit, failed, snapshots};
pub use rdma_cm::channel::{CmChannel, cm_write};
pub use refusal::{MAX_INLINE, Reason, Refusal, Refused, at_most, set_last_refused};
pub use urnic_cm::qp_attr::{QpAttr, QpCaps, QpMask};
pub use urnic_process::addressing::{AddressVector, Gid};
pub use watch::Failures;
