//! The state of a running process's device, for `urnic stat` and the `hw_counters` files.
//!
//! A process with an open device has a datagram socket in the user's own folder ([`folder()`],
//! which only that user may read), called `PID-BOOT-RANDOM.stat` ([`names`]). A reader sends it one
//! end of a socket pair; the process answers over that with the fd of a file in memory: a
//! [`Snapshot`] in JSON. So no reader can make the process wait, grow or run out of descriptors,
//! and without requests the process does no work.

mod ask;
mod folder;
mod names;
mod snapshot;
mod stat_socket;

pub use ask::{everyone, folders, hw_counter};
pub(crate) use folder::folder;
pub use snapshot::{QueuePair, Snapshot};
pub(crate) use stat_socket::StatSocket;
