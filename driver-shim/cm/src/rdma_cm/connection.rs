//! Connections after start-up: their queue pairs, disconnecting, and the loss of streams and
//! devices.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::failures::Cause;
use super::{CmEvent, DISCONNECT_TIMEOUT, Engine, Id, Key, Notice, Owner, State, TIME_WAIT, World};
use crate::carrier::StreamOwner;
use crate::mpa_startup::Close;

impl Engine {
    /// The queue pair that a connection from or to `local` is for. A RoCE NIC's programs may
    /// connect without one: the result is `None` if no queue pair with this number awaits a stream.
    ///
    /// # Errors
    /// `EINVAL` if an RNIC has no such queue pair; `EISCONN` if it is connected.
    pub(super) fn queue_pair_for(
        &self,
        world: &mut World<'_>,
        local: Option<SocketAddr>,
        qpn: u32,
    ) -> Result<Option<u32>, Errno> {
        let qid = local.and_then(|local| world.device.queue_pair(local, qpn));
        if self.identity.is_roce() {
            return Ok(
                qid.filter(|qid| !self.queue_pairs.contains_key(qid) && world.device.awaits_stream(*qid))
            );
        }
        let qid = qid.ok_or(Errno::INVAL)?;
        match self.queue_pairs.contains_key(&qid) {
            true => Err(Errno::ISCONN),
            false => Ok(Some(qid)),
        }
    }

