//! The processors on which the two ends of a connection poll. If both poll on one processor, the
//! end that waits yields it: the scheduler moves a thread to another processor only after a while,
//! and a program may be confined to one.

use super::layout::Direction;
use super::layout::{END_WORDS, EndWords};
use crate::host::{SharedMemory, SharedWords};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The processors of a connection in memory.
#[derive(Debug)]
pub(crate) struct Processors {
    ours: SharedWords<EndWords>,
    theirs: SharedWords<EndWords>,
}

impl Processors {
    pub(super) fn new(memory: &Arc<SharedMemory>, outgoing: Direction) -> Processors {
        Processors {
            ours: memory.words(END_WORDS.of(outgoing)),
            theirs: memory.words(END_WORDS.of(outgoing.other())),
        }
    }

    /// Notes the processor of this thread, which polls without result; whether the other end has
    /// last done so on the same.
    pub(crate) fn are_one(&self) -> bool {
        let here = (rustix::thread::sched_getcpu() as u32).wrapping_add(1);
        if self.ours.processor.load(Ordering::Relaxed) != here {
            self.ours.processor.store(here, Ordering::Relaxed);
        }
        self.theirs.processor.load(Ordering::Relaxed) == here
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::MEMORY;
    use super::*;

    #[test]
    fn ends_that_poll_on_one_processor_know_it() {
        let (memory, _file) = SharedMemory::create("processors", MEMORY).unwrap();
        let memory = Arc::new(memory);
        let [one, other] = [Direction::FromInitiator, Direction::FromResponder]
            .map(|outgoing| Processors::new(&memory, outgoing));
        assert!(!one.are_one(), "the other end has not polled yet");
        // The scheduler may move this thread between the two.
        assert!((0..1000).any(|_| other.are_one() && one.are_one()));
        one.theirs.processor.store(u32::MAX, Ordering::Relaxed);
        assert!(!one.are_one());
    }
}
