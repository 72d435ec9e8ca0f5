//! The initiator (the active side): the TCP port of the listener, connecting, and the Reply.
//!
//! A listener whose port is not that of TCP has the UDP port of its number, and names its TCP port
//! there. Others have the TCP port of their number.

use rustix::io::Errno;
use urnic_wire::mad::{ServiceReply, ServiceStatus};

use super::addresses::with_port;
use super::command::Parameters;
use super::failures::Cause;
use super::messages::{Message, REJECTED_BY_PROGRAM};
use super::spare_reads::{SPARE_READ, has_spare_read};
use super::{
    Answered, CmEvent, ConnPolicy, Connecting, Engine, EventParams, Key, Location, Notice, Owner, PS_IB,
    PS_TCP, SCTP_TIME, State, World,
};
use crate::carrier::Inbox;
use crate::mpa_startup::{Accepted, Answer, Close, Offer, Rejected, Time, terminate};
use crate::startup::{Failure, Initiator};
use urnic_config::Llp;

impl Connecting {
    /// When the stream must be connected, or another step is due.
    fn next_step(&self, now: Time) -> Time {
        match (self.llp, self.location) {
            (Llp::Sctp, Location::Unknown) => self.deadline.min(now + SCTP_TIME),
            _ => self.deadline,
        }
    }
}

