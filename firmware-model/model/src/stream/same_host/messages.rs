//! The messages of the two ends of a connection, or of a ring of datagrams, over a unix socket.
//!
//! Each end sends a [`Greeting`]: the initiator's is the offer, and the responder's the answer. If
//! both have memory that the other may access, a [`Disclosure`] of each follows
//! ([`introduction`](super::introduction)).

use super::blocking::BlockingWork;
use super::by_file::ByFile;
use super::nonce::NonceValue;
use super::notification::{MEMORY as PAGE, PeerPage, SLOTS, check_pipe};
use crate::host::{SharedMemory, lives};
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::sys;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recv, recvmsg, sendmsg, shutdown,
};
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::Arc;
use urnic_device::stream::{ip_of, octets_of};
use urnic_sys::processes;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The first word of a message: "urnic", and the version of all that is shared. Ends with different
/// versions use TCP.
const MAGIC: u64 = u64::from_be_bytes(*b"urnic\0\0\x09");
/// Most descriptors of a message.
const MOST: usize = 3;

/// A message with descriptors.
pub(super) trait Message: FromBytes + IntoBytes + Immutable + KnownLayout {
    fn is_valid(&self) -> bool;
    /// The number of descriptors that a message has: these, or these.
    fn descriptors(&self, is_answer: bool) -> usize;
}

/// The offer of a connection's initiator, with the descriptors of the connection's memory and those
/// of its notification page; or the responder's answer, with the latter alone. The sender of
/// datagrams offers the memory of its ring alone.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Greeting {
    magic: u64,
    /// The address of the TCP connection's end that connected, IPv4 as a mapped address.
    ip: [u8; 16],
    port: u32,
    /// The connection's place in the sender's notification page.
    slot: u32,
    /// The address of the sender's nonce in its process; 0: its memory cannot be reached.
    nonce: u64,
    /// Of an answer: the nonce that was read in the initiator's process, or 0.
    proof: NonceValue,
    /// 1 if it is the offer of a ring of datagrams.
    datagrams: u32,
    /// The number that the sender's end of the TCP connection has in its process.
    socket: u32,
    /// Of a connection's offer: the address to which the initiator connected. Several connections
    /// from one address may reach a listener of all addresses.
    target_ip: [u8; 16],
    target_port: u64,
}

impl Greeting {
    pub(super) fn new(initiator: SocketAddr, slot: u32) -> Greeting {
        Greeting {
            magic: MAGIC,
            ip: octets_of(initiator.ip()),
            port: initiator.port().into(),
            slot,
            nonce: 0,
            proof: NonceValue::default(),
            datagrams: 0,
            socket: 0,
            target_ip: [0; 16],
            target_port: 0,
        }
    }

    /// With the address to which the initiator connected.
    pub(super) fn with_target(self, target: SocketAddr) -> Greeting {
        Greeting {
            target_ip: octets_of(target.ip()),
            target_port: target.port().into(),
            ..self
        }
    }

    /// Whether the initiator connected to this address.
    pub(super) fn is_to(&self, target: SocketAddr) -> bool {
        self.target_ip == octets_of(target.ip()) && self.target_port == u64::from(target.port())
    }

    /// The offer of a ring of datagrams from `source`.
    pub(super) fn of_datagrams(source: SocketAddr) -> Greeting {
        Greeting {
            datagrams: 1,
            ..Greeting::new(source, 0)
        }
    }

    /// With the number of the sender's TCP socket.
    pub(super) fn with_socket(self, socket: u32) -> Greeting {
        Greeting { socket, ..self }
    }

    /// The number that the sender's TCP socket has in its process.
    pub(super) fn socket(&self) -> u32 {
        self.socket
    }

    /// Whether a ring of datagrams is offered.
    pub(super) fn is_of_datagrams(&self) -> bool {
        self.datagrams != 0
    }

    /// Adds the address of the sender's nonce, and the value that it read as the receiver's.
    pub(super) fn with_nonce(self, nonce: Option<u64>, proof: NonceValue) -> Greeting {
        let nonce = nonce.unwrap_or(0);
        Greeting { nonce, proof, ..self }
    }

    /// The address of the sender's nonce.
    pub(super) fn nonce(&self) -> Option<u64> {
        Some(self.nonce).filter(|nonce| *nonce != 0)
    }

    pub(super) fn proof(&self) -> NonceValue {
        self.proof
    }

    /// The end that connected.
    pub(super) fn initiator(&self) -> SocketAddr {
        SocketAddr::new(ip_of(&self.ip), self.port as u16)
    }

