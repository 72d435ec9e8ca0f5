//! An NFSv3 server (RFC 1813) and what a client needs, over TCP and RPC-over-RDMA.
//!
//! [`Server`] is a [`service::Service`]: a call goes in, a reply comes out, on any thread, and the
//! data of READ and WRITE stay apart from the messages, in [`memory`] that a transport can send
//! from and receive into. [`tcp`] is one transport. What is served is a [`tree::Tree`].

#![forbid(unsafe_code)]

pub mod acl;
pub mod binding;
pub mod call;
pub mod client;
mod duplicates;
mod lock;
pub mod mount3;
pub mod nfs3;
pub mod nfsacl;
pub mod rdma;
pub mod rpc;
mod server;
pub use urnic_rpc_rdma_verbs::{memory, service, shares};
pub mod tcp;
pub mod tree;
pub mod xdr;

pub use server::{Options, Server};
