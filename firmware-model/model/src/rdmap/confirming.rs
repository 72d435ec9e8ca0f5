//! The confirmations that this end sends, and their form.
//!
//! A confirmation is an RDMA Write of length zero to the STag [`CONFIRMATION_STAG`]. Its tagged
//! offset is the position in the peer's stream up to which this end has placed and delivered all
//! messages: bytes of FPDUs, or, of a stream of messages, of ULPDUs with four more bytes each. STag
//! and offset of a Write of length zero are not checked (RFC 5041 §5.2), so a confirmation has no
//! effect on a peer that does not know it. Nevertheless it goes only to a peer that has announced
//! that it takes confirmations, by [`MARK`].
//!
//! | this end owes a confirmation, and | it is sent |
//! |---|---|
//! | sends a message | in front of that message |
//! | has nothing to send, when the program polls again and nothing more has arrived | alone |
//! | has sent [`ALONE_MANY`] in a row alone after polls, and no message since | alone, as soon as nothing more has arrived |
//! | [`CONFIRMED_MESSAGES`] or [`CONFIRMED_BYTES`] are processed since the last one | alone |
//! | ends the connection | in front of the Terminate or FIN |
//!
//! The end of the background thread's work counts as a poll of the program. A message that is sent
//! shows that the program answers: the next confirmations wait for a message again.
//!
//! [`ALONE_MANY`]: crate::tuning::ALONE_MANY

use super::confirmation::ANY_STAG;
use crate::transport::piggyback::Piggyback;
use crate::tuning::{CONFIRMED_BYTES, CONFIRMED_MESSAGES};
use urnic_wire::ddp::{TAGGED_LEN, TaggedHeader};
use urnic_wire::rdmap::{Control, Opcode, ReadRequest};

/// STag of a confirmation. No region of a urnic has its index, 0.
pub(super) const CONFIRMATION_STAG: u32 = 0xc5;

/// Source offset of the Reads of length zero by which an end announces that it takes confirmations.
pub(super) const MARK: u64 = u64::from_be_bytes(*b"urnic\0\0\x02");

/// The header of a confirmation: all messages of the peer before `position` are processed.
pub(super) fn header(position: u64) -> TaggedHeader {
    TaggedHeader {
        last: true,
        rsvd_ulp: Control::from(Opcode::Write).byte(),
        stag: CONFIRMATION_STAG,
        to: position,
    }
}

/// Whether a Write with this header and `len` bytes is a confirmation.
#[inline]
pub(super) fn is_confirmation(header: &TaggedHeader, len: usize) -> bool {
    header.stag == CONFIRMATION_STAG && header.last && len == 0
}

/// Whether a ULPDU is a confirmation.
pub(super) fn is_confirmation_ulpdu(ulpdu: &[u8]) -> bool {
    let confirmation = header(0);
    let mut expected = [0; TAGGED_LEN];
    confirmation.emit(&mut expected);
    let head = TAGGED_LEN - size_of_val(&confirmation.to);
    ulpdu.len() == TAGGED_LEN && ulpdu.starts_with(&expected[..head])
}

/// Whether the sender of this Read announces that it takes confirmations.
pub(super) fn is_announcement(request: &ReadRequest) -> bool {
    request.size == 0 && request.source_stag == ANY_STAG && request.source_to == MARK
}

/// The messages of the peer that are processed, and those that are confirmed. Positions count the
/// bytes of the stream.
#[derive(Debug, Default)]
pub(super) struct Confirming {
    /// The peer takes confirmations.
    announced: bool,
    /// Messages since the last confirmation.
    messages: u32,
    /// All messages before this position are processed.
    processed: u64,
    /// The position in the last confirmation.
    confirmed: u64,
    /// Whether the next confirmation waits for a message.
    piggyback: Piggyback,
}

impl Confirming {
    /// The peer takes confirmations. It learns at once that it gets them.
    pub(super) fn announced(&mut self) {
        if !self.announced {
            (self.announced, self.messages) = (true, self.messages.max(1));
        }
    }

    /// Whether the peer takes confirmations, so that it is another urnic.
    #[inline]
    pub(super) fn is_announced(&self) -> bool {
        self.announced
    }

    /// Notes that a message of the peer is placed or delivered.
    #[inline]
    pub(super) fn message_processed(&mut self) {
        self.messages = self.messages.saturating_add(1);
    }

