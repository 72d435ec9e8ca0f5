//! The trace of a process: events, in Chrome's format, on their way to the file.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use serde::Serialize;
use serde_json::{Value, json};
use urnic_config::Config;
use urnic_model::Nanos;
use urnic_model::timed::{Observer, Passed, observe};
use urnic_process::lock::lock;
use urnic_process::program;

use super::array::{Array, Unwritable};
use crate::files;

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

/// What happened at a moment, beside the requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Instant<'a> {
    /// A line of the log.
    Log(&'a str),
    /// A queue pair went to a state.
    State(u32, &'a str),
}

static CURRENT: AtomicPtr<Trace> = AtomicPtr::new(std::ptr::null_mut());

/// The trace, if the option is on.
pub(crate) fn trace() -> Option<&'static Trace> {
    // SAFETY: the pointer is null, or leads to a box that is never freed.
    let trace = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    // A forked child has no part in the queues of its parent.
    trace.filter(|trace| trace.pid == std::process::id())
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
    // The file is there from the beginning, and an error is told now.
    trace.flush();
    if trace.failed.load(Ordering::Relaxed) {
        return;
    }
    let trace: &'static Trace = Box::leak(Box::new(trace));
    observe(trace);
    CURRENT.store(std::ptr::from_ref(trace).cast_mut(), Ordering::Release);
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
        let mut events = lock(&self.events);
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
        let rest = std::mem::take(&mut *lock(&self.events));
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
        let changed = change(&mut lock(&self.array));
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
