//! Specifications of faults: `reset after=64k nth=2; drop p=0.01 peer=192.0.2.0/24; seed=7`.

use urnic_device::vocabulary::WcOpcode;

use crate::arguments::{Arguments, number, time};
use crate::kinds::{CATALOGUE, Entry, Kind};
use crate::network::Network;
use crate::specified::{Filter, Specified, When};
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
    let word = words.next().unwrap_or_default();
    let mut arguments = Arguments::new(part, words)?;
    let entry = entry(word)?;
    let kind = entry.read(&mut arguments)?;
    let filter = Filter {
        device: arguments.take("device", |text| (!text.is_empty()).then(|| text.to_owned()))?,
        peer: arguments.take("peer", Network::parse)?,
        opcode: arguments.take("opcode", opcode)?,
        qp: arguments.take("qp", number)?,
    };
    let window = window(part, &mut arguments)?;
    let when = match when(part, kind, &mut arguments)? {
        When::First if window.at.is_some() && filter.fits_begin(kind) => When::Begin,
        when => when,
    };
    let count = arguments.take("count", |text| text.parse().ok())?;
    match arguments.left_over() {
        Some(key) => Err(format!("{part}: {word} has no {key}")),
        None => Ok(Specified {
            word: entry.word(),
            values: arguments.shown(),
            kind,
            filter,
            window,
            when,
            count,
        }),
    }
}

/// The entry of the catalogue with this word.
fn entry(word: &str) -> Result<&'static Entry, String> {
    let found = CATALOGUE.iter().find(|entry| entry.word() == word);
    found.ok_or_else(|| {
        let words: Vec<_> = CATALOGUE.iter().map(Entry::word).collect();
        format!("{word:?} is no fault; there are {}", words.join(", "))
    })
}

/// The time in which a fault can strike.
fn window(part: &str, arguments: &mut Arguments<'_>) -> Result<Window, String> {
    let window = Window {
        at: arguments.take("at", time)?,
        until: arguments.take("until", time)?,
    };
    match (window.at.unwrap_or_default(), window.until) {
        (at, Some(until)) if until <= at => Err(format!("{part}: it would end before it begins")),
        _ => Ok(window),
    }
}

/// When a fault of this kind strikes.
fn when(part: &str, mut kind: Kind, arguments: &mut Arguments<'_>) -> Result<When, String> {
    let nth = arguments.take("nth", |text| text.parse().ok().filter(|n| *n > 0))?;
    let every = arguments.take("every", |text| text.parse().ok().filter(|n| *n > 0))?;
    let p = arguments.take("p", |text| text.parse().ok().filter(|p| (0.0..=1.0).contains(p)))?;
    match (nth, every, p) {
        (Some(n), None, None) => Ok(When::Nth(n)),
        (None, Some(n), None) => Ok(When::Every(n)),
        (None, None, Some(p)) => Ok(When::Probability(p)),
        (None, None, None) if kind.delay_mut().is_some() => Ok(When::Every(1)),
        (None, None, None) => Ok(When::First),
        _ => Err(format!("{part}: only one of nth, every and p")),
    }
}

/// The name of an operation of the send queue.
fn opcode(name: &str) -> Option<String> {
    let mut sends = (0..WcOpcode::Recv as u8).filter_map(WcOpcode::from_raw);
    sends
        .find(|opcode| opcode.verbs_name() == name)
        .map(|_| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Position;
    use crate::delay::Delay;
    use crate::kinds::{CallFault, CompletionFault, DatagramFault, SendingFault, StreamFault};
    use proptest::prelude::*;
    use std::time::Duration;
    use urnic_device::vocabulary::WcStatus;

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
        let reset = Kind::Stream(Position::Bytes(64 << 10), StreamFault::Reset);
        assert_eq!((faults[0].kind, faults[0].when), (reset, When::Nth(2)));
        let drop = Kind::Datagram(DatagramFault::Drop);
        assert_eq!((faults[1].kind, faults[1].when), (drop, When::Probability(0.5)));
        assert!(faults[1].filter.peer.is_some());
        assert_eq!(parse("none").unwrap(), (vec![], None));
    }

    #[test]
    fn values_have_units() {
        let at = |position, fault| Kind::Stream(position, fault);
        let close = at(Position::Bytes(3 << 20), StreamFault::Close);
        assert_eq!(one("close after=3m").kind, close);
        let close = at(Position::Messages(12), StreamFault::Close);
        assert_eq!(one("close after=12msg").kind, close);
        let terminate = at(Position::Bytes(0), StreamFault::Terminate(0x1202));
        assert_eq!(one("terminate code=0x1202").kind, terminate);
        let delay = Kind::Sending(SendingFault::Delay(Delay {
            time: Duration::from_micros(10),
            jitter: Duration::from_micros(2),
            rate: 25_000_000_000,
        }));
        let fault = one("delay time=10us jitter=2us rate=25Gbit");
        assert_eq!((fault.kind, fault.when), (delay, When::Every(1)));
        let fail = Kind::Call("create_qp", CallFault::Fail(12));
        assert_eq!(one("fail call=create_qp errno=ENOMEM every=3").kind, fail);
        let fault = one("complete status=IBV_WC_RETRY_EXC_ERR opcode=RDMA_WRITE qp=0x1a");
        let complete = Kind::Completion(CompletionFault::Complete(WcStatus::RetryExcErr));
        assert_eq!((fault.kind, fault.filter.qp), (complete, Some(26)));
    }

    #[test]
    fn a_window_starts_a_fault_of_the_device_without_an_occasion() {
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
        let delay = Kind::Sending(SendingFault::Delay(rate));
        assert_eq!(one("delay rate=1gbit").kind, delay);
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

    /// The fault of an entry, with a value for each argument of its usage.
    fn example(entry: &Entry) -> String {
        let words = entry.usage.split(' ').map(|word| match word {
            "after=N" => "after=7msg",
            "after=BYTES" => "after=4",
            "code=NUMBER" => "code=0x1202",
            "time=T" => "time=5us",
            "jitter=T" => "jitter=1us",
            "rate=N" => "rate=1000bit",
            "call=VERB" => "call=reg_mr",
            "errno=NAME" => "errno=EIO",
            "status=NAME" => "status=REM_OP_ERR",
            "opcode=NAME" => "opcode=RDMA_READ",
            "qp=N" => "qp=0x1a",
            "for=T" => "for=300ms",
            word => word,
        });
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_kind_is_parsed_and_shown_by_its_usage() {
        for entry in CATALOGUE {
            let text = example(entry);
            let shown = one(&text).to_string();
            // When it strikes is between the values of the kind and the filter.
            let without_when = shown.replace(" nth=1", "").replace(" every=1", "");
            assert_eq!(without_when, text);
            assert_eq!(one(&shown).to_string(), shown);
        }
    }

    #[test]
    fn values_that_were_not_given_are_shown_if_they_matter() {
        for (text, shown) in [
            ("reset", "reset after=0 nth=1"),
            ("corrupt", "corrupt after=0 nth=1"),
            ("port-down", "port-down for=1s nth=1"),
            ("device-fatal", "device-fatal nth=1"),
            ("delay rate=1kbit", "delay rate=1000bit every=1"),
        ] {
            assert_eq!(one(text).to_string(), shown);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_specification_or_a_message(text in ".{0,80}") {
            let _ = parse(&text);
        }
    }
}
