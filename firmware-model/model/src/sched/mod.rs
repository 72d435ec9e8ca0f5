//! The threads that run the device, and their work: the [schedule] has what is ready, the [runtime]
//! has the threads that do it, and [gathering] delays sends of a busy queue pair.

pub(crate) mod gathering;
pub(crate) mod runtime;
pub(crate) mod schedule;
pub(crate) mod shard;
