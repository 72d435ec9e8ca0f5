//! The answer of a process: the state of its device and of each queue pair.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use urnic_presence::HwCounter;

/// The state of one of a process's devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The process number.
    pub pid: u32,
    /// The program's name, as the kernel shortens it.
    pub command: String,
    /// The device's name.
    #[serde(default)]
    pub name: String,
    /// The device, in the form of the option `device`.
    pub device: String,
    /// How the device reaches the memory that the process registers.
    pub memory: String,
    /// Contexts that programs opened.
    pub contexts: u64,
    /// Completion queues.
    pub completion_queues: u64,
    /// Counters of the device, by name: the sums over all queue pairs, also destroyed ones, and the
    /// device's own counters.
    pub counters: BTreeMap<String, u64>,
    /// Completions in error that the program has polled, by operation and cause.
    #[serde(default)]
    pub failures: Vec<Failure>,
    /// The queue pairs, by number.
    pub queue_pairs: Vec<QueuePair>,
}

impl Snapshot {
    /// The value of a file of `hw_counters`.
    pub(super) fn value(&self, counter: HwCounter) -> u64 {
        match counter {
            HwCounter::Device(counter) => self.counters.get(counter.name()).copied().unwrap_or(0),
            HwCounter::Failed(status) => {
                let of_status = self
                    .failures
                    .iter()
                    .filter(|failure| failure.status == status.verbs_name());
                of_status.fold(0, |sum, failure| sum.wrapping_add(failure.count))
            }
        }
    }
}

/// Completions in error with one cause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The operation, by its name in verbs without `IBV_WC_`.
    pub opcode: String,
    /// The status, by its name in verbs without `IBV_WC_`.
    pub status: String,
    /// The first word of the peer's Terminate; 0 = none.
    pub vendor_err: u32,
    /// How many there were.
    pub count: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.count, self.opcode, self.status)?;
        match self.vendor_err {
            0 => Ok(()),
            control => write!(f, " (vendor_err {control:#010x})"),
        }
    }
}

/// The state of a queue pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePair {
    /// The verbs number.
    pub qpn: u32,
    /// `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`.
    pub state: String,
    /// Whether the connection manager connected it.
    pub rdma_cm: bool,
    /// The way of the bytes of the stream that is attached: `tcp`, or `memory` that both ends
    /// share.
    pub bytes: Option<String>,
    /// Our end of the stream, if the queue pair has one: address and port.
    pub local: Option<String>,
    /// The peer's end of the stream: address and port.
    pub remote: Option<String>,
    /// Control word of the Terminate that the queue pair sent; 0 = none.
    pub terminate_sent: u32,
    /// Control word of the Terminate that the queue pair received; 0 = none.
    pub terminate_received: u32,
    /// Blocks of 64 B of the send queue that the device has not completed: one or more for each
    /// request.
    #[serde(default)]
    pub send_blocks: u32,
    /// Receives that are posted and that no message has taken; 0 with a shared receive queue.
    #[serde(default)]
    pub receives: u32,
    /// Bytes of the transfer under way: of the oldest Read, or of the message that is being sent;
    /// 0: none.
    #[serde(default)]
    pub transfer_len: u32,
    /// Bytes of it that have arrived, or are sent.
    #[serde(default)]
    pub transfer_done: u32,
    /// The queue pair's counters, by name.
    pub counters: BTreeMap<String, u64>,
}
