//! The objects of the program's fds: a device file or a channel for each, found by number.
//!
//! [`fds`] answers the frequent question whether an fd is ours. The registry has the objects,
//! under a lock that is held across fork so that a child finds them in a consistent state.

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Arc, OnceLock, Weak};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;

use super::channel::ChannelSender;
use super::rdma_netlink::socket::NetlinkSocket;
use urnic_process::fds::{self, Kind};

/// A channel of the connection manager; this crate does not depend on its type.
type CmChannel = dyn Any + Send + Sync;

/// A device file that the program opened; several fds may refer to it.
#[derive(Debug, Default)]
pub struct DeviceFile {
    /// The state that the opener attached to the channel. It is dropped with the last descriptor.
    pub private_data: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// The object of an fd; several fds may have the same object.
#[derive(Clone)]
enum Object {
    File(Arc<DeviceFile>),
    Events(Arc<ChannelSender>),
    Cm(Arc<CmChannel>),
    /// `None` before the first request.
    Netlink(Option<Arc<NetlinkSocket>>),
}

struct Channels {
    by_fd: BTreeMap<RawFd, Object>,
    /// Channels with records that found their socket full.
    full: Vec<Weak<ChannelSender>>,
    /// A thread waits for room in the full channels.
    waiting: bool,
}

impl Channels {
    const fn new() -> Channels {
        Channels {
            by_fd: BTreeMap::new(),
            full: Vec::new(),
            waiting: false,
        }
    }
}

static CHANNELS: Mutex<Channels> = Mutex::new(Channels::new());

fn channels() -> MutexGuard<'static, Channels> {
    CHANNELS.lock()
}

/// Records that a channel is full; true if the caller must start the thread that waits.
pub(super) fn is_full(channel: Weak<ChannelSender>) -> bool {
    let mut channels = channels();
    channels.full.push(channel);
    !std::mem::replace(&mut channels.waiting, true)
}

/// The channels that were full and are `still` full, without those that became full during this
/// call. `None` if no channel is left: then the thread that waits ends, and the next full channel
/// starts another.
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

/// Records that the thread that waits could not be started.
pub(super) fn nobody_waits() {
    channels().waiting = false;
}

fn enter(fd: RawFd, kind: Kind, object: Object) -> Result<(), Errno> {
    fds::enter(fd, kind)?;
    // A previous object with the same number was closed by a raw system call. It is dropped outside
    // the lock: dropping may close our end, or end connections.
    let stale = channels().by_fd.insert(fd, object);
    drop(stale);
    Ok(())
}

fn object(fd: RawFd, kind: Kind) -> Option<Object> {
    (fds::kind(fd)? == kind).then(|| object_of(fd, kind)).flatten()
}

/// The object of an fd that has this kind in this process.
fn object_of(fd: RawFd, kind: Kind) -> Option<Object> {
    fds::verified(fd, kind)?;
    channels().by_fd.get(&fd).cloned()
}

/// Enters the program's end of a channel.
pub(super) fn enter_channel(program: &impl AsFd, sender: &Arc<ChannelSender>) -> Result<(), Errno> {
    let sender = Arc::clone(sender);
    enter(fds::number(program), Kind::Events, Object::Events(sender))
}

/// The sender of the channel that the program reads from `fd`; None if `fd` is not, or no longer, a
/// channel of ours.
pub fn channel(fd: RawFd) -> Option<Arc<ChannelSender>> {
    match object(fd, Kind::Events)? {
        Object::Events(sender) => Some(sender),
        _ => None,
    }
}

/// Enters an fd that the program got by opening our uverbs device file.
///
/// # Errors
/// `EBADF` if the file is not a device file, `EMFILE` if its number is beyond the table.
pub fn enter_uverbs(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    enter(fds::number(&fd), Kind::Uverbs, Object::File(Arc::default()))
}

/// The device file of `fd`; None if `fd` is not a device file of this process.
pub fn device_file(fd: RawFd) -> Option<Arc<DeviceFile>> {
    match object(fd, Kind::Uverbs)? {
        Object::File(file) => Some(file),
        _ => None,
    }
}

/// Enters an fd of the program that refers to a channel of the connection manager.
///
/// # Errors
/// `EMFILE` if the number is beyond the table.
pub fn enter_cm(fd: BorrowedFd<'_>, channel: Arc<CmChannel>) -> Result<(), Errno> {
    enter(fds::number(&fd), Kind::Cm, Object::Cm(channel))
}

