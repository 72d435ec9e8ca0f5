//! The kinds of faults. Each occasion ([`occasion`](crate::occasion)) has an enum of its faults;
//! the code that queries the plan there matches all variants, so the compiler reports code that
//! does not act on a new one. The [catalogue](CATALOGUE) is the one list of all kinds, with their
//! words and arguments: specifications, listings and pages follow from it.

use std::time::Duration;

use urnic_device::vocabulary::WcStatus;

use crate::arguments::{
    AFTER, AFTER_BYTES, Arguments, CALL, CALLS, CODE, ERRNO, FOR, JITTER, Position, RATE, STATUS, TIME,
};
use crate::delay::Delay;

/// A kind of fault with its values, by the occasion at which it strikes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// An attempt to connect.
    Connect(ConnectFault),
    /// A connection passes this position.
    Stream(Position, StreamFault),
    /// A connection is about to send.
    Sending(SendingFault),
    /// A connection is about to send a certain byte.
    Byte(ByteFault),
    /// A datagram is about to be sent.
    Datagram(DatagramFault),
    /// A call of this name, without `ibv_` or `rdma_`.
    Call(&'static str, CallFault),
    /// A program polls a completion. A fault of the device may also strike by itself.
    Completion(CompletionFault),
    /// A completion event is about to be sent.
    Event(EventFault),
}

/// Faults of an attempt to connect. If several strike at once, the first of these counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectFault {
    /// It is refused.
    Refuse,
    /// It finds no route.
    Unreachable,
    /// It gets no answer.
    Unanswered,
    /// The peer rejects it.
    Reject,
}

/// Faults of a connection at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamFault {
    /// It is reset.
    Reset,
    /// It is closed in order.
    Close,
    /// It passes nothing more, in either direction, and does not end.
    Silence,
    /// The peer ends it by a Terminate with this layer, error type and error code (RFC 5040 §4.8),
    /// in 4, 4 and 8 bits.
    Terminate(u16),
}

/// Faults of bytes that a connection sends, at any position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SendingFault {
    /// They are late.
    Delay(Delay),
}

/// Faults of one byte that a connection sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteFault {
    /// The sent byte at this position is damaged. A specification counts from the fault's origin,
    /// an occasion from the beginning of the connection.
    Corrupt(u64),
}

/// Faults of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatagramFault {
    /// It is lost.
    Drop,
    /// It arrives twice.
    Duplicate,
    /// It arrives after the next one.
    Reorder,
    /// One bit of it changes.
    Corrupt,
}

/// Faults of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFault {
    /// It fails with this error number of Linux.
    Fail(i32),
}

/// Faults at the poll of a successful completion of a Send, Write, Read or atomic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CompletionFault {
    /// The request completes with this status, and its queue pair is in error.
    Complete(WcStatus),
    /// The completion is late.
    Late(Delay),
    /// The completion queue overflows.
    CqOverflow,
    /// The device fails.
    Device(DeviceFault),
}

/// Faults of a device, at a completion or without an occasion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFault {
    /// The port is down for this time: the program is told, and nothing passes.
    PortDown(Duration),
    /// The addresses of the port seem to change.
    GidChange,
    /// The device stops, and cannot be opened again for this time.
    Fatal(Duration),
}

/// Faults of a completion event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventFault {
    /// It is lost.
    Lose,
}

impl Kind {
    /// The fault of a device, which can strike by itself.
    pub(crate) fn of_device(self) -> Option<DeviceFault> {
        match self {
            Kind::Completion(CompletionFault::Device(fault)) => Some(fault),
            _ => None,
        }
    }

    /// Whether it is a fault of connections or datagrams alone.
    pub(crate) fn is_of_network(self) -> bool {
        match self {
            Kind::Connect(_) | Kind::Stream(..) | Kind::Sending(_) | Kind::Byte(_) | Kind::Datagram(_) => {
                true
            }
            Kind::Call(..) | Kind::Completion(_) | Kind::Event(_) => false,
        }
    }

