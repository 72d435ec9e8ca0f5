//! Writes and Reads that the requester carries out in the memory of a peer on this host.

use super::one_sided;
use super::same_host::{completes, in_host_processes, in_memory, in_memory_with, post};
use crate::Counter;
use crate::testing::mock::{Driver, Pair, assert_cqe, wait_for};
use std::sync::atomic::{AtomicBool, Ordering};
use urnic_device::command::{ModifyQp, Opcode, Status, modify};
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_device::wqe;
use zerocopy::{FromZeros, IntoBytes};

/// A pair whose first message has arrived: the next Writes and Reads may be direct.
fn ready() -> (Driver, Driver, Pair) {
    assert!(
        crate::host::revocable::is_available(),
        "needs restartable sequences"
    );
    let (near, far, mut pair) = in_memory();
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    (near, far, pair)
}

/// Like [`ready`], with memory of the hosts' processes.
fn ready_at_hosts(initiator_too: bool) -> (Driver, Driver, Pair) {
    let (near, far, mut pair) = in_host_processes(initiator_too);
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    (near, far, pair)
}

fn write(near: &Driver, pair: &mut Pair, cookie: u64, len: u32) -> WcStatus {
    let write = one_sided(wqe::Opcode::Write, cookie, &pair.responder);
    pair.initiator
        .qp
        .post(near, write, &[pair.initiator.region.sge(0, len)]);
    let done = pair.initiator.send_cq.await_completion(near);
    assert_eq!(done.cookie.get(), cookie);
    WcStatus::from_raw(done.status).unwrap()
}

#[test]
fn shm_09_writes_and_reads_are_the_requesters_work() {
    writes_and_reads(ready());
}

#[test]
fn shm_20_memory_of_the_hosts_processes_is_written_and_read() {
    writes_and_reads(ready_at_hosts(false));
    writes_and_reads(ready_at_hosts(true));
}

fn writes_and_reads((near, far, mut pair): (Driver, Driver, Pair)) {
    let before = |counter| far.counter(counter);
    let done = [Counter::DirectWrites, Counter::DirectReads].map(|c| near.counter(c));
    let [messages, received, sent] = [Counter::RxMessages, Counter::RxBytes, Counter::TxBytes].map(before);
    for (i, size) in [1u32, 8, 4096, 70_000, 1 << 20].into_iter().enumerate() {
        let bytes: Vec<u8> = (0..size).map(|b| (b as usize * 3 + i) as u8).collect();
        near.arena.write(pair.initiator.region.iova, &bytes);
        assert_eq!(write(&near, &mut pair, 1, size), WcStatus::Success);
        // There is nothing to wait for.
        assert!(far.arena.read(pair.responder.region.iova, size as usize) == bytes);
        near.arena
            .write(pair.initiator.region.iova, &vec![0; size as usize]);
        let read = one_sided(wqe::Opcode::Read, 2, &pair.responder);
        let into = pair.initiator.region.sge(0, size);
        pair.initiator.qp.post(&near, read, &[into]);
        let done = pair.initiator.send_cq.await_completion(&near);
        assert_cqe(&done, 2, WcStatus::Success);
        assert_eq!(
            (done.byte_len.get(), done.opcode),
            (size, WcOpcode::RdmaRead as u8)
        );
        assert!(near.arena.read(pair.initiator.region.iova, size as usize) == bytes);
    }
    let direct = [Counter::DirectWrites, Counter::DirectReads].map(|c| near.counter(c));
    assert_eq!(direct, done.map(|before| before + 5));
    assert_eq!(far.counter(Counter::RxMessages), messages, "the target took part");
    // But it counts bytes.
    let total = 1 + 8 + 4096 + 70_000 + (1 << 20);
    assert_eq!(far.counter(Counter::RxBytes) - received, total);
    assert_eq!(far.counter(Counter::TxBytes) - sent, total);
}

