//! The option `trace`: a file with the life of each work request, for Perfetto, Chrome's viewer and
//! `urnic trace` (docs/guide/trace.md).
//!
//! The queues of a process with the option report each request that is posted, published and
//! polled; the time of completion is in the completion queue entry, from the same clock. Everything
//! else is derived when the completion is polled.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use urnic_sync::{Mutex, Published};

use serde::Serialize;
use serde_json::{Value, json};
use urnic_config::Config;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_model::Nanos;
use urnic_model::timed::{Observer, Passed, observe};
use urnic_process::program;

use crate::files;

mod array;

use array::{Array, Unwritable};

/// Events are written when there are so many bytes of them.
const FULL: usize = 32 << 10;

/// The trace of this process.
#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    pid: u32,
    /// Events that are not in the file yet, one in each line.
    events: Mutex<String>,
    array: Mutex<Array>,
    /// The file could not be written, and is not written any more.
    failed: AtomicBool,
    /// Messages so far.
    messages: AtomicU64,
}

/// An event other than those of requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Instant<'a> {
    /// A line of the log.
    Log(&'a str),
    /// A queue pair went to a state.
    State(u32, &'a str),
}

static CURRENT: Published<Trace> = Published::new();

/// The trace, if the option is on.
pub(crate) fn trace() -> Option<&'static Trace> {
    // A forked child has no part in the queues of its parent.
    CURRENT.get().filter(|trace| trace.pid == std::process::id())
}

/// Starts the trace if the option is on.
pub(crate) fn start(config: &Config) {
    let Some(path) = &config.trace else { return };
    let path = files::of_process(path);
    let trace = Trace {
        pid: std::process::id(),
        events: Mutex::default(),
        array: Mutex::new(Array::new(path.clone())),
        path,
        failed: AtomicBool::new(false),
        messages: AtomicU64::new(0),
    };
    let name = format!("{} ({})", program::name(), trace.pid);
    trace.add(&json!({
        "ph": "M", "name": "process_name", "pid": trace.pid, "args": { "name": name },
    }));
    // The file exists from the beginning, and an error is reported now.
    trace.flush();
    if trace.failed.load(Ordering::Relaxed) {
        return;
    }
    let trace: &'static Trace = Box::leak(Box::new(trace));
    observe(trace);
    CURRENT.refer_to(trace);
}

/// A time in the file: microseconds.
pub(super) fn micros(time: Nanos) -> f64 {
    time.0 as f64 / 1000.0
}

impl Trace {
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Adds an event.
    pub(super) fn add(&self, event: &impl Serialize) {
        if let Ok(text) = serde_json::to_string(event) {
            self.add_text(&(text + "\n"));
        }
    }

    fn add_text(&self, text: &str) {
        let mut events = self.events.lock();
        events.push_str(text);
        let full = (events.len() >= FULL).then(|| std::mem::take(&mut *events));
        drop(events);
        if let Some(full) = full {
            self.write(&full);
        }
    }

    /// Adds what happens now.
    pub(crate) fn note(&self, what: Instant<'_>) {
        let (name, track): (String, Value) = match what {
            Instant::Log(line) => (line.to_owned(), "log".into()),
            Instant::State(qpn, state) => (state.to_owned(), format!("qp {qpn:#x}").into()),
        };
        self.add(&json!({
            "ph": "i", "s": "p", "name": name, "cat": track, "pid": self.pid, "tid": 0,
            "ts": micros(Nanos::monotonic()),
        }));
    }

    /// Writes what there is, and ends the file: at exit.
    pub(crate) fn end(&self) {
        self.flush();
        self.change(Array::end);
    }

    fn flush(&self) {
        let rest = std::mem::take(&mut *self.events.lock());
        self.write(&rest);
    }

    /// Called without the lock of the events: the line of a failure is an event, too.
    fn write(&self, events: &str) {
        self.change(|array| array.append(events));
    }

