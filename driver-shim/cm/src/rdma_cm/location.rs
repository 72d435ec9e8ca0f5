//! The TCP port of a listener, for initiators. A listener whose port is not that of TCP has the UDP
//! port of its number, and names its TCP port there. Others have the TCP port of their number.

use rustix::io::Errno;
use urnic_wire::mad::{ServiceReply, ServiceStatus};

use super::attempt::{Connecting, Location};
use super::state::{Engine, State, World};

impl Engine {
    /// Asks the peer for the TCP port of the id's service.
    ///
    /// # Errors
    /// Those of asking, with the connection that is to be made otherwise.
    pub(super) fn locate(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        connecting: Box<Connecting>,
    ) -> Result<(), Box<Connecting>> {
        match self.new_lookup(world, handle, &[], connecting.deadline) {
            Ok(mut lookup) => {
                tracing::debug!("id {handle}: asks for the TCP port of its service");
                lookup.connecting = Some(connecting);
                self.begin_lookup(world, handle, lookup);
                Ok(())
            }
            Err(errno) => {
                tracing::debug!("id {handle}: cannot ask for a TCP port: {errno}");
                Err(connecting)
            }
        }
    }

    /// The peer answered the request for a TCP port.
    pub(super) fn located(&mut self, world: &mut World<'_>, handle: u32, reply: &ServiceReply) {
        let port = match (reply.status, u16::try_from(reply.qpn)) {
            (ServiceStatus::UNSUPPORTED, _) => return self.not_located(world, handle, Location::Absent),
            (ServiceStatus::VALID, Ok(port @ 1..)) => port,
            (ServiceStatus::VALID, _) => return self.connect_failed(world, handle, Errno::PROTO),
            _ => return self.connect_failed(world, handle, Errno::CONNREFUSED),
        };
        tracing::debug!("id {handle}: the service has TCP port {port}");
        self.connect_at(world, handle, Location::Known, Some(port));
    }

    /// The peer named no TCP port: the service has that of its number, if there is one.
    pub(super) fn not_located(&mut self, world: &mut World<'_>, handle: u32, location: Location) {
        tracing::debug!("id {handle}: the service has the TCP port of its number, or none: {location:?}");
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        let asks_first = remote.is_some_and(|remote| self.policy(remote.ip()).own_ports);
        match asks_first {
            true => self.connect_at(world, handle, location, None),
            // It was tried before.
            false => self.connect_failed(world, handle, Errno::CONNREFUSED),
        }
    }

    /// Ends the lookup, and connects to the TCP port of the service.
    fn connect_at(&mut self, world: &mut World<'_>, handle: u32, location: Location, port: Option<u16>) {
        let Some(mut connecting) = self.end_lookup(handle).and_then(|lookup| lookup.connecting) else {
            return;
        };
        connecting.location = location;
        connecting.port = port.unwrap_or(connecting.port);
        if let Err(errno) = self.start_connecting(world, handle, connecting) {
            self.connect_failed(world, handle, errno);
        }
    }

    /// Nobody has the TCP port. The peer is asked if it was not asked before, or did not answer.
    pub(super) fn connect_refused(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let is_known = match &id.state {
            State::Connecting(connecting) => match connecting.location {
                Location::Unasked | Location::Silent => world.now >= connecting.deadline,
                Location::Absent | Location::Known => true,
            },
            _ => true,
        };
        if is_known {
            return self.connect_failed(world, handle, Errno::CONNREFUSED);
        }
        let State::Connecting(connecting) = std::mem::replace(&mut id.state, State::Over) else {
            return;
        };
        if self.locate(world, handle, connecting).is_err() {
            self.connect_failed(world, handle, Errno::CONNREFUSED);
        }
    }

    /// The network says that a message to another connection manager did not arrive: nobody has the
    /// UDP port, or it cannot be reached.
    pub fn message_refused(&mut self, world: &mut World<'_>, port: u32, number: u32, errno: Errno) {
        let Some(handle) = self.datagrams.requests.get(&(port, number)).copied() else {
            return;
        };
        tracing::debug!("id {handle}: its request did not arrive: {errno}");
        self.not_located(world, handle, Location::Absent);
    }
}
