//! The ids of a process, as `rdma res show cm_id` lists them.

use std::net::SocketAddr;

use super::{Engine, State};

/// An id in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedId {
    /// The number by which the program names it.
    pub handle: u32,
    /// `enum rdma_ucm_port_space`.
    pub port_space: u16,
    /// `enum rdma_cm_state` of the kernel.
    pub state: u8,
    /// Our end.
    pub local: Option<SocketAddr>,
    /// The peer's end.
    pub remote: Option<SocketAddr>,
    /// Device number of its queue pair, once they are connected.
    pub qid: Option<u32>,
}

/// `enum rdma_cm_state`.
mod kernel {
    pub(super) const IDLE: u8 = 0;
    pub(super) const ADDR_RESOLVED: u8 = 2;
    pub(super) const ROUTE_RESOLVED: u8 = 4;
    pub(super) const CONNECT: u8 = 5;
    pub(super) const DISCONNECT: u8 = 6;
    pub(super) const ADDR_BOUND: u8 = 7;
    pub(super) const LISTEN: u8 = 8;
}

impl Engine {
    /// All ids.
    pub fn listed(&self) -> Vec<ListedId> {
        let listed = self.ids.iter().map(|(&handle, id)| ListedId {
            handle,
            port_space: id.port_space,
            state: match &id.state {
                State::ByMessages(of) if self.is_over(*of) => kernel::DISCONNECT,
                other => state(other),
            },
            local: id.local,
            remote: id.remote,
            qid: match &id.state {
                State::Opening { qid, .. } | State::Connected { qid } | State::Closing { qid } => Some(*qid),
                State::ByMessages(of) => of.qid,
                _ => None,
            },
        });
        listed.collect()
    }
}

fn state(state: &State) -> u8 {
    match state {
        State::Idle => kernel::IDLE,
        State::Bound { .. } => kernel::ADDR_BOUND,
        State::AddressResolved => kernel::ADDR_RESOLVED,
        State::RouteResolved => kernel::ROUTE_RESOLVED,
        State::Listening(_) | State::Serving(_) => kernel::LISTEN,
        State::LookingUp(_)
        | State::Asked(_)
        | State::ByMessages(_)
        | State::Associated(_)
        | State::Connecting(_)
        | State::Answered(_)
        | State::Requested { .. }
        | State::AwaitingRtrFrame(_)
        | State::Opening { .. }
        | State::Connected { .. }
        | State::Exchanged { .. } => kernel::CONNECT,
        State::Closing { .. } | State::Over => kernel::DISCONNECT,
    }
}
