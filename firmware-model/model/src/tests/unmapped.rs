//! A driver in another process: doorbells in plain memory, memory that cannot be mapped, and memory
//! that the driver unmaps.

use super::{one_sided, send_between};
use crate::Counter;
use crate::config::ModelConfig;
use crate::testing::mock::{Driver, Pair, assert_cqe, config, wait_for};
use std::sync::atomic::Ordering;
use urnic_device::command::{Opcode, QueueHandle};
use urnic_device::doorbell::{Doorbell, Kind, WAKE};
use urnic_device::event::EventKind;
use urnic_device::registers::KICK;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe;

fn with_pages() -> Driver {
    Driver::start_with(ModelConfig {
        doorbell_memory: true,
        ..config()
    })
}

fn remote() -> Driver {
    let mut driver = Driver::start();
    driver.remote = true;
    driver
}

/// A completion queue, its slot, and the doorbell that arms it.
fn armable(driver: &Driver) -> (u32, u64) {
    let arguments = driver.cq_arguments(4);
    let handle: QueueHandle = driver.command(Opcode::CreateCq, &arguments).unwrap().result();
    let doorbell = Doorbell {
        kind: Kind::Arm,
        queue: handle.id.get(),
        index: 0,
    };
    (handle.doorbell.get(), doorbell.encode())
}

#[test]
fn rings_in_plain_memory_are_served_once_at_the_next_poll() {
    let driver = with_pages();
    let pages = driver.device.doorbell_pages().unwrap();
    let (slot, doorbell) = armable(&driver);
    assert!(!driver.device.scan_doorbells());
    // The same value twice is two doorbells.
    for _ in 0..2 {
        pages.store(driver.uar, slot, doorbell);
        assert!(driver.device.scan_doorbells());
        assert!(!driver.device.scan_doorbells());
    }
    // The device does not poll slots without a wake-up.
    pages.store(driver.uar, slot + 8, doorbell);
    assert!(!driver.device.scan_doorbells());
}

#[test]
fn a_kick_makes_the_device_poll() {
    let driver = with_pages();
    let pages = driver.device.doorbell_pages().unwrap();
    let (slot, doorbell) = armable(&driver);
    pages.store(driver.uar, slot, doorbell);
    driver.device.bar0_write(KICK, 0);
    assert!(!driver.device.scan_doorbells(), "it was taken by the kick");
}

/// A value in a slot of no queue is found when the driver kicks in vain, and counted once.
#[test]
fn a_doorbell_in_a_slot_of_no_queue_is_counted() {
    let driver = with_pages();
    let pages = driver.device.doorbell_pages().unwrap();
    let (slot, doorbell) = armable(&driver);
    let counted = |expected: u64, what: &str| {
        driver.device.bar0_write(KICK, 0);
        assert_eq!(driver.counter(Counter::InvalidDoorbells), expected, "{what}");
    };
    counted(0, "nothing was rung");
    pages.store(driver.uar, slot, doorbell);
    counted(0, "the slot of the queue");
    for place in [slot + 8, WAKE - 8] {
        pages.store(driver.uar, place, doorbell);
    }
    counted(2, "two slots of no queue");
    counted(2, "the same ones again");
    let unknown = Doorbell {
        kind: Kind::Send,
        queue: 0x7777,
        index: 1,
    };
    pages.store(driver.uar, slot, unknown.encode());
    counted(3, "the slot of another queue");
}

#[test]
fn the_wake_word_of_each_page_shows_a_sleeping_device() {
    let driver = with_pages();
    let pages = driver.device.doorbell_pages().unwrap();
    let (first, _) = armable(&driver);
    assert!(first < urnic_device::doorbell::WAKE);
    assert!(!pages.is_asleep(driver.uar));
    driver.device.doorbells_asleep(true);
    assert!(pages.is_asleep(driver.uar));
    // A page that is allocated meanwhile also sets its wake word.
    let second: u32 = driver
        .create(Opcode::AllocUar, &urnic_device::command::Nothing {})
        .unwrap();
    let mut arguments = driver.cq_arguments(4);
    arguments.uar = second.into();
    driver.command(Opcode::CreateCq, &arguments).unwrap();
    assert!(pages.is_asleep(second));
    driver.device.doorbells_asleep(false);
    assert!(!pages.is_asleep(driver.uar) && !pages.is_asleep(second));
}

