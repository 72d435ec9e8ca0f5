//! Checks of the environment of every process: `/proc`, the user, limits and system calls.

use std::path::Path;

use rustix::fs::{FsWord, MemfdFlags, memfd_create, statfs};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::process::{PidfdFlags, Resource, geteuid, getpid, getrlimit, pidfd_open};

use super::finding::Finding;
use super::fixes;

/// The file system of `/proc` (`<linux/magic.h>`).
const PROC_SUPER_MAGIC: FsWord = 0x9fa0;

/// Files up to this length must be possible: the largest memory that processes share is the table
/// of remote keys.
const LARGEST_FILE: u64 = 128 << 20;

/// The findings, of which only faults are worth a line.
pub(super) fn findings() -> Vec<Finding> {
    let proc_fs = proc_fs(Path::new("/proc"));
    let user = match proc_fs {
        None => user(&own_uid_map()),
        Some(_) => None,
    };
    let limit = getrlimit(Resource::Fsize).current;
    let calls = system_calls().into_iter().map(Some);
    [proc_fs, user, file_size(limit)]
        .into_iter()
        .chain(calls)
        .flatten()
        .collect()
}

fn proc_fs(path: &Path) -> Option<Finding> {
    let mounted = statfs(path).is_ok_and(|fs| fs.f_type == PROC_SUPER_MAGIC);
    (!mounted).then(|| {
        let path = path.display();
        Finding::wrong(
            "proc",
            format!("{path} is not mounted: programs are slow, and `urnic stat` does not find them"),
            format!("mount -t proc proc {path}    # as root; a container or chroot needs its own"),
        )
    })
}

/// The users that this process's user namespace has (user_namespaces(7)).
pub(super) fn own_uid_map() -> String {
    std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
}

/// Whether a user namespace with this map has this user.
pub(super) fn has_number(uid_map: &str, user: u32) -> bool {
    uid_map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (Some(Ok(first)), Some(_), Some(Ok(count))) = (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        user.checked_sub(first).is_some_and(|offset| offset < count)
    })
}

/// A user without a number is user 65534, as all such users are.
fn user(uid_map: &str) -> Option<Finding> {
    (!has_number(uid_map, geteuid().as_raw())).then(|| {
        Finding::wrong(
            "user namespace",
            format!(
                "you have no number in it, and are user {}, as all such users: programs have other folders than yours \
                 outside of it, and no privileges in it",
                geteuid().as_raw()
            ),
            "unshare --map-root-user COMMAND    # instead of unshare --user; or --map-current-user",
        )
    })
}

/// Growing a file beyond the limit raises a signal that ends a program.
fn file_size(limit: Option<u64>) -> Option<Finding> {
    let limit = limit.filter(|limit| *limit < LARGEST_FILE)?;
    let text = format!(
        "files may not grow beyond {limit} B: the device's files and the memory that it shares with other processes \
         do not fit"
    );
    let fix = match getrlimit(Resource::Fsize).maximum {
        None => "ulimit -f unlimited".to_owned(),
        Some(_) => "prlimit --fsize=unlimited --pid $$    # as root".to_owned(),
    };
    Some(Finding::wrong("file size", text, fix))
}

/// A system call that sandboxes deny, and what does not work without.
struct Call {
    name: &'static str,
    tried: fn() -> Result<(), Errno>,
    lost: &'static str,
    /// Programs run without it.
    is_optional: bool,
}

const CALLS: [Call; 5] = [
    Call {
        name: "memfd_create",
        tried: || memfd_create("urnic-doctor", MemfdFlags::CLOEXEC).map(drop),
        lost: "programs of this host exchange bytes by TCP only, and `urnic stat` and device memory do not work",
        is_optional: false,
    },
    Call {
        name: "socket of AF_NETLINK",
        tried: || {
            let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
            socket_with(family, SocketType::RAW, flags, None).map(drop)
        },
        lost: "the device has no addresses (GIDs)",
        is_optional: false,
    },
    Call {
        name: "pidfd_open",
        tried: || pidfd_open(getpid(), PidfdFlags::empty()).map(drop),
        lost: "bytes between programs of this host are copied twice",
        is_optional: true,
    },
    Call {
        name: "process_vm_readv",
        tried: || copied(libc::process_vm_readv),
        lost: "bytes between programs of this host are copied twice",
        is_optional: true,
    },
    Call {
        name: "process_vm_writev",
        tried: || copied(libc::process_vm_writev),
        lost: "bytes between programs of this host are copied twice",
        is_optional: true,
    },
];

fn system_calls() -> Vec<Finding> {
    let failed = CALLS
        .iter()
        .filter_map(|call| Some((call, (call.tried)().err()?)));
    let finding = |(call, errno): (&Call, Errno)| {
        let text = format!("{} fails: {errno}: {}", call.name, call.lost);
        match call.is_optional {
            true => Finding::note("system calls", text, Some(fixes::SANDBOX)),
            false => Finding::wrong("system calls", text, fixes::SANDBOX),
        }
    };
    failed.map(finding).collect()
}

type Copy = unsafe extern "C" fn(
    libc::pid_t,
    *const libc::iovec,
    libc::c_ulong,
    *const libc::iovec,
    libc::c_ulong,
    libc::c_ulong,
) -> isize;

/// Copies between two words of this process, by a call that copies between processes.
fn copied(copy: Copy) -> Result<(), Errno> {
    let (mut local, mut remote) = (0u64, 0u64);
    let vector = |word: &mut u64| libc::iovec {
        iov_base: std::ptr::from_mut(word).cast(),
        iov_len: size_of::<u64>(),
    };
    let (local, remote) = (vector(&mut local), vector(&mut remote));
    // SAFETY: two local variables, one of which the call reads and one of which it writes.
    let count = unsafe {
        copy(
            getpid().as_raw_pid(),
            &raw const local,
            1,
            &raw const remote,
            1,
            0,
        )
    };
    match count {
        8 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_file_system_that_is_not_proc_is_named() {
        assert_eq!(proc_fs(Path::new("/proc")), None);
        for wrong in ["/", "/no/such/place"] {
            let finding = proc_fs(Path::new(wrong)).expect("a fault");
            assert!(finding.fix.expect("a fix").starts_with("mount -t proc proc /"));
        }
    }

    #[test]
    fn a_user_without_a_number_is_named() {
        let me = geteuid().as_raw();
        let initial = "         0          0 4294967295\n";
        let own = format!("         7       1000          1\n{me:10} 1001 1\n");
        for map in [initial, &own] {
            assert_eq!(user(map), None, "{map}");
        }
        let others = format!("{:10} 1001 1\n", me + 1);
        for map in ["", "x y z\n", "7 8\n", &others] {
            assert_eq!(user(map).expect("a fault").verdict, Verdict::Wrong, "{map}");
        }
    }

    #[test]
    fn a_limit_on_files_is_wrong_only_if_it_is_low() {
        for (limit, is_wrong) in [
            (None, false),
            (Some(LARGEST_FILE), false),
            (Some(1 << 20), true),
            (Some(0), true),
        ] {
            assert_eq!(file_size(limit).is_some(), is_wrong, "{limit:?}");
        }
    }

    #[test]
    fn calls_that_are_permitted_are_not_reported() {
        let failed: Vec<String> = system_calls().iter().map(Finding::to_string).collect();
        assert_eq!(failed, [""; 0]);
    }
}
