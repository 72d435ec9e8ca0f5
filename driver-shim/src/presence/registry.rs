//! What stands behind the program's fds: a device file or a channel for each, found by number.
//!
//! [`fds`] answers the quick question; here is the rest, behind a lock that is held across fork so that a child finds
//! it whole.

use std::any::Any;
use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::io::Errno;

use super::channel::ChannelSender;
use super::fds::{self, Kind};

type CmChannel = dyn Any + Send + Sync;

/// A device file that the program opened; several fds may lead to it.
#[derive(Debug, Default)]
pub struct DeviceFile {
    /// What whoever opened it wants to find by any of them. It goes with the last.
    pub private_data: OnceLock<Arc<dyn Any + Send + Sync>>,
}

struct Channels {
    uverbs: BTreeMap<RawFd, Arc<DeviceFile>>,
    by_fd: BTreeMap<RawFd, Arc<ChannelSender>>,
    /// Channels of the connection manager, whose type is its own affair; several fds may lead to one.
    cm: BTreeMap<RawFd, Arc<CmChannel>>,
    /// Those with records that found their socket full.
    full: Vec<Weak<ChannelSender>>,
    /// A thread waits for room in them.
    waiting: bool,
}

impl Channels {
    const fn new() -> Channels {
        Channels {
            uverbs: BTreeMap::new(),
            by_fd: BTreeMap::new(),
            cm: BTreeMap::new(),
            full: Vec::new(),
            waiting: false,
        }
    }
}

static CHANNELS: Mutex<Channels> = Mutex::new(Channels::new());

fn channels() -> MutexGuard<'static, Channels> {
    CHANNELS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes note that a channel is full; true when the caller must start the thread that waits.
pub(super) fn is_full(channel: Weak<ChannelSender>) -> bool {
    let mut channels = channels();
    channels.full.push(channel);
    !std::mem::replace(&mut channels.waiting, true)
}

/// The channels that were full and `still` are, less those that became full meanwhile; `None` when none is left: then the
/// thread that waits ends, and the next full channel starts another.
pub(super) fn still_full(still: impl Fn(&ChannelSender) -> bool) -> Option<Vec<Arc<ChannelSender>>> {
    let known = std::mem::take(&mut channels().full);
    // Not under the lock: this sends.
    let full: Vec<_> = known
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|channel| still(channel))
        .collect();
    let mut channels = channels();
    channels.full.extend(full.iter().map(Arc::downgrade));
    channels.waiting = !channels.full.is_empty();
    channels.waiting.then_some(full)
}

/// The thread that waits could not be started.
pub(super) fn nobody_waits() {
    channels().waiting = false;
}

/// Enters the program's end of a channel.
pub(super) fn enter_channel(program: &impl AsFd, sender: &Arc<ChannelSender>) -> Result<(), Errno> {
    let fd = fds::number(program);
    fds::enter(fd, Kind::Events)?;
    // A channel under the same number was closed behind our back.
    let stale = channels().by_fd.insert(fd, Arc::clone(sender));
    drop(stale);
    Ok(())
}

/// The sender of the channel that the program reads from `fd`; None when it is no channel of ours, or no longer.
pub fn channel(fd: RawFd) -> Option<Arc<ChannelSender>> {
    (fds::verified_kind(fd)? == Kind::Events)
        .then(|| channels().by_fd.get(&fd).cloned())
        .flatten()
}

/// Enters an fd that the program got by opening our uverbs device file.
///
/// # Errors
/// `EBADF` when it is no device file, `EMFILE` when its number is beyond the table.
pub fn enter_uverbs(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    enter_file(fd, Arc::default())
}

fn enter_file(fd: BorrowedFd<'_>, file: Arc<DeviceFile>) -> Result<(), Errno> {
    let number = fds::number(&fd);
    fds::enter(number, Kind::Uverbs)?;
    let stale = channels().uverbs.insert(number, file);
    drop(stale);
    Ok(())
}

/// The device file behind `fd`; None when it is none of this process.
pub fn device_file(fd: RawFd) -> Option<Arc<DeviceFile>> {
    (fds::verified_kind(fd)? == Kind::Uverbs)
        .then(|| channels().uverbs.get(&fd).cloned())
        .flatten()
}

/// Enters an fd of the program that leads to a channel of the connection manager.
///
/// # Errors
/// `EMFILE` when its number is beyond the table.
pub(crate) fn enter_cm(fd: BorrowedFd<'_>, channel: Arc<CmChannel>) -> Result<(), Errno> {
    let number = fds::number(&fd);
    fds::enter(number, Kind::Cm)?;
    let stale = channels().cm.insert(number, channel);
    drop(stale);
    Ok(())
}

/// Major and minor number of `/dev/infiniband/rdma_cm`: `misc`, whose minor numbers are given out as modules come.
pub const CM_DEVICE: (u32, u32) = (10, 255);

/// The connection manager's channel behind `fd`, as it was [entered](enter_cm); None when it is none, or in a forked child.
pub(crate) fn cm_channel(fd: RawFd) -> Option<Arc<CmChannel>> {
    (fds::verified_kind(fd)? == Kind::Cm)
        .then(|| channels().cm.get(&fd).cloned())
        .flatten()
}

/// To be called when the program has made `new` another fd for what `old` is.
///
/// # Errors
/// As [`enter_uverbs`].
pub fn duplicated(old: RawFd, new: BorrowedFd<'_>) -> Result<(), Errno> {
    match fds::kind(old) {
        Some(Kind::Uverbs) => device_file(old).map_or(Ok(()), |file| enter_file(new, file)),
        Some(Kind::Cm) => match cm_channel(old) {
            Some(channel) => enter_cm(new, channel),
            // In a forked child, whose copy shall be refused as the original is.
            None => fds::enter(fds::number(&new), Kind::Cm),
        },
        _ => Ok(()),
    }
}

/// To be called before the program's `fd` is closed or replaced; does nothing when it is not ours.
pub fn forget(fd: RawFd) {
    // What is dropped is dropped outside the lock: it may close our end, or end connections.
    match fds::take(fd) {
        Some(Kind::Uverbs) => {
            let file = channels().uverbs.remove(&fd);
            drop(file);
        }
        Some(Kind::Events) => {
            let channel = channels().by_fd.remove(&fd);
            drop(channel);
        }
        Some(Kind::Cm) => {
            let channel = channels().cm.remove(&fd);
            drop(channel);
        }
        _ => {}
    }
}

/// The guard that the forking thread holds from before fork to after it.
struct AcrossFork(UnsafeCell<Option<MutexGuard<'static, Channels>>>);

// SAFETY: only the thread that holds the lock in question touches the cell (before_fork, after_fork_*).
unsafe impl Sync for AcrossFork {}

static ACROSS_FORK: AcrossFork = AcrossFork(UnsafeCell::new(None));

pub(super) fn before_fork() {
    let guard = channels();
    // SAFETY: we hold the lock, see AcrossFork.
    unsafe { *ACROSS_FORK.0.get() = Some(guard) };
}

pub(super) fn after_fork_in_parent() {
    // SAFETY: this thread still holds the lock it took in before_fork.
    drop(unsafe { (*ACROSS_FORK.0.get()).take() });
}

pub(super) fn after_fork_in_child() {
    // SAFETY: as in the parent; the child's only thread is the one that forked.
    let guard = unsafe { (*ACROSS_FORK.0.get()).take() };
    if let Some(mut guard) = guard {
        // Leaked, not dropped: they are the parent's, and freeing is not async-signal-safe.
        std::mem::forget(std::mem::replace(&mut *guard, Channels::new()));
    }
}
