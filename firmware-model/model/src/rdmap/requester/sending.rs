//! A request on its way, and what is there before it.

use crate::queues::SendWqe;
use crate::rdmap::placement::Cursor;
use urnic_device::wqe::Opcode;

/// A work request whose messages are partly framed.
#[derive(Debug, Clone)]
pub(super) struct Sending {
    pub(super) wqe: SendWqe,
    /// Bytes of its payload.
    pub(super) len: u32,
    /// Bytes of the work request that are framed.
    pub(super) sent: u32,
    pub(super) cursor: Cursor,
    /// Whether the immediate before the payload is framed.
    pub(super) immediate_sent: bool,
    /// Whether the payload is framed, or placed, to its end.
    pub(super) payload_done: bool,
    /// The number of the peer's receive that was filled, at least in part; or 0.
    pub(super) receive: u32,
    /// Whether a segment of the payload is framed.
    pub(super) framed: bool,
}

impl Sending {
    #[inline]
    pub(super) fn new(wqe: SendWqe, len: u32) -> Sending {
        Sending {
            len,
            sent: 0,
            cursor: Cursor::default(),
            immediate_sent: wqe.opcode != Opcode::SendImm,
            payload_done: false,
            receive: 0,
            framed: false,
            wqe,
        }
    }
}

/// Requests that are next, and whose payload is in the peer's receives already.
#[derive(Debug, Default)]
pub(super) struct Filled {
    requests: u32,
    /// The number of the receive that has the first one's payload.
    receive: u32,
}

impl Filled {
    /// So many requests, and the first one's receive.
    pub(super) fn new(requests: u32, receive: u32) -> Filled {
        Filled { requests, receive }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.requests == 0
    }

    /// The receive that has the payload of the next request, which is then no longer one of them.
    #[inline]
    pub(super) fn next(&mut self) -> Option<u32> {
        self.requests = self.requests.checked_sub(1)?;
        let receive = self.receive;
        self.receive = receive.wrapping_add(1);
        Some(receive)
    }
}
