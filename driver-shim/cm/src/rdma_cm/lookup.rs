//! The active side of lookups: which queue pair, or which TCP port, has a service of the peer?

use std::net::{Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use urnic_wire::mad::{
    IpAddressing, MAD_LEN, Mad, Message, REQUEST_PRIVATE_DATA, ServiceReply, ServiceRequest, ServiceStatus,
    service_id,
};
use urnic_wire::roce::DEFAULT_PKEY;

use super::abi::DatagramParam;
use super::attempt::Location;
use super::command::Parameters;
use super::datagram_state::{Arrival, FIRST_INTERVAL, Lookup, MAX_INTERVAL, UDP_QKEY};
use super::options::address_vector;
use super::places::first_free;
use super::state::{CmEvent, Engine, EventParams, Key, State, World};
use crate::mpa_startup::Time;

impl Engine {
    /// Asks the peer for its queue pair, with the program's private data.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state or with too much private data; the errors of binding a port.
    pub(super) fn look_up(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        parameters: &Parameters,
    ) -> Result<(), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (Some(remote), State::RouteResolved) = (id.remote, &id.state) else {
            return Err(Errno::INVAL);
        };
        let deadline = world.now + self.policy(remote.ip()).settings.initiator_timeout;
        let lookup = self.new_lookup(world, handle, &parameters.private_data, deadline)?;
        self.begin_lookup(world, handle, lookup);
        Ok(())
    }

    /// A lookup of the id's service at its peer.
    ///
    /// # Errors
    /// `EINVAL` with too much private data; the errors of binding a port.
    pub(super) fn new_lookup(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        given: &[u8],
        deadline: Time,
    ) -> Result<Lookup, Errno> {
        let request_id = self.free_request_id();
        let transaction_id = self.random();
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (Some(local), Some(remote)) = (id.local, id.remote) else {
            return Err(Errno::INVAL);
        };
        let mut private_data = [0; REQUEST_PRIVATE_DATA];
        let addressing = IpAddressing {
            source_port: local.port(),
            source: local.ip().to_canonical(),
            destination: remote.ip().to_canonical(),
        };
        let at = addressing.emit(&mut private_data);
        let to = private_data.get_mut(at..at + given.len());
        to.ok_or(Errno::INVAL)?.copy_from_slice(given);
        let mut request = [0; MAD_LEN];
        let mad = Mad {
            transaction_id,
            message: Message::Request(ServiceRequest {
                request_id,
                pkey: DEFAULT_PKEY,
                service_id: service_id(id.port_space, remote.port()),
                private_data,
            }),
        };
        mad.emit(&mut request);
        tracing::debug!("id {handle}: asks {remote}: {mad}");
        let port = match id.ports.as_slice() {
            [port] => *port,
            // One at each address of all devices, or none.
            _ => self.common_port(world, local)?,
        };
        Ok(Lookup {
            connecting: None,
            attempts: 0,
            sent: Vec::new(),
            port,
            request_id,
            transaction_id,
            request,
            interval: FIRST_INTERVAL,
            deadline,
        })
    }

    /// Sends the first request of a lookup.
    pub(super) fn begin_lookup(&mut self, world: &mut World<'_>, handle: u32, lookup: Lookup) {
        self.datagrams.lookups.insert(lookup.request_id, handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::LookingUp(Box::new(lookup));
        }
        self.ask(world, handle);
    }

    /// The UDP port that the ids share which have an address of the device of `local` and no port
    /// of their own. It is one of those that queue pairs for datagrams have.
    ///
    /// # Errors
    /// `ENODEV` if no device has the address; those of binding the port.
    pub(super) fn common_port(&mut self, world: &mut World<'_>, local: SocketAddr) -> Result<u32, Errno> {
        let device = world.device.device_of(local)?;
        if let Some(port) = self.datagrams.common_ports.get(&device) {
            return Ok(*port);
        }
        let native = &self.config.native;
        let ip = native.listen.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        let port = first_free(native.port_range.clone(), |port| {
            world.device.open_port_of(device, SocketAddr::new(ip, port))
        })?;
        self.datagrams.common_ports.insert(device, port);
        Ok(port)
    }

    fn free_request_id(&mut self) -> u32 {
        loop {
            let request_id = self.random() as u32;
            if !self.datagrams.lookups.contains_key(&request_id) {
                return request_id;
            }
        }
    }

    /// Sends the request of a lookup, and sets the time of the next one.
    fn ask(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let (State::LookingUp(lookup), Some(local), Some(remote)) = (&mut id.state, id.local, id.remote)
        else {
            return;
        };
        let next = (world.now + lookup.interval).min(lookup.deadline);
        lookup.attempts += 1;
        lookup.interval = (lookup.interval * 2).min(MAX_INTERVAL);
        self.timers.set(Key::Id(handle), Some(next));
        let port = lookup.port;
        let sent = world
            .device
            .send_message(port, local.ip(), remote, id.traffic_class, &lookup.request);
        match sent {
            Ok(number) if lookup.connecting.is_some() => {
                lookup.sent.push(number);
                self.datagrams.requests.insert((port, number), handle);
            }
            Err(errno) if lookup.connecting.is_some() && errno != Errno::AGAIN => {
                tracing::debug!("id {handle}: {remote} cannot be asked: {errno}");
                self.not_located(world, handle, Location::Absent);
            }
            Ok(_) => {}
            // The request is repeated.
            Err(errno) => tracing::debug!("id {handle}: a request to {remote} was not sent: {errno}"),
        }
    }

    /// No reply came yet: repeats the request, or gives up.
    pub(super) fn lookup_due(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(State::LookingUp(lookup)) = self.ids.get(&handle).map(|id| &id.state) else {
            return;
        };
        if lookup.is_silent() {
            return self.not_located(world, handle, Location::Silent);
        }
        if world.now < lookup.deadline {
            return self.ask(world, handle);
        }
        if let Some(lookup) = self.end_lookup(handle)
            && lookup.connecting.is_some()
        {
            return self.connect_failed(world, handle, Errno::TIMEDOUT);
        }
        let status = -Errno::TIMEDOUT.raw_os_error();
        self.report(
            world,
            handle,
            CmEvent::Unreachable,
            status,
            EventParams::default(),
        );
    }

    /// Ends the lookup of an id.
    pub(super) fn end_lookup(&mut self, handle: u32) -> Option<Box<Lookup>> {
        let id = self.ids.get_mut(&handle)?;
        let State::LookingUp(lookup) = std::mem::replace(&mut id.state, State::Associated(None)) else {
            return None;
        };
        self.timers.set(Key::Id(handle), None);
        self.forget_lookup(&lookup);
        Some(lookup)
    }

    /// Takes no replies to a lookup any more.
    pub(super) fn forget_lookup(&mut self, lookup: &Lookup) {
        self.datagrams.lookups.remove(&lookup.request_id);
        for number in &lookup.sent {
            self.datagrams.requests.remove(&(lookup.port, *number));
        }
    }

    /// A reply arrived. Replies that belong to no lookup, or come from another host than the one
    /// that was asked, are ignored.
    pub(super) fn replied(
        &mut self,
        world: &mut World<'_>,
        arrival: &Arrival,
        transaction_id: u64,
        reply: &ServiceReply,
    ) {
        let Some(handle) = self.datagrams.lookups.get(&reply.request_id).copied() else {
            return;
        };
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let (State::LookingUp(lookup), Some(local), Some(remote)) = (&id.state, id.local, id.remote) else {
            return;
        };
        let from = |address: SocketAddr| address.ip().to_canonical();
        // Linux has all addresses of 127.0.0.0/8, and the device perhaps one.
        let is_here = |address| from(address).is_loopback();
        let is_peer = from(arrival.remote) == from(remote) || (is_here(arrival.remote) && is_here(remote));
        if lookup.transaction_id != transaction_id || !is_peer {
            return tracing::debug!("id {handle}: a reply from {} is ignored", arrival.remote);
        }
        let (known, class) = (id.qkey, id.traffic_class);
        if lookup.connecting.is_some() {
            return self.located(world, handle, reply);
        }
        self.end_lookup(handle);
        let mut params = EventParams {
            private_data: reply.private_data.to_vec(),
            ..EventParams::default()
        };
        if reply.status != ServiceStatus::VALID {
            let status = reply.status.0.into();
            return self.report(world, handle, CmEvent::Unreachable, status, params);
        }
        let qkey = if reply.qkey == 0 { UDP_QKEY } else { reply.qkey };
        // The id has one Q_Key, for its queue pair and for its peer.
        if known != 0 && known != qkey {
            let status = -Errno::INVAL.raw_os_error();
            return self.report(world, handle, CmEvent::AddressError, status, params);
        }
        if let Some(id) = self.ids.get_mut(&handle) {
            id.qkey = qkey;
        }
        let vector = address_vector(world, local, remote.ip(), class);
        params.datagrams = Some(DatagramParam::new(reply.qpn, qkey, vector));
        self.report(world, handle, CmEvent::Established, 0, params);
    }
}
