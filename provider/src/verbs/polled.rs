//! Completions that the program polls: those in error are counted, and checks see all of them.
//!
//! The log has a line for the first failure of each queue pair that is not merely a flush. The
//! device's own lines name both ends of the connection and the memory; this one names the program's
//! work request.

use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_driver::Driver;
use urnic_model::Nanos;
use urnic_model::log_limit::LogLimit;
use urnic_wire::rdmap::TerminateError;

use super::completion_ring::is_receive;
use super::ledger::Ledger;
use crate::guard::contained;
use crate::strict::PairCheck;
use crate::trace::Outcome;

static LIMIT: LogLimit = LogLimit::new("failed queue pairs");

/// Counts a completion in error that the program polls.
#[cold]
pub(super) fn note(driver: &Driver, cqe: &Cqe, wr_id: u64, ledger: &Ledger) {
    contained(|| {
        driver.failures().count(cqe);
        let is_flushed = cqe.status == WcStatus::WrFlushErr as u8;
        if !is_flushed && ledger.fails_first() && LIMIT.may_say(Nanos::monotonic()) {
            tracing::warn!("qp {:#x}: {}", cqe.label.get(), described(cqe, wr_id));
        }
    });
}

/// Shows a completion that the program polls to what looks at the requests of its queue pair.
#[cold]
pub(super) fn show(ledger: &Ledger, cqe: &Cqe, wr_id: u64) {
    let slot = cqe.cookie.get() as u32;
    if let Some(trace) = ledger.trace() {
        let outcome = Outcome {
            status: cqe.status,
            completed: Nanos(cqe.timestamp.get()),
            bytes: placed(cqe),
        };
        match is_receive(cqe) {
            true => trace.receive_polled(outcome),
            false => trace.send_polled(slot, outcome),
        }
    }
    let Some(check) = ledger.check() else { return };
    let is_error = ![WcStatus::Success as u8, WcStatus::WrFlushErr as u8].contains(&cqe.status);
    let failed = is_error.then(|| described(cqe, wr_id));
    match is_receive(cqe) {
        true => match check.shared() {
            Some(shared) => shared.receive_completed(cqe.cookie.get(), placed(cqe), failed),
            None => check.receive_completed(placed(cqe), failed),
        },
        false => check.send_completed(slot, cqe.status == WcStatus::Success as u8, failed),
    }
}

/// The program's name of a receive, if the device has another one.
#[cold]
pub(super) fn wr_id(ledger: &Ledger, cqe: &Cqe) -> u64 {
    let named = cqe.cookie.get();
    let shared = ledger.check().and_then(PairCheck::shared);
    shared.map_or(named, |shared| shared.wr_id(named))
}

/// The bytes that the device placed in the receive of a completion.
fn placed(cqe: &Cqe) -> u32 {
    let is_placed = cqe.status == WcStatus::Success as u8 && cqe.opcode == WcOpcode::Recv as u8;
    if is_placed { cqe.byte_len.get() } else { 0 }
}

/// The work request and its status.
fn described(cqe: &Cqe, wr_id: u64) -> String {
    let opcode = WcOpcode::from_raw(cqe.opcode).map_or("a request", WcOpcode::verbs_name);
    let status = WcStatus::from_raw(cqe.status).map_or("unknown status", WcStatus::verbs_name);
    let place = match is_receive(cqe) {
        true => String::new(),
        false => format!(
            " (request {} of its send queue)",
            cqe.cookie.get().wrapping_add(1)
        ),
    };
    let mut text = format!(
        "{opcode} with wr_id {wr_id:#x}{place} failed: {status} ({})",
        cqe.status
    );
    let control = cqe.vendor_error.get();
    if control != 0 {
        text += &format!(", vendor_err {control:#010x}");
        if let Some(error) = TerminateError::of_control(control) {
            text += &format!(": {error}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_request_and_the_terminate() {
        let mut cqe = Cqe::new(12, 2, 3, WcOpcode::RdmaWrite, WcStatus::RemAccessErr);
        cqe.vendor_error = 0x1100_c000.into();
        assert_eq!(
            described(&cqe, 7),
            "RDMA_WRITE with wr_id 0x7 (request 13 of its send queue) failed: REM_ACCESS_ERR (10), \
             vendor_err 0x1100c000: DDP invalid STag"
        );
        let receive = Cqe::new(7, 2, 3, WcOpcode::Recv, WcStatus::LocLenErr);
        assert_eq!(
            described(&receive, 7),
            "RECV with wr_id 0x7 failed: LOC_LEN_ERR (1)"
        );
    }
}
