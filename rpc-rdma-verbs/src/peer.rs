//! A client's connection, as the server's threads share it.

use crate::dispatch::{self, lock};
use crate::endpoint::{Endpoint, Taken};
use crate::patience::Patience;
use rustix::io::write;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::engine::{self, CallError, Event, Message};

/// To hand a call over costs a thread's waking: those that are answered in less time are not.
const WAKING: Duration = Duration::from_micros(20);

pub(crate) type Dispatch = dispatch::Dispatch<Peer>;
pub(crate) type Job = dispatch::Job<Peer>;

/// A client's connection.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// What it is called by.
    pub(crate) key: u64,
    /// Locked before the rest.
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) keep: Mutex<Keep>,
    pub(crate) dispatch: Arc<Dispatch>,
    /// Those who wait for answers of the client's.
    pub(crate) waiting: Mutex<HashMap<u32, Waiting>>,
    /// The next transaction of a call to the client.
    pub(crate) xid: AtomicU32,
}

/// Who keeps a connection.
#[derive(Default)]
pub(crate) struct Keep {
    keeper: Option<ThreadId>,
    /// Calls for that thread.
    waiting: VecDeque<Taken>,
    /// Calls that keepers began, and when the last one did, until it is over.
    begun: u32,
    since: Option<Instant>,
    /// Those that were begun when that was last looked at.
    seen: u32,
    /// The last one was over in less than [`WAKING`].
    quick: bool,
    pub(crate) patience: Patience,
}

impl Keep {
    fn is_ours(&self) -> bool {
        self.keeper == Some(thread::current().id())
    }
}

impl Peer {
    /// Hands on what came: all calls but the first one to others, or to the thread that keeps this.
    pub(crate) fn sort(self: &Arc<Self>, endpoint: &mut Endpoint) -> Option<Job> {
        let mut first = None;
        for event in endpoint.events() {
            let incoming = match event {
                Event::Called(incoming) => incoming,
                Event::Answered { xid, outcome, .. } => {
                    if let Some(waiting) = lock(&self.waiting).get_mut(&xid) {
                        waiting.tell(outcome);
                    }
                    continue;
                }
                Event::Finished(_) => continue,
            };
            let Some(taken) = endpoint.taken(incoming) else {
                endpoint.disconnect();
                continue;
            };
            if first.is_none() {
                first = Some(self.job(taken));
                continue;
            }
            let mut keep = lock(&self.keep);
            if keep.keeper.is_some() && keep.quick {
                keep.waiting.push_back(taken);
            } else {
                drop(keep);
                self.dispatch.leave(self.job(taken));
            }
        }
        first
    }

    fn job(self: &Arc<Self>, taken: Taken) -> Job {
        let peer = Arc::clone(self);
        Job { peer, taken }
    }

    /// The same, and leaves that one, too.
    pub(crate) fn leave_all(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if let Some(job) = self.sort(endpoint) {
            self.dispatch.leave(job);
        }
    }

    /// This thread keeps the connection, unless another does already.
    pub(crate) fn keep(self: &Arc<Self>) {
        let mut keep = lock(&self.keep);
        if keep.keeper.is_none() {
            keep.keeper = Some(thread::current().id());
            drop(keep);
            self.dispatch.keeps(self.key, self);
        }
    }

    /// Whether this thread may look for what comes.
    pub(crate) fn may_look(&self) -> bool {
        let keep = lock(&self.keep);
        keep.keeper.is_none() || keep.is_ours()
    }

    /// A call that waits for this thread.
    pub(crate) fn next_kept(self: &Arc<Self>) -> Option<Job> {
        let mut keep = lock(&self.keep);
        let taken = keep.is_ours().then(|| keep.waiting.pop_front()).flatten();
        drop(keep);
        taken.map(|taken| self.job(taken))
    }

    /// This thread begins a call of this connection.
    pub(crate) fn begins(&self) {
        let mut keep = lock(&self.keep);
        if keep.is_ours() {
            keep.begun = keep.begun.wrapping_add(1);
            keep.since = Some(Instant::now());
        }
    }

    /// It is over.
    pub(crate) fn ends(&self) {
        let mut keep = lock(&self.keep);
        if keep.is_ours()
            && let Some(since) = keep.since.take()
        {
            keep.quick = since.elapsed() < WAKING;
        }
    }

    /// The connection is nobody's any more: others are told of what comes.
    pub(crate) fn give_back(self: &Arc<Self>, endpoint: &mut Endpoint) {
        let mut keep = lock(&self.keep);
        if keep.keeper.take().is_none() {
            return;
        }
        keep.since = None;
        let waiting = std::mem::take(&mut keep.waiting);
        drop(keep);
        self.dispatch.keeps_no_more(self.key);
        for taken in waiting {
            self.dispatch.leave(self.job(taken));
        }
        if endpoint.rest() {
            self.leave_all(endpoint);
        }
        self.dispatch.again(self.key, endpoint);
    }

    /// The same, if it is this thread's.
    pub(crate) fn give_back_ours(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if lock(&self.keep).is_ours() {
            self.give_back(endpoint);
        }
    }

    /// Takes it from a thread that is in the same call as when this was last asked.
    pub(crate) fn relieve(self: &Arc<Self>) {
        let Ok(mut endpoint) = self.endpoint.try_lock() else {
            return;
        };
        let mut keep = lock(&self.keep);
        if keep.since.is_none() || keep.seen != keep.begun {
            keep.seen = keep.begun;
            return;
        }
        drop(keep);
        self.give_back(&mut endpoint);
    }

    /// The connection has ended. Who waits for an answer over it has none.
    pub(crate) fn ended(self: &Arc<Self>, endpoint: &mut Endpoint) {
        endpoint.detach();
        for xid in endpoint.engine.outstanding_xids() {
            endpoint.engine.cancel(xid);
        }
        let _ = self.sort(endpoint);
    }
}

/// Who waits for an answer.
pub(crate) struct Waiting {
    told: Arc<OwnedFd>,
    answer: Option<Result<Vec<u8>, CallError>>,
}

impl Waiting {
    /// Nobody has answered yet; who does says so by this eventfd.
    pub(crate) fn told_by(told: &Arc<OwnedFd>) -> Waiting {
        Waiting {
            told: Arc::clone(told),
            answer: None,
        }
    }

    /// The answer, once.
    pub(crate) fn answer(&mut self) -> Option<Result<Vec<u8>, CallError>> {
        self.answer.take()
    }

    fn tell(&mut self, outcome: Result<engine::Answer, CallError>) {
        self.answer = Some(outcome.map(|answer| match answer.message {
            Message::Short(octets) => octets,
            // Nobody offered memory for one.
            Message::Long { .. } => Vec::new(),
        }));
        let _ = write(&*self.told, &1_u64.to_ne_bytes());
    }
}
