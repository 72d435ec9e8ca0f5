//! The command queue: one command at a time, whose completion is found by tag and phase.
//!
//! No command waits for a peer (`urnic_device::command`), so a thread holds the lock for
//! microseconds, and one outstanding command is enough. The ring is longer because a device may
//! need room.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

use rustix::io::Errno;
use rustix::time::Timespec;
use urnic_device::command::{
    COMMAND_LEN, COMPLETION_LEN, Command, Completion, Handle, Nothing, Opcode, Status,
};
use urnic_device::registers;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::dma::{DmaMemory, DmaPool};
use urnic_device::bus::{Bus, Signal, SignalHandler};

/// log2 of the entries of both rings.
const LOG_SIZE: u32 = 4;
const ENTRIES: u32 = 1 << LOG_SIZE;
/// Offset of the phase word in a completion.
const PHASE: usize = std::mem::offset_of!(Completion, phase);
/// Most warnings about refused commands. Further ones have a lower level: the first show the fault,
/// and a program can repeat them without end.
const MAX_WARNINGS: u64 = 16;
/// The number of busy polls of a completion before the thread sleeps between polls.
const BUSY_POLLS: u32 = 1 << 12;
/// The number of sleeps between two checks whether the device still works.
const SLEEPS_PER_DEVICE_CHECK: u32 = 64;
/// The sleep between two polls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// The time after which a device that has not completed a command is lost.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// The command queue of the device.
pub(crate) struct CommandQueue {
    bus: Arc<dyn Bus>,
    pool: Arc<DmaPool>,
    rings: Mutex<Rings>,
    /// The device is lost: no more commands are sent.
    lost: AtomicBool,
    /// Refused commands that indicate a fault.
    warnings: AtomicU64,
    /// Called when the device stopped responding.
    handler: SignalHandler,
}

struct Rings {
    commands: DmaMemory,
    completions: DmaMemory,
    producer: u32,
}

impl CommandQueue {
    /// Resets the device, gives it the rings, and enables it. `handler` is called if the device
    /// stops responding.
    ///
    /// # Errors
    /// `ENODEV` if it is not such a device or has another major version of the interface; `ENOMEM`
    /// if no memory is left; `EIO` if the device does not respond.
    pub(crate) fn start(
        bus: Arc<dyn Bus>,
        pool: Arc<DmaPool>,
        handler: SignalHandler,
    ) -> Result<CommandQueue, Errno> {
        let version = bus.read32(registers::VERSION);
        let ours = urnic_device::INTERFACE_VERSION;
        if bus.read32(registers::MAGIC) != registers::MAGIC_VALUE || version >> 16 != ours >> 16 {
            tracing::error!(
                "not a urnic device with interface version {:x}: its version register is {version:#x}",
                ours >> 16
            );
            return Err(Errno::NODEV);
        }
        reset(&*bus);
        let commands = pool.allocate(COMMAND_LEN << LOG_SIZE)?;
        let completions = pool.allocate(COMPLETION_LEN << LOG_SIZE)?;
        bus.write32(registers::CMD_LOG_SIZE, LOG_SIZE);
        bus.write64(registers::CMD_BASE, commands.iova());
        bus.write64(registers::CMD_COMPLETION_BASE, completions.iova());
        bus.write32(registers::CMD_VECTOR, registers::NO_VECTOR);
        bus.write32(registers::CONTROL, registers::Control::ENABLE.bits());
        let ready = |status: u32| status & registers::Status::READY.bits() != 0;
        wait(|| ready(bus.read32(registers::STATUS)).then_some(()))?;
        let rings = Mutex::new(Rings {
            commands,
            completions,
            producer: 0,
        });
        Ok(CommandQueue {
            bus,
            pool,
            rings,
            lost: AtomicBool::new(false),
            warnings: AtomicU64::new(0),
            handler,
        })
    }

    /// The bus that reaches the device.
    #[inline]
    pub(crate) fn bus(&self) -> &Arc<dyn Bus> {
        &self.bus
    }

    /// The memory that the device accesses.
    pub(crate) fn pool(&self) -> &Arc<DmaPool> {
        &self.pool
    }

    /// Makes every further command fail with `EIO`. Returns whether this is the first call.
    pub(crate) fn mark_lost(&self) -> bool {
        !self.lost.swap(true, Ordering::AcqRel)
    }

    /// Whether the device is lost.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Makes the device release all memory, if it still responds.
    pub(crate) fn reset(&self) {
        reset(&*self.bus);
    }

    /// Destroys an object of the device. Succeeds on a lost device, which has no objects.
    ///
    /// # Errors
    /// The error of the device, see [`errno`].
    pub(crate) fn destroy(&self, opcode: Opcode, id: u32) -> Result<(), Errno> {
        match self.on(opcode, id) {
            Err(Errno::IO) if self.is_lost() => Ok(()),
            done => done,
        }
    }

