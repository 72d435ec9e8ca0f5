//! Event channels, from which a program reads completion and asynchronous events.
//!
//! The kernel's channel is a file with a queue of records. Ours is a SEQPACKET socketpair: each
//! event is one record, the program can poll the socket, and a write to a socket whose reader is
//! closed raises no signal.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

use urnic_process::failure;
use urnic_process::fds::{self, InternalFd, Kind};

use crate::unwritable::{make_unwritable, take_back};

/// Longest record: `struct ib_uverbs_async_event_desc`.
pub const MAX_RECORD: usize = 16;

/// Maximum number of records stored for a program that does not read; older records are dropped.
const MAX_PENDING: usize = 1 << 16;

/// Room in the socket, in bytes; the kernel may grant less, and the other records wait in our
/// queue.
const SOCKET_BUFFER: usize = 1 << 20;

/// The result of sending a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The program can read it.
    Delivered,
    /// The socket is full: the record is sent, in its turn, when the program has read the ones
    /// before it.
    Pending,
    /// The record cannot be read: the program closed its end, or this is a forked child.
    Dropped,
}

#[derive(Clone, Copy)]
struct Record {
    bytes: [u8; MAX_RECORD],
    length: usize,
}

impl Record {
    fn new(bytes: &[u8]) -> Option<Record> {
        let mut record = Record {
            bytes: [0; MAX_RECORD],
            length: bytes.len(),
        };
        record.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(record)
    }

    fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&[])
    }
}

/// The device's end of an event channel.
pub struct ChannelSender {
    this: Weak<ChannelSender>,
    device: InternalFd,
    program: RawFd,
    /// Arranges a [flush](ChannelSender::flush) of a channel when there is room again.
    wait_for_room: fn(Weak<ChannelSender>),
    /// Records that found the socket full, oldest first. The lock also excludes senders during a
    /// purge.
    pending: Mutex<VecDeque<Record>>,
}

impl Drop for ChannelSender {
    fn drop(&mut self) {
        if let Some(device) = self.device.get() {
            take_back(device);
        }
    }
}

impl ChannelSender {
    /// Makes a channel: the program's fd, close-on-exec as the kernel's, and our end.
    ///
    /// Errors: `EMFILE` or `ENFILE` if no fd is left, `ENOMEM` if no memory is left.
    pub(super) fn pair(
        wait_for_room: fn(Weak<ChannelSender>),
    ) -> Result<(OwnedFd, Arc<ChannelSender>), Errno> {
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let (program, device) = failure::named("socketpair", pair)?;
        // Best effort: records that do not fit into the socket wait in our queue.
        let _ = sockopt::set_socket_send_buffer_size(&device, SOCKET_BUFFER);
        make_unwritable(&program);
        let device = InternalFd::of_device(device)?;
        let number = fds::number(&program);
        let sender = Arc::new_cyclic(|this| ChannelSender {
            this: this.clone(),
            device,
            program: number,
            wait_for_room,
            pending: Mutex::default(),
        });
        Ok((program, sender))
    }

    /// Queues one event of at most [`MAX_RECORD`] bytes. Does not block and raises no SIGPIPE.
    pub fn send(&self, record: &[u8]) -> Sent {
        let Some(record) = Record::new(record) else {
            debug_assert!(false, "a record of {} bytes", record.len());
            return Sent::Dropped;
        };
        let mut pending = self.lock();
        self.drain(&mut pending);
        if pending.is_empty() {
            match self.try_send(&record) {
                Ok(()) => return Sent::Delivered,
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {}
                Err(_) => return Sent::Dropped,
            }
        }
        if pending.len() == MAX_PENDING {
            pending.pop_front();
        }
        pending.push_back(record);
        let first = pending.len() == 1;
        drop(pending);
        if first {
            (self.wait_for_room)(self.this.clone());
        }
        Sent::Pending
    }

    /// Sends records that found the socket full; true if some still wait.
    pub(super) fn flush(&self) -> bool {
        let mut pending = self.lock();
        self.drain(&mut pending);
        !pending.is_empty()
    }

    /// Takes back the events that the program has not read and that `doomed` selects. Returns their
    /// number.
    ///
    /// For an object that is being destroyed: the program must not read a pointer to freed memory,
    /// and the destruction must not wait until the program acknowledges an event that it cannot
    /// read any more.
    pub fn purge(&self, doomed: impl Fn(&[u8]) -> bool) -> usize {
        let mut pending = self.lock();
        let mut kept = VecDeque::new();
        let mut purged = 0;
        let mut sort = |record: Record| {
            if doomed(record.as_slice()) {
                purged += 1
            } else {
                kept.push_back(record)
            }
        };
        while let Some(record) = self.take_back() {
            sort(record);
        }
        pending.drain(..).for_each(&mut sort);
        *pending = kept;
        self.drain(&mut pending);
        let waits = !pending.is_empty();
        drop(pending);
        if waits {
            (self.wait_for_room)(self.this.clone());
        }
        purged
    }

    /// Our end, for polling for room; None in a forked child.
    pub(super) fn device(&self) -> Option<BorrowedFd<'_>> {
        self.device.get()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Record>> {
        self.pending.lock()
    }

    fn drain(&self, pending: &mut VecDeque<Record>) {
        while let Some(record) = pending.front() {
            match self.try_send(record) {
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return,
                Ok(()) | Err(_) => drop(pending.pop_front()),
            }
        }
    }

    fn try_send(&self, record: &Record) -> Result<(), Errno> {
        let device = self.device.get().ok_or(Errno::PIPE)?;
        loop {
            match send(
                device,
                record.as_slice(),
                SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Reads one record from the program's end, in place of the program.
    fn take_back(&self) -> Option<Record> {
        self.device.get()?;
        if fds::verified_kind(self.program) != Some(Kind::Events) {
            return None;
        }
        // SAFETY: verified above to be our socket, which the program closes only after it destroyed
        // the objects that send to it.
        let program = unsafe { BorrowedFd::borrow_raw(self.program) };
        let mut bytes = [0; MAX_RECORD];
        loop {
            match recv(program, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return None,
                Ok((_, length)) => return Some(Record { bytes, length }),
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}
