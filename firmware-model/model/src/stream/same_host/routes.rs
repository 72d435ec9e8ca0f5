//! Whether an address is this host's own, by rtnetlink(7).

use super::netlink::{Header, NLM_F_REQUEST, Socket};
use crate::stream::descriptor::Descriptors;
use rustix::io::Errno;
use rustix::net::AddressFamily;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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

/// A place to ask the kernel about routes.
#[derive(Debug)]
pub(super) struct Routes(Mutex<Socket>);

impl Routes {
    /// # Errors
    /// Those of opening a netlink socket.
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<Routes, Errno> {
        Socket::open(None, descriptors).map(Mutex::new).map(Routes)
    }

    /// Whether packets to an address stay on this host. If the kernel does not say, they may not.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        let mut address = [0; 16];
        let (family, len) = match ip.to_canonical() {
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
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
