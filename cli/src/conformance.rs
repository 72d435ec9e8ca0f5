//! `urnic conformance`: the device against its datasheet.

use std::io::Write as _;
use std::process::ExitCode;

use urnic_driver_shim::bus;
use urnic_driver_shim::presence::GidTable;

use crate::answer::{Failure, print};
use crate::options::Options;

/// Prints the names of the checks.
pub(crate) fn list(part: &str) -> Result<ExitCode, Failure> {
    let names = urnic_conformance::names().filter(|name| name.contains(part));
    print(&names.map(|name| format!("{name}\n")).collect::<String>())
}

/// Runs the checks on the device of the options.
pub(crate) fn run(options: &Options, part: &str) -> Result<ExitCode, Failure> {
    let config = options.config()?;
    if !urnic_conformance::names().any(|name| name.contains(part)) {
        return Err(Failure::usage(format!(
            "no check has {part:?} in its name: see --list"
        )));
    }
    let bus = bus::open(&config, &GidTable::of_host())
        .map_err(|errno| Failure::runtime(format!("cannot open the device: {errno}; see `urnic doctor`")))?;
    let mut out = std::io::stdout();
    let summary = urnic_conformance::run(&bus, part, &mut out).map_err(Failure::runtime)?;
    bus.shutdown();
    out.flush().map_err(Failure::runtime)?;
    Ok(ExitCode::from(u8::from(summary.failed > 0)))
}