    /// The delay of a kind that only makes something slow. Such a kind strikes at each occasion
    /// unless the specification selects some, and is not logged.
    pub(crate) fn delay_mut(&mut self) -> Option<&mut Delay> {
        match self {
            Kind::Sending(SendingFault::Delay(delay)) | Kind::Completion(CompletionFault::Late(delay)) => {
                Some(delay)
            }
            _ => None,
        }
    }
}

/// A kind in the catalogue.
#[derive(Debug)]
pub struct Entry {
    /// The word of the kind, and its arguments with the form of their values.
    pub usage: &'static str,
    /// The effect, as text.
    pub does: &'static str,
    /// The real failure that it imitates, as text.
    pub stands_for: &'static str,
    /// Reads its arguments, in the order in which they are shown.
    read: fn(&mut Arguments<'_>) -> Result<Kind, String>,
}

impl Entry {
    /// The word of a specification.
    pub fn word(&self) -> &'static str {
        self.usage.split(' ').next().unwrap_or_default()
    }

    /// Reads its arguments.
    ///
    /// # Errors
    /// A message: one is missing, or is no value.
    pub(crate) fn read(&self, arguments: &mut Arguments<'_>) -> Result<Kind, String> {
        (self.read)(arguments)
    }
}

/// All kinds, in the order in which listings show them.
pub static CATALOGUE: &[Entry] = &[
    Entry {
        usage: "reset after=N",
        does: "a connection is reset when it has passed so many bytes, or messages",
        stands_for: "a crash of the peer, a firewall",
        read: |arguments| at_position(arguments, StreamFault::Reset),
    },
    Entry {
        usage: "close after=N",
        does: "a connection is closed in order at this position",
        stands_for: "a peer that exits in the middle",
        read: |arguments| at_position(arguments, StreamFault::Close),
    },
    Entry {
        usage: "silence after=N",
        does: "a connection passes nothing more, in either direction, and does not end",
        stands_for: "a pulled cable, a lost route",
        read: |arguments| at_position(arguments, StreamFault::Silence),
    },
    Entry {
        usage: "terminate code=NUMBER after=N",
        does: "the peer seems to end a connection by a Terminate; the code has layer, error type and error",
        stands_for: "what the peer refuses; 0x1202: it has no receive posted (RNR)",
        read: |arguments| {
            let code = arguments.required(&CODE)?;
            at_position(arguments, StreamFault::Terminate(code))
        },
    },
    Entry {
        usage: "corrupt after=BYTES",
        does: "one bit of the byte at this position of what is sent changes",
        stands_for: "bad memory in a switch, a bad cable: CRC errors",
        read: |arguments| Ok(Kind::Byte(ByteFault::Corrupt(arguments.or(&AFTER_BYTES, 0)?))),
    },
    Entry {
        usage: "delay time=T jitter=T rate=N",
        does: "what a connection sends is late, and passes at this rate",
        stands_for: "distance, a busy switch, a slow link",
        read: delay,
    },
    Entry {
        usage: "refuse",
        does: "an attempt to connect is refused",
        stands_for: "a server that is not there yet",
        read: |_| Ok(Kind::Connect(ConnectFault::Refuse)),
    },
    Entry {
        usage: "unreachable",
        does: "an attempt to connect finds no route",
        stands_for: "a wrong route, a port that is down",
        read: |_| Ok(Kind::Connect(ConnectFault::Unreachable)),
    },
    Entry {
        usage: "unanswered",
        does: "an attempt to connect is never answered",
        stands_for: "a firewall that drops, a hung server",
        read: |_| Ok(Kind::Connect(ConnectFault::Unanswered)),
    },
    Entry {
        usage: "reject",
        does: "the peer seems to reject an attempt to connect",
        stands_for: "a server that is full, or of another version",
        read: |_| Ok(Kind::Connect(ConnectFault::Reject)),
    },
    Entry {
        usage: "drop",
        does: "a datagram is lost",
        stands_for: "congestion",
        read: |_| Ok(Kind::Datagram(DatagramFault::Drop)),
    },
    Entry {
        usage: "duplicate",
        does: "a datagram arrives twice",
        stands_for: "a route that changes",
        read: |_| Ok(Kind::Datagram(DatagramFault::Duplicate)),
    },
    Entry {
        usage: "reorder",
        does: "a datagram arrives after the next one",
        stands_for: "several paths",
        read: |_| Ok(Kind::Datagram(DatagramFault::Reorder)),
    },
    Entry {
        usage: "corrupt-datagram",
        does: "one bit of a datagram changes",
        stands_for: "bad memory in a switch: ICRC errors",
        read: |_| Ok(Kind::Datagram(DatagramFault::Corrupt)),
    },
    Entry {
        usage: "fail call=VERB errno=NAME",
        does: "a verb returns an error; resolve_addr reports it by an event",
        stands_for: "an adapter without room, a limit of locked memory, a name without a route",
        read: |arguments| {
            let call = arguments.given(&CALL)?;
            let calls = || format!("{}: {}", arguments.is_missing(&CALL, ""), CALLS.join(", "));
            let call = call.ok_or_else(calls)?;
            Ok(Kind::Call(call, CallFault::Fail(arguments.required(&ERRNO)?)))
        },
    },
    Entry {
        usage: "complete status=NAME opcode=NAME qp=N",
        does: "a request that was done completes in error, and its queue pair fails",
        stands_for: "a lost acknowledgement, an error of the adapter",
        read: |arguments| {
            let status = arguments.required(&STATUS)?;
            Ok(Kind::Completion(CompletionFault::Complete(status)))
        },
    },
    Entry {
        usage: "late-completion time=T jitter=T",
        does: "the poll that finds a completion takes longer",
        stands_for: "a busy processor, an adapter under load",
        read: |arguments| {
            let delay = Delay {
                time: arguments.required(&TIME)?,
                jitter: arguments.given(&JITTER)?.unwrap_or_default(),
                rate: 0,
            };
            Ok(Kind::Completion(CompletionFault::Late(delay)))
        },
    },
    Entry {
        usage: "cq-overflow",
        does: "a completion queue overflows: it shows nothing more, and its queue pairs fail",
        stands_for: "a queue that is too small for what is posted",
        read: |_| Ok(Kind::Completion(CompletionFault::CqOverflow)),
    },
    Entry {
        usage: "lose-event",
        does: "a completion event does not come",
        stands_for: "a lost interrupt",
        read: |_| Ok(Kind::Event(EventFault::Lose)),
    },
    Entry {
        usage: "port-down for=T",
        does: "the port is down: the program is told, and nothing passes; after the time it is active again",
        stands_for: "a link that flaps, a rail that fails",
        read: |arguments| {
            let time = arguments.or(&FOR, Duration::from_secs(1))?;
            Ok(of_device(DeviceFault::PortDown(time)))
        },
    },
    Entry {
        usage: "gid-change",
        does: "the program is told that the addresses of the port changed",
        stands_for: "DHCP, a failover of a bond",
        read: |_| Ok(of_device(DeviceFault::GidChange)),
    },
    Entry {
        usage: "device-fatal for=T",
        does: "the device stops, and can be opened again after the time, or at once",
        stands_for: "a firmware crash and restart, an adapter that is unplugged",
        read: |arguments| {
            let time = arguments.given(&FOR)?.unwrap_or_default();
            Ok(of_device(DeviceFault::Fatal(time)))
        },
    },
];

fn at_position(arguments: &mut Arguments<'_>, fault: StreamFault) -> Result<Kind, String> {
    let after = arguments.or(&AFTER, Position::Bytes(0))?;
    Ok(Kind::Stream(after, fault))
}

/// A delay has a time or a rate.
fn delay(arguments: &mut Arguments<'_>) -> Result<Kind, String> {
    let (time, jitter) = (arguments.given(&TIME)?, arguments.given(&JITTER)?);
    let rate = arguments.given(&RATE)?;
    if time.is_none() && (jitter.is_some() || rate.is_none()) {
        let or_rate = if jitter.is_none() { ", or rate=N," } else { "" };
        return Err(arguments.is_missing(&TIME, or_rate));
    }
    Ok(Kind::Sending(SendingFault::Delay(Delay {
        time: time.unwrap_or_default(),
        jitter: jitter.unwrap_or_default(),
        rate: rate.unwrap_or(0),
    })))
}

fn of_device(fault: DeviceFault) -> Kind {
    Kind::Completion(CompletionFault::Device(fault))
}