    /// Changes the file, unless that has failed before.
    fn change(&self, change: impl FnOnce(&mut Array) -> Result<(), Unwritable>) {
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        let changed = change(&mut self.array.lock());
        if let Err(error) = changed
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            tracing::error!("trace {}: {error}; it ends here", self.path.display());
        }
    }
}

impl Observer for Trace {
    /// Writes a message of a connection: a span from its first segment to its last.
    fn passed(&self, message: Passed) {
        // A forked child has no part in the connections of its parent.
        if self.pid != std::process::id() {
            return;
        }
        let direction = if message.sent { "sent" } else { "received" };
        let number = self.messages.fetch_add(1, Ordering::Relaxed);
        let Passed {
            qpn,
            opcode,
            bytes,
            first,
            last,
            ..
        } = message;
        let event = |phase: &str, at: Nanos, args: &str| {
            format!(
                "{{\"ph\":\"{phase}\",\"name\":\"{direction}: {opcode}, {bytes} B\",\"cat\":\"wire of qp {qpn:#x}\",\
                 \"id\":\"wire-{number}\",\"pid\":{},\"tid\":{qpn},\"ts\":{}{args}}}\n",
                self.pid,
                micros(at),
            )
        };
        // All of it is plain text, and a program waits: so it is not made by way of values.
        let args = format!(
            ",\"args\":{{\"qp\":\"{qpn:#x}\",\"wire\":\"{direction}\",\"message\":\"{opcode}\",\"bytes\":{bytes},\
             \"first\":{},\"last\":{}}}",
            first.0, last.0,
        );
        self.add_text(&(event("b", first, &args) + &event("e", last, "")));
    }
}

/// The trace of one queue pair.
pub(crate) struct PairTrace {
    trace: &'static Trace,
    qpn: u32,
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    sends: VecDeque<Posted>,
    receives: VecDeque<Posted>,
    /// The number of the next receive.
    receive: u32,
}

/// A request whose completion the program has not polled.
struct Posted {
    slot: u32,
    wr_id: u64,
    opcode: WcOpcode,
    bytes: u64,
    posted: Nanos,
    /// When the device could see it; `None`: it waits, for example for its connection.
    published: Option<Nanos>,
}

/// The end of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) status: u8,
    /// When the device completed it.
    pub(crate) completed: Nanos,
    /// The bytes of a receive.
    pub(crate) bytes: u32,
}

impl PairTrace {
    /// The trace of a new queue pair.
    pub(crate) fn new(trace: &'static Trace, qpn: u32) -> PairTrace {
        PairTrace {
            trace,
            qpn,
            queues: Mutex::default(),
        }
    }

    /// The program posts a request of this many bytes to the send queue.
    #[cold]
    pub(crate) fn send_posted(&self, slot: u32, wr_id: u64, opcode: WcOpcode, bytes: u64) {
        let mut queues = self.queues.lock();
        queues.sends.push_back(Posted {
            slot,
            wr_id,
            opcode,
            bytes,
            posted: Nanos::monotonic(),
            published: None,
        });
        self.depth("sends", queues.sends.len());
    }

    /// The device sees all requests of the send queue.
    #[cold]
    pub(crate) fn sends_published(&self) {
        let now = Nanos::monotonic();
        let mut queues = self.queues.lock();
        let waiting = queues.sends.iter_mut().rev();
        for posted in waiting.take_while(|posted| posted.published.is_none()) {
            posted.published = Some(now);
        }
    }

    /// Requests from this slot on are taken back.
    #[cold]
    pub(crate) fn sends_taken_back(&self, slot: u32) {
        let is_kept = |posted: &Posted| posted.slot.wrapping_sub(slot).cast_signed() < 0;
        self.queues.lock().sends.retain(is_kept);
    }

