//! The device as its driver sees it.

use crate::config::ModelConfig;
use crate::events::Effects;
use crate::host::HostMemory;
use crate::runtime::{Core, Registers, doorbells};
pub use crate::runtime::{DoorbellPages, Interrupts};
use crate::stream::Network;
use crate::time::Nanos;
use crate::{command, runtime};
use rustix::fd::BorrowedFd;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use urnic_device::event::{Event, EventKind};
use urnic_device::registers::{CMD_DOORBELL, CONTROL, Control, KICK, NO_VECTOR, UARS, fatal};

/// A device. Clones are handles to one device; it stops when the last handle is dropped.
#[derive(Clone)]
pub struct Device {
    core: Arc<Core>,
    /// Stops the background thread when the last handle goes. `None` in manual mode.
    _background: Option<Arc<runtime::Background>>,
}

impl Device {
    /// Starts a device with kernel TCP and a background thread.
    ///
    /// # Errors
    ///
    /// The thread or its descriptors could not be made.
    pub fn start(
        config: ModelConfig,
        host: Arc<dyn HostMemory>,
        interrupts: Arc<dyn Interrupts>,
    ) -> io::Result<Device> {
        let core = Core::with_tcp(config, host, interrupts)?;
        let background = runtime::Background::spawn(&core)?;
        Ok(Device {
            core,
            _background: Some(Arc::new(background)),
        })
    }

    /// Makes a device that does nothing by itself: [`step`](Device::step) drives it, on `network`
    /// and by the caller's clock.
    ///
    /// # Errors
    ///
    /// The system provides no random numbers.
    pub fn start_manual(
        config: ModelConfig,
        host: Arc<dyn HostMemory>,
        interrupts: Arc<dyn Interrupts>,
        network: Arc<dyn Network>,
    ) -> io::Result<Device> {
        Ok(Device {
            core: Core::manual(config, host, interrupts, network)?,
            _background: None,
        })
    }

    /// The inner state, for tests.
    #[cfg(test)]
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// For manual mode: sets the time to `now`; accepts, connects, receives, sends and runs timers,
    /// once. Returns the time of the next timer.
    pub fn step(&self, now: Nanos) -> Option<Nanos> {
        runtime::step(&self.core, now)
    }

    /// Reads a register.
    pub fn bar0_read(&self, offset: u32) -> u32 {
        if offset == UARS {
            return self.core.config.limits.uars;
        }
        self.core.registers().read(offset, &self.core.config)
    }

    /// Writes a register. A write to the command doorbell returns when the commands are complete.
    pub fn bar0_write(&self, offset: u32, value: u32) {
        if !self.core.is_abandoned() {
            write(&self.core, offset, value);
        }
    }

    /// A doorbell write of `value` in page `uar`; this thread does the requested work. No write is
    /// lost here, so the slot has no information beyond the value.
    #[inline]
    pub fn doorbell(&self, uar: u32, _offset: u32, value: u64) {
        if !self.core.is_abandoned() {
            doorbells::ring(&self.core, uar, value);
        }
    }

    /// The memory of BAR 2, if the device was started with it ([`ModelConfig::doorbell_memory`]).
    pub fn doorbell_pages(&self) -> Option<&DoorbellPages> {
        self.core.pages.as_ref()
    }

    /// Serves the doorbells in that memory since the last poll; returns whether there were any.
    pub fn scan_doorbells(&self) -> bool {
        doorbells::scan(&self.core)
    }

    /// Publishes to drivers whether a thread polls that memory all the time, or the drivers must
    /// write [`KICK`](urnic_device::registers::KICK). A thread that is about to sleep must poll
    /// once more after this call.
    pub fn doorbells_asleep(&self, asleep: bool) {
        if let Some(pages) = &self.core.pages {
            pages.sleep(asleep);
        }
    }

    /// The host removes `len` bytes at `iova`: every region that touches them is revoked, and on
    /// return nothing is placed or read there through a region. Until then the memory that the host
    /// mapped must stay in place; for rings and records, other memory must take its place.
    pub fn unmapped(&self, iova: u64, len: u64) {
        self.core.memory.revoke_over(iova, len);
    }

