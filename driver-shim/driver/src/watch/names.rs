//! Names of sockets in the folder, and their removal.
//!
//! A process that is killed leaves its socket's name behind. The next process that opens a device,
//! or the next `urnic stat`, removes such names. That must never affect a live process, so
//! * a name is used only once: it has 64 random bits. The process number may be used again; it
//!   serves only to find the name;
//! * a name appears when its socket can be reached: the socket is bound under another name first;
//! * a name contains the boot id of its kernel: a process of another host, in a folder that hosts
//!   share, cannot be reached from here, and counts as alive.

use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::time::{ClockId, clock_gettime};

/// The suffix of the names of sockets that accept requests.
const SUFFIX: &str = ".stat";
/// The suffix of the names of sockets that are bound but do not accept requests yet.
const UNREADY: &str = ".new";
/// Longest time that a process may take between binding a socket and renaming it; the usual time is
/// microseconds.
const MAX_BINDING_TIME: Duration = Duration::from_secs(60);

/// Binds the socket to a new name of this process. Returns the name.
///
/// # Errors
/// The errors of the folder; `ENOSYS` without getrandom(2).
pub(super) fn publish(folder: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> Result<String, Errno> {
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())?;
    let unique = u64::from_ne_bytes(random);
    let stem = format!("{}-{}-{unique:016x}", std::process::id(), boot());
    let (unready, name) = (format!("{stem}{UNREADY}"), format!("{stem}{SUFFIX}"));
    bind(socket, &address(folder, &unready)?)?;
    if let Err(errno) = renameat(folder, unready.as_str(), folder, name.as_str()) {
        let _ = unlinkat(folder, unready.as_str(), AtFlags::empty());
        return Err(errno);
    }
    Ok(name)
}

/// The names of sockets in the folder; with `pid`, those of that process.
pub(super) fn all(folder: BorrowedFd<'_>, pid: Option<u32>) -> Vec<String> {
    let prefix = pid.map_or_else(String::new, |pid| format!("{pid}-"));
    entries(folder)
        .into_iter()
        .filter(|name| name.ends_with(SUFFIX) && name.starts_with(&prefix))
        .collect()
}

/// Removes the names of processes that have ended.
pub(super) fn remove_stale(folder: BorrowedFd<'_>) {
    let Ok(probe) = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None) else {
        return;
    };
    for name in entries(folder) {
        let is_old = name.ends_with(UNREADY) && is_older(folder, &name, MAX_BINDING_TIME);
        if (name.ends_with(SUFFIX) || is_old)
            && address(folder, &name).and_then(|address| connect(&probe, &address)) == Err(Errno::CONNREFUSED)
        {
            remove_refused(folder, &name);
        }
    }
}

/// Removes a name whose socket refused a connection, if that means that its process has ended.
pub(super) fn remove_refused(folder: BorrowedFd<'_>, name: &str) {
    let is_socket = || {
        statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
    };
    let of_this_boot = name.split('-').nth(1) == Some(boot().as_str());
    if of_this_boot && is_socket() {
        let _ = unlinkat(folder, name, AtFlags::empty());
    }
}

fn entries(folder: BorrowedFd<'_>) -> Vec<String> {
    // `folder` may be an `O_PATH` descriptor, which cannot be read.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = openat(folder, ".", flags, Mode::empty()) else {
        return Vec::new();
    };
    Dir::read_from(&folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| String::from_utf8(entry.ok()?.file_name().to_bytes().to_vec()).ok())
        .filter(|name| name.ends_with(SUFFIX) || name.ends_with(UNREADY))
        .collect()
}

fn is_older(folder: BorrowedFd<'_>, name: &str, than: Duration) -> bool {
    let now = clock_gettime(ClockId::Realtime).tv_sec;
    statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| now.saturating_sub(stat.st_mtime) > than.as_secs().cast_signed())
}

