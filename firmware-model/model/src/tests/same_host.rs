//! Devices on one host, whose bytes pass through memory.

use super::one_sided;
use super::streams::{receive, send};
use crate::ModelConfig;
use crate::testing::mock::{Driver, Pair, assert_cqe, config, wait_for};
use urnic_device::command::{Handle, Opcode, QpStatus};
use urnic_device::event::EventKind;
use urnic_device::stream::{attach, attached};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe;

pub(super) fn driver(same_host: bool) -> Driver {
    Driver::start_with(ModelConfig {
        same_host,
        ..config()
    })
}

/// Connects two devices with a start-up of one byte each way.
fn connect(near: &Driver, far: &Driver) -> Pair {
    connect_with(near, far, 0)
}

/// Like [`connect`], with flags of `Attach`.
pub(super) fn connect_with(near: &Driver, far: &Driver, flags: u32) -> Pair {
    connect_prepared(near, far, flags, |_| {})
}

/// Like [`connect_with`]; `prepare` changes the queue pairs before they have the connection.
pub(super) fn connect_prepared(
    near: &Driver,
    far: &Driver,
    flags: u32,
    prepare: impl FnOnce(&mut Pair),
) -> Pair {
    let (mut pair, connecting, accepted) = Pair::prepare_while(near, far, |connecting, accepted| {
        send(near, connecting, b"?").unwrap();
        receive(far, accepted, 1).unwrap();
        far.await_event(EventKind::StreamReceived, accepted);
        send(far, accepted, b"!").unwrap();
        receive(near, connecting, 1).unwrap();
        near.await_event(EventKind::StreamReceived, connecting);
    });
    prepare(&mut pair);
    let flags = flags | attach::CRC;
    far.attach_with(accepted, &pair.responder.qp, flags).unwrap();
    near.attach_with(connecting, &pair.initiator.qp, flags | attach::INITIATOR)
        .unwrap();
    pair
}

fn way(driver: &Driver, qid: u32) -> u32 {
    let status: QpStatus = driver
        .command(Opcode::QueryQp, &Handle { id: qid.into() })
        .unwrap()
        .result();
    status.attached.get()
}

pub(super) fn in_memory() -> (Driver, Driver, Pair) {
    in_memory_with(0)
}

/// Like [`in_memory`]; the hosts' memory is reached by copies, the responder's and if so the
/// initiator's.
pub(super) fn in_host_processes(initiator_too: bool) -> (Driver, Driver, Pair) {
    let at_host = || {
        Driver::start_in_process(ModelConfig {
            same_host: true,
            ..config()
        })
    };
    let near = if initiator_too { at_host() } else { driver(true) };
    let far = at_host();
    let pair = connect(&near, &far);
    (near, far, pair)
}

/// Like [`in_memory`], with flags of `Attach`.
pub(super) fn in_memory_with(flags: u32) -> (Driver, Driver, Pair) {
    let (near, far) = (driver(true), driver(true));
    let pair = connect_with(&near, &far, flags);
    assert_eq!(way(&near, pair.initiator.qp.id), attached::MEMORY);
    assert_eq!(way(&far, pair.responder.qp.id), attached::MEMORY);
    (near, far, pair)
}

/// Posts a receive to the responder, and a Send of `len` bytes to the initiator.
pub(super) fn post(near: &Driver, far: &Driver, pair: &mut Pair, cookie: u64, len: u32) {
    let Pair { initiator, responder } = pair;
    let all = responder.region.sge(0, 1 << 20);
    responder.qp.post_recv(far, cookie, &[all]);
    initiator
        .qp
        .post_send(near, cookie, &[initiator.region.sge(0, len)]);
}

/// The next completion of both ends, neither of which polls the device.
pub(super) fn completes(pair: &mut Pair, cookie: u64) {
    assert_cqe(&pair.responder.recv_cq.await_idly(), cookie, WcStatus::Success);
    assert_cqe(&pair.initiator.send_cq.await_idly(), cookie, WcStatus::Success);
}

