//! RPC-over-RDMA version one on any RDMA device that libibverbs sees: [`urnic_rpc_rdma`]'s engines, and librdmacm and libibverbs to carry
//! out what they say.
//!
//! A [`Client`] calls and a [`Server`] has a [`Service`] answer. The server may call as well, backward, over the connections that its clients made:
//! [`Caller`] is its way to one of them, and [`Options::callbacks`] answers there.
//!
//! Both libraries are loaded when the program starts, so that it builds and runs, without RDMA, where they are not installed.

mod backward;
mod client;
pub mod crowd;
mod dispatch;
mod endpoint;
mod error;
mod lock;
pub mod memory;
mod options;
mod patience;
mod peer;
mod server;
pub mod service;
pub mod shares;
mod verbs;
mod xid;

pub use backward::Caller;
pub use client::{Answer, Call, Client};
pub use error::Error;
pub use memory::{Buffer, Pool, Slice};
pub use options::Options;
pub use server::Server;
pub use service::{Request, Response, Service};
pub use shares::Shares;
