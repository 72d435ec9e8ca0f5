//! `urnic stat`: the state of the devices of running processes, as these report it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use urnic_config::Config;
use urnic_console::escaped;
use urnic_driver::watch::{self, QueuePair, Snapshot};

use crate::answer::{Failure, print, print_json};

/// The default interval between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

/// What to show, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// Only this process, with each of its queue pairs
    #[arg(value_parser = process_id, allow_negative_numbers = true)]
    pid: Option<u32>,
    /// Print JSON: an array of the devices of processes, one line for each report
    #[arg(long)]
    json: bool,
    /// The time between reports; the default is 1 for a table on a terminal, else one report
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    interval: Option<Duration>,
    /// End after this number of reports
    #[arg(long, value_name = "N", value_parser = reports)]
    count: Option<u64>,
}

fn process_id(text: &str) -> Result<u32, String> {
    let pid = text
        .parse()
        .ok()
        .filter(|pid| (1..=i32::MAX as u32).contains(pid));
    pid.ok_or_else(|| "not a process id; `urnic stat` lists those that use the device".to_owned())
}

fn reports(text: &str) -> Result<u64, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "not a number of reports from 1 on".to_owned())
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|interval| *interval >= Duration::from_millis(10))
        .ok_or_else(|| "not a number of seconds from 0.01 on".to_owned())
}

/// Prints reports until the requested number is reached.
pub(crate) fn show(args: &ReportArgs) -> Result<ExitCode, Failure> {
    let config = Config::from_env().map_err(Failure::usage)?;
    let homes = watch::homes(config.present.dir);
    let on_terminal = std::io::stdout().is_terminal() && !args.json;
    let interval = args.interval.or(on_terminal.then_some(INTERVAL));
    let reports = args
        .count
        .unwrap_or(if interval.is_some() { u64::MAX } else { 1 });
    let mut before = Vec::new();
    for number in 0..reports {
        if number > 0 {
            pause(interval.unwrap_or(INTERVAL))?;
        }
        let now = found(&homes, args.pid)?;
        if args.json {
            print_json(&serde_json::to_string(&now).map_err(Failure::runtime)?)?;
        } else {
            let clear = if on_terminal { "\x1b[H\x1b[J" } else { "" };
            let span = (number > 0).then(|| interval.unwrap_or(INTERVAL));
            let rates = Rates {
                before: &before,
                span,
            };
            let text = match now.as_slice() {
                all if args.pid.is_some() => {
                    let each: Vec<String> = all.iter().map(|one| process(one, &rates)).collect();
                    each.join("\n")
                }
                all => processes(all, &rates),
            };
            print(&(clear.to_owned() + &text))?;
        }
        before = now;
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the next report, or for the reader of standard output to close it: a write would
/// detect that only later.
fn pause(interval: Duration) -> Result<(), Failure> {
    let due = Instant::now().checked_add(interval);
    loop {
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(());
        }
        // Without a requested event, poll(2) reports only errors: for a pipe, that it has no reader
        // any more.
        let out = std::io::stdout();
        let mut watched = [PollFd::new(&out, PollFlags::empty())];
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match rustix::event::poll(&mut watched, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Err(Failure::reader_gone()),
            Err(errno) => return Err(Failure::runtime(format!("cannot wait: {errno}"))),
        }
    }
}

fn found(homes: &[PathBuf], pid: Option<u32>) -> Result<Vec<Snapshot>, Failure> {
    let found = watch::snapshots(homes, pid);
    match pid {
        Some(pid) if found.is_empty() && !Path::new(&format!("/proc/{pid}")).exists() => {
            Err(Failure::runtime(format!(
                "there is no process {pid}: `urnic stat` lists those that have a urnic device open"
            )))
        }
        Some(pid) if found.is_empty() => Err(Failure::runtime(format!(
            "process {pid} has no urnic device open, is another user's, or does not answer: `urnic stat` lists those that do"
        ))),
        _ => Ok(found),
    }
}

/// The snapshots of the previous report, from which rates are computed.
struct Rates<'a> {
    before: &'a [Snapshot],
    span: Option<Duration>,
}

impl Rates<'_> {
    /// Growth per second, if there was a previous report.
    fn of(&self, now: &Snapshot, counter: &str) -> Option<f64> {
        let is_it = |before: &&Snapshot| (before.pid, &before.name) == (now.pid, &now.name);
        let before = self.before.iter().find(is_it)?;
        let grown = value(&now.counters, counter).saturating_sub(value(&before.counters, counter));
        Some(grown as f64 / self.span?.as_secs_f64())
    }
}

pub(crate) fn value(counters: &BTreeMap<String, u64>, name: &str) -> u64 {
    counters.get(name).copied().unwrap_or(0)
}

/// The number of errors on the wire.
pub(crate) fn errors(counters: &BTreeMap<String, u64>) -> u64 {
    [
        "rx_crc_errors",
        "rx_marker_errors",
        "streams_lost",
        "tx_terminates",
        "rx_terminates",
        "cq_overflows",
    ]
    .iter()
    .fold(0, |sum, name| sum.saturating_add(value(counters, name)))
}

/// The columns that processes and queue pairs share.
const TRAFFIC: [(&str, &str); 4] = [
    ("TX-MSGS", "tx_messages"),
    ("TX-BYTES", "tx_bytes"),
    ("RX-MSGS", "rx_messages"),
    ("RX-BYTES", "rx_bytes"),
];

