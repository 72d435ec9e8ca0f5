//! The connections of `wire=roce`: the messages of RoCE's connection manager, and what programs are
//! told of them.
//!
//! Each device has [`Connections`] of its own, because what they need belongs to the device: the
//! GUID and path MTU in messages, the process's numbers there, and queue pair 1, at which the
//! messages arrive.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use urnic_config::Wire;
use urnic_wire::mad::{MAD_LEN, Mad, Message as MadMessage, RejectReason};
use urnic_wire::roce::UDP_PORT;

use super::adapters::{Adapter, Adapters};
use super::failures::Cause;
use super::messages::Message;
use super::{Arrival, ByMessages, CmEvent, Engine, EventParams, Id, Key, RoceParams, Service, State, World};
use crate::ib_cm::{Accepted, Admission, Connections, Event, Output, Requested, Route, Settings};

/// The id that listens for a service, at an address.
fn listener(adapters: &Adapters, ids: &HashMap<u32, Id>, service: u64, at: IpAddr) -> Option<u32> {
    let mut listeners = adapters.listeners.get(&service)?.iter();
    let has_it = |handle: &&u32| ids.get(handle).is_some_and(|id| id.has_service(service, at));
    listeners.find(has_it).copied()
}

/// The IPv6 scope of an address.
fn scope_of(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V6(address) => address.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

/// An address in an IPv6 scope.
fn with_scope(ip: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, scope).into(),
        ip => SocketAddr::new(ip, port),
    }
}

/// The addresses of both ends. Linux has all addresses of 127.0.0.0/8, and the device perhaps one.
pub(super) fn route(local: IpAddr, remote: IpAddr) -> Route {
    let of_device = |ip: IpAddr| match ip.to_canonical() {
        IpAddr::V4(ip) if ip.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        ip => ip,
    };
    Route::new(of_device(local), of_device(remote))
}

impl Engine {
    /// Whether the option is RoCE v2. Services of datagrams have its port then, and listeners take
    /// no streams.
    pub(super) fn speaks_roce(&self) -> bool {
        self.identity.is_roce() && self.config.wire == Wire::Roce
    }

    /// Whether a peer's connections are made by the messages of RoCE's connection manager, for
    /// queue pairs that speak RoCE v2.
    pub(super) fn speaks_roce_to(&self, peer: SocketAddr) -> bool {
        self.config.speaks_roce_to(peer.ip().to_canonical())
    }

    /// Whether listeners of streams take the requests of peers that speak RoCE v2, too.
    pub(super) fn has_both_wires(&self) -> bool {
        !self.speaks_roce() && self.config.speaks_roce_to_some()
    }

    /// Opens the queue pair 1 of a device, with its connections, unless it is open.
    ///
    /// # Errors
    /// Those of opening it.
    pub(super) fn open_adapter(&mut self, world: &mut World<'_>, device: u32) -> Result<(), Errno> {
        if self.adapters.opened.contains_key(&device) {
            return Ok(());
        }
        let adapter = world.device.channel_adapter(device)?;
        let port = match self.speaks_roce() {
            true => self.common_port_of(world, device)?,
            false => {
                let ip = self.config.native.listen.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
                (world.device).open_port_of(device, SocketAddr::new(ip, UDP_PORT))?
            }
        };
        let settings = Settings {
            ca_guid: adapter.guid,
            number_prefix: Some(adapter.native_port),
            path_mtu: adapter.path_mtu,
            ..Settings::default()
        };
        let mut seeds = crate::random::Random::new(self.random());
        let adapter = Adapter {
            port,
            connections: Connections::new(settings, Box::new(move || seeds.next())),
            ids: HashMap::new(),
        };
        tracing::debug!("device {device}: connections by the messages of RoCE, port {port}");
        self.adapters.opened.insert(device, adapter);
        Ok(())
    }

