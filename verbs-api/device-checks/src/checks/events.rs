//! Event queues and completion notifications.

use std::collections::HashSet;

use urnic_device::command::{Command, CreateEq, ModerateCq, Nothing, Opcode, QueueHandle, Status, features};
use urnic_device::doorbell::{CQ_SLOTS, Doorbell, Kind, SLOTS};
use urnic_device::event::{Event, EventKind};
use urnic_device::registers::VECTORS;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{self, SendFlags};
use urnic_testkit::request;

use crate::check::checks;
use crate::connection::{connect_arguments, own, pair, works};
use crate::outcome::{Failure, Outcome, ensure};
use crate::queues::Cq;
use crate::rig::Rig;

checks! {
    events_that_find_no_room_wait,
    an_armed_completion_queue_notifies_once,
    an_arm_that_crosses_a_completion_notifies_at_once,
    an_arm_that_crosses_more_completions_than_fit_notifies_at_once,
    a_cq_armed_for_solicited_ignores_other_completions,
    a_moderated_notification_comes_and_comes_once,
    a_doorbell_reaches_only_queues_of_its_page,
    invalid_doorbells_of_a_page_affect_no_other,
    completion_queues_of_a_page_have_slots_of_their_own,
    every_vector_can_be_raised,
    a_destroyed_event_queue_does_not_exist,
}

fn events_that_find_no_room_wait(rig: &Rig) -> Outcome {
    // The first event queue is queue 0, which receives the asynchronous events.
    rig.on(Opcode::DestroyEq, 0)?;
    let events = rig.event_queue(1, 0)?;
    ensure!(
        events.id == 0,
        "the lowest free event queue is 0, not {}",
        events.id
    );
    // A port on which no listener exists.
    let mut unused = own(rig)?;
    let (lid, port) = crate::connection::listen(rig, unused)?;
    rig.on(Opcode::StreamUnlisten, lid)?;
    unused.set_port(port);
    let mut streams = Vec::new();
    for _ in 0..9 {
        streams.push(rig.create(Opcode::StreamConnect, &connect_arguments(unused))?);
    }
    rig.wait("a full event queue", || (events.in_ring() == 2).then_some(()))?;
    rig.lives()?;
    let mut reported = Vec::new();
    for _ in 0..streams.len() {
        let event: Event = rig.wait("the next of the events that waited", || events.next())?;
        ensure!(
            event.kind == EventKind::StreamConnected as u8 && event.code.get() != 0,
            "instead of a refused connect, the event is {event:?}"
        );
        reported.push(event.object.get());
    }
    reported.sort_unstable();
    streams.sort_unstable();
    ensure!(
        reported == streams,
        "connects of {streams:x?} were refused, events came for {reported:x?}"
    );
    ensure!(events.next().is_none(), "there is an event too many");
    Ok(())
}

fn notified(rig: &Rig, cq: u32) -> Outcome {
    let event = rig.wait("a completion notification", || rig.notices.next())?;
    ensure!(
        event.kind == EventKind::Completion as u8 && event.object.get() == cq,
        "instead of a notification of completion queue {cq:#x}: {event:?}"
    );
    Ok(())
}

fn silent(rig: &Rig) -> Outcome {
    rig.lives()?;
    let event = rig.notices.next();
    ensure!(event.is_none(), "an unrequested notification: {event:?}");
    Ok(())
}

fn an_armed_completion_queue_notifies_once(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    silent(rig)?;
    let vector = u32::from(rig.bus.read32(VECTORS) > 1);
    for _ in 0..3 {
        rig.line.take(vector);
        near.qp.send_cq.arm(rig, Kind::Arm);
        rig.lives()?;
        works(rig, &near, &far)?;
        notified(rig, near.qp.send_cq.id)?;
        rig.wait("the interrupt of a notification", || {
            rig.line.take(vector).then_some(())
        })?;
        works(rig, &near, &far)?;
        silent(rig)?;
    }
    Ok(())
}

