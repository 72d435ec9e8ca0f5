//! SCTP associations for DDP (RFC 5043), without I/O: packets and time in; packets, messages and
//! events out. Packets go in UDP datagrams (RFC 6951), which the caller sends and receives.
//!
//! SCTP itself is the crate `dcsctp`, which is made for WebRTC: there DTLS has proved who the peer
//! is before SCTP begins. What is missing for peers that nobody has proved is here:
//!
//! * [`completion`]: the Adaptation Indication in INIT and INIT ACK, and the authentication of
//!   cookies, so that an INIT costs no memory and a COOKIE ECHO shows that the peer receives at its
//!   address (RFC 9260 §5.1.3);
//! * [`endpoint`]: the associations of a UDP port, their limits, and the end of one whose peer does
//!   what DDP does not permit, or is silent;
//! * `association`: messages that are never split, and an end that waits for all of them;
//! * `reopening`: a peer learns at once that the receive window is open again;
//! * [`order`]: the messages of a DDP stream, which come in any order, in that of their DDP-SSN.

#![forbid(unsafe_code)]

mod association;
pub mod completion;
pub mod endpoint;
mod in_flight;
mod interface;
pub mod order;
mod reopening;
mod settings;
#[cfg(test)]
mod tests;
mod unsent;
