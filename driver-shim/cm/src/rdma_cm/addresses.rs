//! Addresses and ports of ids: binding, and resolving a peer's address.
//!
//! An id is bound to the port of its number, of TCP or of SCTP (in UDP) or of both, or to the UDP
//! port of the connection manager's messages. Ids of different port spaces may share one of these:
//! the service ID of a request distinguishes them.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;

use rustix::io::Errno;
use urnic_wire::mad::service_id;

use super::abi::{CmAddress, IdAddresses};
use super::attributes::peer_gid;
use super::{
    CmEvent, DeviceListener, Engine, Id, Inquiry, NewStream, PS_DATAGRAMS, PS_IPOIB, Place, State, World,
};
use crate::carrier::listen_over;
use crate::mpa_startup::Close;
use urnic_config::{CmPorts, Llp};

/// The source address of an id that has one. Linux has no route from a loopback address to another
/// host.
///
/// # Errors
/// `EINVAL` without a route; those of the route.
fn from_address(world: &mut World<'_>, local: SocketAddr, remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let to = remote.ip().to_canonical();
    // A group may be on this host alone.
    if !local.ip().is_loopback() || to.is_loopback() || to.is_multicast() {
        return Ok(local);
    }
    let source = world.device.source(remote)?.ip();
    match source.is_loopback() || source == remote.ip() {
        true => Ok(local),
        false => Err(Errno::INVAL),
    }
}

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
        self.bind_for("rdma_bind_addr", world, (channel, handle), local)
    }

    /// Binds an id for the `call` of the program, as [`bind`](Self::bind).
    ///
    /// # Errors
    /// Those of [`bind`](Self::bind).
    pub(super) fn bind_for(
        &mut self,
        call: &str,
        world: &mut World<'_>,
        (channel, handle): (u64, u32),
        local: CmAddress,
    ) -> Result<(), Errno> {
        let now = world.now;
        let bound = self.bind_to(world, channel, handle, local);
        if let (Err(errno), CmAddress::Ip(local)) = (bound, local)
            && errno != Errno::INVAL
        {
            self.log_refused(now, (call, true), local, errno);
        }
        bound
    }

    fn bind_to(
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
                let shared = self.check_port(handle, local, true)?;
                let (port, lid) = match (PS_DATAGRAMS.contains(&port_space), has_udp_port) {
                    // With `wire=roce` connections need no listener of the device, either.
                    (datagrams, true) if datagrams || self.speaks_roce() => {
                        (self.take_number(world, handle, local)?, None)
                    }
                    (true, _) if local.port() == 0 => (self.pick_port(), None),
                    (true, _) => (local.port(), None),
                    (false, true) => {
                        let (lid, port) = self.bind_own(world, handle, local)?;
                        (port, Some(lid))
                    }
                    (false, false) if shared => {
                        let parted = self.part_listeners(world, handle, local.port());
                        let bound = self.bind_stream_port(world, handle, local);
                        self.bind_again(world, parted);
                        let (lid, port) = bound?;
                        (port, Some(lid))
                    }
                    (false, false) => {
                        let (lid, port) = self.bind_stream_port(world, handle, local)?;
                        (port, Some(lid))
                    }
                };
                (Some(with_port(local, port)), lid)
            }
        };
        let id = self.own(channel, handle)?;
        (id.local, id.bound) = (local, true);
        id.state = State::Bound {
            lid,
            early: VecDeque::new(),
        };
        Ok(())
    }

    /// Checks whether the other ids of a port space leave the port of `local` to an id
    /// (`cma_check_port` of the kernel). Returns whether they share it with the id. `reuse`: they
    /// may; a listener shares its port with no other id.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` if one of the two ids is bound to any address, `EADDRINUSE` if both have the
    /// same.
    pub(super) fn check_port(&self, handle: u32, local: SocketAddr, reuse: bool) -> Result<bool, Errno> {
        if local.port() == 0 {
            return Ok(false);
        }
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let mut shared = false;
        for (other, holder) in &self.ids {
            let Some(at) = holder.local.filter(|at| at.port() == local.port()) else {
                continue;
            };
            if *other == handle || !holder.bound || holder.port_space != id.port_space {
                continue;
            }
            let listens = matches!(holder.state, State::Listening(_) | State::Serving(_));
            if reuse && id.reuse && holder.reuse && !listens {
                shared = true;
                continue;
            }
            let of_one_family = |id: &Id, at: SocketAddr| id.one_family || at.is_ipv4();
            if local.is_ipv4() != at.is_ipv4() && of_one_family(id, local) && of_one_family(holder, at) {
                continue;
            }
            if local.ip().is_unspecified() || at.ip().is_unspecified() {
                return Err(Errno::ADDRNOTAVAIL);
            }
            if local.ip() == at.ip() {
                return Err(Errno::ADDRINUSE);
            }
        }
        Ok(shared)
    }

    /// Closes the listeners that hold a TCP port for ids which share it: while one listens, no
    /// other id could bind or connect from the port. Returns the ids that had a listener.
    fn part_listeners(&mut self, world: &mut World<'_>, handle: u32, port: u16) -> Vec<u32> {
        let port_space = self.ids.get(&handle).map(|id| id.port_space);
        let shares = |id: &Id| {
            id.bound
                && id.reuse
                // The listener of an id with ports of its own is at another TCP port.
                && id.stream_port.is_none()
                && id.local.is_some_and(|at| at.port() == port)
                && Some(id.port_space) == port_space
        };
        let others: Vec<u32> = (self.ids.iter())
            .filter(|(_, id)| shares(id))
            .map(|(other, _)| *other)
            .collect();
        let mut parted = Vec::new();
        for other in others {
            let Some(id) = self.ids.get_mut(&other) else {
                continue;
            };
            let reservation = id.reservation.take();
            let (lid, early) = match &mut id.state {
                State::Bound { lid, early } => (lid.take(), std::mem::take(early)),
                _ => (None, VecDeque::new()),
            };
            if reservation.or(lid).is_some() {
                parted.push(other);
            }
            self.close_listener(world, reservation);
            self.close_listener(world, lid);
            for NewStream { sid, .. } in early {
                self.close_stream(world, sid, Close::Abort);
            }
        }
        parted
    }

    /// Gives ids their listeners again, as far as the port is free: an id that has bound the port
    /// meanwhile holds it for all.
    fn bind_again(&mut self, world: &mut World<'_>, parted: Vec<u32>) {
        for handle in parted {
            let Some(local) = self.ids.get(&handle).and_then(|id| id.local) else {
                continue;
            };
            let Ok((again, _)) = self.bind_stream_port(world, handle, local) else {
                continue;
            };
            match self.ids.get_mut(&handle) {
                Some(Id {
                    state: State::Bound { lid, .. },
                    ..
                }) => *lid = Some(again),
                Some(id) => id.reservation = Some(again),
                None => {}
            }
        }
    }

    /// Releases the port of an id that is about to connect, also where another id holds it for
    /// both.
    pub(super) fn release_shared_port(&mut self, world: &mut World<'_>, handle: u32) {
        self.release_port(world, handle);
        let shared = self.ids.get(&handle).filter(|id| id.reuse && id.bound);
        if let Some(local) = shared.and_then(|id| id.local) {
            self.part_listeners(world, handle, local.port());
        }
    }

    /// Begins to listen at the port of an id that shared it until now, or returns the listener
    /// that it has.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EADDRNOTAVAIL` while another id has the port; `EINVAL` for an id without an
    /// address.
    pub(super) fn listener_of(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        lid: Option<u32>,
    ) -> Result<u32, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let local = id.local.ok_or(Errno::INVAL)?;
        if id.reuse {
            self.check_port(handle, local, false)?;
        }
        match lid {
            Some(lid) => Ok(lid),
            None => Ok(self.bind_stream_port(world, handle, local)?.0),
        }
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
            let wanted = CmAddress::Ip(wanted);
            self.bind_for("rdma_resolve_addr", world, (channel, handle), wanted)?;
        }
        let local = self.own(channel, handle)?.local;
        let remote = loopback_if_unspecified(remote);
        let source = if ipoib {
            Err(Errno::INVAL)
        } else if remote.ip().is_multicast() && !datagrams {
            Err(Errno::NETUNREACH)
        } else {
            match local {
                Some(local) if !local.ip().is_unspecified() => from_address(world, local, remote),
                _ => world.device.source(remote),
            }
        };
        match source {
            Ok(source) => {
                // From this state on the id is an initiator. Its port is reserved until it
                // connects.
                let before = std::mem::replace(&mut self.own(channel, handle)?.state, State::AddressResolved);
                let reservation = self.reserve_port(world, handle, before);
                let given = local.map_or(0, |local| local.port());
                let port = if given == 0 { self.pick_port() } else { given };
                let id = self.own(channel, handle)?;
                id.reservation = reservation;
                id.local = Some(with_port(source, port));
                id.remote = Some(remote);
                id.picked = given == 0;
                self.report_plain(world, handle, CmEvent::AddressResolved);
            }
            Err(errno) => {
                self.log_refused(world.now, ("rdma_resolve_addr", false), remote, errno);
                self.report_failure(world, handle, CmEvent::AddressError, errno);
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
        self.report_plain(world, handle, CmEvent::RouteResolved);
        Ok(())
    }

    /// The addresses of an id.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn addresses(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
    ) -> Result<IdAddresses, Errno> {
        let has_path = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        let on_device = id.local.filter(|local| !local.ip().is_unspecified());
        let sgid = on_device.map_or([0; 16], |local| world.device.own_gid(local).1);
        let dgid = id.remote.map_or([0; 16], |remote| peer_gid(remote.ip(), sgid));
        Ok(IdAddresses {
            node_guid: on_device.map_or(0, |local| world.device.node_guid(local)),
            local: id.local,
            remote: id.remote,
            gids: [sgid, dgid],
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

    /// Turns the listener of a bound id into one that only reserves the port and accepts no
    /// connection, until the id connects. A UDP port is reserved as long as the id exists, and
    /// needs no listener.
    fn reserve_port(&mut self, world: &mut World<'_>, handle: u32, bound: State) -> Option<u32> {
        let State::Bound { lid, early } = bound else {
            return None;
        };
        for NewStream { sid, .. } in early {
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

/// Numbers that are tried for an id that may have any.
const NUMBERS_TO_TRY: u32 = 16;

impl Engine {
    /// Whether the id's port is a UDP port, and not the TCP port of its number.
    fn has_udp_port(&self, id: &Id) -> bool {
        match id.is_for_datagrams() {
            true => self.identity.is_roce(),
            false => self.default_policy.own_ports || self.config.speaks_roce_to_some(),
        }
    }

    /// Gives the UDP port of `local` to an id; returns the port.
    ///
    /// # Errors
    /// Those of binding it.
    fn take_place(&mut self, world: &mut World<'_>, handle: u32, local: SocketAddr) -> Result<u16, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let first = match self.shareable_place(id, local) {
            Some(first) => first,
            None => {
                // A listener for datagrams answers initiators of the other family that it has no
                // service for them.
                let ipv6_only = id.one_family && local.is_ipv6() && !id.is_for_datagrams();
                let (numbers, port) = world.device.open_ports(local, ipv6_only)?;
                let first = numbers.first().copied().ok_or(Errno::ADDRNOTAVAIL)?;
                let place = Place {
                    local: with_port(local, port),
                    ipv6_only,
                    numbers,
                    holders: Vec::new(),
                };
                let firsts = place.numbers.iter().map(|number| (*number, first));
                self.datagrams.firsts.extend(firsts);
                self.datagrams.places.insert(first, place);
                first
            }
        };
        let place = self.datagrams.places.get_mut(&first).ok_or(Errno::NOENT)?;
        place.holders.push(handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.ports = place.numbers.clone();
        }
        Ok(place.local.port())
    }

    /// The bound port that includes `local`. The other ids of the port leave it to the id
    /// ([`check_port`](Self::check_port)).
    fn shareable_place(&self, id: &Id, local: SocketAddr) -> Option<u32> {
        if local.port() == 0 {
            return None;
        }
        let is_shareable = |place: &Place| {
            let is_same = place.local == local && (id.one_family || !place.ipv6_only);
            let is_any = place.local.ip().is_unspecified()
                && place.local.port() == local.port()
                && !local.ip().is_unspecified()
                && (place.local.is_ipv4() == local.is_ipv4() || place.local.is_ipv6() && !place.ipv6_only);
            is_same || is_any
        };
        let mut places = self.datagrams.places.iter();
        places
            .find(|(_, place)| is_shareable(place))
            .map(|(first, _)| *first)
    }

    /// Takes its UDP port from an id. The last id of a port closes it.
    pub(super) fn leave_place(&mut self, world: &mut World<'_>, handle: u32) {
        let ports = match self.ids.get_mut(&handle) {
            Some(id) => std::mem::take(&mut id.ports),
            None => return,
        };
        let Some(first) = ports.first() else {
            return;
        };
        let Some(place) = self.datagrams.places.get_mut(first) else {
            return;
        };
        place.holders.retain(|holder| *holder != handle);
        if place.holders.is_empty() {
            self.datagrams.places.remove(first);
            for port in ports {
                self.datagrams.firsts.remove(&port);
                world.device.close_port(port);
            }
        }
    }

    /// The id that has the requested service, at the port of the request if there is one: the port
    /// may be common to all services.
    pub(super) fn asked_id(&self, inquiry: &Inquiry) -> Option<u32> {
        let service = inquiry.request.service_id;
        let is_asked = |handle: &&u32| {
            let id = self.ids.get(handle);
            id.is_some_and(|id| id.has_service(service, inquiry.arrival.local))
        };
        let at_port = self.place_of(inquiry.port).into_iter();
        let mut holders = at_port
            .chain(self.datagrams.places.values())
            .flat_map(|place| &place.holders);
        holders.find(is_asked).copied()
    }

    /// The bound port with this number.
    fn place_of(&self, port: u32) -> Option<&Place> {
        self.datagrams.places.get(self.datagrams.firsts.get(&port)?)
    }

    /// Binds an id for connections: at the UDP port of its number, and a TCP port for its streams.
    /// Returns the listener, and the id's port.
    ///
    /// # Errors
    /// Those of binding.
    fn bind_own(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        local: SocketAddr,
    ) -> Result<(u32, u16), Errno> {
        let port = match self.take_number(world, handle, local) {
            // A device without datagrams.
            Err(Errno::OPNOTSUPP) if self.config.cm.ports == CmPorts::Auto => {
                return self.bind_stream_port(world, handle, local);
            }
            taken => taken?,
        };
        let is_own = self.default_policy.own_ports;
        let range = match is_own {
            true => self.config.native.port_range.clone(),
            false => Some(port..=port),
        };
        let listening = first_free(range, |port| {
            self.bind_stream_port(world, handle, with_port(local, port))
        });
        let (lid, stream_port) = listening.inspect_err(|_| self.leave_place(world, handle))?;
        tracing::debug!("id {handle}: has UDP port {port} and TCP port {stream_port}");
        if let Some(id) = self.ids.get_mut(&handle) {
            id.stream_port = is_own.then_some(stream_port);
        }
        Ok((lid, port))
    }

    /// Gives the UDP port of `local` to an id; returns the port. If any will do for connections, it
    /// is one that TCP does not use either: an initiator's stream has the TCP port of its number,
    /// and the program may want this port for another purpose.
    ///
    /// # Errors
    /// Those of binding.
    fn take_number(&mut self, world: &mut World<'_>, handle: u32, local: SocketAddr) -> Result<u16, Errno> {
        let is_any = |errno| match errno {
            // Another process has the number at some address.
            Errno::ADDRINUSE if local.ip().is_unspecified() => Errno::ADDRNOTAVAIL,
            errno => errno,
        };
        let tries = match self.ids.get(&handle) {
            Some(id) if local.port() == 0 && !id.is_for_datagrams() => NUMBERS_TO_TRY,
            _ => 0,
        };
        for _ in 0..tries {
            let port = self.take_place(world, handle, local)?;
            match self.bind_over(world, handle, &[Llp::Tcp], with_port(local, port)) {
                Ok((lid, _)) => {
                    self.close_listener(world, Some(lid));
                    return Ok(port);
                }
                Err(_) => self.leave_place(world, handle),
            }
        }
        self.take_place(world, handle, local).map_err(is_any)
    }

    /// Binds an id for connections to a port of each lower layer that the configuration names.
    /// Returns the listener, and the port.
    ///
    /// # Errors
    /// Those of binding.
    fn bind_stream_port(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        local: SocketAddr,
    ) -> Result<(u32, u16), Errno> {
        let llps = self.config.llps();
        self.bind_over(world, handle, &llps, local)
    }

    /// Binds an id for connections to a port of each of these lower layers. Returns the first
    /// listener, and the port.
    ///
    /// # Errors
    /// Those of binding.
    fn bind_over(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        llps: &[Llp],
        local: SocketAddr,
    ) -> Result<(u32, u16), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (traffic_class, ipv6_only) = (id.traffic_class, id.one_family && local.is_ipv6());
        let (lids, port) = listen_over(
            world.device,
            llps,
            local,
            |device, llp, at| device.listen(llp, at, traffic_class, ipv6_only),
            |device, lid| device.unlisten(lid),
        )?;
        let mut others: Vec<u32> = lids.iter().skip(1).map(|(lid, _)| *lid).collect();
        let (first, _) = lids.first().copied().ok_or(Errno::INVAL)?;
        for (lid, llp) in lids {
            let others = std::mem::take(&mut others);
            let listener = DeviceListener { handle, llp, others };
            self.listeners.insert(lid, listener);
        }
        Ok((first, port))
    }
}

impl Id {
    /// Whether the id has the service, for messages that arrive at this address.
    pub(super) fn has_service(&self, service: u64, at: IpAddr) -> bool {
        let Some(local) = self.local else {
            return false;
        };
        let (own, at) = (local.ip().to_canonical(), at.to_canonical());
        let excluded = self.one_family && local.is_ipv4() != at.is_ipv4();
        // Linux has all addresses of 127.0.0.0/8, and the device perhaps one.
        let is_at = own.is_unspecified() || own == at || (own.is_loopback() && at.is_loopback());
        service_id(self.port_space, local.port()) == service && is_at && !excluded
    }
}

/// Opens the first port of a range that is free, or any port.
///
/// # Errors
/// `EADDRINUSE` if none is free; those of `open`.
pub(super) fn first_free<T>(
    range: Option<RangeInclusive<u16>>,
    mut open: impl FnMut(u16) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let Some(mut range) = range else {
        return open(0);
    };
    let opened = range.find_map(|port| match open(port) {
        Err(Errno::ADDRINUSE) => None,
        opened => Some(opened),
    });
    opened.unwrap_or(Err(Errno::ADDRINUSE))
}