    /// The connection's place in the sender's notification page.
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }
}

impl Message for Greeting {
    fn is_valid(&self) -> bool {
        self.magic == MAGIC && self.port <= u16::MAX.into() && self.slot < SLOTS && self.datagrams < 2
    }

    fn descriptors(&self, is_answer: bool) -> usize {
        match (is_answer, self.datagrams) {
            (true, _) => 2,
            (false, 0) => 3,
            (false, _) => 1,
        }
    }
}

/// One end's description of its memory, sent if the other end has proved that it may access it: the
/// table of STags, with its descriptor, and the pidfd of the process of its host if that has
/// memory, too.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Disclosure {
    magic: u64,
    /// Of the initiator: the nonce that was read in the responder's process, or 0.
    proof: NonceValue,
    /// The table: the number of its entries (0: no table) and its address in the process.
    entries: u32,
    has_host: u32,
    table: u64,
    /// Shows that the sender may reach the process of its host.
    host_proof: u64,
}

impl Disclosure {
    pub(super) fn new(proof: NonceValue, table: Option<TableMessage>) -> Disclosure {
        let table = table.unwrap_or_default();
        Disclosure {
            magic: MAGIC,
            proof,
            entries: table.slots,
            has_host: table.host_proof.is_some().into(),
            table: table.address,
            host_proof: table.host_proof.unwrap_or(0),
        }
    }

    pub(super) fn proof(&self) -> NonceValue {
        self.proof
    }

    /// The sender's description of its table.
    pub(super) fn table(&self) -> Option<TableMessage> {
        (self.entries != 0).then_some(TableMessage {
            slots: self.entries,
            address: self.table,
            host_proof: (self.has_host != 0).then_some(self.host_proof),
        })
    }
}

impl Message for Disclosure {
    fn is_valid(&self) -> bool {
        self.magic == MAGIC && self.has_host < 2 && self.has_host <= self.entries
    }

    fn descriptors(&self, _: bool) -> usize {
        usize::from(self.entries != 0) + usize::from(self.has_host != 0)
    }
}

/// An end's description of its table of STags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TableMessage {
    /// Entries of its table.
    pub(super) slots: u32,
    /// The address of the table in its process.
    pub(super) address: u64,
    /// Regions may be in the process of its host, which it may reach, as this shows.
    pub(super) host_proof: Option<u64>,
}

/// The descriptors of a message. Those that are not taken are refused.
#[derive(Debug)]
pub(super) struct Passed {
    left: VecDeque<OwnedFd>,
    descriptors: Arc<Descriptors>,
    blocking: Arc<BlockingWork>,
}

