//! The connection manager of `/dev/infiniband/rdma_cm`, which corresponds to `rdma_ucm` and
//! `iw_cm` in a kernel.
//!
//! A program has *channels* and on them *ids*; it sends commands ([`command`]) and takes events.
//! The states of an id:
//!
//! ```text
//!  Idle ─ bind ─▶ Bound ─ listen ─▶ Listening ─ a Request ─▶ (new id) Requested ─ reject ─▶ Over
//!   │              │                                                  └ accept ─▶ Opening
//!   │              │                     Opening ── first FPDU, or at once without RTR ──▶ Connected
//!   └─ resolve ────┴─▶ AddressResolved ─ resolve ─▶ RouteResolved ─ connect ─▶ Connecting
//!      Connecting ── Reply ──▶ Connected, or Answered ─ accept ─▶ Connected (external queue pair)
//!      Connecting ── rejected ──▶ Over
//!  Connected ─ disconnect ─▶ Closing ─▶ Over ◀─ the peer's end, or an error
//! ```
//!
//! With the identity of a RoCE NIC, the program brings its queue pair to RTS itself, with
//! attributes that [`Engine::qp_attributes`] gives, as on InfiniBand: Connecting always leads to
//! Answered. If no queue pair was brought there, the connection carries private data only
//! (`Exchanged`), and the program connects its queue pairs natively.
//!
//! Ids for datagrams have no connection. A RoCE NIC's connection manager queries the peer's
//! connection manager for the number of its queue pair, by a message to the UDP port of the
//! listener's number:
//!
//! ```text
//!  Bound ─ listen ─▶ Serving ─ a request ─▶ (new id) Asked ─ accept, reject ─▶ Associated
//!  RouteResolved ─ connect ─▶ LookingUp ─ reply, or no reply ─▶ Associated
//! ```
//!
//! The ports of connections are those of TCP, or have the UDP port of their number, so that TCP's
//! is free for other programs. Then an initiator queries this port for the TCP port of the
//! listener:
//!
//! ```text
//!  RouteResolved ─ connect ─▶ LookingUp ─ reply, or no listener ─▶ Connecting
//! ```
//!
//! With `wire=roce` there are no streams. The messages of RoCE's connection manager make
//! connections between queue pairs:
//!
//! ```text
//!  Bound ─ listen ─▶ Serving ─ a REQ ─▶ (new id) ByMessages
//!  RouteResolved ─ connect ─▶ ByMessages ─ the end ─▶ Over
//! ```
//!
//! The engine does no I/O: commands, events of streams and queue pairs, and the time go in; it acts
//! through [`Device`]. A listener is a TCP listener from bind on: no other process can use its
//! port, and connections before listen wait.
//!
//! This file has the ids and their states, the timers and the events of streams. The others have
//! the commands, by topic.

pub mod abi;
mod active;
mod adapters;
mod addresses;
mod attributes;
pub mod command;
mod connection;
mod datagrams;
mod device;
mod failures;
mod ids;
mod lines;
pub mod listing;
mod messages;
mod passive;
mod roce_calls;
mod roce_connections;
mod spare_reads;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::io::Errno;
use urnic_wire::mad::{MAD_LEN, ServiceRequest};

use crate::carrier::{Attachment, StreamOwner, Terms};
use crate::mpa_startup::{Accepted, Close, Depths, Negotiated, Settings, Time};
use crate::random::Random;
use crate::startup::{Initiator, Responder};
use crate::timers::Timers;
use abi::DatagramParam;
use adapters::{Adapters, ByMessages};
use command::Parameters;
use lines::{Lines, PeerLines};
use spare_reads::Announced;
use urnic_config::{Config, Identity, Llp};

pub use device::{Arrival, ChannelAdapter, Device, Notice, World};

