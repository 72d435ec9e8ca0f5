//! The contents of the registers of BAR 0.

use crate::config::ModelConfig;
use crate::host::{HostMemory, Mapping};
use urnic_device::INTERFACE_VERSION;
use urnic_device::command::{COMMAND_LEN, COMPLETION_LEN};
use urnic_device::registers::{
    CMD_BASE, CMD_COMPLETION_BASE, CMD_LOG_SIZE, CMD_VECTOR, CONTROL, Control, FATAL_CODE, MAGIC,
    MAGIC_VALUE, NO_VECTOR, STATUS, Status, UARS, VECTORS, VERSION, fatal,
};

/// Registers that keep a value, and the command queue.
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
    /// The value at `offset`; 0 where there is no register.
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

    /// Sets the register at `offset`, if it only stores a value.
    pub(crate) fn set(&mut self, offset: u32, value: u32) {
        const BASE_HIGH: u32 = CMD_BASE + HIGH;
        const COMPLETION_BASE_HIGH: u32 = CMD_COMPLETION_BASE + HIGH;
        match offset {
            CMD_LOG_SIZE => self.log_size = value,
            CMD_BASE => set_low(&mut self.base, value),
            BASE_HIGH => set_high(&mut self.base, value),
            CMD_COMPLETION_BASE => set_low(&mut self.completion_base, value),
            COMPLETION_BASE_HIGH => set_high(&mut self.completion_base, value),
            CMD_VECTOR => self.vector = value,
            _ => {}
        }
    }

    /// The interrupt vector of the command queue; `NO_VECTOR` for none.
    pub(crate) fn vector(&self) -> u32 {
        self.vector
    }

    /// Enables the command queue in the host's memory; the device stops if that memory cannot be
    /// reached.
    pub(crate) fn enable(&mut self, host: &dyn HostMemory) {
        if self.queue.is_some() || self.status.contains(Status::FATAL) {
            return;
        }
        let log_size = self.log_size.clamp(1, 12);
        let map = |iova, entry: usize| Mapping::new(host, iova, entry << log_size, 8);
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

    /// Releases the command queue.
    pub(crate) fn disable(&mut self) {
        self.queue = None;
        self.status.remove(Status::READY);
    }

    /// Stops the device until a reset.
    pub(crate) fn stop(&mut self, code: u32) {
        tracing::error!(code, "the device stops");
        self.queue = None;
        self.status = Status::FATAL;
        self.fatal = code;
    }
}
