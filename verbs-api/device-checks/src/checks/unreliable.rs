//! Queue pairs of kind UC: messages may be dropped, and the queue pair outlives its stream.

use urnic_device::command::{Opcode as CommandOpcode, features};
use urnic_device::event::EventKind;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, Sge};

use super::transfers::needs;
use crate::check::checks;
use crate::connection::{End, join, works};
use crate::outcome::{Outcome, ensure};
use crate::rig::Rig;

checks! {
    messages_arrive,
    a_message_without_a_receive_is_dropped,
    a_message_longer_than_its_receive_is_dropped,
    a_write_to_memory_that_is_not_offered_is_dropped,
    a_queue_pair_outlives_its_stream,
    a_request_that_fails_stops_the_send_queue,
    reads_are_refused,
}

use WcStatus::Success;

/// Two connected queue pairs of kind UC.
fn pair(rig: &Rig) -> Outcome<(End, End)> {
    needs(rig, features::UNRELIABLE, "queue pairs of kind UC")?;
    let (near, far) = (End::unreliable(rig)?, End::unreliable(rig)?);
    join(rig, &near.qp, &far.qp, 0)?;
    Ok((near, far))
}

/// Sends a few bytes that are dropped.
fn lose(rig: &Rig, near: &End, list: &[Sge]) -> Outcome {
    near.qp.send(rig, 7, list);
    near.qp.send_cq.expect(rig, 7, Success).map(drop)
}

fn messages_arrive(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for len in [1usize, 4096, 150_000] {
        let bytes = vec![len as u8; len];
        near.region.memory.write(17, &bytes);
        let local = near.region.sge(17, len as u32);
        near.qp
            .remote(rig, Opcode::Write, 1, &[local], far.region.sge(33, 0));
        near.qp.send_cq.expect(rig, 1, Success)?;
        works(rig, &near, &far)?;
    }
    Ok(())
}

fn a_message_without_a_receive_is_dropped(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for len in [0, 10, 200_000] {
        lose(rig, &near, &[near.region.sge(0, len)])?;
    }
    works(rig, &near, &far)
}

fn a_message_longer_than_its_receive_is_dropped(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    far.qp.receive(rig, 3, &[far.region.sge(0, 100)]);
    lose(rig, &near, &[near.region.sge(0, 101)])?;
    near.qp.send(rig, 8, &[near.region.sge(0, 100)]);
    near.qp.send_cq.expect(rig, 8, Success)?;
    let cqe = far.qp.recv_cq.expect(rig, 3, Success)?;
    ensure!(
        cqe.byte_len.get() == 100,
        "the receive took {} bytes, not the 100 that fit",
        cqe.byte_len
    );
    works(rig, &near, &far)
}

fn a_write_to_memory_that_is_not_offered_is_dropped(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let mut there = far.region.sge(0, 0);
    there.stag = (there.stag.get() ^ 0x100).into();
    near.qp
        .remote(rig, Opcode::Write, 1, &[near.region.sge(0, 8)], there);
    near.qp.send_cq.expect(rig, 1, Success)?;
    works(rig, &near, &far)
}

fn a_queue_pair_outlives_its_stream(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    near.qp.receive(rig, 0xa0, &[near.region.sge(4096, 1024)]);
    far.qp.modify(rig, QpState::Reset)?;
    rig.event(EventKind::Closed, near.qp.id)?;
    let status = near.qp.status(rig)?;
    ensure!(status.attached.get() == 0, "its stream is still attached");
    near.qp.is_in(rig, QpState::Rts)?;
    lose(rig, &near, &[near.region.sge(0, 10)])?;
    ensure!(
        near.qp.recv_cq.poll().is_none(),
        "the end of the stream completed a receive"
    );
    // Another stream, and the receive that was posted.
    far.qp.ready(rig)?;
    join(rig, &far.qp, &near.qp, 0)?;
    far.qp.send(rig, 1, &[far.region.sge(0, 10)]);
    far.qp.send_cq.expect(rig, 1, Success)?;
    near.qp.recv_cq.expect(rig, 0xa0, Success)?;
    works(rig, &near, &far)
}

fn a_request_that_fails_stops_the_send_queue(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let mut wrong = near.region.sge(0, 8);
    wrong.stag = (wrong.stag.get() ^ 0x100).into();
    near.qp.send(rig, 0, &[near.region.sge(0, 100_000)]);
    near.qp.send(rig, 1, &[wrong]);
    near.qp.send(rig, 2, &[near.region.sge(0, 8)]);
    near.qp.send_cq.expect(rig, 0, Success)?;
    near.qp.send_cq.expect(rig, 1, WcStatus::LocProtErr)?;
    near.qp.send_cq.expect(rig, 2, WcStatus::WrFlushErr)?;
    near.qp.is_in(rig, QpState::Sqe)?;
    far.qp.is_in(rig, QpState::Rts)?;
    near.qp.modify(rig, QpState::Rts)?;
    works(rig, &near, &far)
}

fn reads_are_refused(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    near.qp.remote(
        rig,
        Opcode::Read,
        1,
        &[near.region.sge(0, 8)],
        far.region.sge(0, 0),
    );
    near.qp.send_cq.expect(rig, 1, WcStatus::LocQpOpErr)?;
    near.qp.is_in(rig, QpState::Sqe)?;
    rig.on(CommandOpcode::DestroyQp, near.qp.id)
}
