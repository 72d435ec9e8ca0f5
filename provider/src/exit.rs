//! The end of a process: a summary in the log of what went wrong, the file of the option `report`,
//! and the exit status of `strict=error`.

use std::path::{Path, PathBuf};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use serde::Serialize;
use urnic_config::Config;
use urnic_device::counter::Counter;
use urnic_driver::Refused;
use urnic_driver::watch::{Failure, Snapshot};

use crate::files;
use crate::guard::guarded;
use crate::log;
use crate::refusals;
use crate::strict::{self, CallSite, Finding, Rule};

/// The longest wait for the thread that writes: a program that exits in a constructor of a library
/// holds a lock for which a new thread waits.
const LIMIT: Duration = Duration::from_secs(5);

static REPORT: OnceLock<PathBuf> = OnceLock::new();

/// The report of a process at its exit.
#[derive(Serialize)]
struct Report {
    /// Seconds since 1970.
    time: f64,
    pid: u32,
    /// The program and its arguments.
    command: Vec<String>,
    version: &'static str,
    devices: Vec<Snapshot>,
    /// The warnings and errors in the log.
    warnings: Vec<String>,
    findings: Vec<Finding>,
    /// The refused calls of verbs, by place.
    refusals: Vec<Refused>,
}

/// Notes the option `report`.
pub(crate) fn start(config: &Config) {
    if let Some(path) = &config.report {
        let path = files::of_process(path);
        if let Err(errno) = files::check(&path) {
            tracing::error!("report {}: {errno}", path.display());
        }
        let _ = REPORT.set(path);
        log::keep_warnings();
    }
}

/// Logs the summary and writes the report. Called at exit(3), while the devices are open. Returns
/// the exit status to end with, if it is not the program's own.
///
/// A separate thread does the work: the exiting thread may have no thread-local variables any more,
/// which the log needs.
pub(crate) fn say() -> Option<i32> {
    if !urnic_driver::failed() && strict::current().is_none() && REPORT.get().is_none() {
        return None;
    }
    let (tell, told) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("urnic-exit".to_owned());
    thread
        .spawn(move || {
            let status = guarded(|| Ok(report()));
            let _ = tell.send(status.unwrap_or_default());
        })
        .ok()?;
    told.recv_timeout(LIMIT).ok().flatten()
}

fn report() -> Option<i32> {
    let strict = strict::current();
    let path = REPORT.get();
    let devices = urnic_driver::snapshots();
    for device in &devices {
        if let Some(line) = summary(device) {
            tracing::warn!("{line}");
        }
    }
    // A process that opened no device, such as a shell, has nothing to report.
    if devices.is_empty() {
        return None;
    }
    if let Some(strict) = strict {
        for device in &devices {
            let stalls = device
                .counters
                .get(Counter::RxStalls.name())
                .copied()
                .unwrap_or(0);
            if stalls > 0 {
                strict.findings.report(Rule::ReceiveMissing, &CallSite::default(), || {
                    format!(
                        "{stalls} times a message for {} found no receive posted: on InfiniBand and RoCE a \
                         retry (RNR), with other iWARP devices the end of the connection",
                        device.name
                    )
                });
            }
        }
    }
    let status = strict.and_then(|strict| strict.end());
    if let Some(path) = path {
        let report = Report {
            time: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
            pid: std::process::id(),
            command: std::env::args_os()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            version: env!("CARGO_PKG_VERSION"),
            devices,
            warnings: log::warnings(),
            findings: strict.map(|strict| strict.findings.all()).unwrap_or_default(),
            refusals: refusals::all(),
        };
        if let Err(errno) = append(path, &report) {
            tracing::error!("report {}: {errno}", path.display());
        }
    }
    status
}

/// Adds a line to the file.
fn append(path: &Path, report: &Report) -> Result<(), Errno> {
    let mut line = serde_json::to_vec(report).map_err(|_| Errno::INVAL)?;
    line.push(b'\n');
    files::append(path, &line)
}

/// The failed completions of a device, in one line; `None` if none failed other than by a flush.
fn summary(device: &Snapshot) -> Option<String> {
    let is_flushed = |failure: &&Failure| failure.status == "WR_FLUSH_ERR";
    let (flushed, failed): (Vec<_>, Vec<_>) = device.failures.iter().partition(is_flushed);
    if failed.is_empty() {
        return None;
    }
    let each: Vec<String> = failed.iter().map(|failure| failure.to_string()).collect();
    let flushed: u64 = flushed.iter().map(|failure| failure.count).sum();
    Some(format!(
        "{} at exit: failed completions: {}; {flushed} flushed",
        device.name,
        each.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(opcode: &str, status: &str, vendor_err: u32, count: u64) -> Failure {
        Failure {
            opcode: opcode.to_owned(),
            status: status.to_owned(),
            vendor_err,
            count,
        }
    }

    fn device(failures: Vec<Failure>) -> Snapshot {
        let text = r#"{"pid":1,"command":"c","name":"urnic0","device":"inproc","memory":"","contexts":0,
                       "completion_queues":0,"counters":{},"queue_pairs":[]}"#;
        Snapshot {
            failures,
            ..serde_json::from_str(text).unwrap()
        }
    }

    #[test]
    fn only_failures_other_than_flushes_get_a_line() {
        let flushed = failure("RECV", "WR_FLUSH_ERR", 0, 16);
        assert_eq!(summary(&device(vec![])), None);
        assert_eq!(summary(&device(vec![flushed.clone()])), None);
        let refused = failure("RDMA_WRITE", "REM_ACCESS_ERR", 0x1100_c000, 1);
        assert_eq!(
            summary(&device(vec![refused, flushed])).unwrap(),
            "urnic0 at exit: failed completions: 1 RDMA_WRITE REM_ACCESS_ERR (vendor_err 0x1100c000); 16 flushed"
        );
    }
}
