//! Connection management, without I/O: bytes, commands and times in, bytes, events and changes of
//! queue pairs out.
//!
//! * [`mpa_startup`]: the Request and Reply frames, the MPA fence and RTR (RFC 5044 §7.1, RFC
//!   6581);
//! * [`ddp_session`]: the same over SCTP (RFC 5043 §6, RFC 6581 §7);
//! * [`ib_cm`]: the communication manager of RoCE (InfiniBand Architecture Specification §12);
//! * [`startup`]: either of them, as the engines of the next two use it;
//! * [`native`]: queue pairs that a program connects by `ibv_modify_qp` alone;
//! * [`rdma_cm`]: the connection manager's commands and events.

#![forbid(unsafe_code)]

pub mod carrier;
pub mod ddp_session;
pub mod ib_cm;
pub mod mpa_startup;
pub mod native;
pub mod qp_attr;
mod random;
pub mod rdma_cm;
pub mod startup;
pub mod timeouts;
mod timers;
