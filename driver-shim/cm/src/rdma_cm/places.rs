//! The UDP ports to which ids are bound. Ids of different port spaces may share one: the service ID
//! of a request tells them apart.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use rustix::io::Errno;
use urnic_wire::mad::service_id;

use super::addresses::with_port;
use super::datagram_state::{Inquiry, Place};
use super::state::{Engine, Id, World};
use urnic_config::CmPorts;

/// Numbers that are tried for an id that may have any.
const NUMBERS_TO_TRY: u32 = 16;

impl Engine {
    /// Whether the id's port is a UDP port, and not the TCP port of its number.
    pub(super) fn has_udp_port(&self, id: &Id) -> bool {
        match id.is_for_datagrams() {
            true => self.identity.is_roce(),
            false => self.default_policy.own_ports,
        }
    }

    /// Gives the UDP port of `local` to an id; returns the port.
    ///
    /// # Errors
    /// Those of binding it; `EADDRINUSE` if an id of the same port space has it.
    pub(super) fn take_place(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        local: SocketAddr,
    ) -> Result<u16, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let first = match self.shareable_place(id, local) {
            Some(first) => first,
            None => {
                // A listener for datagrams tells initiators of the other family that it has no
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

    /// The bound port that includes `local` and that the id can share.
    fn shareable_place(&self, id: &Id, local: SocketAddr) -> Option<u32> {
        let conflicts = |holder: &u32| {
            let (other, ip) = (self.ids.get(holder), local.ip());
            other.is_some_and(|other| {
                let at = other.local.map(|other| other.ip());
                let same = at.is_none_or(|at| at == ip || at.is_unspecified() || ip.is_unspecified());
                same && other.port_space == id.port_space
            })
        };
        if local.port() == 0 {
            return None;
        }
        let is_shareable = |place: &Place| {
            let is_same = place.local == local && (id.one_family || !place.ipv6_only);
            let is_any = place.local.ip().is_unspecified()
                && place.local.port() == local.port()
                && !local.ip().is_unspecified()
                && (place.local.is_ipv4() == local.is_ipv4() || place.local.is_ipv6() && !place.ipv6_only);
            (is_same || is_any) && !place.holders.iter().any(conflicts)
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

    /// The id at the port of a request, with the service that it asks for.
    pub(super) fn asked_id(&self, inquiry: &Inquiry) -> Option<u32> {
        let place = self.place_of(inquiry.port)?;
        let is_asked = |handle: &&u32| {
            let Some((id, local)) = self.ids.get(handle).and_then(|id| Some((id, id.local?))) else {
                return false;
            };
            let (at, remote) = (inquiry.arrival.local.to_canonical(), inquiry.arrival.remote);
            let excluded = id.one_family && local.is_ipv4() != remote.is_ipv4();
            // Linux has all addresses of 127.0.0.0/8, and the device perhaps one.
            let own = local.ip().to_canonical();
            let is_at = own.is_unspecified() || own == at || (own.is_loopback() && at.is_loopback());
            service_id(id.port_space, local.port()) == inquiry.request.service_id && is_at && !excluded
        };
        place.holders.iter().find(is_asked).copied()
    }

    /// The bound port with this number.
    pub(super) fn place_of(&self, port: u32) -> Option<&Place> {
        self.datagrams.places.get(self.datagrams.firsts.get(&port)?)
    }

    /// Binds an id for connections: at the UDP port of its number, and a TCP port for its streams.
    /// Returns the listener, and the id's port.
    ///
    /// # Errors
    /// Those of binding.
    pub(super) fn bind_own(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        local: SocketAddr,
    ) -> Result<(u32, u16), Errno> {
        let port = match self.take_number(world, handle, local) {
            // A device without datagrams.
            Err(Errno::OPNOTSUPP) if self.config.cm.ports == CmPorts::Auto => {
                return self.bind_tcp(world, handle, local);
            }
            taken => taken?,
        };
        let range = self.config.native.port_range.clone();
        let listening = first_free(range, |port| self.bind_tcp(world, handle, with_port(local, port)));
        let (lid, stream_port) = listening.inspect_err(|_| self.leave_place(world, handle))?;
        tracing::debug!("id {handle}: has UDP port {port} and TCP port {stream_port}");
        if let Some(id) = self.ids.get_mut(&handle) {
            id.stream_port = Some(stream_port);
        }
        Ok((lid, port))
    }

    /// Gives the UDP port of `local` to an id for connections; returns the port. If any will do, it
    /// is one that TCP does not use either: an initiator's stream has the TCP port of its number,
    /// and the program may want this port for another purpose.
    ///
    /// # Errors
    /// Those of binding.
    fn take_number(&mut self, world: &mut World<'_>, handle: u32, local: SocketAddr) -> Result<u16, Errno> {
        let tries = if local.port() == 0 { NUMBERS_TO_TRY } else { 0 };
        for _ in 0..tries {
            let port = self.take_place(world, handle, local)?;
            match self.bind_tcp(world, handle, with_port(local, port)) {
                Ok((lid, _)) => {
                    self.close_listener(world, Some(lid));
                    return Ok(port);
                }
                Err(_) => self.leave_place(world, handle),
            }
        }
        self.take_place(world, handle, local)
    }

    /// Binds an id for connections to a TCP port. Returns the listener, and the port.
    ///
    /// # Errors
    /// Those of binding.
    pub(super) fn bind_tcp(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        local: SocketAddr,
    ) -> Result<(u32, u16), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let ipv6_only = id.one_family && local.is_ipv6();
        let (lid, port) = world.device.listen(local, id.traffic_class, ipv6_only)?;
        self.listeners.insert(lid, handle);
        Ok((lid, port))
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