#[test]
fn messages_of_all_sizes_go_between_regions_in_remote_memory() {
    let (near, far) = (remote(), remote());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    for (cookie, size) in (0..).zip([0, 1, 1442, 2049, 64768, 70_000, 1 << 19]) {
        send_between((&near, &mut initiator), (&far, &mut responder), cookie, size);
    }
}

#[test]
fn writes_and_reads_reach_remote_memory_of_a_passive_target() {
    let (near, far) = (remote(), remote());
    let Pair {
        mut initiator,
        responder,
    } = Pair::connect(&near, &far);
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    near.arena.write(initiator.region.iova, &bytes);
    let len = bytes.len() as u32;
    initiator.qp.post(
        &near,
        one_sided(wqe::Opcode::Write, 1, &responder),
        &[initiator.region.sge(0, len)],
    );
    assert_cqe(&initiator.send_cq.await_idly(), 1, WcStatus::Success);
    initiator.qp.post(
        &near,
        one_sided(wqe::Opcode::Read, 2, &responder),
        &[initiator.region.sge(500_000, len)],
    );
    assert_cqe(&initiator.send_cq.await_idly(), 2, WcStatus::Success);
    assert_eq!(
        near.arena.read(initiator.region.iova + 500_000, bytes.len()),
        bytes
    );
}

/// The owner of remote memory has ended: requests that use it fail, with their queue pair.
#[test]
fn a_send_from_unmapped_remote_memory_fails_alone() {
    let (near, far) = (remote(), Driver::start());
    let Pair {
        mut initiator,
        responder: _answerer,
    } = Pair::connect(&near, &far);
    let Pair {
        initiator: mut other,
        responder: mut others_peer,
    } = Pair::connect(&near, &far);
    near.arena.unmapped.store(true, Ordering::Relaxed);
    initiator.qp.post_send(&near, 1, &[initiator.region.sge(0, 8)]);
    assert_cqe(&initiator.send_cq.await_idly(), 1, WcStatus::LocProtErr);
    wait_for("the error state", || {
        (near.state(&initiator.qp) == QpState::Err).then_some(())
    });
    near.arena.unmapped.store(false, Ordering::Relaxed);
    others_peer.qp.post_recv(&far, 2, &[others_peer.region.sge(0, 8)]);
    other.qp.post_send(&near, 2, &[other.region.sge(0, 8)]);
    assert_cqe(&others_peer.recv_cq.await_completion(&far), 2, WcStatus::Success);
}

#[test]
fn a_write_to_unmapped_remote_memory_ends_its_queue_pair() {
    let (near, far) = (Driver::start(), remote());
    let Pair {
        mut initiator,
        responder,
    } = Pair::connect(&near, &far);
    far.arena.unmapped.store(true, Ordering::Relaxed);
    initiator.qp.post(
        &near,
        one_sided(wqe::Opcode::Write, 1, &responder),
        &[initiator.region.sge(0, 8)],
    );
    near.await_event(EventKind::QpError, initiator.qp.id);
    far.await_event(EventKind::QpError, responder.qp.id);
}

/// Unmapped memory is like a revoked STag: nothing is placed, only the queue pair of the request
/// fails, and the region can still be deregistered.
#[test]
fn memory_the_host_unmaps_is_unreachable_for_peers() {
    for (near, far) in [(Driver::start(), Driver::start()), (Driver::start(), remote())] {
        let Pair {
            mut initiator,
            responder,
        } = Pair::connect(&near, &far);
        let Pair {
            initiator: mut other,
            responder: others_peer,
        } = Pair::connect(&near, &far);
        let remote_or_not = if far.remote { 1 << 56 } else { 0 };
        far.device
            .unmapped(remote_or_not + responder.region.iova + 4096, 4096);
        initiator.qp.post(
            &near,
            one_sided(wqe::Opcode::Write, 1, &responder),
            &[initiator.region.sge(0, 8)],
        );
        near.await_event(EventKind::QpError, initiator.qp.id);
        far.on(Opcode::DestroyMr, responder.region.stag).unwrap();
        other.qp.post(
            &near,
            one_sided(wqe::Opcode::Write, 2, &others_peer),
            &[other.region.sge(0, 8)],
        );
        other.qp.post(
            &near,
            one_sided(wqe::Opcode::Read, 3, &others_peer),
            &[other.region.sge(0, 8)],
        );
        let mut statuses = Vec::new();
        while statuses.len() < 2 {
            statuses.push(other.send_cq.await_idly().status);
        }
        assert_eq!(statuses, [WcStatus::Success as u8; 2]);
    }
}
