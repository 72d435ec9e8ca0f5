//! The connection manager behind `/dev/infiniband/rdma_cm`: what `rdma_ucm` and `iw_cm` are in a kernel.
//!
//! A program has *channels* and on them *ids*; it gives commands ([`command`]) and takes events. What becomes of an id:
//!
//! ```text
//!  Idle ─ bind ─▶ Bound ─ listen ─▶ Listening ─ a Request ─▶ (new id) Asked ─ accept ─▶ Opening ── first FPDU ──▶ Connected
//!   │              │                                          └ reject ─▶ Over       (at once without RTR)       ▲  │
//!   └─ resolve ────┴─▶ AddressResolved ─ resolve ─▶ RouteResolved ─ connect ─▶ Calling ── Reply ─────────────────┘  │
//!                                                              └ refused ─▶ Over   └▶ Answered (external) ─ accept ─┘
//!  Connected ─ disconnect ─▶ Closing ─▶ Over ◀─ the peer's end, or an error
//! ```
//!
//! The engine does no I/O: it is told commands, events of streams and queue pairs, and the time, and acts through [`Device`]. A listener is a TCP listener
//! on that very port, from the moment it is bound: nobody else can take the port, and who calls too early waits.

pub mod abi;
mod active;
pub mod command;
mod ending;
mod ids;
pub mod opcode;
mod passive;
mod policy;
mod stream_events;
#[cfg(test)]
mod tests;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::io::Errno;
use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};
use zerocopy::FromZeros;

use crate::carrier::Carrier;
use crate::mpa_startup::{Close, Negotiated, Responder, Time};
use crate::timers::Timers;
use abi::EventResponse;
use active::{Answered, Calling};
use passive::{Framing, Listener};
use policy::ConnPolicy;
use urnic_config::Config;

/// Ids that a process may have: librdmacm indexes them with 16 bits.
const MAX_IDS: u32 = 0xffff;
/// `RDMA_PS_TCP`, the port space of connections.
const PS_TCP: u16 = 0x0106;
/// `RDMA_PS_IB`.
const PS_IB: u16 = 0x013f;
/// `RDMA_PS_UDP` and `RDMA_PS_IPOIB`, the port spaces of datagrams.
const PS_DATAGRAMS: [u16; 2] = [0x0111, 0x0002];
/// A graceful end that takes longer is not waited for.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Who calls before the program listens waits for so long: enough for a program between bind and listen.
const EARLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Between the end of a connection and `TIMEWAIT_EXIT`.
const TIME_WAIT: Duration = Duration::from_secs(1);

/// The device's stream commands ([`Engine::received`] follows a receive) and what the host knows of addresses and queue pairs.
pub trait Device: Carrier {
    /// Listens, for connections in packets of this traffic class; an unspecified IPv6 address means IPv4 too, unless `ipv6_only`. Returns listener and port.
    fn listen(&mut self, local: SocketAddr, traffic_class: u8, ipv6_only: bool) -> Result<(u32, u16), Errno>;
    /// Stops listening.
    fn unlisten(&mut self, lid: u32);
    /// Begins a connection in packets of this traffic class; [`Engine::connected`] follows.
    fn connect(&mut self, remote: SocketAddr, local: SocketAddr, traffic_class: u8) -> Result<u32, Errno>;
    /// Both ends of a stream, ours first.
    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno>;
    /// The address that packets to `remote` leave from; its port means nothing.
    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno>;
    /// The device's number of the queue pair that the program knows by `qpn`.
    fn queue_pair(&mut self, qpn: u32) -> Option<u32>;
    /// Brings a queue pair to RTS and hands it a stream.
    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno>;
    /// Has a queue pair send what is posted and then close.
    fn drain(&mut self, qid: u32);
    /// Puts a queue pair into the error state.
    fn abort(&mut self, qid: u32);
    /// A channel has events, or none any more.
    fn signal(&mut self, channel: u64, events: bool);
}