    /// Takes requests of peers from now on, at most `backlog` that the program has not taken.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state; those of [`check_port`](Self::check_port) and of opening queue
    /// pair 1 of the devices.
    pub(super) fn listen_for_connections(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        backlog: u32,
    ) -> Result<(), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (Some(local), State::Bound { .. }) = (id.local, &id.state) else {
            return Err(Errno::INVAL);
        };
        if id.reuse {
            self.check_port(handle, local, false)?;
        }
        self.take_requests(world, handle)?;
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Serving(Service { backlog, unread: 0 });
        }
        Ok(())
    }

    /// Has the messages of peers find an id that listens.
    ///
    /// # Errors
    /// Those of opening queue pair 1 of the devices.
    pub(super) fn take_requests(&mut self, world: &mut World<'_>, handle: u32) -> Result<(), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let local = id.local.ok_or(Errno::INVAL)?;
        let service = id.service(local.port());
        for port in id.ports.clone() {
            let device = world.device.device_of_port(port);
            let opened = self.open_adapter(world, device);
            opened.inspect_err(|errno| self.log_no_adapter(world.now, ("rdma_listen", local), *errno))?;
        }
        tracing::debug!("id {handle}: listens at {local}, service {service:#x}");
        self.adapters.listeners.entry(service).or_default().push(handle);
        Ok(())
    }

    /// A message about a connection arrived at a port of the connection manager.
    pub(super) fn connection_message(
        &mut self,
        world: &mut World<'_>,
        (port, arrival): (u32, Arrival),
        mad: &Mad,
    ) {
        let speaks_roce = self.speaks_roce_to(arrival.remote);
        let Engine {
            adapters,
            ids,
            datagrams,
            lines,
            ..
        } = self;
        let mut opened = adapters
            .opened
            .iter()
            .map(|(device, adapter)| (*device, adapter.port));
        let Some((device, _)) = opened.find(|(_, own)| *own == port) else {
            return tracing::debug!("a message from {} about a connection: {mad}", arrival.remote);
        };
        let Some(mut adapter) = adapters.opened.remove(&device) else {
            return;
        };
        let admit = &mut |route: &Route, service| match listener(adapters, ids, service, route.local) {
            Some(_) if !speaks_roce => {
                if lines.may_log(world.now) {
                    tracing::warn!(
                        "{route}: a request is refused: the wire to this peer is iWARP; [[peer]] wire=roce \
                         changes that"
                    );
                }
                Admission::NoListener
            }
            // The program will listen, perhaps; the request is repeated.
            None if datagrams.places.values().any(|place| {
                let mut holders = place.holders.iter().filter_map(|handle| ids.get(handle));
                holders
                    .any(|id| matches!(id.state, State::Bound { .. }) && id.has_service(service, route.local))
            }) =>
            {
                Admission::Full
            }
            None => Admission::NoListener,
            Some(handle) => match ids.get(&handle).map(|id| &id.state) {
                Some(State::Serving(service)) if service.unread < service.backlog => Admission::Shown,
                Some(State::Listening(here)) if here.unread < here.backlog => Admission::Shown,
                _ => Admission::Full,
            },
        };
        let route = route(arrival.local, arrival.remote.ip());
        tracing::debug!("{route}: arrived: {mad}");
        adapter
            .connections
            .receive(world.now, route, mad, &mut |route, request| {
                admit(route, request.service_id)
            });
        adapters.opened.insert(device, adapter);
        self.carry_out_towards(world, device, Some(arrival.remote));
    }

    /// The time has come to repeat messages of a device's connections, or to give up.
    pub(super) fn adapter_due(&mut self, world: &mut World<'_>, device: u32) {
        if let Some(adapter) = self.adapters.opened.get_mut(&device) {
            adapter.connections.expire(world.now);
        }
        self.carry_out(world, device);
    }

    /// Sends the messages, and tells the events, that connections of a device have caused.
    pub(super) fn carry_out(&mut self, world: &mut World<'_>, device: u32) {
        self.carry_out_towards(world, device, None);
    }

    /// As [`carry_out`](Self::carry_out), after a peer's message, or a call about a connection with
    /// this peer: messages that belong to no id, such as a REJ of a REQ, go to its IPv6 scope.
    pub(super) fn carry_out_towards(
        &mut self,
        world: &mut World<'_>,
        device: u32,
        remote: Option<SocketAddr>,
    ) {
        let scope = remote.map_or(0, scope_of);
        while let Some(adapter) = self.adapters.opened.get_mut(&device)
            && let Some(output) = adapter.connections.next_output()
        {
            match output {
                Output::Send(route, mad) => self.send_mad(world, (device, scope), route, &mad),
                Output::Event(number, Event::Requested(requested)) => {
                    self.requested_by_message(world, (device, number), scope, *requested);
                }
                Output::Event(number, event) => self.connection_event(world, (device, number), event),
            }
        }
        if let Some(adapter) = self.adapters.opened.get(&device) {
            self.timers
                .set(Key::Adapter(device), adapter.connections.deadline());
        }
    }

    fn send_mad(&mut self, world: &mut World<'_>, (device, scope): (u32, u32), route: Route, mad: &Mad) {
        let Some(adapter) = self.adapters.opened.get_mut(&device) else {
            return;
        };
        let number = match &mad.message {
            MadMessage::Connect(request) => request.local_comm_id,
            message => message.ids().map_or(0, |ids| ids.local),
        };
        let id = adapter.ids.get(&number).and_then(|handle| self.ids.get(handle));
        let traffic_class = id.map_or(0, |id| id.traffic_class);
        let scope = id.and_then(|id| id.remote).map_or(scope, scope_of);
        let remote = with_scope(route.remote, UDP_PORT, scope);
        let mut bytes = [0; MAD_LEN];
        mad.emit(&mut bytes);
        let sent = (world.device).send_message(adapter.port, route.local, remote, traffic_class, &bytes);
        // What awaits an answer is repeated.
        if let Err(errno) = sent {
            tracing::debug!("{route}: a message was not sent: {errno}: {mad}");
        }
    }

    /// Ends a connection, which has no further event.
    pub(super) fn release(&mut self, world: &mut World<'_>, handle: u32, of: ByMessages) {
        if let Some(adapter) = self.adapters.opened.get_mut(&of.device) {
            adapter.connections.release(world.now, of.number);
            let remote = self.ids.get(&handle).and_then(|id| id.remote);
            self.carry_out_towards(world, of.device, remote);
        }
        self.forget(handle, of);
    }

    /// Takes no events of an id's connection any more.
    fn forget(&mut self, handle: u32, of: ByMessages) {
        // The program may have reset the queue pair, and connected it by another id.
        if let Some(qid) = of.qid
            && self.queue_pairs.get(&qid) == Some(&handle)
        {
            self.queue_pairs.remove(&qid);
        }
        if let Some(adapter) = self.adapters.opened.get_mut(&of.device) {
            adapter.ids.remove(&of.number);
        }
    }

    /// The process ends, and with it the connections of the devices whose numbers are its by
    /// `is_its`: each peer gets a message, once.
    pub fn end(&mut self, world: &mut World<'_>, is_its: impl Fn(u32) -> bool) {
        let ending = self.adapters.opened.keys().copied();
        for device in ending.filter(|device| is_its(*device)).collect::<Vec<u32>>() {
            if let Some(adapter) = self.adapters.opened.get_mut(&device) {
                for number in std::mem::take(&mut adapter.ids).into_keys() {
                    adapter.connections.release(world.now, number);
                }
            }
            self.carry_out(world, device);
        }
    }

    /// A device is lost, and its connections with it.
    pub(super) fn adapters_lost(&mut self, world: &mut World<'_>, is_its: impl Fn(u32) -> bool) {
        let lost = self
            .adapters
            .opened
            .keys()
            .copied()
            .filter(|device| is_its(*device));
        for device in lost.collect::<Vec<u32>>() {
            self.timers.set(Key::Adapter(device), None);
            let Some(adapter) = self.adapters.opened.remove(&device) else {
                continue;
            };
            for (number, handle) in adapter.ids {
                match adapter.connections.state(number) {
                    Some(state) if is_attempt(state) => {
                        self.attempt_over(world, handle, Cause::DeviceLost, Vec::new());
                    }
                    Some(crate::ib_cm::State::TimeWait) => {
                        self.by_messages_over(world, handle);
                        self.begin_time_wait(world, handle);
                    }
                    Some(_) => self.by_messages_ended(world, handle),
                    None => {}
                }
            }
        }
    }

    /// An established connection has ended with its queue pair or its device.
    fn by_messages_ended(&mut self, world: &mut World<'_>, handle: u32) {
        if self.by_messages_over(world, handle) {
            self.disconnected(world, handle);
        }
    }

    /// The id has no connection any more. Returns whether it had one.
    fn by_messages_over(&mut self, world: &mut World<'_>, handle: u32) -> bool {
        let Some(id) = self.ids.get_mut(&handle) else {
            return false;
        };
        let State::ByMessages(of) = id.state else {
            return false;
        };
        id.state = State::Over;
        self.release(world, handle, of);
        true
    }

    /// The queue pair of a connection failed, or was destroyed or reset: its peer gets a DREQ, in
    /// case it exists.
    pub(super) fn queue_pair_lost(&mut self, world: &mut World<'_>, handle: u32) {
        let state = match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::ByMessages(of)) => self.adapters.state(*of),
            _ => return,
        };
        if state == Some(crate::ib_cm::State::Established) {
            self.by_messages_ended(world, handle);
        }
    }
}

