//! The device as a PCI function of another process: a vfio-user server.
//!
//! Each connection is a function of its own, with a thread that reads its messages, serves its
//! doorbell pages and drives its device.
//!
//! | | |
//! |---|---|
//! | [`function`] | messages in, replies out; no I/O |
//! | [`config_space`], [`vectors`], [`ledger`] | parts of the function: configuration space,
//! interrupts, the memory that the client passed |
//! | [`memory`], [`block`], [`remote`], [`faults`] | the client's memory: mapped here, or copied on each access; faults when it vanishes |
//! | [`passed`], [`interruption`], [`closer`] | the kinds of descriptors, and the code that keeps
//! threads from waiting for one forever |
//! | [`link`] | the socket: messages both ways, replies to the threads that wait for them |
//! | [`session`], [`server`] | the threads and sockets: a connection's thread, and the listening sockets |

mod block;
mod closer;
mod config_space;
mod endpoint;
mod faults;
mod function;
mod interruption;
mod ledger;
mod link;
mod memory;
mod passed;
mod remote;
mod server;
mod session;
#[cfg(any(test, fuzzing))]
mod testing;
#[cfg(test)]
mod tests;
mod vectors;

pub use endpoint::Endpoint;
pub use server::{ServeError, Server};
#[cfg(fuzzing)]
pub use testing::shared_ring;