#[test]
fn shm_01_both_ends_agree_on_memory_or_tcp() {
    for (here, there) in [(true, true), (true, false), (false, true), (false, false)] {
        let (near, far) = (driver(here), driver(there));
        let mut pair = connect(&near, &far);
        let expected = if here && there {
            attached::MEMORY
        } else {
            attached::STREAM
        };
        assert_eq!(way(&near, pair.initiator.qp.id), expected, "{here} {there}");
        assert_eq!(way(&far, pair.responder.qp.id), expected, "{here} {there}");
        post(&near, &far, &mut pair, 2, 64);
        completes(&mut pair, 2);
    }
}

/// Sizes around the lengths of a ring and of segments, both ways, more than a ring holds.
#[test]
fn shm_02_messages_of_all_sizes_arrive_in_memory() {
    let (near, far, mut pair) = in_memory();
    let sizes = [
        0u32,
        1,
        3,
        4,
        2048,
        4095,
        4096,
        4097,
        65_535,
        70_000,
        262_143,
        262_145,
        1 << 20,
    ];
    for (i, &size) in sizes.iter().enumerate() {
        let bytes: Vec<u8> = (0..size).map(|b| (b as usize * 7 + i) as u8).collect();
        near.arena.write(pair.initiator.region.iova, &bytes);
        post(&near, &far, &mut pair, 8, size);
        assert_cqe(
            &pair.initiator.send_cq.await_completion(&near),
            8,
            WcStatus::Success,
        );
        assert_cqe(
            &pair.responder.recv_cq.await_completion(&far),
            8,
            WcStatus::Success,
        );
        let arrived = far.arena.read(pair.responder.region.iova, size as usize);
        assert!(arrived == bytes, "{size} bytes");
        // And back, by a Read of the responder's.
        let read = one_sided(wqe::Opcode::Read, 9, &pair.initiator);
        let into = pair.responder.region.sge(0, size);
        far.arena
            .write(pair.responder.region.iova, &vec![0; size as usize]);
        pair.responder.qp.post(&far, read, &[into]);
        assert_cqe(
            &pair.responder.send_cq.await_completion(&far),
            9,
            WcStatus::Success,
        );
        let arrived = far.arena.read(pair.responder.region.iova, size as usize);
        assert!(arrived == bytes, "{size} bytes by a Read");
    }
}

/// Neither end polls: the devices' own threads sleep, and are woken by each other.
#[test]
fn shm_03_sleeping_devices_are_woken() {
    let (near, far, mut pair) = in_memory();
    for cookie in 0..200 {
        post(&near, &far, &mut pair, cookie, 64);
        completes(&mut pair, cookie);
    }
}

/// The sender has more than the ring holds.
#[test]
fn shm_03_a_full_ring_is_continued_when_there_is_room() {
    let (near, far, mut pair) = in_memory();
    for cookie in 0..32 {
        post(&near, &far, &mut pair, cookie, 100_000);
    }
    for cookie in 0..32 {
        completes(&mut pair, cookie);
    }
}

#[test]
fn shm_04_a_refused_write_is_terminated_in_memory() {
    let (near, far, mut pair) = in_memory();
    let mut write = one_sided(wqe::Opcode::Write, 1, &pair.responder);
    write.stag = (pair.responder.region.stag ^ 1).into();
    pair.initiator
        .qp
        .post(&near, write, &[pair.initiator.region.sge(0, 8)]);
    far.await_event(EventKind::QpError, pair.responder.qp.id);
    near.await_event(EventKind::QpError, pair.initiator.qp.id);
    assert_eq!(near.state(&pair.initiator.qp), QpState::Err);
}

#[test]
fn shm_05_an_orderly_close_ends_both_in_memory() {
    let (near, far, mut pair) = in_memory();
    for cookie in 0..20 {
        post(&near, &far, &mut pair, cookie, 50_000);
    }
    near.modify(&pair.initiator.qp, QpState::Sqd).unwrap();
    for cookie in 0..20 {
        completes(&mut pair, cookie);
    }
    far.await_event(EventKind::PeerClosed, pair.responder.qp.id);
    far.modify(&pair.responder.qp, QpState::Sqd).ok();
    near.await_event(EventKind::Closed, pair.initiator.qp.id);
}

