//! What each of a server's threads does.

use super::Server;
use crate::backward::Caller;
use crate::dispatch::{Told, lock};
use crate::memory::Slice;
use crate::peer::{Job, Peer};
use crate::service::{Request, Response, Service, reply};
use rustix::event::Timespec;
use std::sync::Arc;
use std::time::Instant;
use urnic_rpc_rdma::binding::{Binding, check};
use urnic_rpc_rdma::rpc;

/// Calls of one connection that a thread answers before it looks at others.
const IN_A_ROW: usize = 8;

/// No time at all.
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

impl Server {
    /// Answers calls until it is time to stop.
    pub(super) fn work(&self, service: &dyn Service) {
        let bindings = self.options.all_bindings();
        let mut found = None;
        loop {
            let told = match found.take() {
                Some(told) => Ok(Some(told)),
                None => self.dispatch.wait(None),
            };
            found = match told {
                Ok(Some(Told::Stop)) => return,
                Ok(Some(Told::Jobs)) => {
                    let job = self.dispatch.next();
                    job.and_then(|job| self.answer_all(&Arc::clone(&job.peer), Some(job), service, &bindings))
                }
                Ok(Some(Told::Peer(key))) => {
                    let peer = lock(&self.connections).get(&key).cloned();
                    peer.and_then(|peer| self.answer_all(&peer, Self::take(&peer), service, &bindings))
                }
                Ok(None) => continue,
                Err(error) => return tracing::error!(%error, "epoll"),
            };
        }
    }

    /// Takes what came on a connection, and has others told of what comes next: the first call.
    fn take(peer: &Arc<Peer>) -> Option<Job> {
        let mut endpoint = lock(&peer.endpoint);
        // Its keeper sees for itself.
        if !peer.may_look() {
            return None;
        }
        endpoint.progress();
        let job = peer.sort(&mut endpoint);
        if endpoint.rest() {
            peer.leave_all(&mut endpoint);
        }
        peer.dispatch.again(peer.key, &endpoint);
        job
    }

    /// Answers this call of a connection's, and those that follow while others have nothing to be done: what there is.
    fn answer_all(
        &self,
        peer: &Arc<Peer>,
        mut job: Option<Job>,
        service: &dyn Service,
        bindings: &[&dyn Binding],
    ) -> Option<Told> {
        let mut answered = 0;
        let told = loop {
            let Some(next) = job
                .take()
                .or_else(|| peer.next_kept())
                .or_else(|| self.look(peer))
            else {
                break None;
            };
            Self::answer(next, service, bindings);
            answered += 1;
            if answered % IN_A_ROW == 0
                && let Ok(Some(told)) = self.dispatch.wait(Some(&NOW))
            {
                break Some(told);
            }
        };
        peer.give_back_ours(&mut lock(&peer.endpoint));
        told
    }

    /// Looks for a call, again and again, for as long as that was of use of late, and nobody else has calls that wait. With one, the connection is this thread's.
    fn look(&self, peer: &Arc<Peer>) -> Option<Job> {
        let end = Instant::now() + lock(&peer.keep).patience.time();
        loop {
            let mut endpoint = lock(&peer.endpoint);
            if !peer.may_look() {
                return None;
            }
            endpoint.progress();
            let job = peer.sort(&mut endpoint);
            if job.is_some() || end <= Instant::now() || endpoint.ended() {
                lock(&peer.keep).patience.note(job.is_some());
                if job.is_some() {
                    peer.keep();
                }
                return job;
            }
            drop(endpoint);
            if self.dispatch.has_jobs() {
                return None;
            }
            std::hint::spin_loop();
        }
    }

    /// Has the service answer.
    fn answer(job: Job, service: &dyn Service, bindings: &[&dyn Binding]) {
        let Job { peer, taken } = job;
        // Its client, who gets no answer, sends it again over another connection, where others may have followed it by now.
        if lock(&peer.endpoint).broken() {
            return;
        }
        let message = taken.message.octets();
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
        let mut endpoint = lock(&peer.endpoint);
        let call = taken.incoming.call;
        // A call that is gone, with its connection, needs no answer.
        let _ = match response {
            Some(response) => endpoint.engine.reply(call, &reply(response)),
            None => endpoint.engine.drop_call(call),
        };
        endpoint.carry();
    }
}

/// An argument without the padding that its chunk may have brought: its count stands before its place in the message.
fn unpadded(message: &[u8], place: usize, item: &Slice) -> Slice {
    let count = message.get(..place).and_then(|before| before.last_chunk::<4>());
    let count = count.map_or(item.len(), |count| u32::from_be_bytes(*count) as usize);
    item.part(0..count.min(item.len()))
}
