//! Channels and the events that programs take from them.

use std::collections::VecDeque;

use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};
use zerocopy::FromZeros;

use super::abi::{DatagramParam, EventResponse};
use super::state::{CmEvent, Engine, Event, EventParams, Id, State, World};

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
        if id.is_for_datagrams() {
            let mut param = event.params.datagrams.unwrap_or(DatagramParam::new_zeroed());
            param.set_private_data(&event.params.private_data);
            response.set_datagrams(&param);
            if let State::Serving(service) = &mut id.state
                && event.kind == CmEvent::ConnectRequest
            {
                service.unread = service.unread.saturating_sub(1);
            }
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
            self.queue(
                world,
                Event {
                    id: handle,
                    about: handle,
                    kind,
                    status,
                    params,
                    membership: None,
                },
            );
        }
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
            id: listener,
            about: child,
            kind: CmEvent::ConnectRequest,
            status: 0,
            params,
            membership: None,
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
    pub(super) fn event_params(&self, word: Option<EnhancedWord>, private_data: Vec<u8>) -> EventParams {
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
            datagrams: None,
        }
    }
}
