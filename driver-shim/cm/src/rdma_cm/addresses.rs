//! Addresses of ids: binding and resolving.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;

use super::abi::{CmAddress, IdAddresses};
use super::state::{CmEvent, Engine, EventParams, PS_DATAGRAMS, PS_IPOIB, State, World};
use crate::mpa_startup::Close;

impl Engine {
    /// Binds an id to an address, and to a port of its own.
    ///
    /// # Errors
    /// `EINVAL` if the id is already bound, or for an address of Ethernet in the port space of
    /// IPoIB; `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES`.
    pub fn bind(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        local: CmAddress,
    ) -> Result<(), Errno> {
        let port_space = self.own(channel, handle)?.port_space;
        if !matches!(self.own(channel, handle)?.state, State::Idle) {
            return Err(Errno::INVAL);
        }
        let has_udp_port = self.ids.get(&handle).is_some_and(|id| self.has_udp_port(id));
        let (local, lid) = match local {
            // All addresses of all ports: librdmacm binds to this GID to detect whether AF_IB is
            // supported.
            CmAddress::Ib(gid) if gid == [0; 16] => (None, None),
            CmAddress::Ib(_) => return Err(Errno::ADDRNOTAVAIL),
            CmAddress::Ip(local) if port_space == PS_IPOIB && !local.ip().is_unspecified() => {
                return Err(Errno::INVAL);
            }
            CmAddress::Ip(local) => {
                let (port, lid) = match (PS_DATAGRAMS.contains(&port_space), has_udp_port) {
                    (true, true) => (self.take_place(world, handle, local)?, None),
                    (true, false) if local.port() == 0 => (self.pick_port(), None),
                    (true, false) => (local.port(), None),
                    (false, true) => {
                        let (lid, port) = self.bind_own(world, handle, local)?;
                        (port, Some(lid))
                    }
                    (false, false) => {
                        let (lid, port) = self.bind_tcp(world, handle, local)?;
                        (port, Some(lid))
                    }
                };
                (Some(with_port(local, port)), lid)
            }
        };
        let id = self.own(channel, handle)?;
        id.local = local;
        id.state = State::Bound {
            lid,
            early: VecDeque::new(),
        };
        Ok(())
    }

    /// Resolves the source address for `remote`; an event reports the result.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state or for two families; `ENODEV` for an InfiniBand address; the
    /// errors of binding, for an id that has no address yet.
    pub fn resolve_address(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        local: Option<CmAddress>,
        remote: CmAddress,
    ) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        if !matches!(id.state, State::Idle | State::Bound { .. }) {
            return Err(Errno::INVAL);
        }
        let (datagrams, ipoib) = (id.is_for_datagrams(), id.port_space == PS_IPOIB);
        let idle = matches!(id.state, State::Idle);
        let CmAddress::Ip(remote) = remote else {
            return Err(Errno::NODEV);
        };
        let wanted = match local {
            None => None,
            Some(CmAddress::Ip(local)) => Some(local),
            Some(CmAddress::Ib(_)) => return Err(Errno::NODEV),
        };
        // A bound id stays bound: the source address of this command applies only to an id that is
        // not bound (`resolve_prepare_src` of the kernel).
        let local = if idle { wanted } else { id.local };
        if local.is_some_and(|local| local.is_ipv4() != remote.is_ipv4()) {
            return Err(Errno::INVAL);
        }
        if let Some(wanted) = local.filter(|local| idle && *local != unspecified(*local)) {
            self.bind(world, channel, handle, CmAddress::Ip(wanted))?;
        }
        let local = self.own(channel, handle)?.local;
        let remote = loopback_if_unspecified(remote);
        let source = if ipoib {
            Err(Errno::INVAL)
        } else if remote.ip().is_multicast() && !datagrams {
            Err(Errno::NETUNREACH)
        } else {
            match local {
                Some(local) if !local.ip().is_unspecified() => Ok(local),
                _ => world.device.source(remote),
            }
        };
        match source {
            Ok(source) => {
                // From this state on the id is an initiator. Its port is held until it connects.
                let before = std::mem::replace(&mut self.own(channel, handle)?.state, State::AddressResolved);
                let held = self.hold(world, handle, before);
                let given = local.map_or(0, |local| local.port());
                let port = if given == 0 { self.pick_port() } else { given };
                let id = self.own(channel, handle)?;
                id.held = held;
                id.local = Some(with_port(source, port));
                id.remote = Some(remote);
                id.picked = given == 0;
                self.report(world, handle, CmEvent::AddressResolved, 0, EventParams::default());
            }
            Err(errno) => {
                let status = -errno.raw_os_error();
                self.report(
                    world,
                    handle,
                    CmEvent::AddressError,
                    status,
                    EventParams::default(),
                );
            }
        }
        Ok(())
    }

    /// Reports success: the network routes, so there is nothing to resolve.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state.
    pub fn resolve_route(&mut self, world: &mut World<'_>, channel: u64, handle: u32) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        if !matches!(id.state, State::AddressResolved) {
            return Err(Errno::INVAL);
        }
        id.state = State::RouteResolved;
        self.report(world, handle, CmEvent::RouteResolved, 0, EventParams::default());
        Ok(())
    }

    /// The addresses of an id, on the device with this node GUID.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn addresses(&mut self, channel: u64, handle: u32, node_guid: u64) -> Result<IdAddresses, Errno> {
        let has_path = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        let on_device = id.local.is_some_and(|local| !local.ip().is_unspecified());
        Ok(IdAddresses {
            node_guid: if on_device { node_guid } else { 0 },
            local: id.local,
            remote: id.remote,
            port_space: id.port_space,
            has_path,
        })
    }

    /// The address to which an id is bound.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn bound_to(&mut self, channel: u64, handle: u32) -> Result<Option<SocketAddr>, Errno> {
        Ok(self.own(channel, handle)?.local)
    }

    /// Turns the listener of a bound id into a holder of the port that accepts no connection, until
    /// the id connects. A UDP port is held as long as the id exists, and needs no listener.
    fn hold(&mut self, world: &mut World<'_>, handle: u32, bound: State) -> Option<u32> {
        let State::Bound { lid, early } = bound else {
            return None;
        };
        for sid in early {
            self.close_stream(world, sid, Close::Abort);
        }
        let stream_port = self.ids.get_mut(&handle).and_then(|id| id.stream_port.take());
        if stream_port.is_some() {
            self.close_listener(world, lid);
            return None;
        }
        lid
    }
}

pub(super) fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// The unspecified address and port 0 of the address family of `address`.
fn unspecified(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

/// Replaces an unspecified destination address, which means this host, as with TCP.
fn loopback_if_unspecified(remote: SocketAddr) -> SocketAddr {
    match remote.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), remote.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), remote.port()),
        _ => remote,
    }
}
