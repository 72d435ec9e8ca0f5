//! Confirmations and acknowledgements go with a message of this end if one follows soon, and alone
//! otherwise.

use crate::tuning::ALONE_MANY;

/// Whether what is owed to the peer waits for a message of this end.
#[derive(Debug, Default)]
pub(crate) struct Piggyback {
    /// The next one need not wait for a message.
    alone: bool,
    /// Those in a row that waited for a message in vain, up to [`ALONE_MANY`].
    in_vain: u32,
}

impl Piggyback {
    /// Whether it is sent although no message is.
    #[inline]
    pub(crate) fn is_alone(&self) -> bool {
        self.alone
    }

    /// Lets it go alone, if it is time; `is_much`: much is owed; `polled_again`: the program has
    /// polled since, and nothing more has arrived; `is_drained`: nothing more has arrived. Returns
    /// whether it is time.
    pub(crate) fn go_alone(&mut self, is_much: bool, polled_again: bool, is_drained: bool) -> bool {
        if polled_again && !self.alone {
            self.in_vain = (self.in_vain + 1).min(ALONE_MANY);
        }
        self.alone |= polled_again || is_much || is_drained && self.in_vain == ALONE_MANY;
        self.alone
    }

    /// It is sent: the next one waits.
    #[inline]
    pub(crate) fn is_sent(&mut self) {
        self.alone = false;
    }

    /// This end sends a message: its program answers what arrives.
    #[inline]
    pub(crate) fn message_sent(&mut self) {
        self.in_vain = 0;
    }
}
