//! Queue pairs of kind UC: their sends do not fail. They wait a while for the first connection;
//! then the device drops them until there is one. A queue pair whose stream ended connects again.

use std::time::Duration;

use super::state::{BACK_OFF, ConnectState, Engine, Key, Notice, Pair, Phase};
use super::streams::World;
use crate::mpa_startup::Time;

/// How long sends wait for the first connection, in units of `native.call_grace_ms`. InfiniBand
/// loses them at once if the peer is not ready; but here the connection takes time, though the
/// peer is ready, and much of it on a busy machine.
const PATIENCE: u32 = 16;
/// Longest pause between attempts while sends are dropped: the peer may be gone, and connects
/// itself when it returns.
const RELEASED_BACK_OFF: Duration = Duration::from_secs(30);

impl ConnectState {
    /// When sends wait no longer for the first connection; `None`: they do not wait.
    pub(super) fn release_at(&self, connect_grace: Duration) -> Option<Time> {
        (!self.released).then(|| self.since + (connect_grace * PATIENCE).max(BACK_OFF.1))
    }

    /// Longest pause between attempts.
    pub(super) fn longest_pause(&self) -> Duration {
        match self.released {
            true => RELEASED_BACK_OFF,
            false => BACK_OFF.1,
        }
    }
}

impl Engine {
    /// The stream of a connected queue pair ended. One of kind UC connects again.
    pub fn lost(&mut self, world: &mut World<'_>, qid: u32) {
        let Some(qpn) = self.connected.get(&qid).copied() else {
            return;
        };
        let Some(pair) = self.pairs.get_mut(&qpn) else {
            return;
        };
        let Some((params, rts)) = pair.again.take() else {
            return;
        };
        self.connected.remove(&qid);
        let wait = match params.peer.we_initiate {
            true => BACK_OFF.0,
            false => self.connect_grace,
        };
        let connecting = ConnectState {
            rts,
            released: true,
            ..ConnectState::new(params, world.now, world.now + wait)
        };
        pair.phase = Phase::Connecting(Box::new(connecting));
        tracing::debug!("qpn {qpn:#08x}: its stream ended; it connects again");
        if params.peer.is_self {
            return self.loop_back(world, qpn, qid, 7);
        }
        self.timers.set(Key::Pair(qpn), Some(world.now + wait));
    }

    /// The initiator was accepted, and sends nothing.
    pub(super) fn first_fpdu_missing(&mut self, qpn: u32, qid: u32) {
        match self.pairs.get(&qpn) {
            Some(Pair { again: Some(_), .. }) => {
                // The device gives the stream up, and reports its end.
                self.timers.set(Key::Pair(qpn), None);
                self.notices.push(Notice::Unreachable(qid));
            }
            _ => self.close_unreachable(qpn, qid),
        }
    }

    /// The peer rejected the Request, and would reject the next one.
    pub(super) fn rejected_for_good(&mut self, world: &mut World<'_>, qpn: u32) {
        let Some(Pair {
            phase: Phase::Connecting(connecting),
            ..
        }) = self.pairs.get_mut(&qpn)
        else {
            return;
        };
        let qid = connecting.params.qid;
        if !connecting.params.unreliable {
            return self.close_unreachable(qpn, qid);
        }
        connecting.released = true;
        connecting.next_attempt = world.now + RELEASED_BACK_OFF;
        let next_attempt = connecting.next_attempt;
        self.timers.set(Key::Pair(qpn), Some(next_attempt));
        self.notices.push(Notice::Open(qid));
    }
}
