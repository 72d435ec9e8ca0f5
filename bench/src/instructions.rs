//! Instructions that the two ends of a connection execute for one message, counted by valgrind: a
//! busy machine does not change these figures.
//!
//! The ends run in turn. An end that has nothing to do stops itself, and [`Ends::take_turns`]
//! resumes the other one, so that no end polls while it waits. `tests/programs/turns.c`, which is
//! preloaded into both, has the rest.

use std::thread::sleep;
use std::time::{Duration, Instant};

use urnic_tests::build::{compiled, compiled_with, plugin};
use urnic_tests::skip::installed;
use urnic_tests::{Folder, Program, Running};

use urnic_console::complain;

use crate::place::Place;
use crate::table::{Aim, Measured, Row, tried};
use crate::ucx;

/// Time limit for a pair of programs.
const LIMIT: Duration = Duration::from_secs(240);
/// The time that an end may run alone. Then the other runs as well, because the first one waits for
/// something other than a message; this occurs only at the start of a connection.
const TURN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(20);

/// `turns.c`: blocks of messages that it counts.
const BLOCKS: usize = 5;
/// Messages of a run: more than `turns.c` needs.
const MESSAGES: usize = 3000;

/// Runs of a measurement at most, and the difference that two of them may have.
const RUNS: usize = 6;
const AGREEMENT: f64 = 0.01;

/// Where messages pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Through memory, on one host.
    Host,
    /// Between hosts.
    Tcp,
}

impl Way {
    /// The name in the table.
    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Tcp => "TCP",
        }
    }
}

