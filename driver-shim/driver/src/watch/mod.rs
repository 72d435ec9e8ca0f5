//! What a running process tells of its device, for `urnic stat` and the `hw_counters` files.
//!
//! A process with an open device has a datagram socket in the user's own folder ([`folder()`],
//! where only that user may look), called `PID-BOOT-RANDOM.stat` ([`names`]). Who wants to know
//! sends it one end of a socket pair, and gets over that the fd of a file in memory: a [`Snapshot`]
//! in JSON. So no reader can make the process wait, grow or run out of descriptors, and while no
//! program asks nothing is done.

mod ask;
mod folder;
mod names;
mod snapshot;
mod stat_socket;

pub use ask::{everyone, folders, hw_counter};
pub(crate) use folder::folder;
pub use snapshot::{QueuePair, Snapshot};
pub(crate) use stat_socket::StatSocket;