    /// Notes that all messages before `position` are processed.
    #[inline]
    pub(super) fn processed_to(&mut self, position: u64) {
        self.processed = position;
    }

    /// Whether processed messages are not confirmed yet.
    #[inline]
    pub(super) fn is_owed(&self) -> bool {
        self.announced && self.messages > 0 && self.processed > self.confirmed
    }

    /// Whether a confirmation is sent although no message is.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        self.piggyback.is_alone()
    }

    /// Lets the confirmation go alone, if it is time; `polled_again`: the program has polled since,
    /// and nothing more has arrived; `is_drained`: nothing more has arrived. Returns whether it is.
    pub(super) fn go_alone(&mut self, polled_again: bool, is_drained: bool) -> bool {
        let bytes = self.processed - self.confirmed;
        let is_much = self.messages >= CONFIRMED_MESSAGES || bytes >= CONFIRMED_BYTES;
        self.piggyback.go_alone(is_much, polled_again, is_drained)
    }

    /// Notes that this end sends a message of its own.
    #[inline]
    pub(super) fn message_sent(&mut self) {
        self.piggyback.message_sent();
    }

    /// The position for a confirmation that is sent now, if one is owed.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u64> {
        if !self.is_owed() {
            return None;
        }
        (self.messages, self.confirmed) = (0, self.processed);
        self.piggyback.is_sent();
        Some(self.processed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::ALONE_MANY;

    fn owing() -> Confirming {
        let mut confirming = Confirming::default();
        confirming.announced();
        confirming.message_processed();
        confirming.processed_to(100);
        confirming
    }

    #[test]
    fn nothing_is_owed_for_bytes_without_a_message() {
        let mut confirming = owing();
        assert_eq!(confirming.take(), Some(100));
        // A confirmation of the peer: otherwise the two ends would confirm for ever.
        confirming.processed_to(120);
        assert!(!confirming.is_owed());
        assert_eq!(confirming.take(), None);
    }

    #[test]
    fn nothing_is_owed_to_a_peer_that_takes_no_confirmations() {
        let mut confirming = Confirming::default();
        confirming.message_processed();
        confirming.processed_to(100);
        assert_eq!(confirming.take(), None);
        confirming.announced();
        assert_eq!(confirming.take(), Some(100));
    }

    #[test]
    fn a_confirmation_goes_alone_when_nothing_arrives_or_much_has() {
        assert!(owing().go_alone(true, true));
        let mut confirming = owing();
        assert!(!confirming.go_alone(false, true));
        confirming.processed_to(CONFIRMED_BYTES);
        assert!(confirming.go_alone(false, false));
        assert_eq!(confirming.take(), Some(CONFIRMED_BYTES));
        assert!(!confirming.is_alone());
        (0..CONFIRMED_MESSAGES).for_each(|_| confirming.message_processed());
        assert!(confirming.go_alone(false, false));
    }

    #[test]
    fn a_program_that_does_not_answer_is_not_waited_for() {
        let mut confirming = owing();
        let mut next = |position, polled_again, is_drained| {
            confirming.message_processed();
            confirming.processed_to(position);
            let is_time = confirming.go_alone(polled_again, is_drained);
            is_time.then(|| confirming.take());
            is_time
        };
        for position in 1..=u64::from(ALONE_MANY) {
            assert!(!next(100 + position, false, true), "{position}");
            assert!(next(100 + position, true, true));
        }
        assert!(next(200, false, true));
        assert!(!next(201, false, false), "more has arrived");
        confirming.message_sent();
        confirming.message_processed();
        confirming.processed_to(300);
        assert!(!confirming.go_alone(false, true));
    }

    #[test]
    fn only_a_write_of_length_zero_to_the_stag_is_a_confirmation() {
        let mut ulpdu = [0; TAGGED_LEN];
        header(7).emit(&mut ulpdu);
        assert!(is_confirmation_ulpdu(&ulpdu));
        assert!(!is_confirmation_ulpdu(&[&ulpdu[..], b"x"].concat()));
        for at in 0..6 {
            let mut other = ulpdu;
            other[at] ^= 0x40;
            assert!(!is_confirmation_ulpdu(&other), "byte {at}");
        }
    }
}
