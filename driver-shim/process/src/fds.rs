//! The table of the process's file descriptors that belong to urnic.
//!
//! Every `close`, `write` and `dup2` of the program checks this table first, also from signal
//! handlers and between fork and exec. So a check costs two loads and no lock, and the table is
//! plain atomics: a slot per number, in pages that are made when first needed.
//!
//! The table has: the descriptors that stand for a device file, a channel of the connection
//! manager or a socket of RDMA netlink; the program's end of an event channel; and internal
//! descriptors (the other ends, sockets, locks), which a program that closes all numbers must not
//! close, and which it must not replace.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use urnic_sync::Published;
use urnic_sys::descriptors;

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::process::{Resource, getpid, getrlimit};

const PAGE: usize = 1024;
/// Numbers up to a million, the kernel's usual limit (fs.nr_open).
const PAGES: usize = 1024;

type Page = [AtomicU64; PAGE];

/// One slot per fd: 0, or the kind in the lowest three bits and in the other bits a value that
/// distinguishes this open file from another one with the same number.
static TABLE: [Published<Page>; PAGES] = [const { Published::new() }; PAGES];

/// The process that the table describes. A child made by vfork shares our memory, but has its own
/// fds.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Distinguishes two uses of one number, for internal fds.
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// The kind of a descriptor in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// A descriptor of the program: an open uverbs device.
    Uverbs = 1,
    /// A descriptor of the program: the reading end of an event channel.
    Events = 2,
    /// An internal descriptor, closed in a forked child, which has no device.
    Device = 3,
    /// An internal descriptor that stays open in a forked child.
    Kept = 4,
    /// A descriptor of a device, which closes it: see [`claim`].
    Claimed = 5,
    /// A descriptor of the program: a channel of the connection manager.
    Cm = 6,
    /// A descriptor of the program: a socket of RDMA netlink.
    Netlink = 7,
}

impl Kind {
    fn of(slot: u64) -> Option<Kind> {
        [
            Kind::Uverbs,
            Kind::Events,
            Kind::Device,
            Kind::Kept,
            Kind::Claimed,
            Kind::Cm,
            Kind::Netlink,
        ]
        .into_iter()
        .find(|kind| *kind as u64 == slot & 7)
    }

    /// Whether the program does not use descriptors of this kind.
    pub fn is_internal(self) -> bool {
        matches!(self, Kind::Device | Kind::Kept | Kind::Claimed)
    }
}

fn slot(fd: RawFd) -> Option<&'static AtomicU64> {
    let fd = usize::try_from(fd).ok()?;
    TABLE.get(fd / PAGE)?.get()?.get(fd % PAGE)
}

fn slot_made(fd: RawFd) -> Option<&'static AtomicU64> {
    let fd = usize::try_from(fd).ok()?;
    let page = TABLE.get(fd / PAGE)?;
    page.get_or_init(|| [const { AtomicU64::new(0) }; PAGE])
        .get(fd % PAGE)
}

/// The kind of `fd` if it is in the table. Makes a system call only if the table has an entry.
#[inline]
pub fn kind(fd: RawFd) -> Option<Kind> {
    let found = slot(fd)?.load(Ordering::Acquire);
    if found == 0 { None } else { kind_here(found) }
}

#[cold]
fn kind_here(found: u64) -> Option<Kind> {
    (OWNER.load(Ordering::Relaxed) == getpid().as_raw_pid())
        .then(|| Kind::of(found))
        .flatten()
}

/// The [`kind`] of `fd`, but only if `fd` is still the open file that was entered: raw system calls
/// may have replaced it.
pub fn verified_kind(fd: RawFd) -> Option<Kind> {
    verified(fd, kind(fd)?)
}

/// `kind`, if `fd` is still the open file that was entered with that kind.
pub fn verified(fd: RawFd, kind: Kind) -> Option<Kind> {
    let found = slot(fd)?.load(Ordering::Acquire);
    let same = match kind {
        Kind::Uverbs | Kind::Events | Kind::Cm | Kind::Netlink => fingerprint(fd, kind).ok()? == found,
        Kind::Device | Kind::Kept | Kind::Claimed => true,
    };
    same.then_some(kind)
}

/// Enters an fd of the program.
///
/// # Errors
/// `EBADF` if the file is not of the kind `kind`, `EMFILE` if the number is beyond the table.
pub fn enter(fd: RawFd, kind: Kind) -> Result<(), Errno> {
    let print = fingerprint(fd, kind)?;
    slot_made(fd).ok_or(Errno::MFILE)?.store(print, Ordering::Release);
    Ok(())
}

/// Removes an fd of the program that is about to be closed or replaced. Returns its kind.
pub fn take(fd: RawFd) -> Option<Kind> {
    let kind = kind(fd).filter(|kind| !kind.is_internal())?;
    slot(fd)?.store(0, Ordering::Release);
    Some(kind)
}

/// Prevents the program from closing an fd that a device made and closes itself, also in a forked
/// child.
pub fn claim(fd: RawFd) {
    if let Some(slot) = slot_made(fd) {
        slot.store(Kind::Claimed as u64, Ordering::Release);
    }
}

