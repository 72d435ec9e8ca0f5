//! RoCE v2's connections (InfiniBand Architecture Specification vol. 1, §9.7 and §9.8) without
//! I/O: what arrives and the time go in, packets to send and what the caller must do come out.
//!
//! * [`requester`]: the send queue of a reliable connection. It cuts messages into packets, sends
//!   them again when they are lost, and completes messages in order;
//! * [`responder`]: the other end of the same. It says what a request does to receives and memory,
//!   acknowledges, and answers Reads and atomic operations;
//! * [`unreliable`]: both ends of an unreliable connection (UC);
//! * [`message`]: messages, and how they are cut into packets.
//!
//! The caller owns queues, memory and completions: no function here touches a byte of a message. It
//! parses and emits packets with [`urnic_wire::roce`], and passes those parts of a header that
//! matter. Time is nanoseconds of any clock that does not go back. Packets need no allocation: the
//! queues have their room from the beginning.

#![forbid(unsafe_code)]

mod assembly;
pub mod message;
pub mod requester;
pub mod responder;
#[cfg(test)]
mod tests;
pub mod unreliable;
mod window;
