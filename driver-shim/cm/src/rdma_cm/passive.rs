//! The responder (the passive side): Requests, accepting and rejecting.

use rustix::io::Errno;

use super::command::Parameters;
use super::failures::Cause;
use super::messages::Message;
use super::{
    Acceptance, AwaitingRtrFrame, CmEvent, EARLY_TIMEOUT, Engine, EventParams, Id, Key, NewStream, Notice,
    Owner, State, World,
};
use crate::carrier::{Inbox, RequestProgress, receive_request};
use crate::mpa_startup::{Close, Negotiated, Reply, ResponderEvent, Settings};
use crate::startup::Responder;

/// Streams of one listener whose Request is due. Beyond this limit the oldest stream is closed,
/// since an initiator normally sends its Request at once.
const MAX_STARTING: usize = 256;

impl Engine {
    /// A listener has a new stream.
    pub(super) fn stream_arrived(&mut self, world: &mut World<'_>, lid: u32, sid: u32) {
        let Some((handle, llp)) = self.listeners.get(&lid).map(|it| (it.handle, it.llp)) else {
            // The listener was closed while the event of this stream was under way.
            world.device.close(sid, Close::Abort);
            return;
        };
        match self.ids.get_mut(&handle).map(|id| &mut id.state) {
            Some(State::Listening(listener)) => {
                listener.waiting.push_back(NewStream { sid, llp });
                self.admit(world, handle);
            }
            Some(State::Bound { early, .. }) => {
                early.push_back(NewStream { sid, llp });
                self.streams.insert(sid, Owner::Early(handle));
                self.timers.set(Key::Stream(sid), Some(world.now + EARLY_TIMEOUT));
            }
            _ => world.device.close(sid, Close::Abort),
        }
    }

    /// Removes a stream that arrived before the id listened, and ended.
    pub(super) fn remove_early(&mut self, handle: u32, sid: u32) {
        self.timers.set(Key::Stream(sid), None);
        if let Some(State::Bound { early, .. }) = self.ids.get_mut(&handle).map(|id| &mut id.state) {
            early.retain(|other| other.sid != sid);
        }
    }

    /// Admits waiting streams: with a RoCE NIC, as long as the program takes the Requests that are
    /// complete. There, a kernel drops requests beyond the backlog, which the initiator repeats.
    pub(super) fn admit(&mut self, world: &mut World<'_>, handle: u32) {
        let waits = self.identity.is_roce();
        loop {
            let Some(State::Listening(listener)) = self.ids.get_mut(&handle).map(|id| &mut id.state) else {
                return;
            };
            if waits && listener.unread >= listener.backlog {
                return;
            }
            let Some(NewStream { sid, llp }) = listener.waiting.pop_front() else {
                return;
            };
            listener.starting.push_back(sid);
            let full = listener.starting.len() > MAX_STARTING;
            let oldest = full.then(|| listener.starting.pop_front()).flatten();
            if let Some(oldest) = oldest.filter(
                |oldest| matches!(self.streams.get(oldest), Some(Owner::Listener(of, _)) if *of == handle),
            ) {
                tracing::debug!("stream {oldest}: closed: too many streams without a Request");
                self.close_stream(world, oldest, Close::Abort);
            }
            let spare_read = self.ids.get(&handle).is_some_and(|id| id.stream_port.is_some());
            let settings = if self.config.peers.is_empty() {
                self.default_policy.settings.clone()
            } else {
                match world.device.ends(sid) {
                    Ok((_, remote)) => self.policy(remote.ip()).settings,
                    Err(_) => self.default_policy.settings.clone(),
                }
            };
            let settings = Settings {
                spare_read,
                ..settings
            };
            let responder = Responder::new(llp, settings, world.now);
            if world.device.receive(sid, responder.bytes_needed()).is_err() {
                world.device.close(sid, Close::Abort);
                continue;
            }
            self.timers.set(Key::Stream(sid), responder.deadline());
            self.streams
                .insert(sid, Owner::Listener(handle, Box::new(responder)));
        }
    }