    /// The device stops with one of the codes of [`fatal`](urnic_device::registers::fatal): all
    /// objects are destroyed, and nothing works until a reset. Raises vector 0, because there may
    /// be no event queue left to report the failure.
    pub fn fail(&self, code: u32) {
        fail(&self.core, code);
        self.core.interrupt(0);
    }

    /// Function reset, as by [`Control::RESET`](urnic_device::registers::Control::RESET).
    pub fn reset(&self) {
        self.bar0_write(CONTROL, Control::RESET.bits());
    }

    /// Called by a poller with an empty completion queue: sends gathered requests and drives the
    /// receive side, for one system call or a few. `queue_pair` is the one that completed something
    /// there last, or 0.
    #[inline]
    pub fn progress(&self, queue_pair: u32) {
        if !self.core.is_abandoned() {
            runtime::progress(&self.core, queue_pair);
        }
    }

    /// The calling thread polls all streams itself until `done` is true, for at most `timeout`.
    /// Returns whether `done` is true; if not, the device continues without this thread.
    pub fn lend(&self, timeout: Duration, readiness: BorrowedFd<'_>, done: &mut dyn FnMut() -> bool) -> bool {
        !self.core.is_abandoned() && runtime::lend(&self.core, timeout, readiness, done)
    }

    /// The calling thread is about to poll the streams by [`lend`](Device::lend).
    pub fn will_lend(&self) {
        if !self.core.is_abandoned() {
            runtime::will_lend(&self.core);
        }
    }

    /// Whether posted sends wait for the next [`progress`](Device::progress).
    #[inline]
    pub fn has_gathered(&self) -> bool {
        self.core.schedule.has_gathered()
    }

    /// The process ends: data of completed requests still arrive. Takes a bounded time, and leaves
    /// a device without streams.
    pub fn shutdown(&self) {
        if !self.core.is_abandoned() {
            runtime::shutdown(&self.core);
        }
    }

    /// In a child process after fork: closes the device's descriptors and makes it refuse all work.
    /// Async-signal-safe.
    pub fn abandon_in_child(&self) {
        self.core.abandon();
    }
}

// The effects of a write to BAR 0.

/// A write to a register; read-only and absent ones ignore it.
fn write(core: &Core, offset: u32, value: u32) {
    match offset {
        CONTROL => control(core, Control::from_bits_truncate(value)),
        CMD_DOORBELL => run_commands(core, value),
        KICK => doorbells::kicked(core),
        _ => core.registers().set(offset, value),
    }
}

/// Destroys all objects and stops until a reset.
fn fail(core: &Core, code: u32) {
    let mut registers = core.registers();
    command::reset::reset(core);
    *registers = Registers::default();
    registers.stop(code);
}

fn control(core: &Core, value: Control) {
    let mut registers = core.registers();
    if value.contains(Control::RESET) {
        command::reset::reset(core);
        *registers = Registers::default();
    }
    if value.contains(Control::ENABLE) {
        registers.enable(&*core.host);
    } else {
        registers.disable();
    }
}

/// Executes commands up to the producer index, in order; their events and interrupts follow once
/// all are complete.
fn run_commands(core: &Core, producer: u32) {
    let mut effects = Effects::default();
    let mut registers = core.registers();
    let vector = registers.vector();
    let ran = match &mut registers.queue {
        Some(queue) => {
            let posted = producer.wrapping_sub(queue.consumer);
            if posted > 1 << queue.log_size {
                // The driver has lost count of its own queue.
                registers.stop(fatal::COMMAND_DMA);
                effects.event(Event::new(EventKind::Fatal, 0));
                false
            } else {
                for _ in 0..posted {
                    if core.is_stopped() {
                        break;
                    }
                    command::execute_next(core, queue, &mut effects);
                }
                posted > 0
            }
        }
        None => false,
    };
    drop(registers);
    if ran && vector != NO_VECTOR {
        core.interrupt(vector);
    }
    core.raise(effects);
}
