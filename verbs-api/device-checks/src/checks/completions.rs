//! Completion queues and shared receive queues.

use std::rc::Rc;

use urnic_device::command::{
    Command, Count, CreateQp, CreateSrq, ModifySrq, Nothing, Opcode, QueueHandle, ResizeCq, Status, cq,
    features,
};
use urnic_device::cqe::CQE_LEN;
use urnic_device::doorbell::Kind;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::record::QueueRecord;
use urnic_device::vocabulary::WcStatus::Success;
use urnic_device::wqe::RecvHeader;
use zerocopy::IntoBytes;

use crate::check::checks;
use crate::connection::{End, join, pair, works};
use crate::outcome::{Failure, Outcome, ensure};
use crate::queues::{ALL_RIGHTS, Cq, Qp, Region};
use crate::rig::Rig;

checks! {
    phases_turn_with_every_lap,
    a_cq_overflow_is_reported_and_ends_only_its_queue_pairs,
    a_queue_moves_to_another_ring,
    a_shared_receive_queue_serves_several,
    timestamps_never_go_back_and_may_be_left_out,
}

fn phases_turn_with_every_lap(rig: &Rig) -> Outcome {
    let (send_cq, recv_cq) = (Rc::new(Cq::new(rig, 1)?), Rc::new(Cq::new(rig, 2)?));
    let (near, far) = (
        End::with(rig, &send_cq, &send_cq)?,
        End::with(rig, &recv_cq, &recv_cq)?,
    );
    join(rig, &near.qp, &far.qp, 0)?;
    for _ in 0..20 {
        works(rig, &near, &far)?;
    }
    Ok(())
}

fn a_cq_overflow_is_reported_and_ends_only_its_queue_pairs(rig: &Rig) -> Outcome {
    let (other_near, other_far) = pair(rig)?;
    let small = Rc::new(Cq::new(rig, 1)?);
    let large = Rc::new(Cq::new(rig, 6)?);
    let (near, far) = (End::with(rig, &small, &large)?, End::new(rig)?);
    join(rig, &near.qp, &far.qp, 0)?;
    for n in 0..6 {
        far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
        near.qp.send(rig, n, &[]);
    }
    rig.event(EventKind::CqError, small.id)?;
    let event = rig.event(EventKind::QpError, near.qp.id)?;
    ensure!(
        event.code.get() == QpFault::CqOverflow as u16,
        "the queue pair failed with fault {}, not CqOverflow",
        event.code
    );
    works(rig, &other_near, &other_far)?;
    rig.lives()
}

fn a_queue_moves_to_another_ring(rig: &Rig) -> Outcome {
    let recv_cq = Rc::new(Cq::new(rig, 3)?);
    let (near, far) = (End::new(rig)?, End::with(rig, &recv_cq, &recv_cq)?);
    join(rig, &near.qp, &far.qp, 0)?;
    works(rig, &near, &far)?;
    for n in 0..6 {
        far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
        near.qp.send(rig, n, &[]);
        near.qp.send_cq.expect(rig, n, Success)?;
    }
    // The oldest completion is consumed, so that the others start in the middle of the old ring.
    recv_cq.expect(rig, 0, Success)?;
    rig.wait("all to arrive", || (recv_cq.there() == 5).then_some(()))?;
    let small = ResizeCq {
        ring: rig.memory(CQE_LEN)?.iova().into(),
        cq: recv_cq.id.into(),
        log_size: 1.into(),
    };
    rig.refuses(Command::new(Opcode::ResizeCq, &small), Status::InvalidArgument)?;
    let carried: Count = recv_cq.resize(rig, 5)?;
    ensure!(
        carried.count.get() == 5,
        "{} entries were carried over, not 5",
        carried.count
    );
    for n in 1..6 {
        recv_cq.expect(rig, n, Success)?;
    }
    for _ in 0..40 {
        works(rig, &near, &far)?;
    }
    Ok(())
}

