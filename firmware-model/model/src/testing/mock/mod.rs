//! Host memory and a small driver, for tests.

#![allow(clippy::unwrap_used, reason = "compiled for tests and fuzzing only")]
#![cfg_attr(
    fuzzing,
    allow(dead_code, unused_imports, reason = "fuzz targets use a part of it")
)]

mod arena;

pub(crate) use arena::{ARENA_IOVA, Arena, REMOTE};

use crate::config::{DeviceAddress, ModelConfig};
use crate::device::{Device, Interrupts};
use crate::stream::Network;
use arena::Extent;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use urnic_device::command::*;
use urnic_device::cqe::{CQE_LEN, Cqe};
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::event::{EVENT_LEN, Event, EventKind};
use urnic_device::record::{CqRecord, QueueRecord};
use urnic_device::registers::*;
use urnic_device::stream::{Attach, Connect, Endpoint, Listen, Listening, attach};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{self, BLOCK_LEN, SendHeader, Sge};
use urnic_faults::Plan;
use urnic_sync::Mutex;
use urnic_testkit::{
    CommandQueue, CompletionQueue, EventQueue, Memory, ReceiveQueue, SendQueue, Wait, request,
};
use zerocopy::{FromZeros, Immutable, IntoBytes};

type Status = urnic_device::command::Status;

/// The longest wait of a test for a condition.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// log2 of the entries of the event queues.
const LOG_EVENTS: u32 = 6;

/// Interrupts of a driver that polls its event queues.
struct NoInterrupts;

impl Interrupts for NoInterrupts {
    fn raise(&self, _vector: u32) {}
}

/// A driver.
pub(crate) struct Driver {
    pub(crate) device: Device,
    pub(crate) arena: Arc<Arena>,
    commands: Mutex<CommandQueue<Extent>>,
    /// Event queue 0, and events that were taken from it and not yet requested by a test.
    events: Mutex<(EventQueue<Extent>, VecDeque<Event>)>,
    pub(crate) uar: u32,
    /// Regions are registered in remote memory.
    pub(crate) remote: bool,
    /// Number of an event queue for completions, on vector 1.
    pub(crate) eq: u32,
    completion_events: Mutex<EventQueue<Extent>>,
}

pub(crate) fn config() -> ModelConfig {
    ModelConfig {
        addresses: vec![DeviceAddress {
            ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
            scope: 0,
            prefix_len: 8,
        }],
        ..ModelConfig::default()
    }
}

impl Driver {
    /// A device on kernel TCP.
    pub(crate) fn start() -> Driver {
        Self::start_with(config())
    }

    pub(crate) fn start_with(config: ModelConfig) -> Driver {
        let arena = Arena::new(128 << 20);
        let device = Device::start(config, arena.clone(), Arc::new(NoInterrupts)).unwrap();
        Self::drive(device, arena)
    }

    /// A device whose host's memory is reached by copies, in a process that peers reach as well.
    pub(crate) fn start_in_process(config: ModelConfig) -> Driver {
        let arena = Arena::in_process(128 << 20);
        let device = Device::start(config, arena.clone(), Arc::new(NoInterrupts)).unwrap();
        let mut driver = Self::drive(device, arena);
        driver.remote = true;
        driver
    }

    /// A device on a simulated network.
    pub(crate) fn start_manual(network: Arc<dyn Network>) -> Driver {
        Self::start_manual_with(config(), network)
    }

    pub(crate) fn start_manual_with(config: ModelConfig, network: Arc<dyn Network>) -> Driver {
        let arena = Arena::new(128 << 20);
        let device = Device::start_manual(config, arena.clone(), Arc::new(NoInterrupts), network).unwrap();
        Self::drive(device, arena)
    }

