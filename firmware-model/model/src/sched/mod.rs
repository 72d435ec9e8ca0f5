//! Who runs what of the device, and when: the [agenda] has what is ready, the [runtime] has the
//! threads that do it, and [gathering] delays sends of a busy queue pair.

pub(crate) mod agenda;
pub(crate) mod gathering;
pub(crate) mod runtime;
pub(crate) mod shard;
