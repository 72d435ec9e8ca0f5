//! The connection manager: event channels and identifiers.

use super::nonblocking::set_nonblocking;
use super::owned::Owned;
use super::result::done;
use rdma_mummy_sys as sys;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use urnic_sys::{Numbers, Plain, Unpadded};

/// An event channel of the connection manager.
pub(crate) struct Channel(Owned<sys::rdma_event_channel>);

/// An event of an identifier.
pub(crate) struct Event {
    pub(crate) kind: sys::rdma_cm_event_type::Type,
    /// The key of the identifier.
    pub(crate) key: u64,
    /// 0, a negative errno, or a reason code of the connection manager.
    pub(crate) status: i32,
    pub(crate) private_data: Vec<u8>,
    /// Number of concurrent RDMA Reads that the peer accepts.
    pub(crate) reads: u8,
    /// Number of concurrent RDMA Reads that the peer makes.
    pub(crate) served_reads: u8,
    /// The new identifier of a connection request.
    pub(crate) incoming: Option<Id>,
}

impl Channel {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        // SAFETY: the function has no parameters. Identifiers keep their channel.
        let channel = Self(unsafe { Owned::made(sys::rdma_create_event_channel()) }?);
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw((*self.0.as_ptr()).fd) }
    }

    /// The next event, if there is one.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<Event>> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel is open, and `event` is a valid place for the result.
        match done(unsafe { sys::rdma_get_cm_event(self.0.as_ptr(), &mut event) }) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            result => result?,
        }
        // SAFETY: the event was just taken. Its destruction is its acknowledgement.
        let event = unsafe { Owned::made(event) }?;
        // SAFETY: the event does not change, and exists until it is acknowledged below.
        let raw = unsafe { &*event.as_ptr() };
        // SAFETY: identifiers are of the TCP port space, whose events have connection parameters.
        let param = unsafe { &raw.param.conn };
        let private_data = if param.private_data.is_null() {
            Vec::new()
        } else {
            // SAFETY: the event has this number of bytes at this address.
            unsafe {
                std::slice::from_raw_parts(param.private_data.cast::<u8>(), param.private_data_len.into())
            }
            .to_vec()
        };
        let request = raw.event == sys::rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        let incoming = request.then(|| {
            // SAFETY: the event of a request has a new identifier, which its taker owns.
            unsafe { Owned::made(raw.id) }.map(|id| Id(id, Arc::clone(self)))
        });
        let result = Event {
            kind: raw.event,
            key: raw.id as u64,
            status: raw.status,
            private_data,
            reads: param.initiator_depth,
            served_reads: param.responder_resources,
            incoming: incoming.transpose()?,
        };
        done(event.destroy())?;
        Ok(Some(result))
    }
}

/// One end of a connection before it is established, or a listener.
///
/// When it is dropped, it has no queue pair (a Link destroys its own first), and all events were
/// acknowledged when they were taken.
pub(crate) struct Id(
    pub(super) Owned<sys::rdma_cm_id>,
    #[expect(dead_code)] Arc<Channel>,
);

impl Id {
    pub(crate) fn new(channel: &Arc<Channel>) -> io::Result<Self> {
        let mut id = ptr::null_mut();
        let space = sys::rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is open, and the identifier keeps it.
        done(unsafe { sys::rdma_create_id(channel.0.as_ptr(), &mut id, ptr::null_mut(), space) })?;
        // SAFETY: the identifier was just made, and keeps its channel.
        Ok(Self(unsafe { Owned::made(id) }?, Arc::clone(channel)))
    }

    pub(crate) fn key(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn listen(&self, address: SocketAddr, backlog: i32) -> io::Result<()> {
        let mut address = Address::from(address);
        // SAFETY: the address has the length of its family.
        done(unsafe { sys::rdma_bind_addr(self.0.as_ptr(), address.as_mut()) })?;
        // SAFETY: the identifier exists and is bound.
        done(unsafe { sys::rdma_listen(self.0.as_ptr(), backlog) })
    }

    pub(crate) fn resolve_address(&self, address: SocketAddr, timeout_ms: i32) -> io::Result<()> {
        let mut address = Address::from(address);
        // SAFETY: the address has the length of its family.
        done(unsafe {
            sys::rdma_resolve_addr(self.0.as_ptr(), ptr::null_mut(), address.as_mut(), timeout_ms)
        })
    }

    pub(crate) fn resolve_route(&self, timeout_ms: i32) -> io::Result<()> {
        // SAFETY: the identifier exists as long as `self`.
        done(unsafe { sys::rdma_resolve_route(self.0.as_ptr(), timeout_ms) })
    }

    pub(crate) fn reject(&self) {
        // SAFETY: the identifier exists as long as `self`. If the request no longer exists, the
        // call fails, which needs no handling.
        let _ = unsafe { sys::rdma_reject(self.0.as_ptr(), ptr::null(), 0) };
    }

    pub(crate) fn local(&self) -> SocketAddr {
        // SAFETY: the identifier exists, and the storage has room for an address of any family.
        address(unsafe { &(*self.0.as_ptr()).route.addr.src_addr_union.src_storage })
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        // SAFETY: the identifier exists, and the storage has room for an address of any family.
        address(unsafe { &(*self.0.as_ptr()).route.addr.dst_addr_union.dst_storage })
    }

    pub(super) fn context(&self) -> io::Result<NonNull<sys::ibv_context>> {
        // SAFETY: the identifier exists as long as `self`.
        NonNull::new(unsafe { (*self.0.as_ptr()).verbs }).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

/// A socket address in the form of C.
#[repr(C)]
union Address {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Address {
    fn as_mut(&mut self) -> *mut libc::sockaddr {
        ptr::from_mut(self).cast()
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        match address {
            SocketAddr::V4(v4) => Self {
                v4: libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: v4.ip().to_bits().to_be(),
                    },
                    sin_zero: [0; 8],
                },
            },
            SocketAddr::V6(v6) => Self {
                v6: libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                },
            },
        }
    }
}

/// An address of librdmacm. Every family but IPv6 is treated as IPv4, so an unset address becomes
/// 0.0.0.0.
fn address(storage: &libc::sockaddr_storage) -> SocketAddr {
    let bytes = storage.as_bytes();
    if i32::from(storage.ss_family) == libc::AF_INET6
        && let Some(v6) = libc::sockaddr_in6::parse(bytes)
    {
        let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
        return SocketAddr::new(IpAddr::V6(ip), u16::from_be(v6.sin6_port));
    }
    let v4 = libc::sockaddr_in::parse(bytes).unwrap_or(libc::sockaddr_in::zeroes());
    let ip = Ipv4Addr::from_bits(u32::from_be(v4.sin_addr.s_addr));
    SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port))
}
