//! The file: events as Chrome's array of JSON objects, which needs no end, so that processes append
//! to it and may be killed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use serde::Serialize;
use serde_json::{Value, json};
use urnic_config::Config;
use urnic_model::Nanos;
use urnic_model::timed::{Observer, Passed, observe};
use urnic_process::lock::lock;
use urnic_process::program;

use crate::files;

/// Events are written when there are so many bytes of them.
const FULL: usize = 32 << 10;

/// The trace of this process.
#[derive(Debug)]
pub(crate) struct Trace {
    path: PathBuf,
    pid: u32,
    events: Mutex<String>,
    failed: OnceLock<()>,
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
    let trace = Trace {
        path: files::of_process(path),
        pid: std::process::id(),
        events: Mutex::default(),
        failed: OnceLock::new(),
        messages: AtomicU64::new(0),
    };
    if let Err(errno) = begin(&trace.path) {
        tracing::error!("trace {}: {errno}", path.display());
        return;
    }
    let name = format!("{} ({})", program::name(), trace.pid);
    trace.add(&json!({
        "ph": "M", "name": "process_name", "pid": trace.pid, "args": { "name": name },
    }));
    let trace: &'static Trace = Box::leak(Box::new(trace));
    observe(trace);
    CURRENT.store(std::ptr::from_ref(trace).cast_mut(), Ordering::Release);
}

/// Begins the file, unless another process has.
fn begin(path: &Path) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    match open(path, flags, Mode::from_raw_mode(0o666)) {
        Ok(file) => rustix::io::write(file, b"[\n").map(drop),
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
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
            self.add_text(&(text + ",\n"));
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

    /// Writes what there is: at exit.
    pub(crate) fn end(&self) {
        let rest = std::mem::take(&mut *lock(&self.events));
        self.write(&rest);
    }

    /// Called without the lock: the line of a failure is an event, too.
    fn write(&self, events: &str) {
        if let Err(errno) = files::append(&self.path, events.as_bytes())
            && self.failed.set(()).is_ok()
        {
            tracing::error!("trace {}: {errno}", self.path.display());
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
                 \"id\":\"wire-{number}\",\"pid\":{},\"tid\":{qpn},\"ts\":{}{args}}},\n",
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
