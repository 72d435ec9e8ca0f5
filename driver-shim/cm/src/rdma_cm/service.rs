//! The passive side of ids for datagrams: requests of peers for a queue pair.

use std::net::SocketAddr;

use rustix::io::Errno;
use urnic_wire::mad::{
    IP_ADDRESSING_LEN, IpAddressing, MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, ServiceReply, ServiceRequest,
    ServiceStatus, parse,
};

use super::addresses::with_port;
use super::command::Parameters;
use super::datagram_state::{Arrival, Inquiry, Service, UDP_QKEY};
use super::state::{Engine, EventParams, Id, PS_IPOIB, State, World};

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
        let service = match (&mut id.state, id.stream_port) {
            (State::Serving(service), _) => service,
            // Connections that come before the program listens wait.
            (State::Listening(_) | State::Bound { .. }, Some(port)) => {
                return self.name_port(world, &inquiry, port);
            }
            // The program will listen, perhaps; the request is repeated.
            (State::Bound { .. }, None) => return,
            _ => return unsupported(self, world),
        };
        if service.unread >= service.backlog {
            return tracing::debug!("id {handle}: a request is dropped: too many wait");
        }
        let Some(addressing) = IpAddressing::parse(&inquiry.request.private_data) else {
            return self.refuse(world, &inquiry, ServiceStatus::REJECTED);
        };
        service.unread += 1;
        // With the scope of the remote address, if it has one.
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
        let bytes = reply_to(inquiry, ServiceStatus::VALID, (port.into(), 0), &[]);
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
