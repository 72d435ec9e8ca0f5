//! The parameters on which MPA start-up agreed, with which a queue pair gets its stream.

use std::time::Duration;
use urnic_device::stream::{Attach, attach, rtr};

/// A ready-to-receive indication (RFC 6581 §9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rtr {
    /// Zero-length Send.
    Send,
    /// Zero-length RDMA Write.
    Write,
    /// Zero-length RDMA Read.
    Read,
}

impl Rtr {
    fn from_raw(raw: u32) -> Result<Option<Rtr>, InvalidAttachment> {
        Ok(Some(match raw {
            rtr::NONE => return Ok(None),
            rtr::SEND => Rtr::Send,
            rtr::WRITE => Rtr::Write,
            rtr::READ => Rtr::Read,
            _ => return Err(InvalidAttachment),
        }))
    }
}

/// An [`Attach`] that contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown RTR or flag, or a RTR in the wrong role")]
pub struct InvalidAttachment;

/// The handling of a message that finds no receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutReceive {
    /// The message is an error of the peer; kind UC drops it.
    Refused,
    /// The message waits as long as no receive was taken; after that, it is refused.
    WaitsAtFirst,
    /// The message waits.
    Waits,
}

/// The parameters on which start-up agreed.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// We sent the MPA Request.
    pub initiator: bool,
    /// CRCs in both directions.
    pub crc: bool,
    /// Markers in the stream to the peer.
    pub markers_tx: bool,
    /// Markers in the stream from the peer.
    pub markers_rx: bool,
    /// The handling of a message that finds no receive.
    pub without_receive: WithoutReceive,
    /// The peer's FIN with nothing outstanding does not change the queue pair.
    pub peer_may_close: bool,
    /// A responder may send first, because start-up has shown that its peer is ready.
    pub fence_open: bool,
    /// Requests complete when the peer has placed or delivered them.
    pub delivered: bool,
    /// One inbound Read more than `ird` is accepted.
    pub spare_read: bool,
    /// Most outstanding outbound Reads and atomics of the program.
    pub ord: u32,
    /// Most outstanding outbound Reads and atomics that the peer accepts; 0 = `ord`.
    pub ord_limit: u32,
    /// Most outstanding inbound Reads and atomics.
    pub ird: u32,
    /// First MSN on queue 0 towards the peer.
    pub first_msn: u32,
    /// RTR to send first.
    pub rtr_send: Option<Rtr>,
    /// RTR to expect first.
    pub rtr_expect: Option<Rtr>,
    /// A first message other than `rtr_expect` is an error (row EMPA-21).
    pub strict_rtr: bool,
    /// The time after the peer's FIN at which posted receives are flushed, with `peer_may_close`.
    pub fin_grace: Duration,
    /// Control word of a Terminate to send instead of starting; 0 = none.
    pub terminate: u32,
}

impl Attachment {
    /// The same parameters without CRCs and markers.
    pub fn without_checks(&self) -> Attachment {
        Attachment {
            crc: false,
            markers_tx: false,
            markers_rx: false,
            ..self.clone()
        }
    }
}

impl TryFrom<&Attach> for Attachment {
    type Error = InvalidAttachment;

    fn try_from(arguments: &Attach) -> Result<Attachment, InvalidAttachment> {
        const KNOWN: u32 = attach::INITIATOR
            | attach::CRC
            | attach::MARKERS_TX
            | attach::MARKERS_RX
            | attach::STALL_ON_EMPTY_RQ
            | attach::PEER_MAY_CLOSE
            | attach::STRICT_RTR
            | attach::STALL_AT_FIRST
            | attach::FENCE_OPEN
            | attach::DELIVERED
            | attach::SPARE_READ;
        let flags = arguments.flags.get();
        let has = |flag| flags & flag != 0;
        let rtr_send = Rtr::from_raw(arguments.rtr_send.get())?;
        let rtr_expect = Rtr::from_raw(arguments.rtr_expect.get())?;
        let terminate = u32::try_from(arguments.terminate.get()).map_err(|_| InvalidAttachment)?;
        let wrong_role = if has(attach::INITIATOR) {
            rtr_expect
        } else {
            rtr_send
        };
        if flags & !KNOWN != 0 || wrong_role.is_some() {
            return Err(InvalidAttachment);
        }
        Ok(Attachment {
            initiator: has(attach::INITIATOR),
            crc: has(attach::CRC),
            markers_tx: has(attach::MARKERS_TX),
            markers_rx: has(attach::MARKERS_RX),
            without_receive: match (has(attach::STALL_ON_EMPTY_RQ), has(attach::STALL_AT_FIRST)) {
                (true, _) => WithoutReceive::Waits,
                (false, true) => WithoutReceive::WaitsAtFirst,
                (false, false) => WithoutReceive::Refused,
            },
            peer_may_close: has(attach::PEER_MAY_CLOSE),
            fence_open: has(attach::FENCE_OPEN),
            delivered: has(attach::DELIVERED),
            spare_read: has(attach::SPARE_READ),
            ord: arguments.ord.get(),
            ord_limit: arguments.ord_limit.get(),
            ird: arguments.ird.get(),
            first_msn: arguments.first_msn.get(),
            rtr_send,
            rtr_expect,
            strict_rtr: has(attach::STRICT_RTR),
            fin_grace: Duration::from_millis(arguments.fin_grace_ms.get().into()),
            terminate,
        })
    }
}