/// Maximum number of ids of a process: librdmacm indexes them with 16 bits.
const MAX_IDS: u32 = 0xffff;
/// `RDMA_PS_TCP`, the port space of connections.
const PS_TCP: u16 = 0x0106;
/// Maximum private data of a peer: programs get its length in one byte.
const MAX_PRIVATE_DATA: usize = u8::MAX as usize;
/// `RDMA_PS_IB`.
const PS_IB: u16 = 0x013f;
/// `RDMA_PS_IPOIB`: for an id with an address of Ethernet, the kernel has no device.
const PS_IPOIB: u16 = 0x0002;
/// `RDMA_PS_UDP` and `RDMA_PS_IPOIB`, the port spaces of datagrams.
const PS_DATAGRAMS: [u16; 2] = [0x0111, PS_IPOIB];
/// The maximum time that the engine waits for a graceful end.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The time that an initiator waits if it connects before the program listens: enough for a program
/// between bind and listen.
const EARLY_TIMEOUT: Duration = Duration::from_secs(1);
/// The time between the end of a connection and `TIMEWAIT_EXIT`.
const TIME_WAIT: Duration = Duration::from_secs(1);
/// `RDMA_UDP_QKEY`: the Q_Key of all queue pairs of rdma_cm.
const UDP_QKEY: u32 = 0x0123_4567;
/// The time after which the first request is repeated. Each further time is twice as long.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);
/// The longest time between two requests: that of the kernel.
const MAX_INTERVAL: Duration = Duration::from_millis(4096);
/// The time for which an initiator over SCTP tries the UDP port of the listener's number, before it
/// asks for another port.
const SCTP_TIME: Duration = Duration::from_secs(1);
/// Requests for a TCP port without a reply, after which that of the service's number is tried.
const REQUESTS: usize = 3;

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
    /// `RDMA_CM_EVENT_MULTICAST_JOIN`.
    MulticastJoin = 12,
    /// `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
    TimewaitExit = 15,
    /// `RDMA_CM_EVENT_USER`, which the program queued.
    User = 18,
    /// `RDMA_CM_EVENT_INTERNAL`, which librdmacm queued.
    Internal = 19,
}

/// The peer's parameters in an event.
#[derive(Debug, Clone, Default)]
struct EventParams {
    private_data: Vec<u8>,
    responder_resources: u8,
    initiator_depth: u8,
    /// The destination of datagrams.
    datagrams: Option<DatagramParam>,
    /// The argument of an event that the program queued.
    argument: Option<u64>,
    /// What only the messages of RoCE say.
    of_roce: Option<RoceParams>,
}

/// The peer's parameters that only the messages of RoCE carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoceParams {
    qpn: u32,
    flow_control: bool,
    retry_count: u8,
    rnr_retry_count: u8,
    srq: bool,
}

/// An event that the program has not taken.
#[derive(Debug)]
struct Event {
    /// The id that has the event.
    id: u32,
    /// The id that the event names: a new id, for a Request; or the membership.
    about: u32,
    kind: CmEvent,
    status: i32,
    params: EventParams,
    /// The membership of a multicast group that the event is about.
    membership: Option<u32>,
}

impl Event {
    /// An event that an id has about itself.
    fn of(id: u32, kind: CmEvent, status: i32, params: EventParams) -> Event {
        Event {
            id,
            about: id,
            kind,
            status,
            params,
            membership: None,
        }
    }
}

/// An id.
#[derive(Debug)]
struct Id {
    channel: u64,
    /// The program's cookie of the id; 0 until a new id is accepted.
    uid: u64,
    port_space: u16,
    /// The number of events that the program took: destroying the id waits until the program
    /// acknowledged as many.
    reported: u32,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// The engine picked the local port; the program did not choose it.
    picked: bool,
    /// The listener that reserves the local port until the id connects.
    reservation: Option<u32>,
    /// librdmacm manages the queue pair of the id: it queried the attributes before connecting.
    manages_qp: bool,
    ack_timeout: Option<u8>,
    /// `RDMA_OPTION_ID_TOS`.
    traffic_class: u8,
    /// `RDMA_OPTION_ID_AFONLY`.
    one_family: bool,
    /// The program bound the id, so the id has its port until it ends.
    bound: bool,
    /// `RDMA_OPTION_ID_REUSEADDR`.
    reuse: bool,
    /// The program disconnected while the connection was being made, which ends it then.
    ends: bool,
    /// The peer is urnic: only its own query gives the TCP port of the stream.
    known_peer: bool,
    /// The peer announced a [spare Read](spare_reads).
    spare_read: bool,
    /// The UDP ports of an id that is bound, unless its port is that of TCP: with several devices,
    /// one for each address.
    ports: Vec<u32>,
    /// The TCP port of a bound id that has UDP ports.
    stream_port: Option<u16>,
    /// The Q_Key of an id for datagrams; 0: not set.
    qkey: u32,
    state: State,
}

