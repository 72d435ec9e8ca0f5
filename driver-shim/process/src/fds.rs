//! Which of the process's file descriptors are ours.
//!
//! Every `close`, `write` and `dup2` of the program asks here first, also from signal handlers and
//! between fork and exec. So the question costs two loads and no lock, and the table is plain
//! atomics: a slot per number, in pages made when first needed.
//!
//! What stands for a device file or a channel of the connection manager; the program's end of an
//! event channel; and fds of our own (the other ends, sockets, locks), which the program must
//! neither see closed by a loop over all numbers nor replace.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::process::{Resource, getpid, getrlimit};

const PAGE: usize = 1024;
/// Numbers up to a million, the kernel's usual limit (fs.nr_open).
const PAGES: usize = 1024;

type Page = [AtomicU64; PAGE];

/// One slot per fd: 0, or the kind in the lowest three bits and above them what tells this open
/// file from another one with the same number.
static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; PAGES];

/// The process the table describes. A child made by vfork shares our memory, but its fds are its
/// own business.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Tells two uses of one number apart, for our own fds.
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// What an fd of ours is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// The program's: an open uverbs device.
    Uverbs = 1,
    /// The program's: the reading end of an event channel.
    Events = 2,
    /// Ours, and closed in a forked child, which has no device.
    Device = 3,
    /// Ours, and kept in a forked child.
    Kept = 4,
    /// A device's, which closes it itself: see [`claim`].
    Claimed = 5,
    /// The program's: a channel of the connection manager.
    Cm = 6,
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
        ]
        .into_iter()
        .find(|kind| *kind as u64 == slot & 7)
    }

    /// True for descriptors that the program does not know of.
    pub fn is_internal(self) -> bool {
        matches!(self, Kind::Device | Kind::Kept | Kind::Claimed)
    }
}

fn slot(fd: RawFd) -> Option<&'static AtomicU64> {
    let fd = usize::try_from(fd).ok()?;
    let page = TABLE.get(fd / PAGE)?.load(Ordering::Acquire);
    // SAFETY: a page pointer is null or leads to a page that is never freed.
    unsafe { page.as_ref() }?.get(fd % PAGE)
}

fn slot_made(fd: RawFd) -> Option<&'static AtomicU64> {
    let entry = TABLE.get(usize::try_from(fd).ok()? / PAGE)?;
    if entry.load(Ordering::Acquire).is_null() {
        let fresh: *mut Page = Box::into_raw(Box::new([const { AtomicU64::new(0) }; PAGE]));
        let made = entry.compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire);
        if made.is_err() {
            // SAFETY: another thread's page went in; ours was never shared.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    slot(fd)
}

/// What kind of ours `fd` is, if any. No system call unless it seems to be ours.
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

/// As [`kind`], but only if `fd` is still the open file that was entered: raw system calls may have
/// replaced it.
pub fn verified_kind(fd: RawFd) -> Option<Kind> {
    let kind = kind(fd)?;
    let found = slot(fd)?.load(Ordering::Acquire);
    let same = match kind {
        Kind::Uverbs | Kind::Events | Kind::Cm => fingerprint(fd, kind).ok()? == found,
        Kind::Device | Kind::Kept | Kind::Claimed => true,
    };
    same.then_some(kind)
}

/// Enters an fd of the program.
///
/// # Errors
/// `EBADF` when it is not what `kind` says, `EMFILE` when its number is beyond the table.
pub fn enter(fd: RawFd, kind: Kind) -> Result<(), Errno> {
    let print = fingerprint(fd, kind)?;
    slot_made(fd).ok_or(Errno::MFILE)?.store(print, Ordering::Release);
    Ok(())
}

/// Takes out an fd of the program, which is about to be closed or replaced; what it was.
pub fn take(fd: RawFd) -> Option<Kind> {
    let kind = kind(fd).filter(|kind| !kind.is_internal())?;
    slot(fd)?.store(0, Ordering::Release);
    Some(kind)
}

