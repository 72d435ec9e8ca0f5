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

use crate::answer::{Failure, print, print_json, width};
use crate::columns::{Column, Kind, fitting};

/// The default interval between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

/// The arguments of `urnic stat`.
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

/// The counters that processes and queue pairs have columns for.
const TRAFFIC: [&str; 4] = ["tx_messages", "tx_bytes", "rx_messages", "rx_bytes"];

const PROCESSES: [Column; 11] = [
    Column::number("PID", 0),
    Column::text("DEVICE", 1),
    Column::long("COMMAND", 0),
    Column::number("QPS", 1),
    Column::number("TX-MSGS", 3),
    Column::number("TX-BYTES", 2),
    Column::number("RX-MSGS", 3),
    Column::number("RX-BYTES", 2),
    Column::number("TX-B/S", 0),
    Column::number("RX-B/S", 0),
    Column::number("ERRORS", 0),
];

const PAIRS: [Column; 11] = [
    Column::number("QPN", 0),
    Column::text("STATE", 0),
    Column::text("VIA", 3),
    Column::text("BYTES", 2),
    Column::text("LOCAL", 5),
    Column::text("PEER", 0),
    Column::number("TX-MSGS", 4),
    Column::number("TX-BYTES", 1),
    Column::number("RX-MSGS", 4),
    Column::number("RX-BYTES", 1),
    Column::text("TERMINATE", 1),
];

fn processes(all: &[Snapshot], rates: &Rates<'_>) -> String {
    if all.is_empty() {
        return "no process of yours has a urnic device open\n".to_owned();
    }
    let mut rows = Vec::new();
    for one in all {
        let mut row = vec![
            one.pid.to_string(),
            one.name.clone(),
            one.command.clone(),
            one.queue_pairs.len().to_string(),
        ];
        row.extend(TRAFFIC.map(|name| amount(value(&one.counters, name) as f64)));
        for name in ["tx_bytes", "rx_bytes"] {
            row.push(rates.of(one, name).map_or_else(|| "-".to_owned(), amount));
        }
        row.push(errors(&one.counters).to_string());
        rows.push(row);
    }
    table(&PROCESSES, &rows, width())
}

fn process(one: &Snapshot, rates: &Rates<'_>) -> String {
    let mut text = format!(
        "process {}, {}, {}: {}, {}, {}\n\n",
        one.pid,
        escaped(&one.command),
        escaped(&one.name),
        counted(one.queue_pairs.len() as u64, "queue pair"),
        counted(one.completion_queues, "completion queue"),
        counted(one.contexts, "context")
    );
    let rows: Vec<Vec<String>> = one.queue_pairs.iter().map(queue_pair).collect();
    text += &table(&PAIRS, &rows, width());
    text.push('\n');
    for failure in &one.failures {
        let _ = writeln!(text, "{}", escaped(&failure.to_string()));
    }
    if !one.failures.is_empty() {
        text.push('\n');
    }
    text + &counters(one, rates)
}

/// The counters that have counted something, one in each line.
fn counters(one: &Snapshot, rates: &Rates<'_>) -> String {
    let counted = one.counters.iter().filter(|(_, value)| **value > 0);
    let rows: Vec<Vec<String>> = counted
        .map(|(name, value)| {
            let rate = rates.of(one, name).filter(|rate| *rate > 0.0);
            let rate = rate.map_or_else(String::new, |rate| format!("{}/s", amount(rate)));
            vec![name.clone(), value.to_string(), rate]
        })
        .collect();
    let columns = [
        Column::text("COUNTER", 0),
        Column::number("VALUE", 0),
        Column::number("RATE", 0),
    ];
    let others = match one.counters.len() - rows.len() {
        0 => String::new(),
        1 => "1 other counter is 0\n".to_owned(),
        others => format!("{others} other counters are 0\n"),
    };
    table(&columns, &rows, None) + &others
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
    row.extend(TRAFFIC.map(|name| amount(value(&pair.counters, name) as f64)));
    row.push(terminate(pair));
    row
}

