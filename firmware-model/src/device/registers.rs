//! BAR 0.

use super::{Core, pages};
use crate::command;
use crate::config::ModelConfig;
use crate::effects::Effects;
use crate::host::Mapping;
use urnic_verbs_api::device::INTERFACE_VERSION;
use urnic_verbs_api::device::command::{COMMAND_LEN, COMPLETION_LEN};
use urnic_verbs_api::device::event::{Event, EventKind};
use urnic_verbs_api::device::registers::{
    CMD_BASE, CMD_COMPLETION_BASE, CMD_LOG_SIZE, CMD_VECTOR, CONTROL, Control, FATAL_CODE, MAGIC,
    MAGIC_VALUE, NO_VECTOR, STATUS, Status, VECTORS, VERSION, fatal,
};
use urnic_verbs_api::device::registers::{CMD_DOORBELL, KICK, UARS};

/// Registers that hold something, and the command queue behind them.
#[derive(Debug)]
pub(crate) struct Registers {
    status: Status,
    fatal: u32,
    log_size: u32,
    base: u64,
    completion_base: u64,
    vector: u32,
    pub(crate) queue: Option<CommandQueue>,
}

/// The command queue of an enabled device.
#[derive(Debug)]
pub(crate) struct CommandQueue {
    pub(crate) commands: Mapping,
    pub(crate) completions: Mapping,
    pub(crate) log_size: u32,
    pub(crate) consumer: u32,
}

impl Default for Registers {
    fn default() -> Registers {
        Registers {
            status: Status::empty(),
            fatal: 0,
            log_size: 1,
            base: 0,
            completion_base: 0,
            vector: NO_VECTOR,
            queue: None,
        }
    }
}

const HIGH: u32 = 4;

fn set_low(register: &mut u64, value: u32) {
    *register = *register & !0xffff_ffff | u64::from(value);
}

fn set_high(register: &mut u64, value: u32) {
    *register = *register & 0xffff_ffff | u64::from(value) << 32;
}

impl Registers {
    /// The value at `offset`; 0 where there is nothing.
    pub(crate) fn read(&self, offset: u32, config: &ModelConfig) -> u32 {
        const BASE_HIGH: u32 = CMD_BASE + HIGH;
        const COMPLETION_BASE_HIGH: u32 = CMD_COMPLETION_BASE + HIGH;
        match offset {
            MAGIC => MAGIC_VALUE,
            VERSION => INTERFACE_VERSION,
            STATUS => self.status.bits(),
            CONTROL if self.queue.is_some() => Control::ENABLE.bits(),
            FATAL_CODE => self.fatal,
            VECTORS => config.vectors,
            UARS => config.limits.uars,
            CMD_LOG_SIZE => self.log_size,
            CMD_BASE => self.base as u32,
            BASE_HIGH => (self.base >> 32) as u32,
            CMD_COMPLETION_BASE => self.completion_base as u32,
            COMPLETION_BASE_HIGH => (self.completion_base >> 32) as u32,
            CMD_VECTOR => self.vector,
            _ => 0,
        }
    }

    fn enable(&mut self, core: &Core) {
        if self.queue.is_some() || self.status.contains(Status::FATAL) {
            return;
        }
        let log_size = self.log_size.clamp(1, 12);
        let map = |iova, entry: usize| Mapping::new(&*core.host, iova, entry << log_size, 8);
        let rings = (
            map(self.base, COMMAND_LEN),
            map(self.completion_base, COMPLETION_LEN),
        );
        if let (Some(commands), Some(completions)) = rings {
            self.queue = Some(CommandQueue {
                commands,
                completions,
                log_size,
                consumer: 0,
            });
            self.status = Status::READY;
        } else {
            self.stop(fatal::COMMAND_DMA);
        }
    }

    /// Nothing works any more until a reset.
    fn stop(&mut self, code: u32) {
        tracing::error!(code, "the device stops");
        self.queue = None;
        self.status = Status::FATAL;
        self.fatal = code;
    }
}

/// A write to a register; read-only and absent ones ignore it.
pub(super) fn write(core: &Core, offset: u32, value: u32) {
    const BASE_HIGH: u32 = CMD_BASE + HIGH;
    const COMPLETION_BASE_HIGH: u32 = CMD_COMPLETION_BASE + HIGH;
    match offset {
        CONTROL => control(core, Control::from_bits_truncate(value)),
        CMD_LOG_SIZE => core.registers().log_size = value,
        CMD_BASE => set_low(&mut core.registers().base, value),
        BASE_HIGH => set_high(&mut core.registers().base, value),
        CMD_COMPLETION_BASE => set_low(&mut core.registers().completion_base, value),
        COMPLETION_BASE_HIGH => set_high(&mut core.registers().completion_base, value),
        CMD_VECTOR => core.registers().vector = value,
        CMD_DOORBELL => run_commands(core, value),
        KICK => drop(pages::look(core)),
        _ => {}
    }
}

/// Destroys all objects and stops until a reset.
pub(super) fn fail(core: &Core, code: u32) {
    let mut registers = core.registers();
    command::reset(core);
    *registers = Registers::default();
    registers.stop(code);
}

fn control(core: &Core, value: Control) {
    let mut registers = core.registers();
    if value.contains(Control::RESET) {
        command::reset(core);
        *registers = Registers::default();
    }
    if value.contains(Control::ENABLE) {
        registers.enable(core);
    } else {
        registers.queue = None;
        registers.status.remove(Status::READY);
    }
}

/// Executes commands up to the producer index, in order; their events and interrupts follow once all are complete.
fn run_commands(core: &Core, producer: u32) {
    let mut effects = Effects::default();
    let mut registers = core.registers();
    let vector = registers.vector;
    let ran = match &mut registers.queue {
        Some(queue) => {
            let posted = producer.wrapping_sub(queue.consumer);
            if posted > 1 << queue.log_size {
                // The driver has lost count of its own queue.
                registers.stop(fatal::COMMAND_DMA);
                effects.event(Event::new(EventKind::Fatal, 0));
                false
            } else {
                (0..posted).for_each(|_| command::execute_next(core, queue, &mut effects));
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
