//! RPC-over-RDMA version one on any RDMA device of libibverbs. The engines of [`urnic_rpc_rdma`]
//! decide, and this crate executes their actions by librdmacm and libibverbs.
//!
//! A [`Client`] calls, and a [`Service`] of a [`Server`] answers. A server may also make backward
//! calls over the connections of its clients: a [`Backchannel`] calls one client, and
//! [`Options::callbacks`] answers there.
//!
//! Both libraries are loaded when the program starts. The program therefore builds and runs without
//! them, but has no RDMA.

mod adaptive_polling;
mod backward;
mod client;
mod dispatch;
mod endpoint;
mod error;
pub mod eviction;
pub mod memory;
mod options;
mod peer;
mod server;
pub mod service;
pub mod shares;
mod verbs;
mod xid;

pub use backward::Backchannel;
pub use client::{Answer, Call, Client};
pub use error::Error;
pub use memory::{Buffer, Pool, Slice};
pub use options::Options;
pub use server::Server;
pub use service::{Request, Response, Service};
pub use shares::Shares;
