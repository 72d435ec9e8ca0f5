//! Objects: which are busy, which arguments are out of range, which are free again.

use std::rc::Rc;

use urnic_device::command::{
    Command, CreateCq, CreateEq, CreateMw, CreateQp, CreateSrq, ModifyQp, Nothing, Opcode, QueueHandle,
    ResizeCq, Status, modify,
};
use urnic_device::doorbell::{Kind, SLOTS};
use urnic_device::registers::{UARS, VECTORS};
use urnic_device::vocabulary::QpState;

use crate::check::checks;
use crate::connection::{End, pair, works};
use crate::outcome::{Outcome, ensure};
use crate::queues::{Cq, Qp};
use crate::rig::{Rig, UNREACHABLE_ADDRESS};

checks! {
    objects_are_busy_while_others_use_them,
    numbers_and_slots_are_in_range,
    sizes_out_of_range_are_refused,
    rings_and_records_out_of_reach_fail_their_command,
    queue_pairs_change_state_as_they_should,
    attributes_out_of_range_are_refused,
    any_limit_on_the_peers_silence_is_taken,
    doorbells_of_nonsense_are_ignored,
}

fn objects_are_busy_while_others_use_them(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let (send_cq, recv_cq) = (Rc::new(Cq::new(rig, 3)?), Rc::new(Cq::new(rig, 3)?));
    let srq = CreateSrq {
        ring: rig.memory(64 << 3)?.iova().into(),
        record: rig.memory(128)?.iova().into(),
        pd: pd.into(),
        log_size: 3.into(),
        log_stride: 6.into(),
        uar: rig.uar.into(),
    };
    let srq: QueueHandle = rig.command(Opcode::CreateSrq, &srq)?.result();
    let srq = srq.id.get();
    let (good, memory) = Qp::arguments(rig, pd, &send_cq, &recv_cq)?;
    let arguments = CreateQp {
        srq: srq.into(),
        ..good
    };
    let qp = Qp::with(rig, &arguments, memory, &send_cq, &recv_cq)?;
    let mw = CreateMw {
        pd: pd.into(),
        kind: 2.into(),
    };
    let mw = rig.create(Opcode::CreateMw, &mw)?;
    let busy = |opcode, id| rig.refuses_on(opcode, id, Status::Busy);
    busy(Opcode::FreePd, pd)?;
    busy(Opcode::DestroyCq, send_cq.id)?;
    busy(Opcode::DestroyCq, recv_cq.id)?;
    busy(Opcode::DestroySrq, srq)?;
    busy(Opcode::FreeUar, rig.uar)?;
    busy(Opcode::DestroyEq, rig.notices.id)?;
    rig.on(Opcode::DestroyQp, qp.id)?;
    busy(Opcode::FreePd, pd)?;
    rig.on(Opcode::DestroySrq, srq)?;
    busy(Opcode::FreePd, pd)?;
    rig.on(Opcode::DestroyMw, mw)?;
    rig.on(Opcode::FreePd, pd)?;
    rig.on(Opcode::DestroyCq, send_cq.id)?;
    busy(Opcode::DestroyEq, rig.notices.id)?;
    rig.on(Opcode::DestroyCq, recv_cq.id)?;
    rig.on(Opcode::DestroyEq, rig.notices.id)?;
    rig.on(Opcode::FreeUar, rig.uar)?;
    rig.refuses_on(Opcode::FreePd, pd, Status::InvalidHandle)
}

fn numbers_and_slots_are_in_range(rig: &Rig) -> Outcome {
    let page = rig.create(Opcode::AllocUar, &Nothing {})?;
    let pages = rig.bus.read32(UARS);
    ensure!(
        page != 0 && page < pages,
        "doorbell page {page} of {pages} was given away"
    );
    ensure!(page != rig.uar, "doorbell page {page} was given away twice");
    let end = End::new(rig)?;
    for (name, number) in [("cqid", end.qp.send_cq.id), ("qid", end.qp.id)] {
        ensure!(number < 1 << 24, "{name} {number:#x} has more than 24 bits");
    }
    let (arguments, _) = Qp::arguments(rig, end.pd, &end.qp.send_cq, &end.qp.recv_cq)?.clone();
    let handle: QueueHandle = rig.command(Opcode::CreateQp, &arguments)?.result();
    let slot = handle.doorbell.get();
    ensure!(
        slot.is_multiple_of(8) && slot / 8 < SLOTS,
        "{slot:#x} is no slot of a doorbell page"
    );
    rig.on(Opcode::DestroyQp, handle.id.get())
}

