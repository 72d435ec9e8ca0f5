//! The socket of a connection: the client's commands come in and their replies go out; the device's
//! own commands go out and their replies come in.
//!
//! Whoever waits for a reply reads the socket himself if nobody else does, and queues commands that
//! come first for the connection's thread. So a reply is seen even if that thread waits for the
//! very access that the reply is for.

use super::function::{Incoming, LIMITS, Outgoing};
use super::passed::Passed;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{DupFlags, Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::collections::{HashMap, VecDeque};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use urnic_vfio_user::{Decoder, Kind, Request};

/// Longest that a client may leave a command of ours without reply, or its socket full. QEMU gives
/// us as much.
const PATIENCE: Duration = Duration::from_secs(5);
/// Commands that wait for the connection's thread, and bytes of theirs; at so many nobody reads on.
const MAX_QUEUED: usize = 256;
const MAX_QUEUED_LEN: usize = 4 << 20;
/// Descriptors that came with them, at which nobody reads on either.
const MAX_QUEUED_FDS: usize = 64;
/// Descriptors that may be under way from a client: queued, just read, and of a message that is not
/// complete.
pub(super) const MAX_FDS_UNDER_WAY: usize = MAX_QUEUED_FDS + 2 * LIMITS.fds;
const READ_LEN: usize = 64 << 10;
/// Longest sleep of a waiter.
const LOOK: Duration = Duration::from_millis(100);
/// How soon a waiter that does not read looks whether it should.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The connection has ended, or must: the client is gone, or makes no sense, or does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub(crate) struct Broken;

/// What came of an attempt to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Something.
    Something,
    /// Nothing is there.
    Nothing,
    /// Somebody else reads.
    Busy,
}

struct Receiver {
    decoder: Decoder<Passed>,
    buffer: Box<[u8]>,
}

#[derive(Default)]
struct State {
    /// Commands for the connection's thread.
    commands: VecDeque<Incoming>,
    /// Bytes of their payloads.
    queued_len: usize,
    /// Descriptors of theirs.
    queued_fds: usize,
    /// Ids of our commands, with their replies: what they said, or that they said no.
    awaited: HashMap<u16, Option<Result<Incoming, ()>>>,
    next_id: u16,
}

impl State {
    fn is_full(&self) -> bool {
        self.commands.len() >= MAX_QUEUED
            || self.queued_len >= MAX_QUEUED_LEN
            || self.queued_fds >= MAX_QUEUED_FDS
    }
}

/// A connection's socket. Locks: `receiving` before `state`; `sending` with none of them.
pub(crate) struct Link {
    socket: OwnedFd,
    /// Ends the sleep of the connection's thread: an eventfd.
    wake: OwnedFd,
    sending: Mutex<()>,
    receiving: Mutex<Receiver>,
    state: Mutex<State>,
    changed: Condvar,
    broken: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({:?})", self.socket)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until one of the descriptors is ready for what is asked, or the time is over; tells which
/// are.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    // Interrupted, or out of memory: the caller looks again.
    let _ = poll(fds, limit.as_ref());
}

/// Whether the other end of a connected socket is closed.
pub(super) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let _ = poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents().contains(PollFlags::HUP)
}

/// A wait for the client: over when it took longer than [`PATIENCE`]. A machine that was stopped
/// meanwhile stopped the client too, so more than [`LOOK`] between two looks does not count.
struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    fn new() -> Patience {
        Patience {
            left: PATIENCE,
            looked: Instant::now(),
        }
    }

    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub((now - self.looked).min(LOOK));
        self.looked = now;
        self.left.is_zero()
    }
}

