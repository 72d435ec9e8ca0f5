//! A minimal driver, with which each check begins.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

use urnic_device::bus::{Bus, Signal};
use urnic_device::command::{
    COMMAND_LEN, COMPLETION_LEN, Command, Completion, CreateEq, DeviceAttributes, Handle, Nothing, Opcode,
    Status,
};
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::event::{EVENT_LEN, Event, EventKind};
use urnic_device::{INTERFACE_VERSION, registers};
use urnic_testkit::{CommandQueue, Wait};
use zerocopy::{Immutable, IntoBytes};

use crate::memory::Memory;
use crate::outcome::{Outcome, ensure};

/// Maximum wait for an event that must happen. Generous, because the device, or this machine, may
/// be emulated.
const TIMEOUT: Duration = Duration::from_secs(20);
/// log2 of the entries of the command queue.
pub(crate) const LOG_COMMANDS: u32 = 4;
/// log2 of the entries of the two event queues.
const LOG_EVENTS: u32 = 6;
/// An aligned address whose first 64 bytes reach the end of the address space, beyond all memory:
/// no device can access it.
pub(crate) const UNREACHABLE_ADDRESS: u64 = u64::MAX - 63;
/// Offset of the phase word in a completion of a command.
pub(crate) const PHASE: usize = CommandQueue::<Rc<Memory>>::PHASE;

/// The vectors that a device raised.
pub(crate) struct Line {
    raised: Mutex<Vec<u32>>,
    lost: AtomicBool,
}

impl Line {
    /// Receives the signals of a bus; to be called once for each bus.
    pub(crate) fn on(bus: &dyn Bus) -> Arc<Line> {
        let line = Arc::new(Line {
            raised: Mutex::default(),
            lost: AtomicBool::new(false),
        });
        let signals = line.clone();
        bus.signals(Arc::new(move |signal| match signal {
            Signal::Interrupt(vector) => signals.raised.lock().push(vector),
            Signal::Lost => signals.lost.store(true, Ordering::Relaxed),
        }));
        line
    }

    /// Whether that vector was raised since the last call for it.
    pub(crate) fn take(&self, vector: u32) -> bool {
        let mut raised = self.raised.lock();
        let before = raised.len();
        raised.retain(|v| *v != vector);
        raised.len() < before
    }
}

/// The command queue's memory.
pub(crate) struct Commands {
    pub(crate) ring: Rc<Memory>,
    pub(crate) completions: Rc<Memory>,
    queue: RefCell<CommandQueue<Rc<Memory>>>,
}

/// The driver side of an event queue.
pub(crate) struct EventQueue {
    pub(crate) id: u32,
    queue: RefCell<urnic_testkit::EventQueue<Rc<Memory>>>,
    /// Events that were taken from the ring and that no check has requested yet.
    taken: RefCell<VecDeque<Event>>,
}

impl EventQueue {
    /// An event queue that the device has not created yet.
    fn new(ring: Rc<Memory>, record: Rc<Memory>, log_size: u32) -> EventQueue {
        EventQueue {
            id: 0,
            queue: RefCell::new(urnic_testkit::EventQueue::new(ring, record, log_size)),
            taken: RefCell::default(),
        }
    }

    /// The next event, if the device has written it.
    pub(crate) fn next(&self) -> Option<Event> {
        self.queue.borrow_mut().poll()
    }

    /// Number of events in the ring that were not taken, at most as many as it holds.
    pub(crate) fn in_ring(&self) -> usize {
        self.queue.borrow().written() as usize
    }

    fn find(&self, kind: EventKind, object: u32) -> Option<Event> {
        let mut taken = self.taken.borrow_mut();
        taken.extend(std::iter::from_fn(|| self.next()));
        let at = taken
            .iter()
            .position(|e| e.kind == kind as u8 && e.object.get() == object)?;
        taken.remove(at)
    }
}

/// A device that was reset and enabled, with the objects that every driver creates first.
pub(crate) struct Rig {
    pub(crate) bus: Arc<dyn Bus>,
    pub(crate) line: Arc<Line>,
    pub(crate) commands: Commands,
    /// All memory of this check, until the device was reset.
    kept: RefCell<Vec<Rc<Memory>>>,
    /// Event queue 0, on vector 0.
    pub(crate) events: EventQueue,
    /// Event queue for completion notifications, on vector 1, or on vector 0 if there is no other.
    pub(crate) notices: EventQueue,
    pub(crate) uar: u32,
    pub(crate) attributes: DeviceAttributes,
}