    /// Takes bytes of a Request.
    pub(super) fn request_received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        let Some(Owner::Listener(_, responder)) = self.streams.get_mut(&sid) else {
            return;
        };
        match receive_request(responder, world.device, sid, bytes) {
            RequestProgress::Complete => self.report_request(world, sid),
            RequestProgress::Incomplete => {}
            RequestProgress::Invalid(fault, how) => {
                let (llp, arrived) = (responder.llp(), responder.arrived());
                match fault.is_closed() {
                    // A port scan, or a check whether the port is open.
                    true if arrived.is_empty() => {}
                    true => self.log_no_request(world, sid, llp, Cause::Ended(arrived)),
                    false => self.log_no_request(world, sid, llp, Cause::Fault(fault)),
                }
                self.close_stream(world, sid, how);
            }
            RequestProgress::Lost => self.close_stream(world, sid, Close::Abort),
        }
    }

    /// Makes a new id and an event of the listener from a complete Request.
    fn report_request(&mut self, world: &mut World<'_>, sid: u32) {
        let Some(Owner::Listener(listener, responder)) = self.streams.remove(&sid) else {
            return;
        };
        self.timers.set(Key::Stream(sid), None);
        let ends = world.device.ends(sid);
        let (Some(request), Ok((mut local, remote)), Some(id)) =
            (responder.request(), ends, self.ids.get_mut(&listener))
        else {
            return world.device.close(sid, Close::Abort);
        };
        let State::Listening(here) = &mut id.state else {
            return world.device.close(sid, Close::Abort);
        };
        here.starting.retain(|starting| *starting != sid);
        if here.unread >= here.backlog && !self.identity.is_roce() {
            // As `iw_cm` in a kernel does.
            tracing::debug!("stream {sid}: rejected: {} requests are unanswered", here.unread);
            let mut responder = responder;
            if let Some(reply) = responder.refuse() {
                let _ = world.device.send(sid, &reply);
            }
            return world.device.close(sid, Close::Orderly);
        }
        here.unread += 1;
        let (word, private_data) = (request.word, request.private_data.to_vec());
        // The stream may have come to another port.
        local.set_port(id.local.map_or(local.port(), |own| own.port()));
        let child = Id {
            local: Some(local),
            remote: Some(remote),
            ack_timeout: id.ack_timeout,
            traffic_class: id.traffic_class,
            known_peer: id.stream_port.is_some(),
            spare_read: id.stream_port.is_some() && self.datagrams.announced.take(world.now, remote),
            state: State::Over,
            ..Id::new(id.channel, id.port_space)
        };
        let excluded = id.one_family && id.local.is_some_and(|own| own.is_ipv4() != remote.is_ipv4());
        let params = self.event_params(Message::Request, word, private_data);
        let inserted = if excluded {
            Err(Errno::ACCESS)
        } else {
            self.insert_id(child)
        };
        let Ok(handle) = inserted else {
            if let Some(State::Listening(here)) = self.ids.get_mut(&listener).map(|id| &mut id.state) {
                here.unread -= 1;
            }
            return world.device.close(sid, Close::Abort);
        };
        tracing::debug!("id {handle}: {remote} connects to {local}, stream {sid}");
        self.streams.insert(sid, Owner::Id(handle));
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Requested {
                sid,
                responder,
                params: EventParams {
                    private_data: Vec::new(),
                    ..params.clone()
                },
            };
        }
        self.queue_request(world, listener, handle, params);
    }

    /// Accepts a Request; or, at the initiator, establishes the connection with the program's queue
    /// pair.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state, without a queue pair that can be attached, or with too much
    /// private data.
    pub fn accept(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        uid: u64,
        parameters: Option<Parameters>,
    ) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        match (&id.state, parameters) {
            (State::Answered(_), _) => {
                let established = self.establish(world, handle);
                established.map_err(|cause| self.not_established(world.now, handle, cause))?;
                self.end_if_disconnected(world, handle);
                Ok(())
            }
            (State::Requested { .. }, Some(parameters)) => {
                id.uid = uid;
                let answered = self.answer(world, handle, parameters);
                // A program that cannot accept has rejected, as in a kernel.
                answered.inspect_err(|_| self.reject_unanswered(world, handle, &[]))
            }
            (State::ByMessages(of), parameters) => {
                let of = *of;
                // The program has given an id of its own its cookie before.
                id.uid = if id.uid == 0 { uid } else { id.uid };
                self.accept_by_messages(world, handle, of, parameters.as_ref())
            }
            (State::Asked(_), Some(parameters)) => self.answer_inquiry(world, handle, uid, &parameters),
            _ => Err(Errno::INVAL),
        }
    }

    fn answer(&mut self, world: &mut World<'_>, handle: u32, parameters: Parameters) -> Result<(), Errno> {
        Message::Reply.check(self.identity, &parameters.private_data)?;
        let local = self.ids.get(&handle).and_then(|id| id.local);
        let qid = self.queue_pair_for(world, local, parameters.qpn)?;
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        let policy = self.policy(remote.ok_or(Errno::INVAL)?.ip());
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        let spare_read = id.spare_read;
        let State::Requested {
            sid,
            responder,
            params,
        } = &mut id.state
        else {
            return Err(Errno::INVAL);
        };
        let (sid, params) = (*sid, params.clone());
        // An initiator sends nothing until it has the Reply (RFC 5044 §7.1.2). A stream that the
        // initiator closed cannot be answered.
        let inbox = world.device.inbox(sid);
        if inbox != Ok(Inbox::Empty) {
            let why = Cause::NotWaiting.over(responder.llp());
            tracing::debug!("id {handle}: {why}: {inbox:?}");
            id.state = State::Over;
            self.close_stream(world, sid, Close::Abort);
            return Err(Errno::CONNRESET);
        }
        // The ORD that this end requires goes into the reject frame (RFC 6581 §9.1).
        let needed = u16::from(parameters.initiator_depth);
        let taken = responder.request().and_then(|request| request.word);
        if policy.strict_depths && taken.is_some_and(|word| word.ird < needed) {
            let reply = responder
                .reject(&parameters.private_data, Some(needed))
                .map_err(|_| Errno::INVAL)?;
            id.state = State::Over;
            let _ = world.device.send(sid, &reply);
            self.close_stream(world, sid, Close::Orderly);
            return Err(Errno::INVAL);
        }
        let Reply { bytes, negotiated } = responder
            .accept(
                policy.depths(&parameters, spare_read),
                &parameters.private_data,
                world.now,
            )
            .map_err(|_| Errno::INVAL)?;
        let deadline = responder.deadline();
        let sent = world.device.send(sid, &bytes);
        let State::Requested { responder, .. } = std::mem::replace(&mut id.state, State::Over) else {
            return Err(Errno::INVAL);
        };
        self.timers.set(Key::Id(handle), deadline);
        let acceptance = Acceptance {
            sid,
            qid,
            parameters,
            params,
        };
        let begun = sent.and_then(|()| match negotiated {
            Some(negotiated) => self.begin(world, handle, acceptance, negotiated),
            None => {
                world.device.receive(sid, responder.bytes_needed())?;
                if let Some(id) = self.ids.get_mut(&handle) {
                    id.state = State::AwaitingRtrFrame(Box::new(AwaitingRtrFrame {
                        responder,
                        acceptance,
                    }));
                }
                Ok(())
            }
        });
        begun.inspect_err(|_| {
            self.timers.set(Key::Id(handle), None);
            self.close_stream(world, sid, Close::Abort);
        })
    }

    /// Attaches the stream. The queue pair may not send before the first FPDU arrived (RFC 5044
    /// §7.1.2(4)).
    fn begin(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        acceptance: Acceptance,
        negotiated: Negotiated,
    ) -> Result<(), Errno> {
        let Acceptance {
            sid,
            qid,
            parameters,
            params,
        } = acceptance;
        let Some(qid) = qid else {
            tracing::debug!("id {handle}: no queue pair is attached: only private data is exchanged");
            self.exchanged(world, handle, sid)?;
            self.timers.set(Key::Id(handle), None);
            self.accepted_is_established(world, handle, params);
            return Ok(());
        };
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        let policy = self.policy(remote.ok_or(Errno::INVAL)?.ip());
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        let attachment = policy.attachment(qid, negotiated, &parameters, id);
        world.device.attach(sid, &attachment)?;
        self.streams.remove(&sid);
        self.queue_pairs.insert(qid, handle);
        if negotiated.rtr.is_some() && negotiated.fenced {
            id.state = State::Opening { qid, params };
            return Ok(());
        }
        // An initiator without an RTR message may send first at any time: the engine does not wait
        // for it.
        id.state = State::Connected { qid };
        self.timers.set(Key::Id(handle), None);
        if !negotiated.fenced {
            self.notices.push(Notice::Open(qid));
        }
        self.accepted_is_established(world, handle, params);
        Ok(())
    }

    /// Reports that a connection which the program accepted is established. The RTU of a RoCE NIC
    /// has no parameters.
    pub(super) fn accepted_is_established(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        params: EventParams,
    ) {
        let params = match self.identity.is_roce() {
            true => EventParams::default(),
            false => params,
        };
        self.report(world, handle, CmEvent::Established, 0, params);
    }

    /// Takes bytes of the RTR frame.
    pub(super) fn rtr_frame_received(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        bytes: Result<&[u8], Errno>,
    ) {
        let Some(State::AwaitingRtrFrame(awaiting)) = self.ids.get_mut(&handle).map(|id| &mut id.state)
        else {
            return;
        };
        match awaiting.responder.take(bytes) {
            Ok(Some(ResponderEvent::Ready(negotiated))) => {
                let Some(id) = self.ids.get_mut(&handle) else {
                    return;
                };
                let State::AwaitingRtrFrame(awaiting) = std::mem::replace(&mut id.state, State::Over) else {
                    return;
                };
                let sid = awaiting.acceptance.sid;
                if let Err(errno) = self.begin(world, handle, awaiting.acceptance, negotiated) {
                    self.close_stream(world, sid, Close::Abort);
                    self.answer_failed(world, handle, Cause::NotAttached(errno));
                }
            }
            Ok(_) => {
                let (sid, bytes_needed) = (awaiting.acceptance.sid, awaiting.responder.bytes_needed());
                if let Err(errno) = world.device.receive(sid, bytes_needed) {
                    self.answer_failed(world, handle, Cause::NotAttached(errno));
                }
            }
            Err(failure) => {
                let cause = Cause::Fault(failure.fault);
                self.answer_failed(world, handle, cause);
            }
        }
    }

    /// Rejects a Request.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state or with too much private data.
    pub fn reject(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        match id.state {
            State::Asked(_) => return self.reject_inquiry(world, handle, private_data),
            State::ByMessages(of) => return self.reject_by_messages(world, handle, of, private_data),
            State::Requested { .. } => {
                Message::Reject.check(self.identity, private_data)?;
                self.reject_unanswered(world, handle, private_data);
            }
            // A REJ ends any attempt that is not established, at both ends. MPA carries no private
            // data here.
            State::LookingUp(ref lookup) if is_roce && lookup.connecting.is_some() => {
                Message::Reject.check(self.identity, private_data)?;
                self.end_attempt(world, handle);
            }
            State::Connecting(_)
            | State::Answered(_)
            | State::AwaitingRtrFrame(_)
            | State::Opening { .. }
                if is_roce =>
            {
                Message::Reject.check(self.identity, private_data)?;
                self.end_attempt(world, handle);
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Ends the attempt of an id without an event.
    fn end_attempt(&mut self, world: &mut World<'_>, handle: u32) {
        self.timers.set(Key::Id(handle), None);
        if let Some(id) = self.ids.get_mut(&handle) {
            let state = std::mem::replace(&mut id.state, State::Over);
            self.end_activity(world, handle, state);
        }
    }

    /// Rejects the Request of an id, unless it is answered.
    fn reject_unanswered(&mut self, world: &mut World<'_>, handle: u32, private_data: &[u8]) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let State::Requested { sid, responder, .. } = &mut id.state else {
            return;
        };
        let sid = *sid;
        let Ok(reply) = responder.reject(private_data, None) else {
            return;
        };
        id.state = State::Over;
        let _ = world.device.send(sid, &reply);
        self.close_stream(world, sid, Close::Orderly);
    }
}