impl Link {
    /// A link over a connected socket that does not block. The connection's thread may sleep on
    /// that and on the eventfd `wake`.
    pub(crate) fn new(socket: OwnedFd, wake: OwnedFd) -> Link {
        Link {
            socket,
            wake,
            sending: Mutex::default(),
            receiving: Mutex::new(Receiver {
                decoder: Decoder::of_sorted(LIMITS),
                buffer: vec![0; READ_LEN].into(),
            }),
            state: Mutex::default(),
            changed: Condvar::new(),
            broken: AtomicBool::new(false),
        }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Ends the connection: nobody waits any longer.
    pub(crate) fn break_off(&self) -> Broken {
        self.broken.store(true, Ordering::SeqCst);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.changed.notify_all();
        Broken
    }

    /// Closes the socket, with all that was sent on it and not read, and all descriptors that were
    /// passed. The calling thread may have to wait for these. The connection has ended.
    pub(crate) fn close(&self) {
        drop(std::mem::take(&mut *lock(&self.state)));
        lock(&self.receiving).decoder = Decoder::of_sorted(LIMITS);
        // Others may still ask whether it is hung up: the number stays, and is something else's.
        // SAFETY: the number is that of `self.socket` and remains its own; `ManuallyDrop` leaves it
        // open.
        let mut socket = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(self.socket.as_raw_fd()) });
        let _ = rustix::io::dup3(&self.wake, &mut socket, DupFlags::CLOEXEC);
    }

    /// Whether the connection has ended.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Whether the client has closed its end, heard or not.
    pub(crate) fn is_hung_up(&self) -> bool {
        is_hung_up(self.socket())
    }

    /// The next command for the connection's thread.
    pub(crate) fn command(&self) -> Option<Incoming> {
        let mut state = lock(&self.state);
        let message = state.commands.pop_front()?;
        state.queued_len -= message.payload.len();
        state.queued_fds -= message.fds.len();
        Some(message)
    }

    /// Whether a command waits.
    pub(crate) fn has_command(&self) -> bool {
        !lock(&self.state).commands.is_empty()
    }

    /// Reads what is there, unless somebody else does or too much has been read already.
    pub(crate) fn hear(&self) -> Result<Heard, Broken> {
        if self.is_broken() {
            return Err(Broken);
        }
        match self.receiving.try_lock() {
            Ok(mut receiver) => self.read(&mut receiver),
            Err(TryLockError::Poisoned(_)) => Err(self.break_off()),
            Err(TryLockError::WouldBlock) => Ok(Heard::Busy),
        }
    }

    fn read(&self, receiver: &mut Receiver) -> Result<Heard, Broken> {
        if lock(&self.state).is_full() {
            return Ok(Heard::Nothing);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LIMITS.fds))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut receiver.buffer)];
        let got = match recvmsg(&self.socket, &mut into, &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Heard::Nothing),
            Err(_) => return Err(self.break_off()),
        };
        let fds: Vec<Passed> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .map(Passed::new)
            .collect();
        // Descriptors were lost: more came than agreed, or there is no number left for them.
        if got.bytes == 0 || got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(self.break_off());
        }
        receiver.decoder.push(&receiver.buffer[..got.bytes], fds);
        for message in receiver.decoder.by_ref() {
            match message {
                Ok(message) => self.sort(message)?,
                Err(error) => {
                    tracing::warn!("{error}: connection closed");
                    return Err(self.break_off());
                }
            }
        }
        self.changed.notify_all();
        Ok(Heard::Something)
    }

    fn sort(&self, message: Incoming) -> Result<(), Broken> {
        let mut state = lock(&self.state);
        let Kind::Reply { error } = message.header.kind else {
            state.queued_len += message.payload.len();
            state.queued_fds += message.fds.len();
            state.commands.push_back(message);
            return Ok(());
        };
        match state.awaited.get_mut(&message.header.id) {
            Some(place @ None) => {
                *place = Some(if error.is_none() { Ok(message) } else { Err(()) });
                Ok(())
            }
            _ => {
                drop(state);
                tracing::warn!("a reply to nothing that was asked: connection closed");
                Err(self.break_off())
            }
        }
    }

    /// Sends whole messages. Meanwhile what comes in is read, lest both ends wait for room.
    pub(crate) fn send(&self, out: &Outgoing) -> Result<(), Broken> {
        let _turn = lock(&self.sending);
        let mut patience = Patience::new();
        let mut rest = &out.bytes[..];
        let mut fds: Vec<BorrowedFd<'_>> = out.fds.iter().map(AsFd::as_fd).collect();
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LIMITS.fds))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(self.break_off());
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(rest)], &mut control, flags) {
                Ok(sent) => {
                    rest = &rest[sent..];
                    fds.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !patience.is_over() => self.make_room()?,
                Err(_) => return Err(self.break_off()),
            }
        }
        Ok(())
    }

    fn make_room(&self) -> Result<(), Broken> {
        // While others read, or too much has been read, there is nothing to do but wait.
        if self.hear()? == Heard::Something {
            self.wake_for_commands();
            return Ok(());
        }
        let wanted = PollFlags::OUT | PollFlags::IN;
        let reads = !lock(&self.state).is_full() && self.receiving.try_lock().is_ok();
        let wanted = if reads { wanted } else { PollFlags::OUT };
        wait(&mut [PollFd::new(&self.socket, wanted)], Some(LOOK));
        Ok(())
    }

    /// Who read the socket in passing took away what the connection's thread may be going to sleep
    /// for.
    fn wake_for_commands(&self) {
        if self.has_command() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Asks the client for something and waits for the reply, which `read` takes apart.
    ///
    /// # Errors
    ///
    /// The client says no, or the connection has ended. It is ended if the client does not answer.
    pub(crate) fn ask<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(&Incoming) -> Option<T>,
    ) -> Option<T> {
        let mut out = Outgoing::default();
        let id = self.expect();
        request.emit(id, false, &mut out.bytes);
        let reply = self.send(&out).and_then(|()| self.reply(id));
        lock(&self.state).awaited.remove(&id);
        match reply {
            Ok(Ok(message)) => read(&message),
            Ok(Err(())) | Err(Broken) => None,
        }
    }

    fn expect(&self) -> u16 {
        let mut state = lock(&self.state);
        // At most as many wait as there are threads.
        while state.awaited.contains_key(&state.next_id) {
            state.next_id = state.next_id.wrapping_add(1);
        }
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        state.awaited.insert(id, None);
        id
    }

    fn reply(&self, id: u16) -> Result<Result<Incoming, ()>, Broken> {
        let mut patience = Patience::new();
        loop {
            if let Some(place) = lock(&self.state).awaited.get_mut(&id)
                && let Some(reply) = place.take()
            {
                return Ok(reply);
            }
            if self.is_broken() || patience.is_over() {
                return Err(self.break_off());
            }
            let Ok(mut receiver) = self.receiving.try_lock() else {
                let state = lock(&self.state);
                let arrived = state.awaited.get(&id).is_some_and(Option::is_some);
                if !arrived {
                    drop(self.changed.wait_timeout(state, LOOK_AGAIN));
                }
                continue;
            };
            if lock(&self.state).awaited.get(&id).is_some_and(Option::is_some) {
                continue;
            }
            if self.read(&mut receiver)? == Heard::Something {
                self.wake_for_commands();
                continue;
            }
            let full = lock(&self.state).is_full();
            let limit = if full { LOOK_AGAIN } else { LOOK };
            let wanted = if full { PollFlags::empty() } else { PollFlags::IN };
            wait(&mut [PollFd::new(&self.socket, wanted)], Some(limit));
        }
    }
}