/// Major and minor number of `/dev/infiniband/rdma_cm`: a `misc` device, whose minor number is
/// assigned dynamically.
pub const CM_DEVICE: (u32, u32) = (10, 255);

/// The connection manager's channel of `fd`, as it was [entered](enter_cm); None if `fd` is not
/// a channel, or in a forked child.
pub fn cm_channel(fd: RawFd) -> Option<Arc<CmChannel>> {
    (fds::kind(fd)? == Kind::Cm)
        .then(|| known_cm_channel(fd))
        .flatten()
}

/// Like [`cm_channel`], if `fd` was found to be a channel of this process a moment ago.
pub fn known_cm_channel(fd: RawFd) -> Option<Arc<CmChannel>> {
    match object_of(fd, Kind::Cm)? {
        Object::Cm(channel) => Some(channel),
        _ => None,
    }
}

/// Enters a socket of RDMA netlink that the program has just made.
///
/// # Errors
/// `EMFILE` if the number is beyond the table.
pub fn enter_netlink(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    enter(fds::number(&fd), Kind::Netlink, Object::Netlink(None))
}

/// The other end of the program's netlink socket: with `anew`, or at the first request in this
/// process, a new one. `None` if `fd` is no such socket.
///
/// # Errors
/// Those of [`NetlinkSocket::connect`].
pub fn netlink_socket(fd: RawFd, anew: bool) -> Result<Option<Arc<NetlinkSocket>>, Errno> {
    if fds::verified_kind(fd) != Some(Kind::Netlink) {
        return Ok(None);
    }
    if !anew && let Some(Object::Netlink(Some(socket))) = object(fd, Kind::Netlink) {
        return Ok(Some(socket));
    }
    // SAFETY: verified above to be the program's socket, which a program that sends on it does not
    // close meanwhile.
    let program = unsafe { BorrowedFd::borrow_raw(fd) };
    let socket = NetlinkSocket::connect(program)?;
    let mut channels = channels();
    // Another thread may have closed it meanwhile.
    if fds::verified_kind(fd) != Some(Kind::Netlink) {
        return Ok(None);
    }
    let before = channels.by_fd.insert(fd, Object::Netlink(Some(socket.clone())));
    drop(channels);
    drop(before);
    Ok(Some(socket))
}

/// To be called when the program has duplicated `old` as `new`.
///
/// # Errors
/// The errors of [`enter_uverbs`].
pub fn duplicated(old: RawFd, new: BorrowedFd<'_>) -> Result<(), Errno> {
    let Some(kind @ (Kind::Uverbs | Kind::Cm | Kind::Netlink)) = fds::kind(old) else {
        return Ok(());
    };
    let new = fds::number(&new);
    match object(old, kind) {
        Some(object) => enter(new, kind, object),
        // In a forked child the copy must be refused, or answered, as the original is.
        None if kind != Kind::Uverbs => fds::enter(new, kind),
        None => Ok(()),
    }
}

/// To be called before the program's `fd` is closed or replaced; does nothing if `fd` is not ours.
pub fn forget(fd: RawFd) {
    if fds::take(fd).is_some() {
        // Dropped outside the lock: dropping may close our end, or end connections.
        let object = channels().by_fd.remove(&fd);
        drop(object);
    }
}

/// A lock that a forking thread holds across fork, so that the child finds the protected state
/// consistent. The thread has it in a variable of its own, which the child's only thread inherits.
///
/// Without a destructor, so that the variable has none that the C library must know.
pub(super) type AcrossFork<T> = Cell<Option<ManuallyDrop<MutexGuard<'static, T>>>>;

thread_local! {
    static ACROSS_FORK: AcrossFork<Channels> = const { Cell::new(None) };
}

pub(super) fn before_fork() {
    ACROSS_FORK.set(Some(ManuallyDrop::new(channels())));
}

pub(super) fn after_fork_in_parent() {
    drop(ACROSS_FORK.take().map(ManuallyDrop::into_inner));
}

pub(super) fn after_fork_in_child() {
    if let Some(mut guard) = ACROSS_FORK.take().map(ManuallyDrop::into_inner) {
        // Leaked, not dropped: the objects are the parent's, and freeing is not async-signal-safe.
        std::mem::forget(std::mem::replace(&mut *guard, Channels::new()));
    }
}
