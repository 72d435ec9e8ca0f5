//! The device as a PCI function of another process: a vfio-user server.
//!
//! Each connection is a function of its own, with a thread that reads its messages, serves its doorbell pages and drives its device.
//!
//! | | |
//! |---|---|
//! | [`function`] | messages in, replies out; knows no I/O |
//! | [`config_space`], [`vectors`], [`ledger`] | its parts: configuration space, interrupts, which memory is lent |
//! | [`memory`], [`remote`], [`faults`] | the client's memory: mapped here, or copied on each access; and when it vanishes |
//! | [`link`] | the socket: messages both ways, replies to whoever waits for them |
//! | [`session`], [`server`] | the rim: a connection's thread, and the sockets |

mod config_space;
mod endpoint;
mod faults;
mod function;
mod ledger;
mod link;
mod memory;
mod remote;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod vectors;

pub use endpoint::Endpoint;
pub use server::{ServeError, Server};
