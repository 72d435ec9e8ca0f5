//! The parts of a call and of its reply that go by chunk (RFC 8166 §3.5, §4.3).

use super::{Call, CallError, Item, Terms};
use crate::header::MIN_LEN;
use crate::payload::padding;

/// The memory that a requester exposes for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Arguments go by Read chunks.
    pub(super) read_arguments: bool,
    /// The call itself goes by the position-zero Read chunk.
    pub(super) long_call: bool,
    /// Results come by Write chunks.
    pub(super) write_results: bool,
    /// The reply may come by a Reply chunk.
    pub(super) long_reply: bool,
}

/// Bytes of a Read list entry, of a segment, and of the words around a Write chunk.
const READ: usize = 24;
const SEGMENT: usize = 16;
const CHUNK: usize = 8;

impl Plan {
    /// The plan for `call`, in which each exposed memory area has at most `segments` segments.
    ///
    /// # Errors
    /// [`CallError::TooLong`] if no plan fits: the messages are too long for inline Sends, and
    /// chunks are not sufficient or `chunks` forbids them.
    pub(super) fn of<M>(
        call: &Call<M>,
        terms: &Terms,
        segments: usize,
        chunks: bool,
    ) -> Result<Self, CallError> {
        let chunk = CHUNK + segments * SEGMENT;
        // The reply comes first, with all results inline.
        let mut plan = Self {
            read_arguments: false,
            long_call: false,
            write_results: false,
            long_reply: false,
        };
        let mut lists = 0;
        if MIN_LEN + inline(&call.results) + call.max_reply.min(terms.receive) > terms.receive {
            plan.write_results = !call.results.is_empty();
            lists = call.results.len() * chunk;
            // RFC 8166 §4.3.3: Transport and Payload stream together.
            if MIN_LEN + lists + call.max_reply.min(terms.receive) > terms.receive {
                plan.long_reply = true;
                lists += chunk;
            }
        }
        // The call comes next. It carries the same lists.
        let header = MIN_LEN + lists;
        let message = call.message.len();
        if header + message + inline(&call.arguments) > terms.send {
            plan.read_arguments = !call.arguments.is_empty();
            let mut header = header + call.arguments.len() * segments * READ;
            if header + message > terms.send {
                plan.long_call = true;
                header += segments * READ;
                if header > terms.send {
                    return Err(CallError::TooLong);
                }
            }
        }
        if plan.any() && !chunks {
            return Err(CallError::TooLong);
        }
        Ok(plan)
    }

    pub(super) const fn any(&self) -> bool {
        self.read_arguments || self.long_call || self.write_results || self.long_reply
    }
}

/// Bytes of the items in a message, with their padding.
fn inline<M>(items: &[Item<M>]) -> usize {
    items
        .iter()
        .map(|item| item.len as usize + padding(u64::from(item.len)))
        .sum()
}
