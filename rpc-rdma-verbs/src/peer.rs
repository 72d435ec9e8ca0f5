//! A client's connection, as the server's threads share it.

use crate::endpoint::{Endpoint, Taken};
use rustix::io::{read, write};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use urnic_rpc_rdma::engine::{self, CallError, Event, Message};

/// A client's connection.
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) endpoint: Mutex<Endpoint>,
    pub(crate) jobs: Arc<Jobs>,
    /// Those who wait for answers of the client's.
    pub(crate) waiting: Mutex<HashMap<u32, Waiting>>,
    /// The next transaction of a call to the client.
    pub(crate) xid: AtomicU32,
}

/// A call that nobody has answered yet.
pub(crate) struct Job {
    pub(crate) peer: Arc<Peer>,
    pub(crate) taken: Taken,
}

/// Calls that wait for a thread.
pub(crate) struct Jobs {
    pub(crate) queue: Mutex<VecDeque<Job>>,
    /// Counts them.
    pub(crate) count: OwnedFd,
}

impl Jobs {
    /// Puts a call behind the others.
    pub(crate) fn leave(&self, job: Job) {
        lock(&self.queue).push_back(job);
        let _ = write(&self.count, &1_u64.to_ne_bytes());
    }

    pub(crate) fn next(&self) -> Option<Job> {
        let mut count = [0; 8];
        read(&self.count, &mut count).ok()?;
        lock(&self.queue).pop_front()
    }
}

impl Peer {
    /// Hands on what came: leaves all calls but the first one to others.
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
            let job = Job {
                peer: Arc::clone(self),
                taken,
            };
            if first.is_none() {
                first = Some(job);
            } else {
                self.jobs.leave(job);
            }
        }
        first
    }

    /// The same, and leaves that one, too.
    pub(crate) fn leave_all(self: &Arc<Self>, endpoint: &mut Endpoint) {
        if let Some(job) = self.sort(endpoint) {
            self.jobs.leave(job);
        }
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

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
