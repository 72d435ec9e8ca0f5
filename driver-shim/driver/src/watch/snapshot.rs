//! The answer of a process: the state of its device and of each queue pair.

use std::collections::BTreeMap;
use std::fmt;
use urnic_sync::Mutex;

use serde::{Deserialize, Serialize};
use urnic_device::counter::Counter;
use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_presence::HwCounter;
use urnic_presence::rdma_netlink::answer::Resource;

use crate::refusal::Refused;

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
    /// The way of the device's accesses to memory that the process registers.
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
    /// The last verb that a device of the process refused.
    #[serde(default)]
    pub last_refusal: Option<Refused>,
    /// The queue pairs, by number.
    pub queue_pairs: Vec<QueuePair>,
}

impl Snapshot {
    /// The value of a file of `hw_counters` or `counters`.
    pub(super) fn value(&self, counter: HwCounter) -> u64 {
        let of_device = |counter: Counter| self.counters.get(counter.name()).copied().unwrap_or(0);
        match counter {
            HwCounter::Device(counter) => of_device(counter),
            HwCounter::Port(port) => {
                let sum = port
                    .of
                    .iter()
                    .fold(0u64, |sum, &counter| sum.wrapping_add(of_device(counter)));
                sum / port.unit.max(1)
            }
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

/// The objects that a process has made on one of its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Objects {
    /// The device's name.
    pub(crate) name: String,
    /// The objects.
    pub(crate) all: Vec<Resource>,
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
    /// The number of such completions.
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

/// Completions in error of a device, counted by operation and cause when the program polls them.
/// There are few causes, so the table stays short.
#[derive(Debug, Default)]
pub struct Failures(Mutex<BTreeMap<Cause, u64>>);

/// Operation, status and `vendor_err`, as numbers of verbs.
type Cause = (u8, u8, u32);

/// More causes than this are counted as one: a peer chooses the bits of a Terminate.
const MOST_CAUSES: usize = 1000;

impl Failures {
    /// Counts a completion in error.
    pub fn count(&self, cqe: &Cqe) {
        let mut counts = self.0.lock();
        let known = counts.len() < MOST_CAUSES;
        let vendor_error = if known { cqe.vendor_error.get() } else { 0 };
        *counts.entry((cqe.opcode, cqe.status, vendor_error)).or_default() += 1;
    }

    /// Whether anything failed so far other than by a flush, which ends most connections.
    pub(crate) fn are_there(&self) -> bool {
        let is_failure = |&(_, status, _): &Cause| status != WcStatus::WrFlushErr as u8;
        self.0.lock().keys().any(is_failure)
    }

    /// All causes so far.
    pub fn all(&self) -> Vec<Failure> {
        let all = self.0.lock();
        all.iter()
            .map(|(&(opcode, status, vendor_err), &count)| Failure {
                opcode: WcOpcode::from_raw(opcode)
                    .map_or_else(|| opcode.to_string(), |opcode| opcode.verbs_name().to_owned()),
                status: WcStatus::from_raw(status)
                    .map_or_else(|| status.to_string(), |status| status.verbs_name().to_owned()),
                vendor_err,
                count,
            })
            .collect()
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
    /// The way of the bytes of the stream that is attached: `tcp`, `sctp`, or `memory` that both
    /// ends share.
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
    /// Bytes of the current transfer: of the oldest Read, or of the message that is being sent; 0:
    /// none.
    #[serde(default)]
    pub transfer_len: u32,
    /// Bytes of the current transfer that have arrived, or are sent.
    #[serde(default)]
    pub transfer_done: u32,
    /// The queue pair's counters, by name.
    pub counters: BTreeMap<String, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(opcode: WcOpcode, status: WcStatus, vendor_error: u32) -> Cqe {
        let mut cqe = Cqe::new(1, 2, 3, opcode, status);
        cqe.vendor_error = vendor_error.into();
        cqe
    }

    #[test]
    fn failures_are_counted_by_operation_and_cause() {
        let failures = Failures::default();
        let refused = failed(WcOpcode::RdmaWrite, WcStatus::RemAccessErr, 0x1100_c000);
        failures.count(&refused);
        failures.count(&failed(WcOpcode::Recv, WcStatus::WrFlushErr, 0));
        failures.count(&refused);
        let all = failures.all();
        assert!(failures.are_there());
        assert_eq!(all.len(), 2);
        assert_eq!(
            (&*all[0].opcode, &*all[0].status, all[0].vendor_err, all[0].count),
            ("RDMA_WRITE", "REM_ACCESS_ERR", 0x1100_c000, 2)
        );
        assert_eq!((&*all[1].opcode, all[1].count), ("RECV", 1));
    }

    #[test]
    fn a_flush_is_no_failure() {
        let failures = Failures::default();
        failures.count(&failed(WcOpcode::Recv, WcStatus::WrFlushErr, 0));
        assert!(!failures.are_there());
    }

    #[test]
    fn a_peer_cannot_make_the_table_grow_without_end() {
        let failures = Failures::default();
        for vendor_error in 0..2 * MOST_CAUSES as u32 {
            failures.count(&failed(WcOpcode::Send, WcStatus::RemOpErr, vendor_error));
        }
        assert!(failures.all().len() <= MOST_CAUSES + 1);
        assert_eq!(
            failures.all().iter().map(|failure| failure.count).sum::<u64>(),
            2 * MOST_CAUSES as u64
        );
    }
}