fn an_arm_that_crosses_a_completion_notifies_at_once(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for _ in 0..3 {
        let seen = near.qp.send_cq.consumer();
        far.qp.receive(rig, 1, &[far.region.sge(0, 64)]);
        near.qp.send(rig, 2, &[]);
        far.qp.recv_cq.expect(rig, 1, WcStatus::Success)?;
        // The arm carries the index from before this completion.
        rig.wait("the send's completion", || near.qp.send_cq.poll())?;
        near.qp.send_cq.arm_at(rig, Kind::Arm, seen);
        notified(rig, near.qp.send_cq.id)?;
    }
    Ok(())
}

fn an_arm_that_crosses_more_completions_than_fit_notifies_at_once(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    near.qp.send_cq.resize(rig, 1)?;
    let seen = near.qp.send_cq.consumer();
    for _ in 0..4 {
        works(rig, &near, &far)?;
    }
    // As if the device had read the arm only now.
    near.qp.send_cq.arm_at(rig, Kind::Arm, seen);
    notified(rig, near.qp.send_cq.id)
}

fn a_cq_armed_for_solicited_ignores_other_completions(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    far.qp.recv_cq.arm(rig, Kind::ArmSolicited);
    rig.lives()?;
    let send = |flags: SendFlags| {
        far.qp.receive(rig, 1, &[far.region.sge(0, 64)]);
        let mut header = request(wqe::Opcode::Send, 2);
        header.flags |= flags.bits();
        near.qp.post(rig, header, &[], 0);
        near.qp.send_cq.expect(rig, 2, WcStatus::Success)?;
        far.qp.recv_cq.expect(rig, 1, WcStatus::Success)
    };
    send(SendFlags::empty())?;
    silent(rig)?;
    send(SendFlags::SOLICITED)?;
    notified(rig, far.qp.recv_cq.id)
}

/// Creates a completion queue in a doorbell page and returns its slot.
fn slot_in(rig: &Rig, page: u32) -> Outcome<u32> {
    let (mut arguments, ..) = Cq::arguments(rig, 3)?;
    arguments.uar = page.into();
    let handle: QueueHandle = rig.command(Opcode::CreateCq, &arguments)?.result();
    Ok(handle.doorbell.get())
}

fn a_moderated_notification_comes_and_comes_once(rig: &Rig) -> Outcome {
    const MAX: u32 = 65535;
    if rig.attributes.features.get() & features::MODERATION == 0 {
        return Err(Failure::NotHere("it has no moderation".to_owned()));
    }
    let (near, far) = pair(rig)?;
    let cq = &near.qp.send_cq;
    let settings = |cq: u32, count: u32, period: u32| ModerateCq {
        cq: cq.into(),
        count: count.into(),
        period: period.into(),
        ..ModerateCq::default()
    };
    for wrong in [settings(cq.id, MAX + 1, 1), settings(cq.id, 1, MAX + 1)] {
        rig.refuses(Command::new(Opcode::ModerateCq, &wrong), Status::InvalidArgument)?;
    }
    rig.refuses(
        Command::new(Opcode::ModerateCq, &settings(u32::MAX, 2, 2)),
        Status::InvalidHandle,
    )?;
    // A count that is reached, a count that is never reached, each of the two parameters alone, and
    // neither. The device may send the notification early.
    for (count, period) in [(2, MAX), (MAX, 1000), (2, 0), (0, 1000), (0, 0)] {
        rig.command(Opcode::ModerateCq, &settings(cq.id, count, period))?;
        cq.arm(rig, Kind::Arm);
        rig.lives()?;
        works(rig, &near, &far)?;
        works(rig, &near, &far)?;
        notified(rig, cq.id)?;
        silent(rig)?;
    }
    // A change of the parameters does not lose a notification that waits.
    rig.command(Opcode::ModerateCq, &settings(cq.id, MAX, MAX))?;
    cq.arm(rig, Kind::Arm);
    rig.lives()?;
    works(rig, &near, &far)?;
    rig.command(Opcode::ModerateCq, &settings(cq.id, 0, 0))?;
    notified(rig, cq.id)?;
    silent(rig)
}

