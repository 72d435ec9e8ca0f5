//! The readiness of a command channel.
//!
//! The kernel's `/dev/infiniband/rdma_cm` can be polled: it is readable if an event waits. The
//! program's fd is one end of a socketpair, with one byte in it while there are events and none
//! otherwise, so that poll, epoll and select work as they are. The byte is never read by the
//! program, which only ever writes to its channel.

use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

use rustix::io::{Errno, FdFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use urnic_process::failure;
use urnic_process::fds::InternalFd;

use crate::unwritable::{make_unwritable, take_back};

/// Both ends of the socketpair; the program has another fd for the program's end.
#[derive(Debug)]
pub struct Token {
    theirs: InternalFd,
    ours: InternalFd,
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(ours) = self.ours.get() {
            take_back(ours);
        }
    }
}

impl Token {
    /// Replaces `opened` by the program's end, with the flags of `opened`.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` if no fd is left, `ENOMEM` if no memory is left.
    pub fn stand_for(opened: BorrowedFd<'_>) -> Result<Token, Errno> {
        let flags = rustix::fs::fcntl_getfl(opened)?;
        let fd_flags = rustix::io::fcntl_getfd(opened)?;
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let (theirs, ours) = failure::named("socketpair", pair)?;
        make_unwritable(&theirs);
        rustix::fs::fcntl_setfl(&theirs, flags & rustix::fs::OFlags::NONBLOCK)?;
        let token = Token {
            theirs: InternalFd::of_device(theirs)?,
            ours: InternalFd::of_device(ours)?,
        };
        let theirs = token.theirs.get().ok_or(Errno::BADF)?;
        // SAFETY: the number belongs to the program, is open, and stays open: it is replaced in
        // place, and not dropped here.
        let mut place: OwnedFd =
            unsafe { std::os::fd::FromRawFd::from_raw_fd(urnic_process::fds::number(&opened)) };
        let placed = rustix::io::dup3(theirs, &mut place, dup_flags(fd_flags));
        let _ = place.into_raw_fd();
        placed?;
        Ok(token)
    }

    /// Shows whether there are events. To be called only when that changes.
    pub fn show(&self, events: bool) {
        let mut byte = [0u8];
        // Neither call blocks: the socket holds one byte at most.
        if events {
            if let Some(ours) = self.ours.get() {
                let _ = send(ours, &byte, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        } else if let Some(theirs) = self.theirs.get() {
            let _ = recv(theirs, byte.as_mut_slice(), RecvFlags::DONTWAIT);
        }
    }
}

fn dup_flags(flags: FdFlags) -> rustix::io::DupFlags {
    if flags.contains(FdFlags::CLOEXEC) {
        rustix::io::DupFlags::CLOEXEC
    } else {
        rustix::io::DupFlags::empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::fs::{Mode, OFlags, open};
    use std::os::fd::AsFd;

    #[test]
    fn a_channel_is_readable_while_there_are_events() {
        urnic_process::fds::adopt_process();
        let fd = open(
            "/dev/null",
            OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
            Mode::empty(),
        )
        .unwrap();
        let token = Token::stand_for(fd.as_fd()).unwrap();
        let readable = || {
            let mut fds = [PollFd::new(&fd, PollFlags::IN | PollFlags::OUT)];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            assert!(!fds[0].revents().contains(PollFlags::OUT), "never writable");
            fds[0].revents().contains(PollFlags::IN)
        };
        assert!(!readable());
        for _ in 0..1000 {
            token.show(true);
            assert!(readable());
            token.show(false);
            assert!(!readable());
        }
        assert!(rustix::fs::fcntl_getfl(&fd).unwrap().contains(OFlags::NONBLOCK));
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    }
}
