//! Channels, the ids on them, and the events that programs take.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};

use rustix::io::Errno;
use urnic_wire::mad::ServiceStatus;
use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};
use zerocopy::FromZeros;

use super::abi::{CmAddress, DatagramParam, EventResponse};
use super::messages::Message;
use super::{
    CmEvent, Engine, Event, EventParams, Id, Key, Listener, MAX_IDS, NewStream, Notice, Owner, PS_DATAGRAMS,
    PS_IB, PS_TCP, State, World,
};
use crate::mpa_startup::Close;

/// The backlog of a listener without a requested backlog, and the maximum backlog (the kernel's
/// `max_backlog`).
const MAX_BACKLOG: u32 = 1024;
/// Unread events of a channel beyond which a program can add no event of its own.
const MAX_WRITTEN: usize = 1 << 16;
/// `IBV_EVENT_COMM_EST`.
pub(super) const COMMUNICATION_ESTABLISHED: u32 = 4;
/// `IBV_EVENT_PATH_MIG`.
pub(super) const PATH_MIGRATED: u32 = 6;

impl Engine {
    /// The id, if the program may name it on this channel.
    pub(super) fn own(&mut self, channel: u64, handle: u32) -> Result<&mut Id, Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        (id.channel == channel).then_some(id).ok_or(Errno::INVAL)
    }

    /// Creates an id on `channel`.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` for an unknown port space; `ENOMEM`.
    pub fn create(&mut self, channel: u64, uid: u64, port_space: u16) -> Result<u32, Errno> {
        if ![PS_TCP, PS_IB].contains(&port_space) && !PS_DATAGRAMS.contains(&port_space) {
            return Err(Errno::PROTONOSUPPORT);
        }
        self.insert_id(Id {
            uid,
            ..Id::new(channel, port_space)
        })
    }

    pub(super) fn insert_id(&mut self, id: Id) -> Result<u32, Errno> {
        let handle = match self.free.pop_front() {
            Some(handle) => handle,
            None if self.fresh == MAX_IDS => return Err(Errno::NOMEM),
            None => {
                self.fresh += 1;
                self.fresh - 1
            }
        };
        self.ids.insert(handle, id);
        Ok(handle)
    }

    /// Ends an id; returns the number of its events that the program took.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`: no such id on this channel.
    pub fn destroy(&mut self, world: &mut World<'_>, channel: u64, handle: u32) -> Result<u32, Errno> {
        self.own(channel, handle)?;
        Ok(self.remove(world, handle))
    }

    pub(super) fn remove(&mut self, world: &mut World<'_>, handle: u32) -> u32 {
        let Some(id) = self.ids.get_mut(&handle) else {
            return 0;
        };
        let state = std::mem::replace(&mut id.state, State::Over);
        self.end_activity(world, handle, state);
        self.release_port(world, handle);
        self.datagrams
            .memberships
            .retain(|_, membership| membership.id != handle);
        self.leave_place(world, handle);
        let Some(id) = self.ids.remove(&handle) else {
            return 0;
        };
        self.timers.set(Key::Id(handle), None);
        self.timers.set(Key::TimeWait(handle), None);
        // Events that the program has not taken are discarded; new ids that only such an event
        // names have no other owner.
        let mut unread = Vec::new();
        if let Some(queue) = self.channels.get_mut(&id.channel) {
            let had = !queue.is_empty();
            queue.retain(|event| {
                let mine = event.id == handle;
                if mine && event.kind == CmEvent::ConnectRequest {
                    unread.push(event.about);
                }
                !mine
            });
            if had && queue.is_empty() {
                world.device.signal(id.channel, false);
            }
        }
        for child in unread {
            self.remove(world, child);
        }
        self.free.push_back(handle);
        id.reported
    }

    /// Ends the current activity of an id.
    pub(super) fn end_activity(&mut self, world: &mut World<'_>, handle: u32, state: State) {
        match state {
            State::Idle | State::AddressResolved | State::RouteResolved | State::Over => {}
            State::Serving(_) => self.adapters.stop_listening(handle),
            State::Associated(None) => {}
            State::ByMessages(of) => self.release(world, handle, of),
            State::LookingUp(lookup) => self.forget_lookup(&lookup),
            State::Associated(Some(inquiry)) => drop(self.datagrams.inquiries.remove(&inquiry.key())),
            State::Asked(inquiry) => {
                self.datagrams.inquiries.remove(&inquiry.key());
                self.refuse(world, &inquiry, ServiceStatus::REJECTED);
            }
            State::Bound { lid, early } => {
                self.close_listener(world, lid);
                for NewStream { sid, .. } in early {
                    self.close_stream(world, sid, Close::Abort);
                }
            }
            State::Listening(listener) => {
                let Listener { lid, waiting, .. } = *listener;
                self.adapters.stop_listening(handle);
                self.close_listener(world, Some(lid));
                let owned = |(sid, owner): (&u32, &Owner)| match owner {
                    Owner::Listener(of, _) if *of == handle => Some(*sid),
                    _ => None,
                };
                let starting: Vec<u32> = self.streams.iter().filter_map(owned).collect();
                let waiting = waiting.into_iter().map(|stream| stream.sid);
                for sid in starting.into_iter().chain(waiting) {
                    self.close_stream(world, sid, Close::Abort);
                }
            }
            State::Connecting(connecting) => self.close_stream(world, connecting.sid, Close::Abort),
            State::Answered(answered) => self.close_stream(world, answered.sid, Close::Abort),
            State::AwaitingRtrFrame(awaiting) => {
                self.close_stream(world, awaiting.acceptance.sid, Close::Abort)
            }
            State::Requested {
                sid, mut responder, ..
            } => {
                if let Ok(reply) = responder.reject(&[], None) {
                    let _ = world.device.send(sid, &reply);
                }
                self.close_stream(world, sid, Close::Orderly);
            }
            State::Opening { qid, .. } | State::Connected { qid } => {
                self.queue_pairs.remove(&qid);
                world.device.abort(qid);
                self.notices.push(Notice::Open(qid));
            }
            State::Exchanged { sid } => self.close_stream(world, sid, Close::Orderly),
            // The close continues without the id.
            State::Closing { qid } => {
                self.queue_pairs.remove(&qid);
            }
        }
    }

    pub(super) fn close_listener(&mut self, world: &mut World<'_>, lid: Option<u32>) {
        let Some(lid) = lid else { return };
        let others = self.listeners.remove(&lid).map(|first| first.others);
        for lid in others.into_iter().flatten().chain([lid]) {
            self.listeners.remove(&lid);
            world.device.unlisten(lid);
        }
    }

    /// Releases the port that an id holds, so that the id can connect from it.
    pub(super) fn release_port(&mut self, world: &mut World<'_>, handle: u32) {
        let reservation = self.ids.get_mut(&handle).and_then(|id| id.reservation.take());
        self.close_listener(world, reservation);
    }

    /// Accepts connections from now on.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state, `EOPNOTSUPP` for datagrams of an RNIC, and the errors of
    /// binding.
    pub fn listen(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        backlog: u32,
    ) -> Result<(), Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        let datagrams = id.is_for_datagrams();
        if datagrams && !is_roce {
            return Err(Errno::OPNOTSUPP);
        }
        if matches!(id.state, State::Idle) {
            let unspecified = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
            let unspecified = CmAddress::Ip(unspecified);
            self.bind_for("rdma_listen", world, (channel, handle), unspecified)?;
        }
        let backlog = match backlog.cast_signed() {
            1.. if backlog < MAX_BACKLOG => backlog,
            _ => MAX_BACKLOG,
        };
        if datagrams {
            return self.serve(handle, backlog);
        }
        if self.speaks_roce() {
            return self.listen_for_connections(world, handle, backlog);
        }
        let State::Bound { lid, .. } = self.own(channel, handle)?.state else {
            return Err(Errno::INVAL);
        };
        let lid = self.listener_of(world, handle, lid)?;
        if self.has_both_wires() {
            self.take_requests(world, handle)?;
        }
        let id = self.own(channel, handle)?;
        let State::Bound { early, .. } = &mut id.state else {
            return Err(Errno::INVAL);
        };
        let early = std::mem::take(early);
        tracing::debug!("id {handle}: listens at {:?}", id.local);
        for NewStream { sid, .. } in &early {
            self.streams.remove(sid);
            self.timers.set(Key::Stream(*sid), None);
        }
        let listener = Box::new(Listener::new(lid, backlog, early));
        self.own(channel, handle)?.state = State::Listening(listener);
        self.admit(world, handle);
        Ok(())
    }

    /// The program received an asynchronous event of its queue pair, perhaps before the connection
    /// manager reported the connection. iWARP needs no such notification.
    ///
    /// # Errors
    /// `EINVAL` for an id without a connection; on a RoCE NIC also for another event than
    /// communication established, and for a connection that was not accepted, and `EISCONN` if it
    /// is established (`ib_cm_notify` of the kernel).
    pub fn notify(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        event: u32,
    ) -> Result<(), Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        match (is_roce, &id.state) {
            (_, State::ByMessages(of)) => {
                let of = *of;
                self.notify_by_messages(world, of, event)
            }
            (_, State::Idle | State::Bound { .. } | State::AddressResolved | State::RouteResolved) => {
                Err(Errno::INVAL)
            }
            (false, _) => Ok(()),
            (true, State::Connected { .. } | State::Exchanged { .. }) => match event {
                COMMUNICATION_ESTABLISHED => Err(Errno::ISCONN),
                PATH_MIGRATED => Ok(()),
                _ => Err(Errno::INVAL),
            },
            // The message that the program received is the first FPDU, which reports the
            // connection.
            (true, State::Opening { .. } | State::AwaitingRtrFrame(_))
                if event == COMMUNICATION_ESTABLISHED =>
            {
                Ok(())
            }
            (true, _) => Err(Errno::INVAL),
        }
    }

    /// Queues an event of the program's own.
    ///
    /// # Errors
    /// `EINVAL` for an event that programs may not queue; `ENOENT`, `EINVAL`: no such id on this
    /// channel; `ENOMEM` if the program leaves too many events unread.
    pub fn write_event(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        (event, status, argument): (u32, u32, u64),
    ) -> Result<(), Errno> {
        let kind = [CmEvent::User, CmEvent::Internal]
            .into_iter()
            .find(|kind| *kind as u32 == event)
            .ok_or(Errno::INVAL)?;
        self.own(channel, handle)?;
        let unread = self.channels.get(&channel).map_or(0, |queue| queue.len());
        if unread >= MAX_WRITTEN {
            return Err(Errno::NOMEM);
        }
        let params = EventParams {
            argument: Some(argument),
            ..EventParams::default()
        };
        self.queue(world, Event::of(handle, kind, status.cast_signed(), params));
        Ok(())
    }

    /// Moves an id, with its events, from channel `old` to `new`; returns the number of events that
    /// the program took on the old channel.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn migrate(&mut self, world: &mut World<'_>, old: u64, new: u64, handle: u32) -> Result<u32, Errno> {
        let id = self.own(old, handle)?;
        id.channel = new;
        let reported = id.reported;
        let Some(queue) = self.channels.get_mut(&old) else {
            return Ok(reported);
        };
        let (moving, staying): (Vec<Event>, Vec<Event>) =
            queue.drain(..).partition(|event| event.id == handle);
        queue.extend(staying);
        if !moving.is_empty() && queue.is_empty() {
            world.device.signal(old, false);
        }
        for event in moving {
            if event.membership.is_none()
                && let Some(child) = self.ids.get_mut(&event.about)
            {
                child.channel = new;
            }
            self.queue(world, event);
        }
        Ok(reported)
    }
}

