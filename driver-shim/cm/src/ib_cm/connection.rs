//! One connection: its state, its numbers, and the attributes of its queue pair.

use std::fmt;
use std::time::Duration;

use urnic_device::vocabulary::QpState;
use urnic_wire::mad::{CommIds, Mad};

use super::peer::{Numbered, Route};
use crate::qp_attr::{QpAttr, QpMask};

/// The state of a connection (§12.9.5 of the InfiniBand Architecture Specification, volume 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Active: the REQ is sent. An MRA may have prolonged the wait.
    ReqSent,
    /// Passive: the program decides. Repeated REQs are answered by MRAs.
    ReqRcvd,
    /// Passive: the REP is sent. An MRA may have prolonged the wait.
    RepSent,
    /// Active: the program makes its queue pair ready. Repeated REPs are answered by MRAs.
    RepRcvd,
    /// Both ends may send.
    Established,
    /// The DREQ is sent.
    DreqSent,
    /// Packets of the ended connection may still arrive.
    TimeWait,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::ReqSent => "REQ sent",
            State::ReqRcvd => "REQ received",
            State::RepSent => "REP sent",
            State::RepRcvd => "REP received",
            State::Established => "established",
            State::DreqSent => "DREQ sent",
            State::TimeWait => "time wait",
        })
    }
}

/// The peer's end, as far as its messages told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) comm_id: u32,
    pub(super) ca_guid: u64,
    pub(super) qpn: u32,
    /// The first PSN that this end sends.
    pub(super) psn: u32,
}

/// What of the queue pair's attributes a connection determines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) path_mtu: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) ack_timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
}

/// How often, and after which time, a message is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Repetition {
    pub(super) interval: Duration,
    pub(super) times: u8,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) route: Route,
    pub(super) state: State,
    pub(super) comm_id: u32,
    /// The program's queue pair; 0 until it accepts.
    pub(super) qpn: u32,
    /// The first PSN that the peer sends.
    pub(super) psn: u32,
    /// `None` until the REP arrives.
    pub(super) remote: Option<Remote>,
    pub(super) agreed: Agreed,
    /// The transaction of the REQ, in all messages until the connection is established.
    pub(super) transaction_id: u64,
    /// The REQ, REP or DREQ that awaits an answer; an established active end's RTU.
    pub(super) last: Option<Mad>,
    pub(super) repetition: Repetition,
    /// Repetitions of `last` that are left.
    pub(super) left: u8,
    /// An MRA prolonged the wait since `last` was sent. Another one has no effect until the message
    /// is repeated, so that the wait ends.
    pub(super) prolonged: bool,
    /// Alternate paths are not supported, and the peer named one.
    pub(super) alternate_path: bool,
    /// The program still has the connection, and gets its events.
    pub(super) held: bool,
}

impl Connection {
    /// The numbers in messages of this end; 0 for a number that the peer has not told.
    pub(super) fn ids(&self) -> CommIds {
        CommIds {
            local: self.comm_id,
            remote: self.remote.map_or(0, |remote| remote.comm_id),
        }
    }

    /// The peer's number of the connection.
    pub(super) fn remote_id(&self) -> Option<Numbered> {
        self.remote.map(|remote| Numbered {
            peer: self.route.remote,
            ca_guid: remote.ca_guid,
            number: remote.comm_id,
        })
    }

    /// The peer's queue pair.
    pub(super) fn remote_qp(&self) -> Option<Numbered> {
        self.remote.map(|remote| Numbered {
            peer: self.route.remote,
            ca_guid: remote.ca_guid,
            number: remote.qpn,
        })
    }

    /// Whether a message with these numbers and addresses is one of the peer about this connection.
    pub(super) fn is_between(&self, route: Route, ids: CommIds) -> bool {
        self.route == route
            && self.comm_id == ids.remote
            && self.remote.is_some_and(|remote| remote.comm_id == ids.local)
    }

    /// The attributes with which the program brings its queue pair to RTR. The owner adds the
    /// address vector.
    pub(super) fn rtr(&self) -> Option<(QpAttr, QpMask)> {
        let remote = self.remote.filter(|_| self.may_transfer())?;
        let attr = QpAttr {
            state: QpState::Rtr as u32,
            path_mtu: self.agreed.path_mtu.into(),
            dest_qpn: remote.qpn,
            rq_psn: self.psn,
            max_dest_rd_atomic: self.agreed.responder_resources,
            ..QpAttr::default()
        };
        Some((attr, QpMask::RTR_OF_CHANNEL_ADAPTER))
    }

    /// The attributes with which the program brings its queue pair to RTS.
    pub(super) fn rts(&self) -> Option<(QpAttr, QpMask)> {
        let remote = self.remote.filter(|_| self.may_transfer())?;
        let attr = QpAttr {
            state: QpState::Rts as u32,
            sq_psn: remote.psn,
            timeout: self.agreed.ack_timeout,
            retry_cnt: self.agreed.retry_count,
            rnr_retry: self.agreed.rnr_retry_count,
            max_rd_atomic: self.agreed.initiator_depth,
            ..QpAttr::default()
        };
        Some((attr, QpMask::RTS_OF_CHANNEL_ADAPTER))
    }

    fn may_transfer(&self) -> bool {
        !matches!(self.state, State::DreqSent | State::TimeWait)
    }
}