    /// Runs a command that has neither buffers nor a result.
    ///
    /// # Errors
    /// The error of the device, see [`errno`]; `EIO` if the device does not respond.
    pub(crate) fn run<A: IntoBytes + Immutable>(&self, opcode: Opcode, arguments: &A) -> Result<(), Errno> {
        self.call::<A, Nothing>(opcode, arguments).map(drop)
    }

    /// Runs a command that has a result and no buffers.
    ///
    /// # Errors
    /// The errors of [`CommandQueue::run`].
    pub(crate) fn call<A: IntoBytes + Immutable, R: FromBytes>(
        &self,
        opcode: Opcode,
        arguments: &A,
    ) -> Result<R, Errno> {
        self.execute(Command::new(opcode, arguments))
            .map(|done| done.result())
    }

    /// Runs a command on one object.
    ///
    /// # Errors
    /// The errors of [`CommandQueue::run`].
    pub(crate) fn on(&self, opcode: Opcode, id: u32) -> Result<(), Errno> {
        self.run(opcode, &Handle { id: id.into() })
    }

    /// Runs a command with an input buffer.
    ///
    /// # Errors
    /// The errors of [`CommandQueue::run`]; `ENOMEM` if there is no memory for the buffer.
    pub(crate) fn send<A: IntoBytes + Immutable, R: FromBytes>(
        &self,
        opcode: Opcode,
        arguments: &A,
        input: &[u8],
    ) -> Result<R, Errno> {
        let buffer = self.pool.allocate(input.len())?;
        buffer.copy_in(0, input);
        let mut command = Command::new(opcode, arguments);
        command.input = buffer.iova().into();
        command.input_len = (input.len() as u32).into();
        self.execute(command).map(|done| done.result())
    }

    /// Runs a command that fills an output buffer of `len` bytes, and returns the buffer.
    ///
    /// # Errors
    /// The errors of [`CommandQueue::send`].
    pub(crate) fn fetch<A: IntoBytes + Immutable, R: FromBytes>(
        &self,
        opcode: Opcode,
        arguments: &A,
        len: usize,
    ) -> Result<(DmaMemory, R), Errno> {
        let buffer = self.pool.allocate(len)?;
        let done = self.output(opcode, arguments, &buffer, len)?;
        Ok((buffer, done.result()))
    }

    /// Runs a command whose output buffer the device may still fill after the command is complete.
    ///
    /// # Errors
    /// The errors of [`CommandQueue::run`].
    pub(crate) fn output<A: IntoBytes + Immutable>(
        &self,
        opcode: Opcode,
        arguments: &A,
        buffer: &DmaMemory,
        len: usize,
    ) -> Result<Completion, Errno> {
        let mut command = Command::new(opcode, arguments);
        command.output = buffer.iova().into();
        command.output_len = (len as u32).into();
        self.execute(command)
    }

    fn execute(&self, mut command: Command) -> Result<Completion, Errno> {
        if self.is_lost() {
            return Err(Errno::IO);
        }
        let mut rings = self.rings.lock();
        let at = rings.producer;
        let slot = (at % ENTRIES) as usize;
        command.tag = (at as u16).into();
        rings.commands.write(slot * COMMAND_LEN, &command);
        rings.producer = at.wrapping_add(1);
        // The bus orders the entry before the doorbell: a call in process, otherwise a
        // store-release or a message.
        self.bus.write32(registers::CMD_DOORBELL, rings.producer);

        let phase = 1 ^ (at >> LOG_SIZE & 1);
        let word = rings.completions.word(slot * COMPLETION_LEN + PHASE);
        let is_complete = || word.load(Ordering::Acquire) & 1 == phase;
        if !await_completion(is_complete, || !self.is_lost() && is_ready(&*self.bus)) {
            drop(rings);
            // A device that stopped during a command does not continue.
            (self.handler)(Signal::Lost);
            return Err(Errno::IO);
        }
        let done: Completion = rings.completions.read(slot * COMPLETION_LEN);
        drop(rings);
        if done.tag.get() != command.tag.get() {
            tracing::error!(
                "the device completed command {} instead of command {}",
                done.tag,
                command.tag
            );
            return Err(Errno::IO);
        }
        let Some(errno) = errno(done.status.get()) else {
            return Ok(done);
        };
        let may_warn = || self.warnings.fetch_add(1, Ordering::Relaxed) < MAX_WARNINGS;
        note_refused(command.opcode.get(), &done, may_warn);
        Err(errno)
    }
}

/// The level of a line about a refused command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    /// The driver or the device has a fault.
    Fault,
    Ordinary,
}

/// The severity of a refused command. The driver checks the verbs' arguments before it sends a
/// command, so an invalid argument is a fault of the driver or the device. The host's kernel, whose
/// `EINVAL` the device passes on, decides about some arguments of the commands on sockets.
fn severity(opcode: Opcode, status: u16) -> Severity {
    match opcode {
        Opcode::StreamConnect
        | Opcode::StreamListen
        | Opcode::BindDatagrams
        | Opcode::AttachMulticast
        | Opcode::DetachMulticast => Severity::Ordinary,
        _ if status == Status::InvalidArgument as u16 => Severity::Fault,
        _ => Severity::Ordinary,
    }
}