    fn drive(device: Device, arena: Arc<Arena>) -> Driver {
        assert_eq!(device.bar0_read(MAGIC), MAGIC_VALUE);
        let log_size = 4;
        let ring = Extent::alloc(&arena, COMMAND_LEN << log_size);
        let completions = Extent::alloc(&arena, COMPLETION_LEN << log_size);
        device.bar0_write(CMD_LOG_SIZE, log_size);
        device.bar0_write(CMD_BASE, ring.iova as u32);
        device.bar0_write(CMD_BASE + 4, (ring.iova >> 32) as u32);
        device.bar0_write(CMD_COMPLETION_BASE, completions.iova as u32);
        device.bar0_write(CMD_COMPLETION_BASE + 4, (completions.iova >> 32) as u32);
        device.bar0_write(CONTROL, Control::ENABLE.bits());
        assert_eq!(device.bar0_read(STATUS), 1);
        let event_ring = || Extent::alloc(&arena, EVENT_LEN << LOG_EVENTS);
        let (events, completion_events) = (event_ring(), event_ring());
        let record = || Extent::alloc(&arena, size_of::<CqRecord>());
        let (events_record, completion_record) = (record(), record());
        let queue = |ring, record| EventQueue::new(ring, record, LOG_EVENTS);
        let mut driver = Driver {
            device,
            commands: Mutex::new(CommandQueue::new(ring, completions, log_size)),
            events: Mutex::new((queue(events, events_record), VecDeque::new())),
            uar: 0,
            remote: false,
            eq: 0,
            completion_events: Mutex::new(queue(completion_events, completion_record)),
            arena,
        };
        let eq = driver
            .create_eq(events.iova, events_record.iova, LOG_EVENTS, 0)
            .unwrap();
        assert_eq!(eq, 0);
        let (ring, record) = (completion_events.iova, completion_record.iova);
        driver.eq = driver.create_eq(ring, record, LOG_EVENTS, 1).unwrap();
        driver.uar = driver.create(Opcode::AllocUar, &Nothing {}).unwrap();
        driver
    }

    /// Where the command queue and its completions are.
    pub(crate) fn command_memory(&self) -> std::ops::Range<u64> {
        let commands = self.commands.lock();
        commands.ring().iova..commands.completions().iova + 4096
    }

    fn create_eq(&self, ring: u64, record: u64, log_size: u32, vector: u32) -> Result<u32, Status> {
        let arguments = CreateEq {
            ring: ring.into(),
            record: record.into(),
            log_size: log_size.into(),
            vector: vector.into(),
        };
        self.create(Opcode::CreateEq, &arguments)
    }

    pub(crate) fn execute(&self, command: Command) -> Result<Completion, Status> {
        let mut commands = self.commands.lock();
        let at = commands.put(command);
        self.device.bar0_write(CMD_DOORBELL, commands.producer());
        let completion = commands
            .completion(at)
            .expect("a command completes at its doorbell");
        match Status::from_raw(completion.status.get()).unwrap() {
            Status::Ok => Ok(completion),
            status => Err(status),
        }
    }

