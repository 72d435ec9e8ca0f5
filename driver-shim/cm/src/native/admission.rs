//! The admission check of a queue pair: it accepts a Request only from the address of the peer
//! named at RTR, and only with the PSNs that the two programs exchanged.
//!
//! *Address.* TCP gives the source of a stream. The source must be the named peer's, unless
//! `native.allow_nat` is set. Other processes of the peer's host pass this check.
//!
//! *PSNs.* At RTS both ends have both PSNs: 48 bits, too many to guess. At RTR the queue pair has
//! only the PSN that it expects, 24 bits: it examines few wrong Requests, and rejects the others
//! unexamined. To reach the right peer nevertheless, the queue pair initiates a connection after
//! each Request that it rejects unexamined. That connection goes to a port that only the peer has.
//! If the Request on that connection is a nudge, the peer's own Request repeats the nonce, and is
//! examined in any case.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::identity::Reason;
use super::state::{Engine, MAX_PARKED_EACH, Pair, Phase, Startup};
use super::streams::World;

impl Engine {
    /// Checks whether a queue pair accepts a Request; an error is the reason of the rejection.
    pub(super) fn examine(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) -> Result<(), Reason> {
        let Some(Startup::Unanswered { peer, ends, .. }) = self.streams.get(&sid) else {
            return Err(Reason::Closed);
        };
        let (peer, ends) = (*peer, *ends);
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return Err(Reason::Unknown);
        };
        let connecting = match &mut pair.phase {
            Phase::Connecting(connecting) => connecting,
            Phase::Connected { .. } => return Err(Reason::Connected),
            Phase::Idle => return Err(Reason::Busy),
            Phase::Closed => return Err(Reason::Closed),
        };
        let local = connecting.identity(qpn, 0);
        if !local.names(&peer) {
            return Err(Reason::OtherPeer);
        }
        let streams = &mut *world.streams;
        if !self.allow_nat
            && !connecting
                .params
                .peer
                .is_at(&ends, |address| streams.is_own(address))
        {
            if let Some(count) = pair.mismatches.count(world.now, false) {
                tracing::warn!(
                    "qp {qpn:#08x}: refused a connection from {}, since the peer named in ibv_modify_qp is at {} \
                     ({count} requests refused for this qp so far); if an address is translated on the way, set native.allow_nat=true",
                    ends.remote.ip(),
                    connecting.params.peer.address.ip(),
                );
            }
            self.initiate_early(world, qpn);
            return Err(Reason::Address);
        }
        if peer.sq_psn.is_none() {
            if local.sq_psn == Some(peer.rq_psn) {
                connecting.ticket = Some(peer.nonce);
            }
            self.initiate_early(world, qpn);
            return Err(Reason::Busy);
        }
        let has_ticket = connecting.nudge.is_some() && peer.ticket == connecting.nudge;
        let unexamined = local.sq_psn.is_none() && !has_ticket && pair.mismatches.are_exhausted(world.now);
        if !unexamined && local.matches(&peer) {
            return Ok(());
        }
        if let Some(count) = pair.mismatches.count(world.now, !unexamined) {
            tracing::warn!(
                "qp {qpn:#08x}: refused a connection from {}: its PSNs are not those that ibv_modify_qp was given \
                 ({count} requests refused for this qp so far)",
                ends.remote
            );
        }
        if !unexamined {
            return Err(Reason::OtherPeer);
        }
        self.initiate_early(world, qpn);
        Err(Reason::Busy)
    }

    /// Initiates a connection without waiting for the peer's Request, at RTS at the latest. The
    /// number of attempts stays the same: only the first attempt is earlier.
    pub(super) fn initiate_early(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        pair.connect_at_rts = true;
        if let Phase::Connecting(connecting) = &mut pair.phase
            && connecting.attempts == 0
            && connecting.stream.is_none()
            && connecting.next_attempt > world.now
        {
            connecting.next_attempt = world.now;
            connecting.rts_until = None;
            self.attempt_if_due(world, qpn);
        }
    }

    /// Rejects parked Requests beyond the limits, for `qpn` and for the process: the oldest Request
    /// of the network with the most Requests, so that no network occupies all places.
    pub(super) fn make_room(&mut self, world: &mut World<'_>, qpn: u32) {
        let for_pair = |pair: &Pair| pair.parked.iter().copied().collect::<Vec<u32>>();
        if let Some(pair) = self.pairs.get(&qpn)
            && pair.parked.len() > MAX_PARKED_EACH
            && let Some(sid) = self.oldest_of_largest_network(for_pair(pair))
        {
            self.refuse_parked(world, sid);
        }
        if self.parked > self.max_parked
            && let Some(sid) =
                self.oldest_of_largest_network(self.pairs.values().flat_map(for_pair).collect())
        {
            self.refuse_parked(world, sid);
        }
    }

    /// The oldest parked Request of the network that has the most parked Requests.
    fn oldest_of_largest_network(&self, sids: Vec<u32>) -> Option<u32> {
        let mut networks: HashMap<IpAddr, (usize, Reverse<u64>, u32)> = HashMap::new();
        for sid in sids {
            let Some(Startup::Unanswered { ends, order, .. }) = self.streams.get(&sid) else {
                continue;
            };
            let group = networks
                .entry(network(ends.remote))
                .or_insert((0, Reverse(*order), sid));
            group.0 += 1;
            if *order < group.1.0 {
                (group.1, group.2) = (Reverse(*order), sid);
            }
        }
        networks.into_values().max().map(|(_, _, sid)| sid)
    }

    fn refuse_parked(&mut self, world: &mut World<'_>, sid: u32) {
        if let Some(Startup::Unanswered { qpn, .. }) = self.streams.get(&sid) {
            let qpn = *qpn;
            self.initiate_early(world, qpn);
        }
        self.reject(world, sid, Reason::Busy);
    }
}

/// The network of one owner of addresses: an IPv4 address, or the 64 bits of an IPv6 prefix.
fn network(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => std::net::Ipv6Addr::from(u128::from(ip) & !(u128::from(u64::MAX))).into(),
    }
}