impl Id {
    /// An idle id without a cookie.
    fn new(channel: u64, port_space: u16) -> Id {
        Id {
            channel,
            uid: 0,
            port_space,
            reported: 0,
            local: None,
            remote: None,
            picked: false,
            reservation: None,
            manages_qp: false,
            ack_timeout: None,
            traffic_class: 0,
            one_family: false,
            bound: false,
            reuse: false,
            ends: false,
            known_peer: false,
            spare_read: false,
            ports: Vec::new(),
            stream_port: None,
            qkey: 0,
            state: State::Idle,
        }
    }

    /// Whether the id is for datagrams.
    fn is_for_datagrams(&self) -> bool {
        PS_DATAGRAMS.contains(&self.port_space)
    }
}

#[derive(Debug)]
enum State {
    Idle,
    Bound {
        /// The listener that holds the port, if the id has one.
        lid: Option<u32>,
        /// Streams that arrived before the id listened, oldest first.
        early: VecDeque<NewStream>,
    },
    AddressResolved,
    RouteResolved,
    Listening(Box<Listener>),
    /// A listener for messages: datagrams, or connections with `wire=roce`.
    Serving(Service),
    /// A connection with `wire=roce`, from the REQ on. Its state is that of the device's
    /// [connections](crate::ib_cm).
    ByMessages(ByMessages),
    /// The peer was asked for its queue pair, or for the TCP port of a listener.
    LookingUp(Box<Lookup>),
    /// A peer's request for a queue pair, which the program must answer.
    Asked(Box<Inquiry>),
    /// Both ends have each other's queue pairs, or the lookup was refused; with the request that
    /// was answered.
    Associated(Option<Box<Inquiry>>),
    /// The stream connects, or the Reply is due.
    Connecting(Box<Connecting>),
    /// Accepted; the program has not provided its queue pair yet.
    Answered(Box<Answered>),
    /// A Request that the program must answer.
    Requested {
        sid: u32,
        responder: Box<Responder>,
        params: EventParams,
    },
    /// Accepted; the RTR frame of 2007 is due.
    AwaitingRtrFrame(Box<AwaitingRtrFrame>),
    /// Accepted; the RTR message is due.
    Opening {
        qid: u32,
        params: EventParams,
    },
    Connected {
        qid: u32,
    },
    /// Connected, without a queue pair: the program uses the connection to exchange private data
    /// only. Its stream stays in streaming mode.
    Exchanged {
        sid: u32,
    },
    Closing {
        qid: u32,
    },
    /// Finished: no event follows.
    Over,
}

/// A connection attempt that the peer accepted.
#[derive(Debug)]
struct Answered {
    sid: u32,
    parameters: Parameters,
    accepted: Accepted,
}

/// A stream that a listener of the device accepted.
#[derive(Debug, Clone, Copy)]
struct NewStream {
    sid: u32,
    llp: Llp,
}

/// A listener of the device.
#[derive(Debug)]
struct DeviceListener {
    /// The id.
    handle: u32,
    llp: Llp,
    /// The listeners at the same port over the other lower layers, if this is the first of them.
    others: Vec<u32>,
}

/// A listener.
#[derive(Debug)]
struct Listener {
    /// The first of its listeners of the device.
    lid: u32,
    backlog: u32,
    /// Requests that the program has not taken.
    unread: u32,
    /// Streams that the engine has not examined, oldest first. The device delays further streams.
    waiting: VecDeque<NewStream>,
    /// Streams whose Request is due, oldest first; some may be closed.
    starting: VecDeque<u32>,
}

impl Listener {
    fn new(lid: u32, backlog: u32, waiting: VecDeque<NewStream>) -> Listener {
        Listener {
            lid,
            backlog,
            unread: 0,
            waiting,
            starting: VecDeque::new(),
        }
    }
}