#[test]
fn shm_09_lists_and_inline_data_and_immediates() {
    let (near, far, mut pair) = ready();
    let (from, into) = (pair.initiator.region, pair.responder.region);
    near.arena.write(from.iova, b"abcdefghijklmnop");
    let list = [from.sge(4, 4), from.sge(0, 0), from.sge(0, 4), from.sge(12, 4)];
    let write = one_sided(wqe::Opcode::Write, 1, &pair.responder);
    pair.initiator.qp.post(&near, write, &list);
    assert_cqe(
        &pair.initiator.send_cq.await_completion(&near),
        1,
        WcStatus::Success,
    );
    assert_eq!(far.arena.read(into.iova, 12), b"efghabcdmnop");
    let read = one_sided(wqe::Opcode::Read, 2, &pair.responder);
    let list = [from.sge(104, 4), from.sge(100, 4)];
    pair.initiator.qp.post(&near, read, &list);
    assert_cqe(
        &pair.initiator.send_cq.await_completion(&near),
        2,
        WcStatus::Success,
    );
    assert_eq!(near.arena.read(from.iova + 100, 8), b"abcdefgh");
    // With immediate data the target takes part: its completion reports the length.
    pair.responder.qp.post_recv(&far, 3, &[]);
    let mut write = one_sided(wqe::Opcode::WriteImm, 4, &pair.responder);
    write.immediate = *b"imm!";
    pair.initiator.qp.post(&near, write, &[from.sge(8, 8)]);
    let received = pair.responder.recv_cq.await_completion(&far);
    assert_cqe(&received, 3, WcStatus::Success);
    assert_eq!(
        (received.extra.as_bytes(), received.byte_len.get()),
        (&b"imm!"[..], 8)
    );
    assert_eq!(far.arena.read(into.iova, 8), b"ijklmnop");
    assert_cqe(
        &pair.initiator.send_cq.await_completion(&near),
        4,
        WcStatus::Success,
    );
    assert_eq!(near.counter(Counter::DirectWrites), 1);
    assert_eq!(near.counter(Counter::DirectReads), 1);
}

/// A Write after a Send that waits for a receive does not overtake it, whatever its length.
#[test]
fn shm_09_a_write_does_not_overtake_a_send() {
    let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    let (from, into) = (pair.initiator.region, pair.responder.region);
    for len in [8, 100_000] {
        near.arena.write(from.iova, &vec![7; len as usize]);
        far.arena.write(into.iova, &vec![0; len as usize]);
        for _ in 0..3 {
            pair.initiator.qp.post_send(&near, 1, &[from.sge(0, 8)]);
        }
        let write = one_sided(wqe::Opcode::Write, 2, &pair.responder);
        pair.initiator.qp.post(&near, write, &[from.sge(0, len)]);
        for _ in 0..3 {
            near.device.progress(0);
            assert_eq!(far.arena.read(into.iova, 8), [0; 8], "{len} bytes");
            pair.responder.qp.post_recv(&far, 3, &[into.sge(500_000, 8)]);
            assert_cqe(
                &pair.responder.recv_cq.await_completion(&far),
                3,
                WcStatus::Success,
            );
            assert_cqe(
                &pair.initiator.send_cq.await_completion(&near),
                1,
                WcStatus::Success,
            );
        }
        assert_cqe(
            &pair.initiator.send_cq.await_completion(&near),
            2,
            WcStatus::Success,
        );
        wait_for("the write", || {
            (far.arena.read(into.iova, len as usize) == vec![7; len as usize]).then_some(())
        });
    }
}

/// Posts an atomic operation on the word at `at` of the responder's region; returns its completion
/// and the word that it fetched.
fn operate(
    near: &Driver,
    pair: &mut Pair,
    opcode: wqe::Opcode,
    at: u64,
    [compare_add, swap]: [u64; 2],
) -> (WcStatus, u64) {
    let mut header = one_sided(opcode, 7, &pair.responder);
    header.remote_offset = (header.remote_offset.get() + at).into();
    let operands = wqe::AtomicOperands {
        compare_add: compare_add.into(),
        swap: swap.into(),
    };
    let region = pair.initiator.region;
    pair.initiator
        .qp
        .post_atomic(near, header, operands, region.sge(16, 8));
    let done = pair.initiator.send_cq.await_completion(near);
    let fetched = near.arena.read(region.iova + 16, 8).try_into().unwrap();
    (
        WcStatus::from_raw(done.status).unwrap(),
        u64::from_ne_bytes(fetched),
    )
}

