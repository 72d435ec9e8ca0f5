//! Faults on demand ([`urnic_faults`]) of calls, completions and events. The callers check
//! [`urnic_faults::is_on`] first, so that without a plan this code is not reached.

use rustix::io::Errno;
use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_driver::{Driver, Reason, Refusal};
use urnic_faults::{CompletionFault, EventFault, occasion, plan};

use super::ledger::Ledger;
use super::work_completion::is_receive;

/// Fails a call on a device if the plan says so.
///
/// # Errors
/// The error number of the plan.
#[inline]
pub(super) fn call(driver: &Driver, name: &str) -> Result<(), Refusal> {
    match urnic_faults::fails(driver.name(), name) {
        None => Ok(()),
        Some(errno) => Err(Reason::Planned.with(Errno::from_raw_os_error(errno))),
    }
}

/// Whether a completion queue continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    /// It does.
    Well,
    /// It has overflowed, and shows nothing any more.
    Overflowed,
}

/// Changes the completion of a send as the plan says. Requests after one that fails by the plan
/// are flushed, also those that the device had processed.
#[cold]
pub(super) fn completion(driver: &Driver, cqe: &mut Cqe, ledger: &Ledger) -> Queue {
    let mut queue = Queue::Well;
    if is_receive(cqe) || cqe.status != WcStatus::Success as u8 {
        return queue;
    }
    if ledger.is_failed_by_plan() {
        cqe.status = WcStatus::WrFlushErr as u8;
        return queue;
    }
    let opcode = WcOpcode::from_raw(cqe.opcode).map_or("", WcOpcode::verbs_name);
    let occasion = occasion::completion(opcode, cqe.label.get());
    for fault in plan().strikes(driver.name(), &occasion) {
        match fault {
            CompletionFault::Complete(status) => {
                cqe.status = status as u8;
                ledger.fail_by_plan();
                driver.fail_later(cqe.qid.get());
            }
            CompletionFault::Late(delay) => urnic_faults::wait(delay.time),
            CompletionFault::CqOverflow => queue = Queue::Overflowed,
            CompletionFault::Device(fault) => driver.strike(fault),
        }
    }
    queue
}

/// Whether an event is lost.
#[cold]
pub(super) fn event_is_lost(driver: &Driver) -> bool {
    let mut strikes = plan().strikes(driver.name(), &occasion::event()).into_iter();
    strikes.any(|fault| match fault {
        EventFault::Lose => true,
    })
}