impl Engine {
    /// Whether a connection has ended, or is ending.
    pub(super) fn is_over(&self, of: ByMessages) -> bool {
        use crate::ib_cm::State as Cm;
        matches!(self.adapters.state(of), None | Some(Cm::DreqSent | Cm::TimeWait))
    }
}

/// Whether a connection in this state is not established yet.
fn is_attempt(state: crate::ib_cm::State) -> bool {
    use crate::ib_cm::State as Cm;
    matches!(state, Cm::ReqSent | Cm::ReqRcvd | Cm::RepSent | Cm::RepRcvd)
}

impl Engine {
    /// Something happened to a connection that an id has.
    fn connection_event(&mut self, world: &mut World<'_>, (device, number): (u32, u32), event: Event) {
        let adapter = self.adapters.opened.get(&device);
        let Some(handle) = adapter.and_then(|adapter| adapter.ids.get(&number).copied()) else {
            return;
        };
        match event {
            // It has no id yet.
            Event::Requested(_) => {}
            Event::Accepted(accepted) => {
                self.report(
                    world,
                    handle,
                    CmEvent::ConnectResponse,
                    0,
                    params_of_reply(*accepted),
                );
            }
            // As a kernel, which passes on no private data of an RTU.
            Event::Established(_) => self.report_plain(world, handle, CmEvent::Established),
            Event::Rejected { reason, private_data } => {
                self.attempt_over(world, handle, Cause::RejectedBy(reason.0), private_data);
            }
            Event::Unreachable => {
                self.attempt_over(world, handle, Cause::Unanswered, Vec::new());
            }
            Event::Disconnected { timed_out: false } => {
                self.report_plain(world, handle, CmEvent::Disconnected);
            }
            Event::Disconnected { timed_out: true } => {
                self.report_failure(world, handle, CmEvent::Disconnected, Errno::TIMEDOUT);
            }
            Event::TimeWaitExit => self.report_plain(world, handle, CmEvent::TimewaitExit),
        }
        self.forget_if_over(handle);
    }

