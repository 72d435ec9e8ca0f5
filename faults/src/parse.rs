//! Specifications of faults: `reset after=64k nth=2; drop p=0.01 peer=192.0.2.0/24; seed=7`.

use std::time::Duration;

use urnic_device::vocabulary::{WcOpcode, WcStatus};

use crate::kind::{Delay, ERRNOS, Kind, Position};
use crate::network::Network;
use crate::specified::{Filter, Specified, When};
use crate::time::UNITS;
use crate::window::Window;

/// Reads a specification: its faults, and its seed if it has one.
///
/// # Errors
/// A message that names the word at fault.
pub(crate) fn parse(text: &str) -> Result<(Vec<Specified>, Option<u64>), String> {
    let mut seed = None;
    let mut faults = Vec::new();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or(""));
    for part in lines.flat_map(|line| line.split(';')).map(str::trim) {
        if part.is_empty() || part == "none" {
            continue;
        }
        if let Some(value) = part.strip_prefix("seed=") {
            seed = Some(value.parse().map_err(|_| format!("seed={value}: not a number"))?);
            continue;
        }
        faults.push(fault(part)?);
    }
    Ok((faults, seed))
}

fn fault(part: &str) -> Result<Specified, String> {
    let mut words = part.split([' ', '\t', ',']).filter(|word| !word.is_empty());
    let kind = words.next().unwrap_or_default();
    let mut keys = Keys(Vec::new());
    for word in words {
        let pair = word
            .split_once('=')
            .ok_or_else(|| format!("{part}: {word} is not KEY=VALUE"))?;
        keys.0.push(pair);
    }
    let kind = read_kind(part, kind, &mut keys)?;
    let filter = Filter {
        device: keys.take("device", |text| (!text.is_empty()).then(|| text.to_owned()))?,
        peer: keys.take("peer", Network::parse)?,
        opcode: keys.take("opcode", opcode)?,
        qp: keys.take("qp", number)?,
    };
    let window = window(part, &mut keys)?;
    let when = match when(part, &kind, &mut keys)? {
        When::First if window.at.is_some() && filter.fits_begin(&kind) => When::Begin,
        when => when,
    };
    let count = keys.take("count", |text| text.parse().ok())?;
    match keys.0.first() {
        Some((key, _)) => Err(format!("{part}: {} has no {key}", kind.word())),
        None => Ok(Specified {
            kind,
            filter,
            window,
            when,
            count,
        }),
    }
}

/// The kind with this word, and its values.
fn read_kind(part: &str, word: &str, keys: &mut Keys<'_>) -> Result<Kind, String> {
    let after = |keys: &mut Keys<'_>| {
        let after = keys.take("after", position)?;
        Ok::<_, String>(after.unwrap_or(Position::Bytes(0)))
    };
    let kind = match word {
        "reset" => Kind::Reset(after(keys)?),
        "close" => Kind::Close(after(keys)?),
        "silence" => Kind::Silence(after(keys)?),
        "terminate" => Kind::Terminate {
            after: after(keys)?,
            code: keys
                .take("code", |code| {
                    number(code).and_then(|code| u16::try_from(code).ok())
                })?
                .ok_or_else(|| format!("{part}: code=NUMBER is missing"))?,
        },
        "corrupt" => Kind::Corrupt(keys.take("after", bytes)?.unwrap_or(0)),
        "delay" => delay(part, keys)?,
        "refuse" => Kind::Refuse,
        "unreachable" => Kind::Unreachable,
        "unanswered" => Kind::Unanswered,
        "reject" => Kind::Reject,
        "drop" => Kind::Drop,
        "duplicate" => Kind::Duplicate,
        "reorder" => Kind::Reorder,
        "fail" => Kind::Fail {
            call: keys
                .take("call", |call| CALLS.contains(&call).then(|| call.to_owned()))?
                .ok_or_else(|| format!("{part}: call=NAME is missing: {}", CALLS.join(", ")))?,
            errno: keys
                .take("errno", |name| named(&ERRNOS, name))?
                .ok_or_else(|| format!("{part}: errno=NAME is missing"))?,
        },
        "complete" => {
            let status = |name: &str| {
                let name = name.strip_prefix("IBV_WC_").unwrap_or(name);
                let mut all = (1..=u8::MAX).filter_map(WcStatus::from_raw);
                all.find(|status| status.verbs_name() == name)
            };
            Kind::Complete(
                keys.take("status", status)?
                    .ok_or_else(|| format!("{part}: status=NAME is missing"))?,
            )
        }
        "late-completion" => Kind::LateCompletion(Delay {
            time: keys
                .take("time", time)?
                .ok_or_else(|| format!("{part}: time=T is missing"))?,
            jitter: keys.take("jitter", time)?.unwrap_or_default(),
            rate: 0,
        }),
        "cq-overflow" => Kind::CqOverflow,
        "lose-event" => Kind::LoseEvent,
        "port-down" => Kind::PortDown(keys.take("for", time)?.unwrap_or(Duration::from_secs(1))),
        "gid-change" => Kind::GidChange,
        "device-fatal" => Kind::DeviceFatal(keys.take("for", time)?.unwrap_or_default()),
        other => {
            return Err(format!(
                "{other:?} is no fault; there are {}",
                Kind::WORDS.join(", ")
            ));
        }
    };
    Ok(kind)
}

