//! The answer of a process: the state of its device and of each queue pair.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a process's device is at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The process.
    pub pid: u32,
    /// The program's name, as the kernel shortens it.
    pub command: String,
    /// The process's device, as the option `device` has it.
    pub device: String,
    /// How the device reaches the memory that the process registers.
    pub memory: String,
    /// Contexts that programs opened.
    pub contexts: u64,
    /// Completion queues.
    pub completion_queues: u64,
    /// Counters of the device, by name: those of all queue pairs, also of those that are gone, and
    /// its own.
    pub counters: BTreeMap<String, u64>,
    /// By number.
    pub queue_pairs: Vec<QueuePair>,
}

/// What a queue pair is at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePair {
    /// The verbs number.
    pub qpn: u32,
    /// `RESET`, `INIT`, `RTR`, `RTS`, `SQD`, `SQE`, `ERR`.
    pub state: String,
    /// Whether the connection manager connected it.
    pub rdma_cm: bool,
    /// Our end of the stream, if it has one: address and port.
    pub local: Option<String>,
    /// The peer's.
    pub remote: Option<String>,
    /// Control word of the Terminate that it sent; 0 = none.
    pub terminate_sent: u32,
    /// Of the one that it received.
    pub terminate_received: u32,
    /// Its counters, by name.
    pub counters: BTreeMap<String, u64>,
}
