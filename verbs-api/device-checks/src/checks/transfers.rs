//! Work queues: every operation between two queue pairs, the shadow doorbell, wrapping rings.

use urnic_device::command::{Opcode as CommandOpcode, features};
use urnic_device::cqe::CqeFlags;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_device::wqe::{AtomicOperands, MAX_INLINE, Opcode, SendFlags, Sge};
use urnic_testkit::request;
use zerocopy::IntoBytes;

use crate::check::checks;
use crate::connection::{End, attachment, join, pair, works};
use crate::outcome::{Failure, Outcome, ensure};
use crate::queues::{LABEL, LOG_QUEUE};
use crate::rig::Rig;

checks! {
    sends_of_all_lengths_arrive,
    a_write_is_placed_and_silent,
    a_read_fetches,
    lists_are_gathered_and_scattered,
    inline_data_need_no_region,
    immediate_data_arrive,
    atomics_answer_what_was_there,
    a_send_invalidates_the_peers_stag,
    unsignalled_requests_are_silent,
    rings_wrap_and_doorbells_are_rung_only_on_request,
    a_responder_sends_nothing_before_the_initiator,
    a_queue_pair_may_be_its_own_peer,
    many_pairs_do_not_disturb_each_other,
}

use WcStatus::Success;

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|n| (n.wrapping_mul(31) ^ n >> 8 ^ seed) as u8)
        .collect()
}

fn sends_of_all_lengths_arrive(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for (round, len) in [0, 1, 3, 64, 1000, 1460, 4096, 65_536, 200_000]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(round, len);
        near.region.memory.write(0, &bytes);
        far.qp.receive(rig, round as u64, &[far.region.sge(0, 256 << 10)]);
        near.qp.send(rig, 100, &[near.region.sge(0, len as u32)]);
        let cqe = far.qp.recv_cq.expect(rig, round as u64, Success)?;
        ensure!(
            cqe.byte_len.get() as usize == len,
            "{} of {len} bytes arrived",
            cqe.byte_len
        );
        ensure!(
            cqe.opcode == WcOpcode::Recv as u8,
            "a receive completed as operation {}",
            cqe.opcode
        );
        ensure!(
            cqe.label.get() == LABEL && cqe.qid.get() == far.qp.id,
            "the completion names label {:#x} and queue pair {:#x}",
            cqe.label,
            cqe.qid
        );
        ensure!(
            far.region.memory.read(0, len) == bytes,
            "other bytes arrived than the {len} sent"
        );
        let cqe = near.qp.send_cq.expect(rig, 100, Success)?;
        ensure!(
            cqe.opcode == WcOpcode::Send as u8,
            "a send completed as operation {}",
            cqe.opcode
        );
    }
    Ok(())
}

fn a_write_is_placed_and_silent(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for len in [1usize, 4096, 150_000] {
        let bytes = pattern(len, len);
        near.region.memory.write(17, &bytes);
        near.qp.remote(
            rig,
            Opcode::Write,
            1,
            &[near.region.sge(17, len as u32)],
            far.region.sge(33, 0),
        );
        let cqe = near.qp.send_cq.expect(rig, 1, Success)?;
        ensure!(
            cqe.opcode == WcOpcode::RdmaWrite as u8,
            "a write completed as operation {}",
            cqe.opcode
        );
        // A Send posted later arrives later.
        works(rig, &near, &far)?;
    }
    let bytes = pattern(1, 3000);
    near.region.memory.write(8192, &bytes);
    near.qp.remote(
        rig,
        Opcode::Write,
        2,
        &[near.region.sge(8192, 3000)],
        far.region.sge(60_000, 0),
    );
    near.qp.send_cq.expect(rig, 2, Success)?;
    works(rig, &near, &far)?;
    ensure!(
        far.region.memory.read(60_000, 3000) == bytes,
        "other bytes were placed than written"
    );
    ensure!(
        far.qp.recv_cq.poll().is_none(),
        "a write made a completion at its target"
    );
    Ok(())
}