impl Engine {
    /// Connects. An event reports the result.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state or without a queue pair, `EOPNOTSUPP` for datagrams
    /// of an RNIC, and the
    /// errors of connecting that are detected immediately.
    pub fn connect(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        parameters: Parameters,
    ) -> Result<(), Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        if id.is_for_datagrams() && is_roce {
            return self.look_up(world, handle, &parameters);
        }
        if ![PS_TCP, PS_IB].contains(&id.port_space) {
            return Err(Errno::OPNOTSUPP);
        }
        if !matches!(id.state, State::RouteResolved) {
            return Err(Errno::INVAL);
        }
        Message::Request.check(self.identity, &parameters.private_data)?;
        let remote = self.own(channel, handle)?.remote.ok_or(Errno::INVAL)?;
        if self.speaks_roce_to(remote) {
            return self.connect_by_messages(world, handle, &parameters);
        }
        let id = self.own(channel, handle)?;
        let local = id.local;
        let ConnPolicy {
            settings,
            own_ports,
            llp,
            ..
        } = self.policy(remote.ip());
        if !self.identity.is_roce() {
            self.queue_pair_for(world, local, parameters.qpn)?;
        }
        // The stream of a queue pair of kind UC is that of TCP.
        let qid = local.and_then(|local| world.device.queue_pair(local, parameters.qpn));
        let unreliable = qid.is_some_and(|qid| world.device.is_unreliable(qid));
        let llp = if unreliable { Llp::Tcp } else { llp };
        let connecting = Connecting {
            sid: 0,
            llp,
            parameters,
            port: remote.port(),
            location: Location::Unknown,
            other_port: false,
            // Peer-to-peer mode and the RTR frame both allow the responder to send first, and
            // exclude each other (conformance S001-08). Over SCTP there is no such frame.
            enhanced: settings.revision >= 2 && (llp == Llp::Sctp || settings.rtr_frame.is_none()),
            initiator: None,
            deadline: world.now + settings.initiator_timeout,
        };
        let connecting = Box::new(connecting);
        let connecting = match own_ports {
            true => self.locate(world, handle, connecting),
            false => Err(connecting),
        };
        match connecting {
            Ok(()) => Ok(()),
            Err(connecting) => {
                let started = self.start_connecting(world, handle, connecting);
                started
                    .inspect_err(|errno| self.log_refused(world.now, ("rdma_connect", false), remote, *errno))
            }
        }
    }

    /// Begins to connect a stream.
    fn start_connecting(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        mut connecting: Box<Connecting>,
    ) -> Result<(), Errno> {
        self.release_shared_port(world, handle);
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        let (Some(local), Some(remote)) = (id.local, id.remote) else {
            return Err(Errno::INVAL);
        };
        let remote = with_port(remote, connecting.port);
        // This line is logged before the first frame is sent, so that it precedes the lines of the
        // peer.
        tracing::debug!(
            "id {handle}: connects to {remote} from {local} over {}",
            connecting.llp.name()
        );
        let (llp, traffic_class) = (connecting.llp, id.traffic_class);
        // Ids whose programs chose no port share an SCTP association, and so its port, unless the
        // listener is to recognise the announced one.
        let shares = llp == Llp::Sctp && id.picked && !id.spare_read;
        let own = (!shares).then(|| world.device.connect(llp, remote, local, traffic_class));
        let may_change = id.picked || !id.ports.is_empty();
        let is_taken = |started: &Result<u32, Errno>| {
            may_change && matches!(started, Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL))
        };
        let started = match own.filter(|started| !is_taken(started)) {
            Some(started) => started,
            // Another process has the port that the engine picked, or the TCP port of this number:
            // pick another one.
            None => {
                connecting.other_port = true;
                // The listener does not recognise the initiator that announced its own one.
                id.spare_read = false;
                world
                    .device
                    .connect(llp, remote, with_port(local, 0), traffic_class)
            }
        };
        connecting.sid = started?;
        tracing::debug!("id {handle}: connects over stream {}", connecting.sid);
        self.streams.insert(connecting.sid, Owner::Id(handle));
        self.timers
            .set(Key::Id(handle), Some(connecting.next_step(world.now)));
        id.state = State::Connecting(connecting);
        Ok(())
    }

    /// A stream connected, or failed to connect.
    pub(super) fn stream_connected(&mut self, world: &mut World<'_>, sid: u32, result: Result<(), Errno>) {
        let Some(Owner::Id(handle)) = self.streams.get(&sid) else {
            return;
        };
        let handle = *handle;
        if let Err(errno) = result {
            // The device has removed the stream.
            self.streams.remove(&sid);
            return match errno {
                Errno::CONNREFUSED => self.connect_refused(world, handle),
                _ => self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown)),
            };
        }
        let Some(remote) = self.ids.get(&handle).and_then(|id| id.remote) else {
            return;
        };
        let (policy, max_ird) = (self.policy(remote.ip()), self.max_ird);
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let State::Connecting(connecting) = &mut id.state else {
            return;
        };
        if connecting.other_port
            && id.ports.is_empty()
            && let Ok((local, _)) = world.device.ends(sid)
        {
            id.local = Some(local);
        }
        let parameters = &connecting.parameters;
        let offer = connecting.enhanced.then(|| Offer {
            peer_to_peer: policy.peer_to_peer,
            depths: policy.depths(parameters, id.spare_read),
            max_ird: max_ird.into(),
        });
        let private_data = &parameters.private_data;
        self.timers.set(Key::Id(handle), Some(connecting.deadline));
        let begun = Initiator::new(connecting.llp, policy.settings, offer, private_data, world.now)
            .map_err(|_| Errno::INVAL)
            .and_then(|(initiator, request)| {
                world.device.send(sid, &request)?;
                world.device.receive(sid, initiator.bytes_needed())?;
                Ok(initiator)
            });
        match begun {
            Ok(initiator) => connecting.initiator = Some(Box::new(initiator)),
            Err(errno) => self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown)),
        }
    }

    /// Takes bytes of the Reply.
    pub(super) fn reply_received(&mut self, world: &mut World<'_>, handle: u32, bytes: Result<&[u8], Errno>) {
        let Some(State::Connecting(connecting)) = self.ids.get_mut(&handle).map(|id| &mut id.state) else {
            return;
        };
        let (sid, Some(initiator)) = (connecting.sid, &mut connecting.initiator) else {
            return;
        };
        match initiator.take(bytes) {
            Ok(None) => {
                let bytes_needed = initiator.bytes_needed();
                if let Err(errno) = world.device.receive(sid, bytes_needed) {
                    self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown));
                }
            }
            Ok(Some(Answer::Accepted(accepted))) => self.accepted(world, handle, accepted),
            Ok(Some(Answer::Rejected(Rejected { word, private_data }))) => {
                let params = self.event_params(Message::Reject, word, private_data);
                self.timers.set(Key::Id(handle), None);
                self.close_stream(world, sid, Close::Orderly);
                if let Some(id) = self.ids.get_mut(&handle) {
                    id.state = State::Over;
                }
                self.rejected(world, handle, params);
            }
            Err(failure) => self.reply_failed(world, handle, failure),
        }
    }

    /// Reports that the peer's program rejected the Request.
    fn rejected(&mut self, world: &mut World<'_>, handle: u32, params: EventParams) {
        let (status, params) = match self.identity.is_roce() {
            // A REJ has no depths.
            true => (
                REJECTED_BY_PROGRAM,
                EventParams {
                    private_data: params.private_data,
                    ..EventParams::default()
                },
            ),
            false => (-Errno::CONNREFUSED.raw_os_error(), params),
        };
        self.report(world, handle, CmEvent::Rejected, status, params);
    }

    /// Handles a start-up without a usable Reply. The peer may support only revision 1 (RFC 6581
    /// §10).
    fn reply_failed(&mut self, world: &mut World<'_>, handle: u32, failure: Failure) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let State::Connecting(connecting) = &id.state else {
            return;
        };
        let (sid, again) = (connecting.sid, connecting.enhanced && failure.fall_back);
        if !again {
            let cause = match &connecting.initiator {
                Some(initiator) if failure.fault.is_closed() => Cause::Ended(initiator.arrived()),
                _ => Cause::Fault(failure.fault),
            };
            return self.connect_failed(world, handle, cause);
        }
        tracing::debug!("id {handle}: connects again without RFC 6581, since: {failure}");
        let State::Connecting(mut connecting) = std::mem::replace(&mut id.state, State::Over) else {
            return;
        };
        (connecting.enhanced, connecting.initiator) = (false, None);
        // The port is still in use by the first attempt.
        id.picked = true;
        self.close_stream(world, sid, failure.close);
        if let Err(errno) = self.start_connecting(world, handle, connecting) {
            self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown));
        }
    }

    fn accepted(&mut self, world: &mut World<'_>, handle: u32, accepted: Accepted) {
        let params = self.event_params(Message::Reply, accepted.word, accepted.private_data.clone());
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let manages_qp = id.manages_qp;
        let State::Connecting(connecting) = std::mem::replace(&mut id.state, State::Over) else {
            return;
        };
        let Connecting { sid, parameters, .. } = *connecting;
        id.state = State::Answered(Box::new(Answered {
            sid,
            parameters,
            accepted,
        }));
        self.timers.set(Key::Id(handle), None);
        // The program of a RoCE NIC brings its queue pair to RTS before the connection is
        // established.
        if !manages_qp || self.identity.is_roce() {
            return self.report(world, handle, CmEvent::ConnectResponse, 0, params);
        }
        match self.establish(world, handle) {
            Ok(()) => {
                self.report(world, handle, CmEvent::Established, 0, params);
                self.end_if_disconnected(world, handle);
            }
            Err(cause) => self.establish_failed(world, handle, cause),
        }
    }

    /// Attaches the stream of an accepted Request to its queue pair: RDMA mode begins.
    ///
    /// # Errors
    /// There is no queue pair that can be attached; negotiation failed, which a Terminate reports
    /// to the peer.
    pub(super) fn establish(&mut self, world: &mut World<'_>, handle: u32) -> Result<(), Cause> {
        let Some(State::Answered(answered)) = self.ids.get(&handle).map(|id| &id.state) else {
            return Err(Errno::INVAL.into());
        };
        let (sid, qpn) = (answered.sid, answered.parameters.qpn);
        let local = self.ids.get(&handle).and_then(|id| id.local);
        let qid = self.queue_pair_for(world, local, qpn);
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        let remote = id.remote.ok_or(Errno::INVAL)?;
        let State::Answered(answered) = std::mem::replace(&mut id.state, State::Over) else {
            return Err(Errno::INVAL.into());
        };
        let Answered {
            parameters, accepted, ..
        } = *answered;
        let qid = match qid {
            Ok(Some(qid)) => qid,
            Ok(None) => {
                tracing::debug!("id {handle}: qp {qpn:#08x} is not attached: only private data is exchanged");
                return Ok(self.exchanged(world, handle, sid)?);
            }
            Err(errno) => {
                self.close_accepted(world, sid, &accepted);
                return Err(errno.into());
            }
        };
        let negotiated = accepted.negotiated;
        let policy = self.policy(remote.ip());
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let attachment = policy.attachment(qid, negotiated, &parameters, id);
        let framed = match &accepted.rtr_frame {
            Some(frame) => world.device.send(sid, frame),
            None => Ok(()),
        };
        if let Err(errno) = framed.and_then(|()| world.device.attach(sid, &attachment)) {
            let is_lost = matches!(world.device.inbox(sid), Ok(Inbox::End) | Err(_));
            self.close_accepted(world, sid, &accepted);
            return Err(match is_lost {
                true => Cause::Lost(errno),
                false => Cause::NotAttached(errno),
            });
        }
        self.streams.remove(&sid);
        if let Some(control) = negotiated.terminate {
            return Err(Cause::Terminate(control));
        }
        self.queue_pairs.insert(qid, handle);
        self.notices.push(Notice::Open(qid));
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Connected { qid };
        }
        Ok(())
    }

    /// Closes the stream of an accepted Request that cannot be attached. An enhanced peer gets the
    /// reason in a Terminate (RFC 6581 §9.3).
    fn close_accepted(&mut self, world: &mut World<'_>, sid: u32, accepted: &Accepted) {
        let enhanced = accepted.word.is_some();
        let frame = accepted
            .negotiated
            .terminate_frame(terminate::LOCAL)
            .filter(|_| enhanced);
        let terminated = frame.is_some_and(|frame| world.device.send(sid, &frame).is_ok());
        let how = if terminated { Close::Orderly } else { Close::Abort };
        self.close_stream(world, sid, how);
    }
}

