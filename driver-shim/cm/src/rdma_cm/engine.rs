//! The engine's timers, notices and streams in start-up.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use rustix::io::Errno;

use super::datagram_state::Datagrams;
use super::policy::ConnPolicy;
use super::state::{CmEvent, Engine, EventParams, Key, Notice, Owner, State, World};
use crate::mpa_startup::{Close, Time};
use crate::timers::Timers;
use urnic_config::Config;

impl Engine {
    /// Creates the engine of the process; `max_ird` and `max_ord` are the first device's limits,
    /// `seed` is random.
    pub fn new(config: &Config, max_ird: u8, max_ord: u8, seed: u64) -> Engine {
        Engine {
            config: config.clone(),
            identity: config.identity,
            default_policy: ConnPolicy::from(config),
            max_ird,
            max_ord,
            ids: HashMap::new(),
            free: VecDeque::new(),
            fresh: 0,
            channels: HashMap::new(),
            next_channel: 1,
            streams: HashMap::new(),
            listeners: HashMap::new(),
            queue_pairs: HashMap::new(),
            datagrams: Datagrams::default(),
            timers: Timers::default(),
            random: seed,
            notices: Vec::new(),
        }
    }

    /// Adds a device with these limits: the engine negotiates what every device can do.
    pub fn limit_depths(&mut self, max_ird: u8, max_ord: u8) {
        self.max_ird = self.max_ird.min(max_ird);
        self.max_ord = self.max_ord.min(max_ord);
    }

    /// Handles timers that are due. Returns the time of the next one.
    pub fn tick(&mut self, world: &mut World<'_>) -> Option<Time> {
        while let Some(key) = self.timers.due(world.now) {
            match key {
                Key::Id(handle) => self.id_due(world, handle),
                Key::Stream(sid) => {
                    if let Some(Owner::Early(handle)) = self.streams.get(&sid) {
                        tracing::debug!("stream {sid}: closed: the program did not listen in time");
                        self.remove_early(*handle, sid);
                    } else {
                        tracing::debug!("stream {sid}: closed: the MPA Request timed out");
                    }
                    self.close_stream(world, sid, Close::Abort);
                }
                Key::TimeWait(handle) => {
                    self.report(world, handle, CmEvent::TimewaitExit, 0, EventParams::default());
                }
            }
        }
        self.timers.next()
    }

    /// The time at which [`Engine::tick`] is due.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Takes the queued notices about queue pairs.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    pub(super) fn id_due(&mut self, world: &mut World<'_>, handle: u32) {
        match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::Connecting(_)) => self.connect_failed(world, handle, Errno::TIMEDOUT),
            Some(State::LookingUp(_)) => self.lookup_due(world, handle),
            Some(State::AwaitingRtrFrame(_)) => self.answer_failed(world, handle, Errno::TIMEDOUT),
            Some(State::Opening { qid, .. } | State::Closing { qid }) => {
                let qid = *qid;
                world.device.abort(qid);
                self.notices.push(Notice::Open(qid));
                self.connection_ended(world, qid, Errno::TIMEDOUT);
            }
            _ => {}
        }
    }

    /// Closes a stream in start-up.
    pub(super) fn close_stream(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.streams.remove(&sid);
        self.timers.set(Key::Stream(sid), None);
        world.device.close(sid, how);
    }

    /// The policy of connections with `peer`.
    pub(super) fn policy(&self, peer: IpAddr) -> ConnPolicy {
        if self.config.peers.is_empty() {
            self.default_policy.clone()
        } else {
            ConnPolicy::from(&self.config.facing(peer))
        }
    }

    /// The requested bytes of a stream arrived, or fewer if the peer closed it; or an error.
    pub fn received(&mut self, world: &mut World<'_>, sid: u32, bytes: Result<&[u8], Errno>) {
        match self.streams.get(&sid) {
            Some(Owner::Listener(..)) => self.request_received(world, sid, bytes),
            Some(Owner::Early(_)) => {}
            Some(Owner::Id(handle)) => {
                let handle = *handle;
                match self.ids.get(&handle).map(|id| &id.state) {
                    Some(State::Connecting(_)) => self.reply_received(world, handle, bytes),
                    Some(State::AwaitingRtrFrame(_)) => self.rtr_frame_received(world, handle, bytes),
                    // The peer closed the stream, or its queue pair sends to none.
                    Some(State::Exchanged { .. }) => self.exchange_ended(world, handle),
                    _ => {}
                }
            }
            None => {}
        }
    }

    /// A stream ended while no receive was outstanding.
    pub fn stream_closed(&mut self, world: &mut World<'_>, sid: u32) {
        match self.streams.remove(&sid) {
            Some(Owner::Listener(..)) => self.timers.set(Key::Stream(sid), None),
            Some(Owner::Early(handle)) => self.remove_early(handle, sid),
            Some(Owner::Id(handle)) => {
                // The attempt of an id whose Request is not answered fails now.
                let state = self.ids.get(&handle).map(|id| &id.state);
                match state {
                    Some(State::Connecting(_) | State::Answered(_)) => {
                        self.connect_failed(world, handle, Errno::CONNRESET);
                    }
                    Some(State::Exchanged { .. }) => self.exchange_ended(world, handle),
                    _ => {}
                }
            }
            None => {}
        }
    }

    /// A port that is probably free, so that the program can query it before it connects. The port
    /// is in the range from which the kernel also chooses.
    pub(super) fn pick_port(&mut self) -> u16 {
        32768 + (self.random() % (61000 - 32768)) as u16
    }

    /// A number that others do not guess.
    pub(super) fn random(&mut self) -> u64 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