fn a_read_fetches(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    // More requests than may be outstanding complete in order.
    let lens = [1usize, 4096, 70_000, 0, 12, 2000, 1, 30_000];
    for (n, len) in lens.into_iter().enumerate() {
        far.region.memory.write(n * 100, &pattern(n, 100));
        let at = if len > 30_000 {
            100_000
        } else {
            200 + n as u64 * 4096
        };
        near.qp.remote(
            rig,
            Opcode::Read,
            n as u64,
            &[near.region.sge(at, len as u32)],
            far.region.sge(n as u64 * 100, 0),
        );
    }
    for (n, len) in lens.into_iter().enumerate() {
        let cqe = near.qp.send_cq.expect(rig, n as u64, Success)?;
        ensure!(
            cqe.opcode == WcOpcode::RdmaRead as u8,
            "a read completed as operation {}",
            cqe.opcode
        );
        ensure!(
            cqe.byte_len.get() as usize == len,
            "{} of {len} bytes were read",
            cqe.byte_len
        );
    }
    let read = near.region.memory.read(200 + 5 * 4096, 100);
    ensure!(read == pattern(5, 100), "other bytes were read than are there");
    Ok(())
}

fn lists_are_gathered_and_scattered(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let bytes = pattern(3, 600);
    near.region.memory.write(1000, &bytes);
    let most = (rig.attributes.max_sge.get() as usize).min(3);
    let gather = [
        near.region.sge(1000, 100),
        near.region.sge(1100, 499),
        near.region.sge(1599, 1),
    ];
    let scatter = [
        far.region.sge(50_000, 7),
        far.region.sge(10, 293),
        far.region.sge(90_000, 300),
    ];
    far.qp.receive(rig, 1, &scatter[..most]);
    near.qp.send(rig, 2, &gather[..most]);
    far.qp.recv_cq.expect(rig, 1, Success)?;
    near.qp.send_cq.expect(rig, 2, Success)?;
    ensure!(most == 3, "the device takes lists of {most} elements");
    for (at, range) in [(50_000, 0..7), (10, 7..300), (90_000, 300..600)] {
        ensure!(
            far.region.memory.read(at, range.len()) == bytes[range.clone()],
            "bytes {range:?} are not where the list has them"
        );
    }
    Ok(())
}

fn inline_data_need_no_region(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let most = (rig.attributes.max_inline.get() as usize).min(MAX_INLINE);
    // The entries also cross the end of the ring.
    for (round, len) in [0, 1, 32, 33, 96, most, most, most, most, most, most]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(round, len);
        far.qp.receive(rig, 1, &[far.region.sge(0, 4096)]);
        let mut header = request(Opcode::Send, 2);
        header.flags |= SendFlags::INLINE.bits();
        header.inline_len = (len as u32).into();
        near.qp.post(rig, header, &bytes, 0);
        let cqe = far.qp.recv_cq.expect(rig, 1, Success)?;
        near.qp.send_cq.expect(rig, 2, Success)?;
        ensure!(
            cqe.byte_len.get() as usize == len && far.region.memory.read(0, len) == bytes,
            "other bytes arrived than the {len} sent inline"
        );
    }
    Ok(())
}

fn immediate_data_arrive(rig: &Rig) -> Outcome {
    needs(rig, features::IMMEDIATE, "immediate data")?;
    let (near, far) = pair(rig)?;
    for (opcode, expected) in [
        (Opcode::SendImm, WcOpcode::Recv),
        (Opcode::WriteImm, WcOpcode::RecvRdmaWithImm),
    ] {
        far.qp.receive(rig, 1, &[far.region.sge(0, 4096)]);
        let mut header = request(opcode, 2);
        header.immediate = *b"imm!";
        let there = far.region.sge(128, 0);
        (header.remote_offset, header.stag) = (there.offset, there.stag);
        let list = [near.region.sge(0, 40)];
        near.qp.post(rig, header, list.as_bytes(), 1);
        let cqe = far.qp.recv_cq.expect(rig, 1, Success)?;
        near.qp.send_cq.expect(rig, 2, Success)?;
        ensure!(
            cqe.extra == *b"imm!" && cqe.flags & CqeFlags::WITH_IMM.bits() != 0,
            "immediate data {:?} with flags {:#x}",
            cqe.extra,
            cqe.flags
        );
        ensure!(
            cqe.opcode == expected as u8,
            "{opcode:?} was received as operation {}",
            cqe.opcode
        );
    }
    Ok(())
}

