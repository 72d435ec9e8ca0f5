//! The work of a server's threads.

use super::Server;
use crate::adaptive_polling::POLLS_PER_YIELD;
use crate::backward::Backchannel;
use crate::dispatch::Wakeup;
use crate::memory::Slice;
use crate::peer::{Job, Peer, Poll};
use crate::service::{Request, Response, Service, reply};
use rustix::event::Timespec;
use std::sync::Arc;
use std::time::Instant;
use urnic_rpc_rdma::binding::{Binding, check};
use urnic_rpc_rdma::rpc;

/// Calls of one connection that a thread answers before it serves others.
const CALLS_IN_A_ROW: usize = 8;

/// A wait of zero length.
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl Server {
    /// Answers calls until the server stops.
    pub(super) fn work(&self, service: &dyn Service) {
        let bindings = self.options.all_bindings();
        let mut found = None;
        loop {
            let wakeup = match found.take() {
                Some(wakeup) => Ok(Some(wakeup)),
                None => self.dispatch.wait(None),
            };
            let job = match wakeup {
                Ok(Some(Wakeup::Stop)) => return,
                Ok(Some(Wakeup::Jobs)) => self.dispatch.next(),
                Ok(Some(Wakeup::Peer(key))) => self.peer(key).and_then(|peer| Self::take(&peer)),
                Ok(None) => None,
                Err(error) => return tracing::error!(%error, "epoll"),
            };
            found = job.and_then(|job| self.answer_all(job, service, &bindings));
        }
    }

    fn peer(&self, key: u64) -> Option<Arc<Peer>> {
        self.connections.lock().get(&key).cloned()
    }

    /// Receives from a connection and arms it for other threads. Returns the first call.
    fn take(peer: &Arc<Peer>) -> Option<Job> {
        let mut endpoint = peer.endpoint.lock();
        if peer.is_kept() {
            return None;
        }
        endpoint.progress();
        let job = peer.distribute(&mut endpoint);
        peer.arm(&mut endpoint);
        job
    }

    /// Answers a call, and further calls of the same connection while there is no other work.
    /// Returns the other work.
    fn answer_all(&self, job: Job, service: &dyn Service, bindings: &[&dyn Binding]) -> Option<Wakeup> {
        let peer = Arc::clone(&job.peer);
        let mut next = Some(job);
        let mut answered = 0;
        // Each event reaches one thread only. This thread may receive an event of its own
        // connection.
        let mut own_wakeup = false;
        let mut others = || match self.dispatch.wait(Some(&NOW)) {
            Ok(Some(Wakeup::Peer(key))) if key == peer.key => {
                own_wakeup = true;
                None
            }
            Ok(wakeup) => wakeup,
            Err(_) => None,
        };
        let wakeup = loop {
            let Some(job) = next.take().or_else(|| peer.next_kept()) else {
                match Self::poll(&peer, &mut others) {
                    Ok(job) => next = Some(job),
                    Err(wakeup) => break wakeup,
                }
                continue;
            };
            self.answer(job, service, bindings);
            answered += 1;
            if answered % CALLS_IN_A_ROW == 0
                && let Some(wakeup) = others()
            {
                break Some(wakeup);
            }
        };
        peer.give_back_ours(&mut peer.endpoint.lock());
        // The key may already belong to another connection.
        if own_wakeup && let Some(peer) = self.peer(peer.key) {
            let mut endpoint = peer.endpoint.lock();
            if !peer.is_kept() {
                peer.arm(&mut endpoint);
            }
        }
        wakeup
    }

    /// Polls for a call, as long as polling was recently useful and there is no other work. If
    /// there is a call, this thread keeps the connection.
    fn poll(peer: &Arc<Peer>, others: &mut impl FnMut() -> Option<Wakeup>) -> Result<Job, Option<Wakeup>> {
        if !peer.may_poll() {
            return Err(None);
        }
        let start = Instant::now();
        let mut turn = 0;
        let polled = loop {
            match peer.poll(start) {
                Poll::Call(job) => break Ok(job),
                Poll::Stop => break Err(None),
                Poll::Nothing => turn += 1,
            }
            if turn % POLLS_PER_YIELD == 0 {
                if let Some(wakeup) = others() {
                    break Err(Some(wakeup));
                }
                std::thread::yield_now();
            }
        };
        peer.end_polling();
        polled
    }

    /// Answers a call by the service, when there is memory for the reply.
    fn answer(&self, job: Job, service: &dyn Service, bindings: &[&dyn Binding]) {
        // The client gets no answer and repeats the call over another connection, where other calls
        // may have followed it.
        if job.peer.endpoint.lock().broken() {
            return;
        }
        let Some(Job {
            peer,
            received,
            reserved,
        }) = self.reserve(job)
        else {
            return;
        };
        let message = received.message.bytes();
        let places: Vec<_> = received
            .items
            .iter()
            .map(|(position, item)| (*position, item.len() as u64))
            .collect();
        peer.begin_call();
        let response = match check(bindings, message, &places) {
            Ok(()) => service.call(Request {
                back: Some(&Backchannel(Arc::clone(&peer))),
                peer: peer.address,
                message,
                item: received
                    .items
                    .first()
                    .map(|(position, item)| unpadded(message, *position as usize, item)),
            }),
            Err(misplaced) => {
                tracing::debug!(%misplaced, "refused");
                Some(Response {
                    message: rpc::garbage_args(received.incoming.xid),
                    item: None,
                })
            }
        };
        peer.end_call();
        let response = response.map(|response| {
            let data = response.item.iter().flat_map(|(_, pieces)| pieces);
            let bytes = response.message.len() + data.map(|piece| piece.len()).sum::<usize>();
            (reply(response), bytes)
        });
        // Replies that fit into a message are part of the memory that is counted for the
        // connection.
        let charge = reserved
            .zip(response.as_ref())
            .and_then(|(mut charge, (_, bytes))| {
                charge.shrink(*bytes as u64);
                (*bytes > self.options.inline).then_some(charge)
            });
        let call = received.incoming.call;
        let mut endpoint = peer.endpoint.lock();
        endpoint.answer(call, response.as_ref().map(|(reply, _)| reply), charge);
    }

    /// Returns the call with memory counted for its reply. Without such memory, the call is queued
    /// until there is some.
    fn reserve(&self, mut job: Job) -> Option<Job> {
        let bytes = self.options.reply_memory;
        if job.reserved.is_none() && job.received.items.is_empty() && bytes > 0 {
            job.reserved = job.peer.account.take(bytes);
            if job.reserved.is_none() {
                let wanted = job.peer.account.want(bytes);
                self.deferred.lock().push_back((job, wanted));
                self.dispatch.request_check();
                return None;
            }
        }
        Some(job)
    }
}

/// An argument without the padding of its chunk. The count precedes its place in the message.
fn unpadded(message: &[u8], place: usize, item: &Slice) -> Slice {
    let count = message.get(..place).and_then(|before| before.last_chunk::<4>());
    let count = count.map_or(item.len(), |count| u32::from_be_bytes(*count) as usize);
    item.part(0..count.min(item.len()))
}
