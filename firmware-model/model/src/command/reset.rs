//! Function reset.

use super::queues;
use crate::runtime::Core;

/// Function reset: destroys all objects, and resets the streams that no queue pair has.
pub(crate) fn reset(core: &Core) {
    queues::destroy_all(core);
    core.streams.clear();
    core.ports.clear();
    core.schedule.clear();
    core.memory.clear();
}