pub(super) fn needs(rig: &Rig, feature: u32, name: &str) -> Outcome {
    match rig.attributes.features.get() & feature {
        0 => Err(Failure::NotHere(format!("it has no {name}"))),
        _ => Ok(()),
    }
}

fn atomics_answer_what_was_there(rig: &Rig) -> Outcome {
    needs(rig, features::ATOMICS, "atomics")?;
    let (near, far) = pair(rig)?;
    let mut value = 1000u64;
    far.region.memory.write(64, &value.to_le_bytes());
    for (opcode, compare_add, swap, after) in [
        (Opcode::FetchAdd, 5, 0, 1005),
        (Opcode::CompareSwap, 1005, 77, 77),
        (Opcode::CompareSwap, 1005, 88, 77),
        (Opcode::FetchAdd, u64::MAX, 0, 76),
    ] {
        let mut header = request(opcode, 1);
        let there = far.region.sge(64, 0);
        (header.remote_offset, header.stag) = (there.offset, there.stag);
        let operands = AtomicOperands {
            compare_add: compare_add.into(),
            swap: swap.into(),
        };
        let sink = near.region.sge(0, 8);
        near.qp
            .post(rig, header, &[operands.as_bytes(), sink.as_bytes()].concat(), 1);
        near.qp.send_cq.expect(rig, 1, Success)?;
        let word = |end: &End, at| {
            let bytes = end.region.memory.read(at, 8);
            bytes.try_into().map_or(0, u64::from_le_bytes)
        };
        ensure!(
            word(&near, 0) == value,
            "{opcode:?} answers {}, there was {value}",
            word(&near, 0)
        );
        ensure!(
            word(&far, 64) == after,
            "{opcode:?} leaves {}, not {after}",
            word(&far, 64)
        );
        value = after;
    }
    Ok(())
}

fn a_send_invalidates_the_peers_stag(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let lent = crate::queues::Region::new(rig, far.pd, 4096, crate::queues::ALL_RIGHTS)?;
    far.qp.receive(rig, 1, &[far.region.sge(0, 64)]);
    let mut header = request(Opcode::SendInv, 2);
    header.stag = lent.stag.into();
    near.qp.post(rig, header, &[], 0);
    let cqe = far.qp.recv_cq.expect(rig, 1, Success)?;
    near.qp.send_cq.expect(rig, 2, Success)?;
    ensure!(
        cqe.flags & CqeFlags::WITH_INV.bits() != 0 && cqe.extra == lent.stag.to_le_bytes(),
        "Stag {:#x} was invalidated; the completion has {:x?} and flags {:#x}",
        lent.stag,
        cqe.extra,
        cqe.flags
    );
    near.qp
        .remote(rig, Opcode::Write, 3, &[near.region.sge(0, 8)], lent.sge(0, 0));
    far.qp.fails(rig)
}

fn unsignalled_requests_are_silent(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    for round in 0..200u64 {
        // The completion of the last request of a burst shows that all are done.
        let last = round % 8 == 7;
        let mut header = request(Opcode::Write, round);
        header.flags = if last { SendFlags::SIGNALED.bits() } else { 0 };
        let there = far.region.sge(0, 0);
        (header.remote_offset, header.stag) = (there.offset, there.stag);
        near.qp.post(rig, header, [near.region.sge(0, 16)].as_bytes(), 1);
        if last {
            near.qp.send_cq.expect(rig, round, Success)?;
        }
    }
    let (consumer, producer) = near.qp.given_back();
    ensure!(
        consumer == producer,
        "the device gave back {consumer} of {producer} blocks"
    );
    ensure!(
        near.qp.send_cq.poll().is_none(),
        "an unsignalled request completed"
    );
    Ok(())
}

