//! What an endpoint and its program tell each other.

use std::net::SocketAddr;

use urnic_wire::sctp::chunk::Contents;

/// An association of an endpoint, by its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AssociationId(pub u64);

/// The other end of an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The UDP address.
    pub address: SocketAddr,
    /// The SCTP port.
    pub port: u16,
}

/// What happened to an association.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer began it.
    Accepted(AssociationId, Peer),
    /// One that was begun here is established.
    Connected(AssociationId),
    /// Messages can be [taken](crate::endpoint::Endpoint::take).
    Readable(AssociationId),
    /// Its peer has another UDP address now.
    Moved(AssociationId, Peer),
    /// It has ended, for this reason.
    Ended(AssociationId, Reason),
}

/// Why an association ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// One end ended it in order, after all messages.
    #[error("the SCTP association was closed")]
    Closed,
    /// The peer aborted it.
    #[error("the peer aborted the SCTP association")]
    Aborted,
    /// The peer does not answer.
    #[error("the peer does not answer over SCTP")]
    Silent,
    /// Nothing is at the peer's UDP port, or nothing any more.
    #[error("no SCTP over UDP at the peer's address")]
    Refused,
    /// The peer did not say that it supports DDP (RFC 5043 §11.1).
    #[error("the peer has no DDP over SCTP")]
    NoDdp,
    /// The peer did what an association for DDP does not permit.
    #[error("the peer sent what a DDP association does not carry")]
    Violation,
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// There is no such association, or it is being ended in order.
    #[error("the SCTP association has ended")]
    Ended,
    /// Too much waits to be sent. There is room again when the peer has acknowledged some.
    #[error("no room in the SCTP association")]
    Full,
    /// The message is longer than [may be](crate::endpoint::Endpoint::longest), or the stream does
    /// not exist.
    #[error("the message does not fit the SCTP association")]
    Invalid,
}

/// A message that a peer sent, with its DDP-SSN in front.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The number of the stream.
    pub stream: u16,
    /// A segment, or a message that begins or ends a session.
    pub contents: Contents,
    /// Its bytes.
    pub data: Vec<u8>,
}
