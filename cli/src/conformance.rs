//! `urnic conformance`: the device against its datasheet.

use std::process::ExitCode;

use urnic_console::Unwritten;
use urnic_process::gids::GidTable;

use crate::answer::{Failure, print};
use crate::options::Options;

/// Prints the names of the checks.
pub(crate) fn list(part: &str) -> Result<ExitCode, Failure> {
    let names = urnic_device_checks::names().filter(|name| name.contains(part));
    print(&names.map(|name| format!("{name}\n")).collect::<String>())
}

/// Runs the checks on the device of the options.
pub(crate) fn run(options: &Options, part: &str) -> Result<ExitCode, Failure> {
    let config = options.config()?;
    if !urnic_device_checks::names().any(|name| name.contains(part)) {
        return Err(Failure::usage(format!(
            "no check has {part:?} in its name: see --list"
        )));
    }
    let bus =
        urnic_bus::open(&config, &GidTable::of_host(), &urnic_bus::Shared::default()).map_err(|errno| {
            let device = &config.device;
            Failure::runtime(format!(
                "cannot open {device}: {errno}: `urnic doctor --device {device}` shows the reason"
            ))
        })?;
    let summary = urnic_device_checks::run(&bus, part, &mut std::io::stdout());
    bus.shutdown();
    let summary = summary.map_err(Unwritten::from)?;
    Ok(ExitCode::from(u8::from(summary.failed > 0)))
}