    /// Forgets the connection of an id if its number is free.
    fn forget_if_over(&mut self, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let State::ByMessages(of) = id.state
            && self.adapters.state(of).is_none()
        {
            id.state = State::Over;
            self.forget(handle, of);
        }
    }

    /// Makes a new id and an event of the listener from a peer's request.
    fn requested_by_message(
        &mut self,
        world: &mut World<'_>,
        (device, number): (u32, u32),
        scope: u32,
        requested: Requested,
    ) {
        let Requested {
            route, service_id, ..
        } = requested;
        let listener = listener(&self.adapters, &self.ids, service_id, route.local);
        let child = listener.and_then(|listener| {
            let id = self.ids.get(&listener)?;
            let local = SocketAddr::new(route.local, id.local?.port());
            let remote = with_scope(route.remote, requested.addressing.source_port, scope);
            let by = ByMessages {
                device,
                number,
                qid: None,
                active: false,
            };
            let child = Id {
                local: Some(local),
                remote: Some(remote),
                ack_timeout: id.ack_timeout,
                traffic_class: match id.traffic_class {
                    0 => requested.traffic_class,
                    own => own,
                },
                state: State::ByMessages(by),
                ..Id::new(id.channel, id.port_space)
            };
            Some((listener, self.insert_id(child).ok()?))
        });
        let Some((listener, handle)) = child else {
            // The program has as many ids as it can have.
            if let Some(adapter) = self.adapters.opened.get_mut(&device) {
                adapter.connections.release(world.now, number);
            }
            return;
        };
        if let Some(adapter) = self.adapters.opened.get_mut(&device) {
            adapter.ids.insert(number, handle);
        }
        match self.ids.get_mut(&listener).map(|id| &mut id.state) {
            Some(State::Serving(service)) => service.unread += 1,
            Some(State::Listening(here)) => here.unread += 1,
            _ => {}
        }
        tracing::debug!("id {handle}: {route}: requests a connection, number {number:#010x}");
        self.queue_request(world, listener, handle, params_of_request(requested));
    }