/// What was sent arrives although the sender's queue pair, and its whole device, are gone.
#[test]
fn shm_05_bytes_outlive_their_sender() {
    let (near, far, mut pair) = in_memory();
    post(&near, &far, &mut pair, 1, 3000);
    assert_cqe(&pair.initiator.send_cq.await_idly(), 1, WcStatus::Success);
    drop(near);
    assert_cqe(&pair.responder.recv_cq.await_idly(), 1, WcStatus::Success);
}

#[test]
fn shm_05_a_reset_of_one_end_ends_the_other() {
    let (near, far, mut pair) = in_memory();
    pair.responder
        .qp
        .post_recv(&far, 1, &[pair.responder.region.sge(0, 8)]);
    near.device.reset();
    assert_cqe(&pair.responder.recv_cq.await_idly(), 1, WcStatus::WrFlushErr);
}

#[test]
fn many_connections_share_their_pages() {
    let (near, far) = (driver(true), driver(true));
    let mut pairs: Vec<Pair> = (0..100).map(|_| connect(&near, &far)).collect();
    for pair in &mut pairs {
        post(&near, &far, pair, 100, 64);
    }
    for pair in &mut pairs {
        completes(pair, 100);
    }
    // The list of descriptors shows that no connection keeps any but its TCP socket.
    wait_for("what start-up used is closed", || {
        (near.device.core().descriptor_numbers().len() < 100 + 16).then_some(())
    });
    for round in 0..20 {
        for pair in &mut pairs {
            post(&near, &far, pair, round, 64);
        }
        for pair in &mut pairs {
            completes(pair, round);
        }
    }
}

/// With `DELIVERED`, no Read of the device's own confirms what was sent: the peer says in memory
/// how far it is, and wakes a device that sleeps.
#[test]
fn shm_12_requests_complete_when_the_peer_has_processed_them() {
    let (near, far, mut pair) = in_memory_with(attach::DELIVERED | attach::STALL_ON_EMPTY_RQ);
    let Pair { initiator, responder } = &mut pair;
    let all = responder.region.sge(0, 1 << 20);
    responder.qp.post_recv(&far, 0, &[all]);
    for cookie in 0..20 {
        let send = [initiator.region.sge(0, 64)];
        initiator.qp.post_send(&near, cookie, &send);
        assert_cqe(&responder.recv_cq.await_idly(), cookie, WcStatus::Success);
        assert_cqe(&initiator.send_cq.await_idly(), cookie, WcStatus::Success);
        // The next one finds no receive: it is in the ring, and not complete.
        initiator.qp.post_send(&near, cookie + 100, &send);
        wait_for("a Send that waits", || {
            (far.counter(crate::Counter::RxStalls) > cookie).then_some(())
        });
        assert!(initiator.send_cq.poll().is_none());
        responder.qp.post_recv(&far, cookie + 100, &[all]);
        assert_cqe(&responder.recv_cq.await_idly(), cookie + 100, WcStatus::Success);
        assert_cqe(&initiator.send_cq.await_idly(), cookie + 100, WcStatus::Success);
        responder.qp.post_recv(&far, cookie + 1, &[all]);
    }
    // No message but those of the program.
    assert_eq!(near.counter(crate::Counter::TxMessages), 40);
    assert_eq!(near.counter(crate::Counter::TxFpdus), 40);
}

/// A stream between two addresses that are one might turn out to be between two queue pairs of one
/// device. As long as it has not, a queue pair with nothing to send knows that: a poll that
/// brings something only for the program then does not try to send.
#[test]
fn a_queue_pair_with_nothing_to_send_is_at_rest() {
    let (near, far, mut pair) = in_memory_with(attach::DELIVERED);
    let at_rest = |driver: &Driver, qid| {
        let qp = driver.device.core().qps.find(qid).unwrap();
        let inner = qp.turns.lock();
        inner.engine.is_at_rest()
    };
    for cookie in 0..3 {
        post(&near, &far, &mut pair, cookie, 64);
        completes(&mut pair, cookie);
        assert!(at_rest(&near, pair.initiator.qp.id) && at_rest(&far, pair.responder.qp.id));
    }
    // A Send that waits for a receive is in flight.
    pair.initiator
        .qp
        .post_send(&near, 3, &[pair.initiator.region.sge(0, 64)]);
    assert!(!at_rest(&near, pair.initiator.qp.id));
}