    pub(crate) fn command<T: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        arguments: &T,
    ) -> Result<Completion, Status> {
        self.execute(Command::new(opcode, arguments))
    }

    /// A command that answers with a handle.
    pub(crate) fn create<T: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        arguments: &T,
    ) -> Result<u32, Status> {
        let completion = self.command(opcode, arguments)?;
        Ok(completion.result::<Handle>().id.get())
    }

    /// A command with a handle and no answer.
    pub(crate) fn on(&self, opcode: Opcode, id: u32) -> Result<(), Status> {
        self.command(opcode, &Handle { id: id.into() }).map(drop)
    }

    pub(crate) fn pd(&self) -> u32 {
        self.create(Opcode::AllocPd, &Nothing {}).unwrap()
    }

    pub(crate) fn register(&self, pd: u32, len: usize, access: Access) -> Result<Region, Status> {
        self.register_at(pd, self.arena.alloc(len), len, access)
    }

    pub(crate) fn register_at(
        &self,
        pd: u32,
        iova: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, Status> {
        self.register_as(pd, iova, iova, len, access)
    }

    /// Like [`register_at`](Self::register_at), of memory that the region counts from `base` on.
    pub(crate) fn register_as(
        &self,
        pd: u32,
        base: u64,
        iova: u64,
        len: usize,
        access: Access,
    ) -> Result<Region, Status> {
        let arguments = CreateMr {
            base: base.into(),
            len: (len as u64).into(),
            dma: self.dma(iova).into(),
            pd: pd.into(),
            access: access.bits().into(),
            ..CreateMr::default()
        };
        let stag = self.create(Opcode::CreateMr, &arguments)?;
        Ok(Region { stag, iova: base })
    }

    /// The IOVA of a region's memory at `iova` of the arena.
    pub(crate) fn dma(&self, iova: u64) -> u64 {
        if self.remote { REMOTE + iova } else { iova }
    }

    pub(crate) fn cq_arguments(&self, log_size: u32) -> CreateCq {
        CreateCq {
            ring: self.arena.alloc(CQE_LEN << log_size).into(),
            record: self.arena.alloc(size_of::<CqRecord>()).into(),
            log_size: log_size.into(),
            eq: self.eq.into(),
            uar: self.uar.into(),
            ..CreateCq::default()
        }
    }

    pub(crate) fn cq(&self, log_size: u32) -> Cq {
        let arguments = self.cq_arguments(log_size);
        let completion = self.command(Opcode::CreateCq, &arguments).unwrap();
        let handle: QueueHandle = completion.result();
        let ring = Extent::new(&self.arena, arguments.ring.get(), CQE_LEN << log_size);
        let record = Extent::new(&self.arena, arguments.record.get(), size_of::<CqRecord>());
        Cq {
            id: handle.id.get(),
            queue: CompletionQueue::new(ring, record, log_size),
        }
    }

    pub(crate) fn qp_arguments(&self, pd: u32, send_cq: &Cq, recv_cq: &Cq) -> CreateQp {
        CreateQp {
            sq_ring: self.arena.alloc(BLOCK_LEN << LOG_QUEUE).into(),
            rq_ring: self.arena.alloc(1 << (LOG_QUEUE + LOG_STRIDE)).into(),
            record: self.arena.alloc(size_of::<QueueRecord>()).into(),
            pd: pd.into(),
            send_cq: send_cq.id.into(),
            recv_cq: recv_cq.id.into(),
            uar: self.uar.into(),
            label: 0xbeef.into(),
            sq_log_size: LOG_QUEUE.into(),
            rq_log_size: LOG_QUEUE.into(),
            rq_log_stride: LOG_STRIDE.into(),
            ..CreateQp::default()
        }
    }

    pub(crate) fn qp(&self, pd: u32, send_cq: &Cq, recv_cq: &Cq) -> Qp {
        self.try_qp(&self.qp_arguments(pd, send_cq, recv_cq)).unwrap()
    }

    pub(crate) fn try_qp(&self, arguments: &CreateQp) -> Result<Qp, Status> {
        let completion = self.command(Opcode::CreateQp, arguments)?;
        let handle: QueueHandle = completion.result();
        let sends = Extent::new(&self.arena, arguments.sq_ring.get(), BLOCK_LEN << LOG_QUEUE);
        let receives = Extent::new(
            &self.arena,
            arguments.rq_ring.get(),
            1 << (LOG_QUEUE + LOG_STRIDE),
        );
        let record = Extent::new(&self.arena, arguments.record.get(), size_of::<QueueRecord>());
        Ok(Qp {
            id: handle.id.get(),
            sends: SendQueue::new(sends, record, LOG_QUEUE),
            receives: ReceiveQueue::new(receives, record, LOG_QUEUE, LOG_STRIDE),
            rings: 0,
        })
    }

    pub(crate) fn modify(&self, qp: &Qp, state: QpState) -> Result<(), Status> {
        self.modify_to(qp.id, state)
    }

    pub(crate) fn modify_to(&self, qid: u32, state: QpState) -> Result<(), Status> {
        let arguments = ModifyQp {
            qp: qid.into(),
            mask: (modify::STATE | modify::ACCESS).into(),
            state: (state as u32).into(),
            access: (Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
                .bits()
                .into(),
            ..ModifyQp::default()
        };
        self.command(Opcode::ModifyQp, &arguments).map(drop)
    }

    pub(crate) fn ready(&self, qp: &Qp) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            self.modify(qp, state).unwrap();
        }
    }

    pub(crate) fn state(&self, qp: &Qp) -> QpState {
        let handle = Handle { id: qp.id.into() };
        let status: QpStatus = self.command(Opcode::QueryQp, &handle).unwrap().result();
        QpState::from_raw(status.state.get()).unwrap()
    }

    pub(crate) fn connect(&self, remote: SocketAddr) -> Result<u32, Status> {
        let arguments = Connect {
            remote: remote.into(),
            local: Endpoint::default(),
            ..Connect::default()
        };
        self.create(Opcode::StreamConnect, &arguments)
    }

    pub(crate) fn listen(&self, local: SocketAddr, backlog: u32) -> Result<(u32, u16), Status> {
        let arguments = Listen {
            local: local.into(),
            backlog: backlog.into(),
            ..Listen::default()
        };
        let listening: Listening = self.command(Opcode::StreamListen, &arguments)?.result();
        Ok((listening.lid.get(), listening.port.get() as u16))
    }

    pub(crate) fn attach(&self, sid: u32, qp: &Qp, initiator: bool) -> Result<(), Status> {
        let role = if initiator { attach::INITIATOR } else { 0 };
        self.attach_with(sid, qp, attach::CRC | role)
    }

    pub(crate) fn attach_with(&self, sid: u32, qp: &Qp, flags: u32) -> Result<(), Status> {
        let arguments = Attach {
            sid: sid.into(),
            qid: qp.id.into(),
            flags: flags.into(),
            ord: 16.into(),
            ird: 16.into(),
            first_msn: 1.into(),
            ..Attach::default()
        };
        self.command(Opcode::StreamAttach, &arguments).map(drop)
    }

    /// Events of queue 0 so far.
    fn fetch_events(&self) -> urnic_sync::MutexGuard<'_, (EventQueue<Extent>, VecDeque<Event>)> {
        let mut guard = self.events.lock();
        let (queue, events) = &mut *guard;
        events.extend(std::iter::from_fn(|| queue.poll()));
        guard
    }

    /// The next event of queue 0, if one is there.
    pub(crate) fn event(&self) -> Option<Event> {
        self.fetch_events().1.pop_front()
    }

    /// Completion queues that notified since the last time.
    pub(crate) fn notifications(&self) -> Vec<u32> {
        let mut queue = self.completion_events.lock();
        let mut cqs = Vec::new();
        while let Some(event) = queue.advance() {
            assert_eq!(event.kind, EventKind::Completion as u8);
            cqs.push(event.object.get());
        }
        cqs
    }

    /// Reports to the device the number of notifications that are taken; until then their entries
    /// in the ring are in use.
    pub(crate) fn take_notifications(&self, count: usize) {
        let queue = self.completion_events.lock();
        queue.record().word(0).fetch_add(count as u32, Ordering::AcqRel);
    }

    /// Waits for an event of that kind about that object; others stay where they are.
    pub(crate) fn await_event(&self, kind: EventKind, object: u32) -> Event {
        wait_for(&format!("{kind:?} of {object}"), || self.event_of(kind, object))
    }

    /// The next event of that kind about that object, if one is there; others stay where they are.
    pub(crate) fn event_of(&self, kind: EventKind, object: u32) -> Option<Event> {
        let mut guard = self.fetch_events();
        let events = &mut guard.1;
        let found = events
            .iter()
            .position(|e| e.kind == kind as u8 && e.object.get() == object);
        found.and_then(|at| events.remove(at))
    }

    pub(crate) fn ring(&self, kind: Kind, queue: u32, index: u32) {
        let doorbell = Doorbell { kind, queue, index };
        self.device.doorbell(self.uar, 0, doorbell.encode());
    }

    pub(crate) fn counters(&self) -> Vec<u64> {
        let mut command = Command::new(Opcode::QueryCounters, &Nothing {});
        let len = crate::Counter::ALL.len() * 8;
        command.output = self.arena.alloc(len).into();
        command.output_len = (len as u32).into();
        self.execute(command).unwrap();
        let bytes = self.arena.read(command.output.get(), len);
        bytes
            .chunks(8)
            .map(|c| u64::from_le_bytes(c.try_into().unwrap()))
            .collect()
    }

    pub(crate) fn counter(&self, counter: crate::Counter) -> u64 {
        self.counters()[counter as usize]
    }
}

