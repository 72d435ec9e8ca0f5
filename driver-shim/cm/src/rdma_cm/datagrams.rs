//! Ids for datagrams: the lookup of a service at a peer (its queue pair, or the TCP port of a
//! listener), the requests of peers, and multicast groups.
//!
//! Joining a group takes no messages: the program's queue pair joins the group of IP when it is
//! attached, which librdmacm does at the event.

use std::net::{Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use urnic_wire::mad::{
    IP_ADDRESSING_LEN, IpAddressing, MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA,
    ServiceReply, ServiceRequest, ServiceStatus, parse, service_id,
};
use urnic_wire::roce::{DEFAULT_PKEY, UDP_PORT};

use super::abi::{CmAddress, DatagramParam};
use super::addresses::{first_free, with_port};
use super::attributes::address_vector;
use super::command::Parameters;
use super::failures::Cause;
use super::spare_reads::SPARE_READ;
use super::{
    Arrival, CmEvent, Engine, Event, EventParams, FIRST_INTERVAL, Id, Inquiry, Key, Location, Lookup,
    MAX_INTERVAL, Membership, PS_DATAGRAMS, PS_IPOIB, Service, State, UDP_QKEY, World,
};
use crate::mpa_startup::Time;

/// Lookups at most whose request IDs begin with the native port: half of those that there are.
const MAX_PREFIXED: usize = 1 << 15;

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
    /// `EINVAL` with too much private data; `ENOBUFS` with too many lookups; the errors of binding
    /// a port, and of opening the channel adapter of the device.
    pub(super) fn new_lookup(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        given: &[u8],
        deadline: Time,
    ) -> Result<Lookup, Errno> {
        let request_id = self.free_request_id(world, handle)?;
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
            // A port at each address of all devices, or no port.
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

    /// The UDP port that is shared by ids with an address of the device of `local` and without a
    /// port of their own. Queue pairs for datagrams have the same range of ports.
    ///
    /// # Errors
    /// `ENODEV` if no device has the address; those of binding the port.
    pub(super) fn common_port(&mut self, world: &mut World<'_>, local: SocketAddr) -> Result<u32, Errno> {
        let device = world.device.device_of(local)?;
        self.common_port_of(world, device)
    }

    /// The UDP port that the ids of a device share.
    ///
    /// # Errors
    /// Those of binding the port.
    pub(super) fn common_port_of(&mut self, world: &mut World<'_>, device: u32) -> Result<u32, Errno> {
        if let Some(port) = self.datagrams.common_ports.get(&device) {
            return Ok(*port);
        }
        let ports = match self.speaks_roce() {
            true => Some(UDP_PORT..=UDP_PORT),
            false => self.config.native.port_range.clone(),
        };
        let ip = self.config.native.listen.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        let port = first_free(ports, |port| {
            world.device.open_port_of(device, SocketAddr::new(ip, port))
        })?;
        self.datagrams.common_ports.insert(device, port);
        Ok(port)
    }

    /// A request ID that no lookup has. Where processes share the port of RoCE v2, the reply is
    /// passed on to the one whose native port is in its upper half.
    ///
    /// # Errors
    /// Those of opening the device's channel adapter; `ENOBUFS` with too many lookups.
    fn free_request_id(&mut self, world: &mut World<'_>, handle: u32) -> Result<u32, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let prefix = match id.local {
            Some(local) if self.speaks_roce() => {
                let device = world.device.device_of(local)?;
                Some(world.device.channel_adapter(device)?.native_port)
            }
            _ => None,
        };
        if prefix.is_some() && self.datagrams.lookups.len() >= MAX_PREFIXED {
            return Err(Errno::NOBUFS);
        }
        loop {
            let random = self.random() as u32;
            let request_id = prefix.map_or(random, |port| u32::from(port) << 16 | random & 0xffff);
            if !self.datagrams.lookups.contains_key(&request_id) {
                return Ok(request_id);
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
            return self.connect_failed(world, handle, Cause::Silent(self.attempt_time(handle)));
        }
        let cause = Cause::Silent(self.attempt_time(handle));
        self.lookup_failed(world, handle, cause, EventParams::default());
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
    fn replied(
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
            let cause = Cause::ServiceRefused(reply.status.0);
            return self.lookup_failed(world, handle, cause, params);
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

impl Engine {
    /// Takes requests of peers from now on, at most `backlog` that the program has not taken.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state.
    pub(super) fn serve(&mut self, handle: u32, backlog: u32) -> Result<(), Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        if !matches!(id.state, State::Bound { .. }) || id.ports.is_empty() {
            return Err(Errno::INVAL);
        }
        tracing::debug!("id {handle}: listens for datagrams at {:?}", id.local);
        id.state = State::Serving(Service { backlog, unread: 0 });
        Ok(())
    }

    /// A message arrived at a UDP port of the connection manager.
    pub fn message_received(&mut self, world: &mut World<'_>, port: u32, arrival: Arrival, bytes: &[u8]) {
        let mad = match parse(bytes) {
            Ok(mad) => mad,
            Err(error) => return tracing::debug!("a message from {}: {error}", arrival.remote),
        };
        let is_datagram = matches!(mad.message, Message::Reply(_) | Message::Request(_));
        if is_datagram && self.has_both_wires() && self.adapters.opened.values().any(|it| it.port == port) {
            return tracing::debug!("{}: datagrams have ports of their own: {mad}", arrival.remote);
        }
        match mad.message {
            Message::Reply(reply) => self.replied(world, &arrival, mad.transaction_id, &reply),
            Message::Request(request) => {
                let inquiry = Inquiry {
                    port,
                    arrival,
                    transaction_id: mad.transaction_id,
                    request,
                    reply: None,
                };
                self.asked(world, inquiry);
            }
            _ => self.connection_message(world, (port, arrival), &mad),
        }
    }

    /// A request arrived.
    fn asked(&mut self, world: &mut World<'_>, inquiry: Inquiry) {
        let remote = inquiry.arrival.remote;
        if let Some(known) = self.datagrams.inquiries.get(&inquiry.key()) {
            // A repetition. Until the program answers, it has no effect.
            if let Some(State::Associated(Some(answered))) = self.ids.get(known).map(|id| &id.state)
                && answered.request == inquiry.request
                && let Some(reply) = answered.reply
            {
                self.send_reply(world, &inquiry, &reply);
            }
            return;
        }
        let asked = self.asked_id(&inquiry);
        let found = asked.and_then(|handle| Some((handle, self.ids.get_mut(&handle)?)));
        let unsupported = |engine: &mut Engine, world: &mut World<'_>| {
            tracing::debug!("{remote} asks for another service: {}", inquiry.request);
            engine.refuse(world, &inquiry, ServiceStatus::UNSUPPORTED);
        };
        let Some((handle, id)) = found else {
            return unsupported(self, world);
        };
        let datagrams = id.is_for_datagrams();
        let service = match (&mut id.state, id.stream_port) {
            (State::Serving(service), _) if datagrams => service,
            // Connections that come before the program listens wait.
            (State::Listening(_) | State::Bound { .. }, Some(port)) => {
                return self.name_port(world, &inquiry, port);
            }
            // The program will listen, perhaps; the request is repeated.
            (State::Bound { .. }, None) if datagrams => return,
            _ => return unsupported(self, world),
        };
        if service.unread >= service.backlog {
            return tracing::debug!("id {handle}: a request is dropped: too many wait");
        }
        let Some(addressing) = IpAddressing::parse(&inquiry.request.private_data) else {
            return self.refuse(world, &inquiry, ServiceStatus::REJECTED);
        };
        service.unread += 1;
        // The local address gets the scope of the remote address, if that has one.
        let mut local = with_port(remote, id.local.map_or(0, |local| local.port()));
        local.set_ip(inquiry.arrival.local);
        let child = Id {
            local: Some(local),
            remote: Some(with_port(remote, addressing.source_port)),
            traffic_class: id.traffic_class,
            ..Id::new(id.channel, id.port_space)
        };
        self.report_inquiry(world, handle, child, inquiry);
    }

    /// Makes a new id and an event of the listener from a request.
    fn report_inquiry(&mut self, world: &mut World<'_>, listener: u32, child: Id, inquiry: Inquiry) {
        let (local, remote) = (child.local, child.remote);
        let Ok(handle) = self.insert_id(child) else {
            if let Some(State::Serving(service)) = self.ids.get_mut(&listener).map(|id| &mut id.state) {
                service.unread -= 1;
            }
            return;
        };
        tracing::debug!("id {handle}: {remote:?} asks {local:?}: {}", inquiry.request);
        let data = inquiry.request.private_data.get(IP_ADDRESSING_LEN..);
        let private_data = data.unwrap_or_default().to_vec();
        self.datagrams.inquiries.insert(inquiry.key(), handle);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Asked(Box::new(inquiry));
        }
        let params = EventParams {
            private_data,
            ..EventParams::default()
        };
        self.queue_request(world, listener, handle, params);
    }

    /// Names the program's queue pair to the peer.
    ///
    /// # Errors
    /// `EINVAL` with too much private data; `ENODEV` for an id of IPoIB, which has no Q_Key without
    /// a network of InfiniBand; the errors of sending.
    pub(super) fn answer_inquiry(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        uid: u64,
        parameters: &Parameters,
    ) -> Result<(), Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        if id.port_space == PS_IPOIB {
            return Err(Errno::NODEV);
        }
        if parameters.private_data.len() > REPLY_PRIVATE_DATA {
            return Err(Errno::INVAL);
        }
        (id.uid, id.qkey) = (uid, UDP_QKEY);
        self.reply(world, handle, ServiceStatus::VALID, parameters)
    }

    /// Refuses a request, with the program's private data.
    ///
    /// # Errors
    /// `EINVAL` with too much private data; the errors of sending.
    pub(super) fn reject_inquiry(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        if private_data.len() > REPLY_PRIVATE_DATA {
            return Err(Errno::INVAL);
        }
        let parameters = Parameters {
            private_data: private_data.to_vec(),
            ..Parameters::default()
        };
        self.reply(world, handle, ServiceStatus::REJECTED, &parameters)
    }

    fn reply(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        status: ServiceStatus,
        parameters: &Parameters,
    ) -> Result<(), Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        let State::Asked(inquiry) = &mut id.state else {
            return Err(Errno::INVAL);
        };
        let bytes = reply_to(
            inquiry,
            status,
            (parameters.qpn, UDP_QKEY),
            &parameters.private_data,
        );
        inquiry.reply = Some(bytes);
        let State::Asked(inquiry) = std::mem::replace(&mut id.state, State::Over) else {
            return Err(Errno::INVAL);
        };
        self.send_reply(world, &inquiry, &bytes);
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Associated(Some(inquiry));
        }
        Ok(())
    }

    /// Refuses a request that no id of the program answers.
    pub(super) fn refuse(&mut self, world: &mut World<'_>, inquiry: &Inquiry, status: ServiceStatus) {
        let bytes = reply_to(inquiry, status, (0, 0), &[]);
        self.send_reply(world, inquiry, &bytes);
    }

    /// Names the TCP port of a listener for connections, in place of a queue pair.
    fn name_port(&mut self, world: &mut World<'_>, inquiry: &Inquiry, port: u16) {
        let Arrival { local, remote } = inquiry.arrival;
        tracing::debug!("{remote} asks {local}: {}: TCP port {port}", inquiry.request);
        let private_data = &inquiry.request.private_data;
        self.datagrams.announced.add(world.now, remote.ip(), private_data);
        let bytes = reply_to(inquiry, ServiceStatus::VALID, (port.into(), 0), &SPARE_READ);
        self.send_reply(world, inquiry, &bytes);
    }

    /// Sends a reply, from the port that was asked if it is still open. The request is repeated if
    /// the reply is lost.
    fn send_reply(&mut self, world: &mut World<'_>, inquiry: &Inquiry, bytes: &[u8; MAD_LEN]) {
        let Arrival { local, remote } = inquiry.arrival;
        let datagrams = &self.datagrams;
        let is_open = datagrams.common_ports.values().any(|port| *port == inquiry.port)
            || datagrams.firsts.contains_key(&inquiry.port);
        let port = match is_open {
            true => Ok(inquiry.port),
            false => self.common_port(world, SocketAddr::new(local, 0)),
        };
        let sent = port.and_then(|port| world.device.send_message(port, local, remote, 0, bytes));
        if let Err(errno) = sent {
            tracing::debug!("a reply to {remote} was not sent: {errno}");
        }
    }
}

