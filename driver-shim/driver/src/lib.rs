//! The driver, which takes the place of a kernel module between verbs and a device: commands,
//! events, shared memory, and the lifecycle of objects.
//!
//! One [`Driver`] serves one device for the whole process. Its own thread takes asynchronous events
//! and makes connections; completions notify their channel on the thread on which the device raised
//! them.
//!
//! `driver.rs` has the state of the driver and of its objects, `objects.rs` the tables of objects.
//! `event_loop.rs` decides which thread handles events, `dispatch.rs` defines the meaning of each
//! event, and `stream_router.rs` finds the owner of a stream.
//!
//! Order of locks: a queue pair's attributes, then native connections or the connection manager,
//! then the command queue. [`ContextEvents`] and [`Poster`] are called with none of these locks
//! held.

mod adaptive_poll;
mod attributes;
mod clock;
mod command;
mod connections;
mod cq;
mod datagrams;
mod dispatch;
mod dma;
mod doorbell_write;
mod driver;
mod event;
mod event_loop;
mod failures;
mod loss;
mod manager;
mod memory;
mod message_queues;
mod native;
mod objects;
mod pages;
mod planned;
mod poster;
mod process;
mod qp;
mod qp_state;
mod rdma_cm;
mod resident;
mod snapshot;
mod srq;
mod start;
mod stream_router;
mod streams;
#[cfg(test)]
mod testing;
mod thread;
mod transition;
pub mod watch;
mod window;

pub use attributes::Attributes;
pub use clock::now;
pub use datagrams::Destination;
pub use dma::{Anywhere, DmaMemory, RingPlacement};
pub use doorbell_write::DoorbellWrite;
pub use driver::{Cq, Driver, Qp, Srq};
pub use failures::Failures;
pub use memory::{Mr, Reregistration, prefetch};
pub use objects::{AsyncEvent, Context, ContextEvents, Pd};
pub use poster::{Completed, Poster};
pub use process::{abandon_in_child, addresses, exit, failed, snapshots};
pub use qp::QpInit;
pub use rdma_cm::channel::{CmChannel, cm_write};
pub use urnic_cm::qp_attr::{QpAttr, QpCaps, QpMask};
pub use urnic_process::addressing::{AddressVector, Gid};
