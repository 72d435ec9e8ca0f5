//! Management datagrams of the communication manager (InfiniBand Architecture Specification vol. 1,
//! §12 and §13.4). They are the payload of datagrams to queue pair 1. By SIDR_REQ and SIDR_REP the
//! two ends of rdma_cm find each other's queue pairs of kind UD; the other messages connect queue
//! pairs of kind RC.
//!
//! ```text
//! MAD       header(24) message(232)
//! SIDR_REQ  request(4) P_Key(2) reserved(2) service(8) private data(216)
//! SIDR_REP  request(4) status(1) reserved(3) QPN(3) reserved(1) service(8) Q_Key(4)
//!           additional information(72) private data(136)
//!
//! REQ   local id(4) reserved(4) service(8) CA GUID(8) reserved(4) Q_Key(4) QPN(3) in(1) EECN(3)
//!       out(1) EECN(3) timeout, kind, flow control(1) PSN(3) timeout, retries(1) P_Key(2)
//!       MTU, RNR retries(1) CM retries, SRQ(1) path(44) alternate path(44) private data(92)
//! MRA   ids(8) message(1) timeout(1) private data(222)
//! REJ   ids(8) message(1) length(1) reason(2) additional information(72) private data(148)
//! REP   ids(8) Q_Key(4) QPN(3) reserved(1) EECN(3) reserved(1) PSN(3) reserved(1) in(1) out(1)
//!       delay, failover, flow control(1) RNR retries, SRQ(1) CA GUID(8) private data(196)
//! RTU   ids(8) private data(224)
//! DREQ  ids(8) QPN(3) reserved(1) private data(220)
//! DREP  ids(8) private data(224)
//! path  LIDs(4) GIDs(32) flow label, rate(4) traffic class(1) hop limit(1) SL(1) timeout(1)
//! ```
//!
//! The private data of a SIDR_REQ or REQ of rdma_cm begins with an [`IpAddressing`].

mod addressing;
mod bits;
mod connect;
mod connection;
mod header;
mod ids;
mod path;
mod reject;
mod sidr;

pub use addressing::{IP_ADDRESSING_LEN, IpAddressing};
pub use connect::{CONNECT_PRIVATE_DATA, ConnectRequest, TransportService};
pub use connection::{
    CONNECT_REPLY_PRIVATE_DATA, ConnectReply, DISCONNECT_PRIVATE_DATA, DISCONNECT_REPLY_PRIVATE_DATA,
    DisconnectReply, DisconnectRequest, READY_PRIVATE_DATA, RECEIPT_PRIVATE_DATA, ReadyToUse, ReceiptAck,
};
pub use header::{MAD_LEN, MANAGEMENT_QKEY, MANAGEMENT_QPN, Mad, MadError, Message, parse};
pub use ids::CommIds;
pub use path::{ConnectionPath, PERMISSIVE_LID};
pub use reject::{
    About, ConnectReject, REJECT_INFORMATION, REJECT_PRIVATE_DATA, RejectInformation, RejectReason,
};
pub use sidr::{
    REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceReply, ServiceRequest, ServiceStatus, service_id,
};