impl Rig {
    /// Resets and enables the device, and creates two event queues and a doorbell page.
    pub(crate) fn start(bus: &Arc<dyn Bus>, line: &Arc<Line>) -> Outcome<Rig> {
        let version = bus.read32(registers::VERSION);
        ensure!(
            bus.read32(registers::MAGIC) == registers::MAGIC_VALUE
                && version >> 16 == INTERFACE_VERSION >> 16,
            "this is no device of interface {}: magic {:#x}, version {version:#x}",
            INTERFACE_VERSION >> 16,
            bus.read32(registers::MAGIC)
        );
        reset(&**bus)?;
        line.raised.lock().clear();
        let memory = |len| Memory::new(bus, len).map(Rc::new);
        let ring = memory(COMMAND_LEN << LOG_COMMANDS)?;
        let completions = memory(COMPLETION_LEN << LOG_COMMANDS)?;
        let commands = Commands {
            queue: RefCell::new(CommandQueue::new(ring.clone(), completions.clone(), LOG_COMMANDS)),
            ring,
            completions,
        };
        let queue = || -> Outcome<EventQueue> {
            let (ring, record) = (memory(EVENT_LEN << LOG_EVENTS)?, memory(64)?);
            Ok(EventQueue::new(ring, record, LOG_EVENTS))
        };
        let mut rig = Rig {
            bus: bus.clone(),
            line: line.clone(),
            events: queue()?,
            notices: queue()?,
            commands,
            kept: RefCell::default(),
            uar: 0,
            attributes: DeviceAttributes::default(),
        };
        rig.enable()?;
        let vectors = bus.read32(registers::VECTORS);
        let id = rig.enter(&rig.events, 0)?;
        ensure!(id == 0, "the first event queue is number {id}, not 0");
        rig.notices.id = rig.enter(&rig.notices, u32::from(vectors > 1))?;
        rig.uar = rig.create(Opcode::AllocUar, &Nothing {})?;
        let output = rig.memory(size_of::<DeviceAttributes>())?;
        rig.with_output(
            Opcode::QueryDevice,
            &Nothing {},
            output.iova(),
            size_of::<DeviceAttributes>(),
        )?;
        rig.attributes = output.load(0);
        bus.features(rig.attributes.features.get());
        Ok(rig)
    }

    /// Resets the device, so that it releases the check's memory.
    pub(crate) fn stop(self) -> Outcome {
        reset(&*self.bus)
    }

    /// Sets the command queue of the device, and enables the device.
    pub(crate) fn enable(&self) -> Outcome {
        self.point_at(self.commands.ring.iova(), self.commands.completions.iova());
        self.commands.queue.borrow_mut().reset();
        self.bus
            .write32(registers::CONTROL, registers::Control::ENABLE.bits());
        self.wait("the device to become ready", || {
            (self.bus.read32(registers::STATUS) == registers::Status::READY.bits()).then_some(())
        })
    }

    /// Writes the command queue's registers.
    pub(crate) fn point_at(&self, ring: u64, completions: u64) {
        self.bus.write32(registers::CMD_LOG_SIZE, LOG_COMMANDS);
        self.bus.write64(registers::CMD_BASE, ring);
        self.bus.write64(registers::CMD_COMPLETION_BASE, completions);
        for memory in [&self.commands.ring, &self.commands.completions] {
            memory.write(0, &vec![0; memory.len()]);
        }
    }

    fn enter(&self, queue: &EventQueue, vector: u32) -> Outcome<u32> {
        self.create(Opcode::CreateEq, &arguments(queue, vector))
    }

    /// Creates a further event queue of 2^`log_size` entries.
    pub(crate) fn event_queue(&self, log_size: u32, vector: u32) -> Outcome<EventQueue> {
        let (ring, record) = (self.memory(EVENT_LEN << log_size)?, self.memory(64)?);
        let mut queue = EventQueue::new(ring, record, log_size);
        queue.id = self.enter(&queue, vector)?;
        Ok(queue)
    }

    /// Memory that stays until the check is over and the device reset.
    pub(crate) fn memory(&self, len: usize) -> Outcome<Rc<Memory>> {
        let memory = Rc::new(Memory::new(&self.bus, len)?);
        self.kept.borrow_mut().push(memory.clone());
        Ok(memory)
    }

