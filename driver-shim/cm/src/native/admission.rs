//! Which calls a queue pair takes: those that come from the address of the peer named at RTR, and
//! that know the PSNs which the two programs exchanged.
//!
//! *Address.* TCP tells the source of a stream. It must be the named peer's, unless
//! `native.allow_nat` is set. What remains are other processes of the peer's host.
//!
//! *PSNs.* At RTS both are known to both ends: 48 bits, which nobody guesses. At RTR the queue pair
//! knows only what it expects, 24 bits: there few wrong calls are examined, and the others are
//! refused unseen. So that they cannot keep out the true peer, each call that is refused unseen has
//! the queue pair call its peer itself. That call goes to a port which only the peer has. If it is
//! a nudge, the peer's own call repeats its nonce, and is examined in any case.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use super::identity::Reason;
use super::state::{Call, Engine, MAX_PARKED_EACH, Pair, Phase};
use super::streams::World;

impl Engine {
    /// Whether a queue pair takes a call: else why not.
    pub(super) fn examine(&mut self, world: &mut World<'_>, sid: u32, qpn: u32) -> Result<(), Reason> {
        let Some(Call::Waiting { caller, ends, .. }) = self.calls.get(&sid) else {
            return Err(Reason::Gone);
        };
        let (caller, ends) = (*caller, *ends);
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return Err(Reason::Unknown);
        };
        let seek = match &mut pair.phase {
            Phase::Seeking(seek) => seek,
            Phase::Connected { .. } => return Err(Reason::Connected),
            Phase::Idle => return Err(Reason::Busy),
            Phase::Closed => return Err(Reason::Gone),
        };
        let us = seek.identity(qpn, 0);
        if !us.names(&caller) {
            return Err(Reason::Elsewhere);
        }
        let streams = &mut *world.streams;
        if !self.allow_nat && !seek.params.peer.is_at(&ends, |place| streams.is_own(place)) {
            if let Some(count) = pair.guesses.count(world.now, false) {
                tracing::warn!(
                    "qp {qpn:#08x}: refused a connection from {}, since the peer named in ibv_modify_qp is at {} \
                     ({count} requests refused for this qp so far); if an address is translated on the way, set native.allow_nat=true",
                    ends.remote.ip(),
                    seek.params.peer.address.ip(),
                );
            }
            self.hurry(world, qpn);
            return Err(Reason::Address);
        }
        if caller.sq_psn.is_none() {
            if us.sq_psn == Some(caller.rq_psn) {
                seek.ticket = Some(caller.nonce);
            }
            self.hurry(world, qpn);
            return Err(Reason::Busy);
        }
        let has_ticket = seek.nudge.is_some() && caller.ticket == seek.nudge;
        let unseen = us.sq_psn.is_none() && !has_ticket && pair.guesses.are_spent(world.now);
        if !unseen && us.meets(&caller) {
            return Ok(());
        }
        if let Some(count) = pair.guesses.count(world.now, !unseen) {
            tracing::warn!(
                "qp {qpn:#08x}: refused a connection from {}: its PSNs are not those that ibv_modify_qp was given \
                 ({count} requests refused for this qp so far)",
                ends.remote
            );
        }
        if !unseen {
            return Err(Reason::Elsewhere);
        }
        self.hurry(world, qpn);
        Err(Reason::Busy)
    }

    /// The peer is called without waiting for its call, at RTS at the latest; but not more often
    /// than by itself.
    pub(super) fn hurry(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        pair.connect_at_rts = true;
        if let Phase::Seeking(seek) = &mut pair.phase
            && seek.attempts == 0
            && seek.call.is_none()
            && seek.next_call > world.now
        {
            seek.next_call = world.now;
            self.seek(world, qpn);
        }
    }

    /// Refuses parked calls beyond what is kept, for `qpn` and for all: the oldest from where most
    /// come, so that nobody has all the room.
    pub(super) fn make_room(&mut self, world: &mut World<'_>, qpn: u32) {
        let for_pair = |pair: &Pair| pair.parked.iter().copied().collect::<Vec<u32>>();
        if let Some(pair) = self.pairs.get(&qpn)
            && pair.parked.len() > MAX_PARKED_EACH
            && let Some(sid) = self.surplus(for_pair(pair))
        {
            self.refuse_parked(world, sid);
        }
        if self.parked > self.max_parked
            && let Some(sid) = self.surplus(self.pairs.values().flat_map(for_pair).collect())
        {
            self.refuse_parked(world, sid);
        }
    }

    /// Of parked calls, the oldest of those from the network with the most.
    fn surplus(&self, sids: Vec<u32>) -> Option<u32> {
        let mut networks: HashMap<IpAddr, (usize, Reverse<u64>, u32)> = HashMap::new();
        for sid in sids {
            let Some(Call::Waiting { ends, order, .. }) = self.calls.get(&sid) else {
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
        if let Some(Call::Waiting { qpn, .. }) = self.calls.get(&sid) {
            let qpn = *qpn;
            self.hurry(world, qpn);
        }
        self.reject(world, sid, Reason::Busy);
    }
}

/// What one owner of addresses has: an IPv4 address, or the 64 bits of an IPv6 network.
fn network(address: SocketAddr) -> IpAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => std::net::Ipv6Addr::from(u128::from(ip) & !(u128::from(u64::MAX))).into(),
    }
}
