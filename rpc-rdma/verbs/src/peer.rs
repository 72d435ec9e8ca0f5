//! A client's connection, as the server's threads share it.

use crate::dispatch;
use crate::endpoint::{Endpoint, Taken};
use crate::lock::lock;
use crate::patience::Patience;
use crate::shares::{Account, Holder};
use rustix::io::write;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
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
    /// What the connection holds.
    pub(crate) account: Account,
    /// Milliseconds that the oldest of what was posted takes already, at the last look, or 0.
    pub(crate) stuck: AtomicU64,
    /// It is to be ended: others wait for the memory that it holds.
    pub(crate) give_up: AtomicBool,
}

impl Holder for Peer {
    fn account(&self) -> &Account {
        &self.account
    }

    fn stuck(&self) -> Option<Duration> {
        match self.stuck.load(Relaxed) {
            0 => None,
            time => Some(Duration::from_millis(time)),
        }
    }

    fn end(&self) {
        self.give_up.store(true, Relaxed);
        self.dispatch.attention();
    }
}

/// Who keeps a connection. That changes only under the lock of its endpoint.
#[derive(Default)]
pub(crate) struct Keep {
    keeper: Option<ThreadId>,
    /// Calls for that thread.
    waiting: VecDeque<Taken>,
    /// When it began with the call that it is in.
    since: Option<Instant>,
    /// The last one was over in less than [`WAKING`].
    quick: bool,
    /// A thread looks for what comes: others would be in its way.
    looking: bool,
    patience: Patience,
}

impl Keep {
    fn is_ours(&self) -> bool {
        self.keeper == Some(thread::current().id())
    }
}

/// What looking came to.
#[expect(
    clippy::large_enum_variant,
    reason = "it is moved once, and a box would be allocated for each call"
)]
pub(crate) enum Look {
    Call(Job),
    /// Nothing so far.
    Nothing,
    /// It is not worth it any more.
    Enough,
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
        Job {
            peer,
            taken,
            reserved: None,
        }
    }

    /// The same, and leaves that one, too.
    pub(crate) fn leave_all(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if let Some(job) = self.sort(endpoint) {
            self.dispatch.leave(job);
        }
    }

    /// Whether a thread keeps it, who sees for itself.
    pub(crate) fn is_kept(&self) -> bool {
        lock(&self.keep).keeper.is_some()
    }

    /// Whether this thread may look for what comes, until it [has looked](Self::has_looked).
    pub(crate) fn may_look(&self) -> bool {
        let mut keep = lock(&self.keep);
        let may = !keep.looking && (keep.keeper.is_none() || keep.is_ours());
        keep.looking |= may;
        may
    }

    /// Looks once, since `start`. With a call the connection is this thread's.
    pub(crate) fn look(self: &Arc<Self>, start: Instant) -> Look {
        let mut endpoint = lock(&self.endpoint);
        let moving = endpoint.is_moving();
        endpoint.progress();
        let job = self.sort(&mut endpoint);
        let time = start.elapsed();
        let mut keep = lock(&self.keep);
        if let Some(job) = job {
            keep.patience.came(time, moving);
            if keep.keeper.is_none() {
                keep.keeper = Some(thread::current().id());
                self.dispatch.keeps();
            }
            return Look::Call(job);
        }
        if let Some(taken) = keep.waiting.pop_front() {
            return Look::Call(self.job(taken));
        }
        if endpoint.ended() || time >= keep.patience.time() {
            keep.patience.failed();
            return Look::Enough;
        }
        Look::Nothing
    }

    /// This thread looks no more.
    pub(crate) fn has_looked(&self) {
        lock(&self.keep).looking = false;
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

    /// Others are told of what comes.
    pub(crate) fn arm(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if endpoint.rest() {
            self.leave_all(endpoint);
        }
        self.dispatch.again(self.key, endpoint);
    }

    /// Nobody keeps it any more; returns whether somebody did.
    fn release(self: &Arc<Self>) -> bool {
        let mut keep = lock(&self.keep);
        let kept = keep.keeper.take().is_some();
        keep.since = None;
        let waiting = std::mem::take(&mut keep.waiting);
        drop(keep);
        if kept {
            self.dispatch.keeps_no_more();
        }
        for taken in waiting {
            self.dispatch.leave(self.job(taken));
        }
        kept
    }

    /// The connection is nobody's any more.
    pub(crate) fn give_back(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if self.release() {
            self.arm(endpoint);
        }
    }

    /// The same, if it is this thread's.
    pub(crate) fn give_back_ours(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if lock(&self.keep).is_ours() {
            self.give_back(endpoint);
        }
    }

    /// Takes it from a thread that has been in a call for this time.
    pub(crate) fn relieve(self: &Arc<Self>, time: Duration) {
        let held_up = |keep: &Keep| keep.since.is_some_and(|since| since.elapsed() >= time);
        if !held_up(&lock(&self.keep)) {
            return;
        }
        let mut endpoint = lock(&self.endpoint);
        // It may have gone on meanwhile.
        if held_up(&lock(&self.keep)) {
            self.give_back(&mut endpoint);
        }
    }

    /// The connection has ended. Who waits for an answer over it has none.
    pub(crate) fn ended(self: &Arc<Self>, endpoint: &mut Endpoint) {
        self.release();
        // What broke it is said by a completion that perhaps nobody has looked at yet.
        endpoint.progress();
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