    /// Calls `poll` until it returns a value, and lets a device in this process work meanwhile.
    pub(crate) fn wait<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> Outcome<T> {
        const BUSY_POLLS: u32 = 1000;
        let mut wait = Wait::new(TIMEOUT);
        for polls in 0.. {
            if let Some(seen) = poll() {
                return Ok(seen);
            }
            ensure!(
                !self.line.lost.load(Ordering::Relaxed),
                "the device is lost, waiting for {what}"
            );
            ensure!(!wait.is_over(), "{what}: nothing within {TIMEOUT:?}");
            self.bus.progress(0);
            if polls > BUSY_POLLS {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        unreachable!("the loop ends by itself")
    }

    /// Puts a command into the ring without a doorbell; returns its slot.
    pub(crate) fn put(&self, command: Command) -> u32 {
        self.commands.queue.borrow_mut().put(command)
    }

    /// Rings for all commands in the ring.
    pub(crate) fn ring_commands(&self) {
        let producer = self.commands.queue.borrow().producer();
        self.bus.write32(registers::CMD_DOORBELL, producer);
    }

    /// The completion of the command that was put at `at`.
    pub(crate) fn completion(&self, at: u32) -> Outcome<Completion> {
        self.wait("a command's completion", || {
            self.commands.queue.borrow().completion(at)
        })
    }

    /// Executes a command with any result.
    pub(crate) fn execute(&self, command: Command) -> Outcome<Completion> {
        let at = self.put(command);
        self.ring_commands();
        self.completion(at)
    }

    /// Executes a command that must succeed.
    pub(crate) fn run(&self, command: Command) -> Outcome<Completion> {
        let completion = self.execute(command)?;
        let status = completion.status.get();
        ensure!(
            status == Status::Ok as u16,
            "{} ended with {}",
            opcode_name(&command),
            status_name(status)
        );
        Ok(completion)
    }

    /// Executes a command that must be refused with this status.
    pub(crate) fn refuses(&self, command: Command, expected: Status) -> Outcome {
        let done = self.execute(command)?;
        let status = done.status.get();
        ensure!(
            status == expected as u16,
            "{} ended with {}, not {expected:?}",
            opcode_name(&command),
            status_name(status)
        );
        let known = Opcode::from_raw(command.opcode.get());
        let fields = known.map(Opcode::arguments).unwrap_or_default();
        let argument = done.argument.get() as usize;
        ensure!(
            argument == 0 || fields.iter().any(|(_, at)| at + 1 == argument),
            "{} was refused for an argument at {argument}, which it does not have",
            opcode_name(&command)
        );
        Ok(())
    }

    /// Executes a command without buffers that must succeed.
    pub(crate) fn command<T: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        arguments: &T,
    ) -> Outcome<Completion> {
        self.run(Command::new(opcode, arguments))
    }

    /// Executes a command that must succeed and fills an output buffer.
    pub(crate) fn with_output<T: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        arguments: &T,
        output: u64,
        len: usize,
    ) -> Outcome<Completion> {
        let mut command = Command::new(opcode, arguments);
        command.output = output.into();
        command.output_len = (len as u32).into();
        self.run(command)
    }

    /// Executes a command that must succeed, and returns the number in its result.
    pub(crate) fn create<T: IntoBytes + Immutable>(&self, opcode: Opcode, arguments: &T) -> Outcome<u32> {
        Ok(self.command(opcode, arguments)?.result::<Handle>().id.get())
    }

    /// Executes a command on one object that must succeed.
    pub(crate) fn on(&self, opcode: Opcode, id: u32) -> Outcome {
        self.command(opcode, &Handle { id: id.into() }).map(drop)
    }

    /// Executes a command on one object that must be refused.
    pub(crate) fn refuses_on(&self, opcode: Opcode, id: u32, expected: Status) -> Outcome {
        self.refuses(Command::new(opcode, &Handle { id: id.into() }), expected)
    }

    /// Checks that the device still executes commands.
    pub(crate) fn lives(&self) -> Outcome {
        let pd = self.create(Opcode::AllocPd, &Nothing {})?;
        self.on(Opcode::FreePd, pd)?;
        let status = self.bus.read32(registers::STATUS);
        ensure!(
            status == registers::Status::READY.bits(),
            "the device's status is {status:#x}"
        );
        Ok(())
    }

    /// Waits for an asynchronous event of that kind of that object. Other events stay stored for
    /// later calls.
    pub(crate) fn event(&self, kind: EventKind, object: u32) -> Outcome<Event> {
        self.wait(&format!("the event {kind:?} of {object:#x}"), || {
            self.events.find(kind, object)
        })
    }

    /// Whether an event of that kind of that object has arrived.
    pub(crate) fn has_event(&self, kind: EventKind, object: u32) -> bool {
        self.events.find(kind, object).is_some()
    }

    /// Rings a doorbell in a slot of the check's own page.
    pub(crate) fn ring(&self, kind: Kind, queue: u32, slot: u32, index: u32) {
        self.bus
            .doorbell(self.uar, slot, Doorbell { kind, queue, index }.encode());
    }
}

fn arguments(queue: &EventQueue, vector: u32) -> CreateEq {
    let queue = queue.queue.borrow();
    CreateEq {
        ring: queue.ring().iova().into(),
        record: queue.record().iova().into(),
        log_size: queue.log_size().into(),
        vector: vector.into(),
    }
}

/// Resets the function: the device releases all memory.
pub(crate) fn reset(bus: &dyn Bus) -> Outcome {
    bus.write32(registers::CONTROL, registers::Control::RESET.bits());
    let mut wait = Wait::new(TIMEOUT);
    while bus.read32(registers::CONTROL) & registers::Control::RESET.bits() != 0 {
        ensure!(
            !wait.is_over(),
            "the device does not finish its reset within {TIMEOUT:?}"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

pub(crate) fn opcode_name(command: &Command) -> String {
    let raw = command.opcode.get();
    Opcode::from_raw(raw).map_or_else(|| format!("command {raw:#x}"), |opcode| format!("{opcode:?}"))
}

pub(crate) fn status_name(raw: u16) -> String {
    Status::from_raw(raw).map_or_else(|| format!("status {raw:#x}"), |status| format!("{status:?}"))
}

/// The value of a word of a record, for example a producer index.
pub(crate) fn load(word: &AtomicU32) -> u32 {
    word.load(Ordering::Acquire)
}
