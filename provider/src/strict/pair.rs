//! Queue pairs: the requests that the program has posted and whose completion it has not polled.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use urnic_process::lock::lock;

use super::call_site::CallSite;
use super::posted::{Element, Posted, Request, Requests};
use super::process::Strict;
use super::queue::QueueCheck;
use super::rule::Rule;
use super::shared::SharedCheck;

/// The check of one queue pair.
pub(crate) struct PairCheck {
    requests: Requests,
    /// The completion queues of sends and receives.
    cqs: [Arc<QueueCheck>; 2],
    /// That of the shared receive queue, if it has one.
    shared: Option<Arc<SharedCheck>>,
    sends: Mutex<VecDeque<Posted>>,
    receives: Mutex<VecDeque<Posted>>,
}

impl PairCheck {
    /// The check of a new queue pair in the protection domain with this number; `arena` is the
    /// address and key of memory of [`ARENA`](super::ARENA) bytes where requests can be held back.
    pub(crate) fn new(
        strict: &'static Strict,
        qpn: u32,
        pd: u32,
        cqs: [Arc<QueueCheck>; 2],
        shared: Option<Arc<SharedCheck>>,
        arena: Option<(usize, u32)>,
    ) -> PairCheck {
        PairCheck {
            requests: Requests::new(strict, format!("qp {qpn:#x}"), pd, arena),
            cqs,
            shared,
            sends: Mutex::default(),
            receives: Mutex::default(),
        }
    }

    /// The check of the shared receive queue, if it has one.
    pub(crate) fn shared(&self) -> Option<&SharedCheck> {
        self.shared.as_deref()
    }

    fn report(&self, rule: Rule, site: &CallSite, text: impl FnOnce() -> String) {
        self.requests.report(rule, site, text);
    }

    /// The program posts a request to the send queue. Returns the element for the device, if that
    /// is to place what it fetches elsewhere.
    #[cold]
    pub(crate) fn send_posted(&self, request: &Request<'_>) -> Option<Element> {
        let (posted, element) = self.requests.post(request);
        if request.signalled {
            self.cqs[0].add(self.requests.strict, &posted.site);
        }
        lock(&self.sends).push_back(posted);
        element
    }

    /// The program posts a receive. Returns the element for the device, if that is to place the
    /// bytes elsewhere.
    #[cold]
    pub(crate) fn receive_posted(&self, request: &Request<'_>) -> Option<Element> {
        let (posted, element) = self.requests.post(request);
        self.cqs[1].add(self.requests.strict, &posted.site);
        lock(&self.receives).push_back(posted);
        element
    }

    /// Requests from this slot on, which the program had not completed, are taken back.
    #[cold]
    pub(crate) fn sends_taken_back(&self, slot: u32) {
        let mut sends = lock(&self.sends);
        let is_kept = |posted: &Posted| posted.slot.wrapping_sub(slot).cast_signed() < 0;
        let kept = sends.iter().take_while(|posted| is_kept(posted)).count();
        for taken_back in sends.drain(kept..) {
            self.cqs[0].remove(taken_back.signalled.into());
            self.requests.forget(&taken_back);
        }
    }

    /// The program polled the completion of a send: it and those before are complete, the last one
    /// successfully if `done`. `failed` is what the completion says, if it is an error and no
    /// flush.
    #[cold]
    pub(crate) fn send_completed(&self, slot: u32, done: bool, failed: Option<String>) {
        let mut sends = lock(&self.sends);
        let is_complete = |posted: &Posted| slot.wrapping_sub(posted.slot).cast_signed() >= 0;
        let count = sends.iter().take_while(|posted| is_complete(posted)).count();
        let complete: Vec<Posted> = sends.drain(..count).collect();
        drop(sends);
        if let (Some(failed), Some(last)) = (failed, complete.last()) {
            self.report(Rule::RequestFailed, &last.site, || failed);
        }
        for posted in &complete {
            self.cqs[0].remove(posted.signalled.into());
            let has_bytes = done || posted.slot != slot;
            self.requests
                .complete(posted, if has_bytes { u32::MAX } else { 0 });
        }
    }

    /// The program polled the completion of its oldest receive, which has `len` bytes.
    #[cold]
    pub(crate) fn receive_completed(&self, len: u32, failed: Option<String>) {
        let Some(posted) = lock(&self.receives).pop_front() else {
            return;
        };
        self.cqs[1].remove(1);
        self.requests.complete(&posted, len);
        if let Some(failed) = failed {
            self.report(Rule::RequestFailed, &posted.site, || failed);
        }
    }

    /// The queues were emptied: nothing completes any more.
    pub(crate) fn emptied(&self) {
        let sends: Vec<_> = lock(&self.sends).drain(..).collect();
        let signalled = sends.iter().filter(|posted| posted.signalled).count();
        self.cqs[0].remove(signalled as u32);
        let receives: Vec<_> = lock(&self.receives).drain(..).collect();
        self.cqs[1].remove(receives.len() as u32);
        for posted in sends.iter().chain(&receives) {
            self.requests.forget(posted);
        }
    }

    /// A post was refused, for this reason; `full`: the send queue has no slot.
    #[cold]
    pub(crate) fn refused(&self, reason: &str, full: bool) {
        let site = CallSite::here();
        let sends = lock(&self.sends);
        let unsignalled = full && !sends.is_empty() && !sends.iter().any(|posted| posted.signalled);
        let outstanding = sends.len();
        drop(sends);
        if unsignalled {
            self.report(Rule::NoneSignalled, &site, || {
                format!(
                    "the send queue is full: of its {outstanding} requests none is signalled, so no completion \
                     will ever free a place"
                )
            });
        } else {
            self.report(Rule::PostRefused, &site, || reason.to_owned());
        }
    }
}
