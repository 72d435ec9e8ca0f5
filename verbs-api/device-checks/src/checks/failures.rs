//! Errors: each fails the object concerned, is reported, and affects no other object.

use urnic_device::command::{Nothing, Opcode as CommandOpcode};
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BLOCK_LEN, Opcode, Sge};

use crate::check::checks;
use crate::connection::{End, pair, works};
use crate::outcome::{Outcome, ensure};
use crate::queues::{ALL_RIGHTS, Region};
use crate::rig::Rig;

checks! {
    a_local_stag_that_is_wrong_fails_its_request,
    a_remote_stag_that_is_wrong_is_refused_by_the_peer,
    a_region_serves_its_own_domain_only,
    a_destroyed_region_accepts_no_access,
    bounds_hold_to_the_byte,
    a_message_too_long_for_its_receive_is_refused,
    the_error_state_flushes_what_is_posted_and_what_will_be,
    a_malformed_entry_fails_its_queue_pair,
    a_producer_index_beyond_the_ring_fails_its_queue_pair,
    a_destroyed_queue_pair_takes_its_stream_along,
}

/// Runs `hurt` on a pair of queue pairs, then checks that another pair and the device still work.
fn beside(rig: &Rig, hurt: impl FnOnce(&End, &End) -> Outcome) -> Outcome {
    let (other_near, other_far) = pair(rig)?;
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    hurt(&near, &far)?;
    works(rig, &other_near, &other_far)?;
    rig.lives()
}

fn a_local_stag_that_is_wrong_fails_its_request(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        let nothing = Sge {
            offset: 0.into(),
            len: 8.into(),
            stag: 0xdead_beef.into(),
        };
        near.qp.send(rig, 1, &[nothing]);
        near.qp.send(rig, 2, &[]);
        near.qp.send_cq.expect(rig, 1, WcStatus::LocProtErr)?;
        near.qp.send_cq.expect(rig, 2, WcStatus::WrFlushErr)?;
        let event = rig.event(EventKind::QpError, near.qp.id)?;
        ensure!(
            event.code.get() == QpFault::LocalWork as u16,
            "the fault is {}",
            event.code
        );
        // The peer gets an event.
        rig.event(EventKind::QpError, far.qp.id).map(drop)
    })
}

fn a_remote_stag_that_is_wrong_is_refused_by_the_peer(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        let there = Sge {
            stag: (far.region.stag ^ 0xff).into(),
            ..far.region.sge(0, 0)
        };
        near.qp
            .remote(rig, Opcode::Read, 1, &[near.region.sge(0, 64)], there);
        near.qp.send_cq.expect(rig, 1, WcStatus::RemAccessErr)?;
        let event = rig.event(EventKind::QpError, far.qp.id)?;
        ensure!(
            event.code.get() == QpFault::TerminateSent as u16,
            "the fault is {}",
            event.code
        );
        let sent = event.data.get();
        let event = rig.event(EventKind::QpError, near.qp.id)?;
        ensure!(
            event.code.get() == QpFault::TerminateReceived as u16,
            "the fault is {}",
            event.code
        );
        ensure!(
            sent != 0 && event.data.get() == sent,
            "Terminate {sent:#x} was sent, {:#x} received",
            event.data
        );
        let status = near.qp.status(rig)?;
        ensure!(
            u64::from(status.terminate_received.get()) == sent,
            "QueryQp returns Terminate {:#x}, not {sent:#x}",
            status.terminate_received
        );
        Ok(())
    })
}

fn a_region_serves_its_own_domain_only(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        let domain = rig.create(CommandOpcode::AllocPd, &Nothing {})?;
        let foreign = Region::new(rig, domain, 4096, ALL_RIGHTS)?;
        near.region.memory.write(0, &[7; 64]);
        near.qp.remote(
            rig,
            Opcode::Write,
            1,
            &[near.region.sge(0, 64)],
            foreign.sge(0, 0),
        );
        far.qp.fails(rig)?;
        ensure!(
            foreign.memory.read(0, 64) == [0; 64],
            "memory of another domain was written"
        );
        Ok(())
    })
}

fn a_destroyed_region_accepts_no_access(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        let lent = Region::new(rig, far.pd, 4096, ALL_RIGHTS)?;
        near.region.memory.write(0, &[7; 64]);
        near.qp
            .remote(rig, Opcode::Write, 1, &[near.region.sge(0, 32)], lent.sge(0, 0));
        near.qp.send_cq.expect(rig, 1, WcStatus::Success)?;
        works(rig, near, far)?;
        near.region.memory.write(0, &[7; 64]);
        ensure!(lent.memory.read(0, 32) == [7; 32], "the write did not arrive");
        rig.on(CommandOpcode::DestroyMr, lent.stag)?;
        lent.memory.write(0, &[0; 32]);
        near.qp
            .remote(rig, Opcode::Write, 2, &[near.region.sge(0, 64)], lent.sge(0, 0));
        far.qp.fails(rig)?;
        ensure!(
            lent.memory.read(0, 64) == [0; 64],
            "memory was written after its Stag was revoked"
        );
        Ok(())
    })
}