impl Engine {
    /// Asks the peer for the TCP port of the id's service.
    ///
    /// # Errors
    /// The error of the query, with the connection that must be made in another way.
    fn locate(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        connecting: Box<Connecting>,
    ) -> Result<(), Box<Connecting>> {
        // Where the option is RoCE v2, messages reach no port of iWARP.
        if self.speaks_roce() {
            return Err(connecting);
        }
        match self.new_lookup(world, handle, &SPARE_READ, connecting.deadline) {
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
            (ServiceStatus::VALID, _) => {
                return self.connect_failed(world, handle, Cause::BadPort(reply.qpn));
            }
            (status, _) => return self.connect_failed(world, handle, Cause::ServiceRefused(status.0)),
        };
        tracing::debug!("id {handle}: the service has TCP port {port}");
        if let Some(id) = self.ids.get_mut(&handle) {
            id.spare_read = has_spare_read(reply);
        }
        self.connect_at(world, handle, Location::Known, Some(port));
    }

    /// The peer named no TCP port: the service has that of its number, if there is one.
    pub(super) fn not_located(&mut self, world: &mut World<'_>, handle: u32, location: Location) {
        tracing::debug!("id {handle}: the service has the TCP port of its number, or none: {location:?}");
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        let llp = match &id.state {
            State::LookingUp(lookup) => lookup.connecting.as_ref().map(|connecting| connecting.llp),
            _ => None,
        };
        let tries = match llp {
            // A UDP port that answers, or that no program has, is not one of SCTP.
            Some(Llp::Sctp) => location == Location::Silent,
            // Otherwise it was tried before.
            _ => id.remote.is_some_and(|remote| self.policy(remote.ip()).own_ports),
        };
        match tries {
            true => self.connect_at(world, handle, location, None),
            false => self.connect_failed(world, handle, Cause::Refused(Errno::CONNREFUSED, location)),
        }
    }

