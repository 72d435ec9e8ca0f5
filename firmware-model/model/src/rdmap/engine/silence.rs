//! A silent peer: the retransmission timer of a queue pair (InfiniBand Architecture Specification
//! vol. 1 §9.7.6.1.3: Local ACK Timeout and retry count).
//!
//! TCP retransmits by itself, and gives up after many minutes. A queue pair whose driver set a
//! limit is lost earlier: when nothing at all has arrived from the peer's system for that time
//! although it was asked, by data, retransmissions or probes. The system answers for a program that
//! is stopped or posts no receive, as an adapter does, so such a peer is not silent.
//! (TCP_USER_TIMEOUT is of no use here: it also ends a connection whose peer answers every probe of
//! its closed window.)
//!
//! The device only looks while a request waits for the peer. It looks at the stream at intervals,
//! not with each message.

use super::{Engine, Progress};
use crate::llp::Llp;
use crate::rdmap::env::Env;
use crate::rdmap::explain::Lost;
use crate::rdmap::watch::Look;
use crate::stream::Stream;
use std::time::Duration;
use urnic_device::vocabulary::WcStatus;

impl Engine {
    /// Sets the time after which a silent peer is lost; zero leaves that to TCP.
    pub(super) fn limit_silence(&mut self, limit: Duration, stream: &mut dyn Stream) {
        if self.watch.set_limit(limit) {
            stream.ask_peer(None);
        }
    }

    /// Begins to watch the peer if a request has begun to wait for it.
    #[inline]
    pub fn watch_peer(&mut self, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Some(limit) = self.watch.may_start()
            && self.waits_for_peer()
        {
            self.begin_watch(limit, env, stream);
        }
    }

    #[cold]
    fn begin_watch(&mut self, limit: Duration, env: &Env<'_>, stream: &mut dyn Stream) {
        if let Some(answers) = stream.answers()
            && self.watch.start(limit, env.now.get(), &answers)
        {
            stream.expect_answers(limit);
        }
    }

    /// Whether a request waits for the peer, or a message that completed when the stream took it
    /// may not have reached the peer's system.
    fn waits_for_peer(&self) -> bool {
        matches!(self.progress, Progress::Open)
            && (self.is_awaiting_peer()
                || self.halves.requester.delivery.last_sent() > self.watch.acknowledged)
    }

    /// Looks how the peer's system has answered since the last look.
    pub(super) fn look_for_peer(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        let Some(answers) = stream.answers() else {
            return self.watch.end();
        };
        let taken = self.llp.as_ref().map_or(0, Llp::taken);
        self.watch.acknowledged = taken.saturating_sub(answers.unacknowledged.into());
        if !self.waits_for_peer() {
            if self.watch.rest() {
                stream.ask_peer(None);
            }
            return;
        }
        match self.watch.look(env.now.get(), &answers) {
            Look::Goes => {}
            Look::Ask(interval) => stream.ask_peer(Some(interval)),
            Look::Silent(silence) => {
                if !self.halves.qp.unreliable {
                    self.halves.requester.flush_status = Some(WcStatus::RetryExcErr);
                }
                stream.reset();
                self.lose(Lost::Silent(silence), env, stream);
            }
        }
    }
}
