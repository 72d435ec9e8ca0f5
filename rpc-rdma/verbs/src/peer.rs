//! The connection of a client, as the threads of a server share it.

use crate::adaptive_polling::AdaptivePolling;
use crate::dispatch;
use crate::endpoint::{Endpoint, ReceivedCall};
use crate::shares::{Account, Holder};
use rustix::io::write;
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::engine::{self, CallError, Event, Message};
use urnic_sync::Mutex;

/// Cost of a wake-up. Calls that take less time are not passed to other threads.
const WAKE_UP_COST: Duration = Duration::from_micros(20);

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
    pub(crate) must_end: AtomicBool,
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
        self.must_end.store(true, Relaxed);
        self.dispatch.request_check();
    }
}

/// The thread that keeps a connection. It changes only under the lock of the endpoint.
#[derive(Default)]
pub(crate) struct Keep {
    keeper: Option<ThreadId>,
    /// Calls that wait for the thread that keeps the connection.
    waiting: VecDeque<ReceivedCall>,
    /// Time when the thread began its current call.
    since: Option<Instant>,
    /// Whether the last call took less than [`WAKE_UP_COST`].
    quick: bool,
    /// Whether a thread polls. Other threads then do not poll.
    is_polled: bool,
    adaptive_polling: AdaptivePolling,
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
pub(crate) enum Poll {
    Call(Job),
    /// No call yet.
    Nothing,
    /// Polling is no longer useful.
    Stop,
}

impl Peer {
    /// Hands all calls but the first to other threads, or to the thread that keeps the connection.
    pub(crate) fn distribute(self: &Arc<Self>, endpoint: &mut Endpoint) -> Option<Job> {
        let mut first = None;
        for event in endpoint.events() {
            let incoming = match event {
                Event::CallReceived(incoming) => incoming,
                Event::Answered { xid, outcome, .. } => {
                    if let Some(waiting) = self.waiting.lock().get_mut(&xid) {
                        waiting.complete(outcome);
                    }
                    continue;
                }
                Event::Finished(_) => continue,
            };
            let Some(received) = endpoint.take_call(incoming) else {
                endpoint.disconnect();
                continue;
            };
            if first.is_none() {
                first = Some(self.job(received));
                continue;
            }
            let mut keep = self.keep.lock();
            if keep.keeper.is_some() && keep.quick {
                keep.waiting.push_back(received);
            } else {
                drop(keep);
                self.dispatch.queue(self.job(received));
            }
        }
        first
    }

    fn job(self: &Arc<Self>, received: ReceivedCall) -> Job {
        let peer = Arc::clone(self);
        Job {
            peer,
            received,
            reserved: None,
        }
    }

    /// Hands all calls to other threads, or to the thread that keeps the connection.
    pub(crate) fn queue_all(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if let Some(job) = self.distribute(endpoint) {
            self.dispatch.queue(job);
        }
    }

    /// Whether a thread keeps the connection and polls it.
    pub(crate) fn is_kept(&self) -> bool {
        self.keep.lock().keeper.is_some()
    }

    /// Whether this thread may poll, until [`end_polling`](Self::end_polling).
    pub(crate) fn may_poll(&self) -> bool {
        let mut keep = self.keep.lock();
        let may = !keep.is_polled && (keep.keeper.is_none() || keep.is_ours());
        keep.is_polled |= may;
        may
    }

    /// Polls once, since `start`. If there is a call, this thread keeps the connection.
    pub(crate) fn poll(self: &Arc<Self>, start: Instant) -> Poll {
        let mut endpoint = self.endpoint.lock();
        let moving = endpoint.is_moving();
        endpoint.progress();
        let job = self.distribute(&mut endpoint);
        let time = start.elapsed();
        let mut keep = self.keep.lock();
        if let Some(job) = job {
            keep.adaptive_polling.succeeded(time, moving);
            if keep.keeper.is_none() {
                keep.keeper = Some(thread::current().id());
                self.dispatch.add_kept();
            }
            return Poll::Call(job);
        }
        if let Some(received) = keep.waiting.pop_front() {
            return Poll::Call(self.job(received));
        }
        if endpoint.ended() || time >= keep.adaptive_polling.time() {
            keep.adaptive_polling.failed();
            return Poll::Stop;
        }
        Poll::Nothing
    }

    /// Notes that this thread stops polling.
    pub(crate) fn end_polling(&self) {
        self.keep.lock().is_polled = false;
    }

    /// A call that waits for this thread.
    pub(crate) fn next_kept(self: &Arc<Self>) -> Option<Job> {
        let mut keep = self.keep.lock();
        let received = keep.is_ours().then(|| keep.waiting.pop_front()).flatten();
        drop(keep);
        received.map(|received| self.job(received))
    }

    /// Notes that this thread begins a call of this connection.
    pub(crate) fn begin_call(&self) {
        let mut keep = self.keep.lock();
        if keep.is_ours() {
            keep.since = Some(Instant::now());
        }
    }

    /// Notes that this thread has finished a call of this connection.
    pub(crate) fn end_call(&self) {
        let mut keep = self.keep.lock();
        if keep.is_ours()
            && let Some(since) = keep.since.take()
        {
            keep.quick = since.elapsed() < WAKE_UP_COST;
        }
    }

    /// Arms the connection for other threads.
    pub(crate) fn arm(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if endpoint.arm() {
            self.queue_all(endpoint);
        }
        self.dispatch.rearm(self.key, endpoint);
    }

    /// Ends the keeping of the connection. Returns whether a thread kept it.
    fn release(self: &Arc<Self>) -> bool {
        let mut keep = self.keep.lock();
        let kept = keep.keeper.take().is_some();
        keep.since = None;
        let waiting = std::mem::take(&mut keep.waiting);
        drop(keep);
        if kept {
            self.dispatch.remove_kept();
        }
        for received in waiting {
            self.dispatch.queue(self.job(received));
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
        if self.keep.lock().is_ours() {
            self.give_back(endpoint);
        }
    }

    /// Takes the connection from a thread that has been in a call for this time.
    pub(crate) fn release_if_blocked(self: &Arc<Self>, time: Duration) {
        let held_up = |keep: &Keep| keep.since.is_some_and(|since| since.elapsed() >= time);
        if !held_up(&self.keep.lock()) {
            return;
        }
        let mut endpoint = self.endpoint.lock();
        // The thread may have ended the call in the meantime.
        if held_up(&self.keep.lock()) {
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
        let _ = self.distribute(endpoint);
    }
}

/// A thread that waits for an answer.
pub(crate) struct Waiting {
    notification: Arc<OwnedFd>,
    answer: Option<Result<Vec<u8>, CallError>>,
}

impl Waiting {
    /// An entry without an answer. `notification` is an eventfd, which becomes readable when the
    /// answer arrives.
    pub(crate) fn notified_by(notification: &Arc<OwnedFd>) -> Waiting {
        Waiting {
            notification: Arc::clone(notification),
            answer: None,
        }
    }

    /// Takes the answer.
    pub(crate) fn answer(&mut self) -> Option<Result<Vec<u8>, CallError>> {
        self.answer.take()
    }

    fn complete(&mut self, outcome: Result<engine::Answer, CallError>) {
        self.answer = Some(outcome.map(|answer| match answer.message {
            Message::Short(bytes) => bytes,
            // The call offered no memory for a long reply.
            Message::Long { .. } => Vec::new(),
        }));
        let _ = write(&*self.notification, &1_u64.to_ne_bytes());
    }
}
