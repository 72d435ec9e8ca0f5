//! Function reset.

use urnic_device::command::{Command, Handle, Nothing, Opcode, Status};
use urnic_device::registers::{CONTROL, STATUS};
use urnic_device::wqe;

use crate::check::checks;
use crate::connection::{own, pair, stream, works};
use crate::outcome::{Outcome, ensure};
use crate::rig::{Rig, reset};

checks! {
    a_reset_with_work_outstanding_destroys_everything,
    after_a_reset_the_device_touches_no_memory,
    resets_may_come_at_any_time,
    disabling_stops_commands_and_not_the_data,
}

fn a_reset_with_work_outstanding_destroys_everything(rig: &Rig) -> Outcome {
    let address = own(rig)?;
    let (lid, port) = crate::connection::listen(rig, address)?;
    let (near, far) = pair(rig)?;
    let (connecting, _accepted) = stream(rig)?;
    let buffer = rig.memory(64)?;
    rig.with_output(
        Opcode::StreamReceive,
        &Handle {
            id: connecting.into(),
        },
        buffer.iova(),
        64,
    )?;
    for n in 0..20 {
        far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
        near.qp.remote(
            rig,
            wqe::Opcode::Read,
            n,
            &[near.region.sge(0, 4096)],
            far.region.sge(0, 0),
        );
    }
    reset(&*rig.bus)?;
    ensure!(
        rig.bus.read32(STATUS) == 0,
        "the status after a reset is {:#x}",
        rig.bus.read32(STATUS)
    );
    rig.enable()?;
    for (opcode, id) in [
        (Opcode::DestroyQp, near.qp.id),
        (Opcode::DestroyCq, near.qp.send_cq.id),
        (Opcode::DestroyMr, near.region.stag),
        (Opcode::FreePd, near.pd),
        (Opcode::FreeUar, rig.uar),
        (Opcode::DestroyEq, 0),
        (Opcode::StreamUnlisten, lid),
        (Opcode::StreamQuery, connecting),
    ] {
        rig.refuses_on(opcode, id, Status::InvalidHandle)?;
    }
    // The listener's port is free again.
    let events = rig.event_queue(4, 0)?;
    ensure!(
        events.id == 0,
        "the first event queue after a reset is {}",
        events.id
    );
    let mut again = address;
    again.set_port(port);
    crate::connection::listen(rig, again).map(drop)
}

fn after_a_reset_the_device_touches_no_memory(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    for n in 0..10 {
        far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
    }
    near.qp.send(rig, 1, &[near.region.sge(0, 64)]);
    reset(&*rig.bus)?;
    let memories = [
        near.qp.send_cq.ring(),
        far.qp.recv_cq.ring(),
        far.region.memory.clone(),
    ];
    let before: Vec<_> = memories
        .iter()
        .map(|memory| memory.read(0, memory.len()))
        .collect();
    rig.enable()?;
    for _ in 0..20 {
        rig.lives()?;
    }
    let after: Vec<_> = memories
        .iter()
        .map(|memory| memory.read(0, memory.len()))
        .collect();
    ensure!(before == after, "the device wrote to memory of before its reset");
    Ok(())
}

fn resets_may_come_at_any_time(rig: &Rig) -> Outcome {
    for _ in 0..5 {
        reset(&*rig.bus)?;
        reset(&*rig.bus)?;
        rig.enable()?;
        rig.lives()?;
        // The command queue has just been rung.
        rig.put(Command::new(Opcode::AllocPd, &Nothing {}));
        rig.ring_commands();
    }
    reset(&*rig.bus)?;
    rig.enable()?;
    rig.lives()
}

fn disabling_stops_commands_and_not_the_data(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    rig.bus.write32(CONTROL, 0);
    ensure!(
        rig.bus.read32(STATUS) == 0,
        "the status of a disabled device is {:#x}",
        rig.bus.read32(STATUS)
    );
    works(rig, &near, &far)?;
    rig.enable()?;
    works(rig, &near, &far)?;
    rig.lives()
}