impl Passed {
    /// Takes the next descriptor, if `check` accepts it: the check makes sure that closing it, or
    /// a duplicate of it, does not block.
    ///
    /// # Errors
    /// Those of `check`. `EPROTO`: there is no descriptor. `EMFILE`: the device has no room for it.
    pub(super) fn take<T>(
        &mut self,
        check: impl FnOnce(BorrowedFd<'_>) -> Result<T, Errno>,
    ) -> Result<(T, Descriptor), Errno> {
        let checked = check(self.left.front().ok_or(Errno::PROTO)?.as_fd())?;
        let room = self.descriptors.room()?;
        let taken = self.left.pop_front().ok_or(Errno::PROTO)?;
        Ok((checked, room.adopt(taken)))
    }

    /// What `use_it` makes of the next descriptor, which is then closed: `use_it` makes sure that
    /// this does not block.
    ///
    /// # Errors
    /// Those of `use_it`. `EPROTO`: there is no descriptor.
    pub(super) fn once<T>(
        &mut self,
        use_it: impl FnOnce(BorrowedFd<'_>) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let made = use_it(self.left.front().ok_or(Errno::PROTO)?.as_fd())?;
        drop(self.left.pop_front());
        Ok(made)
    }

    /// The value of the next descriptor, which `check` accepts, if another connection uses it. The
    /// sender, which may do anything to this process, passes the same again: the descriptors of the
    /// message are closed.
    pub(super) fn known<T>(
        &mut self,
        values: &ByFile<T>,
        check: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Option<Arc<T>> {
        let next = self.left.front()?.as_fd();
        check(next).ok()?;
        let known = values.find(next)?;
        self.left.clear();
        Some(known)
    }

    /// Takes the two descriptors of the sender's notification page. `is_known`: the sender may do
    /// anything to this process.
    ///
    /// # Errors
    /// They are not those of a notification page.
    pub(super) fn notifications(
        &mut self,
        peers: &ByFile<PeerPage>,
        is_known: bool,
    ) -> Result<Arc<PeerPage>, Errno> {
        if is_known
            && self.left.len() == 2
            && let Some(page) = self.known(peers, |fd| SharedMemory::check(fd, PAGE))
        {
            return Ok(page);
        }
        let ((), memory) = self.take(|fd| SharedMemory::check(fd, PAGE))?;
        let ((), waker) = self.take(check_pipe)?;
        peers.get(&memory, || PeerPage::open(&memory, &waker, &self.descriptors))
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        if !self.left.is_empty() {
            self.blocking.close(std::mem::take(&mut self.left));
        }
    }
}

/// Sends a message without waiting.
pub(super) fn send<M: Message>(
    socket: &LocalSocket,
    message: &M,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let bytes = [IoSlice::new(message.as_bytes())];
    sendmsg(socket.descriptor()?, &bytes, &mut control, flags).map(drop)
}

/// The offer that waits in a socket, without its descriptors; it stays there.
///
/// # Errors
/// As those of [`receive`].
pub(super) fn look_at_offer(socket: &LocalSocket) -> Result<Greeting, Errno> {
    let mut bytes = [0u8; size_of::<Greeting>()];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, len) = recv(socket.descriptor()?, &mut bytes, flags)?;
    let greeting = Greeting::read_from_bytes(&bytes).map_err(|_| Errno::PROTO)?;
    match len {
        0 => Err(Errno::CONNRESET),
        _ if len == bytes.len() && greeting.is_valid() => Ok(greeting),
        _ => Err(Errno::PROTO),
    }
}

/// Receives a message with its descriptors: an offer, or an answer.
///
/// The message is peeked first, with room for as many descriptors as any message has: the kernel
/// closes descriptors for which there is no room, and this may block if they are the last ones of
/// their files. So they stay in the socket, which a separate thread closes if the message is
/// refused.
///
/// # Errors
/// `EAGAIN`: no message has arrived yet. `ECONNRESET`: no message will arrive. `EPROTO`: the
/// message is of another version, or its descriptors are not the expected ones. `EMFILE`: some
/// descriptors are missing, because this process may not have more.
pub(super) fn receive<M: Message>(
    socket: &LocalSocket,
    is_answer: bool,
    descriptors: &Arc<Descriptors>,
) -> Result<(M, Passed), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // One byte more than a message has.
    let mut bytes = vec![0u8; size_of::<M>() + 1];
    let look = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
    let mut io = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(socket.descriptor()?, &mut io, &mut control, look)?;
    let mut passed = Passed {
        left: VecDeque::new(),
        descriptors: descriptors.clone(),
        blocking: socket.blocking().clone(),
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            passed.left.extend(rights);
        }
    }
    let bytes = bytes.get(..got.bytes).unwrap_or_default();
    let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
    if bytes.is_empty() && passed.left.is_empty() && !is_cut {
        return Err(Errno::CONNRESET);
    }
    let message = M::read_from_bytes(bytes).map_err(|_| Errno::PROTO)?;
    let expected = message.descriptors(is_answer);
    match passed.left.len() {
        _ if !message.is_valid() => return Err(Errno::PROTO),
        n if n == expected && !is_cut => {}
        n if n < expected && is_cut => return Err(Errno::MFILE),
        _ => return Err(Errno::PROTO),
    }
    // Others have the descriptors, too: us.
    recv(socket.descriptor()?, &mut [0u8; 1], RecvFlags::DONTWAIT)?;
    Ok((message, passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::thread_start::ThreadStart;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (LocalSocket, LocalSocket) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let blocking = Arc::new(BlockingWork::new(ThreadStart::default()).unwrap());
        let descriptors = Descriptors::new(8, None);
        let socket = |fd: OwnedFd| LocalSocket::new(descriptors.adopt(fd).unwrap(), &blocking);
        (socket(ours), socket(theirs))
    }

    fn received<M: Message>(socket: &LocalSocket, is_answer: bool) -> Result<(M, usize), Errno> {
        let descriptors = Descriptors::new(8, None);
        receive(socket, is_answer, &descriptors).map(|(message, passed)| (message, passed.left.len()))
    }

    fn send_with<M: Message>(message: &M, count: usize) -> LocalSocket {
        let (ours, theirs) = pair();
        let fd = ours.descriptor().unwrap().as_fd();
        send(&ours, message, &vec![fd; count]).unwrap();
        theirs
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (ours, theirs) = pair();
        let fd = ours.descriptor().unwrap().as_fd();
        let greeting = Greeting::new("10.1.2.3:4567".parse().unwrap(), 99);
        send(&ours, &greeting, &[fd; 3]).unwrap();
        for _ in 0..2 {
            let greeting = look_at_offer(&theirs).unwrap();
            assert_eq!(greeting.initiator(), "10.1.2.3:4567".parse().unwrap());
        }
        let (greeting, fds) = received::<Greeting>(&theirs, false).unwrap();
        assert_eq!(greeting.initiator(), "10.1.2.3:4567".parse().unwrap());
        assert_eq!((greeting.slot(), fds), (99, 3));
        assert_eq!(received::<Greeting>(&theirs, true).err(), Some(Errno::AGAIN));
        assert_eq!(look_at_offer(&theirs).err(), Some(Errno::AGAIN));
        drop(ours);
        assert_eq!(received::<Greeting>(&theirs, true).err(), Some(Errno::CONNRESET));
        assert_eq!(look_at_offer(&theirs).err(), Some(Errno::CONNRESET));
    }

    #[test]
    fn shm_07_a_greeting_of_another_kind_is_refused() {
        let good = Greeting::new("[::1]:1".parse().unwrap(), 0);
        for bad in [
            Greeting {
                magic: MAGIC + 1,
                ..good
            },
            Greeting {
                port: 1 << 16,
                ..good
            },
            Greeting { slot: SLOTS, ..good },
            Greeting { datagrams: 2, ..good },
        ] {
            let theirs = send_with(&bad, 2);
            assert_eq!(look_at_offer(&theirs).err(), Some(Errno::PROTO), "{bad:?}");
            assert_eq!(
                received::<Greeting>(&theirs, true).err(),
                Some(Errno::PROTO),
                "{bad:?}"
            );
        }
        for count in [0, 1, 3] {
            let theirs = send_with(&good, count);
            assert_eq!(received::<Greeting>(&theirs, true).err(), Some(Errno::PROTO));
        }
        let (ours, theirs) = pair();
        let socket = ours.descriptor().unwrap();
        for len in [0, 5, size_of::<Greeting>() + 1] {
            rustix::net::send(socket, &vec![1; len], SendFlags::empty()).unwrap();
            assert!(look_at_offer(&theirs).is_err(), "{len}");
            assert!(received::<Greeting>(&theirs, true).is_err(), "{len}");
        }
    }

    #[test]
    fn shm_07_a_disclosure_of_another_kind_is_refused() {
        let table = TableMessage {
            slots: 8,
            address: 4096,
            host_proof: Some(9),
        };
        for table in [
            None,
            Some(table),
            Some(TableMessage {
                host_proof: None,
                ..table
            }),
        ] {
            let message = Disclosure::new(NonceValue::default(), table);
            let count = message.descriptors(false);
            let (got, fds) = received::<Disclosure>(&send_with(&message, count), false).unwrap();
            assert_eq!((got.table(), fds), (table, count));
            let theirs = send_with(&message, count + 1);
            assert_eq!(received::<Disclosure>(&theirs, false).err(), Some(Errno::PROTO));
        }
        let bad = Disclosure {
            entries: 0,
            ..Disclosure::new(NonceValue::default(), Some(table))
        };
        assert_eq!(
            received::<Disclosure>(&send_with(&bad, 1), false).err(),
            Some(Errno::PROTO)
        );
    }

    /// More descriptors than any message has: they stay in the socket, and are closed with it.
    #[test]
    fn shm_22_descriptors_that_do_not_belong_are_closed() {
        let greeting = Greeting::new("[::1]:1".parse().unwrap(), 0);
        let (watched, passed) = rustix::pipe::pipe().unwrap();
        let (ours, theirs) = pair();
        let fds = [passed.as_fd(); 20];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(20))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(greeting.as_bytes())];
        sendmsg(
            ours.descriptor().unwrap(),
            &bytes,
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
        drop(passed);
        let refused = received::<Greeting>(&theirs, false);
        assert_eq!(refused.err(), Some(Errno::PROTO));
        drop(theirs);
        // The end of the pipe: nobody has its other end.
        assert_eq!(rustix::io::read(&watched, &mut [0u8; 1]), Ok(0));
    }

