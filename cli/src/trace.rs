//! `urnic trace`: summaries of the files that `urnic run --trace` writes.

mod events;
mod messages;
mod picture;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;
use urnic_console::escaped;

use crate::answer::Failure;
use events::{Request, events, requests, time};
use messages::Messages;

/// The commands of `urnic trace`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Print the time of each stage by operation, and the depth of each queue
    Summary {
        /// Traces
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Print each request and event in a line, in the order of time
    Text {
        /// Traces
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Draw the lanes of each queue pair as a picture (SVG)
    Picture {
        /// Where to begin: microseconds from the first post to a send queue
        #[arg(long, value_name = "US", default_value_t = 0.0)]
        from: f64,
        /// How much to draw: microseconds
        #[arg(long = "for", value_name = "US", default_value_t = 100.0)]
        span: f64,
        /// Traces
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Join traces of several processes into one file, in the order of time
    Join {
        /// The file to write
        #[arg(long, short, value_name = "FILE")]
        output: PathBuf,
        /// Traces
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

/// Carries it out; returns what to print.
pub(crate) fn act(action: &Action) -> Result<String, Failure> {
    match action {
        Action::Summary { files } => Ok(summary(&read(files)?)),
        Action::Text { files } => Ok(text(&read(files)?)),
        Action::Picture { from, span, .. } if !(from.is_finite() && *span > 0.0 && span.is_finite()) => {
            Err(Failure::usage("--from and --for take microseconds".to_owned()))
        }
        Action::Picture { from, span, files } => Ok(picture::picture(&read(files)?, *from, *span)),
        Action::Join { output, files } => {
            let events = read(files)?;
            let joined = Value::from(events).to_string() + "\n";
            std::fs::write(output, joined).map_err(|error| failed(output, &error))?;
            Ok(String::new())
        }
    }
}

fn failed(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::runtime(format!("{}: {error}", path.display()))
}

/// The events of all files, in the order of time.
fn read(files: &[PathBuf]) -> Result<Vec<Value>, Failure> {
    let mut all = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(path).map_err(|error| failed(path, &error))?;
        all.extend(events(&text).map_err(|error| failed(path, &error))?);
    }
    // The names of processes, which have no time, come first.
    all.sort_by(|one, other| time(one).total_cmp(&time(other)));
    Ok(all)
}

/// The stages, with the times in microseconds of the requests that had them.
const STAGES: [&str; 6] = ["posted", "first", "segments", "device", "completed", "all"];

/// The times of a request.
type Stages = [Option<f64>; STAGES.len()];

/// The time of each stage of a request. `first` and `segments` are those of its messages.
fn stages<'a>(request: &Request<'a>, messages: &mut Messages<'a>) -> Stages {
    let since = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1000.0;
    let segments = messages.take(request);
    [
        Some(request.micros("posted", "published")),
        segments.map(|segments| since(request.number("published"), segments.first)),
        segments.map(|segments| since(segments.first, segments.last)),
        Some(request.micros("published", "completed")),
        Some(request.micros("completed", "polled")),
        Some(request.micros("posted", "polled")),
    ]
}

/// The value below which this part of a sorted list is; `None`: it is empty.
fn percentile(sorted: &[f64], part: f64) -> Option<f64> {
    let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).copied()
}

fn summary(events: &[Value]) -> String {
    let mut by_opcode: BTreeMap<&str, Vec<(Request<'_>, Stages)>> = BTreeMap::new();
    let mut by_queue: BTreeMap<(u64, &str), Vec<(u64, u64)>> = BTreeMap::new();
    let all: Vec<Request<'_>> = requests(events).collect();
    for request in &all {
        if request.text("queue") == "send" {
            let span = (request.number("posted"), request.number("polled"));
            by_queue
                .entry((request.pid, request.text("qp")))
                .or_default()
                .push(span);
        }
    }
    let mut messages = Messages::of(events);
    for request in requests(events) {
        let stages = stages(&request, &mut messages);
        by_opcode
            .entry(request.text("opcode"))
            .or_default()
            .push((request, stages));
    }
    let mut text = String::from("operation    requests    failed            bytes\n");
    for (opcode, requests) in &by_opcode {
        let failed = requests
            .iter()
            .filter(|(request, _)| request.text("status") != "SUCCESS")
            .count();
        let bytes = requests.iter().fold(0u64, |sum, (request, _)| {
            sum.saturating_add(request.number("bytes"))
        });
        let _ = writeln!(
            text,
            "{:<10} {:>10} {failed:>9} {bytes:>16}",
            escaped(opcode),
            requests.len()
        );
    }
    text.push_str("\ntimes in us    ");
    for stage in STAGES {
        let _ = write!(text, " {stage:>9}");
    }
    text.push('\n');
    for (opcode, requests) in &by_opcode {
        for (part, name) in [(0.5, "p50"), (0.99, "p99")] {
            let _ = write!(text, "{:<11} {name}", escaped(opcode));
            for stage in 0..STAGES.len() {
                let mut times: Vec<f64> = requests.iter().filter_map(|(_, stages)| stages[stage]).collect();
                times.sort_by(f64::total_cmp);
                let time = percentile(&times, part).map_or_else(|| "-".to_owned(), short);
                let _ = write!(text, " {time:>9}");
            }
            text.push('\n');
        }
    }
    text + &depths(&by_queue)
}

/// A time in at most nine characters, if it is shorter than a quarter of an hour.
fn short(micros: f64) -> String {
    match micros < 100_000.0 {
        true => format!("{micros:.2}"),
        false => format!("{micros:.0}"),
    }
}

/// How many requests were outstanding in each send queue.
fn depths(by_queue: &BTreeMap<(u64, &str), Vec<(u64, u64)>>) -> String {
    let mut text =
        String::from("\nsend queues                          requests  most at once  mean  idle\n");
    for ((pid, qp), spans) in by_queue {
        let depth = Depth::of(spans);
        let _ = writeln!(
            text,
            "process {pid:<8} qp {:<16} {:>10} {:>13} {:>5.1} {:>4.0}%",
            escaped(qp),
            spans.len(),
            depth.most,
            depth.mean,
            depth.idle * 100.0
        );
    }
    text
}

/// How many requests are outstanding at once, from the first post to the last poll.
struct Depth {
    most: usize,
    mean: f64,
    /// The part of the time without any.
    idle: f64,
}

impl Depth {
    fn of(spans: &[(u64, u64)]) -> Depth {
        let starts = spans.iter().map(|(from, _)| (*from, 1));
        let ends = spans.iter().map(|(_, to)| (*to, -1));
        let mut changes: Vec<(u64, isize)> = starts.chain(ends).collect();
        changes.sort_unstable();
        let (mut depth, mut most, mut area, mut idle) = (0isize, 0isize, 0.0, 0u64);
        for pair in changes.windows(2) {
            let [(at, change), (next, _)] = *pair else {
                continue;
            };
            depth += change;
            most = most.max(depth);
            area += depth as f64 * (next - at) as f64;
            if depth == 0 {
                idle += next - at;
            }
        }
        let whole = match (changes.first(), changes.last()) {
            (Some((first, _)), Some((last, _))) => (last - first).max(1) as f64,
            _ => 1.0,
        };
        Depth {
            most: most.unsigned_abs(),
            mean: area / whole,
            idle: idle as f64 / whole,
        }
    }
}

fn text(events: &[Value]) -> String {
    let begin = events.iter().map(time).find(|at| *at > 0.0).unwrap_or(0.0);
    let mut text = String::new();
    let mut messages = Messages::of(events);
    for event in events {
        let since = time(event) - begin;
        let pid = event["pid"].as_u64().unwrap_or(0);
        if let Some(request) = requests(std::slice::from_ref(event)).next() {
            let [posted, first, segments, device, completed, _] = stages(&request, &mut messages);
            let shown = |name: &str, time: Option<f64>| time.map(|time| format!("{name} {time:.3}"));
            let stages: Vec<String> = [
                shown("posted", posted),
                shown("first", first),
                shown("segments", segments),
                shown("device", device),
                shown("completed", completed),
            ]
            .into_iter()
            .flatten()
            .collect();
            let _ = writeln!(
                text,
                "{since:>14.3} {pid} qp {} {} wr_id {} {} B {}: {}",
                escaped(request.text("qp")),
                escaped(request.text("opcode")),
                escaped(request.text("wr_id")),
                request.number("bytes"),
                escaped(request.text("status")),
                stages.join(", "),
            );
        } else if event["ph"] == "i" {
            let (track, name) = (event["cat"].as_str(), event["name"].as_str());
            let _ = writeln!(
                text,
                "{since:>14.3} {pid} {}: {}",
                escaped(track.unwrap_or("")),
                escaped(name.unwrap_or(""))
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::events::TRACE;
    use super::*;

    #[test]
    fn a_summary_has_stages_and_depth() {
        let summary = summary(&events(TRACE).unwrap());
        let lines = summary.lines().filter(|line| line.starts_with("SEND"));
        let words: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[0], ["SEND", "2", "1", "128"]);
        assert_eq!(
            words[1],
            ["SEND", "p50", "1.00", "-", "-", "1.00", "1.00", "3.00"]
        );
        assert_eq!(
            words[2],
            ["SEND", "p99", "1.00", "-", "-", "2.00", "4.00", "7.00"]
        );
        // Ten of twelve microseconds have a request.
        let queue = summary.lines().last().unwrap();
        assert!(queue.ends_with("2             1   0.8   17%"), "{queue}");
    }

    #[test]
    fn a_summary_fits_80_columns() {
        // Of the longest names, of hours, and of many bytes.
        let long = TRACE
            .replace("\"SEND\"", "\"RDMA_WRITE\"")
            .replace("\"qp\":\"0x1\"", "\"qp\":\"0xffffff\"")
            .replace("\"pid\":7", "\"pid\":4194303")
            .replace("\"bytes\":64", "\"bytes\":6400000000000")
            .replace("\"polled\":9000", "\"polled\":900000000000");
        let summary = summary(&events(&long).unwrap());
        assert!(summary.contains("899999998"), "{summary}");
        let longest = summary.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{summary}");
    }

    #[test]
    fn the_text_has_each_request_and_event() {
        let text = text(&events(TRACE).unwrap());
        let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
        assert_eq!(
            lines,
            [
                "0.000 7 qp 0x1: Rts",
                "1.000 7 qp 0x1 SEND wr_id 0x5 64 B SUCCESS: posted 1.000, device 2.000, completed 4.000",
                "10.000 7 qp 0x1 SEND wr_id 0x6 64 B RETRY_EXC_ERR: posted 1.000, device 1.000, completed 1.000",
            ]
        );
    }

    #[test]
    fn names_in_a_trace_are_escaped() {
        let forged = TRACE
            .replace("Rts", "\\n\\u001b[2J")
            .replace("SEND", "\\u009bSEND");
        let events = events(&forged).unwrap();
        for printed in [text(&events), summary(&events)] {
            let raw = printed.chars().find(|c| c.is_control() && *c != '\n');
            assert_eq!(raw, None, "{printed}");
        }
        assert!(
            text(&events).contains("qp 0x1: \\n\\u{1b}[2J"),
            "{}",
            text(&events)
        );
    }
}
