//! An NFSv3 server (RFC 1813) and the parts of a client, over TCP and RPC-over-RDMA.
//!
//! [`Server`] is a [`service::Service`]: it takes calls and returns replies, on any thread. The
//! data of READ and WRITE stays apart from the messages, in [`memory`] that a transport can send
//! from and receive into. [`tcp`] is one transport. The server serves a [`tree::Tree`].

#![forbid(unsafe_code)]

pub mod acl;
pub mod binding;
pub mod call;
pub mod client;
mod duplicates;
pub mod mount3;
pub mod nfs3;
pub mod nfsacl;
pub mod rdma;
pub mod rpc;
pub mod rpcbind;
mod server;
pub use urnic_rpc_rdma_verbs::{memory, service, shares};
pub mod tcp;
pub mod tree;
pub mod xdr;

pub use server::{Options, Server};
