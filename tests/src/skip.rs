//! Tests that cannot run here report that and the reason; a silent pass would hide the missing
//! test.

use std::io::Write;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Prints `SKIPPED test: reason` past the test runner's capture.
pub fn report(reason: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // One write, so that lines of parallel tests stay whole; not eprintln, which is captured.
    let _ = std::io::stderr().write_all(format!("SKIPPED {name}: {reason}\n").as_bytes());
}

/// Returns the value, or prints why the test is skipped and returns from the test.
#[macro_export]
macro_rules! or_skip {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(reason) => return $crate::skip::report(&reason.to_string()),
        }
    };
}

/// Checks that the tests run as root.
///
/// # Errors
/// The reason for a skip.
pub fn root() -> Result<(), String> {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err("needs root".to_owned()),
    }
}

/// Lets this process, and those that it starts from now on, have `count` file descriptors.
///
/// # Errors
/// The reason for a skip.
pub fn descriptors(count: u64) -> Result<(), String> {
    let limit = getrlimit(Resource::Nofile);
    let has = |limit: Option<u64>| limit.is_none_or(|limit| limit >= count);
    let raised = match (has(limit.current), has(limit.maximum)) {
        (true, _) => Ok(()),
        (false, true) => setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(count),
                ..limit
            },
        ),
        (false, false) => Err(Errno::MFILE),
    };
    raised.map_err(|_| format!("needs {count} file descriptors (ulimit -n)"))
}

/// The path of the program.
///
/// # Errors
/// The reason for a skip.
pub fn installed(name: &str) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let found = places.map(|folder| folder.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| format!("{name} is not installed"))
}
