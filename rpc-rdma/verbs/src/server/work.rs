//! The work of a server's threads.

use super::Server;
use crate::backward::Caller;
use crate::dispatch::Told;
use crate::lock::lock;
use crate::memory::Slice;
use crate::patience::AMONG;
use crate::peer::{Job, Look, Peer};
use crate::service::{Request, Response, Service, reply};
use rustix::event::Timespec;
use std::sync::Arc;
use std::time::Instant;
use urnic_rpc_rdma::binding::{Binding, check};
use urnic_rpc_rdma::rpc;

/// Calls of one connection that a thread answers before it serves others.
const IN_A_ROW: usize = 8;

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
            let told = match found.take() {
                Some(told) => Ok(Some(told)),
                None => self.dispatch.wait(None),
            };
            let job = match told {
                Ok(Some(Told::Stop)) => return,
                Ok(Some(Told::Jobs)) => self.dispatch.next(),
                Ok(Some(Told::Peer(key))) => self.peer(key).and_then(|peer| Self::take(&peer)),
                Ok(None) => None,
                Err(error) => return tracing::error!(%error, "epoll"),
            };
            found = job.and_then(|job| self.answer_all(job, service, &bindings));
        }
    }

    fn peer(&self, key: u64) -> Option<Arc<Peer>> {
        lock(&self.connections).get(&key).cloned()
    }

    /// Receives from a connection and arms it for other threads. Returns the first call.
    fn take(peer: &Arc<Peer>) -> Option<Job> {
        let mut endpoint = lock(&peer.endpoint);
        if peer.is_kept() {
            return None;
        }
        endpoint.progress();
        let job = peer.sort(&mut endpoint);
        peer.arm(&mut endpoint);
        job
    }

    /// Answers a call, and further calls of the same connection while there is no other work.
    /// Returns the other work.
    fn answer_all(&self, job: Job, service: &dyn Service, bindings: &[&dyn Binding]) -> Option<Told> {
        let peer = Arc::clone(&job.peer);
        let mut next = Some(job);
        let mut answered = 0;
        // Each event reaches one thread only. This thread may receive an event of its own
        // connection.
        let mut told_of_this = false;
        let mut others = || match self.dispatch.wait(Some(&NOW)) {
            Ok(Some(Told::Peer(key))) if key == peer.key => {
                told_of_this = true;
                None
            }
            Ok(told) => told,
            Err(_) => None,
        };
        let told = loop {
            let Some(job) = next.take().or_else(|| peer.next_kept()) else {
                match Self::look(&peer, &mut others) {
                    Ok(job) => next = Some(job),
                    Err(told) => break told,
                }
                continue;
            };
            self.answer(job, service, bindings);
            answered += 1;
            if answered % IN_A_ROW == 0
                && let Some(told) = others()
            {
                break Some(told);
            }
        };
        peer.give_back_ours(&mut lock(&peer.endpoint));
        // The key may already belong to another connection.
        if told_of_this && let Some(peer) = self.peer(peer.key) {
            let mut endpoint = lock(&peer.endpoint);
            if !peer.is_kept() {
                peer.arm(&mut endpoint);
            }
        }
        told
    }

    /// Polls for a call, as long as polling was recently useful and there is no other work. If
    /// there is a call, this thread keeps the connection.
    fn look(peer: &Arc<Peer>, others: &mut impl FnMut() -> Option<Told>) -> Result<Job, Option<Told>> {
        if !peer.may_look() {
            return Err(None);
        }
        let start = Instant::now();
        let mut turn = 0;
        let looked = loop {
            match peer.look(start) {
                Look::Call(job) => break Ok(job),
                Look::Enough => break Err(None),
                Look::Nothing => turn += 1,
            }
            if turn % AMONG == 0 {
                if let Some(told) = others() {
                    break Err(Some(told));
                }
                std::thread::yield_now();
            }
        };
        peer.has_looked();
        looked
    }

    /// Answers a call by the service, when there is memory for the reply.
    fn answer(&self, job: Job, service: &dyn Service, bindings: &[&dyn Binding]) {
        // The client gets no answer and repeats the call over another connection, where other calls
        // may have followed it.
        if lock(&job.peer.endpoint).broken() {
            return;
        }
        let Some(Job {
            peer,
            taken,
            reserved,
        }) = self.reserve(job)
        else {
            return;
        };
        let message = taken.message.bytes();
        let places: Vec<_> = taken
            .items
            .iter()
            .map(|(position, item)| (*position, item.len() as u64))
            .collect();
        peer.begins();
        let response = match check(bindings, message, &places) {
            Ok(()) => service.call(Request {
                back: Some(&Caller(Arc::clone(&peer))),
                peer: peer.address,
                message,
                item: taken
                    .items
                    .first()
                    .map(|(position, item)| unpadded(message, *position as usize, item)),
            }),
            Err(misplaced) => {
                tracing::debug!(%misplaced, "refused");
                Some(Response {
                    message: rpc::garbage_args(taken.incoming.xid),
                    item: None,
                })
            }
        };
        peer.ends();
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
        let call = taken.incoming.call;
        let mut endpoint = lock(&peer.endpoint);
        endpoint.answer(call, response.as_ref().map(|(reply, _)| reply), charge);
    }

    /// Returns the call with memory counted for its reply. Without such memory, the call is queued
    /// until there is some.
    fn reserve(&self, mut job: Job) -> Option<Job> {
        let bytes = self.options.reply_memory;
        if job.reserved.is_none() && job.taken.items.is_empty() && bytes > 0 {
            job.reserved = job.peer.account.take(bytes);
            if job.reserved.is_none() {
                let wanted = job.peer.account.want(bytes);
                lock(&self.deferred).push_back((job, wanted));
                self.dispatch.attention();
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