/// The first digits of the running kernel's boot id; zeros without /proc.
fn boot() -> String {
    const DIGITS: usize = 8;
    let read = || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = openat(CWD, "/proc/sys/kernel/random/boot_id", flags, Mode::empty())?;
        let mut bytes = [0; DIGITS];
        rustix::io::read(file.as_fd(), &mut bytes)?;
        Ok::<_, Errno>(String::from_utf8_lossy(&bytes).into_owned())
    };
    read()
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .unwrap_or_else(|| "0".repeat(DIGITS))
}

/// The address of a name in a folder. Works also if the folder's path is too long for an address.
pub(super) fn address(folder: BorrowedFd<'_>, name: &str) -> Result<SocketAddrUnix, Errno> {
    use std::os::fd::AsRawFd;
    SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::OwnedFd;
    use rustix::fs::open;
    use std::sync::atomic::{AtomicBool, Ordering};
    use urnic_testkit::Folder;

    /// A folder of names, with a descriptor of the folder.
    struct Names(Folder, OwnedFd);

    impl Names {
        fn new() -> Names {
            let folder = Folder::new("names");
            let opened = open(folder.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
            Names(folder, opened)
        }

        fn socket(&self) -> (OwnedFd, String) {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
            let name = publish(self.1.as_fd(), socket.as_fd()).unwrap();
            (socket, name)
        }

        fn names(&self) -> Vec<String> {
            let mut names = entries(self.1.as_fd());
            names.sort();
            names
        }
    }

    #[test]
    fn names_of_ended_processes_are_removed() {
        let folder = Names::new();
        let (live, name) = folder.socket();
        for _ in 0..5 {
            drop(folder.socket().0);
        }
        assert_eq!(folder.names().len(), 6);
        remove_stale(folder.1.as_fd());
        assert_eq!(folder.names(), std::slice::from_ref(&name));
        assert_eq!(all(folder.1.as_fd(), Some(std::process::id())), [name]);
        assert!(all(folder.1.as_fd(), Some(0)).is_empty());
        drop(live);
        remove_stale(folder.1.as_fd());
        assert!(folder.names().is_empty());
    }

    #[test]
    fn names_of_other_hosts_and_other_files_are_kept() {
        let folder = Names::new();
        let other_host = "7-0123xyzw-1.stat";
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &address(folder.1.as_fd(), other_host).unwrap()).unwrap();
        drop(socket);
        let file = format!("7-{}-1.stat", boot());
        std::fs::write(folder.0.file(&file), "").unwrap();
        remove_stale(folder.1.as_fd());
        let mut expected = [other_host.to_owned(), file];
        expected.sort();
        assert_eq!(folder.names(), expected);
    }

    #[test]
    fn a_recent_unready_name_is_kept() {
        let folder = Names::new();
        let unready = format!("7-{}-1{UNREADY}", boot());
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &address(folder.1.as_fd(), &unready).unwrap()).unwrap();
        drop(socket);
        remove_stale(folder.1.as_fd());
        assert_eq!(
            folder.names(),
            std::slice::from_ref(&unready),
            "its process may still rename it"
        );
        let long_ago = rustix::fs::Timestamps {
            last_access: rustix::time::Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            },
            last_modification: rustix::time::Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            },
        };
        rustix::fs::utimensat(&folder.1, unready.as_str(), &long_ago, AtFlags::empty()).unwrap();
        remove_stale(folder.1.as_fd());
        assert!(folder.names().is_empty());
    }

    #[test]
    fn concurrent_removal_keeps_names_of_live_processes() {
        let folder = Names::new();
        let done = AtomicBool::new(false);
        let lost = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        remove_stale(folder.1.as_fd());
                    }
                });
            }
            let is_lost = |_: &i32| {
                let (socket, name) = folder.socket();
                let lost = !folder.names().contains(&name);
                drop(socket);
                lost
            };
            let lost = (0..2000).filter(is_lost).count();
            done.store(true, Ordering::Relaxed);
            lost
        });
        assert_eq!(lost, 0);
    }
}
