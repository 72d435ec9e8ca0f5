//! The state of the connection manager and of its ids, and the device that it acts on.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use super::command::Parameters;
use super::policy::ConnPolicy;
use crate::carrier::Carrier;
use crate::mpa_startup::{Accepted, Initiator, Negotiated, Responder, Time};
use crate::timers::Timers;
use urnic_config::Config;

/// Ids that a process may have: librdmacm indexes them with 16 bits.
pub(super) const MAX_IDS: u32 = 0xffff;
/// `RDMA_PS_TCP`, the port space of connections.
pub(super) const PS_TCP: u16 = 0x0106;
/// `RDMA_PS_IB`.
pub(super) const PS_IB: u16 = 0x013f;
/// `RDMA_PS_UDP` and `RDMA_PS_IPOIB`, the port spaces of datagrams.
pub(super) const PS_DATAGRAMS: [u16; 2] = [0x0111, 0x0002];
/// A graceful end that takes longer is not waited for.
pub(super) const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// An initiator that connects before the program listens waits for this long: enough for a program
/// between bind and listen.
pub(super) const EARLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Between the end of a connection and `TIMEWAIT_EXIT`.
pub(super) const TIME_WAIT: Duration = Duration::from_secs(1);

/// The device's stream commands ([`Engine::received`] follows a receive) and what the host knows of
/// addresses and queue pairs.
pub trait Device: Carrier {
    /// Listens, for connections in packets of this traffic class; an unspecified IPv6 address means
    /// IPv4 too, unless `ipv6_only`. Returns listener and port.
    fn listen(&mut self, local: SocketAddr, traffic_class: u8, ipv6_only: bool) -> Result<(u32, u16), Errno>;
    /// Stops listening.
    fn unlisten(&mut self, lid: u32);
    /// Begins a connection in packets of this traffic class; [`Engine::connected`] follows.
    fn connect(&mut self, remote: SocketAddr, local: SocketAddr, traffic_class: u8) -> Result<u32, Errno>;
    /// Both ends of a stream, ours first.
    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno>;
    /// The address that packets to `remote` leave from; its port means nothing.
    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno>;
    /// The device's number of the queue pair with the verbs number `qpn`.
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

/// The time and the device during a call of the engine.
pub struct World<'a> {
    /// The time.
    pub now: Time,
    /// The device's streams and queue pairs.
    pub device: &'a mut dyn Device,
}

/// A finding of the engine about a queue pair.
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
    /// The event and status of a failed attempt (`cma_iw_handler` of the kernel).
    pub(super) fn of_failure(errno: Errno) -> (CmEvent, i32) {
        let kind = match errno {
            Errno::CONNREFUSED | Errno::CONNRESET => CmEvent::Rejected,
            Errno::TIMEDOUT => CmEvent::Unreachable,
            _ => CmEvent::ConnectError,
        };
        (kind, -errno.raw_os_error())
    }
}

/// The peer's parameters in an event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct EventParams {
    pub(super) private_data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

/// An event that the program has not taken.
#[derive(Debug)]
pub(super) struct Event {
    /// The id that has the event.
    pub(super) id: u32,
    /// The id that the event names: a new one, for a Request.
    pub(super) about: u32,
    pub(super) kind: CmEvent,
    pub(super) status: i32,
    pub(super) params: EventParams,
}

