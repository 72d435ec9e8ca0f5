//! Messages that wait for a receive to be posted, where that is waited for (native connections).
//!
//! The program that should post it may itself wait for a Read that it posted before. So answers to
//! our requests pass by; what else comes stays in order behind the message that waits, up to a
//! limit; then the stream is not read any more.

use std::collections::VecDeque;
use urnic_wire::rdmap::Opcode;

/// Bytes that may wait.
const LIMIT: usize = 256 << 10;

/// ULPDUs in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Held {
    ulpdus: VecDeque<(u64, Box<[u8]>)>,
    bytes: usize,
}

impl Held {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ulpdus.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.ulpdus.len()
    }

    /// Whether a ULPDU that begins so must wait behind those that wait.
    #[inline]
    pub(super) fn stops(&self, ulpdu: &[u8]) -> bool {
        const PASSING: [u8; 3] = [
            Opcode::ReadResponse as u8,
            Opcode::AtomicResponse as u8,
            Opcode::Terminate as u8,
        ];
        !self.is_empty()
            && !ulpdu
                .get(1)
                .is_some_and(|control| PASSING.contains(&(control & 0xf)))
    }

    /// Takes a ULPDU in that begins at `position` of the stream, if there is room.
    pub(super) fn keep(&mut self, position: u64, ulpdu: &[u8]) -> bool {
        let room = self.bytes + ulpdu.len() <= LIMIT;
        if room {
            self.bytes += ulpdu.len();
            self.ulpdus.push_back((position, ulpdu.into()));
        }
        room
    }

    /// The one that came first.
    pub(super) fn front(&self) -> Option<&[u8]> {
        self.ulpdus.front().map(|(_, ulpdu)| &**ulpdu)
    }

    /// Where it begins in the stream.
    #[inline]
    pub(super) fn position(&self) -> Option<u64> {
        self.ulpdus.front().map(|(position, _)| *position)
    }

    /// Removes the oldest message, which need not wait any more.
    pub(super) fn release(&mut self) {
        if let Some((_, ulpdu)) = self.ulpdus.pop_front() {
            self.bytes -= ulpdu.len();
        }
    }

    pub(super) fn clear(&mut self) {
        self.ulpdus.clear();
        self.bytes = 0;
    }
}