fn rings_wrap_and_doorbells_are_rung_only_on_request(rig: &Rig) -> Outcome {
    const MESSAGES: u64 = 2000;
    let (near, far) = pair(rig)?;
    // Opens the responder's fence.
    works(rig, &near, &far)?;
    let (mut posted, mut sent, mut received, mut waiting) = (0u64, 0u64, 0u64, 0u64);
    rig.wait("two thousand messages in bursts", || {
        while waiting < received + (1 << LOG_QUEUE) && waiting < MESSAGES {
            far.qp.receive(rig, waiting, &[far.region.sge(0, 512)]);
            waiting += 1;
        }
        while posted < waiting && near.qp.room() >= 2 {
            // One block, then two.
            let list = [
                near.region.sge(0, 8),
                near.region.sge(8, 8),
                near.region.sge(16, 8),
            ];
            near.qp
                .send(rig, posted, &list[..if posted % 3 == 0 { 3 } else { 1 }]);
            posted += 1;
        }
        let mut good = true;
        for (queue, count) in [(&near.qp.send_cq, &mut sent), (&far.qp.recv_cq, &mut received)] {
            while let Some(cqe) = queue.poll() {
                good &= cqe.cookie.get() == *count && cqe.status == Success as u8;
                *count += 1;
            }
        }
        (!good || sent == MESSAGES && received == MESSAGES).then_some(good)
    })
    .and_then(|good| {
        ensure!(
            good,
            "a completion is out of order or failed, after {sent} sends and {received} receives"
        );
        Ok(())
    })?;
    ensure!(near.qp.rings.get() > 0, "no doorbell was requested");
    works(rig, &near, &far)
}

fn a_responder_sends_nothing_before_the_initiator(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    near.qp.receive(rig, 1, &[near.region.sge(0, 64)]);
    far.qp.send(rig, 2, &[]);
    rig.lives()?;
    ensure!(
        near.qp.recv_cq.poll().is_none() && far.qp.send_cq.poll().is_none(),
        "the responder sent before it had received a valid FPDU"
    );
    far.qp.receive(rig, 3, &[far.region.sge(0, 64)]);
    near.qp.send(rig, 4, &[]);
    rig.event(EventKind::FirstFpdu, far.qp.id)?;
    far.qp.recv_cq.expect(rig, 3, Success)?;
    near.qp.recv_cq.expect(rig, 1, Success)?;
    far.qp.send_cq.expect(rig, 2, Success)?;
    near.qp.send_cq.expect(rig, 4, Success).map(drop)
}

fn a_queue_pair_may_be_its_own_peer(rig: &Rig) -> Outcome {
    let end = End::new(rig)?;
    let mut arguments = attachment(0, &end.qp, true);
    arguments.flags = attach::INITIATOR.into();
    rig.command(CommandOpcode::LoopbackAttach, &arguments)?;
    let bytes = pattern(9, 5000);
    end.region.memory.write(0, &bytes);
    end.qp.receive(rig, 1, &[end.region.sge(20_000, 8192)]);
    end.qp.send(rig, 2, &[end.region.sge(0, 5000)]);
    end.qp.send_cq.expect(rig, 2, Success)?;
    end.qp.recv_cq.expect(rig, 1, Success)?;
    ensure!(
        end.region.memory.read(20_000, 5000) == bytes,
        "other bytes arrived than were sent"
    );
    let there: Sge = end.region.sge(40_000, 0);
    end.qp
        .remote(rig, Opcode::Write, 3, &[end.region.sge(0, 5000)], there);
    end.qp
        .remote(rig, Opcode::Read, 4, &[end.region.sge(60_000, 5000)], there);
    end.qp.send_cq.expect(rig, 3, Success)?;
    end.qp.send_cq.expect(rig, 4, Success)?;
    ensure!(
        end.region.memory.read(60_000, 5000) == bytes,
        "other bytes were read than written"
    );
    Ok(())
}

fn many_pairs_do_not_disturb_each_other(rig: &Rig) -> Outcome {
    let ends = (0..12)
        .map(|_| {
            let (near, far) = (End::new(rig)?, End::new(rig)?);
            join(rig, &near.qp, &far.qp, 0)?;
            Ok((near, far))
        })
        .collect::<Outcome<Vec<_>>>()?;
    for _ in 0..3 {
        for (near, far) in &ends {
            works(rig, near, far)?;
        }
    }
    Ok(())
}
