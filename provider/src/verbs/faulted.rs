//! Faults on demand ([`urnic_faults`]) of calls, completions and events. The callers ask
//! [`urnic_faults::is_on`] first, so that without a plan nothing of this is reached.

use rustix::io::Errno;
use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_driver::Driver;
use urnic_faults::{Action, Kind, Occasion, plan};

use super::completion_ring::is_receive;
use super::ledger::Ledger;

/// Fails a call if the plan says so.
///
/// # Errors
/// The error number of the plan.
#[inline]
pub(super) fn call(name: &str) -> Result<(), Errno> {
    match urnic_faults::is_on() {
        false => Ok(()),
        true => planned(name),
    }
}

#[cold]
fn planned(name: &str) -> Result<(), Errno> {
    let strikes = plan().strikes(&Occasion::Call(name));
    let errno = strikes.into_iter().find_map(|action| match action {
        Action::Do(Kind::Fail { errno, .. }) => Some(Errno::from_raw_os_error(errno)),
        _ => None,
    });
    errno.map_or(Ok(()), Err)
}

/// Changes the completion of a send as the plan says. Requests behind one that fails by the plan
/// are flushed, also those that the device had processed.
#[cold]
pub(super) fn completion(driver: &Driver, cqe: &mut Cqe, ledger: &Ledger) {
    if is_receive(cqe) || cqe.status != WcStatus::Success as u8 {
        return;
    }
    if ledger.is_failed_by_plan() {
        cqe.status = WcStatus::WrFlushErr as u8;
        return;
    }
    let opcode = WcOpcode::from_raw(cqe.opcode).map_or("", WcOpcode::verbs_name);
    for action in plan().strikes(&Occasion::Completion(opcode, cqe.label.get())) {
        match action {
            Action::Do(Kind::Complete(status)) => {
                cqe.status = status as u8;
                ledger.fail_by_plan();
                driver.fail_later(cqe.qid.get());
            }
            Action::Do(Kind::PortDown(time)) => driver.take_port_down(time),
            Action::Do(Kind::GidChange) => driver.change_gids_later(),
            Action::Do(Kind::DeviceFatal) => driver.stop(),
            _ => {}
        }
    }
}

/// Whether an event is lost.
#[cold]
pub(super) fn event_is_lost() -> bool {
    plan()
        .strikes(&Occasion::Event)
        .contains(&Action::Do(Kind::LoseEvent))
}
