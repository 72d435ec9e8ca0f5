//! Questions to the kernel by netlink(7), each one request and the first message of the answer; and
//! which addresses are this host's own.

use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use urnic_sync::Mutex;
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

    /// Sends a request, and returns the beginning of the answer. Only one request is outstanding at
    /// a time.
    ///
    /// # Errors
    /// `ESRCH`: the answer is too short, as an error message is.
    pub(super) fn ask<T: FromBytes + KnownLayout + Immutable>(&self, request: &[u8]) -> Result<T, Errno> {
        let mut bytes = [0u8; ANSWER];
        // An answer that could not be received earlier does not belong to this request.
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

// Whether an address is this host's own, by rtnetlink(7).

/// `rtmsg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Route {
    family: u8,
    destination_len: u8,
    source_len: u8,
    tos: u8,
    table: u8,
    protocol: u8,
    scope: u8,
    kind: u8,
    flags: u32,
}

/// A request for the route to an address: `nlmsghdr`, `rtmsg`, and the attribute `RTA_DST`.
#[repr(C)]
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
struct Request {
    header: Header,
    route: Route,
    attribute_len: u16,
    attribute: u16,
    /// IPv4 in the first four bytes.
    address: [u8; 16],
}

/// The answer, up to its attributes.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
struct Answer {
    header: Header,
    route: Route,
}

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTN_LOCAL: u8 = 2;

/// The time for which an answer counts. A connection to an address that has come to this host
/// since uses TCP; for an address that has left it, no process is found.
const CURRENT: Duration = Duration::from_secs(1);
/// Most answers that are stored.
const ANSWERS: usize = 64;

/// A netlink socket for queries of routes, and the last answers.
#[derive(Debug)]
pub(super) struct Routes {
    socket: Mutex<Socket>,
    answers: Mutex<HashMap<IpAddr, (Instant, bool)>>,
}

impl Routes {
    /// # Errors
    /// Those of opening a netlink socket.
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<Routes, Errno> {
        Ok(Routes {
            socket: Mutex::new(Socket::open(None, descriptors)?),
            answers: Mutex::default(),
        })
    }

    /// Whether packets to an address stay on this host, now or a moment ago; `false` if the kernel
    /// does not answer.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        let (ip, now) = (ip.to_canonical(), Instant::now());
        let known = self.answers.lock().get(&ip).copied();
        if let Some((since, is_local)) = known
            && now.duration_since(since) < CURRENT
        {
            return is_local;
        }
        let is_local = self.ask(ip);
        let mut answers = self.answers.lock();
        if answers.len() >= ANSWERS {
            answers.clear();
        }
        answers.insert(ip, (now, is_local));
        is_local
    }

    fn ask(&self, ip: IpAddr) -> bool {
        let mut address = [0; 16];
        let (family, len) = match ip {
            IpAddr::V4(v4) => {
                address[..4].copy_from_slice(&v4.octets());
                (AddressFamily::INET, 4)
            }
            IpAddr::V6(v6) => {
                address = v6.octets();
                (AddressFamily::INET6, 16)
            }
        };
        let unused = address.len() - len;
        let request = Request {
            header: Header::new(RTM_GETROUTE, NLM_F_REQUEST, size_of::<Request>() - unused),
            route: Route {
                family: family.as_raw() as u8,
                destination_len: 8 * len as u8,
                ..Route::default()
            },
            attribute_len: 4 + len as u16,
            attribute: RTA_DST,
            address,
        };
        let request = request.as_bytes();
        let socket = self.socket.lock();
        let answer = socket.ask::<Answer>(request.get(..request.len() - unused).unwrap_or_default());
        answer.is_ok_and(|answer| answer.header.kind == RTM_NEWROUTE && answer.route.kind == RTN_LOCAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shm_23_addresses_of_this_host_are_known() {
        let routes = Routes::new(&Descriptors::new(1, None)).unwrap();
        for own in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
            assert!(routes.is_local(own.parse().unwrap()), "{own}");
        }
        // Documentation (RFC 5737, RFC 3849) and multicast.
        for other in ["192.0.2.1", "203.0.113.7", "2001:db8::1", "224.0.0.1", "ff02::1"] {
            assert!(!routes.is_local(other.parse().unwrap()), "{other}");
        }
    }
}