impl Engine {
    /// Opens a channel.
    pub fn open_channel(&mut self) -> u64 {
        let channel = self.next_channel;
        self.next_channel += 1;
        self.channels.insert(channel, VecDeque::new());
        channel
    }

    /// The program closed a channel, which also ends the channel's ids.
    pub fn close_channel(&mut self, world: &mut World<'_>, channel: u64) {
        let owned = |(handle, id): (&u32, &Id)| (id.channel == channel).then_some(*handle);
        let ids: Vec<u32> = self.ids.iter().filter_map(owned).collect();
        for handle in ids {
            self.remove(world, handle);
        }
        self.channels.remove(&channel);
    }

    /// Takes the oldest event of a channel.
    pub fn take_event(&mut self, world: &mut World<'_>, channel: u64) -> Option<EventResponse> {
        let queue = self.channels.get_mut(&channel)?;
        let event = queue.pop_front()?;
        if queue.is_empty() {
            world.device.signal(channel, false);
        }
        let id = self.ids.get_mut(&event.id)?;
        id.reported += 1;
        let mut response = EventResponse::new_zeroed();
        response.uid = id.uid;
        let number = event.membership;
        if let Some(membership) = number.and_then(|number| self.datagrams.memberships.get_mut(&number)) {
            membership.reported += 1;
            response.uid = membership.uid;
        }
        response.id = event.about;
        response.event = event.kind as u32;
        response.status = event.status.cast_unsigned();
        if let Some(argument) = event.params.argument {
            response.set_argument(argument);
            return Some(response);
        }
        if let State::Serving(service) = &mut id.state
            && event.kind == CmEvent::ConnectRequest
        {
            service.unread = service.unread.saturating_sub(1);
        }
        if id.is_for_datagrams() {
            let mut param = event.params.datagrams.unwrap_or(DatagramParam::new_zeroed());
            param.set_private_data(&event.params.private_data);
            response.set_datagrams(&param);
            return Some(response);
        }
        let param = &mut response.param;
        let len = event.params.private_data.len().min(usize::from(u8::MAX));
        if let (Some(to), Some(from)) = (
            param.private_data.get_mut(..len),
            event.params.private_data.get(..len),
        ) {
            to.copy_from_slice(from);
        }
        param.private_data_len = len as u8;
        param.responder_resources = event.params.responder_resources;
        param.initiator_depth = event.params.initiator_depth;
        if let Some(of_roce) = event.params.of_roce {
            param.qp_num = of_roce.qpn;
            param.flow_control = of_roce.flow_control.into();
            param.retry_count = of_roce.retry_count;
            param.rnr_retry_count = of_roce.rnr_retry_count;
            param.srq = of_roce.srq.into();
        }
        if let State::Listening(listener) = &mut id.state
            && event.kind == CmEvent::ConnectRequest
        {
            listener.unread = listener.unread.saturating_sub(1);
            self.admit(world, event.id);
        }
        Some(response)
    }

