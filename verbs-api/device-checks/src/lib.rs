//! The test suite of the device's programming interface (`docs/reference/device.md`), for any
//! device on any bus.
//!
//! Each check starts with a device that was just reset and enabled, and drives it as a driver does:
//! registers, command queue, rings, doorbells, streams from the function to its own addresses. It
//! uses only the interface of [`urnic_device`], and no verbs.

mod check;
mod checks;
mod connection;
mod memory;
mod outcome;
mod queues;
pub mod rate;
mod rig;

use std::io::{self, Write};
use std::sync::Arc;

use urnic_device::bus::Bus;

use outcome::Failure;
use rig::{Line, Rig};

/// The results of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Checks that passed.
    pub passed: usize,
    /// Checks that failed.
    pub failed: usize,
    /// Checks that do not apply to this device.
    pub not_here: usize,
}

/// The names of all checks.
pub fn names() -> impl Iterator<Item = &'static str> {
    checks::all().map(|check| check.name)
}

/// Runs the checks whose names contain `filter`, and writes a line about each. The caller must not
/// use the device otherwise.
///
/// # Errors
/// The errors of writes to `out`.
pub fn run(bus: &Arc<dyn Bus>, filter: &str, out: &mut dyn Write) -> io::Result<Summary> {
    let line = Line::on(&**bus);
    let mut summary = Summary::default();
    for check in checks::all().filter(|check| check.name.contains(filter)) {
        let outcome = Rig::start(bus, &line).and_then(|rig| {
            let outcome = (check.run)(&rig);
            rig.stop().and(outcome)
        });
        match outcome {
            Ok(()) => {
                summary.passed += 1;
                writeln!(out, "ok      {}", check.name)?;
            }
            Err(Failure::NotHere(reason)) => {
                summary.not_here += 1;
                writeln!(out, "-       {}: {reason}", check.name)?;
            }
            Err(Failure::Failed(reason)) => {
                summary.failed += 1;
                writeln!(out, "FAILED  {}: {reason}", check.name)?;
            }
        }
        out.flush()?;
    }
    let Summary {
        passed,
        failed,
        not_here,
    } = summary;
    writeln!(
        out,
        "\n{passed} passed, {failed} failed, {not_here} not applicable to this device"
    )?;
    Ok(summary)
}