/// How a queue pair is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// The queue pair's number.
    pub qid: u32,
    /// What MPA start-up agreed on.
    pub negotiated: Negotiated,
    /// Most inbound and outbound Reads.
    pub ird: u16,
    /// Most outbound Reads.
    pub ord: u16,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`, for queries.
    pub ack_timeout: Option<u8>,
    /// Only the RTR that was agreed on opens the fence.
    pub strict_rtr: bool,
    /// How long a Send may find no receive posted.
    pub rnr_grace: Duration,
}

/// The world while the engine is at work.
pub struct World<'a> {
    /// The time.
    pub now: Time,
    /// The device's streams and queue pairs.
    pub device: &'a mut dyn Device,
}

/// What the engine found out about a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// It may send: open the gate.
    Open(u32),
}

/// `enum rdma_cm_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CmEvent {
    /// `RDMA_CM_EVENT_ADDR_RESOLVED`.
    AddressResolved = 0,
    /// `RDMA_CM_EVENT_ADDR_ERROR`.
    AddressError = 1,
    /// `RDMA_CM_EVENT_ROUTE_RESOLVED`.
    RouteResolved = 2,
    /// `RDMA_CM_EVENT_CONNECT_REQUEST`.
    ConnectRequest = 4,
    /// `RDMA_CM_EVENT_CONNECT_RESPONSE`.
    ConnectResponse = 5,
    /// `RDMA_CM_EVENT_CONNECT_ERROR`.
    ConnectError = 6,
    /// `RDMA_CM_EVENT_UNREACHABLE`.
    Unreachable = 7,
    /// `RDMA_CM_EVENT_REJECTED`.
    Rejected = 8,
    /// `RDMA_CM_EVENT_ESTABLISHED`.
    Established = 9,
    /// `RDMA_CM_EVENT_DISCONNECTED`.
    Disconnected = 10,
    /// `RDMA_CM_EVENT_DEVICE_REMOVAL`.
    DeviceRemoval = 11,
    /// `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
    TimewaitExit = 15,
}

impl CmEvent {
    /// What a failed call is, and its status (`cma_iw_handler` of the kernel).
    fn of_failure(errno: Errno) -> (CmEvent, i32) {
        let kind = match errno {
            Errno::CONNREFUSED | Errno::CONNRESET => CmEvent::Rejected,
            Errno::TIMEDOUT => CmEvent::Unreachable,
            _ => CmEvent::ConnectError,
        };
        (kind, -errno.raw_os_error())
    }
}

/// What an event says of the peer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct EventParams {
    private_data: Vec<u8>,
    responder_resources: u8,
    initiator_depth: u8,
}

/// An event that the program has not taken yet.
#[derive(Debug)]
struct Event {
    /// Whose it is.
    id: u32,
    /// Whom it is about: a new id, for a Request.
    about: u32,
    kind: CmEvent,
    status: i32,
    told: EventParams,
}

/// An id.
#[derive(Debug)]
struct Id {
    channel: u64,
    /// The program's name for it; 0 until a new id is accepted.
    uid: u64,
    port_space: u16,
    /// Events that the program took: it is waited for until it acknowledged as many.
    reported: u32,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// The local port is one of ours, not the program's choice.
    picked: bool,
    /// The listener that holds the local port until the id connects.
    held: Option<u32>,
    /// librdmacm manages its queue pair: it asked for the attributes before connecting.
    manages_qp: bool,
    ack_timeout: Option<u8>,
    /// `RDMA_OPTION_ID_TOS`.
    traffic_class: u8,
    /// `RDMA_OPTION_ID_AFONLY`.
    one_family: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    Idle,
    Bound {
        /// `None` where there is no TCP port to hold.
        lid: Option<u32>,
        /// Who called too early, oldest first.
        early: VecDeque<u32>,
    },
    AddressResolved,
    RouteResolved,
    Listening(Box<Listener>),
    /// TCP connects, or the Reply is due.
    Calling(Box<Calling>),
    /// Accepted, and the program has yet to bring its queue pair along.
    Answered(Box<Answered>),
    /// A Request that the program has to answer.
    Asked {
        sid: u32,
        responder: Box<Responder>,
        told: EventParams,
    },
    /// Accepted; the RTR frame of 2007 is due.
    Framing(Box<Framing>),
    /// Accepted; the RTR message is due.
    Opening {
        qid: u32,
        told: EventParams,
    },
    Connected {
        qid: u32,
    },
    Closing {
        qid: u32,
    },
    /// Nothing more happens.
    Over,
}

