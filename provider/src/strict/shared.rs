//! Shared receive queues: their receives complete in any order, at any of their queue pairs.

use std::collections::HashMap;
use std::sync::Mutex;

use urnic_process::lock::lock;

use super::posted::{Element, Posted, Request, Requests};
use super::process::Strict;
use super::rule::Rule;

/// The check of one shared receive queue. It gives each receive a token, which is the device's name
/// of it, because programs may use a `wr_id` several times.
pub(crate) struct SharedCheck {
    requests: Requests,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    last: u64,
    posted: HashMap<u64, Posted>,
}

impl SharedCheck {
    /// The check of a new queue in the protection domain with this number; `arena` as for queue
    /// pairs.
    pub(crate) fn new(
        strict: &'static Strict,
        srqn: u32,
        pd: u32,
        arena: Option<(usize, u32)>,
    ) -> SharedCheck {
        SharedCheck {
            requests: Requests::new(strict, format!("srq {srqn:#x}"), pd, arena),
            known: Mutex::default(),
        }
    }

    /// The program posts a receive. Returns its token, and the element for the device, if that is
    /// to place the bytes elsewhere.
    #[cold]
    pub(crate) fn receive_posted(&self, request: &Request<'_>) -> (u64, Option<Element>) {
        let (posted, element) = self.requests.post(request);
        let mut known = lock(&self.known);
        known.last += 1;
        let token = known.last;
        known.posted.insert(token, posted);
        (token, element)
    }

    /// The program's name of a receive.
    pub(crate) fn wr_id(&self, token: u64) -> u64 {
        lock(&self.known)
            .posted
            .get(&token)
            .map_or(token, |posted| posted.wr_id)
    }

    /// The program polled the completion of a receive, which has `len` bytes. `failed` is what the
    /// completion says, if it is an error and no flush.
    #[cold]
    pub(crate) fn receive_completed(&self, token: u64, len: u32, failed: Option<String>) {
        let Some(posted) = lock(&self.known).posted.remove(&token) else {
            return;
        };
        self.requests.complete(&posted, len);
        if let Some(failed) = failed {
            self.requests.report(Rule::RequestFailed, &posted.site, || failed);
        }
    }

    /// The queue is destroyed: nothing completes any more.
    pub(crate) fn emptied(&self) {
        let posted: Vec<_> = lock(&self.known).posted.drain().collect();
        for (_, posted) in &posted {
            self.requests.forget(posted);
        }
    }
}