    /// Ends a connection gracefully: posted work is still sent. An event reports the end.
    ///
    /// # Errors
    /// `EINVAL` for an id that never began to connect.
    pub fn disconnect(&mut self, world: &mut World<'_>, channel: u64, handle: u32) -> Result<(), Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        match id.state {
            State::Opening { qid, .. } | State::Connected { qid } => {
                id.state = State::Closing { qid };
                self.timers
                    .set(Key::Id(handle), Some(world.now + DISCONNECT_TIMEOUT));
                world.device.drain(qid);
                Ok(())
            }
            State::Exchanged { .. } => {
                self.exchange_ended(world, handle);
                Ok(())
            }
            State::ByMessages(of) => {
                self.disconnect_by_messages(world, of);
                Ok(())
            }
            // The peer ended the connection first.
            State::Closing { .. } | State::Over => Ok(()),
            // A DREQ or DREP is not sent in these states, which is no error. A listener at any
            // address is on no device.
            State::Serving(_) if id.is_for_datagrams() => Ok(()),
            State::Listening(_)
            | State::Serving(_)
            | State::Requested { .. }
            | State::AwaitingRtrFrame(_)
                if is_roce =>
            {
                match id.local {
                    Some(local) if !local.ip().is_unspecified() => Ok(()),
                    _ => Err(Errno::INVAL),
                }
            }
            State::LookingUp(_) | State::Connecting(_) | State::Answered(_) if is_roce => Ok(()),
            // The kernel waits here until the connection is made, then ends it.
            State::Connecting(_) | State::Answered(_) => {
                id.ends = true;
                Ok(())
            }
            State::LookingUp(ref lookup) if lookup.connecting.is_some() => {
                id.ends = true;
                Ok(())
            }
            State::Requested { .. } => Ok(()),
            // Nothing connects the ends: there is nothing to end.
            State::Serving(_) | State::LookingUp(_) | State::Asked(_) | State::Associated(_) => Ok(()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Ends a connection that was just established, if the program disconnected before.
    pub(super) fn end_if_disconnected(&mut self, world: &mut World<'_>, handle: u32) {
        if let Some(id) = self.ids.get(&handle).filter(|id| id.ends) {
            let _ = self.disconnect(world, id.channel, handle);
        }
    }

    /// A connection without a queue pair is established. The end of its stream ends it.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn exchanged(&mut self, world: &mut World<'_>, handle: u32, sid: u32) -> Result<(), Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        id.state = State::Exchanged { sid };
        world.device.receive(sid, 1)
    }

    /// Ends a connection without a queue pair.
    pub(super) fn exchange_ended(&mut self, world: &mut World<'_>, handle: u32) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let State::Exchanged { sid } = std::mem::replace(&mut id.state, State::Over)
            && self.streams.contains_key(&sid)
        {
            self.close_stream(world, sid, Close::Orderly);
        }
        self.disconnected(world, handle);
    }

    /// Reports the end of a connection. With a RoCE NIC, the end of its TIME-WAIT is reported, too.
    pub(super) fn disconnected(&mut self, world: &mut World<'_>, handle: u32) {
        if self.identity.is_roce() {
            self.begin_time_wait(world, handle);
        }
        self.report_plain(world, handle, CmEvent::Disconnected);
    }

    /// The end of the connection's TIME-WAIT is reported after its time.
    pub(super) fn begin_time_wait(&mut self, world: &World<'_>, handle: u32) {
        self.timers
            .set(Key::TimeWait(handle), Some(world.now + TIME_WAIT));
    }

    /// A device is lost: attempts under way on it fail, and every id with one of its addresses gets
    /// an event. `is_its` decides whether a number is the device's, `is_at` whether an address is.
    pub fn device_lost(
        &mut self,
        world: &mut World<'_>,
        is_its: impl Fn(u32) -> bool,
        is_at: impl Fn(SocketAddr) -> bool,
    ) {
        let its = |number: &u32| is_its(*number).then_some(*number);
        let streams: Vec<u32> = self.streams.keys().filter_map(its).collect();
        let pairs: Vec<u32> = self.queue_pairs.keys().filter_map(its).collect();
        self.adapters_lost(world, &is_its);
        for sid in streams {
            match self.attempt_of(sid) {
                Some(handle) => {
                    self.streams.remove(&sid);
                    self.connect_failed(world, handle, Cause::DeviceLost);
                }
                None => self.closed(world, sid),
            }
        }
        let here = |handle: &&u32| {
            let id = self.ids.get(handle);
            id.and_then(|id| id.local).is_some_and(&is_at)
        };
        let lookups: Vec<u32> = self.datagrams.lookups.values().filter(here).copied().collect();
        for handle in lookups {
            if let Some(lookup) = self.end_lookup(handle)
                && lookup.connecting.is_some()
            {
                self.connect_failed(world, handle, Cause::DeviceLost);
            }
        }
        self.datagrams.common_ports.retain(|_, port| !is_its(*port));
        pairs
            .into_iter()
            .for_each(|qid| self.connection_ended(world, qid, Errno::CONNRESET));
        let on_device = |(handle, id): (&u32, &Id)| id.local.is_some_and(&is_at).then_some(*handle);
        let mut ids: Vec<u32> = self.ids.iter().filter_map(on_device).collect();
        ids.sort_unstable();
        for handle in ids {
            self.report_plain(world, handle, CmEvent::DeviceRemoval);
        }
    }

    /// The id that attempts to connect over a stream.
    pub(super) fn attempt_of(&self, sid: u32) -> Option<u32> {
        let Some(Owner::Id(handle)) = self.streams.get(&sid) else {
            return None;
        };
        let state = &self.ids.get(handle)?.state;
        matches!(state, State::Connecting(_) | State::Answered(_)).then_some(*handle)
    }

    /// The queue pair no longer has a stream: the stream ended gracefully or failed, or the queue
    /// pair was destroyed.
    pub fn connection_ended(&mut self, world: &mut World<'_>, qid: u32, errno: Errno) {
        let Some(handle) = self.queue_pairs.remove(&qid) else {
            return;
        };
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let State::ByMessages(_) = id.state {
            return self.queue_pair_lost(world, handle);
        }
        self.timers.set(Key::Id(handle), None);
        // Requests after the fence are flushed when the gate is open.
        self.notices.push(Notice::Open(qid));
        match std::mem::replace(&mut id.state, State::Over) {
            State::Opening { .. } => self.answer_failed(world, handle, Cause::NoFirstFpdu(errno)),
            State::Connected { .. } | State::Closing { .. } => {
                self.disconnected(world, handle);
            }
            other => id.state = other,
        }
    }
}