/// Whose a stream in start-up is.
#[derive(Debug)]
enum Owner {
    Id(u32),
    /// A bound id that does not listen yet.
    Early(u32),
    /// The Request is due.
    Listener(u32, Box<Responder>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    Id(u32),
    Stream(u32),
    TimeWait(u32),
}

/// All ids of the process.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// What [`Config`] says of peers that it has nothing special for.
    usual: ConnPolicy,
    max_ird: u8,
    max_ord: u8,
    ids: HashMap<u32, Id>,
    /// Handles to use again.
    free: VecDeque<u32>,
    fresh: u32,
    channels: HashMap<u64, VecDeque<Event>>,
    next_channel: u64,
    streams: HashMap<u32, Owner>,
    listeners: HashMap<u32, u32>,
    /// By device number, those that are attached.
    queue_pairs: HashMap<u32, u32>,
    timers: Timers<Key>,
    random: u64,
    notices: Vec<Notice>,
}

impl Engine {
    /// An engine for the process; `max_ird` and `max_ord` are the device's limits, `seed` is random.
    pub fn new(config: &Config, max_ird: u8, max_ord: u8, seed: u64) -> Engine {
        Engine {
            config: config.clone(),
            usual: ConnPolicy::from(config),
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
            timers: Timers::default(),
            random: seed,
            notices: Vec::new(),
        }
    }

    /// A new channel.
    pub fn open_channel(&mut self) -> u64 {
        let channel = self.next_channel;
        self.next_channel += 1;
        self.channels.insert(channel, VecDeque::new());
        channel
    }

    /// The program closed a channel: its ids are gone too.
    pub fn close_channel(&mut self, world: &mut World<'_>, channel: u64) {
        let here = |(handle, id): (&u32, &Id)| (id.channel == channel).then_some(*handle);
        let ids: Vec<u32> = self.ids.iter().filter_map(here).collect();
        for handle in ids {
            self.remove(world, handle);
        }
        self.channels.remove(&channel);
    }