/// Atomic operations always take the stream: the target's device is the one that carries them out.
#[test]
fn shm_09_atomics_are_the_targets_work() {
    let (near, far, mut pair) = ready();
    assert_eq!(write(&near, &mut pair, 1, 8), WcStatus::Success);
    let segments = far.counter(Counter::RxFpdus);
    let word = pair.responder.region.iova + 64;
    far.arena.write(word, &u64::MAX.to_ne_bytes());
    let cases = [
        (wqe::Opcode::FetchAdd, [6, 0], u64::MAX),
        (wqe::Opcode::CompareSwap, [4, 9], 5),
        (wqe::Opcode::CompareSwap, [5, 9], 5),
        (wqe::Opcode::FetchAdd, [1, 0], 9),
    ];
    for (opcode, operands, before) in cases {
        let done = operate(&near, &mut pair, opcode, 64, operands);
        assert_eq!(done, (WcStatus::Success, before));
    }
    assert_eq!(far.arena.read(word, 8), 10u64.to_ne_bytes());
    assert_eq!(far.counter(Counter::RxFpdus) - segments, 4);
    // A misaligned word is refused.
    let (status, _) = operate(&near, &mut pair, wqe::Opcode::FetchAdd, 65, [1, 0]);
    assert_ne!(status, WcStatus::Success);
}

#[test]
fn shm_10_atomics_need_their_right() {
    let (near, far, mut pair) = ready();
    let mut change = ModifyQp::new_zeroed();
    change.qp = pair.responder.qp.id.into();
    change.mask = modify::ACCESS.into();
    change.access = (Access::REMOTE_READ | Access::REMOTE_WRITE).bits().into();
    far.command(Opcode::ModifyQp, &change).map(drop).unwrap();
    let (status, _) = operate(&near, &mut pair, wqe::Opcode::FetchAdd, 64, [1, 0]);
    assert_eq!(status, WcStatus::RemAccessErr);
}

