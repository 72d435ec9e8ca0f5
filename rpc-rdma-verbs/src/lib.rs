//! RPC-over-RDMA version one on any RDMA device that libibverbs sees: [`urnic_rpc_rdma`]'s engines, and librdmacm and libibverbs to carry
//! out what they say.
//!
//! Both libraries are loaded when the program starts, so that it builds and runs, without RDMA, where they are not installed.

mod client;
mod endpoint;
pub mod memory;
mod options;
mod server;
pub mod service;
mod verbs;

pub use client::{Answer, Call, Client};
pub use memory::{Buffer, Pool, Slice};
pub use options::{Error, Options};
pub use server::Server;
pub use service::{Request, Response, Service};
