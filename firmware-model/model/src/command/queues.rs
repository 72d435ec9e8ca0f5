//! Commands on doorbell pages, event queues, completion queues, shared receive queues and queue
//! pairs.

use super::Job;
use super::answer::{Answer, Check as _, Refused, argument, count, done, handle, ok};
use super::paths::open_port;
use crate::datagram::{DatagramParams, Ports as DatagramPorts};
use crate::events::{Effects, EventQueue};
use crate::host::Record;
use crate::memory::DomainUse;
use crate::qp::Qp;
use crate::queues::{CompletionQueue, ReceiveQueue, ReceiveSource, SendQueue, SharedReceiveQueue};
use crate::runtime::{Core, PageUser, Uar};
use crate::stream::Ends;
use crate::stream::datagram::MAX_PAYLOAD;
use crate::stream::roce_port::ServiceName;
use crate::transport::{Identity, QPN_MASK, QpChange, QpQueues};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use urnic_device::command::{
    CreateCq, CreateEq, CreateQp, CreateSrq, Handle, ModerateCq, ModifyQp, ModifySrq, QueueHandle, ResizeCq,
    Status, cq, create_qp,
};
use urnic_device::cqe::CQE_LEN;
use urnic_device::event::EVENT_LEN;
use urnic_device::record::QueueRecord;
use urnic_device::registers::NO_VECTOR;
use urnic_device::stream::{Endpoint, Endpoints, input};
use urnic_device::vocabulary::{QpKind, QpState};
use urnic_device::wqe::{BLOCK_LEN, MAX_BLOCKS, MAX_SGE, RecvHeader, Sge};
use urnic_wire::mad::MANAGEMENT_QPN;
use zerocopy::FromZeros;

/// Alignment of rings: a cache line, so that no entry spans two.
const RING_ALIGN: usize = 64;
/// Entries of the largest event queue, log2.
const MAX_LOG_EVENTS: u32 = 20;
/// Bytes of a receive entry, log2: a header at least, and no more than the longest list takes.
const LOG_STRIDE: std::ops::RangeInclusive<u32> = 4..=10;
const _: () = assert!(size_of::<RecvHeader>() + MAX_SGE * size_of::<Sge>() <= 1 << *LOG_STRIDE.end());

fn uses(counter: &AtomicU32) -> u32 {
    counter.load(Ordering::Acquire)
}

fn enter(counter: &AtomicU32) {
    counter.fetch_add(1, Ordering::AcqRel);
}

fn leave(counter: &AtomicU32) {
    counter.fetch_sub(1, Ordering::AcqRel);
}

/// Whether a ring of `1 << log_size` entries is within `limit`.
fn check_size(log_size: u32, limit: u32) -> Result<(), Status> {
    let fits = 1u64.checked_shl(log_size).is_some_and(|n| n <= u64::from(limit));
    fits.then_some(()).ok_or(Status::InvalidArgument)
}

fn queue_handle(id: u32, doorbell: u32) -> Answer {
    ok(&QueueHandle {
        id: id.into(),
        doorbell: doorbell.into(),
    })
}

/// The argument of a receive queue that is refused.
enum ReceivePart {
    Size,
    Stride,
    Ring,
}

impl ReceivePart {
    /// The position of this argument, of those of the queue's ring, size and stride.
    fn of(&self, ring: u32, size: u32, stride: u32) -> u32 {
        match self {
            ReceivePart::Ring => ring,
            ReceivePart::Size => size,
            ReceivePart::Stride => stride,
        }
    }
}

/// Destroys all of them, for a reset.
pub(super) fn destroy_all(core: &Core) {
    for qp in core.qps.drain() {
        // No event reports this: the event queues are destroyed, too.
        qp.destroy(core, true, &mut Effects::default());
    }
    core.srqs.drain();
    core.cqs.drain().iter().for_each(|cq| cq.close());
    core.async_events.store(None);
    core.schedule.note_backed_up(false);
    let queues = std::mem::take(&mut *core.event_queues());
    queues.values().for_each(|eq| eq.close());
    core.uars.drain();
    core.own_page.clear();
    if let Some(pages) = &core.pages {
        pages.clear();
    }
}