/// A Request that the program accepted.
#[derive(Debug)]
struct Acceptance {
    sid: u32,
    /// The queue pair to which the stream will be attached; `None`: no queue pair.
    qid: Option<u32>,
    parameters: Parameters,
    params: EventParams,
}

/// An accepted Request whose RTR frame is due.
#[derive(Debug)]
struct AwaitingRtrFrame {
    responder: Box<Responder>,
    acceptance: Acceptance,
}

/// The knowledge about the TCP port of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Location {
    /// The peer was not queried.
    Unknown,
    /// The peer did not answer.
    Silent,
    /// The peer has no listener whose port is not that of TCP.
    Absent,
    /// The peer named the port.
    Known,
}

/// A connection attempt in progress.
#[derive(Debug)]
struct Connecting {
    sid: u32,
    llp: Llp,
    parameters: Parameters,
    /// The peer's TCP port.
    port: u16,
    /// The peer's answer about its TCP port.
    location: Location,
    /// TCP chose a port that differs from the id's.
    other_port: bool,
    /// The attempt uses RFC 6581; the second attempt does not (RFC 6581 §10).
    enhanced: bool,
    /// The Reply is due; `None`: the stream connects.
    initiator: Option<Box<Initiator>>,
    deadline: Time,
}

/// A lookup at a peer in progress: the request is repeated until a reply comes.
#[derive(Debug)]
struct Lookup {
    /// The connection for which the peer's TCP port is looked up; `None`: a queue pair is looked
    /// up.
    connecting: Option<Box<Connecting>>,
    /// The number of requests.
    attempts: usize,
    /// The numbers of those that were sent.
    sent: Vec<u32>,
    /// The UDP port from which the peer is queried.
    port: u32,
    request_id: u32,
    transaction_id: u64,
    request: [u8; MAD_LEN],
    /// The time until the next repetition.
    interval: Duration,
    deadline: Time,
}

impl Lookup {
    /// Whether the peer seems to know no such requests.
    fn is_silent(&self) -> bool {
        self.connecting.is_some() && self.attempts >= REQUESTS
    }
}

/// A request of a peer for a queue pair.
#[derive(Debug)]
struct Inquiry {
    /// The UDP port of the listener.
    port: u32,
    arrival: Arrival,
    transaction_id: u64,
    request: ServiceRequest,
    /// The reply, once the program gave it: it is repeated if the request is.
    reply: Option<[u8; MAD_LEN]>,
}

impl Inquiry {
    fn key(&self) -> InquiryKey {
        (self.arrival.remote, self.request.request_id)
    }
}

/// The key that distinguishes the requests of all peers.
type InquiryKey = (SocketAddr, u32);

/// A listener for messages.
#[derive(Debug)]
struct Service {
    backlog: u32,
    /// Requests that the program has not taken.
    unread: u32,
}

/// The membership of an id in a multicast group.
#[derive(Debug)]
struct Membership {
    id: u32,
    /// The program's cookie of the membership.
    uid: u64,
    /// The number of its events that the program took.
    reported: u32,
}

/// A UDP port to which ids are bound: at most one of each port space, or several with different
/// addresses.
#[derive(Debug)]
struct Place {
    local: SocketAddr,
    ipv6_only: bool,
    /// With several devices, one for each address.
    numbers: Vec<u32>,
    /// The ids.
    holders: Vec<u32>,
}

/// The state that the ids with UDP ports of a process share.
#[derive(Debug, Default)]
struct Datagrams {
    /// The UDP ports from which ids without a port send queries, by device.
    common_ports: HashMap<u32, u32>,
    /// The bound ports, by the first of their numbers.
    places: HashMap<u32, Place>,
    /// The first number of the bound port that has a number.
    firsts: HashMap<u32, u32>,
    /// Ids by the number of their outstanding request.
    lookups: HashMap<u32, u32>,
    /// Ids that look up a TCP port, by UDP port and number of each request that they sent.
    requests: HashMap<(u32, u32), u32>,
    announced: Announced,
    /// Ids that exist because of a peer's request.
    inquiries: HashMap<InquiryKey, u32>,
    memberships: HashMap<u32, Membership>,
    next_membership: u32,
}

