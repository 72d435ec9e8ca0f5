//! Unix sockets that another process has the other end of.

use super::helper::Helper;
use crate::stream::descriptor::Descriptor;
use crate::sys;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, ReturnFlags, Shutdown, recvmsg, shutdown, sockopt::set_socket_passcred,
};
use rustix::process::{Pid, getpid};
use std::io::IoSliceMut;
use std::sync::Arc;

/// A connected unix socket. Dropping it never blocks, whatever the other end has sent.
#[derive(Debug)]
pub(super) struct LocalSocket {
    /// Always present, until the value is dropped.
    socket: Option<Descriptor>,
    helper: Arc<Helper>,
    /// The process that has it. A forked child has a copy.
    process: Pid,
}

impl LocalSocket {
    pub(super) fn new(socket: Descriptor, helper: &Arc<Helper>) -> LocalSocket {
        LocalSocket {
            socket: Some(socket),
            helper: helper.clone(),
            process: getpid(),
        }
    }

    /// Where descriptors go that come by this socket and are refused.
    pub(super) fn helper(&self) -> &Arc<Helper> {
        &self.helper
    }

    pub(super) fn descriptor(&self) -> Result<&Descriptor, Errno> {
        self.socket.as_ref().ok_or(Errno::BADF)
    }

    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.descriptor().map(AsFd::as_fd)
    }

    /// The number of the user at the other end, as of connect(2) or listen(2).
    pub(super) fn uid(&self) -> Result<u32, Errno> {
        sys::peer_credentials(self.fd()?).map(|(uid, _)| uid)
    }

    /// The process at the other end, as of connect(2) or listen(2), if it has a number here.
    pub(super) fn peer_process(&self) -> Option<Pid> {
        let (_, number) = sys::peer_credentials(self.fd().ok()?).ok()?;
        Pid::from_raw(number)
    }

    /// Whether the other end is closed.
    pub(super) fn is_hung_up(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Ok(socket) = self.fd() else { return true };
        let mut polled = [PollFd::new(&socket, PollFlags::empty())];
        let _ = poll(&mut polled, Some(&Timespec::default()));
        polled[0].revents().contains(PollFlags::HUP)
    }
}

/// Whether a socket has no message, and gets none any more. (Its close is then that of an ordinary
/// file, and does not close what was passed by a message.)
fn is_empty_for_good(socket: &Descriptor) -> bool {
    // Later messages are refused.
    if shutdown(socket, Shutdown::Both).is_err() {
        return false;
    }
    // An empty message looks like the end, except that the kernel has the sender's credentials to
    // tell, and then says that there was no room for them.
    if set_socket_passcred(socket, true).is_err() {
        return false;
    }
    let mut byte = [0; 1];
    let mut peek = || {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let mut control = RecvAncillaryBuffer::default();
        recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)
    };
    // That the other end was closed without reading everything is reported once.
    let peeked = peek().or_else(|_| peek());
    peeked.is_ok_and(|message| message.bytes == 0 && !message.flags.contains(ReturnFlags::CTRUNC))
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        // In a forked child, the connection and the helper's lock are the parent's.
        if getpid() == self.process && !is_empty_for_good(&socket) {
            self.helper.close(socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::descriptor::Descriptors;
    use crate::sys::thread_start::ThreadStart;
    use rustix::fd::OwnedFd;
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
    };
    use std::io::IoSlice;
    use std::mem::MaybeUninit;

    fn pair() -> (Descriptor, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Descriptors::new(4, None).adopt(ours).unwrap(), theirs)
    }

    fn pass(socket: &OwnedFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.as_slice();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn shm_22_a_socket_without_messages_is_known_to_be_empty() {
        let (ours, _theirs) = pair();
        assert!(is_empty_for_good(&ours));
        let (ours, theirs) = pair();
        drop(theirs);
        assert!(is_empty_for_good(&ours));
        // The other end has not read what was sent there.
        let (ours, theirs) = pair();
        rustix::net::send(&ours, b"x", SendFlags::empty()).unwrap();
        drop(theirs);
        assert!(is_empty_for_good(&ours));
    }

    #[test]
    fn shm_22_a_message_of_any_kind_is_noticed() {
        for bytes in [&b"x"[..], b""] {
            for passes in [true, false] {
                for closes in [true, false] {
                    let (ours, theirs) = pair();
                    pass(&theirs, bytes, passes.then(|| theirs.as_fd()));
                    let kept = (!closes).then_some(theirs);
                    assert!(!is_empty_for_good(&ours), "{bytes:?} {passes} {closes}");
                    drop(kept);
                }
            }
        }
    }

    #[test]
    fn shm_22_nothing_follows_once_a_socket_was_looked_at() {
        let (ours, theirs) = pair();
        assert!(is_empty_for_good(&ours));
        let sent = rustix::net::send(&theirs, b"x", SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PIPE));
    }

    /// The descriptor that a stranger passed is closed by the helper's thread.
    #[test]
    fn shm_22_what_was_passed_is_closed_by_the_helper() {
        let helper = Arc::new(Helper::new(ThreadStart::default()).unwrap());
        let (ours, theirs) = pair();
        let (watched, passed) = rustix::pipe::pipe().unwrap();
        pass(&theirs, b"", Some(passed.as_fd()));
        drop(passed);
        drop(LocalSocket::new(ours, &helper));
        // The end of the pipe: its other end is closed.
        assert_eq!(rustix::io::read(&watched, &mut [0u8; 1]), Ok(0));
    }
}
