//! Occasions for faults: the operations at which faults can strike, with the properties that faults
//! filter by.

use std::fmt;
use std::net::IpAddr;
use std::ops::Range;

use crate::arguments::Position;
use crate::kinds::{
    ByteFault, CallFault, CompletionFault, ConnectFault, DatagramFault, EventFault, Kind, SendingFault,
    StreamFault,
};
use crate::origins::Origins;

/// An operation at which faults of the type `F` can strike.
#[derive(Debug)]
pub struct Occasion<'a, F> {
    what: What<'a>,
    /// The fault of a kind that fits.
    fault: fn(Kind) -> Option<F>,
}

/// The kind of an operation.
#[derive(Debug)]
enum What<'a> {
    Connect(IpAddr),
    Passed(IpAddr, Passed<'a>),
    Sending(IpAddr),
    Bytes(IpAddr, Range<u64>, &'a Origins),
    Datagram(IpAddr),
    Call(&'a str),
    Completion { opcode: &'a str, qp: u32 },
    Event,
}

/// The bytes and messages that a connection has passed.
#[derive(Debug)]
pub struct Passed<'a> {
    /// The positions of the bytes, in both directions.
    pub bytes: Range<u64>,
    /// The numbers, from 0 on, of the messages that ended with them.
    pub messages: Range<u64>,
    /// The position from which each fault counts.
    pub origins: &'a Origins,
}

/// An attempt to connect to a peer.
pub fn connect<'a>(peer: IpAddr) -> Occasion<'a, ConnectFault> {
    let fault = |kind| match kind {
        Kind::Connect(fault) => Some(fault),
        _ => None,
    };
    let what = What::Connect(peer);
    Occasion { what, fault }
}

/// A connection with a peer has passed bytes.
pub fn passed(peer: IpAddr, passed: Passed<'_>) -> Occasion<'_, StreamFault> {
    let fault = |kind| match kind {
        Kind::Stream(_, fault) => Some(fault),
        _ => None,
    };
    let what = What::Passed(peer, passed);
    Occasion { what, fault }
}

/// A connection is about to send to a peer.
pub fn sending<'a>(peer: IpAddr) -> Occasion<'a, SendingFault> {
    let fault = |kind| match kind {
        Kind::Sending(fault) => Some(fault),
        _ => None,
    };
    let what = What::Sending(peer);
    Occasion { what, fault }
}

/// A connection is about to send to a peer the bytes with these positions among all that it sends.
/// `origins` is where each fault counts from.
pub fn bytes(peer: IpAddr, bytes: Range<u64>, origins: &Origins) -> Occasion<'_, ByteFault> {
    let fault = |kind| match kind {
        Kind::Byte(fault) => Some(fault),
        _ => None,
    };
    let what = What::Bytes(peer, bytes, origins);
    Occasion { what, fault }
}

/// A datagram is about to be sent to a peer.
pub fn datagram<'a>(peer: IpAddr) -> Occasion<'a, DatagramFault> {
    let fault = |kind| match kind {
        Kind::Datagram(fault) => Some(fault),
        _ => None,
    };
    let what = What::Datagram(peer);
    Occasion { what, fault }
}

/// A call of this name, without `ibv_` or `rdma_`.
pub fn call(name: &str) -> Occasion<'_, CallFault> {
    let fault = |kind| match kind {
        Kind::Call(_, fault) => Some(fault),
        _ => None,
    };
    let what = What::Call(name);
    Occasion { what, fault }
}

/// A program polls the successful completion of a request of a queue pair: `opcode` is the name of
/// its operation in verbs, without `IBV_WC_`.
pub fn completion(opcode: &str, qp: u32) -> Occasion<'_, CompletionFault> {
    let fault = |kind| match kind {
        Kind::Completion(fault) => Some(fault),
        _ => None,
    };
    let what = What::Completion { opcode, qp };
    Occasion { what, fault }
}

/// An event is about to be sent to a completion channel.
pub fn event<'a>() -> Occasion<'a, EventFault> {
    let fault = |kind| match kind {
        Kind::Event(fault) => Some(fault),
        _ => None,
    };
    let what = What::Event;
    Occasion { what, fault }
}

impl<F> Occasion<'_, F> {
    /// The kind as it strikes here; `None`: this is no occasion for it. `index` is the fault's
    /// place in the plan.
    pub(crate) fn kind(&self, kind: Kind, index: u64) -> Option<Kind> {
        let what = &self.what;
        let fits = match kind {
            Kind::Connect(_) => matches!(what, What::Connect(_)),
            Kind::Stream(after, _) => match what {
                What::Passed(_, passed) => passed.contains(after, index),
                _ => false,
            },
            Kind::Sending(_) => matches!(what, What::Sending(_)),
            Kind::Byte(ByteFault::Corrupt(at)) => {
                let What::Bytes(_, bytes, origins) = what else {
                    return None;
                };
                let at = origins.of(index)?.sent.saturating_add(at);
                return bytes.contains(&at).then_some(Kind::Byte(ByteFault::Corrupt(at)));
            }
            Kind::Datagram(_) => matches!(what, What::Datagram(_)),
            Kind::Call(call, _) => matches!(what, What::Call(name) if *name == call),
            Kind::Completion(_) => matches!(what, What::Completion { .. }),
            Kind::Event(_) => matches!(what, What::Event),
        };
        fits.then_some(kind)
    }

    /// The fault at this occasion, if the kind fits.
    pub(crate) fn fault(&self, kind: Kind) -> Option<F> {
        (self.fault)(kind)
    }

    /// The peer, if there is one.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        match self.what {
            What::Connect(peer)
            | What::Passed(peer, _)
            | What::Sending(peer)
            | What::Bytes(peer, ..)
            | What::Datagram(peer) => Some(peer),
            What::Call(_) | What::Completion { .. } | What::Event => None,
        }
    }

    /// The operation and the queue pair of the request, if there is one.
    pub(crate) fn request(&self) -> Option<(&str, u32)> {
        match self.what {
            What::Completion { opcode, qp } => Some((opcode, qp)),
            _ => None,
        }
    }
}

impl Passed<'_> {
    /// Whether a fault of this index that counts from its origin to `after` has its position here.
    fn contains(&self, after: Position, index: u64) -> bool {
        self.origins.of(index).is_some_and(|origin| match after {
            Position::Bytes(at) => self.bytes.contains(&origin.passed.saturating_add(at)),
            // At once.
            Position::Messages(0) => self.bytes.contains(&origin.passed),
            Position::Messages(n) => self.messages.contains(&origin.messages.saturating_add(n - 1)),
        })
    }
}

impl<F> fmt::Display for Occasion<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Connect(peer) => write!(f, "connecting to {peer}"),
            What::Passed(peer, _) | What::Bytes(peer, ..) => write!(f, "a connection with {peer}"),
            What::Sending(peer) => write!(f, "sending to {peer}"),
            What::Datagram(peer) => write!(f, "a datagram to {peer}"),
            What::Call(call @ "resolve_addr") => write!(f, "rdma_{call}"),
            What::Call(call) => write!(f, "ibv_{call}"),
            What::Completion { opcode, qp } => write!(f, "{opcode} of qp {qp:#x}"),
            What::Event => f.write_str("a completion event"),
        }
    }
}
