//! The arguments of faults, `KEY=VALUE`: how each is read, and how it is shown.

use std::fmt::{self, Write as _};
use std::time::Duration;

use urnic_device::vocabulary::WcStatus;

use crate::time::{UNITS, Written};

/// A position among the bytes or messages of a connection in both directions, from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// After this many bytes.
    Bytes(u64),
    /// After this many RDMAP messages.
    Messages(u64),
}

impl fmt::Display for Position {
    /// Writes the argument in the form of a specification.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Position::Bytes(n) => write!(f, "{n}"),
            Position::Messages(n) => write!(f, "{n}msg"),
        }
    }
}

/// An argument of kinds of faults.
pub(crate) struct Argument<T> {
    key: &'static str,
    /// The form of the value, for messages about a missing argument.
    form: &'static str,
    read: fn(&str) -> Option<T>,
    show: fn(T) -> String,
}

/// The position on a connection, in both directions together.
pub(crate) const AFTER: Argument<Position> = Argument {
    key: "after",
    form: "N",
    read: |text| match text.strip_suffix("msg") {
        Some(messages) => messages.parse().ok().map(Position::Messages),
        None => bytes(text).map(Position::Bytes),
    },
    show: |after| after.to_string(),
};

/// The position among the bytes that a connection sends.
pub(crate) const AFTER_BYTES: Argument<u64> = Argument {
    key: "after",
    form: "BYTES",
    read: bytes,
    show: |after| after.to_string(),
};

/// Layer, error type and error code of a Terminate.
pub(crate) const CODE: Argument<u16> = Argument {
    key: "code",
    form: "NUMBER",
    read: |text| u16::try_from(number(text)?).ok(),
    show: |code| format!("{code:#06x}"),
};

/// The delay.
pub(crate) const TIME: Argument<Duration> = Argument {
    key: "time",
    form: "T",
    read: time,
    show: |time| Written(time).to_string(),
};

/// The variation of a time.
pub(crate) const JITTER: Argument<Duration> = Argument {
    key: "jitter",
    ..TIME
};

/// The duration.
pub(crate) const FOR: Argument<Duration> = Argument { key: "for", ..TIME };

/// Bits in a second.
pub(crate) const RATE: Argument<u64> = Argument {
    key: "rate",
    form: "N",
    read: |text| scaled(text, &RATES).filter(|rate| *rate > 0),
    show: |rate| format!("{rate}bit"),
};

/// A call that may fail.
pub(crate) const CALL: Argument<&'static str> = Argument {
    key: "call",
    form: "NAME",
    read: |name| CALLS.into_iter().find(|call| *call == name),
    show: str::to_owned,
};

/// An error number of Linux.
pub(crate) const ERRNO: Argument<i32> = Argument {
    key: "errno",
    form: "NAME",
    read: |name| Some(ERRNOS.iter().find(|(known, _)| *known == name)?.1),
    show: |errno| {
        let known = ERRNOS.iter().find(|(_, number)| *number == errno);
        known.map_or("?", |(name, _)| name).to_owned()
    },
};

/// A status of completions, but success.
pub(crate) const STATUS: Argument<WcStatus> = Argument {
    key: "status",
    form: "NAME",
    read: |name| {
        let name = name.strip_prefix("IBV_WC_").unwrap_or(name);
        let mut all = (1..=u8::MAX).filter_map(WcStatus::from_raw);
        all.find(|status| status.verbs_name() == name)
    },
    show: |status| status.verbs_name().to_owned(),
};

/// The calls that may fail, without `ibv_` or `rdma_`.
pub(crate) const CALLS: [&str; 9] = [
    "alloc_pd",
    "reg_mr",
    "create_cq",
    "create_qp",
    "modify_qp",
    "create_srq",
    "alloc_mw",
    "resize_cq",
    "resolve_addr",
];

/// Error numbers that calls may fail with.
const ERRNOS: [(&str, i32); 13] = [
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

const RATES: [(&str, u64); 4] = [
    ("bit", 1),
    ("kbit", 1_000),
    ("mbit", 1_000_000),
    ("gbit", 1_000_000_000),
];

/// The arguments of one fault: those that were not taken yet, and the values of its kind as they
/// are shown.
pub(crate) struct Arguments<'a> {
    /// The fault's text.
    part: &'a str,
    pairs: Vec<(&'a str, &'a str)>,
    shown: String,
}

impl<'a> Arguments<'a> {
    /// Of the fault with this text, whose words after the kind are these.
    ///
    /// # Errors
    /// A message: a word is no argument.
    pub(crate) fn new(part: &'a str, words: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let pair = |word: &'a str| {
            word.split_once('=')
                .ok_or_else(|| format!("{part}: {word} is not KEY=VALUE"))
        };
        Ok(Arguments {
            part,
            pairs: words.map(pair).collect::<Result<_, _>>()?,
            shown: String::new(),
        })
    }

    /// Takes the value of a key, if it was given.
    ///
    /// # Errors
    /// A message: it is no value of the key.
    pub(crate) fn take<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(at) = self.pairs.iter().position(|(known, _)| *known == key) else {
            return Ok(None);
        };
        let (key, value) = self.pairs.remove(at);
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(format!("{key}={value}: not a value of {key}")),
        }
    }

    /// The value of a kind's argument, if it was given.
    ///
    /// # Errors
    /// Like [`Arguments::take`].
    pub(crate) fn given<T: Copy>(&mut self, argument: &Argument<T>) -> Result<Option<T>, String> {
        let value = self.take(argument.key, argument.read)?;
        Ok(value.map(|value| self.showing(argument, value)))
    }

    /// The value of a kind's argument, or else `default`.
    ///
    /// # Errors
    /// Like [`Arguments::take`].
    pub(crate) fn or<T: Copy>(&mut self, argument: &Argument<T>, default: T) -> Result<T, String> {
        let value = self.take(argument.key, argument.read)?;
        Ok(self.showing(argument, value.unwrap_or(default)))
    }

    /// The value of a kind's argument.
    ///
    /// # Errors
    /// Like [`Arguments::take`]; it was not given.
    pub(crate) fn required<T: Copy>(&mut self, argument: &Argument<T>) -> Result<T, String> {
        let value = self.given(argument)?;
        value.ok_or_else(|| self.is_missing(argument, ""))
    }

    /// The message that an argument is missing; `hint` comes between its form and the verb.
    pub(crate) fn is_missing<T>(&self, argument: &Argument<T>, hint: &str) -> String {
        let Argument { key, form, .. } = argument;
        format!("{}: {key}={form}{hint} is missing", self.part)
    }

    fn showing<T: Copy>(&mut self, argument: &Argument<T>, value: T) -> T {
        let _ = write!(self.shown, " {}={}", argument.key, (argument.show)(value));
        value
    }

    /// The values that were taken for the kind, as in a specification, with a space before each.
    pub(crate) fn shown(&mut self) -> String {
        std::mem::take(&mut self.shown)
    }

    /// The key of an argument that was not taken.
    pub(crate) fn left_over(&self) -> Option<&'a str> {
        self.pairs.first().map(|(key, _)| *key)
    }
}

pub(crate) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

pub(crate) fn time(text: &str) -> Option<Duration> {
    let time = scaled(text, &UNITS).map(Duration::from_nanos);
    time.filter(|time| *time <= Duration::from_secs(3600))
}

fn bytes(text: &str) -> Option<u64> {
    scaled(text, &[("", 1), ("k", 1 << 10), ("m", 1 << 20), ("g", 1 << 30)])
}

/// A number in front of one of these units.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1;
    digits.parse::<u64>().ok()?.checked_mul(factor)
}