/// The options that a `[[peer]]` entry may override.
#[derive(Debug, Clone)]
struct ConnPolicy {
    settings: Settings,
    llp: Llp,
    peer_to_peer: bool,
    strict_rtr: bool,
    strict_depths: bool,
    rnr_grace: Duration,
    /// Local ACK Timeout without `RDMA_OPTION_ID_ACK_TIMEOUT`.
    ack_timeout: u8,
    /// Requests complete when the peer has placed or delivered them.
    delivered: bool,
    /// Ports of connections are not those of TCP.
    own_ports: bool,
}

impl ConnPolicy {
    /// The depths to negotiate for the depths that a program requests. Confirmations of delivery
    /// need a Read: the peer has a [spare one](spare_reads) for them, or at least one is requested.
    fn depths(&self, parameters: &Parameters, spare_read: bool) -> Depths {
        let least = u16::from(self.delivered && !spare_read);
        Depths {
            ird: Some(u16::from(parameters.responder_resources).max(least)),
            ord: Some(u16::from(parameters.initiator_depth).max(least)),
        }
    }

    /// The parameters with which the stream of an id is attached to a queue pair.
    fn attachment(&self, qid: u32, negotiated: Negotiated, parameters: &Parameters, id: &Id) -> Attachment {
        let Depths { ird, ord } = negotiated.depths;
        let requested = u16::from(parameters.initiator_depth);
        let ord = ord.unwrap_or(requested);
        // The program's Reads, and those that the peer accepts in total.
        let (ord, ord_limit) = match (self.delivered, id.spare_read) {
            (false, _) => (ord, 0),
            (true, true) => (ord, ord.saturating_add(1)),
            (true, false) => (ord.min(requested), ord),
        };
        Attachment {
            qid,
            negotiated: Some(negotiated),
            ird: ird.unwrap_or(parameters.responder_resources.into()),
            ord,
            ord_limit,
            delivered: self.delivered,
            terms: Terms::RdmaCm {
                ack_timeout: id.ack_timeout.unwrap_or(self.ack_timeout),
                // This end announced it.
                spare_read: id.known_peer,
                strict_rtr: self.strict_rtr,
                rnr_grace: self.rnr_grace,
            },
        }
    }
}

impl From<&Config> for ConnPolicy {
    fn from(config: &Config) -> ConnPolicy {
        ConnPolicy {
            settings: Settings {
                rtr_frame: config.mpa.rtr_frame,
                max_private_data: MAX_PRIVATE_DATA,
                ..Settings::from(&config.mpa)
            },
            llp: config.llp,
            peer_to_peer: config.mpa.peer_to_peer,
            strict_rtr: config.mpa.strict_rtr,
            strict_depths: config.mpa.strict_depths,
            rnr_grace: config.cm.rnr_grace,
            ack_timeout: config.cm.ack_timeout,
            delivered: config.completion.is_delivered_on_rdma_cm(config.identity),
            own_ports: config.cm.ports.are_own(config.identity),
        }
    }
}

/// The owner of a stream in start-up.
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
    /// The connections of a device with `wire=roce`.
    Adapter(u32),
}

