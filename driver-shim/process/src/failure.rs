//! The reason why the device cannot be opened, in one line for the log.
//!
//! Functions return errnos, because libibverbs accepts nothing else. So each thread stores the name
//! of the system call that failed last, and the line is made where the program's call ends.

use std::cell::Cell;

use rustix::io::Errno;

thread_local!(static LAST: Cell<Option<(&'static str, Errno)>> = const { Cell::new(None) });

/// Passes on the outcome of the system call `call`. A failure is stored for [`explained`].
pub fn named<T>(call: &'static str, outcome: Result<T, Errno>) -> Result<T, Errno> {
    outcome.inspect_err(|errno| LAST.set(Some((call, *errno))))
}

/// A line with the failed call, the reason, and the remedy: "epoll_create1 failed: Too many open
/// files (os error 24): …".
pub fn explained(errno: Errno) -> String {
    let call = LAST
        .take()
        .filter(|(_, of_call)| *of_call == errno)
        .map(|(call, _)| format!("{call} failed: "))
        .unwrap_or_default();
    format!("{call}{errno}: {}", advice(errno))
}

/// Advice for an error of a system call that only allocates a kernel resource.
fn advice(errno: Errno) -> &'static str {
    match errno {
        Errno::MFILE => "raise the limit on open files, as by `ulimit -n 1024`",
        Errno::NFILE => "the whole system has too many open files: raise it by `sysctl fs.file-max`",
        Errno::PERM | Errno::ACCESS | Errno::NOSYS => {
            "a sandbox denies it: allow this call in its seccomp profile or security policy"
        }
        Errno::AGAIN => {
            "raise the limit on threads and processes, as by `ulimit -u \"$(ulimit -Hu)\"`, or that of the container"
        }
        Errno::FBIG => "raise the limit on the length of files, as by `ulimit -f unlimited`",
        Errno::NOMEM | Errno::NOBUFS => {
            "raise the memory limit of the process or its container, or free memory"
        }
        _ => "`urnic doctor` shows what is missing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_is_named_if_it_is_the_one_that_failed() {
        let failed: Result<(), Errno> = named("eventfd2", Err(Errno::PERM));
        assert_eq!(failed, Err(Errno::PERM));
        let text = explained(Errno::PERM);
        assert!(
            text.starts_with("eventfd2 failed: ") && text.contains("seccomp"),
            "{text}"
        );
        let text = explained(Errno::MFILE);
        assert!(!text.contains("eventfd2") && text.contains("ulimit -n"), "{text}");
    }
}
