//! The lifecycle of ids: creating, listening, moving between channels, destroying.

use std::net::{Ipv4Addr, SocketAddr};

use rustix::io::Errno;
use urnic_wire::mad::ServiceStatus;

use super::abi::CmAddress;
use super::state::{
    CmEvent, Engine, Event, Id, Key, Listener, MAX_IDS, Notice, Owner, PS_DATAGRAMS, PS_IB, PS_TCP, State,
    World,
};
use crate::mpa_startup::Close;

/// The backlog of a listener without a requested backlog, and the maximum backlog (the kernel's
/// `max_backlog`).
const MAX_BACKLOG: u32 = 1024;

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
    fn end_activity(&mut self, world: &mut World<'_>, handle: u32, state: State) {
        match state {
            State::Idle | State::AddressResolved | State::RouteResolved | State::Over => {}
            State::Serving(_) | State::Associated(None) => {}
            State::LookingUp(lookup) => self.forget_lookup(&lookup),
            State::Associated(Some(inquiry)) => drop(self.datagrams.inquiries.remove(&inquiry.key())),
            State::Asked(inquiry) => {
                self.datagrams.inquiries.remove(&inquiry.key());
                self.refuse(world, &inquiry, ServiceStatus::REJECTED);
            }
            State::Bound { lid, early } => {
                self.close_listener(world, lid);
                for sid in early {
                    self.close_stream(world, sid, Close::Abort);
                }
            }
            State::Listening(listener) => {
                let Listener { lid, waiting, .. } = *listener;
                self.close_listener(world, Some(lid));
                let owned = |(sid, owner): (&u32, &Owner)| match owner {
                    Owner::Listener(of, _) if *of == handle => Some(*sid),
                    _ => None,
                };
                let starting: Vec<u32> = self.streams.iter().filter_map(owned).collect();
                for sid in starting.into_iter().chain(waiting) {
                    self.close_stream(world, sid, Close::Abort);
                }
            }
            State::Connecting(connecting) => self.close_stream(world, connecting.sid, Close::Abort),
            State::Answered(answered) => self.close_stream(world, answered.sid, Close::Abort),
            State::AwaitingRtrFrame(awaiting) => self.close_stream(world, awaiting.sid, Close::Abort),
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
        if let Some(lid) = lid {
            self.listeners.remove(&lid);
            world.device.unlisten(lid);
        }
    }

    /// Releases the port that an id holds, so that the id can connect from it.
    pub(super) fn release_port(&mut self, world: &mut World<'_>, handle: u32) {
        let held = self.ids.get_mut(&handle).and_then(|id| id.held.take());
        self.close_listener(world, held);
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
            self.bind(world, channel, handle, CmAddress::Ip(unspecified))?;
        }
        let backlog = match backlog.cast_signed() {
            1.. if backlog < MAX_BACKLOG => backlog,
            _ => MAX_BACKLOG,
        };
        if datagrams {
            return self.serve(handle, backlog);
        }
        let id = self.own(channel, handle)?;
        let State::Bound {
            lid: Some(lid),
            early,
        } = &mut id.state
        else {
            return Err(Errno::INVAL);
        };
        let (lid, early) = (*lid, std::mem::take(early));
        tracing::debug!("id {handle}: listens at {:?}", id.local);
        for sid in &early {
            self.streams.remove(sid);
            self.timers.set(Key::Stream(*sid), None);
        }
        let listener = Box::new(Listener::new(lid, backlog, early));
        self.own(channel, handle)?.state = State::Listening(listener);
        self.admit(world, handle);
        Ok(())
    }

    /// The program received data before the connection manager reported the connection. iWARP needs
    /// no such notification.
    ///
    /// # Errors
    /// `EINVAL` for an id without a connection, even while the connection is being established.
    pub fn notify(&mut self, channel: u64, handle: u32) -> Result<(), Errno> {
        match self.own(channel, handle)?.state {
            State::Idle | State::Bound { .. } | State::AddressResolved | State::RouteResolved => {
                Err(Errno::INVAL)
            }
            _ => Ok(()),
        }
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
