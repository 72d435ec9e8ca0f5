//! The messages about a connection that both ends know: REP, RTU, MRA, DREQ, DREP (§12.6 of the
//! InfiniBand Architecture Specification).

use super::bits::{bits, placed, upper24, word24};
use super::ids::{CommIds, IdsLayout};
use super::reject::About;
use core::fmt;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of private data of [`ConnectReply`].
pub const CONNECT_REPLY_PRIVATE_DATA: usize = 196;
/// Bytes of private data of [`ReadyToUse`].
pub const READY_PRIVATE_DATA: usize = 224;
/// Bytes of private data of [`ReceiptAck`].
pub const RECEIPT_PRIVATE_DATA: usize = 222;
/// Bytes of private data of [`DisconnectRequest`].
pub const DISCONNECT_PRIVATE_DATA: usize = 220;
/// Bytes of private data of [`DisconnectReply`].
pub const DISCONNECT_REPLY_PRIVATE_DATA: usize = 224;

/// A request for a connection is accepted: REP, §12.6.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectReply {
    /// The numbers of the connection.
    pub ids: CommIds,
    /// Q_Key; reliable connections have none.
    pub qkey: u32,
    /// The sender's queue pair, 24 bits.
    pub qpn: u32,
    /// The sender's end-to-end context, 24 bits: of the reliable datagram service only.
    pub eecn: u32,
    /// The first PSN that the recipient sends, 24 bits.
    pub starting_psn: u32,
    /// Number of the recipient's Reads and atomics that the sender accepts at a time.
    pub responder_resources: u8,
    /// Number of Reads and atomics that the sender will have outstanding.
    pub initiator_depth: u8,
    /// Maximum time until the sender's adapter acknowledges: 4.096 µs · 2^n, n of 5 bits.
    pub target_ack_delay: u8,
    /// 0: the alternate path is accepted; 1: not supported; 2: refused.
    pub failover_accepted: u8,
    /// The sender implements end-to-end flow control.
    pub flow_control: bool,
    /// Retries while no receive is posted, 3 bits; 7: no limit.
    pub rnr_retry_count: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// GUID of the sender's channel adapter.
    pub ca_guid: u64,
    /// From the service.
    pub private_data: [u8; CONNECT_REPLY_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReplyLayout {
    ids: IdsLayout,
    qkey: U32,
    /// QPN (24), reserved (8).
    qpn: U32,
    /// EECN (24), reserved (8).
    eecn: U32,
    /// Starting PSN (24), reserved (8).
    psn: U32,
    responder_resources: u8,
    initiator_depth: u8,
    /// Target ACK delay (5), failover accepted (2), flow control (1).
    delay: u8,
    /// RNR retry count (3), SRQ (1), reserved (4).
    retries: u8,
    ca_guid: U64,
    private_data: [u8; CONNECT_REPLY_PRIVATE_DATA],
}

impl ConnectReply {
    pub(super) const LEN: usize = size_of::<ReplyLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = ReplyLayout {
            ids: self.ids.layout(),
            qkey: self.qkey.into(),
            qpn: word24(self.qpn, 0),
            eecn: word24(self.eecn, 0),
            psn: word24(self.starting_psn, 0),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            delay: placed(self.target_ack_delay, 3, 5)
                | placed(self.failover_accepted, 1, 2)
                | placed(self.flow_control.into(), 0, 1),
            retries: placed(self.rnr_retry_count, 5, 3) | placed(self.srq.into(), 4, 1),
            ca_guid: self.ca_guid.into(),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ConnectReply> {
        let layout = ReplyLayout::ref_from_bytes(body).ok()?;
        Some(ConnectReply {
            ids: CommIds::of(&layout.ids),
            qkey: layout.qkey.get(),
            qpn: upper24(layout.qpn),
            eecn: upper24(layout.eecn),
            starting_psn: upper24(layout.psn),
            responder_resources: layout.responder_resources,
            initiator_depth: layout.initiator_depth,
            target_ack_delay: bits(layout.delay, 3, 5),
            failover_accepted: bits(layout.delay, 1, 2),
            flow_control: bits(layout.delay, 0, 1) == 1,
            rnr_retry_count: bits(layout.retries, 5, 3),
            srq: bits(layout.retries, 4, 1) == 1,
            ca_guid: layout.ca_guid.get(),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ConnectReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "REP {}: qp 0x{:06x}, psn 0x{:06x}, depths {} in {} out",
            self.ids, self.qpn, self.starting_psn, self.responder_resources, self.initiator_depth
        )
    }
}

/// The initiator's queue pair is ready: RTU, §12.6.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyToUse {
    /// The numbers of the connection.
    pub ids: CommIds,
    /// From the initiator.
    pub private_data: [u8; READY_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReadyLayout {
    ids: IdsLayout,
    private_data: [u8; READY_PRIVATE_DATA],
}

impl ReadyToUse {
    pub(super) const LEN: usize = size_of::<ReadyLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = ReadyLayout {
            ids: self.ids.layout(),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ReadyToUse> {
        let layout = ReadyLayout::ref_from_bytes(body).ok()?;
        Some(ReadyToUse {
            ids: CommIds::of(&layout.ids),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ReadyToUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RTU {}", self.ids)
    }
}

/// A message has arrived, and its answer takes longer: MRA, §12.6.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiptAck {
    /// The numbers of the connection.
    pub ids: CommIds,
    /// The message that has arrived.
    pub about: About,
    /// The time until the answer: 4.096 µs · 2^n, n of 5 bits.
    pub service_timeout: u8,
    /// For the recipient.
    pub private_data: [u8; RECEIPT_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReceiptLayout {
    ids: IdsLayout,
    /// Message (2), reserved (6).
    about: u8,
    /// Service timeout (5), reserved (3).
    timeout: u8,
    private_data: [u8; RECEIPT_PRIVATE_DATA],
}

impl ReceiptAck {
    pub(super) const LEN: usize = size_of::<ReceiptLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = ReceiptLayout {
            ids: self.ids.layout(),
            about: placed(self.about.0, 6, 2),
            timeout: placed(self.service_timeout, 3, 5),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ReceiptAck> {
        let layout = ReceiptLayout::ref_from_bytes(body).ok()?;
        Some(ReceiptAck {
            ids: CommIds::of(&layout.ids),
            about: About(bits(layout.about, 6, 2)),
            service_timeout: bits(layout.timeout, 3, 5),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ReceiptAck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "MRA {}: {} has arrived, timeout code {}",
            self.ids, self.about, self.service_timeout
        )
    }
}

/// The sender ends the connection: DREQ, §12.6.10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DisconnectRequest {
    /// The numbers of the connection.
    pub ids: CommIds,
    /// The recipient's queue pair, 24 bits.
    pub remote_qpn: u32,
    /// For the recipient.
    pub private_data: [u8; DISCONNECT_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct DisconnectLayout {
    ids: IdsLayout,
    /// QPN (24), reserved (8).
    remote_qpn: U32,
    private_data: [u8; DISCONNECT_PRIVATE_DATA],
}

impl DisconnectRequest {
    pub(super) const LEN: usize = size_of::<DisconnectLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = DisconnectLayout {
            ids: self.ids.layout(),
            remote_qpn: word24(self.remote_qpn, 0),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<DisconnectRequest> {
        let layout = DisconnectLayout::ref_from_bytes(body).ok()?;
        Some(DisconnectRequest {
            ids: CommIds::of(&layout.ids),
            remote_qpn: upper24(layout.remote_qpn),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for DisconnectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DREQ {}: qp 0x{:06x}", self.ids, self.remote_qpn)
    }
}

/// The connection has ended at the sender, too: DREP, §12.6.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DisconnectReply {
    /// The numbers of the connection.
    pub ids: CommIds,
    /// For the recipient.
    pub private_data: [u8; DISCONNECT_REPLY_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct DisconnectReplyLayout {
    ids: IdsLayout,
    private_data: [u8; DISCONNECT_REPLY_PRIVATE_DATA],
}

impl DisconnectReply {
    pub(super) const LEN: usize = size_of::<DisconnectReplyLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = DisconnectReplyLayout {
            ids: self.ids.layout(),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<DisconnectReply> {
        let layout = DisconnectReplyLayout::ref_from_bytes(body).ok()?;
        Some(DisconnectReply {
            ids: CommIds::of(&layout.ids),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for DisconnectReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DREP {}", self.ids)
    }
}