/// A delay, which has a time or a rate.
fn delay(part: &str, keys: &mut Keys<'_>) -> Result<Kind, String> {
    let (late, jitter) = (keys.take("time", time)?, keys.take("jitter", time)?);
    let rate = keys.take("rate", rate)?;
    if late.is_none() && (jitter.is_some() || rate.is_none()) {
        let or_rate = if jitter.is_none() { ", or rate=N," } else { "" };
        return Err(format!("{part}: time=T{or_rate} is missing"));
    }
    Ok(Kind::Delay(Delay {
        time: late.unwrap_or_default(),
        jitter: jitter.unwrap_or_default(),
        rate: rate.unwrap_or(0),
    }))
}

/// The time in which a fault can strike.
fn window(part: &str, keys: &mut Keys<'_>) -> Result<Window, String> {
    let window = Window {
        at: keys.take("at", time)?,
        until: keys.take("until", time)?,
    };
    match (window.at.unwrap_or_default(), window.until) {
        (at, Some(until)) if until <= at => Err(format!("{part}: it would end before it begins")),
        _ => Ok(window),
    }
}

/// When a fault of this kind strikes.
fn when(part: &str, kind: &Kind, keys: &mut Keys<'_>) -> Result<When, String> {
    let nth = keys.take("nth", |text| text.parse().ok().filter(|n| *n > 0))?;
    let every = keys.take("every", |text| text.parse().ok().filter(|n| *n > 0))?;
    let p = keys.take("p", |text| text.parse().ok().filter(|p| (0.0..=1.0).contains(p)))?;
    let shapes = matches!(kind, Kind::Delay(_) | Kind::LateCompletion(_));
    match (nth, every, p) {
        (Some(n), None, None) => Ok(When::Nth(n)),
        (None, Some(n), None) => Ok(When::Every(n)),
        (None, None, Some(p)) => Ok(When::Probability(p)),
        (None, None, None) if shapes => Ok(When::Every(1)),
        (None, None, None) => Ok(When::First),
        _ => Err(format!("{part}: only one of nth, every and p")),
    }
}

/// The verbs that may fail.
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

/// The name of an operation of the send queue.
fn opcode(name: &str) -> Option<String> {
    let mut sends = (0..WcOpcode::Recv as u8).filter_map(WcOpcode::from_raw);
    sends
        .find(|opcode| opcode.verbs_name() == name)
        .map(|_| name.to_owned())
}

fn named<T: Copy>(table: &[(&str, T)], name: &str) -> Option<T> {
    table
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, value)| *value)
}

