//! A stream that keeps the boundaries of messages (DDP over SCTP, RFC 5043): a ULPDU is a message,
//! with no framing.

use crate::llp::buffers::BufferPool;
use crate::llp::mpa::Filled;
use crate::llp::queue::{self, UlpduQueue};
use crate::llp::ulpdu::LlpError;
use crate::stream::{Stream, StreamError};

/// Most bytes of ULPDUs that wait for the stream: what the peer cannot take yet is not framed.
const BACKLOG: u64 = 64 << 10;

/// Both directions of one stream.
#[derive(Debug)]
pub(crate) struct Messages {
    mulpdu: usize,
    /// What the stream has not taken.
    pub(crate) tx: UlpduQueue,
    /// What was not handed up.
    pub(crate) rx: UlpduQueue,
}

impl Messages {
    /// The messages of a stream, each at most as long as the stream says.
    pub(crate) fn new(stream: &dyn Stream) -> Messages {
        Messages {
            mulpdu: (stream.mss() as usize).min(queue::MULPDU),
            tx: UlpduQueue::default(),
            rx: UlpduQueue::default(),
        }
    }

    #[inline]
    pub(crate) fn mulpdu(&self) -> usize {
        self.mulpdu
    }

    #[cfg(test)]
    pub(crate) fn set_mulpdu(&mut self, mulpdu: usize) {
        self.mulpdu = mulpdu.min(queue::MULPDU);
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.tx.has_room() && self.tx.sealed() - self.tx.position() < BACKLOG
    }

    /// Passes ULPDUs to the stream; `false` if the stream takes no more for now.
    pub(crate) fn flush(&mut self, stream: &mut dyn Stream, calls: &mut u64) -> Result<bool, LlpError> {
        while let Some(ulpdu) = self.tx.front() {
            *calls += 1;
            match stream.send_bytes(ulpdu) {
                Ok(_) => self.tx.consume(),
                Err(StreamError::WouldBlock) => {
                    self.tx.compact();
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Takes messages from the stream; returns their bytes.
    pub(crate) fn fill(
        &mut self,
        buffers: &BufferPool,
        stream: &mut dyn Stream,
    ) -> Result<(usize, Filled), LlpError> {
        if !self.rx.can_append() {
            self.rx.compact();
        }
        let mut bytes = 0;
        while self.rx.can_append() {
            match self.rx.append(buffers, |room| stream.receive_message(room)) {
                Ok(0) if bytes == 0 => return Ok((0, Filled::Fin)),
                // The end is read again by the next call.
                Ok(0) => break,
                Ok(len) => bytes += len,
                Err(StreamError::WouldBlock) if bytes == 0 => return Ok((0, Filled::Nothing)),
                Err(StreamError::WouldBlock) => return Ok((bytes, Filled::Short)),
                // What came before the error is handed up first.
                Err(_) if bytes > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok((bytes, Filled::All))
    }
}
