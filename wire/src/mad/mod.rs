//! Management datagrams of the communication manager (InfiniBand Architecture Specification vol. 1,
//! §12 and §13.4): the messages by which the two ends of rdma_cm find each other's queue pairs of
//! kind UD. They are the payload of datagrams to queue pair 1.
//!
//! ```text
//! MAD       header(24) message(232)
//! SIDR_REQ  request(4) P_Key(2) reserved(2) service(8) private data(216)
//! SIDR_REP  request(4) status(1) reserved(3) QPN(3) reserved(1) service(8) Q_Key(4)
//!           additional information(72) private data(136)
//! ```
//!
//! The private data of a request of rdma_cm begins with an [`IpAddressing`].

mod addressing;
mod header;
mod sidr;

pub use addressing::{IP_ADDRESSING_LEN, IpAddressing};
pub use header::{MAD_LEN, MANAGEMENT_QKEY, MANAGEMENT_QPN, Mad, MadError, Message, parse};
pub use sidr::{
    REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceReply, ServiceRequest, ServiceStatus, service_id,
};