    /// The oldest event of a channel.
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
        response.id = event.about;
        response.event = event.kind as u32;
        response.status = event.status.cast_unsigned();
        let param = &mut response.param;
        let len = event.told.private_data.len().min(usize::from(u8::MAX));
        if let (Some(to), Some(from)) = (
            param.private_data.get_mut(..len),
            event.told.private_data.get(..len),
        ) {
            to.copy_from_slice(from);
        }
        param.private_data_len = len as u8;
        param.responder_resources = event.told.responder_resources;
        param.initiator_depth = event.told.initiator_depth;
        if let State::Listening(listener) = &mut id.state
            && event.kind == CmEvent::ConnectRequest
        {
            listener.unread = listener.unread.saturating_sub(1);
            self.admit(world, event.id);
        }
        Some(response)
    }

    /// Queues an event. An id that the program has no name for yet has none but its Request.
    fn report(&mut self, world: &mut World<'_>, handle: u32, kind: CmEvent, status: i32, told: EventParams) {
        tracing::debug!("id {handle}: {kind:?}, status {status}");
        if self.ids.get(&handle).is_some_and(|id| id.uid != 0) {
            self.queue(
                world,
                Event {
                    id: handle,
                    about: handle,
                    kind,
                    status,
                    told,
                },
            );
        }
    }

    fn queue(&mut self, world: &mut World<'_>, event: Event) {
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

    /// Bytes of a stream arrived: as many as were asked for, or fewer if the peer closed; or an error.
    pub fn received(&mut self, world: &mut World<'_>, sid: u32, octets: Result<&[u8], Errno>) {
        match self.streams.get(&sid) {
            Some(Owner::Listener(..)) => self.hear_request(world, sid, octets),
            Some(Owner::Early(_)) => {}
            Some(Owner::Id(handle)) => {
                let handle = *handle;
                match self.ids.get(&handle).map(|id| &id.state) {
                    Some(State::Calling(_)) => self.hear_reply(world, handle, octets),
                    Some(State::Framing(_)) => self.hear_frame(world, handle, octets),
                    _ => {}
                }
            }
            None => {}
        }
    }

    /// A stream is gone, while nothing was being received from it.
    pub fn stream_closed(&mut self, world: &mut World<'_>, sid: u32) {
        match self.streams.remove(&sid) {
            Some(Owner::Listener(..)) => self.timers.set(Key::Stream(sid), None),
            Some(Owner::Early(handle)) => self.forget_early(handle, sid),
            Some(Owner::Id(handle)) => {
                // Who has yet to answer a Request learns it then.
                let state = self.ids.get(&handle).map(|id| &id.state);
                if let Some(State::Calling(_) | State::Answered(_)) = state {
                    self.call_failed(world, handle, Errno::CONNRESET);
                }
            }
            None => {}
        }
    }

    /// Does what is due; returns when to come back.
    pub fn tick(&mut self, world: &mut World<'_>) -> Option<Time> {
        while let Some(key) = self.timers.due(world.now) {
            match key {
                Key::Id(handle) => self.id_due(world, handle),
                Key::Stream(sid) => {
                    if let Some(Owner::Early(handle)) = self.streams.get(&sid) {
                        tracing::debug!("stream {sid}: nobody listens");
                        self.forget_early(*handle, sid);
                    } else {
                        tracing::debug!("stream {sid}: no Request in time");
                    }
                    self.hang_up(world, sid, Close::Abort);
                }
                Key::TimeWait(handle) => {
                    self.report(world, handle, CmEvent::TimewaitExit, 0, EventParams::default());
                }
            }
        }
        self.timers.next()
    }

    /// When [`Engine::tick`] is due.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Takes what was found out about queue pairs.
    pub fn notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn id_due(&mut self, world: &mut World<'_>, handle: u32) {
        match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::Calling(_)) => self.call_failed(world, handle, Errno::TIMEDOUT),
            Some(State::Framing(_)) => self.answer_failed(world, handle, Errno::TIMEDOUT),
            Some(State::Opening { qid, .. } | State::Closing { qid }) => {
                let qid = *qid;
                world.device.abort(qid);
                self.notices.push(Notice::Open(qid));
                self.lose(world, qid, Errno::TIMEDOUT);
            }
            _ => {}
        }
    }

    /// Closes a stream in start-up.
    fn hang_up(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.streams.remove(&sid);
        self.timers.set(Key::Stream(sid), None);
        world.device.close(sid, how);
    }

    /// What is wanted of connections with `peer`.
    fn policy(&self, peer: IpAddr) -> ConnPolicy {
        if self.config.peers.is_empty() {
            self.usual.clone()
        } else {
            ConnPolicy::from(&self.config.facing(peer))
        }
    }

    /// What the peer's word means to a program; what it leaves open is ours to limit.
    fn told(&self, word: Option<EnhancedWord>, private_data: Vec<u8>) -> EventParams {
        let depth = |field: Option<u16>, limit: u8| match field {
            None | Some(NO_NEGOTIATION) => limit,
            Some(depth) => u8::try_from(depth).unwrap_or(u8::MAX),
        };
        EventParams {
            private_data,
            responder_resources: depth(word.map(|word| word.ord), self.max_ird),
            initiator_depth: depth(word.map(|word| word.ird), self.max_ord),
        }
    }

    /// A port that is probably free, so that a program can be told before it connects: in the range from which the kernel chooses too.
    fn pick_port(&mut self) -> u16 {
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        32768 + ((z ^ (z >> 31)) % (61000 - 32768)) as u16
    }
}
