//! Replies to repeated calls. A client without an answer repeats its call with the same xid, and
//! the server must not make a change twice.

use crate::rpc::Call;
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use urnic_rpc_rdma_verbs::shares::Client;
use urnic_sync::{Condvar, Mutex, MutexGuard};

/// Number of kept replies. The procedures whose replies are kept have short replies.
const KEPT: usize = 4096;

/// The key of a call. It has no port, because a client may connect again from another port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    peer: IpAddr,
    xid: u32,
    procedure: u32,
    bytes: u64,
}

/// The replies to the last calls that made changes.
#[derive(Debug, Default)]
pub(crate) struct Duplicates {
    kept: Mutex<Kept>,
    done: Condvar,
}

#[derive(Debug, Default)]
struct Kept {
    /// The reply; `None` while the call is being served.
    replies: HashMap<Key, Option<Vec<u8>>>,
    /// The calls of each client, oldest first. `count` is the number of all calls.
    orders: HashMap<Client, VecDeque<Key>>,
    count: usize,
}

impl Kept {
    /// Keeps a reply. When there are too many, the client with the most replies loses its oldest.
    fn keep(&mut self, key: Key, reply: Vec<u8>) {
        self.replies.insert(key, Some(reply));
        self.orders.entry(key.peer.into()).or_default().push_back(key);
        self.count += 1;
        if self.count <= KEPT {
            return;
        }
        let Some((&most, order)) = self.orders.iter_mut().max_by_key(|(_, order)| order.len()) else {
            return;
        };
        if let Some(oldest) = order.pop_front() {
            self.replies.remove(&oldest);
            self.count -= 1;
        }
        if order.is_empty() {
            self.orders.remove(&most);
        }
    }
}

/// Removes a call from the calls being served when dropped.
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
        self.kept.lock()
    }

    /// Returns the kept reply to a call, or otherwise the result of `serve`.
    pub(crate) fn once(
        &self,
        peer: IpAddr,
        call: &Call,
        bytes: (&[u8], &[u8]),
        serve: impl FnOnce() -> Vec<u8>,
    ) -> Vec<u8> {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let key = Key {
            peer,
            xid: call.xid,
            procedure: call.procedure,
            bytes: hasher.finish(),
        };
        let mut kept = self.lock();
        loop {
            match kept.replies.get(&key) {
                Some(Some(reply)) => return reply.clone(),
                // The first copy of the call is still being served. Its client may have connected
                // again, and waits for this answer.
                Some(None) => kept = self.done.wait(kept),
                None => break,
            }
        }
        kept.replies.insert(key, None);
        drop(kept);
        let served = Served { of: self, key };
        let reply = serve();
        let mut kept = self.lock();
        kept.keep(key, reply.clone());
        drop(kept);
        self.done.notify_all();
        drop(served);
        reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Credential;
    use std::net::Ipv4Addr;

    #[test]
    fn a_client_with_many_calls_does_not_evict_others() {
        let duplicates = Duplicates::default();
        let answers = |host: u8, xid: u32, reply: u8| {
            let call = Call {
                xid,
                program: 100_003,
                version: 3,
                procedure: 12,
                credential: Credential::Anonymous,
            };
            let peer = Ipv4Addr::new(192, 0, 2, host).into();
            duplicates.once(peer, &call, (b"call", b""), || vec![reply])
        };
        assert_eq!(answers(1, 7, 1), [1]);
        for xid in 0..3 * KEPT as u32 {
            answers(2, xid, 2);
        }
        assert_eq!(answers(1, 7, 9), [1], "executed once");
        assert_eq!(answers(2, 3 * KEPT as u32 - 1, 9), [2]);
        assert_eq!(answers(2, 0, 9), [9], "too long ago");
        let kept = duplicates.lock();
        assert_eq!((kept.count, kept.replies.len()), (KEPT, KEPT));
    }
}