/// The reply to a request, with a queue pair and its Q_Key if the status is valid.
fn reply_to(
    inquiry: &Inquiry,
    status: ServiceStatus,
    (qpn, qkey): (u32, u32),
    given: &[u8],
) -> [u8; MAD_LEN] {
    let ServiceRequest {
        request_id,
        service_id,
        ..
    } = inquiry.request;
    let valid = status == ServiceStatus::VALID;
    let mut private_data = [0; REPLY_PRIVATE_DATA];
    if let Some(to) = private_data.get_mut(..given.len()) {
        to.copy_from_slice(given);
    }
    let mad = Mad {
        transaction_id: inquiry.transaction_id,
        message: Message::Reply(ServiceReply {
            request_id,
            status,
            qpn: if valid { qpn } else { 0 },
            service_id,
            qkey: if valid { qkey } else { 0 },
            private_data,
        }),
    };
    let mut bytes = [0; MAD_LEN];
    mad.emit(&mut bytes);
    bytes
}

/// The number of the queue pair in datagrams to a group.
const MULTICAST_QPN: u32 = 0xff_ffff;

impl Engine {
    /// Joins a multicast group; an event has the parameters of datagrams to the group. Returns the
    /// number of the membership.
    ///
    /// # Errors
    /// `EINVAL` for an id of another port space, without a device or in the wrong state, and for an
    /// address that is zero or no address of IP; `EOPNOTSUPP` with an RNIC.
    pub fn join(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        uid: u64,
        group: CmAddress,
    ) -> Result<u32, Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        let local = id.local.filter(|local| !local.ip().is_unspecified());
        if !is_roce {
            return Err(Errno::OPNOTSUPP);
        }
        let local = local.ok_or(Errno::INVAL)?;
        let group = match group {
            CmAddress::Ip(group) if !group.ip().is_unspecified() => group,
            _ => return Err(Errno::INVAL),
        };
        let is_bound = matches!(id.state, State::Bound { .. } | State::AddressResolved);
        if !is_bound || !PS_DATAGRAMS.contains(&id.port_space) {
            return Err(Errno::INVAL);
        }
        id.qkey = UDP_QKEY;
        let number = self.free_membership();
        let membership = Membership {
            id: handle,
            uid,
            reported: 0,
        };
        self.datagrams.memberships.insert(number, membership);
        tracing::debug!("id {handle}: joins {}", group.ip());
        let event = joined(world, (handle, number), local, group);
        self.queue(world, event);
        Ok(number)
    }

    fn free_membership(&mut self) -> u32 {
        loop {
            let number = self.datagrams.next_membership;
            self.datagrams.next_membership = number.wrapping_add(1);
            if !self.datagrams.memberships.contains_key(&number) {
                return number;
            }
        }
    }

    /// Leaves a group. Events of the membership that the program has not taken are discarded.
    /// Returns the number of those that it took.
    ///
    /// # Errors
    /// `ENOENT` for a membership that does not exist, `EINVAL` for one of another channel.
    pub fn leave(&mut self, world: &mut World<'_>, channel: u64, number: u32) -> Result<u32, Errno> {
        let membership = self.datagrams.memberships.get(&number).ok_or(Errno::NOENT)?;
        let (handle, reported) = (membership.id, membership.reported);
        self.own(channel, handle)?;
        self.datagrams.memberships.remove(&number);
        if let Some(queue) = self.channels.get_mut(&channel) {
            let had = !queue.is_empty();
            queue.retain(|event| event.membership != Some(number));
            if had && queue.is_empty() {
                world.device.signal(channel, false);
            }
        }
        Ok(reported)
    }
}

/// The event that an id has joined a group.
fn joined(
    world: &mut World<'_>,
    (handle, number): (u32, u32),
    local: SocketAddr,
    group: SocketAddr,
) -> Event {
    let vector = address_vector(world, local, group.ip(), 0);
    Event {
        id: handle,
        about: number,
        kind: CmEvent::MulticastJoin,
        status: 0,
        params: EventParams {
            datagrams: Some(DatagramParam::new(MULTICAST_QPN, UDP_QKEY, vector)),
            ..EventParams::default()
        },
        membership: Some(number),
    }
}