fn a_shared_receive_queue_serves_several(rig: &Rig) -> Outcome {
    const LOG: u32 = 4;
    const STRIDE: usize = 64;
    if rig.attributes.features.get() & features::SRQ == 0 {
        return Err(Failure::NotHere("it has no shared receive queues".to_owned()));
    }
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let (ring, record) = (rig.memory(STRIDE << LOG)?, rig.memory(128)?);
    let arguments = CreateSrq {
        ring: ring.iova().into(),
        record: record.iova().into(),
        pd: pd.into(),
        log_size: LOG.into(),
        log_stride: 6.into(),
        uar: rig.uar.into(),
    };
    let srq: QueueHandle = rig.command(Opcode::CreateSrq, &arguments)?.result();
    let region = Region::new(rig, pd, 1 << 16, ALL_RIGHTS)?;
    let fars = (0..2)
        .map(|_| {
            let cq = Rc::new(Cq::new(rig, 5)?);
            let (good, memory) = Qp::arguments(rig, pd, &cq, &cq)?;
            let arguments = CreateQp {
                srq: srq.id,
                rq_ring: 0.into(),
                ..good
            };
            let qp = Qp::with(rig, &arguments, memory, &cq, &cq)?;
            qp.ready(rig)?;
            Ok(qp)
        })
        .collect::<Outcome<Vec<_>>>()?;
    let nears = [End::new(rig)?, End::new(rig)?];
    for (near, far) in nears.iter().zip(&fars) {
        join(rig, &near.qp, far, 0)?;
    }
    let post = |n: u32| {
        let at = (n % (1 << LOG)) as usize * STRIDE;
        ring.write(at, RecvHeader::new(n.into(), 1).as_bytes());
        ring.write(at + 16, [region.sge(u64::from(n % 64) * 64, 64)].as_bytes());
        let producer = std::mem::offset_of!(QueueRecord, rq_producer);
        record
            .word(producer)
            .store(n + 1, std::sync::atomic::Ordering::SeqCst);
        rig.ring(Kind::SharedReceive, srq.id.get(), srq.doorbell.get(), n + 1);
    };
    (0..8).for_each(post);
    let limit = ModifySrq {
        srq: srq.id,
        limit: 3.into(),
    };
    rig.command(Opcode::ModifySrq, &limit)?;
    for n in 0..8u64 {
        let which = n as usize % 2;
        nears[which].qp.send(rig, n, &[nears[which].region.sge(0, 10)]);
        nears[which].qp.send_cq.expect(rig, n, Success)?;
        // Receives complete in the order of the queue, whichever queue pair consumes them.
        fars[which].recv_cq.expect(rig, n, Success)?;
        if n < 4 {
            ensure!(
                !rig.has_event(EventKind::SrqLimit, srq.id.get()),
                "the limit 3 was reported with {} buffers left",
                7 - n
            );
        }
    }
    rig.event(EventKind::SrqLimit, srq.id.get())?;
    (8..16).for_each(post);
    nears[0].qp.send(rig, 99, &[]);
    fars[0].recv_cq.expect(rig, 8, Success)?;
    rig.lives()
}

fn timestamps_never_go_back_and_may_be_left_out(rig: &Rig) -> Outcome {
    let timed = Rc::new(Cq::new(rig, 4)?);
    let untimed = Rc::new(Cq::with(rig, 4, |arguments| {
        arguments.flags = cq::UNTIMED.into();
    })?);
    let (near, far) = (
        End::with(rig, &timed, &timed)?,
        End::with(rig, &untimed, &untimed)?,
    );
    join(rig, &near.qp, &far.qp, 0)?;
    let mut last = 0;
    for n in 0..8 {
        far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
        near.qp.send(rig, n, &[]);
        let made = timed.expect(rig, n, Success)?.timestamp.get();
        ensure!(
            made > 0 && made >= last,
            "a completion was made at {made} ns, after one at {last} ns"
        );
        last = made;
        untimed.expect(rig, n, Success)?;
    }
    Ok(())
}
