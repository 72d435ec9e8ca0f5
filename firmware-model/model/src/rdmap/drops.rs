//! What the responder of a queue pair of kind UC drops (InfiniBand Architecture Specification vol.
//! 1 §9.9.3): a message that finds no receive or one that is too short, and a Write that the
//! protection of memory does not allow. The stream goes on behind it.

/// Which messages are dropped, and what belongs to them.
#[derive(Debug, Default)]
pub(super) struct Drops {
    on: bool,
    /// The receive that was taken last waits for another message.
    kept: bool,
    /// The Write that is arriving is dropped.
    write: bool,
    /// The Write before was dropped, with an immediate that follows it directly.
    immediate: bool,
}

impl Drops {
    /// `on`: the queue pair is of kind UC. With another kind nothing is dropped.
    pub(super) fn new(on: bool) -> Drops {
        Drops {
            on,
            ..Drops::default()
        }
    }

    #[inline]
    pub(super) fn are_on(&self) -> bool {
        self.on
    }

    /// The receive that was taken last is not used up: the message for it is dropped.
    pub(super) fn keep_receive(&mut self) {
        self.kept = true;
    }

    /// Whether a receive is left from a message that was dropped; it is taken.
    #[inline]
    pub(super) fn take_kept(&mut self) -> bool {
        std::mem::take(&mut self.kept)
    }

    /// A segment of a Write begins, which is `allowed` or else makes the whole Write dropped.
    pub(super) fn begin_write(&mut self, allowed: bool) {
        self.immediate = false;
        self.write |= !allowed;
    }

    /// Whether the Write that is arriving is dropped.
    #[inline]
    pub(super) fn drops_write(&self) -> bool {
        self.write
    }

    /// Memory refuses bytes of the Write that is arriving: drops it, or returns `refusal`.
    pub(super) fn refuse_write<E>(&mut self, refusal: E) -> Result<(), E> {
        match self.on {
            true => {
                self.write = true;
                Ok(())
            }
            false => Err(refusal),
        }
    }

    /// A segment of a Write ends, the last one if `last`; whether the Write is dropped.
    pub(super) fn end_write(&mut self, last: bool) -> bool {
        let dropped = self.write;
        if last {
            self.immediate = std::mem::take(&mut self.write);
        }
        dropped
    }

    /// A Send begins: no immediate of an earlier Write follows.
    #[inline]
    pub(super) fn begin_send(&mut self) {
        self.immediate = false;
    }

    /// Whether an immediate that comes now belongs to a Write that was dropped.
    #[inline]
    pub(super) fn take_immediate(&mut self) -> bool {
        std::mem::take(&mut self.immediate)
    }

    /// No message of an earlier stream continues.
    pub(super) fn begin_stream(&mut self) {
        (self.write, self.immediate) = (false, false);
    }
}
