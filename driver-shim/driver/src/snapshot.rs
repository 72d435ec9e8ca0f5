//! The driver's snapshot of its own state: see [`crate::watch`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use urnic_device::command::{Count, Handle, Opcode, QpStatus};
use urnic_device::counter::Counter;
use urnic_device::stream::{Endpoints, attached};
use urnic_device::vocabulary::QpState;
use zerocopy::little_endian::U64;

use crate::driver::{Driver, Qp};
use crate::refusal::last_refused;
use crate::watch::{QueuePair, Snapshot};
use urnic_process::program;

/// All counters of a device of this version.
type Values = [U64; Counter::ALL.len()];

impl Driver {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let pairs = self.objects().qps().all();
        // Queue pairs that are destroyed during the snapshot are left out.
        let mut queue_pairs: Vec<QueuePair> = pairs
            .iter()
            .filter_map(|(_, qp)| self.queue_pair(qp).ok())
            .collect();
        queue_pairs.sort_by_key(|pair| pair.qpn);
        let count = |len: usize| u64::try_from(len).unwrap_or(u64::MAX);
        Snapshot {
            pid: std::process::id(),
            command: program::name(),
            name: self.config().name.clone(),
            device: self.config().device.to_string(),
            memory: self.bus().memory().to_owned(),
            contexts: count(self.objects().contexts().len()),
            completion_queues: count(self.objects().cqs().len()),
            counters: self.counters(0).unwrap_or_default(),
            failures: self.failures().all(),
            last_refusal: last_refused(),
            queue_pairs,
        }
    }

    /// Counters of a queue pair, or of the device (0).
    fn counters(&self, qid: u32) -> Result<BTreeMap<String, u64>, Errno> {
        let handle = Handle { id: qid.into() };
        let (buffer, count) =
            self.commands()
                .fetch::<_, Count>(Opcode::QueryCounters, &handle, size_of::<Values>())?;
        // A device of another version may have fewer counters, or more that have no name here.
        let values = buffer.read::<Values>(0);
        let known = values.iter().take(count.count.get() as usize);
        Ok(Counter::ALL
            .iter()
            .zip(known)
            .map(|(counter, value)| (counter.name().to_owned(), value.get()))
            .collect())
    }

    fn queue_pair(&self, qp: &Qp) -> Result<QueuePair, Errno> {
        let handle = Handle { id: qp.qid.into() };
        let (buffer, status) =
            self.commands()
                .fetch::<_, QpStatus>(Opcode::QueryQp, &handle, size_of::<Endpoints>())?;
        let ends = buffer.read::<Endpoints>(0);
        let address = |end| {
            let end = SocketAddr::from(end);
            (end.port() != 0).then(|| end.to_string())
        };
        let record = qp.record();
        let between = |consumer: &AtomicU32, producer: &AtomicU32| {
            // The consumer is read first, since the producer only grows.
            let consumer = consumer.load(Ordering::Acquire);
            producer.load(Ordering::Acquire).wrapping_sub(consumer)
        };
        Ok(QueuePair {
            qpn: qp.qpn,
            state: name(status.state.get()).to_owned(),
            rdma_cm: qp.is_managed(),
            bytes: way(status.attached.get()).map(str::to_owned),
            local: address(ends.local),
            remote: address(ends.remote),
            terminate_sent: status.terminate_sent.get(),
            terminate_received: status.terminate_received.get(),
            send_blocks: between(&record.sq_consumer, &record.sq_producer),
            receives: between(&record.rq_consumer, &record.rq_producer),
            transfer_len: status.transfer_len.get(),
            transfer_done: status.transfer_done.get(),
            counters: self.counters(qp.qid)?,
        })
    }
}

/// The way of a stream's bytes, for the field `bytes`.
fn way(value: u32) -> Option<&'static str> {
    match value {
        attached::NONE => None,
        attached::MEMORY => Some("memory"),
        attached::SCTP => Some("sctp"),
        attached::ROCE => Some("roce"),
        _ => Some("tcp"),
    }
}

/// The name of a state in the field `state`.
fn name(state: u32) -> &'static str {
    QpState::from_raw(state).map_or("?", QpState::verbs_name)
}