    /// Queues an event. An id without a cookie of the program has no event except its Request.
    pub(super) fn report(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        kind: CmEvent,
        status: i32,
        params: EventParams,
    ) {
        tracing::debug!("id {handle}: {kind:?}, status {status}");
        if self.ids.get(&handle).is_some_and(|id| id.uid != 0) {
            self.queue(world, Event::of(handle, kind, status, params));
        }
    }

    /// Queues an event without parameters of the peer.
    pub(super) fn report_plain(&mut self, world: &mut World<'_>, handle: u32, kind: CmEvent) {
        self.report(world, handle, kind, 0, EventParams::default());
    }

    /// Queues the event of a failure.
    pub(super) fn report_failure(&mut self, world: &mut World<'_>, handle: u32, kind: CmEvent, errno: Errno) {
        self.report(world, handle, kind, -errno.raw_os_error(), EventParams::default());
    }

    /// Queues the event of a listener that a peer's request made a new id.
    pub(super) fn queue_request(
        &mut self,
        world: &mut World<'_>,
        listener: u32,
        child: u32,
        params: EventParams,
    ) {
        let event = Event {
            about: child,
            ..Event::of(listener, CmEvent::ConnectRequest, 0, params)
        };
        self.queue(world, event);
    }

    pub(super) fn queue(&mut self, world: &mut World<'_>, event: Event) {
        let Some(id) = self.ids.get(&event.id) else {
            return;
        };
        if let Some(queue) = self.channels.get_mut(&id.channel) {
            queue.push_back(event);
            if queue.len() == 1 {
                world.device.signal(id.channel, true);
            }
        }
    }

    /// The program's parameters from the peer's word; the engine sets the limits that the word
    /// leaves open.
    pub(super) fn event_params(
        &self,
        message: Message,
        word: Option<EnhancedWord>,
        mut private_data: Vec<u8>,
    ) -> EventParams {
        if self.identity.is_roce() {
            message.pad(&mut private_data);
        }
        // Programs for a RoCE NIC pass the number on, and may not exceed its limit.
        let most = |limit| if self.identity.is_roce() { limit } else { u8::MAX };
        let depth = |field: Option<u16>, limit: u8| match field {
            None | Some(NO_NEGOTIATION) => limit,
            Some(depth) => u8::try_from(depth).unwrap_or(u8::MAX).min(most(limit)),
        };
        EventParams {
            private_data,
            responder_resources: depth(word.map(|word| word.ord), self.max_ird),
            initiator_depth: depth(word.map(|word| word.ird), self.max_ord),
            ..EventParams::default()
        }
    }
}