/// What the target's table does not permit is refused as on any other way: by the target, with a
/// Terminate.
#[test]
fn shm_10_the_target_refuses_what_is_not_permitted() {
    type Spoil = fn(&Driver, &mut Pair, &mut wqe::SendHeader);
    let cases: [(&str, Spoil); 6] = [
        ("another key", |_, _, write| {
            write.stag = (write.stag.get() ^ 1).into()
        }),
        ("another STag", |_, _, write| {
            write.stag = (write.stag.get() ^ 0x100).into()
        }),
        ("beyond the end", |_, _, write| {
            write.remote_offset = (write.remote_offset.get() + (1 << 20) - 7).into();
        }),
        ("before the beginning", |_, _, write| {
            write.remote_offset = (write.remote_offset.get() - 1).into();
        }),
        ("another domain, read only", |far, _, write| {
            let pd = far.pd();
            let region = far
                .register(pd, 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
                .unwrap();
            (write.stag, write.remote_offset) = (region.stag.into(), region.iova.into());
        }),
        ("no right to write", |far, pair, write| {
            let region = far
                .register(pair.responder.pd, 4096, Access::REMOTE_READ)
                .unwrap();
            (write.stag, write.remote_offset) = (region.stag.into(), region.iova.into());
        }),
    ];
    for (case, spoil) in cases {
        let (near, far, mut pair) = ready();
        let mut header = one_sided(wqe::Opcode::Write, 1, &pair.responder);
        spoil(&far, &mut pair, &mut header);
        pair.initiator
            .qp
            .post(&near, header, &[pair.initiator.region.sge(0, 8)]);
        far.await_event(EventKind::QpError, pair.responder.qp.id);
        near.await_event(EventKind::QpError, pair.initiator.qp.id);
        assert_eq!(near.counter(Counter::DirectWrites), 0, "{case}");
    }
}

#[test]
fn shm_10_the_rights_of_the_queue_pair_count() {
    let (near, far, mut pair) = ready();
    assert_eq!(write(&near, &mut pair, 1, 8), WcStatus::Success);
    let mut change = ModifyQp::new_zeroed();
    change.qp = pair.responder.qp.id.into();
    change.mask = modify::ACCESS.into();
    change.access = Access::REMOTE_READ.bits().into();
    assert_eq!(
        far.command(Opcode::ModifyQp, &change).map(drop),
        Ok::<(), Status>(())
    );
    let header = one_sided(wqe::Opcode::Write, 2, &pair.responder);
    pair.initiator
        .qp
        .post(&near, header, &[pair.initiator.region.sge(0, 8)]);
    far.await_event(EventKind::QpError, pair.responder.qp.id);
    assert_eq!(near.counter(Counter::DirectWrites), 1);
}

/// One thread writes without a pause while another takes the memory away.
#[test]
fn shm_11_a_revocation_waits_for_accesses_in_flight() {
    revocations(ready);
}

#[test]
fn shm_20_a_revocation_waits_for_accesses_to_the_hosts_process() {
    revocations(|| ready_at_hosts(false));
    revocations(|| ready_at_hosts(true));
}

fn revocations(ready: impl Fn() -> (Driver, Driver, Pair)) {
    const LEN: usize = 200_000;
    for round in 0..20u64 {
        let (near, far, mut pair) = ready();
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = far.register(pair.responder.pd, LEN, all).unwrap();
        let mut header = one_sided(wqe::Opcode::Write, 1, &pair.responder);
        (header.stag, header.remote_offset) = (region.stag.into(), region.iova.into());
        let from = pair.initiator.region;
        let revoked = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (near, revoked) = (&near, &revoked);
            let (qp, cq) = (&mut pair.initiator.qp, &mut pair.initiator.send_cq);
            let writer = scope.spawn(move || {
                for n in 1u64.. {
                    // A last one after the revocation fails.
                    let last = revoked.load(Ordering::SeqCst);
                    near.arena.write(from.iova, &vec![n as u8 | 1; LEN]);
                    qp.post(near, header, &[from.sge(0, LEN as u32)]);
                    let done = cq.await_completion(near);
                    if last || WcStatus::from_raw(done.status) != Some(WcStatus::Success) {
                        return;
                    }
                }
            });
            let last = region.iova + round * LEN as u64 / 20;
            wait_for("the first write", || {
                (far.arena.read(last, 1) != [0]).then_some(())
            });
            if round % 2 == 0 {
                far.on(Opcode::DestroyMr, region.stag).unwrap();
            } else {
                far.device.unmapped(far.dma(region.iova), 1);
            }
            let before = far.arena.read(region.iova, LEN);
            revoked.store(true, Ordering::SeqCst);
            writer.join().unwrap();
            assert!(far.arena.read(region.iova, LEN) == before, "round {round}");
        });
        far.await_event(EventKind::QpError, pair.responder.qp.id);
    }
}

/// A queue pair that is reset or destroyed takes no more Writes.
#[test]
fn shm_11_a_destroyed_queue_pair_takes_no_writes() {
    let (near, far, mut pair) = ready();
    assert_eq!(write(&near, &mut pair, 1, 8), WcStatus::Success);
    far.modify(&pair.responder.qp, QpState::Err).unwrap();
    far.arena.write(pair.responder.region.iova, &[0; 8]);
    near.arena.write(pair.initiator.region.iova, &[9; 8]);
    let header = one_sided(wqe::Opcode::Write, 2, &pair.responder);
    pair.initiator
        .qp
        .post(&near, header, &[pair.initiator.region.sge(0, 8)]);
    pair.initiator.send_cq.await_completion(&near);
    assert_eq!(far.arena.read(pair.responder.region.iova, 8), [0; 8]);
    assert_eq!(near.counter(Counter::DirectWrites), 1);
}
