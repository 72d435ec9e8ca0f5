//! Completions in error, counted by operation and cause. They are counted when the program polls
//! them: what nobody looks at is not there.

use std::collections::BTreeMap;
use std::sync::Mutex;

use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};

use crate::watch::Failure;
use urnic_process::lock::lock;

/// The counts of a device. There are few causes, so the table stays short.
#[derive(Debug, Default)]
pub struct Failures(Mutex<BTreeMap<Cause, u64>>);

/// Operation, status and `vendor_err`, as numbers of verbs.
type Cause = (u8, u8, u32);

/// More causes than this are counted as one: a peer chooses the bits of a Terminate.
const MOST_CAUSES: usize = 1000;

impl Failures {
    /// Counts a completion in error.
    pub fn count(&self, cqe: &Cqe) {
        let mut counts = lock(&self.0);
        let known = counts.len() < MOST_CAUSES;
        let vendor_error = if known { cqe.vendor_error.get() } else { 0 };
        *counts.entry((cqe.opcode, cqe.status, vendor_error)).or_default() += 1;
    }

    /// Whether anything failed so far other than by a flush, which ends most connections.
    pub(crate) fn are_there(&self) -> bool {
        let is_failure = |&(_, status, _): &Cause| status != WcStatus::WrFlushErr as u8;
        lock(&self.0).keys().any(is_failure)
    }

    /// All causes so far.
    pub fn all(&self) -> Vec<Failure> {
        let all = lock(&self.0);
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
