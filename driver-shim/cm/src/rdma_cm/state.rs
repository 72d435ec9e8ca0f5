//! The state of the connection manager and of its ids, and the device that it acts on.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::io::Errno;
use urnic_wire::mad::MAD_LEN;

use super::abi::DatagramParam;
use super::attempt::Connecting;
use super::command::Parameters;
use super::datagram_state::{Datagrams, Inquiry, Lookup, Service};
use super::policy::ConnPolicy;
use crate::carrier::Carrier;
use crate::mpa_startup::{Accepted, Negotiated, Responder, Time};
use crate::timers::Timers;
use urnic_config::{Config, Identity};

/// Maximum number of ids of a process: librdmacm indexes them with 16 bits.
pub(super) const MAX_IDS: u32 = 0xffff;
/// `RDMA_PS_TCP`, the port space of connections.
pub(super) const PS_TCP: u16 = 0x0106;
/// `RDMA_PS_IB`.
pub(super) const PS_IB: u16 = 0x013f;
/// `RDMA_PS_IPOIB`: for an id with an address of Ethernet, the kernel has no device.
pub(super) const PS_IPOIB: u16 = 0x0002;
/// `RDMA_PS_UDP` and `RDMA_PS_IPOIB`, the port spaces of datagrams.
pub(super) const PS_DATAGRAMS: [u16; 2] = [0x0111, PS_IPOIB];
/// The maximum time that the engine waits for a graceful end.
pub(super) const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The time that an initiator waits if it connects before the program listens: enough for a program
/// between bind and listen.
pub(super) const EARLY_TIMEOUT: Duration = Duration::from_secs(1);
/// The time between the end of a connection and `TIMEWAIT_EXIT`.
pub(super) const TIME_WAIT: Duration = Duration::from_secs(1);

/// The device's stream commands ([`Engine::received`] is called after a receive) and the host's
/// data on addresses and queue pairs.
pub trait Device: Carrier {
    /// Listens, for connections in packets of this traffic class. An unspecified IPv6 address also
    /// means IPv4, unless `ipv6_only`. Returns listener and port.
    fn listen(&mut self, local: SocketAddr, traffic_class: u8, ipv6_only: bool) -> Result<(u32, u16), Errno>;
    /// Stops listening.
    fn unlisten(&mut self, lid: u32);
    /// Begins a connection in packets of this traffic class; [`Engine::connected`] reports the
    /// result.
    fn connect(&mut self, remote: SocketAddr, local: SocketAddr, traffic_class: u8) -> Result<u32, Errno>;
    /// The addresses of both ends of a stream, the local one first.
    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno>;
    /// The source address of packets to `remote`; its port has no meaning.
    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno>;
    /// The index of the GID of an address of this host.
    fn gid_index(&mut self, address: SocketAddr) -> u8;
    /// The number of the queue pair with the verbs number `qpn`, on the device that has the address
    /// `local`.
    fn queue_pair(&mut self, local: SocketAddr, qpn: u32) -> Option<u32>;
    /// The node GUID, in network order, of the device that has the address `local`.
    fn node_guid(&mut self, local: SocketAddr) -> u64;
    /// Whether the program of a RoCE NIC brought the queue pair to RTR or RTS with the attributes
    /// of [`Engine::qp_attributes`], so that it waits for a stream of the connection manager.
    fn awaits_stream(&mut self, qid: u32) -> bool;
    /// Brings a queue pair to RTS and attaches a stream to it.
    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno>;
    /// Makes a queue pair send its posted work and then close.
    fn drain(&mut self, qid: u32);
    /// Puts a queue pair into the error state.
    fn abort(&mut self, qid: u32);
    /// Opens a UDP port for messages to other connection managers. An unspecified IPv6 address also
    /// means IPv4, unless `ipv6_only`. Returns its number and the UDP port;
    /// [`Engine::message_received`] has the messages that arrive there. With several devices, an
    /// unspecified address means a number for each address of all devices.
    fn open_ports(&mut self, local: SocketAddr, ipv6_only: bool) -> Result<(Vec<u32>, u16), Errno>;
    /// Opens a UDP port for such messages on this device, and returns its number.
    fn open_port_of(&mut self, device: u32, local: SocketAddr) -> Result<u32, Errno>;
    /// A number of the device that has the address.
    fn device_of(&mut self, local: SocketAddr) -> Result<u32, Errno>;
    /// Closes a UDP port.
    fn close_port(&mut self, port: u32);
    /// Sends a message from a UDP port and an own address. It may be lost; perhaps
    /// [`Engine::message_refused`] reports this. Returns the message's number at the port.
    fn send_message(
        &mut self,
        port: u32,
        local: IpAddr,
        remote: SocketAddr,
        traffic_class: u8,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno>;
    /// Sets whether a channel has events.
    fn signal(&mut self, channel: u64, events: bool);
}

/// The parameters with which a queue pair is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// The queue pair's number.
    pub qid: u32,
    /// The result of MPA start-up.
    pub negotiated: Negotiated,
    /// Maximum number of inbound Reads.
    pub ird: u16,
    /// Maximum number of outbound Reads.
    pub ord: u16,
    /// The Local ACK Timeout: `RDMA_OPTION_ID_ACK_TIMEOUT`, or the default.
    pub ack_timeout: u8,
    /// Only the negotiated RTR message opens the fence.
    pub strict_rtr: bool,
    /// The maximum time that a Send waits for a posted receive.
    pub rnr_grace: Duration,
    /// Requests complete when the peer has placed or delivered them.
    pub delivered: bool,
}