    #[test]
    fn a_device_without_room_takes_no_descriptor() {
        let theirs = send_with(&Greeting::new("[::1]:1".parse().unwrap(), 0), 2);
        let full = Descriptors::new(0, None);
        let (_, mut passed) = receive::<Greeting>(&theirs, true, &full).unwrap();
        assert_eq!(passed.take(|_| Ok(())).err(), Some(Errno::MFILE));
    }
}

// Unix sockets that another process has the other end of.

/// A connected unix socket. Dropping it never blocks, whatever the other end has sent.
#[derive(Debug)]
pub(in crate::stream) struct LocalSocket {
    /// Always present, until the value is dropped.
    socket: Option<Descriptor>,
    blocking: Arc<BlockingWork>,
    /// The process that has it. A forked child has a copy.
    process: Pid,
}

impl LocalSocket {
    pub(super) fn new(socket: Descriptor, blocking: &Arc<BlockingWork>) -> LocalSocket {
        LocalSocket {
            socket: Some(socket),
            blocking: blocking.clone(),
            process: getpid(),
        }
    }

    /// The threads that close descriptors from this socket that are refused.
    pub(super) fn blocking(&self) -> &Arc<BlockingWork> {
        &self.blocking
    }

    pub(in crate::stream) fn descriptor(&self) -> Result<&Descriptor, Errno> {
        self.socket.as_ref().ok_or(Errno::BADF)
    }

    fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.descriptor().map(AsFd::as_fd)
    }

    /// The number of the user at the other end, as of connect(2) or listen(2).
    pub(super) fn uid(&self) -> Result<u32, Errno> {
        processes::peer(self.fd()?).map(|peer| peer.user)
    }

    /// The process at the other end, as of connect(2) or listen(2), if it has a number here.
    pub(super) fn peer_process(&self) -> Option<Pid> {
        processes::peer(self.fd().ok()?).ok()?.process
    }

    /// Whether that process is known to live, so that no other one has its number.
    pub(super) fn peer_lives(&self) -> bool {
        let pidfd = self.fd().and_then(sys::peer_pidfd);
        pidfd.is_ok_and(|pidfd| lives(pidfd.as_fd()))
    }

    /// A pidfd of that process.
    pub(super) fn peer_pidfd(&self) -> Result<OwnedFd, Errno> {
        match sys::peer_pidfd(self.fd()?) {
            // Before Linux 6.5.
            Err(Errno::NOPROTOOPT) => {
                pidfd_open(self.peer_process().ok_or(Errno::SRCH)?, PidfdFlags::empty())
            }
            result => result,
        }
    }

    /// Whether the other end is closed.
    pub(in crate::stream) fn is_hung_up(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Ok(socket) = self.fd() else { return true };
        let mut polled = [PollFd::new(&socket, PollFlags::empty())];
        let _ = poll(&mut polled, Some(&Timespec::default()));
        polled[0].revents().contains(PollFlags::HUP)
    }
}

/// Whether a socket has no message and will get none. (Then its close closes no descriptors of
/// messages, and cannot block.)
fn is_empty_for_good(socket: &Descriptor) -> bool {
    // Later messages are refused.
    if shutdown(socket, Shutdown::Both).is_err() {
        return false;
    }
    // An empty message looks like the end, except that it comes with the sender's credentials; the
    // kernel then reports that there was no room for them.
    if set_socket_passcred(socket, true).is_err() {
        return false;
    }
    let mut byte = [0; 1];
    let mut peek = || {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let mut control = RecvAncillaryBuffer::default();
        recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)
    };
    // The kernel reports once that the other end was closed without reading everything.
    let peeked = peek().or_else(|_| peek());
    peeked.is_ok_and(|message| message.bytes == 0 && !message.flags.contains(ReturnFlags::CTRUNC))
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else {
            return;
        };
        // In a forked child, the connection and the lock are the parent's.
        if getpid() == self.process && !is_empty_for_good(&socket) {
            self.blocking.close(socket);
        }
    }
}

#[cfg(test)]
mod local_socket_tests {
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
    fn shm_22_nothing_follows_once_a_socket_was_examined() {
        let (ours, theirs) = pair();
        assert!(is_empty_for_good(&ours));
        let sent = rustix::net::send(&theirs, b"x", SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PIPE));
    }

    /// The descriptor that a stranger passed is closed by a thread.
    #[test]
    fn shm_22_the_helper_closes_passed_descriptors() {
        let blocking = Arc::new(BlockingWork::new(ThreadStart::default()).unwrap());
        let (ours, theirs) = pair();
        let (watched, passed) = rustix::pipe::pipe().unwrap();
        pass(&theirs, b"", Some(passed.as_fd()));
        drop(passed);
        drop(LocalSocket::new(ours, &blocking));
        // The end of the pipe: its other end is closed.
        assert_eq!(rustix::io::read(&watched, &mut [0u8; 1]), Ok(0));
    }
}
