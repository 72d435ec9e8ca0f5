//! The event channels of the process: makes each channel, and waits for room in channels whose
//! program does not read.

use std::os::fd::{IntoRawFd, RawFd};
use std::sync::{Arc, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::channel::ChannelSender;
use super::registry;

/// Makes a channel: the program's fd, which the program closes, and our end.
///
/// # Errors
/// `EMFILE` or `ENFILE` if no fd is left, `ENOMEM` if no memory is left.
pub fn open() -> Result<(RawFd, Arc<ChannelSender>), Errno> {
    let (program, sender) = ChannelSender::pair(wait_for_room)?;
    registry::enter_channel(&program, &sender)?;
    Ok((program.into_raw_fd(), sender))
}

// Waiting for room is rare: it takes hundreds of unread events. So a thread is started when the
// first channel is full, and ends when no channel is full.

/// The thread checks a channel that became full during a wait for others after this time.
const RECHECK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

fn wait_for_room(channel: Weak<ChannelSender>) {
    if registry::is_full(channel) && !start() {
        // The next event that finds a channel full tries again.
        registry::nobody_waits();
    }
}

fn start() -> bool {
    let thread = std::thread::Builder::new()
        .name("urnic-events".to_owned())
        .stack_size(128 << 10);
    urnic_process::signals::blocked(|| thread.spawn(serve)).is_ok()
}

fn serve() {
    while let Some(full) = registry::still_full(ChannelSender::flush) {
        let ends: Vec<_> = full.iter().filter_map(|channel| channel.device()).collect();
        let mut fds: Vec<_> = ends.iter().map(|end| PollFd::new(end, PollFlags::OUT)).collect();
        let _ = poll(&mut fds, Some(&RECHECK));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sent;
    use rustix::net::{RecvFlags, recv};
    use std::os::fd::{FromRawFd, OwnedFd};
    use urnic_process::fds::{self, Kind};

    fn opened() -> (OwnedFd, Arc<ChannelSender>) {
        fds::adopt_process();
        let (program, sender) = open().unwrap();
        // SAFETY: the fd is new, and the channel leaves closing it to the program.
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
        let (fd, sender) = opened();
        assert_eq!(sender.send(&[1; 8]), Sent::Delivered);
        assert_eq!(sender.send(&[2; 16]), Sent::Delivered);
        assert_eq!(read_all(&fd), [vec![1; 8], vec![2; 16]]);
        registry::forget(fds::number(&fd));
    }

    #[test]
    fn a_full_socket_loses_and_reorders_nothing() {
        let (fd, sender) = opened();
        let mut sent = 0u64;
        while sender.send(&sent.to_ne_bytes()) == Sent::Delivered {
            sent += 1;
        }
        for more in 1..100 {
            assert_eq!(sender.send(&(sent + more).to_ne_bytes()), Sent::Pending);
        }
        // The test sends no more: the waiting records arrive by themselves.
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
    fn purge_removes_sent_and_waiting_records() {
        let (fd, sender) = opened();
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

    /// As the kernel's: a program that waits for both directions sleeps.
    #[test]
    fn a_channel_is_never_writable() {
        let (fd, sender) = opened();
        let ready = || {
            let mut fds = [PollFd::new(&fd, PollFlags::IN | PollFlags::OUT)];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            fds[0].revents()
        };
        assert_eq!(ready(), PollFlags::empty());
        assert_eq!(sender.send(&[7; 8]), Sent::Delivered);
        assert_eq!(ready(), PollFlags::IN);
        assert_eq!(read_all(&fd), [vec![7; 8]]);
        assert_eq!(ready(), PollFlags::empty());
        registry::forget(fds::number(&fd));
    }

    #[test]
    fn a_channel_without_a_sender_is_at_its_end() {
        let (fd, sender) = opened();
        registry::forget(fds::number(&fd));
        drop(sender);
        assert_eq!(rustix::io::read(&fd, &mut [0u8; 16]), Ok(0));
    }

    #[test]
    fn a_closed_reader_is_no_signal() {
        let (fd, sender) = opened();
        registry::forget(fds::number(&fd));
        drop(fd);
        assert_eq!(sender.send(&[0; 8]), Sent::Dropped);
        assert_eq!(sender.purge(|_| true), 0);
    }

    #[test]
    fn the_device_end_has_a_high_number() {
        let (fd, sender) = opened();
        let ours = fds::number(&sender.device().unwrap());
        assert!(ours > fds::number(&fd));
        assert_eq!(fds::kind(ours), Some(Kind::Device));
        registry::forget(fds::number(&fd));
    }
}