/// Registered memory.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    pub(crate) stag: u32,
    pub(crate) iova: u64,
}

impl Region {
    pub(crate) fn sge(&self, at: u64, len: u32) -> Sge {
        Sge {
            offset: (self.iova + at).into(),
            len: len.into(),
            stag: self.stag.into(),
        }
    }
}

/// The driver's side of a completion queue.
pub(crate) struct Cq {
    pub(crate) id: u32,
    queue: CompletionQueue<Extent>,
}

impl Cq {
    /// The consumer index.
    pub(crate) fn consumer(&self) -> u32 {
        self.queue.index()
    }

    /// The next completion, if one is there.
    pub(crate) fn poll(&mut self) -> Option<Cqe> {
        self.queue.poll()
    }

    /// Polls as a program does, driving the device, until a completion comes.
    pub(crate) fn await_completion(&mut self, driver: &Driver) -> Cqe {
        wait_for("a completion", || {
            self.poll().or_else(|| {
                driver.device.progress(0);
                None
            })
        })
    }

    /// Waits until a completion comes, without running the device.
    pub(crate) fn await_idly(&mut self) -> Cqe {
        wait_for("a completion", || self.poll())
    }

    pub(crate) fn arm(&self, driver: &Driver, solicited: bool) {
        let kind = if solicited { Kind::ArmSolicited } else { Kind::Arm };
        driver.ring(kind, self.id, self.consumer());
    }