fn processes(all: &[Snapshot], rates: &Rates<'_>) -> String {
    if all.is_empty() {
        return "no process of yours has a urnic device open\n".to_owned();
    }
    let mut rows = vec![["PID", "DEVICE", "COMMAND", "QPS"].map(str::to_owned).to_vec()];
    rows[0].extend(TRAFFIC.iter().map(|(title, _)| (*title).to_owned()));
    rows[0].extend(["TX-B/S", "RX-B/S", "ERRORS"].map(str::to_owned));
    for one in all {
        let mut row = vec![
            one.pid.to_string(),
            one.name.clone(),
            one.command.clone(),
            one.queue_pairs.len().to_string(),
        ];
        row.extend(
            TRAFFIC
                .iter()
                .map(|(_, name)| amount(value(&one.counters, name) as f64)),
        );
        for name in ["tx_bytes", "rx_bytes"] {
            row.push(rates.of(one, name).map_or_else(|| "-".to_owned(), amount));
        }
        row.push(errors(&one.counters).to_string());
        rows.push(row);
    }
    table(&rows, 2)
}

fn process(one: &Snapshot, rates: &Rates<'_>) -> String {
    let mut text = format!(
        "process {}, {}, {}: {} queue pairs, {} completion queues, {} contexts\n\n",
        one.pid,
        escaped(&one.command),
        escaped(&one.name),
        one.queue_pairs.len(),
        one.completion_queues,
        one.contexts
    );
    let mut rows = vec![
        ["QPN", "STATE", "VIA", "BYTES", "LOCAL", "PEER"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows[0].extend(TRAFFIC.iter().map(|(title, _)| (*title).to_owned()));
    rows[0].push("TERMINATE".to_owned());
    rows.extend(one.queue_pairs.iter().map(queue_pair));
    text += &table(&rows, 6);
    text.push('\n');
    for failure in &one.failures {
        let _ = writeln!(text, "{}", escaped(&failure.to_string()));
    }
    if !one.failures.is_empty() {
        text.push('\n');
    }
    for (name, value) in &one.counters {
        let rate = rates
            .of(one, name)
            .filter(|rate| *rate > 0.0)
            .map_or_else(String::new, |rate| format!("{:>10}/s", amount(rate)));
        let _ = writeln!(text, "{:<20} {value:>20} {rate}", escaped(name));
    }
    text
}

fn queue_pair(pair: &QueuePair) -> Vec<String> {
    let end = |end: &Option<String>| end.clone().unwrap_or_else(|| "-".to_owned());
    let mut row = vec![
        format!("{:#08x}", pair.qpn),
        pair.state.clone(),
        if pair.rdma_cm { "rdma_cm" } else { "native" }.to_owned(),
        end(&pair.bytes),
        end(&pair.local),
        end(&pair.remote),
    ];
    row.extend(
        TRAFFIC
            .iter()
            .map(|(_, name)| amount(value(&pair.counters, name) as f64)),
    );
    row.push(terminate(pair));
    row
}

/// The Terminate of a queue pair.
pub(crate) fn terminate(pair: &QueuePair) -> String {
    match (pair.terminate_sent, pair.terminate_received) {
        (0, 0) => "-".to_owned(),
        (0, word) => format!("got {word:#010x}"),
        (word, _) => format!("sent {word:#010x}"),
    }
}

/// A number with about three digits, and a unit of 1000.
pub(crate) fn amount(n: f64) -> String {
    const UNITS: [&str; 6] = ["k", "M", "G", "T", "P", "E"];
    if n < 10_000.0 {
        return format!("{n:.0}");
    }
    let mut scaled = n;
    let mut unit = "";
    for next in UNITS {
        if scaled < 1000.0 {
            break;
        }
        (scaled, unit) = (scaled / 1000.0, next);
    }
    if scaled < 100.0 {
        format!("{scaled:.1}{unit}")
    } else {
        format!("{scaled:.0}{unit}")
    }
}

/// A table of rows: the first `left` columns are text, and the others are numbers.
fn table(rows: &[Vec<String>], left: usize) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| escaped(cell)).collect())
        .collect();
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = if column > 0 && column <= left {
                write!(line, "{cell:<width$}  ")
            } else {
                write!(line, "{cell:>width$}  ")
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_short_and_never_round_to_nothing() {
        for (n, text) in [
            (0.0, "0"),
            (9_999.0, "9999"),
            (10_000.0, "10.0k"),
            (123_456.0, "123k"),
            (5.06e9, "5.1G"),
            (1e30, "1000000000000E"),
        ] {
            assert_eq!(amount(n), text);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let rows =
            [["PID", "COMMAND", "QPS"], ["7", "a", "12345"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, 1), "PID  COMMAND    QPS\n  7  a        12345\n");
    }

    #[test]
    fn a_name_is_one_cell_whatever_is_in_it() {
        let rows =
            [["PID", "COMMAND"], ["7", "a\n\u{1b}[2J\u{9b}é"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&rows, 1), "PID  COMMAND\n  7  a\\n\\u{1b}[2J\\u{9b}é\n");
    }

    #[test]
    fn counters_of_another_process_overflow_no_sum() {
        let counters = ["rx_crc_errors", "streams_lost"].map(|name| (name.to_owned(), u64::MAX));
        assert_eq!(errors(&counters.into_iter().collect()), u64::MAX);
    }
}
