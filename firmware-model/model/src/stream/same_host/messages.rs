//! What the two ends of a TCP connection tell each other beside it, over a unix socket: one message
//! of either end, with descriptors.

use super::bell::SLOTS;
use super::neighbour::process::TableMessage;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::sync::Arc;
use urnic_device::stream::{ip_of, octets_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The first word of a message: "urnic", and the version of all that is shared. Ends with different
/// versions use TCP.
const MAGIC: u64 = u64::from_be_bytes(*b"urnic\0\0\x06");
/// Most descriptors of a message.
const DESCRIPTORS: usize = 5;

/// A message. An offer has the descriptors of the connection's memory and of the bell of its
/// sender; an answer has those of the bell alone. Behind them comes that of the sender's table of
/// STags, if it lets the other reach its memory, and the pidfd of the process of its host, if that
/// is another one that the other may reach, too.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Message {
    magic: u64,
    /// The address of the TCP connection's end that connected, IPv4 as a mapped address.
    ip: [u8; 16],
    port: u32,
    /// The connection's place in the sender's bell.
    slot: u32,
    /// The table of STags: its process (0: there is none), entries and address, and whether regions
    /// may be in the process of the host (0 or 1).
    process: u32,
    entries: u32,
    table: u64,
    has_host: u32,
    unused: u32,
}

impl Message {
    pub(super) fn new(initiator: SocketAddr, slot: u32, table: Option<TableMessage>) -> Message {
        let table = table.unwrap_or_default();
        Message {
            magic: MAGIC,
            ip: octets_of(initiator.ip()),
            port: initiator.port().into(),
            slot,
            process: table.process,
            entries: table.slots,
            table: table.address,
            has_host: table.has_host.into(),
            unused: 0,
        }
    }

    /// What the sender says about its table, whose descriptor is the message's last.
    pub(super) fn table(&self) -> Option<TableMessage> {
        (self.process != 0).then_some(TableMessage {
            process: self.process,
            slots: self.entries,
            address: self.table,
            has_host: self.has_host != 0,
        })
    }

    /// The end that connected.
    pub(super) fn initiator(&self) -> SocketAddr {
        SocketAddr::new(ip_of(&self.ip), self.port as u16)
    }

    /// The connection's place in the sender's bell.
    pub(super) fn slot(&self) -> u32 {
        self.slot
    }

    pub(super) fn is_valid(&self) -> bool {
        self.magic == MAGIC && self.port <= u16::MAX.into() && self.slot < SLOTS
    }
}

/// Sends a message without waiting.
pub(super) fn send(socket: BorrowedFd<'_>, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(message.as_bytes())], &mut control, flags).map(drop)
}

/// Receives a message, which has `count` descriptors, and those of a table and of a host if it has
/// them.
///
/// # Errors
/// `EAGAIN`: there is none yet. `ECONNRESET`: there will be none. `EPROTO`: it is none of this
/// version, or its descriptors are missing.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    count: usize,
    descriptors: &Arc<Descriptors>,
) -> Result<(Message, Vec<Descriptor>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0u8; size_of::<Message>()];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    if got.bytes == 0 {
        return Err(Errno::CONNRESET);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for fd in rights {
                fds.push(descriptors.adopt(fd)?);
            }
        }
    }
    let message = Message::read_from_bytes(&bytes).map_err(|_| Errno::PROTO)?;
    let table = message.table();
    let count = count + usize::from(table.is_some()) + usize::from(table.is_some_and(|t| t.has_host));
    let whole = got.bytes == bytes.len() && fds.len() == count && message.is_valid();
    whole.then_some((message, fds)).ok_or(Errno::PROTO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::{AsFd, OwnedFd};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn received(socket: &OwnedFd, count: usize) -> Result<(Message, usize), Errno> {
        let descriptors = Descriptors::new(8, None);
        receive(socket.as_fd(), count, &descriptors).map(|(message, fds)| (message, fds.len()))
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (ours, theirs) = pair();
        let message = Message::new("10.1.2.3:4567".parse().unwrap(), 99, None);
        send(ours.as_fd(), &message, &[ours.as_fd(), theirs.as_fd()]).unwrap();
        let (message, fds) = received(&theirs, 2).unwrap();
        assert_eq!(message.initiator(), "10.1.2.3:4567".parse().unwrap());
        assert_eq!((message.slot(), fds), (99, 2));
        assert_eq!(received(&theirs, 2).err(), Some(Errno::AGAIN));
        drop(ours);
        assert_eq!(received(&theirs, 2).err(), Some(Errno::CONNRESET));
    }

    #[test]
    fn shm_07_a_message_of_another_kind_is_refused() {
        let good = Message::new("[::1]:1".parse().unwrap(), 0, None);
        for bad in [
            Message {
                magic: MAGIC + 1,
                ..good
            },
            Message {
                port: 1 << 16,
                ..good
            },
            Message { slot: SLOTS, ..good },
            Message { process: 1, ..good },
        ] {
            let (ours, theirs) = pair();
            send(ours.as_fd(), &bad, &[ours.as_fd()]).unwrap();
            assert_eq!(received(&theirs, 1).err(), Some(Errno::PROTO), "{bad:?}");
        }
        for count in [0, 2] {
            let (ours, theirs) = pair();
            send(ours.as_fd(), &good, &[ours.as_fd()]).unwrap();
            assert_eq!(received(&theirs, count).err(), Some(Errno::PROTO));
        }
        let (ours, theirs) = pair();
        rustix::net::send(&ours, b"short", SendFlags::empty()).unwrap();
        assert_eq!(received(&theirs, 0).err(), Some(Errno::PROTO));
    }
}