    pub(crate) fn moderate(&self, driver: &Driver, count: u32, period: u32) -> Result<(), Status> {
        let arguments = ModerateCq {
            cq: self.id.into(),
            count: count.into(),
            period: period.into(),
            reserved: 0.into(),
        };
        driver.command(Opcode::ModerateCq, &arguments).map(drop)
    }

    pub(crate) fn resize(&mut self, driver: &Driver, log_size: u32) -> Result<u32, Status> {
        let ring = Extent::alloc(&driver.arena, CQE_LEN << log_size);
        let arguments = ResizeCq {
            ring: ring.iova.into(),
            cq: self.id.into(),
            log_size: log_size.into(),
        };
        let count: Count = driver.command(Opcode::ResizeCq, &arguments)?.result();
        self.queue.move_to(ring, log_size);
        Ok(count.count.get())
    }
}

/// The driver's side of a queue pair.
pub(crate) struct Qp {
    pub(crate) id: u32,
    sends: SendQueue<Extent>,
    receives: ReceiveQueue<Extent>,
    /// Doorbells rung for the send queue.
    pub(crate) rings: u32,
}

/// log2 of the blocks of a send queue, and of the entries of a receive queue.
const LOG_QUEUE: u32 = 8;
/// log2 of the bytes of an entry of a receive queue.
const LOG_STRIDE: u32 = 6;

impl Qp {
    pub(crate) fn post_recv(&mut self, driver: &Driver, cookie: u64, sges: &[Sge]) {
        if self.receives.post(cookie, sges) {
            driver.ring(Kind::Receive, self.id, self.receives.producer());
        }
    }

    pub(crate) fn post_send(&mut self, driver: &Driver, cookie: u64, sges: &[Sge]) {
        self.post(driver, request(wqe::Opcode::Send, cookie), sges);
    }

    pub(crate) fn post(&mut self, driver: &Driver, header: SendHeader, sges: &[Sge]) {
        let (entry, blocks) = SendQueue::<Extent>::entry(header, sges.as_bytes(), sges.len());
        self.post_raw(driver, &entry, blocks);
    }

    /// Posts an atomic operation with these operands.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn post_atomic(
        &mut self,
        driver: &Driver,
        header: SendHeader,
        operands: wqe::AtomicOperands,
        sge: Sge,
    ) {
        let bytes = [operands.as_bytes(), sge.as_bytes()].concat();
        let (entry, blocks) = SendQueue::<Extent>::entry(header, &bytes, 1);
        self.post_raw(driver, &entry, blocks);
    }

    /// Posts a request without a doorbell: [`ring`](Self::ring) publishes all of them.
    pub(crate) fn post_unrung(&mut self, header: SendHeader, sges: &[Sge]) {
        let (entry, blocks) = SendQueue::<Extent>::entry(header, sges.as_bytes(), sges.len());
        self.sends.write(&entry);
        self.sends.advance(blocks);
    }

    /// Like [`post_unrung`](Self::post_unrung), with inline data.
    pub(crate) fn post_inline_unrung(&mut self, header: SendHeader, bytes: &[u8]) {
        let (entry, blocks) = SendQueue::<Extent>::entry(header, bytes, 0);
        self.sends.write(&entry);
        self.sends.advance(blocks);
    }

    /// Publishes the requests that were posted so far, and rings.
    pub(crate) fn ring(&mut self, driver: &Driver) {
        self.sends.store();
        driver.ring(Kind::Send, self.id, self.sends.producer());
    }

    /// Writes any bytes into the ring as one entry of this number of blocks.
    pub(crate) fn post_raw(&mut self, driver: &Driver, entry: &[u8], blocks: u32) {
        self.sends.write(entry);
        if self.sends.publish(blocks) {
            self.rings += 1;
            driver.ring(Kind::Send, self.id, self.sends.producer());
        }
    }

    /// The number of blocks that the device has released.
    pub(crate) fn sq_consumer(&self) -> u32 {
        self.sends.consumer()
    }

    pub(crate) fn sq_producer(&self) -> u32 {
        self.sends.producer()
    }
}

