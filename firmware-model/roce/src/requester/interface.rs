//! What goes into a requester, and what comes out.

use crate::message::Mtu;
use urnic_wire::roce::{Psn, Request};

/// The attributes of a send queue, as `ibv_modify_qp` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Path MTU.
    pub mtu: Mtu,
    /// PSN of the first packet, which the peer expects.
    pub first_psn: Psn,
    /// Local ACK Timeout, as its code; 0 disables it.
    pub timeout: u8,
    /// How many times in succession a packet is sent again after a loss or timeout.
    pub retry_cnt: u8,
    /// How many times in succession a message is sent again after an RNR NAK; 7 is no limit.
    pub rnr_retry: u8,
    /// Reads and atomic operations in flight at most, which the responder has resources for.
    pub max_rd_atomic: u8,
    /// Packets in flight at most, those of Read responses included.
    pub window: u32,
    /// Messages for which there is room from the beginning.
    pub depth: usize,
}

/// How a message ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The responder acknowledged it, or its data are there.
    Success,
    /// `IBV_WC_RETRY_EXC_ERR`: the peer was silent, or packets were lost, more than `retry_cnt`
    /// times.
    RetryExceeded,
    /// `IBV_WC_RNR_RETRY_EXC_ERR`: the peer had no receive more than `rnr_retry` times.
    RnrRetryExceeded,
    /// `IBV_WC_REM_INV_REQ_ERR`: the responder found the request invalid.
    RemoteInvalidRequest,
    /// `IBV_WC_REM_ACCESS_ERR`: the responder's memory or rights did not permit it.
    RemoteAccess,
    /// `IBV_WC_REM_OP_ERR`: the responder could not complete it.
    RemoteOperation,
    /// `IBV_WC_BAD_RESP_ERR`: a response did not fit the request.
    BadResponse,
    /// `IBV_WC_LOC_PROT_ERR`: the caller refused it, see [`refuse`](super::Requester::refuse).
    Local,
    /// `IBV_WC_WR_FLUSH_ERR`: a message before it failed.
    Flushed,
}

/// The end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// [`Message::id`](crate::message::Message::id).
    pub id: u64,
    /// How it ended.
    pub status: Status,
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// [`Message::id`](crate::message::Message::id).
    pub id: u64,
    /// Packet sequence number.
    pub psn: Psn,
    /// Opcode and extended headers.
    pub request: Request,
    /// Where the payload begins in the message.
    pub offset: u32,
    /// Bytes of payload.
    pub length: u32,
    /// SE of the header.
    pub solicited: bool,
    /// A of the header.
    pub ack_request: bool,
    /// The packet was sent before.
    pub repeated: bool,
}

/// What the caller does for a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The payload of the packet belongs at `offset` of the memory of a Read.
    Place {
        /// [`Message::id`](crate::message::Message::id).
        id: u64,
        /// Bytes from the beginning of the message.
        offset: u32,
    },
    /// An atomic operation was executed.
    Original {
        /// [`Message::id`](crate::message::Message::id).
        id: u64,
        /// The value before it.
        value: u64,
    },
}
