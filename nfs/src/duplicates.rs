//! Calls that came before: a client that got no answer sends its call again, with the same xid, and what is done once must not be done twice.

use crate::rpc::Call;
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Replies kept. Those of the procedures that need it are short.
const KEPT: usize = 4096;

/// Which call it is. A client that connects anew may have another port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    peer: IpAddr,
    xid: u32,
    procedure: u32,
    octets: u64,
}

/// The replies to the last calls that change something.
#[derive(Debug, Default)]
pub(crate) struct Duplicates {
    kept: Mutex<Kept>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct Kept {
    /// `None`: it is being served.
    replies: HashMap<Key, Option<Vec<u8>>>,
    order: VecDeque<Key>,
}

/// A call that is being served is not there any more, however that ends.
struct Served<'a> {
    of: &'a Duplicates,
    key: Key,
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        let mut kept = self.of.lock();
        if matches!(kept.replies.get(&self.key), Some(None)) {
            kept.replies.remove(&self.key);
            drop(kept);
            self.of.done.notify_all();
        }
    }
}

impl Duplicates {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reply to a call: what was answered before, or else what `serve` answers.
    pub(crate) fn once(
        &self,
        peer: IpAddr,
        call: &Call,
        octets: (&[u8], &[u8]),
        serve: impl FnOnce() -> Vec<u8>,
    ) -> Vec<u8> {
        let mut hasher = DefaultHasher::new();
        octets.hash(&mut hasher);
        let key = Key {
            peer,
            xid: call.xid,
            procedure: call.procedure,
            octets: hasher.finish(),
        };
        let mut kept = self.lock();
        loop {
            match kept.replies.get(&key) {
                Some(Some(reply)) => return reply.clone(),
                // The first is still at it: its client has, perhaps, another connection now, and waits for this answer.
                Some(None) => kept = self.done.wait(kept).unwrap_or_else(PoisonError::into_inner),
                None => break,
            }
        }
        kept.replies.insert(key, None);
        drop(kept);
        let served = Served { of: self, key };
        let reply = serve();
        let mut kept = self.lock();
        kept.replies.insert(key, Some(reply.clone()));
        kept.order.push_back(key);
        if kept.order.len() > KEPT
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.replies.remove(&oldest);
        }
        drop(kept);
        self.done.notify_all();
        drop(served);
        reply
    }
}