/// A number of things.
pub(crate) fn counted(number: u64, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
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

/// A table with its titles, as wide as `room` permits.
fn table(columns: &[Column], rows: &[Vec<String>], room: Option<usize>) -> String {
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| escaped(cell)).collect())
        .collect();
    let shown = fitting(columns, &rows, 2, room);
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&titles).chain(&rows) {
        let mut line = String::new();
        for of in &shown {
            let width = of.width;
            let cell: String = row[of.index].chars().take(width).collect();
            let _ = match columns[of.index].kind {
                Kind::Number => write!(line, "{cell:>width$}  "),
                Kind::Text | Kind::Long => write!(line, "{cell:<width$}  "),
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

    const COLUMNS: [Column; 3] = [
        Column::number("PID", 0),
        Column::long("COMMAND", 0),
        Column::number("QPS", 0),
    ];

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
        let rows = [["7", "a", "12345"].map(str::to_owned).to_vec()];
        assert_eq!(
            table(&COLUMNS, &rows, None),
            " PID  COMMAND    QPS\n   7  a        12345\n"
        );
    }

    #[test]
    fn a_name_is_one_cell_whatever_is_in_it() {
        let rows = [["7", "a\n\u{1b}[2J\u{9b}é"].map(str::to_owned).to_vec()];
        assert_eq!(
            table(&COLUMNS[..2], &rows, None),
            " PID  COMMAND\n   7  a\\n\\u{1b}[2J\\u{9b}é\n"
        );
    }

    fn snapshot() -> Snapshot {
        let counters = ["rx_bytes", "tx_bytes"].map(|name| (name.to_owned(), 154_517_972_688));
        let counters: BTreeMap<String, u64> = counters.into_iter().collect();
        let pair = QueuePair {
            qpn: 0x99_ff00,
            state: "RTS".to_owned(),
            rdma_cm: true,
            bytes: Some("memory".to_owned()),
            local: Some("192.168.100.200:39423".to_owned()),
            remote: Some("192.168.100.201:42144".to_owned()),
            terminate_sent: 0,
            terminate_received: 0x1100_c000,
            send_blocks: 0,
            receives: 0,
            transfer_len: 0,
            transfer_done: 0,
            counters: counters.clone(),
        };
        Snapshot {
            pid: 4_194_303,
            command: "fifteen-letters".to_owned(),
            name: "urnic0".to_owned(),
            device: "inproc".to_owned(),
            memory: "direct".to_owned(),
            contexts: 1,
            completion_queues: 1,
            counters,
            failures: Vec::new(),
            last_refusal: None,
            queue_pairs: vec![pair],
        }
    }

    #[test]
    fn tables_fit_a_terminal_and_cut_no_name() {
        let process = ["4194303", "urnic0", "fifteen-letters", "4"];
        let numbers = ["2357k", "155G", "2357k", "155G", "10.0G", "10.0G", "0"];
        let process: Vec<String> = process
            .iter()
            .chain(&numbers)
            .map(|cell| (*cell).to_owned())
            .collect();
        let pair = queue_pair(&snapshot().queue_pairs[0]);
        for room in [80, 100, 200] {
            let text = table(&PROCESSES, std::slice::from_ref(&process), Some(room))
                + &table(&PAIRS, std::slice::from_ref(&pair), Some(room));
            for line in text.lines() {
                assert!(line.chars().count() <= room, "{room}: {text}");
            }
            for whole in [
                "4194303",
                "fifteen-letters",
                "0x99ff00",
                "192.168.100.201:42144",
                "got 0x1100c000",
            ] {
                assert!(text.contains(whole), "{whole} is not in {text}");
            }
        }
        let all = table(&PAIRS, &[pair], None);
        assert!(PAIRS.iter().all(|column| all.contains(column.title)), "{all}");
    }

    #[test]
    fn counters_that_are_zero_are_one_line() {
        let mut one = snapshot();
        one.counters.insert("tx_stalls".to_owned(), 0);
        one.counters.insert("unconfirmed_connections".to_owned(), 0);
        let rates = Rates {
            before: &[],
            span: None,
        };
        assert_eq!(
            counters(&one, &rates),
            "COUNTER          VALUE  RATE\n\
             rx_bytes  154517972688\n\
             tx_bytes  154517972688\n\
             2 other counters are 0\n"
        );
    }

    #[test]
    fn counters_of_another_process_overflow_no_sum() {
        let counters = ["rx_crc_errors", "streams_lost"].map(|name| (name.to_owned(), u64::MAX));
        assert_eq!(errors(&counters.into_iter().collect()), u64::MAX);
    }
}
