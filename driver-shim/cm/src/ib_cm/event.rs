//! What the communication manager sends, and what it tells the owner of its connections.

use urnic_wire::mad::{ConnectReply, ConnectRequest, IP_ADDRESSING_LEN, IpAddressing, Mad, RejectReason};

use super::peer::Route;

/// An output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a message to queue pair 1 of the peer.
    Send(Route, Box<Mad>),
    /// Something happened to a connection.
    Event(u32, Event),
}

/// What happened to a connection. In the comments: the events of rdma_cm that it becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer requests this new connection: `CONNECT_REQUEST`.
    Requested(Box<Requested>),
    /// The peer accepted: `CONNECT_RESPONSE`.
    Accepted(Box<Accepted>),
    /// The peer's queue pair is ready: `ESTABLISHED` at the passive end. The private data is that
    /// of the RTU, if one has arrived.
    Established(Vec<u8>),
    /// The connection did not come about, or ended without a DREQ: `REJECTED`, with the number of
    /// the reason as its status. The owner's queue pair is to go to the error state.
    Rejected {
        /// The reason.
        reason: RejectReason,
        /// From the peer's program.
        private_data: Vec<u8>,
    },
    /// No answer, however often it was requested: `UNREACHABLE`.
    Unreachable,
    /// The connection has ended: `DISCONNECTED`. The owner's queue pair is to go to the error
    /// state.
    Disconnected {
        /// The peer did not answer the DREQ: the status is `-ETIMEDOUT`.
        timed_out: bool,
    },
    /// No packet of the connection can arrive any more: `TIMEWAIT_EXIT`. The connection's number is
    /// free.
    TimeWaitExit,
}

/// A peer's request. Depths are as this end sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requested {
    /// The addresses of the messages.
    pub route: Route,
    /// The service.
    pub service_id: u64,
    /// The addresses that the requester gives: its port is the one of its id.
    pub addressing: IpAddressing,
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// Maximum number of inbound Reads.
    pub responder_resources: u8,
    /// Maximum number of outbound Reads.
    pub initiator_depth: u8,
    /// The peer implements end-to-end flow control.
    pub flow_control: bool,
    /// Retries of requests that are not acknowledged.
    pub retry_count: u8,
    /// Retries while no receive is posted.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// Traffic class of the connection's packets.
    pub traffic_class: u8,
    /// The program's private data, with zeros after it.
    pub private_data: Vec<u8>,
}

impl Requested {
    /// `None` if the private data does not begin with the addresses of rdma_cm.
    pub(super) fn new(route: Route, request: &ConnectRequest) -> Option<Requested> {
        Some(Requested {
            route,
            service_id: request.service_id,
            addressing: IpAddressing::parse(&request.private_data)?,
            remote_qpn: request.qpn,
            responder_resources: request.initiator_depth,
            initiator_depth: request.responder_resources,
            flow_control: request.flow_control,
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
            srq: request.srq,
            traffic_class: request.primary_path.traffic_class,
            private_data: request.private_data[IP_ADDRESSING_LEN..].to_vec(),
        })
    }
}

/// A peer's acceptance. Depths are as this end sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// Maximum number of inbound Reads.
    pub responder_resources: u8,
    /// Maximum number of outbound Reads.
    pub initiator_depth: u8,
    /// The peer implements end-to-end flow control.
    pub flow_control: bool,
    /// Retries while no receive is posted.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// The program's private data, with zeros after it.
    pub private_data: Vec<u8>,
}

impl From<&ConnectReply> for Accepted {
    fn from(reply: &ConnectReply) -> Accepted {
        Accepted {
            remote_qpn: reply.qpn,
            responder_resources: reply.initiator_depth,
            initiator_depth: reply.responder_resources,
            flow_control: reply.flow_control,
            rnr_retry_count: reply.rnr_retry_count,
            srq: reply.srq,
            private_data: reply.private_data.to_vec(),
        }
    }
}
