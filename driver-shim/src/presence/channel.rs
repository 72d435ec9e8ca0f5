//! Event channels: what a program reads completion and asynchronous events from.
//!
//! The kernel hands out a file with a queue of records. Ours is a SEQPACKET socketpair: each event is one record, it can be
//! polled, and writing to one whose reader is gone raises no signal.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

use super::fds::{self, InternalFd, Kind};
use super::registry;

/// Longest record: `struct ib_uverbs_async_event_desc`.
pub const MAX_RECORD: usize = 16;

/// Records kept for a program that does not read; older ones are then lost, as nobody wants them.
const MAX_PENDING: usize = 1 << 16;

/// Room in the socket, in bytes; the kernel may grant less, and the rest waits with us.
const SOCKET_BUFFER: usize = 1 << 20;

/// What became of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// The program can read it.
    Delivered,
    /// The socket is full: it goes out, in its turn, when the program has read what is before it.
    Pending,
    /// Nobody can ever read it: the program closed its end, or this is a forked child.
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
    /// Records that found the socket full, oldest first. Its lock also keeps senders out of a purge.
    pending: Mutex<VecDeque<Record>>,
}

impl ChannelSender {
    /// Makes a channel: the program's fd, close-on-exec as the kernel's, and our end. The program's fd is the program's to close.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn open() -> Result<(RawFd, Arc<ChannelSender>), Errno> {
        let (program, device) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // Best effort: what does not fit into the socket waits with us.
        let _ = sockopt::set_socket_send_buffer_size(&device, SOCKET_BUFFER);
        let device = InternalFd::of_device(device)?;
        let number = fds::number(&program);
        let sender = Arc::new_cyclic(|this| ChannelSender {
            this: this.clone(),
            device,
            program: number,
            pending: Mutex::default(),
        });
        registry::enter_channel(&program, &sender)?;
        Ok((program.into_raw_fd(), sender))
    }

    /// Queues one event of at most [`MAX_RECORD`] bytes. Never blocks, never raises SIGPIPE.
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
            room::wait_for(self.this.clone());
        }
        Sent::Pending
    }

    /// Sends what had found the socket full; true when something is still waiting.
    fn flush(&self) -> bool {
        let mut pending = self.lock();
        self.drain(&mut pending);
        !pending.is_empty()
    }

    /// Takes back the events that the program has not read and that `doomed` picks; how many.
    ///
    /// For an object that is being destroyed: the program must not read a pointer to freed memory, and must not be waited for
    /// to acknowledge what it will never see.
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
            room::wait_for(self.this.clone());
        }
        purged
    }

    /// The number of the program's end.
    pub fn program_fd(&self) -> RawFd {
        self.program
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Record>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Reads one record from the program's end, in its stead.
    fn take_back(&self) -> Option<Record> {
        self.device.get()?;
        if fds::verified_kind(self.program) != Some(Kind::Events) {
            return None;
        }
        // SAFETY: verified just now to be our socket, which the program closes only after it destroyed what sends to it.
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

/// Waiting for room in channels whose program does not read. Rare: it takes hundreds of unread events. So a thread is made when the
/// first channel is full, and ends when none is.
mod room {
    use super::*;

    /// A channel that becomes full while the thread waits for others is looked at after so long.
    const RECHECK: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };

    pub(super) fn wait_for(channel: Weak<ChannelSender>) {
        if registry::is_full(channel) && !start() {
            // The next event that finds a channel full tries again.
            registry::nobody_waits();
        }
    }

    fn start() -> bool {
        let thread = std::thread::Builder::new()
            .name("urnic-events".to_owned())
            .stack_size(128 << 10);
        crate::signals::blocked(|| thread.spawn(serve)).is_ok()
    }

    fn serve() {
        while let Some(full) = registry::still_full(ChannelSender::flush) {
            let ends: Vec<_> = full.iter().filter_map(|channel| channel.device.get()).collect();
            let mut fds: Vec<_> = ends.iter().map(|end| PollFd::new(end, PollFlags::OUT)).collect();
            let _ = poll(&mut fds, Some(&RECHECK));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};

    fn open() -> (OwnedFd, Arc<ChannelSender>) {
        fds::adopt_process();
        let (program, sender) = ChannelSender::open().unwrap();
        // SAFETY: just made, and the channel leaves its closing to us.
        (unsafe { OwnedFd::from_raw_fd(program) }, sender)
    }

    fn read_all(fd: &OwnedFd) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        let mut bytes = [0; 64];
        while let Ok((_, n)) = recv(fd, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
            records.push(bytes[..n].to_vec());
        }
        records
    }

    #[test]
    fn each_event_is_one_record() {
        let (fd, sender) = open();
        assert_eq!(sender.send(&[1; 8]), Sent::Delivered);
        assert_eq!(sender.send(&[2; 16]), Sent::Delivered);
        assert_eq!(read_all(&fd), [vec![1; 8], vec![2; 16]]);
        registry::forget(fds::number(&fd));
    }

    #[test]
    fn a_full_socket_loses_and_reorders_nothing() {
        let (fd, sender) = open();
        let mut sent = 0u64;
        while sender.send(&sent.to_ne_bytes()) == Sent::Delivered {
            sent += 1;
        }
        for more in 1..100 {
            assert_eq!(sender.send(&(sent + more).to_ne_bytes()), Sent::Pending);
        }
        // Nothing is sent any more: what waits comes by itself.
        let mut seen = Vec::new();
        while seen.len() < sent as usize + 100 {
            seen.extend(read_all(&fd));
            std::thread::yield_now();
        }
        let expected: Vec<_> = (0..sent + 100).map(|n| n.to_ne_bytes().to_vec()).collect();
        assert_eq!(seen, expected);
        registry::forget(fds::number(&fd));
    }

    #[test]
    fn purge_takes_back_the_doomed_wherever_they_wait() {
        let (fd, sender) = open();
        let mut total = 0u64;
        while sender.send(&(total % 3).to_ne_bytes()) == Sent::Delivered {
            total += 1;
        }
        total += 1; // the first that found it full waits with us
        let doomed = sender.purge(|record| record == 1u64.to_ne_bytes());
        assert_eq!(doomed as u64, (0..total).filter(|n| n % 3 == 1).count() as u64);
        let seen = read_all(&fd);
        assert_eq!(seen.len() as u64, total - doomed as u64);
        assert!(seen.iter().all(|record| record[0] != 1));
        registry::forget(fds::number(&fd));
    }

    #[test]
    fn a_closed_reader_is_no_signal() {
        let (fd, sender) = open();
        registry::forget(fds::number(&fd));
        drop(fd);
        assert_eq!(sender.send(&[0; 8]), Sent::Dropped);
        assert_eq!(sender.purge(|_| true), 0);
    }

    #[test]
    fn our_end_is_out_of_the_way() {
        let (fd, sender) = open();
        let ours = fds::number(&sender.device.get().unwrap());
        assert!(ours > fds::number(&fd));
        assert_eq!(fds::kind(ours), Some(Kind::Device));
        registry::forget(fds::number(&fd));
    }
}