/// The time and the device during a call of the engine.
pub struct World<'a> {
    /// The current time.
    pub now: Time,
    /// The device's streams and queue pairs.
    pub device: &'a mut dyn Device,
}

/// A request to the driver concerning a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The queue pair may send: open the gate.
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
    /// `RDMA_CM_EVENT_MULTICAST_JOIN`.
    MulticastJoin = 12,
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
#[derive(Debug, Clone, Default)]
pub(super) struct EventParams {
    pub(super) private_data: Vec<u8>,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// Where datagrams go.
    pub(super) datagrams: Option<DatagramParam>,
}

/// An event that the program has not taken.
#[derive(Debug)]
pub(super) struct Event {
    /// The id that has the event.
    pub(super) id: u32,
    /// The id that the event names: a new id, for a Request; or the membership.
    pub(super) about: u32,
    pub(super) kind: CmEvent,
    pub(super) status: i32,
    pub(super) params: EventParams,
    /// The membership of a multicast group that the event is about.
    pub(super) membership: Option<u32>,
}

/// An id.
#[derive(Debug)]
pub(super) struct Id {
    pub(super) channel: u64,
    /// The program's cookie of the id; 0 until a new id is accepted.
    pub(super) uid: u64,
    pub(super) port_space: u16,
    /// The number of events that the program took: destroying the id waits until the program
    /// acknowledged as many.
    pub(super) reported: u32,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    /// The engine picked the local port; the program did not choose it.
    pub(super) picked: bool,
    /// The listener that holds the local port until the id connects.
    pub(super) held: Option<u32>,
    /// librdmacm manages the queue pair of the id: it queried the attributes before connecting.
    pub(super) manages_qp: bool,
    pub(super) ack_timeout: Option<u8>,
    /// `RDMA_OPTION_ID_TOS`.
    pub(super) traffic_class: u8,
    /// `RDMA_OPTION_ID_AFONLY`.
    pub(super) one_family: bool,
    /// The UDP ports of an id that is bound, unless its port is that of TCP: with several devices,
    /// one for each address.
    pub(super) ports: Vec<u32>,
    /// The TCP port of a bound id that has UDP ports.
    pub(super) stream_port: Option<u16>,
    /// The Q_Key of an id for datagrams; 0: not set.
    pub(super) qkey: u32,
    pub(super) state: State,
}

impl Id {
    /// An idle id without a cookie.
    pub(super) fn new(channel: u64, port_space: u16) -> Id {
        Id {
            channel,
            uid: 0,
            port_space,
            reported: 0,
            local: None,
            remote: None,
            picked: false,
            held: None,
            manages_qp: false,
            ack_timeout: None,
            traffic_class: 0,
            one_family: false,
            ports: Vec::new(),
            stream_port: None,
            qkey: 0,
            state: State::Idle,
        }
    }

    /// Whether the id is for datagrams.
    pub(super) fn is_for_datagrams(&self) -> bool {
        PS_DATAGRAMS.contains(&self.port_space)
    }
}

#[derive(Debug)]
pub(super) enum State {
    Idle,
    Bound {
        /// The listener that holds the TCP port, if the id has one.
        lid: Option<u32>,
        /// Streams that arrived before the id listened, oldest first.
        early: VecDeque<u32>,
    },
    AddressResolved,
    RouteResolved,
    Listening(Box<Listener>),
    /// A listener for datagrams.
    Serving(Service),
    /// The peer was asked for its queue pair, or for the TCP port of a listener.
    LookingUp(Box<Lookup>),
    /// A peer's request for a queue pair, which the program must answer.
    Asked(Box<Inquiry>),
    /// Both ends know each other's queue pairs, or know that they will not; with the request that
    /// was answered.
    Associated(Option<Box<Inquiry>>),
    /// TCP connects, or the Reply is due.
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
pub(super) struct Answered {
    pub(super) sid: u32,
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
    /// Streams that the engine has not examined, oldest first. The device holds back further
    /// streams.
    pub(super) waiting: VecDeque<u32>,
    /// Streams whose Request is due, oldest first; some may be closed.
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
pub(super) struct AwaitingRtrFrame {
    pub(super) sid: u32,
    pub(super) responder: Box<Responder>,
    /// The queue pair that the stream will be attached to; `None`: to none.
    pub(super) qid: Option<u32>,
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
    /// The kind of device that programs see.
    pub(super) identity: Identity,
    /// The policy for peers that have no entry in [`Config`].
    pub(super) default_policy: ConnPolicy,
    pub(super) max_ird: u8,
    pub(super) max_ord: u8,
    pub(super) ids: HashMap<u32, Id>,
    /// Handles that may be used again.
    pub(super) free: VecDeque<u32>,
    pub(super) fresh: u32,
    pub(super) channels: HashMap<u64, VecDeque<Event>>,
    pub(super) next_channel: u64,
    pub(super) streams: HashMap<u32, Owner>,
    pub(super) listeners: HashMap<u32, u32>,
    /// The ids of attached queue pairs, by device number of the queue pair.
    pub(super) queue_pairs: HashMap<u32, u32>,
    pub(super) datagrams: Datagrams,
    pub(super) timers: Timers<Key>,
    pub(super) random: u64,
    pub(super) notices: Vec<Notice>,
}