/// Logs the status of a refused command, and the argument if the device names it. `may_warn`: the
/// number of warnings is not used up.
fn note_refused(opcode: u16, done: &Completion, may_warn: impl FnOnce() -> bool) {
    let Some(opcode) = Opcode::from_raw(opcode) else {
        return;
    };
    let status = done.status.get();
    let reason = match Status::from_raw(status) {
        Some(status) => format!("{status:?}"),
        None => format!("status {status}"),
    };
    let argument = match done.argument_of(opcode) {
        Some(name) => format!(", argument {name}"),
        None => String::new(),
    };
    let line = format!("the device refused the command {opcode:?}: {reason}{argument}");
    match severity(opcode, status) {
        Severity::Fault if may_warn() => tracing::warn!("{line}"),
        Severity::Fault | Severity::Ordinary => tracing::debug!("{line}"),
    }
}

/// Whether the device executes commands.
pub(crate) fn is_ready(bus: &dyn Bus) -> bool {
    let status = bus.read32(registers::STATUS);
    status != registers::GONE && status & registers::Status::READY.bits() != 0
}

/// Resets the function: the device releases all memory. A device that was removed has released it
/// already.
fn reset(bus: &dyn Bus) {
    let reset = registers::Control::RESET.bits();
    bus.write32(registers::CONTROL, reset);
    let is_done = |control| control == registers::GONE || control & reset == 0;
    let _ = wait(|| is_done(bus.read32(registers::CONTROL)).then_some(()));
}

/// Waits until the command `is_complete`; returns `false` if the device no longer `is_alive`. The
/// function busy-polls at first, since a device in this process has completed the command already;
/// `is_alive` may cost a message.
fn await_completion(is_complete: impl Fn() -> bool, is_alive: impl Fn() -> bool) -> bool {
    for _ in 0..BUSY_POLLS {
        if is_complete() {
            return true;
        }
        std::hint::spin_loop();
    }
    let mut polls = 0;
    let complete = wait(|| {
        polls += 1;
        if is_complete() {
            Some(true)
        } else if polls % SLEEPS_PER_DEVICE_CHECK == 0 && !is_alive() {
            // The device may have stopped after it completed the command.
            Some(is_complete())
        } else {
            None
        }
    });
    complete.unwrap_or(false)
}

/// Calls `poll` until it returns a value, for at most [`COMMAND_TIMEOUT`]. The time is counted in
/// sleeps and not by the clock, since a suspended machine also suspends the device.
fn wait<T>(mut poll: impl FnMut() -> Option<T>) -> Result<T, Errno> {
    for _ in 0..COMMAND_TIMEOUT.as_nanos() / POLL_INTERVAL.as_nanos() {
        if let Some(value) = poll() {
            return Ok(value);
        }
        let _ = rustix::thread::nanosleep(&Timespec {
            tv_sec: 0,
            tv_nsec: POLL_INTERVAL.as_nanos() as i64,
        });
    }
    tracing::error!(
        "the device does not respond: no answer within {} s",
        COMMAND_TIMEOUT.as_secs()
    );
    Err(Errno::IO)
}

/// A timeout in the form of the device; `None` stands for no timeout.
pub(crate) fn milliseconds(timeout: Option<Duration>) -> u32 {
    timeout.map_or(u32::MAX, |t| u32::try_from(t.as_millis()).unwrap_or(u32::MAX - 1))
}

/// The limit on a peer's silence in the form of the device; `None` leaves it to TCP.
pub(crate) fn ack_timeout_ms(limit: Option<Duration>) -> u32 {
    limit.map_or(0, |limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))
}

/// The errno for a command's status; `None` if the command succeeded.
fn errno(status: u16) -> Option<Errno> {
    Some(match Status::from_raw(status) {
        Some(Status::Ok) => return None,
        Some(Status::InvalidArgument | Status::InvalidHandle | Status::WrongState) => Errno::INVAL,
        Some(Status::NoResources) => Errno::NOMEM,
        Some(Status::Busy) => Errno::BUSY,
        Some(Status::Denied) => Errno::PERM,
        Some(Status::DmaFault) => Errno::FAULT,
        Some(Status::UnknownOpcode | Status::NotSupported) => Errno::OPNOTSUPP,
        Some(Status::AddressInUse) => Errno::ADDRINUSE,
        Some(Status::AddressNotAvailable) => Errno::ADDRNOTAVAIL,
        Some(Status::Unreachable) => Errno::NETUNREACH,
        None => Errno::IO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_that_the_kernel_judges_is_no_fault() {
        let invalid = Status::InvalidArgument as u16;
        assert_eq!(severity(Opcode::CreateQp, invalid), Severity::Fault);
        assert_eq!(
            severity(Opcode::CreateQp, Status::Busy as u16),
            Severity::Ordinary
        );
        assert_eq!(severity(Opcode::StreamConnect, invalid), Severity::Ordinary);
        assert_eq!(severity(Opcode::AttachMulticast, invalid), Severity::Ordinary);
    }
}