/// An id.
#[derive(Debug)]
pub(super) struct Id {
    pub(super) channel: u64,
    /// The program's name for it; 0 until a new id is accepted.
    pub(super) uid: u64,
    pub(super) port_space: u16,
    /// Events that the program took: it is waited for until it acknowledged as many.
    pub(super) reported: u32,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    /// The local port is one of ours, not the program's choice.
    pub(super) picked: bool,
    /// The listener that holds the local port until the id connects.
    pub(super) held: Option<u32>,
    /// librdmacm manages its queue pair: it asked for the attributes before connecting.
    pub(super) manages_qp: bool,
    pub(super) ack_timeout: Option<u8>,
    /// `RDMA_OPTION_ID_TOS`.
    pub(super) traffic_class: u8,
    /// `RDMA_OPTION_ID_AFONLY`.
    pub(super) one_family: bool,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) enum State {
    Idle,
    Bound {
        /// `None` where there is no TCP port to hold.
        lid: Option<u32>,
        /// Streams that arrived before the id listened, oldest first.
        early: VecDeque<u32>,
    },
    AddressResolved,
    RouteResolved,
    Listening(Box<Listener>),
    /// TCP connects, or the Reply is due.
    Connecting(Box<Connecting>),
    /// Accepted, and the program has yet to bring its queue pair along.
    Answered(Box<Answered>),
    /// A Request that the program has to answer.
    Requested {
        sid: u32,
        responder: Box<Responder>,
        params: EventParams,
    },
    /// Accepted; the RTR frame of 2007 is due.
    Framing(Box<Framing>),
    /// Accepted; the RTR message is due.
    Opening {
        qid: u32,
        params: EventParams,
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

/// A connection attempt in progress.
#[derive(Debug)]
pub(super) struct Connecting {
    pub(super) sid: u32,
    pub(super) qid: u32,
    pub(super) parameters: Parameters,
    /// TCP chose another port than the id has.
    pub(super) other_port: bool,
    /// RFC 6581; the second try does without (§10 there).
    pub(super) enhanced: bool,
    /// The Reply is due; `None`: TCP connects.
    pub(super) initiator: Option<Box<Initiator>>,
    pub(super) deadline: Time,
}

/// A connection attempt that the peer accepted.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) sid: u32,
    pub(super) qid: u32,
    pub(super) parameters: Parameters,
    pub(super) accepted: Accepted,
}

/// A listener.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) lid: u32,
    pub(super) backlog: u32,
    /// Requests that the program has not taken.
    pub(super) unread: u32,
    /// Streams that were not looked at, oldest first. The device holds back further ones.
    pub(super) waiting: VecDeque<u32>,
    /// Streams whose Request is due, oldest first; some may be gone.
    pub(super) starting: VecDeque<u32>,
}

impl Listener {
    pub(super) fn new(lid: u32, backlog: u32, waiting: VecDeque<u32>) -> Listener {
        Listener {
            lid,
            backlog,
            unread: 0,
            waiting,
            starting: VecDeque::new(),
        }
    }
}

/// An accepted request whose RTR frame is due.
#[derive(Debug)]
pub(super) struct Framing {
    pub(super) sid: u32,
    pub(super) responder: Box<Responder>,
    pub(super) qid: u32,
    pub(super) parameters: Parameters,
    pub(super) params: EventParams,
}

/// The owner of a stream in start-up.
#[derive(Debug)]
pub(super) enum Owner {
    Id(u32),
    /// A bound id that does not listen yet.
    Early(u32),
    /// The Request is due.
    Listener(u32, Box<Responder>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Key {
    Id(u32),
    Stream(u32),
    TimeWait(u32),
}

/// All ids of the process.
#[derive(Debug)]
pub struct Engine {
    pub(super) config: Config,
    /// The policy for peers without an entry of their own in [`Config`].
    pub(super) usual: ConnPolicy,
    pub(super) max_ird: u8,
    pub(super) max_ord: u8,
    pub(super) ids: HashMap<u32, Id>,
    /// Handles to use again.
    pub(super) free: VecDeque<u32>,
    pub(super) fresh: u32,
    pub(super) channels: HashMap<u64, VecDeque<Event>>,
    pub(super) next_channel: u64,
    pub(super) streams: HashMap<u32, Owner>,
    pub(super) listeners: HashMap<u32, u32>,
    /// By device number, those that are attached.
    pub(super) queue_pairs: HashMap<u32, u32>,
    pub(super) timers: Timers<Key>,
    pub(super) random: u64,
    pub(super) notices: Vec<Notice>,
}
