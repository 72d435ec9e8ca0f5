//! Occasions for faults: what is about to happen, as far as filters ask for it.

use std::fmt;
use std::net::IpAddr;
use std::ops::Range;

use crate::origins::Origins;

/// What is about to happen.
#[derive(Debug, Clone)]
pub enum Occasion<'a> {
    /// An attempt to connect to a peer.
    Connect(IpAddr),
    /// A connection with a peer has passed bytes.
    Passed {
        /// The peer.
        peer: IpAddr,
        /// Their positions.
        bytes: Range<u64>,
        /// The numbers, from 0 on, of the messages that ended with them.
        messages: Range<u64>,
        /// Where each fault counts from.
        origins: &'a Origins,
    },
    /// A connection with a peer is about to send the bytes from a position to another of those that
    /// it sends.
    Sending {
        /// The peer.
        peer: IpAddr,
        /// The position before.
        from: u64,
        /// The position after.
        to: u64,
        /// Where each fault counts from.
        origins: &'a Origins,
    },
    /// A connection is about to send this many bytes to a peer.
    Send(IpAddr, usize),
    /// A datagram is about to be sent to a peer.
    Datagram(IpAddr),
    /// A call of this name, without `ibv_` or `rdma_`.
    Call(&'a str),
    /// A program polls the successful completion of a request: its operation, by the name in verbs
    /// without `IBV_WC_`, and its queue pair.
    Completion(&'a str, u32),
    /// An event is about to be sent to a completion channel.
    Event,
}

impl Occasion<'_> {
    /// The peer, if there is one.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        match *self {
            Occasion::Connect(peer)
            | Occasion::Passed { peer, .. }
            | Occasion::Sending { peer, .. }
            | Occasion::Send(peer, _)
            | Occasion::Datagram(peer) => Some(peer),
            _ => None,
        }
    }
}

impl fmt::Display for Occasion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Occasion::Connect(peer) => write!(f, "connecting to {peer}"),
            Occasion::Passed { peer, .. } | Occasion::Sending { peer, .. } => {
                write!(f, "a connection with {peer}")
            }
            Occasion::Send(peer, _) => write!(f, "sending to {peer}"),
            Occasion::Datagram(peer) => write!(f, "a datagram to {peer}"),
            Occasion::Call(call @ "resolve_addr") => write!(f, "rdma_{call}"),
            Occasion::Call(call) => write!(f, "ibv_{call}"),
            Occasion::Completion(opcode, qp) => write!(f, "{opcode} of qp {qp:#x}"),
            Occasion::Event => f.write_str("a completion event"),
        }
    }
}