fn a_doorbell_reaches_only_queues_of_its_page(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    let page = rig.create(Opcode::AllocUar, &Nothing {})?;
    // With a queue in the page, the device polls that page, too.
    let slot = slot_in(rig, page)?;
    let foreign = Doorbell {
        kind: Kind::Arm,
        queue: near.qp.send_cq.id,
        index: near.qp.send_cq.consumer(),
    };
    rig.bus.doorbell(page, slot, foreign.encode());
    rig.lives()?;
    works(rig, &near, &far)?;
    silent(rig)
}

fn invalid_doorbells_of_a_page_affect_no_other(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    let page = rig.create(Opcode::AllocUar, &Nothing {})?;
    slot_in(rig, page)?;
    let queues = [
        near.qp.id,
        far.qp.id,
        near.qp.send_cq.id,
        far.qp.recv_cq.id,
        0xff_ffff,
    ];
    for kind in (0..=Kind::ArmSolicited as u8 + 1).chain([u8::MAX]) {
        for slot in 0..SLOTS {
            let queue = queues[slot as usize % queues.len()];
            let index = slot.wrapping_mul(0x9e37_79b9);
            let value = u64::from(kind) << 56 | u64::from(queue) << 32 | u64::from(index);
            rig.bus.doorbell(page, slot * 8, value);
        }
        rig.lives()?;
        works(rig, &near, &far)?;
    }
    silent(rig)
}

fn completion_queues_of_a_page_have_slots_of_their_own(rig: &Rig) -> Outcome {
    let page = rig.create(Opcode::AllocUar, &Nothing {})?;
    let mut slots = HashSet::new();
    for number in 0..CQ_SLOTS {
        let slot = slot_in(rig, page)?;
        ensure!(
            slots.insert(slot),
            "completion queue {number} of a page shares slot {slot:#x}"
        );
    }
    Ok(())
}

fn every_vector_can_be_raised(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    for vector in 0..rig.bus.read32(VECTORS) {
        let queue = rig.event_queue(2, vector)?;
        let end = crate::connection::End::with_event_queue(rig, &queue)?;
        let other = crate::connection::End::new(rig)?;
        crate::connection::join(rig, &end.qp, &other.qp, 0)?;
        rig.line.take(vector);
        end.qp.send_cq.arm(rig, Kind::Arm);
        works(rig, &end, &other)?;
        let event = rig.wait("a notification", || queue.next())?;
        ensure!(
            event.object.get() == end.qp.send_cq.id,
            "the notification is {event:?}"
        );
        rig.wait(&format!("interrupt {vector}"), || {
            rig.line.take(vector).then_some(())
        })?;
    }
    Ok(())
}

fn a_destroyed_event_queue_does_not_exist(rig: &Rig) -> Outcome {
    let queue = rig.event_queue(3, 0)?;
    rig.on(Opcode::DestroyEq, queue.id)?;
    rig.refuses_on(Opcode::DestroyEq, queue.id, Status::InvalidHandle)?;
    let again = rig.event_queue(3, 0)?;
    ensure!(
        again.id == queue.id,
        "number {} is not free again: {} came",
        queue.id,
        again.id
    );
    // The device creates queues until its resources are exhausted, or until the limit of this
    // check.
    let mut made = Vec::new();
    let most = 1 << 12;
    while made.len() < most {
        let arguments = CreateEq {
            ring: rig.memory(4096)?.iova().into(),
            record: rig.memory(64)?.iova().into(),
            log_size: 3.into(),
            vector: 0.into(),
        };
        let completion = rig.execute(Command::new(Opcode::CreateEq, &arguments))?;
        match Status::from_raw(completion.status.get()) {
            Some(Status::Ok) => made.push(completion),
            Some(Status::NoResources) => return rig.lives(),
            other => return Err(Failure::Failed(format!("CreateEq ended with {other:?}"))),
        }
    }
    let _ = rig.create(Opcode::AllocPd, &Nothing {})?;
    Ok(())
}