    /// An attempt, or an acceptance, has failed: one line says why, and the program gets the event.
    pub(super) fn attempt_over(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        cause: Cause,
        mut private_data: Vec<u8>,
    ) {
        let (kind, status) = match cause {
            Cause::RejectedBy(reason) => (CmEvent::Rejected, reason.into()),
            Cause::Unanswered => (CmEvent::Unreachable, -Errno::TIMEDOUT.raw_os_error()),
            cause => (CmEvent::ConnectError, -cause.errno().raw_os_error()),
        };
        // A program's refusal is no failure: the other program has got it as an answer.
        if cause != Cause::RejectedBy(RejectReason::CONSUMER.0) {
            self.log_attempt(world.now, handle, cause, (kind, status));
        }
        if kind == CmEvent::Rejected {
            Message::Reject.pad(&mut private_data);
        }
        let params = EventParams {
            private_data,
            ..EventParams::default()
        };
        self.report(world, handle, kind, status, params);
        // As a kernel, which reports the end of TimeWait after DISCONNECTED only.
        self.by_messages_over(world, handle);
    }
}

/// The parameters of a peer's request, as its event has them.
fn params_of_request(requested: Requested) -> EventParams {
    EventParams {
        private_data: requested.private_data,
        responder_resources: requested.responder_resources,
        initiator_depth: requested.initiator_depth,
        of_roce: Some(RoceParams {
            qpn: requested.remote_qpn,
            flow_control: requested.flow_control,
            retry_count: requested.retry_count,
            rnr_retry_count: requested.rnr_retry_count,
            srq: requested.srq,
        }),
        ..EventParams::default()
    }
}

/// The parameters of a peer's acceptance.
fn params_of_reply(accepted: Accepted) -> EventParams {
    EventParams {
        private_data: accepted.private_data,
        responder_resources: accepted.responder_resources,
        initiator_depth: accepted.initiator_depth,
        of_roce: Some(RoceParams {
            qpn: accepted.remote_qpn,
            flow_control: accepted.flow_control,
            retry_count: 0,
            rnr_retry_count: accepted.rnr_retry_count,
            srq: accepted.srq,
        }),
        ..EventParams::default()
    }
}
