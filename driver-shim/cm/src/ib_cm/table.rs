//! The connections of one end, by their numbers at both ends, and how many there may be.

use std::collections::HashMap;
use std::net::IpAddr;

use urnic_wire::mad::CommIds;

use super::connection::{Connection, Remote, State};
use super::peer::{Numbered, Route};
use super::settings::Limits;

/// How many there are of each address.
#[derive(Debug, Default)]
struct Counts {
    total: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Counts {
    fn of(&self, address: IpAddr) -> usize {
        self.by_address.get(&address).copied().unwrap_or(0)
    }

    fn add(&mut self, address: IpAddr) {
        self.total += 1;
        *self.by_address.entry(address).or_default() += 1;
    }

    fn remove(&mut self, address: IpAddr) {
        if let Some(number) = self.by_address.get_mut(&address) {
            self.total -= 1;
            *number -= 1;
            if *number == 0 {
                self.by_address.remove(&address);
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Table {
    limits: Limits,
    connections: HashMap<u32, Connection>,
    /// By the peer's number: finds repeated REQs.
    by_remote_id: HashMap<Numbered, u32>,
    /// By the peer's queue pair: finds stale connections. Without those in TimeWait.
    by_remote_qp: HashMap<Numbered, u32>,
    per_peer: Counts,
    /// Connections in the state [`State::ReqRcvd`].
    undecided: Counts,
}

impl Table {
    pub(super) fn new(limits: Limits) -> Table {
        Table {
            limits,
            connections: HashMap::new(),
            by_remote_id: HashMap::new(),
            by_remote_qp: HashMap::new(),
            per_peer: Counts::default(),
            undecided: Counts::default(),
        }
    }

    /// Whether one more connection with a peer is within the limits.
    pub(super) fn has_room(&self, peer: IpAddr) -> bool {
        self.connections.len() < self.limits.connections && self.per_peer.of(peer) < self.limits.per_peer
    }

    /// Whether one more request of a peer may wait for its program.
    pub(super) fn has_room_for_undecided(&self, peer: IpAddr) -> bool {
        let of_peer = self.undecided.of(peer);
        self.undecided.total < self.limits.undecided && of_peer < self.limits.undecided_per_peer
    }

    pub(super) fn get(&self, id: u32) -> Option<&Connection> {
        self.connections.get(&id)
    }

    /// A connection. Its state and its peer's numbers are changed by [`enter`](Self::enter) and
    /// [`learn`](Self::learn).
    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut Connection> {
        self.connections.get_mut(&id)
    }

    /// The connection that a message of the peer is about.
    pub(super) fn find(&mut self, route: Route, ids: CommIds) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(&ids.remote)?;
        connection.is_between(route, ids).then_some(connection)
    }

    /// The connection that awaits the answer to its REQ. Its peer has not told its number yet.
    pub(super) fn find_requested(&mut self, route: Route, id: u32) -> Option<&mut Connection> {
        let connection = self.connections.get_mut(&id)?;
        (connection.route == route && connection.state == State::ReqSent).then_some(connection)
    }

    /// The connection that has this number at its peer.
    pub(super) fn with_remote_id(&self, remote_id: &Numbered) -> Option<u32> {
        self.by_remote_id.get(remote_id).copied()
    }

    /// The connection of this queue pair of a peer.
    pub(super) fn with_remote_qp(&self, remote_qp: &Numbered) -> Option<u32> {
        self.by_remote_qp.get(remote_qp).copied()
    }

    /// Adds a connection; its number is unused.
    pub(super) fn insert(&mut self, connection: Connection) {
        let id = connection.comm_id;
        let peer = connection.route.remote;
        self.per_peer.add(peer);
        if connection.state == State::ReqRcvd {
            self.undecided.add(peer);
        }
        self.index(&connection);
        self.connections.insert(id, connection);
    }

    /// The peer of a connection told its numbers.
    pub(super) fn learn(&mut self, id: u32, remote: Remote) {
        let Some(mut connection) = self.connections.remove(&id) else {
            return;
        };
        self.unindex(&connection);
        connection.remote = Some(remote);
        self.index(&connection);
        self.connections.insert(id, connection);
    }

    /// A connection changes its state.
    pub(super) fn enter(&mut self, id: u32, state: State) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let peer = connection.route.remote;
        match (connection.state == State::ReqRcvd, state == State::ReqRcvd) {
            (true, false) => self.undecided.remove(peer),
            (false, true) => self.undecided.add(peer),
            _ => {}
        }
        connection.state = state;
        if state == State::TimeWait
            && let Some(remote_qp) = connection.remote_qp()
            && self.by_remote_qp.get(&remote_qp) == Some(&id)
        {
            self.by_remote_qp.remove(&remote_qp);
        }
    }

    pub(super) fn remove(&mut self, id: u32) -> Option<Connection> {
        let connection = self.connections.remove(&id)?;
        let peer = connection.route.remote;
        self.per_peer.remove(peer);
        if connection.state == State::ReqRcvd {
            self.undecided.remove(peer);
        }
        self.unindex(&connection);
        Some(connection)
    }

    fn index(&mut self, connection: &Connection) {
        let id = connection.comm_id;
        if let Some(remote_id) = connection.remote_id() {
            self.by_remote_id.insert(remote_id, id);
        }
        if let Some(remote_qp) = connection.remote_qp() {
            self.by_remote_qp.insert(remote_qp, id);
        }
    }

    /// A newer connection may have the same numbers after this one went to TimeWait: then the entry
    /// is the newer one's.
    fn unindex(&mut self, connection: &Connection) {
        let id = connection.comm_id;
        if let Some(remote_id) = connection.remote_id()
            && self.by_remote_id.get(&remote_id) == Some(&id)
        {
            self.by_remote_id.remove(&remote_id);
        }
        if let Some(remote_qp) = connection.remote_qp()
            && self.by_remote_qp.get(&remote_qp) == Some(&id)
        {
            self.by_remote_qp.remove(&remote_qp);
        }
    }

    /// The number of connections, and that of entries in each index, for tests of leaks.
    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, [usize; 4]) {
        let counted = |counts: &Counts| counts.by_address.values().sum();
        let indices = [
            self.by_remote_id.len(),
            self.by_remote_qp.len(),
            counted(&self.per_peer),
            counted(&self.undecided),
        ];
        (self.connections.len(), indices)
    }
}
