//! `urnic trace`: summaries of the files that `urnic run --trace` writes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::answer::Failure;

/// What to do with traces.
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

fn time(event: &Value) -> f64 {
    event["ts"].as_f64().unwrap_or(0.0)
}

/// The events of a file. Files of running or killed processes have no end.
fn events(text: &str) -> Result<Vec<Value>, String> {
    let body = text.trim_end();
    let whole = match body.strip_suffix(']') {
        Some(_) => body.to_owned(),
        None => format!("{}]", body.strip_suffix(',').unwrap_or(body)),
    };
    serde_json::from_str(&whole).map_err(|error| format!("not a trace: {error}"))
}

/// A request, in nanoseconds.
struct Request<'a> {
    pid: u64,
    args: &'a Map<String, Value>,
}

impl Request<'_> {
    fn text(&self, key: &str) -> &str {
        self.args.get(key).and_then(Value::as_str).unwrap_or("?")
    }

    fn number(&self, key: &str) -> u64 {
        self.args.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// Microseconds from one stage to another.
    fn micros(&self, from: &str, to: &str) -> f64 {
        self.number(to).saturating_sub(self.number(from)) as f64 / 1000.0
    }
}

/// The beginning of each request is an event that has all of it.
fn requests(events: &[Value]) -> impl Iterator<Item = Request<'_>> {
    events.iter().filter_map(|event| {
        let args = event["args"].as_object()?;
        args.contains_key("posted").then(|| Request {
            pid: event["pid"].as_u64().unwrap_or(0),
            args,
        })
    })
}

const STAGES: [(&str, &str, &str); 4] = [
    ("posted", "posted", "published"),
    ("device", "published", "completed"),
    ("completed", "completed", "polled"),
    ("all", "posted", "polled"),
];

/// The value below which this part of a sorted list is.
fn percentile(sorted: &[f64], part: f64) -> f64 {
    let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
    sorted.get(at).copied().unwrap_or(0.0)
}

fn summary(events: &[Value]) -> String {
    let mut by_opcode: BTreeMap<&str, Vec<Request<'_>>> = BTreeMap::new();
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
    for request in requests(events) {
        let opcode = request.args.get("opcode").and_then(Value::as_str).unwrap_or("?");
        by_opcode.entry(opcode).or_default().push(request);
    }
    let mut text = String::from("times in us              number    failed      bytes");
    for (stage, ..) in STAGES {
        let _ = write!(text, "  {:>10}", format!("{stage} p50"));
        let _ = write!(text, "  {:>13}", format!("{stage} p99"));
    }
    text.push('\n');
    for (opcode, requests) in &by_opcode {
        let failed = requests
            .iter()
            .filter(|request| request.text("status") != "SUCCESS")
            .count();
        let bytes: u64 = requests.iter().map(|request| request.number("bytes")).sum();
        let _ = write!(
            text,
            "{opcode:<20} {:>10} {failed:>9} {bytes:>10}",
            requests.len()
        );
        for (_, from, to) in STAGES {
            let mut times: Vec<f64> = requests.iter().map(|request| request.micros(from, to)).collect();
            times.sort_by(f64::total_cmp);
            let _ = write!(text, "  {:>10.2}", percentile(&times, 0.5));
            let _ = write!(text, "  {:>13.2}", percentile(&times, 0.99));
        }
        text.push('\n');
    }
    text.push_str("\nsend queues                          requests  most at once  mean  idle\n");
    for ((pid, qp), spans) in &by_queue {
        let depth = Depth::of(spans);
        let _ = writeln!(
            text,
            "process {pid:<8} qp {qp:<16} {:>10} {:>13} {:>5.1} {:>4.0}%",
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
    for event in events {
        let since = time(event) - begin;
        let pid = event["pid"].as_u64().unwrap_or(0);
        if let Some(request) = requests(std::slice::from_ref(event)).next() {
            let _ = writeln!(
                text,
                "{since:>14.3} {pid} qp {} {} wr_id {} {} B {}: posted {:.3}, device {:.3}, completed {:.3}",
                request.text("qp"),
                request.text("opcode"),
                request.text("wr_id"),
                request.number("bytes"),
                request.text("status"),
                request.micros("posted", "published"),
                request.micros("published", "completed"),
                request.micros("completed", "polled"),
            );
        } else if event["ph"] == "i" {
            let (track, name) = (event["cat"].as_str(), event["name"].as_str());
            let _ = writeln!(
                text,
                "{since:>14.3} {pid} {}: {}",
                track.unwrap_or(""),
                name.unwrap_or("")
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trace of two requests of one queue pair, of a process that was killed.
    const TRACE: &str = r#"[
{"ph":"M","name":"process_name","pid":7,"args":{"name":"program (7)"}},
{"ph":"i","s":"p","name":"Rts","cat":"qp 0x1","pid":7,"tid":0,"ts":1.0},
{"ph":"b","name":"SEND 0x5","cat":"qp 0x1","id":"1-send-0","pid":7,"tid":1,"ts":2.0,"args":{"qp":"0x1","opcode":"SEND","queue":"send","wr_id":"0x5","bytes":64,"status":"SUCCESS","posted":2000,"published":3000,"completed":5000,"polled":9000}},
{"ph":"b","name":"posted","cat":"qp 0x1","id":"1-send-0","pid":7,"tid":1,"ts":2.0},
{"ph":"b","name":"SEND 0x6","cat":"qp 0x1","id":"1-send-1","pid":7,"tid":1,"ts":11.0,"args":{"qp":"0x1","opcode":"SEND","queue":"send","wr_id":"0x6","bytes":64,"status":"RETRY_EXC_ERR","posted":11000,"published":12000,"completed":13000,"polled":14000}},
"#;

    #[test]
    fn a_trace_without_an_end_is_a_trace() {
        assert_eq!(events(TRACE).unwrap().len(), 5);
        let ended = format!("{}]", TRACE.trim_end().trim_end_matches(','));
        assert_eq!(events(&ended).unwrap().len(), 5);
        assert!(events("[\n").unwrap().is_empty());
        assert!(events("{").is_err());
    }

    #[test]
    fn a_summary_has_stages_and_depth() {
        let summary = summary(&events(TRACE).unwrap());
        let line = summary.lines().find(|line| line.starts_with("SEND")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[..4], ["SEND", "2", "1", "128"]);
        assert_eq!(
            words[4..],
            ["1.00", "1.00", "1.00", "2.00", "1.00", "4.00", "3.00", "7.00"]
        );
        // Ten of twelve microseconds have a request.
        let queue = summary.lines().last().unwrap();
        assert!(queue.ends_with("2             1   0.8   17%"), "{queue}");
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
}