fn bounds_hold_to_the_byte(rig: &Rig) -> Outcome {
    for (base, len) in [
        (4000u64, 97u32),
        (u64::MAX - 63 - 0x0123_4567_8000 + 1, 64),
        (4096, 1),
    ] {
        beside(rig, |near, far| {
            // Longer than the region by one page of memory that is not its.
            let memory = Region::new(rig, far.pd, 4096, ALL_RIGHTS)?;
            let mut there = memory.sge(0, 0);
            there.offset = memory.base.wrapping_add(base).into();
            near.qp
                .remote(rig, Opcode::Write, 1, &[near.region.sge(0, len)], there);
            far.qp.fails(rig)?;
            near.qp.fails(rig)
        })?;
    }
    let (near, far) = pair(rig)?;
    let last = Region::new(rig, far.pd, 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    near.qp.remote(
        rig,
        Opcode::Write,
        1,
        &[near.region.sge(0, 96)],
        last.sge(4000, 0),
    );
    near.qp.send_cq.expect(rig, 1, WcStatus::Success)?;
    works(rig, &near, &far)
}

fn a_message_too_long_for_its_receive_is_refused(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        far.region.memory.write(0, &[0; 128]);
        near.region.memory.write(0, &[7; 128]);
        far.qp.receive(rig, 1, &[far.region.sge(0, 64)]);
        near.qp.send(rig, 2, &[near.region.sge(0, 65)]);
        let cqe = far.qp.recv_cq.next(rig)?;
        ensure!(
            cqe.cookie.get() == 1 && cqe.status != WcStatus::Success as u8,
            "65 bytes were placed in 64: {cqe:?}"
        );
        ensure!(
            far.region.memory.read(64, 64) == [0; 64],
            "the device wrote beyond the receive"
        );
        far.qp.fails(rig)
    })
}

fn the_error_state_flushes_what_is_posted_and_what_will_be(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        for n in 0..5 {
            far.qp.receive(rig, n, &[far.region.sge(0, 64)]);
        }
        far.qp.modify(rig, QpState::Err)?;
        for n in 0..5 {
            far.qp.recv_cq.expect(rig, n, WcStatus::WrFlushErr)?;
        }
        far.qp.receive(rig, 6, &[]);
        far.qp.recv_cq.expect(rig, 6, WcStatus::WrFlushErr)?;
        far.qp.send(rig, 7, &[]);
        far.qp.send_cq.expect(rig, 7, WcStatus::WrFlushErr)?;
        far.qp.is_in(rig, QpState::Err)?;
        let event = rig.event(EventKind::PeerClosed, near.qp.id)?;
        ensure!(
            event.code.get() == 0,
            "the peer's end came with code {}",
            event.code
        );
        Ok(())
    })
}

fn a_malformed_entry_fails_its_queue_pair(rig: &Rig) -> Outcome {
    let mut sound = [0; BLOCK_LEN];
    (sound[1], sound[3]) = (1, 1);
    let with = |at: usize, value: u8| {
        let mut entry = sound;
        entry[at] = value;
        entry
    };
    // Opcode; scatter/gather elements beyond the blocks; no blocks; more blocks than an entry has;
    // inline length without the flag.
    for entry in [
        with(0, 0xee),
        with(2, 33),
        with(3, 0),
        with(3, 17),
        with(4, 9),
        [0xff; BLOCK_LEN],
    ] {
        beside(rig, |near, _far| {
            near.qp.post_raw(rig, &entry, 1);
            let cqe = near.qp.send_cq.next(rig)?;
            ensure!(
                cqe.status == WcStatus::LocQpOpErr as u8,
                "it completed with status {}",
                cqe.status
            );
            near.qp.fails(rig)
        })?;
    }
    Ok(())
}

fn a_producer_index_beyond_the_ring_fails_its_queue_pair(rig: &Rig) -> Outcome {
    for blocks in [1 << 20, 1 << 31, u32::MAX] {
        beside(rig, |near, _far| {
            near.qp.claim(rig, blocks);
            // The shadow doorbell may not request a ring here, because the index is invalid.
            near.qp.ring_sends(rig);
            near.qp.fails(rig)
        })?;
    }
    Ok(())
}

fn a_destroyed_queue_pair_takes_its_stream_along(rig: &Rig) -> Outcome {
    beside(rig, |near, far| {
        far.qp.receive(rig, 1, &[far.region.sge(0, 64)]);
        near.qp.send(rig, 2, &[near.region.sge(0, 10)]);
        near.qp.send_cq.expect(rig, 2, WcStatus::Success)?;
        rig.on(CommandOpcode::DestroyQp, near.qp.id)?;
        // Data that has completed still arrives.
        far.qp.recv_cq.expect(rig, 1, WcStatus::Success)?;
        rig.event(EventKind::PeerClosed, far.qp.id).map(drop)
    })
}
