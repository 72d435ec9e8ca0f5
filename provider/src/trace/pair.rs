//! The requests of a queue pair.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde_json::json;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_model::Nanos;
use urnic_process::lock::lock;

use super::file::{Trace, micros};

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
        let mut queues = lock(&self.queues);
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
        let mut queues = lock(&self.queues);
        let waiting = queues.sends.iter_mut().rev();
        for posted in waiting.take_while(|posted| posted.published.is_none()) {
            posted.published = Some(now);
        }
    }

    /// Requests from this slot on are taken back.
    #[cold]
    pub(crate) fn sends_taken_back(&self, slot: u32) {
        let is_kept = |posted: &Posted| posted.slot.wrapping_sub(slot).cast_signed() < 0;
        lock(&self.queues).sends.retain(is_kept);
    }

    /// The program posts a receive of this many bytes.
    #[cold]
    pub(crate) fn receive_posted(&self, wr_id: u64, bytes: u64) {
        let mut queues = lock(&self.queues);
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
        let mut queues = lock(&self.queues);
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
            // Those before have no completion of their own, and succeeded.
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
        if let Some(posted) = lock(&self.queues).receives.pop_front() {
            self.write(&posted, outcome, outcome.bytes.into(), "receive");
        }
    }

    /// The queues were emptied.
    pub(crate) fn emptied(&self) {
        let mut queues = lock(&self.queues);
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
