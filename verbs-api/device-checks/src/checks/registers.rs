//! BAR 0.

use urnic_device::command::{Command, Nothing, Opcode};
use urnic_device::event::EventKind;
use urnic_device::registers::*;

use crate::check::checks;
use crate::outcome::{Outcome, ensure};
use crate::rig::{PHASE, Rig, UNREACHABLE_ADDRESS, load, reset};

checks! {
    read_only_registers_ignore_writes,
    the_command_queue_registers_hold_what_is_written,
    unlisted_registers_read_zero,
    reset_returns_the_registers_to_their_defaults,
    a_device_that_is_not_enabled_executes_nothing,
    a_command_queue_out_of_reach_is_fatal_until_reset,
    a_doorbell_beyond_the_command_queue_is_fatal_until_reset,
}

const READ_ONLY: [u32; 6] = [MAGIC, VERSION, STATUS, FATAL_CODE, VECTORS, UARS];

fn read_only_registers_ignore_writes(rig: &Rig) -> Outcome {
    for register in READ_ONLY {
        let before = rig.bus.read32(register);
        rig.bus.write32(register, !before);
        let after = rig.bus.read32(register);
        ensure!(
            after == before,
            "register {register:#x} was {before:#x} and became {after:#x}"
        );
    }
    ensure!(rig.bus.read32(VECTORS) > 0, "the device has no interrupt vector");
    ensure!(
        rig.bus.read32(UARS) > 1,
        "the device has no doorbell page but the driver's own"
    );
    ensure!(
        rig.bus.read32(CONTROL) == Control::ENABLE.bits(),
        "CONTROL of an enabled device reads {:#x}",
        rig.bus.read32(CONTROL)
    );
    rig.lives()
}

fn the_command_queue_registers_hold_what_is_written(rig: &Rig) -> Outcome {
    reset(&*rig.bus)?;
    for (register, value) in [
        (CMD_BASE, 0x0012_3456_789a_b000u64),
        (CMD_COMPLETION_BASE, 0x00fe_dcba_9876_5000),
    ] {
        rig.bus.write64(register, value);
        let seen = u64::from(rig.bus.read32(register)) | u64::from(rig.bus.read32(register + 4)) << 32;
        ensure!(
            seen == value,
            "{value:#x} was written to register {register:#x}, {seen:#x} is read"
        );
    }
    for (register, value) in [(CMD_LOG_SIZE, 7), (CMD_VECTOR, 0)] {
        rig.bus.write32(register, value);
        let seen = rig.bus.read32(register);
        ensure!(
            seen == value,
            "{value:#x} was written to register {register:#x}, {seen:#x} is read"
        );
    }
    rig.bus.write32(CMD_VECTOR, NO_VECTOR);
    rig.enable()
}

fn unlisted_registers_read_zero(rig: &Rig) -> Outcome {
    for offset in [0x3c, 0x40, 0x100, 0x7fc, BAR_LEN - 4] {
        rig.bus.write32(offset, 0xffff_ffff);
        let seen = rig.bus.read32(offset);
        ensure!(seen == 0, "offset {offset:#x} reads {seen:#x}");
    }
    // Write-only registers read as 0, too.
    for offset in [CMD_DOORBELL, KICK] {
        let seen = rig.bus.read32(offset);
        ensure!(seen == 0, "the write-only register {offset:#x} reads {seen:#x}");
    }
    rig.lives()
}

fn reset_returns_the_registers_to_their_defaults(rig: &Rig) -> Outcome {
    let constant: Vec<u32> = [MAGIC, VERSION, VECTORS, UARS]
        .map(|r| rig.bus.read32(r))
        .to_vec();
    reset(&*rig.bus)?;
    for (register, default) in [
        (STATUS, 0),
        (CONTROL, 0),
        (FATAL_CODE, 0),
        (CMD_BASE, 0),
        (CMD_BASE + 4, 0),
        (CMD_COMPLETION_BASE, 0),
        (CMD_COMPLETION_BASE + 4, 0),
        (CMD_LOG_SIZE, 1),
        (CMD_VECTOR, NO_VECTOR),
    ] {
        let seen = rig.bus.read32(register);
        ensure!(
            seen == default,
            "after a reset register {register:#x} is {seen:#x}, not {default:#x}"
        );
    }
    let after: Vec<u32> = [MAGIC, VERSION, VECTORS, UARS]
        .map(|r| rig.bus.read32(r))
        .to_vec();
    ensure!(
        constant == after,
        "a reset changed a constant register: {constant:x?} became {after:x?}"
    );
    rig.enable()?;
    rig.lives()
}

fn a_device_that_is_not_enabled_executes_nothing(rig: &Rig) -> Outcome {
    reset(&*rig.bus)?;
    rig.point_at(rig.commands.ring.iova(), rig.commands.completions.iova());
    rig.put(Command::new(Opcode::AllocPd, &Nothing {}));
    rig.ring_commands();
    // A register read completes only after the device has done the write.
    ensure!(
        rig.bus.read32(STATUS) == 0,
        "the register has {:#x}",
        rig.bus.read32(STATUS)
    );
    rig.enable()?;
    rig.lives()?;
    let slots = rig.commands.completions.len() / urnic_device::command::COMPLETION_LEN;
    let written = (0..slots)
        .filter(|slot| load(rig.commands.completions.word(slot * 64 + PHASE)) != 0)
        .count();
    ensure!(written == 2, "{written} commands were completed instead of 2");
    Ok(())
}

/// Checks that the device has stopped for that reason, and that a reset restores it.
fn is_fatal(rig: &Rig, code: u32) -> Outcome {
    rig.wait("the device to stop", || {
        (rig.bus.read32(STATUS) == Status::FATAL.bits()).then_some(())
    })?;
    let seen = rig.bus.read32(FATAL_CODE);
    ensure!(seen == code, "the fatal code is {seen}, not {code}");
    rig.bus.write32(CONTROL, Control::ENABLE.bits());
    let status = rig.bus.read32(STATUS);
    ensure!(
        status == Status::FATAL.bits(),
        "a stopped device was enabled: its status is {status:#x}"
    );
    reset(&*rig.bus)?;
    rig.enable()?;
    rig.lives()
}

fn a_command_queue_out_of_reach_is_fatal_until_reset(rig: &Rig) -> Outcome {
    let (ring, completions) = (rig.commands.ring.iova(), rig.commands.completions.iova());
    for (ring, completions) in [(UNREACHABLE_ADDRESS, completions), (ring, UNREACHABLE_ADDRESS)] {
        reset(&*rig.bus)?;
        rig.point_at(ring, completions);
        rig.bus.write32(CONTROL, Control::ENABLE.bits());
        is_fatal(rig, fatal::COMMAND_DMA)?;
    }
    Ok(())
}

fn a_doorbell_beyond_the_command_queue_is_fatal_until_reset(rig: &Rig) -> Outcome {
    rig.bus.write32(CMD_DOORBELL, 0x4000_0000);
    rig.event(EventKind::Fatal, 0)?;
    is_fatal(rig, fatal::COMMAND_DMA)
}