impl Job<'_> {
    pub(super) fn alloc_uar(&self) -> Answer {
        let page = self
            .core
            .uars
            .insert_with(Status::NoResources, |id| Ok(Uar::new(id)))?;
        handle(page.id)
    }

    pub(super) fn free_uar(&self) -> Answer {
        let page = self.core.uars.find(self.handle()).of(argument!(Handle.id))?;
        if uses(&page.users) > 0 {
            return Err(Status::Busy.into());
        }
        self.core.uars.remove(page.id);
        done()
    }

    pub(super) fn create_eq(&self) -> Answer {
        let arguments: CreateEq = self.arguments();
        let (vector, log_size) = (arguments.vector.get(), arguments.log_size.get());
        check_size(log_size, 1 << MAX_LOG_EVENTS).of(argument!(CreateEq.log_size))?;
        (vector < self.core.config.vectors || vector == NO_VECTOR).of(argument!(CreateEq.vector))?;
        let ring = self.map(arguments.ring.get(), EVENT_LEN << log_size, RING_ALIGN);
        let ring = ring.of(argument!(CreateEq.ring))?;
        let record = Record::new(&*self.core.host, arguments.record.get());
        let record = record.ok_or(Status::DmaFault).of(argument!(CreateEq.record))?;
        let mut queues = self.core.event_queues();
        let id = (0..self.core.config.limits.eqs)
            .find(|id| !queues.contains_key(id))
            .ok_or(Status::NoResources)?;
        let queue = Arc::new(EventQueue::new(id, vector, ring, record, log_size));
        queues.insert(id, queue.clone());
        if id == 0 {
            self.core.async_events.store(Some(queue));
        }
        handle(id)
    }

    pub(super) fn destroy_eq(&self) -> Answer {
        let mut queues = self.core.event_queues();
        let queue = queues.get(&self.handle()).of(argument!(Handle.id))?;
        if uses(&queue.users) > 0 {
            return Err(Status::Busy.into());
        }
        if queue.id == 0 {
            self.core.async_events.store(None);
            self.core.schedule.note_backed_up(false);
        }
        queue.close();
        queues.remove(&self.handle());
        done()
    }

    pub(super) fn create_cq(&self) -> Answer {
        self.room_for_events()?;
        let arguments: CreateCq = self.arguments();
        let log_size = arguments.log_size.get();
        check_size(log_size, self.core.config.limits.cqes).of(argument!(CreateCq.log_size))?;
        let page = self.core.page(arguments.uar.get()).of(argument!(CreateCq.uar))?;
        let events = match arguments.eq.get() {
            0 => None,
            id => Some(
                self.core
                    .event_queues()
                    .get(&id)
                    .cloned()
                    .of(argument!(CreateCq.eq))?,
            ),
        };
        if events
            .as_ref()
            .is_some_and(|queue| !self.core.has_room_for_events(queue))
        {
            return Err(Status::NoResources.into());
        }
        let ring = self.map(arguments.ring.get(), CQE_LEN << log_size, RING_ALIGN);
        let ring = ring.of(argument!(CreateCq.ring))?;
        let record = Record::new(&*self.core.host, arguments.record.get());
        let record = record.ok_or(Status::DmaFault).of(argument!(CreateCq.record))?;
        let cq = self.core.cqs.insert_with(Status::NoResources, |id| {
            Ok(CompletionQueue::new(
                id,
                page.id,
                ring,
                record,
                log_size,
                events.clone(),
                arguments.flags.get() & cq::UNTIMED == 0,
            ))
        })?;
        if let Some(events) = events {
            enter(&events.users);
        }
        queue_handle(cq.id, self.core.enter_page(&page, PageUser::Cq(cq.id)))
    }

    pub(super) fn destroy_cq(&self) -> Answer {
        let cq = self.core.cqs.find(self.handle()).of(argument!(Handle.id))?;
        if cq.is_used() {
            return Err(Status::Busy.into());
        }
        self.core.cqs.remove(cq.id);
        cq.close();
        if let Some(events) = cq.events() {
            leave(&events.users);
        }
        self.core.leave_page(cq.uar, PageUser::Cq(cq.id));
        done()
    }

    pub(super) fn resize_cq(&mut self) -> Answer {
        let arguments: ResizeCq = self.arguments();
        let log_size = arguments.log_size.get();
        check_size(log_size, self.core.config.limits.cqes).of(argument!(ResizeCq.log_size))?;
        let cq = self.core.cqs.find(arguments.cq.get());
        let cq = cq.of(argument!(ResizeCq.cq))?;
        let ring = self.map(arguments.ring.get(), CQE_LEN << log_size, RING_ALIGN);
        let ring = ring.of(argument!(ResizeCq.ring))?;
        // Completions of what was posted before count: they might not find room in a smaller ring.
        for qp in cq.pairs().into_iter().filter_map(|qid| self.core.qps.find(qid)) {
            qp.catch_up(self.core, self.effects);
        }
        let carried = cq.resize(ring, log_size).ok_or(Status::InvalidArgument);
        let carried = carried.of(argument!(ResizeCq.log_size))?;
        count(carried as usize)
    }

    pub(super) fn moderate_cq(&mut self) -> Answer {
        let arguments: ModerateCq = self.arguments();
        let most = |value: u32| u16::try_from(value).map_err(|_| Status::InvalidArgument);
        let count = most(arguments.count.get()).of(argument!(ModerateCq.count))?;
        let period = most(arguments.period.get()).of(argument!(ModerateCq.period))?;
        let cq = self.core.cqs.find(arguments.cq.get());
        let period = Duration::from_micros(period.into());
        cq.of(argument!(ModerateCq.cq))?
            .moderate(count.into(), period, self.effects);
        done()
    }

    /// A receive queue on its ring, with a record that the caller passes.
    fn receive_queue(
        &self,
        ring: u64,
        record: Arc<Record<QueueRecord>>,
        log_size: u32,
        log_stride: u32,
    ) -> Result<ReceiveQueue, (Status, ReceivePart)> {
        let size = check_size(log_size, self.core.config.limits.work_requests);
        size.map_err(|status| (status, ReceivePart::Size))?;
        if !LOG_STRIDE.contains(&log_stride) {
            return Err((Status::InvalidArgument, ReceivePart::Stride));
        }
        let ring = self.map(ring, 1 << (log_size + log_stride), 16);
        let ring = ring.map_err(|status| (status, ReceivePart::Ring))?;
        Ok(ReceiveQueue::new(ring, record, log_size, log_stride))
    }

    fn queue_record(&self, iova: u64) -> Result<Arc<Record<QueueRecord>>, Status> {
        let record = Record::new(&*self.core.host, iova).ok_or(Status::DmaFault)?;
        Ok(Arc::new(record))
    }

    pub(super) fn create_srq(&self) -> Answer {
        let arguments: CreateSrq = self.arguments();
        let pd = arguments.pd.get();
        let page = self.core.page(arguments.uar.get()).of(argument!(CreateSrq.uar))?;
        let record = self.queue_record(arguments.record.get());
        let queue = self.receive_queue(
            arguments.ring.get(),
            record.of(argument!(CreateSrq.record))?,
            arguments.log_size.get(),
            arguments.log_stride.get(),
        );
        let queue = queue.map_err(|(status, part)| {
            let (ring, size) = (argument!(CreateSrq.ring), argument!(CreateSrq.log_size));
            let argument = part.of(ring, size, argument!(CreateSrq.log_stride));
            Refused { status, argument }
        })?;
        let domains = self.core.memory.domains();
        let domain = domains.enter(pd, DomainUse::SharedReceiveQueue).then_some(());
        domain.of(argument!(CreateSrq.pd))?;
        let made = self.core.srqs.insert_with(Status::NoResources, |id| {
            Ok(SharedReceiveQueue::new(id, pd, page.id, queue))
        });
        let srq = made.inspect_err(|_| domains.leave(pd, DomainUse::SharedReceiveQueue))?;
        queue_handle(srq.id, self.core.enter_page(&page, PageUser::Srq(srq.id)))
    }

    pub(super) fn modify_srq(&mut self) -> Answer {
        let arguments: ModifySrq = self.arguments();
        if arguments.limit.get() > 0 {
            self.room_for_events()?;
        }
        let srq = self.core.srqs.find(arguments.srq.get());
        let srq = srq.of(argument!(ModifySrq.srq))?;
        srq.arm_limit(arguments.limit.get(), self.effects);
        done()
    }

    pub(super) fn destroy_srq(&self) -> Answer {
        let srq = self.core.srqs.find(self.handle()).of(argument!(Handle.id))?;
        if uses(&srq.users) > 0 {
            return Err(Status::Busy.into());
        }
        self.core.srqs.remove(srq.id);
        let domains = self.core.memory.domains();
        domains.leave(srq.pd, DomainUse::SharedReceiveQueue);
        self.core.leave_page(srq.uar, PageUser::Srq(srq.id));
        done()
    }

    pub(super) fn create_qp(&self) -> Answer {
        let arguments: CreateQp = self.arguments();
        let core = self.core;
        let kind = QpKind::from_raw(arguments.kind.get()).ok_or(Status::InvalidArgument);
        let kind = kind.of(argument!(CreateQp.kind))?;
        let rules = parse_rules(arguments.rules.get(), kind);
        let [infiniband, blocks_own_multicast, is_roce] = rules.of(argument!(CreateQp.rules))?;
        let member = member_of(&arguments, is_roce).of(argument!(CreateQp.member))?;
        let pd = arguments.pd.get();
        let page = core.page(arguments.uar.get()).of(argument!(CreateQp.uar))?;
        let send_cq = core.cqs.find(arguments.send_cq.get());
        let send_cq = send_cq.of(argument!(CreateQp.send_cq))?.clone();
        let recv_cq = core.cqs.find(arguments.recv_cq.get());
        let recv_cq = recv_cq.of(argument!(CreateQp.recv_cq))?.clone();
        let srq = match arguments.srq.get() {
            0 => None,
            id => Some(core.srqs.find(id).of(argument!(CreateQp.srq))?.clone()),
        };
        let (sq, rq) = self.work_queues(&arguments, srq.as_ref())?;
        let domains = core.memory.domains();
        let domain = domains.enter(pd, DomainUse::QueuePair).then_some(());
        domain.of(argument!(CreateQp.pd))?;
        let made = core.qps.insert_with(Status::NoResources, |qid| {
            let label = label_of(&arguments, kind);
            let identity = Identity {
                qid,
                label,
                pd,
                extensions: core.config.rfc7306,
                infiniband,
                unreliable: kind == QpKind::UnreliableConnected,
                last_first: core.config.last_first,
            };
            match kind {
                QpKind::ReliableConnected | QpKind::UnreliableConnected => {
                    let queues = QpQueues::new((sq, send_cq), (rq, recv_cq));
                    Ok(Qp::new(identity, queues, page.id, srq))
                }
                QpKind::UnreliableDatagram => {
                    let (ports, service) = match is_roce {
                        true => (
                            DatagramPorts::Shared(open_port(core, (label, member), qid)?),
                            None,
                        ),
                        false => self.own_ports(&arguments)?,
                    };
                    let params = DatagramParams {
                        sq: sq.of_datagrams(),
                        send_cq,
                        rq,
                        recv_cq,
                        ports,
                        service,
                        max_payload: match arguments.max_datagram.get() as usize {
                            0 => MAX_PAYLOAD,
                            max => max.min(MAX_PAYLOAD),
                        },
                        blocks_own_multicast,
                        config: core.config.clone(),
                    };
                    Ok(Qp::of_datagrams(identity, params, page.id, srq))
                }
            }
        });
        let qp = made.inspect_err(|_| domains.leave(pd, DomainUse::QueuePair))?;
        if let Err(status) = qp.watch_ports(core) {
            core.qps.remove(qp.id);
            domains.leave(pd, DomainUse::QueuePair);
            return Err(status.into());
        }
        qp.send_cq.enter(qp.id);
        qp.recv_cq.enter(qp.id);
        if let Some(srq) = &qp.srq {
            enter(&srq.users);
        }
        queue_handle(qp.id, self.core.enter_page(&page, PageUser::Qp(qp.id)))
    }

    /// The UDP port that the arguments name, and the name of its services.
    fn own_ports(&self, arguments: &CreateQp) -> Result<(DatagramPorts, Option<ServiceName>), Status> {
        let port = self.core.ports.take(arguments.datagrams.get());
        port.map(|port| (DatagramPorts::Own(port.sockets), port.service))
            .ok_or(Status::InvalidHandle)
    }

    /// The queues of a queue pair, in the rings that the arguments name.
    fn work_queues(
        &self,
        arguments: &CreateQp,
        srq: Option<&Arc<SharedReceiveQueue>>,
    ) -> Result<(SendQueue, ReceiveSource), Refused> {
        let sq_log_size = arguments.sq_log_size.get();
        let blocks = self
            .core
            .config
            .limits
            .work_requests
            .saturating_mul(MAX_BLOCKS as u32);
        check_size(sq_log_size, blocks).of(argument!(CreateQp.sq_log_size))?;
        let record = self.queue_record(arguments.record.get());
        let record = record.of(argument!(CreateQp.record))?;
        let ring = self.map(arguments.sq_ring.get(), BLOCK_LEN << sq_log_size, RING_ALIGN);
        let ring = ring.of(argument!(CreateQp.sq_ring))?;
        let sq = SendQueue::new(ring, record.clone(), sq_log_size);
        let rq = match srq {
            Some(srq) => ReceiveSource::Shared(srq.clone()),
            None => {
                let queue = self.receive_queue(
                    arguments.rq_ring.get(),
                    record,
                    arguments.rq_log_size.get(),
                    arguments.rq_log_stride.get(),
                );
                ReceiveSource::Own(queue.map_err(|(status, part)| {
                    let (ring, size) = (argument!(CreateQp.rq_ring), argument!(CreateQp.rq_log_size));
                    let argument = part.of(ring, size, argument!(CreateQp.rq_log_stride));
                    Refused { status, argument }
                })?)
            }
        };
        Ok((sq, rq))
    }

    pub(super) fn modify_qp(&mut self) -> Answer {
        let arguments: ModifyQp = self.arguments();
        let limits = &self.core.config.limits;
        let change = QpChange::parse(&arguments).ok_or(Status::InvalidArgument)?;
        // What ends a queue pair is never refused.
        if !matches!(change.state, Some(QpState::Err | QpState::Reset)) {
            self.room_for_events()?;
        }
        change
            .ird
            .is_none_or(|n| n <= limits.ird)
            .of(argument!(ModifyQp.ird))?;
        change
            .ord
            .is_none_or(|n| n <= limits.ord)
            .of(argument!(ModifyQp.ord))?;
        let qp = self.core.qps.find(arguments.qp.get());
        let qp = qp.of(argument!(ModifyQp.qp))?;
        qp.modify(self.core, change, self.effects)?;
        done()
    }

    pub(super) fn query_qp(&mut self) -> Answer {
        let qp = self.core.qps.find(self.handle()).of(argument!(Handle.id))?;
        let (status, ends) = qp.status(self.effects)?;
        if self.command.output_len.get() > 0 {
            self.write_output(
                &ends.map_or_else(Endpoints::new_zeroed, |Ends { local, remote }| Endpoints {
                    local: Endpoint::from(local),
                    remote: Endpoint::from(remote),
                    input: input::NONE.into(),
                }),
            )?;
        }
        ok(&status)
    }

    pub(super) fn destroy_qp(&mut self) -> Answer {
        let qp = self.core.qps.remove(self.handle()).of(argument!(Handle.id))?;
        qp.destroy(self.core, false, self.effects);
        qp.send_cq.leave(qp.id);
        qp.recv_cq.leave(qp.id);
        if let Some(srq) = &qp.srq {
            leave(&srq.users);
        }
        self.core.leave_page(qp.uar, PageUser::Qp(qp.id));
        self.core
            .memory
            .domains()
            .leave(qp.identity.pd, DomainUse::QueuePair);
        done()
    }
}

