//! The state of ids for datagrams: lookups of a peer's queue pair, and memberships of multicast
//! groups.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use urnic_wire::mad::{MAD_LEN, ServiceRequest};

use super::attempt::Connecting;
use crate::mpa_startup::Time;

/// `RDMA_UDP_QKEY`: the Q_Key of all queue pairs of rdma_cm.
pub(super) const UDP_QKEY: u32 = 0x0123_4567;
/// The time after which the first request is repeated. Each further time is twice as long.
pub(super) const FIRST_INTERVAL: Duration = Duration::from_millis(250);
/// The longest time between two requests: that of the kernel.
pub(super) const MAX_INTERVAL: Duration = Duration::from_millis(4096);

/// The addresses of a message that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The own address that the message was sent to.
    pub local: IpAddr,
    /// The sender's address, and the UDP port that it sent from.
    pub remote: SocketAddr,
}

/// A lookup at a peer in progress: the request is repeated until a reply comes.
#[derive(Debug)]
pub(super) struct Lookup {
    /// The connection for which the peer's TCP port is looked up; `None`: a queue pair is.
    pub(super) connecting: Option<Box<Connecting>>,
    /// The number of requests.
    pub(super) attempts: usize,
    /// The numbers of those that were sent.
    pub(super) sent: Vec<u32>,
    /// The UDP port from which the peer is asked.
    pub(super) port: u32,
    pub(super) request_id: u32,
    pub(super) transaction_id: u64,
    pub(super) request: [u8; MAD_LEN],
    /// The time until the next repetition.
    pub(super) interval: Duration,
    pub(super) deadline: Time,
}

/// Requests for a TCP port without a reply, after which that of the service's number is tried.
const REQUESTS: usize = 3;

impl Lookup {
    /// Whether the peer seems to know no such requests.
    pub(super) fn is_silent(&self) -> bool {
        self.connecting.is_some() && self.attempts >= REQUESTS
    }
}

/// A request of a peer for a queue pair.
#[derive(Debug)]
pub(super) struct Inquiry {
    /// The UDP port of the listener.
    pub(super) port: u32,
    pub(super) arrival: Arrival,
    pub(super) transaction_id: u64,
    pub(super) request: ServiceRequest,
    /// The reply, once the program gave it: it is repeated if the request is.
    pub(super) reply: Option<[u8; MAD_LEN]>,
}

impl Inquiry {
    pub(super) fn key(&self) -> InquiryKey {
        (self.arrival.remote, self.request.request_id)
    }
}

/// What distinguishes the requests of all peers.
pub(super) type InquiryKey = (SocketAddr, u32);

/// A listener for datagrams.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) backlog: u32,
    /// Requests that the program has not taken.
    pub(super) unread: u32,
}

/// The membership of an id in a multicast group.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) id: u32,
    /// The program's cookie of the membership.
    pub(super) uid: u64,
    /// The number of its events that the program took.
    pub(super) reported: u32,
}

/// A UDP port to which ids are bound: at most one of each port space, or several with different
/// addresses.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) local: SocketAddr,
    pub(super) ipv6_only: bool,
    /// With several devices, one for each address.
    pub(super) numbers: Vec<u32>,
    /// The ids.
    pub(super) holders: Vec<u32>,
}

/// What the ids with UDP ports of a process share.
#[derive(Debug, Default)]
pub(super) struct Datagrams {
    /// The UDP ports from which ids ask that have none, by device.
    pub(super) common_ports: HashMap<u32, u32>,
    /// The bound ports, by the first of their numbers.
    pub(super) places: HashMap<u32, Place>,
    /// The first number of the bound port that has a number.
    pub(super) firsts: HashMap<u32, u32>,
    /// Ids by the number of their outstanding request.
    pub(super) lookups: HashMap<u32, u32>,
    /// Ids that look up a TCP port, by UDP port and number of each request that they sent.
    pub(super) requests: HashMap<(u32, u32), u32>,
    /// Ids that exist because of a peer's request.
    pub(super) inquiries: HashMap<InquiryKey, u32>,
    pub(super) memberships: HashMap<u32, Membership>,
    pub(super) next_membership: u32,
}
