//! The limit on the length of files (`ulimit -f`). The kernel sends SIGXFSZ to a process that makes
//! a file longer, which ends a program that expects no such thing.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether a file may have this length, in bytes.
///
/// # Errors
/// `EFBIG`: it may not.
pub fn permits(len: u64) -> Result<(), Errno> {
    let limit = getrlimit(Resource::Fsize).current;
    match limit.is_some_and(|limit| limit < len) {
        true => Err(Errno::FBIG),
        false => Ok(()),
    }
}