/// The pairs of a fault that were not used yet.
struct Keys<'a>(Vec<(&'a str, &'a str)>);

impl Keys<'_> {
    fn take<T>(&mut self, key: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<Option<T>, String> {
        let Some(at) = self.0.iter().position(|(known, _)| *known == key) else {
            return Ok(None);
        };
        let (key, value) = self.0.remove(at);
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(format!("{key}={value}: not a value of {key}")),
        }
    }
}

fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A number in front of one of these units.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let factor = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1;
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

fn bytes(text: &str) -> Option<u64> {
    scaled(text, &[("", 1), ("k", 1 << 10), ("m", 1 << 20), ("g", 1 << 30)])
}

/// A number of bytes, or of messages: `64k`, `100msg`.
fn position(text: &str) -> Option<Position> {
    match text.strip_suffix("msg") {
        Some(messages) => messages.parse().ok().map(Position::Messages),
        None => bytes(text).map(Position::Bytes),
    }
}

fn time(text: &str) -> Option<Duration> {
    let time = scaled(text, &UNITS).map(Duration::from_nanos);
    time.filter(|time| *time <= Duration::from_secs(3600))
}

fn rate(text: &str) -> Option<u64> {
    let units = [
        ("bit", 1),
        ("kbit", 1_000),
        ("mbit", 1_000_000),
        ("gbit", 1_000_000_000),
    ];
    scaled(text, &units).filter(|rate| *rate > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(text: &str) -> Specified {
        let (faults, _) = parse(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(faults.len(), 1, "{text}");
        faults.into_iter().next().unwrap()
    }

    #[test]
    fn a_specification_is_faults_and_a_seed() {
        let (faults, seed) =
            parse("reset after=64k nth=2; seed=7\n# nothing\n drop p=0.5, peer=192.0.2.0/24").unwrap();
        assert_eq!((faults.len(), seed), (2, Some(7)));
        assert_eq!(
            (&faults[0].kind, faults[0].when),
            (&Kind::Reset(Position::Bytes(64 << 10)), When::Nth(2))
        );
        assert_eq!(
            (&faults[1].kind, faults[1].when),
            (&Kind::Drop, When::Probability(0.5))
        );
        assert!(faults[1].filter.peer.is_some());
        assert_eq!(parse("none").unwrap(), (vec![], None));
    }

    #[test]
    fn values_have_units() {
        let close = Kind::Close(Position::Bytes(3 << 20));
        assert_eq!(one("close after=3m").kind, close);
        let close = Kind::Close(Position::Messages(12));
        assert_eq!(one("close after=12msg").kind, close);
        let terminate = Kind::Terminate {
            after: Position::Bytes(0),
            code: 0x1202,
        };
        assert_eq!(one("terminate code=0x1202").kind, terminate);
        let delay = Delay {
            time: Duration::from_micros(10),
            jitter: Duration::from_micros(2),
            rate: 25_000_000_000,
        };
        let fault = one("delay time=10us jitter=2us rate=25Gbit");
        assert_eq!((fault.kind, fault.when), (Kind::Delay(delay), When::Every(1)));
        let fail = Kind::Fail {
            call: "create_qp".to_owned(),
            errno: 12,
        };
        assert_eq!(one("fail call=create_qp errno=ENOMEM every=3").kind, fail);
        let fault = one("complete status=IBV_WC_RETRY_EXC_ERR opcode=RDMA_WRITE qp=0x1a");
        assert_eq!(
            (fault.kind, fault.filter.qp),
            (Kind::Complete(WcStatus::RetryExcErr), Some(26))
        );
    }

    #[test]
    fn a_window_lets_a_fault_of_the_device_begin_by_itself() {
        for (text, when) in [
            ("port-down for=5s", When::First),
            ("port-down for=5s at=2s", When::Begin),
            ("port-down for=5s at=0s device=1", When::Begin),
            ("device-fatal at=1s", When::Begin),
            ("gid-change at=1s nth=3", When::Nth(3)),
            ("gid-change at=1s opcode=SEND", When::First),
            ("reset at=1s", When::First),
            ("delay time=1ms at=1s", When::Every(1)),
        ] {
            assert_eq!(one(text).when, when, "{text}");
        }
        let window = one("delay time=1ms at=1s until=1500ms").window;
        assert_eq!(window.to_string(), " at=1s until=1500ms");
        let inside = |millis| window.contains(Duration::from_millis(millis));
        assert_eq!([999, 1000, 1499, 1500].map(inside), [false, true, true, false]);
    }

    #[test]
    fn a_mistake_is_named() {
        for (text, says) in [
            ("rest", "\"rest\" is no fault; there are reset, close"),
            ("reset after", "after is not KEY=VALUE"),
            ("reset after=x", "after=x: not a value of after"),
            ("reset time=1s", "reset has no time"),
            ("drop nth=1 p=0.5", "only one of nth, every and p"),
            ("delay time=3601s", "time=3601s: not a value of time"),
            ("drop p=2", "p=2: not a value of p"),
            ("drop nth=0", "nth=0"),
            ("fail call=ibv_x errno=EIO", "call=ibv_x"),
            ("fail errno=EIO", "call=NAME is missing"),
            ("complete", "status=NAME is missing"),
            ("terminate", "code=NUMBER is missing"),
            ("terminate code=0x10000", "code=0x10000: not a value of code"),
            ("corrupt after=3msg", "after=3msg: not a value of after"),
            ("late-completion", "time=T is missing"),
            ("delay", "delay: time=T, or rate=N, is missing"),
            ("delay nth=3", "time=T, or rate=N, is missing"),
            ("delay jitter=2us", "time=T is missing"),
            ("delay jitter=2us rate=1gbit", "time=T is missing"),
            ("complete status=SUCCESS", "status=SUCCESS"),
            ("seed=x", "seed=x: not a number"),
            ("drop at=soon", "at=soon: not a value of at"),
            (
                "drop at=2s until=2s",
                "drop at=2s until=2s: it would end before it begins",
            ),
            ("drop for=2s", "drop has no for"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_delay_may_have_a_rate_alone() {
        let rate = Delay {
            rate: 1_000_000_000,
            ..Delay::default()
        };
        assert_eq!(one("delay rate=1gbit").kind, Kind::Delay(rate));
    }

    #[test]
    fn a_fault_is_shown_with_all_its_keys() {
        for text in [
            "drop p=0.25 count=3 device=urnic1 peer=192.0.2.0/24",
            "drop every=3 peer=fd00::1",
            "complete status=REM_OP_ERR nth=2 opcode=RDMA_READ qp=0x1a",
            "port-down for=20ms at=2s device=1",
            "refuse nth=2 at=10ms until=30ms count=1 peer=192.0.2.1",
        ] {
            assert_eq!(one(text).to_string(), text);
            assert_eq!(one(&one(text).to_string()), one(text));
        }
    }

    #[test]
    fn every_kind_can_be_written_as_it_is_shown() {
        for text in [
            "reset after=1",
            "close after=2",
            "silence after=3",
            "silence after=7msg",
            "terminate code=0x1202 after=9msg",
            "corrupt after=4",
            "delay time=5us jitter=1us rate=1000bit",
            "refuse",
            "unreachable",
            "unanswered",
            "reject",
            "drop",
            "duplicate",
            "reorder",
            "fail call=reg_mr errno=EIO",
            "complete status=REM_OP_ERR",
            "late-completion time=7us jitter=2us",
            "cq-overflow",
            "lose-event",
            "port-down for=20ms",
            "device-fatal for=300ms",
            "gid-change",
            "device-fatal",
        ] {
            assert_eq!(one(text).kind.to_string(), text);
            assert!(Kind::WORDS.contains(&one(text).kind.word()));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_specification_or_a_message(text in ".{0,80}") {
            let _ = parse(&text);
        }
    }
}
