//! Sends that are longer than the ring of a connection in memory.

use super::same_host::{connect_with, driver, in_memory, in_memory_with};
use crate::ModelConfig;
use crate::capture::CaptureFile;
use crate::testing::mock::{Driver, Pair, Region, assert_cqe, config};
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{Access, QpState, WcStatus};

/// More than the ring and what a receiver holds, and less than a sender frames ahead.
const LEN: usize = 1_000_000;
/// The bytes that the program writes when the memory is its own again.
const SECRET: u8 = 0xee;

fn content(seed: usize) -> Vec<u8> {
    (0..LEN).map(|n| ((n * 31 + seed) >> 3) as u8 & 0x7f).collect()
}

/// A Send from memory of its own, for which there is no receive yet.
fn under_way(near: &Driver, pair: &mut Pair, seed: usize) -> Region {
    let region = near.register(pair.initiator.pd, LEN, Access::empty()).unwrap();
    near.arena.write(region.iova, &content(seed));
    let qp = &mut pair.initiator.qp;
    qp.post_send(near, 1, &[region.sge(0, LEN as u32)]);
    near.device.progress(0);
    region
}

/// Posts a receive for what comes.
fn post_recv(far: &Driver, pair: &mut Pair) -> Region {
    let into = far.register(pair.responder.pd, LEN, Access::LOCAL_WRITE).unwrap();
    pair.responder.qp.post_recv(far, 2, &[into.sge(0, LEN as u32)]);
    into
}

/// Posts a receive, and returns what comes.
fn received(far: &Driver, pair: &mut Pair) -> Vec<u8> {
    let into = post_recv(far, pair);
    let done = pair.responder.recv_cq.await_completion(far);
    assert_cqe(&done, 2, WcStatus::Success);
    assert_eq!(done.byte_len.get() as usize, LEN);
    far.arena.read(into.iova, LEN)
}

#[test]
fn shm_17_large_sends_arrive_and_complete() {
    let (near, far, mut pair) = in_memory();
    for seed in 0..5 {
        let into = post_recv(&far, &mut pair);
        let region = under_way(&near, &mut pair, seed);
        let done = pair.responder.recv_cq.await_completion(&far);
        assert_cqe(&done, 2, WcStatus::Success);
        assert!(far.arena.read(into.iova, LEN) == content(seed));
        let done = pair.initiator.send_cq.await_completion(&near);
        assert_cqe(&done, 1, WcStatus::Success);
        near.on(Opcode::DestroyMr, region.stag).unwrap();
    }
}

/// A deregistration does not wait for the peer, and the peer gets the bytes of before.
#[test]
fn shm_17_memory_that_is_deregistered_is_not_read_any_more() {
    for unmapped in [false, true] {
        let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
        let region = under_way(&near, &mut pair, 1);
        match unmapped {
            false => near.on(Opcode::DestroyMr, region.stag).unwrap(),
            true => near.device.unmapped(region.iova, LEN as u64),
        }
        near.arena.write(region.iova, &vec![SECRET; LEN]);
        assert!(received(&far, &mut pair) == content(1), "unmapped: {unmapped}");
        let done = pair.initiator.send_cq.await_completion(&near);
        assert_cqe(&done, 1, WcStatus::Success);
    }
}

/// What a queue pair flushed is not received any more: its memory is the program's.
#[test]
fn shm_17_a_send_that_was_flushed_is_not_received() {
    for state in [QpState::Err, QpState::Reset] {
        let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
        let region = under_way(&near, &mut pair, 1);
        near.modify(&pair.initiator.qp, state).unwrap();
        near.arena.write(region.iova, &vec![SECRET; LEN]);
        let into = post_recv(&far, &mut pair);
        far.await_event(EventKind::QpError, pair.responder.qp.id);
        let done = pair.responder.recv_cq.await_completion(&far);
        assert_ne!(
            WcStatus::from_raw(done.status),
            Some(WcStatus::Success),
            "{state:?}"
        );
        assert!(!far.arena.read(into.iova, LEN).contains(&SECRET), "{state:?}");
    }
}

/// A peer that has received everything may leave at once.
#[test]
fn shm_17_receipts_before_the_peers_end_count() {
    for round in 0..10 {
        let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
        under_way(&near, &mut pair, round);
        assert!(received(&far, &mut pair) == content(round));
        drop(far);
        let done = pair.initiator.send_cq.await_completion(&near);
        assert_cqe(&done, 1, WcStatus::Success);
    }
}

/// Two ends that each send more than there is room for, at the same time.
#[test]
fn shm_17_large_sends_of_both_ends_pass_each_other() {
    let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
    let Pair { initiator, responder } = &mut pair;
    for round in 0..3 {
        let mut regions = Vec::new();
        for (driver, end) in [(&near, &mut *initiator), (&far, &mut *responder)] {
            let source = driver.register(end.pd, LEN, Access::empty()).unwrap();
            driver.arena.write(source.iova, &content(round));
            let into = driver.register(end.pd, LEN, Access::LOCAL_WRITE).unwrap();
            end.qp.post_recv(driver, 2, &[into.sge(0, LEN as u32)]);
            end.qp.post_send(driver, 1, &[source.sge(0, LEN as u32)]);
            regions.push([source, into]);
        }
        let ends = [(&near, &mut *initiator), (&far, &mut *responder)];
        for ((driver, end), [_, into]) in ends.into_iter().zip(regions) {
            assert_cqe(&end.recv_cq.await_completion(driver), 2, WcStatus::Success);
            assert!(driver.arena.read(into.iova, LEN) == content(round));
            assert_cqe(&end.send_cq.await_completion(driver), 1, WcStatus::Success);
        }
    }
}

/// Memory that goes away while its bytes wait for room, after some that find room first.
#[test]
fn a_closed_source_ends_the_connection() {
    crate::host::fault::install();
    for page in (230..LEN as u64 / 4096).step_by(2) {
        let (near, far, mut pair) = in_memory_with(attach::STALL_ON_EMPTY_RQ);
        let region = under_way(&near, &mut pair, 1);
        near.arena.take_page_away(region.iova + page * 4096);
        post_recv(&far, &mut pair);
        near.await_event(EventKind::QpError, pair.initiator.qp.id);
        far.await_event(EventKind::QpError, pair.responder.qp.id);
    }
}

/// A receive of which only the first pages are there, also where the receiver's streams are
/// captured.
#[test]
fn a_closed_sink_ends_the_connection() {
    crate::host::fault::install();
    let folder = urnic_testkit::Folder::new("large");
    let ways = [0, 8 << 10, 40 << 10, 200 << 10].map(|there| [(there, false), (there, true)]);
    for (there, is_captured) in ways.into_iter().flatten() {
        let capture = CaptureFile::new(folder.file("trace.pcapng"), None).interface("urnic0", "");
        let (near, far) = (
            driver(true),
            Driver::start_with(ModelConfig {
                capture: is_captured.then_some(capture),
                same_host: true,
                ..config()
            }),
        );
        let mut pair = connect_with(&near, &far, 0);
        let into = far.register(pair.responder.pd, LEN, Access::LOCAL_WRITE).unwrap();
        far.arena.take_page_away(into.iova + there);
        pair.responder.qp.post_recv(&far, 2, &[into.sge(0, LEN as u32)]);
        under_way(&near, &mut pair, 1);
        far.await_event(EventKind::QpError, pair.responder.qp.id);
        near.await_event(EventKind::QpError, pair.initiator.qp.id);
    }
}