const TOO_LARGE: [u32; 4] = [31, 32, 64, u32::MAX];

fn sizes_out_of_range_are_refused(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let cq = Rc::new(Cq::new(rig, 3)?);
    let (good_cq, ..) = Cq::arguments(rig, 3)?;
    let (good_qp, _memory) = Qp::arguments(rig, pd, &cq, &cq)?;
    for log_size in TOO_LARGE {
        let log_size = log_size.into();
        let refused = [
            Command::new(Opcode::CreateCq, &CreateCq { log_size, ..good_cq }),
            Command::new(
                Opcode::CreateQp,
                &CreateQp {
                    sq_log_size: log_size,
                    ..good_qp
                },
            ),
            Command::new(
                Opcode::CreateQp,
                &CreateQp {
                    rq_log_size: log_size,
                    ..good_qp
                },
            ),
            Command::new(
                Opcode::CreateQp,
                &CreateQp {
                    rq_log_stride: log_size,
                    ..good_qp
                },
            ),
            Command::new(
                Opcode::ResizeCq,
                &ResizeCq {
                    ring: good_cq.ring,
                    cq: cq.id.into(),
                    log_size,
                },
            ),
            Command::new(
                Opcode::CreateEq,
                &CreateEq {
                    ring: good_cq.ring,
                    record: good_cq.record,
                    log_size,
                    vector: 0.into(),
                },
            ),
        ];
        for command in refused {
            rig.refuses(command, Status::InvalidArgument)?;
        }
    }
    let vector = CreateEq {
        ring: good_cq.ring,
        record: good_cq.record,
        log_size: 3.into(),
        vector: rig.bus.read32(VECTORS).into(),
    };
    rig.refuses(Command::new(Opcode::CreateEq, &vector), Status::InvalidArgument)?;
    rig.lives()
}

fn rings_and_records_out_of_reach_fail_their_command(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let cq = Rc::new(Cq::new(rig, 3)?);
    let (good, ..) = Cq::arguments(rig, 3)?;
    let (ring, record) = (good.ring.get(), good.record.get());
    for (ring, record) in [
        (UNREACHABLE_ADDRESS, record),
        (ring, UNREACHABLE_ADDRESS),
        (ring + 8, record),
        (ring, record + 4),
    ] {
        let arguments = CreateCq {
            ring: ring.into(),
            record: record.into(),
            ..good
        };
        rig.refuses(Command::new(Opcode::CreateCq, &arguments), Status::DmaFault)?;
    }
    let (good, _memory) = Qp::arguments(rig, pd, &cq, &cq)?;
    let nowhere = UNREACHABLE_ADDRESS.into();
    for arguments in [
        CreateQp {
            sq_ring: nowhere,
            ..good
        },
        CreateQp {
            rq_ring: nowhere,
            ..good
        },
        CreateQp {
            record: nowhere,
            ..good
        },
    ] {
        rig.refuses(Command::new(Opcode::CreateQp, &arguments), Status::DmaFault)?;
    }
    // The failed commands left no reference to the objects.
    rig.on(Opcode::DestroyCq, cq.id)?;
    rig.on(Opcode::FreePd, pd)?;
    rig.lives()
}