/// Keeps the program's closing loops away from an fd that a device made and closes itself, also in
/// a forked child.
pub fn claim(fd: RawFd) {
    if let Some(slot) = slot_made(fd) {
        slot.store(Kind::Claimed as u64, Ordering::Release);
    }
}

/// To be called before a claimed fd is closed: its number may be the program's a moment later.
pub fn disclaim(fd: RawFd) {
    if let Some(slot) = slot(fd) {
        let _ = slot.compare_exchange(Kind::Claimed as u64, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The numbers in `first..=last` that are ours, lowest first, for `close_range`.
pub fn ours_within(first: u32, last: u32) -> impl Iterator<Item = (RawFd, Kind)> {
    let last = last.min((PAGE * PAGES - 1) as u32);
    let pages = (first as usize / PAGE)..=(last as usize / PAGE);
    pages
        .filter(|&page| {
            TABLE
                .get(page)
                .is_some_and(|p| !p.load(Ordering::Acquire).is_null())
        })
        .flat_map(|page| (page * PAGE)..(page * PAGE + PAGE))
        .filter(move |&fd| (first as usize..=last as usize).contains(&fd))
        .filter_map(|fd| Some((fd as RawFd, kind(fd as RawFd)?)))
}

/// What identifies an open file of the program: a socket by its inode, a device file by its number.
fn fingerprint(fd: RawFd, kind: Kind) -> Result<u64, Errno> {
    // SAFETY: only borrowed for one fstat(2), which fails harmlessly on a number that is closed.
    let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) })?;
    let (wanted, id) = match kind {
        Kind::Uverbs => (FileType::CharacterDevice, stat.st_rdev),
        _ => (FileType::Socket, stat.st_ino),
    };
    if FileType::from_raw_mode(stat.st_mode) != wanted {
        return Err(Errno::BADF);
    }
    Ok(id << 3 | kind as u64)
}

/// An fd of our own: high, so that programs using select(2) keep the low numbers; close-on-exec;
/// safe from the program's closing loops; and, unless kept, gone in forked children.
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

    /// Takes over an fd that forked children go on using.
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
            // SAFETY: the entry was still ours, so the fd is open and nobody else's.
            drop(unsafe { OwnedFd::from_raw_fd(self.fd) });
        }
    }
}

/// Moves an fd to a high number, close-on-exec; leaves it where it is when there is no room.
fn raise(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    // FD_SETSIZE is 1024. A process that may have no more than that keeps half for itself.
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

/// The table describes this process from now on.
pub fn adopt_process() {
    OWNER.store(getpid().as_raw_pid(), Ordering::Relaxed);
}

/// In a forked child: closes the device's fds and forgets the program's, which belong to a device
/// that is not here. Async-signal-safe.
pub fn after_fork() {
    adopt_process();
    for (number, page) in TABLE.iter().enumerate() {
        // SAFETY: null, or a page that is never freed.
        let Some(page) = (unsafe { page.load(Ordering::Acquire).as_ref() }) else {
            continue;
        };
        for (offset, slot) in page.iter().enumerate() {
            match Kind::of(slot.load(Ordering::Relaxed)) {
                // A channel is still known for one, so that commands are refused instead of lost.
                None | Some(Kind::Kept | Kind::Cm) => {}
                Some(Kind::Uverbs | Kind::Events | Kind::Claimed) => slot.store(0, Ordering::Relaxed),
                Some(Kind::Device) => {
                    slot.store(0, Ordering::Relaxed);
                    let fd = (number * PAGE + offset) as RawFd;
                    // fork(2) copies the descriptors before the memory. What another thread opened
                    // and entered in between is in our table, and not open here.
                    // SAFETY: only asks about the number.
                    if rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok() {
                        // SAFETY: the entry said that this number is the device's; InternalFd::drop
                        // finds it gone.
                        drop(unsafe { OwnedFd::from_raw_fd(fd) });
                    }
                }
            }
        }
    }
}

impl AsRawFd for InternalFd {
    /// The number; it may be closed in a forked child.
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}

/// The number without ownership, for tests and messages.
pub fn number(fd: &impl AsFd) -> RawFd {
    fd.as_fd().as_raw_fd()
}
