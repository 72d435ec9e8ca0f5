//! The effects of a write to BAR 0.

use crate::command;
use crate::events::Effects;
use crate::runtime::doorbells;
use crate::runtime::{Core, Registers};
use urnic_device::event::{Event, EventKind};
use urnic_device::registers::{CMD_DOORBELL, CONTROL, Control, KICK, NO_VECTOR, fatal};

/// A write to a register; read-only and absent ones ignore it.
pub(super) fn write(core: &Core, offset: u32, value: u32) {
    match offset {
        CONTROL => control(core, Control::from_bits_truncate(value)),
        CMD_DOORBELL => run_commands(core, value),
        KICK => doorbells::kicked(core),
        _ => core.registers().set(offset, value),
    }
}

/// Destroys all objects and stops until a reset.
pub(super) fn fail(core: &Core, code: u32) {
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
