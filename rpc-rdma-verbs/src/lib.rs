//! RPC-over-RDMA version one on any RDMA device that libibverbs sees: [`urnic_rpc_rdma`]'s engines, and librdmacm and libibverbs to carry
//! out what they say.
//!
//! Both libraries are loaded when the program starts, so that it builds and runs, without RDMA, where they are not installed.

pub mod memory;
pub mod service;

pub use memory::{Buffer, Pool, Slice};
pub use service::{Request, Response, Service};
