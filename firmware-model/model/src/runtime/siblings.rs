//! Queue pairs of one device at both ends of a stream.

use crate::events::Requests;
use crate::qp::Qp;
use crate::rdmap::{Engine, PeerProgress};
use crate::runtime::Core;
use crate::shard::home_shard;
use crate::stream::Stream;
use crate::table::Found;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

impl Qp {
    /// Checks whether the other end of `stream` is a queue pair of this device, too; `awaited`: it
    /// will be.
    pub(super) fn find_sibling(&self, core: &Core, stream: &dyn Stream, engine: &mut Engine, awaited: bool) {
        let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        let (local, remote) = (plain(stream.local()), plain(stream.remote()));
        if local.ip() != remote.ip() {
            return;
        }
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = Some((local, remote));
        let mut ends = core.ends();
        let sibling = (ends.get(&(remote, local)))
            .and_then(|(id, rendezvous)| Some((core.qps.find(*id)?, rendezvous.join()?)));
        let (sibling, peer_progress) = match sibling {
            Some((sibling, peer_progress)) => (Some(sibling), peer_progress),
            None => (None, PeerProgress::first(awaited)),
        };
        ends.insert((local, remote), (self.id, peer_progress.rendezvous()));
        drop(ends);
        engine.track_peer(peer_progress);
        if let Some(sibling) = sibling {
            self.sibling.store(sibling.id, Ordering::Relaxed);
            sibling.sibling.store(self.id, Ordering::Relaxed);
        }
    }

    /// Removes the entry of a closed stream: its ends may be those of another stream next.
    pub(super) fn leave_sibling(&self, core: &Core) {
        self.sibling.store(0, Ordering::Relaxed);
        let own_ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(own_ends) = own_ends
            && let Entry::Occupied(entry) = core.ends().entry(own_ends)
            && entry.get().0 == self.id
        {
            entry.remove();
        }
    }

    /// As [`sibling`](Qp::sibling), if this thread is to let it receive. Another thread that polls
    /// it finds what has come by itself, and two threads at one queue pair wait for each other's
    /// cache lines all the time.
    #[inline]
    pub(super) fn sibling_to_receive(&self, core: &Core) -> Option<Found<Qp>> {
        let sibling = self.sibling(core)?;
        let poller = sibling.poller.load(Ordering::Relaxed);
        let is_polled = core.schedule.has_polled_elsewhere(poller, &self.seen_polls);
        (!is_polled).then_some(sibling)
    }

    /// What this thread, which polls it, is to request: what has come, and how far the sibling is,
    /// if there is one.
    #[inline]
    pub(crate) fn polled(&self) -> Requests {
        match self.sibling.load(Ordering::Relaxed) {
            0 => Requests::RECEIVE,
            _ => self.polled_beside_sibling(),
        }
    }

    #[inline(never)]
    fn polled_beside_sibling(&self) -> Requests {
        let home = home_shard();
        if self.poller.load(Ordering::Relaxed) != home {
            self.poller.store(home, Ordering::Relaxed);
        }
        Requests::RECEIVE | Requests::PEER_PROGRESS
    }

    /// The queue pair of this device at the other end of the stream.
    #[inline]
    pub(super) fn sibling(&self, core: &Core) -> Option<Found<Qp>> {
        match self.sibling.load(Ordering::Relaxed) {
            0 => None,
            id => core.qps.find(id),
        }
    }
}
