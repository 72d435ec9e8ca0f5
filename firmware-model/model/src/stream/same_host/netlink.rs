//! Questions to the kernel by netlink(7): one request, and the first message of the answer.

use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `nlmsghdr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Header {
    length: u32,
    pub(super) kind: u16,
    flags: u16,
    sequence: u32,
    port: u32,
}

pub(super) const NLM_F_REQUEST: u16 = 1;
/// Old answers that are thrown away at most.
const STALE: usize = 8;
/// Bytes that are read of an answer.
const ANSWER: usize = 1024;

impl Header {
    /// Of a request of `len` bytes, with this header.
    pub(super) fn new(kind: u16, flags: u16, len: usize) -> Header {
        Header {
            length: len as u32,
            kind,
            flags,
            sequence: 0,
            port: 0,
        }
    }
}

/// A netlink socket of one protocol.
#[derive(Debug)]
pub(super) struct Socket(Descriptor);

impl Socket {
    /// A socket of a protocol, or (`None`) of `NETLINK_ROUTE`, whose number is 0.
    ///
    /// # Errors
    /// Those of socket(2).
    pub(super) fn open(protocol: Option<Protocol>, descriptors: &Arc<Descriptors>) -> Result<Socket, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        descriptors.adopt(socket).map(Socket)
    }

    /// Sends a request, and returns the beginning of the answer. One at a time.
    ///
    /// # Errors
    /// `ESRCH`: the answer is shorter, as an error is.
    pub(super) fn ask<T: FromBytes + KnownLayout + Immutable>(&self, request: &[u8]) -> Result<T, Errno> {
        let mut bytes = [0u8; ANSWER];
        // An answer that could not be received before is none to this request.
        let stale = || recv(&self.0, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok();
        let _ = (0..STALE).all(|_| stale());
        let kernel = SocketAddrNetlink::new(0, 0);
        sendto(&self.0, request, SendFlags::empty(), &kernel)?;
        // The kernel has answered when the request is sent.
        let (_, received) = recv(&self.0, &mut bytes, RecvFlags::DONTWAIT)?;
        let bytes = bytes.get(..received.min(ANSWER)).unwrap_or_default();
        T::read_from_prefix(bytes)
            .map(|(answer, _)| answer)
            .map_err(|_| Errno::SRCH)
    }
}