    /// The program posts a receive of this many bytes.
    #[cold]
    pub(crate) fn receive_posted(&self, wr_id: u64, bytes: u64) {
        let mut queues = self.queues.lock();
        let (slot, now) = (queues.receive, Nanos::monotonic());
        queues.receive = slot.wrapping_add(1);
        queues.receives.push_back(Posted {
            slot,
            wr_id,
            opcode: WcOpcode::Recv,
            bytes,
            posted: now,
            published: Some(now),
        });
    }

    /// The program polls the completion of a send: it and those before are complete.
    #[cold]
    pub(crate) fn send_polled(&self, slot: u32, outcome: Outcome) {
        let mut queues = self.queues.lock();
        let is_complete = |posted: &Posted| slot.wrapping_sub(posted.slot).cast_signed() >= 0;
        let count = queues
            .sends
            .iter()
            .take_while(|posted| is_complete(posted))
            .count();
        let complete: Vec<Posted> = queues.sends.drain(..count).collect();
        self.depth("sends", queues.sends.len());
        drop(queues);
        for posted in &complete {
            // The requests before it have no completion of their own, and succeeded.
            let outcome = match posted.slot == slot {
                true => outcome,
                false => Outcome { status: 0, ..outcome },
            };
            self.write(posted, outcome, posted.bytes, "send");
        }
    }

    /// The program polls the completion of its oldest receive.
    #[cold]
    pub(crate) fn receive_polled(&self, outcome: Outcome) {
        if let Some(posted) = self.queues.lock().receives.pop_front() {
            self.write(&posted, outcome, outcome.bytes.into(), "receive");
        }
    }

    /// The queues were emptied.
    pub(crate) fn emptied(&self) {
        let mut queues = self.queues.lock();
        queues.sends.clear();
        queues.receives.clear();
    }

    fn depth(&self, queue: &str, depth: usize) {
        self.trace.add(&json!({
            "ph": "C", "name": format!("{queue} of qp {:#x}", self.qpn), "pid": self.trace.pid(),
            "ts": micros(Nanos::monotonic()), "args": { "outstanding": depth },
        }));
    }

    /// Writes the life of a request: one span, and within it one for each stage.
    fn write(&self, posted: &Posted, outcome: Outcome, bytes: u64, queue: &str) {
        let (pid, polled) = (self.trace.pid(), Nanos::monotonic());
        let published = posted.published.unwrap_or(posted.posted).max(posted.posted);
        // A flush has the time of the driver, and a receive may have completed before this clock
        // was read.
        let completed = outcome.completed.clamp(published, polled);
        let status = WcStatus::from_raw(outcome.status).map_or("?", WcStatus::verbs_name);
        let id = format!("{:x}-{queue}-{}", self.qpn, posted.slot);
        let category = format!("qp {:#x}", self.qpn);
        let name = format!("{} {:#x}", posted.opcode.verbs_name(), posted.wr_id);
        let edge = |phase: &str, name: &str, at: Nanos| {
            self.trace.add(&json!({
                "ph": phase, "name": name, "cat": category, "id": id, "pid": pid, "tid": self.qpn,
                "ts": micros(at),
            }));
        };
        self.trace.add(&json!({
            "ph": "b", "name": name, "cat": category, "id": id, "pid": pid, "tid": self.qpn,
            "ts": micros(posted.posted),
            "args": {
                "qp": format!("{:#x}", self.qpn), "opcode": posted.opcode.verbs_name(), "queue": queue,
                "wr_id": format!("{:#x}", posted.wr_id), "bytes": bytes, "status": status,
                "posted": posted.posted.0, "published": published.0, "completed": completed.0,
                "polled": polled.0,
            },
        }));
        let stages = [
            ("posted", posted.posted, published),
            ("device", published, completed),
            ("completed", completed, polled),
        ];
        for (stage, from, to) in stages {
            edge("b", stage, from);
            edge("e", stage, to);
        }
        edge("e", &name, polled);
    }
}