/// To be called before a claimed fd is closed: afterwards the program may get the same number.
pub fn disclaim(fd: RawFd) {
    if let Some(slot) = slot(fd) {
        let _ = slot.compare_exchange(Kind::Claimed as u64, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The numbers in `first..=last` that are in the table, lowest first, for `close_range`.
pub fn ours_within(first: u32, last: u32) -> impl Iterator<Item = (RawFd, Kind)> {
    let last = last.min((PAGE * PAGES - 1) as u32);
    let pages = (first as usize / PAGE)..=(last as usize / PAGE);
    pages
        .filter(|&page| TABLE.get(page).is_some_and(|page| page.get().is_some()))
        .flat_map(|page| (page * PAGE)..(page * PAGE + PAGE))
        .filter(move |&fd| (first as usize..=last as usize).contains(&fd))
        .filter_map(|fd| Some((fd as RawFd, kind(fd as RawFd)?)))
}

/// A value that identifies an open file of the program: the inode of a socket, the number of a
/// device file.
fn fingerprint(fd: RawFd, kind: Kind) -> Result<u64, Errno> {
    let stat = descriptors::status(fd)?;
    let (wanted, id) = match kind {
        Kind::Uverbs => (FileType::CharacterDevice, stat.st_rdev),
        _ => (FileType::Socket, stat.st_ino),
    };
    if FileType::from_raw_mode(stat.st_mode) != wanted {
        return Err(Errno::BADF);
    }
    Ok(id << 3 | kind as u64)
}

/// An internal fd: its number is high, so that programs that use select(2) keep the low numbers; it
/// is close-on-exec; the program cannot close it; and it is closed in forked children, unless kept.
#[derive(Debug)]
pub struct InternalFd {
    fd: RawFd,
    entry: u64,
}

impl InternalFd {
    /// Takes over an fd of the device: it is closed in forked children, where the device is
    /// unusable.
    ///
    /// # Errors
    /// `EMFILE` when the process has no fd left.
    pub fn of_device(fd: OwnedFd) -> Result<InternalFd, Errno> {
        InternalFd::enter(fd, Kind::Device)
    }

    /// Takes over an fd that forked children continue to use.
    ///
    /// # Errors
    /// `EMFILE` when the process has no fd left.
    pub fn kept(fd: OwnedFd) -> Result<InternalFd, Errno> {
        InternalFd::enter(fd, Kind::Kept)
    }

    fn enter(fd: OwnedFd, kind: Kind) -> Result<InternalFd, Errno> {
        let fd = raise(fd)?;
        let entry = SERIAL.fetch_add(1, Ordering::Relaxed) << 3 | kind as u64;
        let slot = slot_made(fd.as_raw_fd()).ok_or(Errno::MFILE)?;
        slot.store(entry, Ordering::Release);
        Ok(InternalFd {
            fd: fd.into_raw_fd(),
            entry,
        })
    }

    /// The fd, unless this process is a forked child in which it is closed.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        let here = slot(self.fd)?.load(Ordering::Acquire) == self.entry;
        // SAFETY: the entry is still in the table, so the fd is open.
        here.then(|| unsafe { BorrowedFd::borrow_raw(self.fd) })
    }
}

impl Drop for InternalFd {
    fn drop(&mut self) {
        let Some(slot) = slot(self.fd) else { return };
        if slot
            .compare_exchange(self.entry, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            // SAFETY: the table had the entry of this value until now, so the fd is open and has no
            // other owner.
            drop(unsafe { OwnedFd::from_raw_fd(self.fd) });
        }
    }
}

/// Moves an fd to a high number, close-on-exec; leaves it at its number if no high number is free.
fn raise(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    // FD_SETSIZE is 1024. A process with a low limit keeps half of its numbers for itself.
    let floor = match getrlimit(Resource::Nofile).current {
        Some(limit) if limit <= 2048 => limit / 2,
        _ => 1024,
    };
    match rustix::io::fcntl_dupfd_cloexec(&fd, floor as RawFd) {
        Err(Errno::MFILE | Errno::INVAL) => {
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
            Ok(fd)
        }
        raised => raised,
    }
}

/// Makes the table describe the calling process.
pub fn adopt_process() {
    OWNER.store(getpid().as_raw_pid(), Ordering::Relaxed);
}

/// In a forked child: closes the device's fds and removes the program's fds of the device, which
/// the child does not have. Async-signal-safe.
pub fn after_fork() {
    adopt_process();
    for (number, page) in TABLE.iter().enumerate() {
        let Some(page) = page.get() else { continue };
        for (offset, slot) in page.iter().enumerate() {
            match Kind::of(slot.load(Ordering::Relaxed)) {
                // A channel of the connection manager stays in the table, so that its commands are
                // refused; a netlink socket is answered in the child too.
                None | Some(Kind::Kept | Kind::Cm | Kind::Netlink) => {}
                Some(Kind::Uverbs | Kind::Events | Kind::Claimed) => slot.store(0, Ordering::Relaxed),
                Some(Kind::Device) => {
                    slot.store(0, Ordering::Relaxed);
                    let fd = (number * PAGE + offset) as RawFd;
                    // fork(2) copies the descriptors before the memory. A descriptor that another
                    // thread opened and entered in between is in our table, but not open here.
                    if descriptors::is_open(fd) {
                        // SAFETY: the entry shows that this number is the device's.
                        // InternalFd::drop finds the entry removed.
                        drop(unsafe { OwnedFd::from_raw_fd(fd) });
                    }
                }
            }
        }
    }
}

impl AsRawFd for InternalFd {
    /// The number; the fd may be closed in a forked child.
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

/// The number without ownership, for tests and messages.
pub fn number(fd: &impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}
