//! The driver's list of its objects, for `rdma res`: see [`crate::watch`].

use std::collections::HashMap;
use std::net::SocketAddr;

use urnic_cm::rdma_cm::listing::ListedId;
use urnic_device::vocabulary::QpKind;
use urnic_presence::rdma_netlink::answer::{Object, Resource};

use crate::driver::{Driver, Qp};
use crate::watch::Objects;

/// `enum ib_qp_type`.
fn verbs_kind(kind: QpKind) -> u8 {
    match kind {
        QpKind::ReliableConnected => 2,
        QpKind::UnreliableConnected => 3,
        QpKind::UnreliableDatagram => 4,
    }
}

impl Driver {
    /// The objects that the program has made. Objects that are destroyed meanwhile are left out.
    pub(crate) fn resources(&self) -> Objects {
        let queue_pairs = self.objects().qps().all();
        let mut all: Vec<Resource> = Vec::new();
        let mut add = |id: u32, object: Object| {
            all.push(Resource {
                pid: std::process::id(),
                id,
                object,
            });
        };
        let mut in_domain: HashMap<u32, u64> = HashMap::new();
        let mut on_queue: HashMap<u32, u64> = HashMap::new();
        let mut sharing: HashMap<u32, Vec<u32>> = HashMap::new();
        for (_, qp) in &queue_pairs {
            let (send, receive) = qp.cqs();
            for cq in [send, receive] {
                *on_queue.entry(cq).or_default() += 1;
            }
            *in_domain.entry(qp.pd()).or_default() += 1;
            if let Some(srq) = qp.srq() {
                sharing.entry(srq).or_default().push(qp.qpn);
            }
            if let Some(object) = queue_pair(qp) {
                add(qp.qpn, object);
            }
        }
        for (id, cq) in self.objects().cqs().all() {
            let users = on_queue.get(&id).copied().unwrap_or(0);
            let entries = cq.entries();
            add(id, Object::CompletionQueue { entries, users });
        }
        for (id, srq) in self.objects().srqs().all() {
            let queue_pairs = sharing.remove(&id).unwrap_or_default();
            *in_domain.entry(srq.pd()).or_default() += 1;
            let pd = srq.pd();
            add(id, Object::SharedReceiveQueue { pd, queue_pairs });
        }
        for (&key, region) in self.objects().registered().regions().iter() {
            *in_domain.entry(region.pd).or_default() += 1;
            let (length, pd) = (region.len as u64, region.pd);
            // The low byte of an STag is its key, which changes when the STag is used again.
            add(key >> 8, Object::MemoryRegion { key, length, pd });
        }
        for &id in self.objects().registered().domains().iter() {
            let users = in_domain.get(&id).copied().unwrap_or(0);
            add(id, Object::ProtectionDomain { users });
        }
        for id in self.objects().contexts().all() {
            add(id as u32, Object::Context);
        }
        // Not under the manager's lock: its other users wait for it.
        let listed = self.connections().manager().lock().parts().0.listed();
        for id in listed {
            let is_here = |end: SocketAddr| {
                end.ip().is_unspecified() || self.gids().iter().any(|gid| gid.ip == end.ip())
            };
            if id.local.is_some_and(is_here) {
                add(id.handle, self.cm_id(&id));
            }
        }
        all.sort_by_key(|resource| resource.id);
        Objects {
            name: self.config().name.clone(),
            all,
        }
    }
}

impl Driver {
    fn cm_id(&self, id: &ListedId) -> Object {
        let qp = id.qid.and_then(|qid| self.qp(qid));
        Object::CmId {
            qpn: qp.map_or(0, |qp| qp.qpn),
            port_space: id.port_space.into(),
            state: id.state,
            source: id.local,
            destination: id.remote,
        }
    }
}

fn queue_pair(qp: &Qp) -> Option<Object> {
    let attributes = qp.query().ok()?;
    Some(Object::QueuePair {
        kind: verbs_kind(qp.kind),
        state: attributes.state as u8,
        peer: attributes.dest_qpn,
        rq_psn: attributes.rq_psn,
        sq_psn: attributes.sq_psn,
        pd: qp.pd(),
    })
}