/// The number of the member that queue pair 1 on the wire of RoCE v2 gives, if it does.
fn member_of(arguments: &CreateQp, is_roce: bool) -> Result<Option<u16>, Status> {
    let is_general = is_roce && arguments.label.get() & QPN_MASK == MANAGEMENT_QPN;
    match u16::try_from(arguments.member.get()) {
        Ok(0) => Ok(None),
        Ok(member) if is_general => Ok(Some(member)),
        _ => Err(Status::InvalidArgument),
    }
}

/// The label of a queue pair: of kind UD, its number on the wire.
fn label_of(arguments: &CreateQp, kind: QpKind) -> u32 {
    match kind {
        QpKind::UnreliableDatagram => arguments.label.get() & QPN_MASK,
        _ => arguments.label.get(),
    }
}

/// The rules of a queue pair ([`create_qp`]): whether its errors are those of InfiniBand, and
/// whether it does not receive its own multicast.
fn parse_rules(rules: u32, kind: QpKind) -> Result<[bool; 3], Status> {
    let known = [
        create_qp::INFINIBAND,
        create_qp::BLOCK_OWN_MULTICAST,
        create_qp::ROCE,
    ];
    // Those of connected kinds get their wire with their peer.
    let fits = rules & create_qp::ROCE == 0 || kind == QpKind::UnreliableDatagram;
    if !fits || rules & !known.into_iter().sum::<u32>() != 0 {
        return Err(Status::InvalidArgument);
    }
    Ok(known.map(|rule| rules & rule != 0))
}