/// All ids of the process.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    /// The kind of device that programs see.
    identity: Identity,
    /// The policy for peers that have no entry in [`Config`].
    default_policy: ConnPolicy,
    max_ird: u8,
    max_ord: u8,
    ids: HashMap<u32, Id>,
    /// Handles that may be used again.
    free: VecDeque<u32>,
    fresh: u32,
    channels: HashMap<u64, VecDeque<Event>>,
    next_channel: u64,
    streams: HashMap<u32, Owner>,
    listeners: HashMap<u32, DeviceListener>,
    /// The ids of attached queue pairs, by device number of the queue pair.
    queue_pairs: HashMap<u32, u32>,
    datagrams: Datagrams,
    adapters: Adapters,
    timers: Timers<Key>,
    random: Random,
    notices: Vec<Notice>,
    lines: Lines,
    peer_lines: PeerLines,
}

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
            adapters: Adapters::default(),
            timers: Timers::default(),
            random: Random::new(seed),
            notices: Vec::new(),
            lines: Lines::default(),
            peer_lines: PeerLines::default(),
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
                        self.request_due(world, sid);
                    }
                    self.close_stream(world, sid, Close::Abort);
                }
                Key::TimeWait(handle) => {
                    self.report_plain(world, handle, CmEvent::TimewaitExit);
                }
                Key::Adapter(device) => self.adapter_due(world, device),
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

    fn id_due(&mut self, world: &mut World<'_>, handle: u32) {
        match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::Connecting(_)) => self.attempt_due(world, handle),
            Some(State::LookingUp(_)) => self.lookup_due(world, handle),
            Some(State::AwaitingRtrFrame(_)) => self.rtr_frame_due(world, handle),
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
    fn close_stream(&mut self, world: &mut World<'_>, sid: u32, how: Close) {
        self.streams.remove(&sid);
        self.timers.set(Key::Stream(sid), None);
        world.device.close(sid, how);
    }

    /// The policy of connections with `peer`.
    fn policy(&self, peer: IpAddr) -> ConnPolicy {
        if self.config.peers.is_empty() {
            self.default_policy.clone()
        } else {
            ConnPolicy::from(&self.config.facing(peer))
        }
    }

    /// A port that is probably free, so that the program can query it before it connects. The port
    /// is in the range from which the kernel also chooses.
    fn pick_port(&mut self) -> u16 {
        32768 + (self.random() % (61000 - 32768)) as u16
    }

    /// A number that others do not guess.
    fn random(&mut self) -> u64 {
        self.random.next()
    }
}

impl<'a> StreamOwner<World<'a>> for Engine {
    fn has_queue_pair(&self, qid: u32) -> bool {
        self.queue_pairs.contains_key(&qid)
    }

    fn has_listener(&self, lid: u32) -> bool {
        self.listeners.contains_key(&lid)
    }

    fn has_stream(&self, sid: u32) -> bool {
        self.streams.contains_key(&sid)
    }

    fn first_fpdu(&mut self, world: &mut World<'a>, qid: u32) {
        let Some(handle) = self.queue_pairs.get(&qid).copied() else {
            return;
        };
        self.notices.push(Notice::Open(qid));
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let State::Opening { params, .. } = &mut id.state {
            let params = std::mem::take(params);
            id.state = State::Connected { qid };
            self.timers.set(Key::Id(handle), None);
            self.accepted_is_established(world, handle, params);
        }
    }

    fn arrived(&mut self, world: &mut World<'a>, lid: u32, sid: u32) {
        self.stream_arrived(world, lid, sid);
    }

    fn connected(&mut self, world: &mut World<'a>, sid: u32, outcome: Result<(), Errno>) {
        self.stream_connected(world, sid, outcome);
    }

    fn received(&mut self, world: &mut World<'a>, sid: u32, bytes: Result<&[u8], Errno>) {
        match self.streams.get(&sid) {
            Some(Owner::Listener(..)) => self.request_received(world, sid, bytes),
            Some(Owner::Early(_)) => {}
            Some(Owner::Id(handle)) => {
                let handle = *handle;
                match self.ids.get(&handle).map(|id| &id.state) {
                    Some(State::Connecting(_)) => self.reply_received(world, handle, bytes),
                    Some(State::AwaitingRtrFrame(_)) => self.rtr_frame_received(world, handle, bytes),
                    // The peer closed the stream, or its queue pair has no peer.
                    Some(State::Exchanged { .. }) => self.exchange_ended(world, handle),
                    _ => {}
                }
            }
            None => {}
        }
    }

    fn closed(&mut self, world: &mut World<'a>, sid: u32) {
        match self.streams.remove(&sid) {
            Some(Owner::Listener(..)) => self.timers.set(Key::Stream(sid), None),
            Some(Owner::Early(handle)) => self.remove_early(handle, sid),
            Some(Owner::Id(handle)) => {
                // The attempt of an id whose Request is not answered fails now.
                let state = self.ids.get(&handle).map(|id| &id.state);
                match state {
                    Some(State::Connecting(_) | State::Answered(_)) => {
                        self.attempt_closed(world, handle);
                    }
                    Some(State::Exchanged { .. }) => self.exchange_ended(world, handle),
                    _ => {}
                }
            }
            None => {}
        }
    }
}