/// A plan of these faults.
pub(crate) fn plan_of(faults: &str) -> &'static Plan {
    /// All plans: a network has its plan for ever, as a process has.
    static PLANS: Mutex<Vec<&'static Plan>> = Mutex::new(Vec::new());
    let plan: &'static Plan = Box::leak(Box::default());
    PLANS.lock().push(plan);
    plan.add(faults).unwrap_or_else(|error| panic!("{error}"));
    plan
}

/// Calls `probe` until it returns a value.
pub(crate) fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let mut wait = Wait::new(TIMEOUT);
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(!wait.is_over(), "timeout: {what}");
        std::thread::yield_now();
    }
}

/// Asserts a completion's cookie and status.
pub(crate) fn assert_cqe(cqe: &Cqe, cookie: u64, status: WcStatus) {
    let seen = (cqe.cookie.get(), WcStatus::from_raw(cqe.status));
    assert_eq!(seen, (cookie, Some(status)), "{cqe:?}");
}

/// Two queue pairs of two drivers, connected over their network.
pub(crate) struct Pair {
    pub(crate) initiator: End,
    pub(crate) responder: End,
}

/// A queue pair with its queues and memory.
pub(crate) struct End {
    pub(crate) pd: u32,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) region: Region,
}

impl End {
    pub(crate) fn new(driver: &Driver) -> End {
        let pd = driver.pd();
        let (send_cq, recv_cq) = (driver.cq(8), driver.cq(8));
        let qp = driver.qp(pd, &send_cq, &recv_cq);
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let region = driver.register(pd, 1 << 20, all).unwrap();
        driver.ready(&qp);
        End {
            pd,
            send_cq,
            recv_cq,
            qp,
            region,
        }
    }
}

impl Pair {
    /// A connected stream with two queue pairs that are not attached to it yet.
    pub(crate) fn prepare(initiator: &Driver, responder: &Driver) -> (Pair, u32, u32) {
        Self::prepare_while(initiator, responder, |_, _| {})
    }

    /// Like [`prepare`](Pair::prepare); runs `start_up` on the two ends of the stream while the
    /// responder listens.
    pub(crate) fn prepare_while(
        initiator: &Driver,
        responder: &Driver,
        start_up: impl FnOnce(u32, u32),
    ) -> (Pair, u32, u32) {
        let (near, far) = (End::new(initiator), End::new(responder));
        let (lid, port) = responder.listen("127.0.0.1:0".parse().unwrap(), 8).unwrap();
        let there = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let sid = initiator.connect(there).unwrap();
        initiator.await_event(EventKind::StreamConnected, sid);
        let accepted = responder.await_event(EventKind::StreamAccepted, lid);
        start_up(sid, accepted.data.get() as u32);
        responder.on(Opcode::StreamUnlisten, lid).unwrap();
        let pair = Pair {
            initiator: near,
            responder: far,
        };
        (pair, sid, accepted.data.get() as u32)
    }

    /// Connects two devices on kernel TCP, with no MPA start-up between.
    pub(crate) fn connect(initiator: &Driver, responder: &Driver) -> Pair {
        Self::connect_while(initiator, responder, attach::CRC, || {})
    }

    /// Connects a pair with these flags of `Attach`, and runs `meanwhile` in all waits.
    pub(crate) fn connect_while(
        initiator: &Driver,
        responder: &Driver,
        flags: u32,
        mut meanwhile: impl FnMut(),
    ) -> Pair {
        let (near, far) = (End::new(initiator), End::new(responder));
        let (lid, port) = responder.listen("127.0.0.1:0".parse().unwrap(), 8).unwrap();
        let sid = initiator
            .connect(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port))
            .unwrap();
        let mut seen = |driver: &Driver, kind: EventKind, object: u32| {
            wait_for(&format!("{kind:?}"), || {
                meanwhile();
                driver.event_of(kind, object)
            })
        };
        let connected = seen(initiator, EventKind::StreamConnected, sid);
        assert_eq!(connected.code.get(), 0);
        let accepted = seen(responder, EventKind::StreamAccepted, lid);
        responder
            .attach_with(accepted.data.get() as u32, &far.qp, flags)
            .unwrap();
        initiator
            .attach_with(sid, &near.qp, flags | attach::INITIATOR)
            .unwrap();
        responder.on(Opcode::StreamUnlisten, lid).unwrap();
        Pair {
            initiator: near,
            responder: far,
        }
    }
}

/// A zeroed value, for commands that are wrong on purpose.
pub(crate) fn zeroed<T: FromZeros>() -> T {
    T::new_zeroed()
}