/// A kind of message.
struct Kind {
    what: &'static str,
    /// The roles of the ends for such a message.
    ends: [&'static str; 2],
    /// Options of `one_by_one`.
    ours: &'static str,
    /// UCX's test, and how the table calls it.
    theirs: &'static str,
    against: [&'static str; 2],
}

const KINDS: [Kind; 3] = [
    Kind {
        what: "Send 8 B",
        ends: ["sender", "receiver"],
        ours: "-o send -s 8",
        theirs: "-t tag_lat -s 8",
        against: ["UCX tag_lat, shm", "UCX tag_lat, TCP"],
    },
    Kind {
        what: "Write 8 B",
        ends: ["requester", "target"],
        ours: "-o write -s 8",
        theirs: "-t ucp_put_lat -s 8",
        against: ["UCX ucp_put_lat, shm", "UCX ucp_put_lat, TCP"],
    },
    Kind {
        what: "Write 64 KiB",
        ends: ["requester", "target"],
        ours: "-o write -s 65536",
        theirs: "-t ucp_put_lat -s 65536",
        against: ["UCX ucp_put_lat, shm", "UCX ucp_put_lat, TCP"],
    },
];

/// Instructions at both ends for each message that the client posts.
#[derive(Debug, Clone, Copy)]
struct Count {
    client: f64,
    server: f64,
}

impl Count {
    fn sum(self) -> f64 {
        self.client + self.server
    }

    /// Of a ping-pong, where each end sends one message and receives one: what one message takes at
    /// its two ends.
    fn one_way(self) -> f64 {
        self.sum() / 2.0
    }
}

/// The rows of a way, in the order of [`measure`].
pub(crate) fn rows(way: Way) -> Vec<Row> {
    let row = |what: &str, against| Row::new(what, "insn", against, Aim::Report);
    let name = way.name();
    let mut rows = Vec::new();
    for kind in &KINDS {
        let against = kind.against[way as usize];
        rows.push(row(&format!("{name}: {}, both ends", kind.what), against));
        for end in kind.ends {
            rows.push(row(&format!("{name}: {}, {end}", kind.what), ""));
        }
    }
    let against = KINDS[0].against[way as usize];
    rows.push(row(&format!("{name}: ib_send_lat 8 B, one end"), against));
    rows
}

/// Measures the rows of a way.
pub(crate) fn measure(rows: &mut [Row], way: Way, place: &Place) {
    complain("urnic-bench", &format!("counting instructions ({})", way.name()));
    let mut rows = rows.iter_mut();
    let mut add = |ours: Measured<f64>, theirs: Option<Measured<f64>>| {
        if let Some(row) = rows.next() {
            row.add(ours, theirs);
        }
    };
    let mut tagged = None;
    for kind in &KINDS {
        let ours = agreeing(|| by_urnic(&compiled("one_by_one")?, kind.ours, place));
        let theirs = agreeing(|| by_ucx(kind.theirs, way, place)).map(Count::one_way);
        tagged.get_or_insert(theirs.clone());
        add(ours.clone().map(Count::sum), Some(theirs));
        add(ours.clone().map(|count| count.client), None);
        add(ours.map(|count| count.server), None);
    }
    let options = "-d urnic0 -F -s 8 --use_old_post_send";
    let ours = agreeing(|| by_urnic(&installed("ib_send_lat")?, options, place));
    add(ours.map(Count::one_way), tagged);
}

/// Measures until two runs agree with the least, which is the result. (A background thread that has
/// not left the messages to the program adds some system calls.)
fn agreeing(run: impl Fn() -> Measured<Count>) -> Measured<Count> {
    let mut counts: Vec<Count> = Vec::new();
    for _ in 0..RUNS {
        counts.push(tried(&run)?);
        let least = counts.iter().copied().min_by(|a, b| a.sum().total_cmp(&b.sum()));
        let agrees =
            |count: &&Count| least.is_some_and(|least| count.sum() <= least.sum() * (1.0 + AGREEMENT));
        if let Some(least) = least.filter(|_| counts.iter().filter(agrees).count() > 1) {
            return Ok(least);
        }
    }
    let sums: Vec<String> = counts.iter().map(|count| format!("{:.0}", count.sum())).collect();
    Err(format!("the runs do not agree: {} instructions", sums.join(", ")))
}

fn by_urnic(program: &std::path::Path, options: &str, place: &Place) -> Measured<Count> {
    let mut plugins = plugin().as_os_str().to_owned();
    plugins.push(":");
    plugins.push(turns()?);
    let valgrind = Program::new("valgrind").plugin_at(plugins);
    counted(
        place,
        &valgrind,
        &format!("{} {options} -n {MESSAGES}", program.display()),
    )
}

fn by_ucx(test: &str, way: Way, place: &Place) -> Measured<Count> {
    let program = installed("ucx_perftest")?;
    let valgrind = Program::plain("valgrind").env("LD_PRELOAD", turns()?);
    let valgrind = match way {
        Way::Host => ucx::with_memory(valgrind),
        Way::Tcp => ucx::with_tcp(place, valgrind),
    };
    counted(
        place,
        &valgrind,
        &format!("{} {test} -f -w 0 -n {MESSAGES}", program.display()),
    )
}

/// The library that lets the ends run in turn.
fn turns() -> Measured<std::path::PathBuf> {
    installed("valgrind")?;
    compiled_with("turns", "turns.so", &["-O2", "-shared", "-fPIC"])
}

/// Runs both ends of this program by `valgrind`.
fn counted(place: &Place, valgrind: &Program, line: &str) -> Measured<Count> {
    let folder = Folder::new("turns");
    let shared = folder.file("turns");
    std::fs::write(&shared, [0; 4096]).map_err(|error| error.to_string())?;
    let end = |name: &str| {
        let counts = format!("--callgrind-out-file={}", folder.file(name).display());
        let valgrind = valgrind.clone().env("TURNS_FILE", &shared).env("TURNS_END", name);
        valgrind
            .args(["--tool=callgrind", "--separate-threads=yes"])
            .arg(counts)
            .line(line)
    };
    let mut pair = place.pair(&end("server"));
    pair.client = place.client(&end("client"));
    let (server, client) = pair.start();
    let printed = Ends([server, client]).take_turns()?;
    Ok(Count {
        client: least(&folder, "client", &printed)?,
        server: least(&folder, "server", &printed)?,
    })
}

/// The programs at both ends: the server, the client.
struct Ends([Running; 2]);

impl Ends {
    /// Lets both run in turn until they end; returns what the client printed.
    fn take_turns(mut self) -> Measured<String> {
        let start = Instant::now();
        while self.0.iter_mut().any(|end| end.ended().is_none()) {
            for (runs, waits) in [(0, 1), (1, 0)] {
                wait_until_stopped(&mut self.0[runs]);
                if self.0[waits].ended().is_some() {
                    self.0[runs].resume();
                } else if is_stopped(&self.0[waits]) {
                    self.0[waits].resume();
                }
            }
            if start.elapsed() > LIMIT {
                return Err(format!("{} did not end in time", self.0[1].name()));
            }
        }
        let [server, client] = self.0;
        server.wait().success();
        Ok(client.wait().success())
    }
}

/// Waits until an end has stopped itself, or ended.
fn wait_until_stopped(end: &mut Running) {
    let start = Instant::now();
    while !is_stopped(end) && end.ended().is_none() && start.elapsed() < TURN {
        sleep(PAUSE);
    }
}

fn is_stopped(end: &Running) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", end.pid())).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
}

/// The least number of instructions that a message takes at an end, of all blocks: a program may do
/// something now and then that has nothing to do with messages, as ucx_perftest's statistics every
/// second.
fn least(folder: &Folder, end: &str, printed: &str) -> Measured<f64> {
    let blocks = (1..=BLOCKS).map(|block| {
        let messages =
            messages(printed, block).ok_or("the program ended before its messages were counted")?;
        // The main thread, which sends and receives.
        let file = folder.file(&format!("{end}.{block}-01"));
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let total = total(&text).ok_or("callgrind wrote no total")?;
        Ok(total / messages)
    });
    let blocks = blocks.collect::<Measured<Vec<f64>>>()?;
    Ok(blocks.into_iter().fold(f64::INFINITY, f64::min))
}

/// The messages of a block, as `turns.c` prints them.
fn messages(printed: &str, block: usize) -> Option<f64> {
    let start = format!("block {block}: ");
    let line = printed.lines().find_map(|line| line.strip_prefix(&start))?;
    line.strip_suffix(" messages")?.parse().ok()
}

/// The instructions of a file of callgrind.
fn total(text: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_prefix("totals: "))?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn counts_are_found() {
        assert_eq!(
            total("events: Ir\nsummary: 11\n\nfn=x\n0 12\ntotals: 12\n"),
            Some(12.0)
        );
        assert_eq!(total("events: Ir\n"), None);
        let printed = "==1== Command\nblock 1: 256 messages\nblock 2: 128 messages\n";
        assert_eq!(messages(printed, 2), Some(128.0));
        assert_eq!(messages(printed, 3), None);
    }

    #[test]
    fn two_runs_must_agree() {
        let of = |figures: &'static [f64]| {
            let at = Cell::new(0);
            agreeing(move || {
                let client = figures[at.get()];
                at.set(at.get() + 1);
                Ok(Count { client, server: 0.0 })
            })
            .map(Count::sum)
        };
        assert_eq!(of(&[1000.0, 1009.0]), Ok(1000.0));
        assert_eq!(of(&[1020.0, 1000.0, 1021.0, 1001.0]), Ok(1000.0));
        let reason = "the runs do not agree: 1000, 1020, 1040, 1060, 1080, 1100 instructions";
        assert_eq!(
            of(&[1000.0, 1020.0, 1040.0, 1060.0, 1080.0, 1100.0]),
            Err(reason.to_owned())
        );
    }
}
