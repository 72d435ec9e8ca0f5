//! The state of a running process's devices, for `urnic stat` and the `hw_counters` files.
//!
//! A process with an open device has a datagram socket in the user's own folder
//! ([`OwnFolder`](urnic_presence::OwnFolder), which no other user can enter), called
//! `PID-BOOT-RANDOM.stat` (`names.rs`). A client sends one end of a socket pair to it; the process
//! answers over that pair with the fd of a memory file that contains a [`Snapshot`] in JSON
//! (`answer.rs`). So no client can block the process, or use up its memory or descriptors, and
//! without requests the process does no work.

mod answer;
mod names;
pub mod netlink;
mod requests;
mod snapshot;

pub(crate) use requests::StatSocket;
pub use requests::{change_faults, homes, hw_counter, snapshots};
pub(crate) use snapshot::Objects;
pub use snapshot::{Failure, Failures, QueuePair, Snapshot};
