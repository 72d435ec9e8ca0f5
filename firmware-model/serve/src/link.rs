//! The socket of a connection: the client's commands come in and their replies go out; the device's
//! own commands go out and their replies come in.
//!
//! A thread that waits for a reply reads the socket itself if no other thread does, and queues
//! commands that arrive first for the connection's thread. A reply is therefore found even if the
//! connection's thread waits for the very access that the reply completes.

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
use std::sync::{PoisonError, TryLockError};
use std::time::{Duration, Instant};
use urnic_sync::{Condvar, Mutex};
use urnic_vfio_user::{Decoder, Kind, Request};

/// Maximum time for which a client may leave a command of the server without reply, or its socket
/// full. QEMU allows the server the same time.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Limits of the commands that wait for the connection's thread, and of their bytes; at a limit no
/// thread reads on.
const MAX_QUEUED: usize = 256;
const MAX_QUEUED_LEN: usize = 4 << 20;
/// Limit of the descriptors that came with queued commands; at this limit no thread reads on.
const MAX_QUEUED_FDS: usize = 64;
/// Maximum number of descriptors in transit from a client: queued, just read, and of an incomplete
/// message.
pub(super) const MAX_FDS_IN_TRANSIT: usize = MAX_QUEUED_FDS + 2 * LIMITS.fds;
const READ_LEN: usize = 64 << 10;
/// Maximum sleep of a waiting thread.
const MAX_WAIT: Duration = Duration::from_millis(100);
/// Interval at which a waiting thread that does not read checks whether it should.
const RECHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The connection has ended or must end: the client has closed it, sends invalid messages, or does
/// not reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub(crate) struct Broken;

/// The result of an attempt to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// Bytes were read.
    Data,
    /// There is nothing to read.
    Empty,
    /// Another thread reads.
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
    /// Payload bytes of `commands`.
    queued_len: usize,
    /// Descriptors of `commands`.
    queued_fds: usize,
    /// Ids of the server's own commands, with their replies once they have come: the message, or
    /// `Err` for a refusal.
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
    /// Poisoned: a thread panicked in the middle of a message, so the connection is broken.
    receiving: std::sync::Mutex<Receiver>,
    state: Mutex<State>,
    changed: Condvar,
    broken: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link({:?})", self.socket)
    }
}

/// Waits until one of the descriptors is ready for its requested events, or until `limit` has
/// passed; `fds` then contains which are ready.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    // If interrupted, or out of memory, the caller checks its condition again.
    let _ = poll(fds, limit.as_ref());
}

/// Whether the peer of a connected socket has closed it.
pub(super) fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let _ = poll(&mut fds, Some(&Timespec::default()));
    fds[0].revents().contains(PollFlags::HUP)
}

/// The remaining time of a wait for the client, at first [`TIMEOUT`]. A machine that was stopped
/// meanwhile stopped the client too, so at most [`MAX_WAIT`] counts between two checks.
struct Deadline {
    left: Duration,
    checked: Instant,
}

impl Deadline {
    fn new() -> Deadline {
        Deadline {
            left: TIMEOUT,
            checked: Instant::now(),
        }
    }

    fn is_over(&mut self) -> bool {
        let now = Instant::now();
        self.left = self.left.saturating_sub((now - self.checked).min(MAX_WAIT));
        self.checked = now;
        self.left.is_zero()
    }
}