fn queue_pairs_change_state_as_they_should(rig: &Rig) -> Outcome {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
    let cq = Rc::new(Cq::new(rig, 3)?);
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let qp = Qp::new(rig, pd, &cq, &cq)?;
    qp.is_in(rig, Reset)?;
    for (state, refused) in [
        (Init, &[Rtr, Rts, Sqd][..]),
        (Rtr, &[Rts, Sqd]),
        (Rts, &[Init, Sqd]),
        (Sqd, &[Init, Rtr]),
    ] {
        for wrong in refused {
            rig.refuses(qp.change(*wrong), Status::WrongState)?;
        }
        qp.modify(rig, state)?;
        qp.is_in(rig, state)?;
        if state == Rts {
            // The next step from RTS is a close; this queue pair goes to the error state and starts
            // again.
            break;
        }
    }
    for state in [Err, Reset, Init, Err, Reset] {
        qp.modify(rig, state)?;
        qp.is_in(rig, state)?;
    }
    qp.ready(rig)?;
    rig.on(Opcode::DestroyQp, qp.id)?;
    rig.refuses_on(Opcode::QueryQp, qp.id, Status::InvalidHandle)
}

fn attributes_out_of_range_are_refused(rig: &Rig) -> Outcome {
    let end = End::new(rig)?;
    let change = ModifyQp {
        qp: end.qp.id.into(),
        ..ModifyQp::default()
    };
    for arguments in [
        ModifyQp {
            mask: modify::IRD.into(),
            ird: (rig.attributes.max_ird.get() + 1).into(),
            ..change
        },
        ModifyQp {
            mask: modify::ORD.into(),
            ord: (rig.attributes.max_ord.get() + 1).into(),
            ..change
        },
        ModifyQp {
            mask: modify::STATE.into(),
            state: 77.into(),
            ..change
        },
    ] {
        rig.refuses(
            Command::new(Opcode::ModifyQp, &arguments),
            Status::InvalidArgument,
        )?;
    }
    end.qp.is_in(rig, QpState::Rts)
}

fn any_limit_on_the_peers_silence_is_taken(rig: &Rig) -> Outcome {
    let (near, _far) = pair(rig)?;
    for limit in [2_000, 0, 1, u32::MAX] {
        let change = ModifyQp {
            qp: near.qp.id.into(),
            mask: modify::ACK_TIMEOUT.into(),
            ack_timeout_ms: limit.into(),
            ..ModifyQp::default()
        };
        rig.run(Command::new(Opcode::ModifyQp, &change))?;
    }
    // The peer is there.
    near.qp.is_in(rig, QpState::Rts)
}

fn doorbells_of_nonsense_are_ignored(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let cqs = [&near, &far].map(|end| [end.qp.send_cq.id, end.qp.recv_cq.id]);
    let other_page = rig.create(Opcode::AllocUar, &Nothing {})?;
    let mut values = vec![0, u64::MAX];
    let of = |kind: u64, queue: u32, index: u32| {
        kind << 56 | u64::from(queue & 0xff_ffff) << 32 | u64::from(index)
    };
    for index in [0, 1, u32::MAX] {
        for queue in cqs.concat().into_iter().chain([near.qp.id, far.qp.id]) {
            // Unknown kinds for existing queues, and known kinds for queues that do not exist.
            values.extend([0, 6, 0x7f, 0xff].map(|kind| of(kind, queue, index)));
            values.extend((1..=5).map(|kind| of(kind, queue ^ 0x80_0000, index)));
        }
    }
    for value in values {
        for page in [0, rig.uar] {
            for slot in [0, 8, (SLOTS - 1) * 8] {
                rig.bus.doorbell(page, slot, value);
            }
        }
    }
    // Arms of the check's queues, through a page without queues.
    for cq in cqs.concat() {
        rig.bus.doorbell(other_page, 0, of(Kind::Arm as u64, cq, 0));
        rig.bus
            .doorbell(other_page, 8, of(Kind::ArmSolicited as u64, cq, 0));
    }
    // One ring too many does no harm.
    near.qp.ring_sends(rig);
    far.qp.ring_sends(rig);
    rig.lives()?;
    for end in [&near, &far] {
        end.qp.is_in(rig, QpState::Rts)?;
        ensure!(
            end.qp.send_cq.there() + end.qp.recv_cq.there() == 0,
            "something completed that was not posted"
        );
    }
    works(rig, &near, &far)?;
    // Completions came, but no queue was armed.
    rig.lives()?;
    ensure!(
        rig.notices.in_ring() == 0,
        "a completion queue was armed by nonsense"
    );
    Ok(())
}
