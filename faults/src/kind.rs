//! The kinds of faults.

use std::fmt;
use std::time::Duration;

use urnic_device::vocabulary::WcStatus;

use crate::time::Written;

/// What a fault does, and where.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// A connection is reset at this position.
    Reset(Position),
    /// A connection is closed in order at this position.
    Close(Position),
    /// A connection passes nothing more after this position, in either direction, and does not end.
    Silence(Position),
    /// The peer of a connection ends it, behind this position, by a Terminate.
    Terminate {
        /// Where.
        after: Position,
        /// Layer, error type and error code (RFC 5040 §4.8), in 4, 4 and 8 bits.
        code: u16,
    },
    /// The byte at this position that a connection sends is damaged.
    Corrupt(u64),
    /// What a connection sends is late.
    Delay(Delay),
    /// An attempt to connect is refused.
    Refuse,
    /// An attempt to connect finds no route.
    Unreachable,
    /// An attempt to connect gets no answer.
    Unanswered,
    /// The peer rejects an attempt to connect.
    Reject,
    /// A datagram is lost.
    Drop,
    /// A datagram arrives twice.
    Duplicate,
    /// A datagram arrives behind the next one.
    Reorder,
    /// A call of this name fails with this error number.
    Fail {
        /// The name of a verb, without `ibv_`.
        call: String,
        /// The error number of Linux.
        errno: i32,
    },
    /// A request completes with this status, and its queue pair is in error.
    Complete(WcStatus),
    /// A completion is late.
    LateCompletion(Delay),
    /// A completion queue overflows.
    CqOverflow,
    /// A completion event is lost.
    LoseEvent,
    /// The port is down for this time: the program is told, and nothing passes.
    PortDown(Duration),
    /// The addresses of the port seem to change.
    GidChange,
    /// The device stops, and cannot be opened again for this time.
    DeviceFatal(Duration),
}

/// A position in what a connection passes in both directions, from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// Behind this many bytes.
    Bytes(u64),
    /// Behind this many RDMAP messages.
    Messages(u64),
}

/// A time, and how much it varies; and a rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Delay {
    /// The time.
    pub time: Duration,
    /// It varies by at most this, in both directions.
    pub jitter: Duration,
    /// Bits in a second; 0 = no limit.
    pub rate: u64,
}

/// What is to be done at an occasion.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Do this.
    Do(Kind),
    /// Wait first.
    Wait(Duration),
    /// Let it arrive late.
    Late(Lateness),
    /// Damage the byte at this position of those that the connection sends.
    Damage(u64),
}

/// How late something arrives that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lateness {
    /// How long the slow part of the way has to do with it. What is sent behind it waits as long.
    pub transfer: Duration,
    /// How long it then takes.
    pub time: Duration,
}

impl Kind {
    /// The word in a specification.
    pub const fn word(&self) -> &'static str {
        match self {
            Kind::Reset(_) => "reset",
            Kind::Close(_) => "close",
            Kind::Silence(_) => "silence",
            Kind::Terminate { .. } => "terminate",
            Kind::Corrupt(_) => "corrupt",
            Kind::Delay(_) => "delay",
            Kind::Refuse => "refuse",
            Kind::Unreachable => "unreachable",
            Kind::Unanswered => "unanswered",
            Kind::Reject => "reject",
            Kind::Drop => "drop",
            Kind::Duplicate => "duplicate",
            Kind::Reorder => "reorder",
            Kind::Fail { .. } => "fail",
            Kind::Complete(_) => "complete",
            Kind::LateCompletion(_) => "late-completion",
            Kind::CqOverflow => "cq-overflow",
            Kind::LoseEvent => "lose-event",
            Kind::PortDown(_) => "port-down",
            Kind::GidChange => "gid-change",
            Kind::DeviceFatal(_) => "device-fatal",
        }
    }

    /// All words.
    pub const WORDS: [&'static str; 21] = [
        "reset",
        "close",
        "silence",
        "terminate",
        "corrupt",
        "delay",
        "refuse",
        "unreachable",
        "unanswered",
        "reject",
        "drop",
        "duplicate",
        "reorder",
        "fail",
        "complete",
        "late-completion",
        "cq-overflow",
        "lose-event",
        "port-down",
        "gid-change",
        "device-fatal",
    ];

    /// Whether it befalls a device rather than a request, so that it can strike by itself.
    pub fn is_of_device(&self) -> bool {
        matches!(self, Kind::PortDown(_) | Kind::GidChange | Kind::DeviceFatal(_))
    }

    /// Whether it is a fault of connections or datagrams alone.
    pub fn is_of_network(&self) -> bool {
        !matches!(
            self,
            Kind::Fail { .. }
                | Kind::Complete(_)
                | Kind::LateCompletion(_)
                | Kind::CqOverflow
                | Kind::LoseEvent
                | Kind::PortDown(_)
                | Kind::GidChange
                | Kind::DeviceFatal(_)
        )
    }
}

impl fmt::Display for Position {
    /// As in a specification.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Position::Bytes(n) => write!(f, "{n}"),
            Position::Messages(n) => write!(f, "{n}msg"),
        }
    }
}

/// Error numbers that calls may fail with.
pub(crate) const ERRNOS: [(&str, i32); 13] = [
    ("EPERM", 1),
    ("ENOENT", 2),
    ("EIO", 5),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EBUSY", 16),
    ("EINVAL", 22),
    ("ENOSPC", 28),
    ("EOPNOTSUPP", 95),
    ("ENETUNREACH", 101),
    ("ETIMEDOUT", 110),
    ("EHOSTUNREACH", 113),
];

impl fmt::Display for Kind {
    /// As in a specification.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        match self {
            Kind::Reset(after) | Kind::Close(after) | Kind::Silence(after) => write!(f, " after={after}"),
            Kind::Corrupt(at) => write!(f, " after={at}"),
            Kind::Terminate { after, code } => write!(f, " code={code:#06x} after={after}"),
            Kind::Delay(Delay { time, jitter, rate })
            | Kind::LateCompletion(Delay { time, jitter, rate }) => {
                if !time.is_zero() {
                    write!(f, " time={}", Written(*time))?;
                }
                if !jitter.is_zero() {
                    write!(f, " jitter={}", Written(*jitter))?;
                }
                if *rate > 0 {
                    write!(f, " rate={rate}bit")?;
                }
                Ok(())
            }
            Kind::PortDown(time) => write!(f, " for={}", Written(*time)),
            Kind::DeviceFatal(time) if !time.is_zero() => write!(f, " for={}", Written(*time)),
            Kind::Fail { call, errno } => {
                let name = ERRNOS.iter().find(|(_, number)| number == errno);
                write!(f, " call={call} errno={}", name.map_or("?", |(name, _)| name))
            }
            Kind::Complete(status) => write!(f, " status={}", status.verbs_name()),
            _ => Ok(()),
        }
    }
}
