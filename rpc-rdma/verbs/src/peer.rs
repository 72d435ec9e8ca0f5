//! The connection of a client, as the threads of a server share it.

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

/// Cost of a wake-up. Calls that take less time are not passed to other threads.
const WAKING: Duration = Duration::from_micros(20);

pub(crate) type Dispatch = dispatch::Dispatch<Peer>;
pub(crate) type Job = dispatch::Job<Peer>;

/// The connection of a client.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// The key of the connection.
    pub(crate) key: u64,
    /// The endpoint. Its lock is taken before the others.
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) keep: Mutex<Keep>,
    pub(crate) dispatch: Arc<Dispatch>,
    /// Threads that wait for answers of the client.
    pub(crate) waiting: Mutex<HashMap<u32, Waiting>>,
    /// The next transaction of a call to the client.
    pub(crate) xid: AtomicU32,
    /// The account of the amounts that the connection holds.
    pub(crate) account: Account,
    /// Milliseconds for which the oldest work request was posted at the last check, or 0.
    pub(crate) stuck: AtomicU64,
    /// Whether the connection must end, because other connections wait for its memory.
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

/// The thread that keeps a connection. It changes only under the lock of the endpoint.
#[derive(Default)]
pub(crate) struct Keep {
    keeper: Option<ThreadId>,
    /// Calls that wait for the thread that keeps the connection.
    waiting: VecDeque<Taken>,
    /// Time when the thread began its current call.
    since: Option<Instant>,
    /// Whether the last call took less than [`WAKING`].
    quick: bool,
    /// Whether a thread polls. Other threads then do not poll.
    looking: bool,
    patience: Patience,
}

impl Keep {
    fn is_ours(&self) -> bool {
        self.keeper == Some(thread::current().id())
    }
}

/// The result of polling.
#[expect(
    clippy::large_enum_variant,
    reason = "it is moved once, and a box would be allocated for each call"
)]
pub(crate) enum Look {
    Call(Job),
    /// No call yet.
    Nothing,
    /// Polling is no longer useful.
    Enough,
}

impl Peer {
    /// Hands all calls but the first to other threads, or to the thread that keeps the connection.
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

    /// Hands all calls to other threads, or to the thread that keeps the connection.
    pub(crate) fn leave_all(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if let Some(job) = self.sort(endpoint) {
            self.dispatch.leave(job);
        }
    }

    /// Whether a thread keeps the connection and polls it.
    pub(crate) fn is_kept(&self) -> bool {
        lock(&self.keep).keeper.is_some()
    }

    /// Whether this thread may poll, until [`has_looked`](Self::has_looked).
    pub(crate) fn may_look(&self) -> bool {
        let mut keep = lock(&self.keep);
        let may = !keep.looking && (keep.keeper.is_none() || keep.is_ours());
        keep.looking |= may;
        may
    }

    /// Polls once, since `start`. If there is a call, this thread keeps the connection.
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

    /// This thread ends its polling.
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

    /// This thread ends a call of this connection.
    pub(crate) fn ends(&self) {
        let mut keep = lock(&self.keep);
        if keep.is_ours()
            && let Some(since) = keep.since.take()
        {
            keep.quick = since.elapsed() < WAKING;
        }
    }

    /// Arms the connection for other threads.
    pub(crate) fn arm(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if endpoint.rest() {
            self.leave_all(endpoint);
        }
        self.dispatch.again(self.key, endpoint);
    }

    /// Ends the keeping of the connection. Returns whether a thread kept it.
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

    /// Returns the connection to all threads.
    pub(crate) fn give_back(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if self.release() {
            self.arm(endpoint);
        }
    }

    /// Returns the connection to all threads, if this thread keeps it.
    pub(crate) fn give_back_ours(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if lock(&self.keep).is_ours() {
            self.give_back(endpoint);
        }
    }

    /// Takes the connection from a thread that has been in a call for this time.
    pub(crate) fn relieve(self: &Arc<Self>, time: Duration) {
        let held_up = |keep: &Keep| keep.since.is_some_and(|since| since.elapsed() >= time);
        if !held_up(&lock(&self.keep)) {
            return;
        }
        let mut endpoint = lock(&self.endpoint);
        // The thread may have ended the call in the meantime.
        if held_up(&lock(&self.keep)) {
            self.give_back(&mut endpoint);
        }
    }

    /// Handles the end of the connection. Threads that wait for an answer over it get none.
    pub(crate) fn ended(self: &Arc<Self>, endpoint: &mut Endpoint) {
        self.release();
        // A completion that was not polled yet may have the reason.
        endpoint.progress();
        endpoint.detach();
        for xid in endpoint.engine.outstanding_xids() {
            endpoint.engine.cancel(xid);
        }
        let _ = self.sort(endpoint);
    }
}

/// A thread that waits for an answer.
pub(crate) struct Waiting {
    told: Arc<OwnedFd>,
    answer: Option<Result<Vec<u8>, CallError>>,
}

impl Waiting {
    /// An entry without an answer. The eventfd becomes readable when there is one.
    pub(crate) fn told_by(told: &Arc<OwnedFd>) -> Waiting {
        Waiting {
            told: Arc::clone(told),
            answer: None,
        }
    }

    /// Takes the answer.
    pub(crate) fn answer(&mut self) -> Option<Result<Vec<u8>, CallError>> {
        self.answer.take()
    }

    fn tell(&mut self, outcome: Result<engine::Answer, CallError>) {
        self.answer = Some(outcome.map(|answer| match answer.message {
            Message::Short(bytes) => bytes,
            // The call offered no memory for a long reply.
            Message::Long { .. } => Vec::new(),
        }));
        let _ = write(&*self.told, &1_u64.to_ne_bytes());
    }
}