    /// The next step of an attempt is due. Over SCTP nothing may have answered because the UDP port
    /// of the listener's number is one for messages: the peer is asked, and else tried again.
    pub(super) fn attempt_due(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let State::Connecting(connecting) = &id.state else {
            return;
        };
        if world.now >= connecting.deadline {
            return self.attempt_timed_out(world, handle);
        }
        let State::Connecting(connecting) = std::mem::replace(&mut id.state, State::Over) else {
            return;
        };
        // The first attempt still has the port.
        id.picked = true;
        self.close_stream(world, connecting.sid, Close::Abort);
        let Err(mut connecting) = self.locate(world, handle, connecting) else {
            return;
        };
        connecting.location = Location::Silent;
        if let Err(errno) = self.start_connecting(world, handle, connecting) {
            self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown));
        }
    }

    /// Ends the lookup, and connects to the TCP port of the service.
    fn connect_at(&mut self, world: &mut World<'_>, handle: u32, location: Location, port: Option<u16>) {
        let Some(mut connecting) = self.end_lookup(handle).and_then(|lookup| lookup.connecting) else {
            return;
        };
        connecting.location = location;
        if let Some(id) = self.ids.get_mut(&handle) {
            id.known_peer = location == Location::Known;
        }
        connecting.port = port.unwrap_or(connecting.port);
        if let Err(errno) = self.start_connecting(world, handle, connecting) {
            self.connect_failed(world, handle, Cause::Refused(errno, Location::Unknown));
        }
    }

    /// No process has the TCP port. Queries the peer, if it was not queried before or did not
    /// answer.
    fn connect_refused(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let (location, is_known) = match &id.state {
            State::Connecting(connecting) => match connecting.location {
                location @ (Location::Unknown | Location::Silent) => {
                    (location, world.now >= connecting.deadline)
                }
                location @ (Location::Absent | Location::Known) => (location, true),
            },
            _ => (Location::Unknown, true),
        };
        if is_known {
            return self.connect_failed(world, handle, Cause::Refused(Errno::CONNREFUSED, location));
        }
        let State::Connecting(connecting) = std::mem::replace(&mut id.state, State::Over) else {
            return;
        };
        if self.locate(world, handle, connecting).is_err() {
            self.connect_failed(world, handle, Cause::Refused(Errno::CONNREFUSED, location));
        }
    }

    /// The network reports that a message to another connection manager did not arrive: no process
    /// has the UDP port, or it cannot be reached.
    pub fn message_refused(&mut self, world: &mut World<'_>, port: u32, number: u32, errno: Errno) {
        let Some(handle) = self.datagrams.requests.get(&(port, number)).copied() else {
            return;
        };
        tracing::debug!("id {handle}: its request did not arrive: {errno}");
        self.not_located(world, handle, Location::Absent);
    }
}