impl Link {
    /// A link over a connected non-blocking socket. The connection's thread may sleep on the socket
    /// and on the eventfd `wake`.
    pub(crate) fn new(socket: OwnedFd, wake: OwnedFd) -> Link {
        Link {
            socket,
            wake,
            sending: Mutex::default(),
            receiving: std::sync::Mutex::new(Receiver {
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

    /// Ends the connection, and with it all waits for replies.
    pub(crate) fn disconnect(&self) -> Broken {
        self.broken.store(true, Ordering::SeqCst);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.changed.notify_all();
        Broken
    }

    /// Closes the socket of an ended connection, with all data that was sent on it and not read,
    /// and all descriptors that were passed. Closing these may block the calling thread.
    pub(crate) fn close(&self) {
        drop(std::mem::take(&mut *self.state.lock()));
        (self.receiving.lock().unwrap_or_else(PoisonError::into_inner)).decoder = Decoder::of_sorted(LIMITS);
        // Other threads may still call `is_leaving`, so the descriptor number stays open: `dup3`
        // puts the eventfd in its place.
        // SAFETY: the number is that of `self.socket`, which stays its owner; `ManuallyDrop` does
        // not close it.
        let mut socket = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(self.socket.as_raw_fd()) });
        let _ = rustix::io::dup3(&self.wake, &mut socket, DupFlags::CLOEXEC);
    }

    /// Whether the connection has ended.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Whether the connection has ended, or the client has closed its end, even if this has not
    /// been read yet. Once true, it stays true.
    pub(crate) fn is_leaving(&self) -> bool {
        // In this order: a link is broken before `close` replaces its socket by an eventfd, which
        // never hangs up.
        is_hung_up(self.socket()) || self.is_broken()
    }

    /// The next command for the connection's thread.
    pub(crate) fn command(&self) -> Option<Incoming> {
        let mut state = self.state.lock();
        let message = state.commands.pop_front()?;
        state.queued_len -= message.payload.len();
        state.queued_fds -= message.fds.len();
        Some(message)
    }

    /// Whether a command waits.
    pub(crate) fn has_command(&self) -> bool {
        !self.state.lock().commands.is_empty()
    }

    /// Reads what has arrived, unless another thread reads or too much has been read already.
    pub(crate) fn try_receive(&self) -> Result<Received, Broken> {
        if self.is_broken() {
            return Err(Broken);
        }
        match self.receiving.try_lock() {
            Ok(mut receiver) => self.read(&mut receiver),
            Err(TryLockError::Poisoned(_)) => Err(self.disconnect()),
            Err(TryLockError::WouldBlock) => Ok(Received::Busy),
        }
    }

    fn read(&self, receiver: &mut Receiver) -> Result<Received, Broken> {
        if self.state.lock().is_full() {
            return Ok(Received::Empty);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LIMITS.fds))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut into = [IoSliceMut::new(&mut receiver.buffer)];
        let got = match recvmsg(&self.socket, &mut into, &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Empty),
            Err(_) => return Err(self.disconnect()),
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
        // Descriptors were lost: more came than agreed, or the process has no free descriptor
        // number.
        if got.bytes == 0 || got.flags.contains(ReturnFlags::CTRUNC) {
            return Err(self.disconnect());
        }
        receiver.decoder.push(&receiver.buffer[..got.bytes], fds);
        for message in receiver.decoder.by_ref() {
            match message {
                Ok(message) => self.sort(message)?,
                Err(error) => {
                    tracing::warn!("{error}: connection closed");
                    return Err(self.disconnect());
                }
            }
        }
        self.changed.notify_all();
        Ok(Received::Data)
    }

    fn sort(&self, message: Incoming) -> Result<(), Broken> {
        let mut state = self.state.lock();
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
                tracing::warn!("a reply with the id of no outstanding request: connection closed");
                Err(self.disconnect())
            }
        }
    }

    /// Sends whole messages. Reads incoming data meanwhile, so that the two ends do not both wait
    /// for room.
    pub(crate) fn send(&self, out: &Outgoing) -> Result<(), Broken> {
        let _turn = self.sending.lock();
        let mut deadline = Deadline::new();
        let mut rest = &out.bytes[..];
        let mut fds: Vec<BorrowedFd<'_>> = out.fds.iter().map(AsFd::as_fd).collect();
        while !rest.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(LIMITS.fds))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
                return Err(self.disconnect());
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, &[IoSlice::new(rest)], &mut control, flags) {
                Ok(sent) => {
                    rest = &rest[sent..];
                    fds.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !deadline.is_over() => self.make_room()?,
                Err(_) => return Err(self.disconnect()),
            }
        }
        Ok(())
    }

    fn make_room(&self) -> Result<(), Broken> {
        // While another thread reads, or too much has been read, this thread can only wait.
        if self.try_receive()? == Received::Data {
            self.wake_for_commands();
            return Ok(());
        }
        let wanted = PollFlags::OUT | PollFlags::IN;
        let reads = !self.state.lock().is_full() && self.receiving.try_lock().is_ok();
        let wanted = if reads { wanted } else { PollFlags::OUT };
        wait(&mut [PollFd::new(&self.socket, wanted)], Some(MAX_WAIT));
        Ok(())
    }

    /// Wakes the connection's thread if a command is queued: the thread may be about to sleep until
    /// the socket is readable, but the command has been read already.
    fn wake_for_commands(&self) {
        if self.has_command() {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Sends a request to the client and waits for the reply, which `read` parses.
    ///
    /// # Errors
    ///
    /// `None` if the client refuses, or if the connection has ended. The connection is ended if the
    /// client does not reply.
    pub(crate) fn ask<T>(
        &self,
        request: &Request<'_>,
        read: impl FnOnce(&Incoming) -> Option<T>,
    ) -> Option<T> {
        let mut out = Outgoing::default();
        let id = self.expect();
        request.emit(id, false, &mut out.bytes);
        let reply = self.send(&out).and_then(|()| self.reply(id));
        self.state.lock().awaited.remove(&id);
        match reply {
            Ok(Ok(message)) => read(&message),
            Ok(Err(())) | Err(Broken) => None,
        }
    }

    fn expect(&self) -> u16 {
        let mut state = self.state.lock();
        // At most as many commands wait as there are threads, so a free id exists.
        while state.awaited.contains_key(&state.next_id) {
            state.next_id = state.next_id.wrapping_add(1);
        }
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        state.awaited.insert(id, None);
        id
    }

    fn reply(&self, id: u16) -> Result<Result<Incoming, ()>, Broken> {
        let mut deadline = Deadline::new();
        loop {
            if let Some(place) = self.state.lock().awaited.get_mut(&id)
                && let Some(reply) = place.take()
            {
                return Ok(reply);
            }
            if self.is_broken() || deadline.is_over() {
                return Err(self.disconnect());
            }
            let Ok(mut receiver) = self.receiving.try_lock() else {
                let state = self.state.lock();
                let arrived = state.awaited.get(&id).is_some_and(Option::is_some);
                if !arrived {
                    drop(self.changed.wait_timeout(state, RECHECK_INTERVAL));
                }
                continue;
            };
            if self.state.lock().awaited.get(&id).is_some_and(Option::is_some) {
                continue;
            }
            if self.read(&mut receiver)? == Received::Data {
                self.wake_for_commands();
                continue;
            }
            let full = self.state.lock().is_full();
            let limit = if full { RECHECK_INTERVAL } else { MAX_WAIT };
            let wanted = if full { PollFlags::empty() } else { PollFlags::IN };
            wait(&mut [PollFd::new(&self.socket, wanted)], Some(limit));
        }
    }
}
