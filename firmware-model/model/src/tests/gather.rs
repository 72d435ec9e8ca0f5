//! The time at which posted sends leave, and the thread that sends them.

use super::virtual_time::TestBed;
use crate::Counter;
use crate::testing::mock::{Driver, Pair, assert_cqe, wait_for};
use crate::testing::sim::Conditions;
use crate::tuning::{BURST_RINGS, GATHERED, GATHERED_CONFIRMED};
use std::time::Duration;
use urnic_device::command::Status;
use urnic_device::stream::attach;
use urnic_device::vocabulary::WcStatus;

const BURST: u64 = 200;

fn post_burst(near: &Driver, far: &Driver, pair: &mut Pair, count: u64) {
    for cookie in 0..count {
        let into = pair.responder.region.sge(cookie * 8, 8);
        pair.responder.qp.post_recv(far, cookie, &[into]);
    }
    for cookie in 0..count {
        let from = pair.initiator.region.sge(cookie * 8, 8);
        near.arena
            .write(pair.initiator.region.iova + cookie * 8, &cookie.to_le_bytes());
        pair.initiator.qp.post_send(near, cookie, &[from]);
    }
}

#[test]
fn sends_with_polls_between_leave_at_once() {
    let bed = TestBed::new(Conditions::default());
    let (mut pair, near) = (bed.connect(), &bed.near);
    for cookie in 0..100 {
        let into = pair.responder.region.sge(0, 8);
        pair.responder.qp.post_recv(&bed.far, cookie, &[into]);
        let from = pair.initiator.region.sge(0, 8);
        pair.initiator.qp.post_send(near, cookie, &[from]);
        // Sent before the post returned.
        assert!(!near.device.has_gathered());
        assert_cqe(&pair.initiator.send_cq.poll().unwrap(), cookie, WcStatus::Success);
        near.device.progress(0);
        let received = bed.pass_until(|| pair.responder.recv_cq.poll());
        assert_cqe(&received, cookie, WcStatus::Success);
    }
    assert_eq!(pair.initiator.qp.rings, 100);
    assert_eq!(near.counter(Counter::GatheredFlushes), 0);
}

#[test]
fn a_stream_of_sends_leaves_in_few_system_calls() {
    let bed = TestBed::new(Conditions::default());
    let (mut pair, near) = (bed.connect(), &bed.near);
    post_burst(near, &bed.far, &mut pair, BURST);
    for cookie in 0..BURST {
        let sent = pair.initiator.send_cq.await_completion(near);
        assert_cqe(&sent, cookie, WcStatus::Success);
    }
    assert!(u64::from(pair.initiator.qp.rings) < BURST / 8);
    assert!(near.counter(Counter::TxCalls) < BURST / 4);
    assert!(near.counter(Counter::GatheredFlushes) > 0);
    for cookie in 0..BURST {
        let received = bed.pass_until(|| pair.responder.recv_cq.poll());
        assert_cqe(&received, cookie, WcStatus::Success);
    }
    let bytes = bed.far.arena.read(pair.responder.region.iova, BURST as usize * 8);
    let cookies = bytes.chunks(8).map(|c| u64::from_le_bytes(c.try_into().unwrap()));
    assert!(cookies.eq(0..BURST));
    // The first poll without more sends ends the burst.
    wait_for("the end of the burst", || {
        near.device.progress(0);
        (!near.device.has_gathered()).then_some(())
    });
}

#[test]
fn sends_that_the_peer_confirms_leave_in_smaller_groups() {
    let rings_of = |flags: u32| {
        let bed = TestBed::new(Conditions::default());
        let (mut pair, near) = (bed.connect_with(attach::CRC | flags), &bed.near);
        // The Read that asks for it is confirmed by a message, and so are the messages after it.
        for cookie in 0..2 {
            post_burst(near, &bed.far, &mut pair, 1);
            let sent = bed.pass_until(|| pair.initiator.send_cq.poll());
            assert_cqe(&sent, 0, WcStatus::Success);
            let received = bed.pass_until(|| pair.responder.recv_cq.poll());
            assert_cqe(&received, 0, WcStatus::Success);
            assert_eq!(pair.initiator.qp.rings, cookie + 1);
        }
        post_burst(near, &bed.far, &mut pair, BURST);
        u64::from(pair.initiator.qp.rings - 2)
    };
    let bursts_of = |gathered: u32| u64::from(BURST_RINGS) + BURST / u64::from(gathered);
    assert!(rings_of(0).abs_diff(bursts_of(GATHERED)) <= 1);
    assert!(rings_of(attach::DELIVERED).abs_diff(bursts_of(GATHERED_CONFIRMED)) <= 1);
}

#[test]
fn memory_polling_is_soon_served_at_once() {
    const ROUNDS: u64 = 150;
    let bed = TestBed::new(Conditions::default());
    let (mut pair, near) = (bed.connect(), &bed.near);
    let mut at_once = 0;
    for cookie in 0..ROUNDS {
        let into = pair.responder.region.sge(cookie * 8, 8);
        pair.responder.qp.post_recv(&bed.far, cookie, &[into]);
        let before = near.counter(Counter::TxCalls);
        let from = pair.initiator.region.sge(cookie * 8, 8);
        pair.initiator.qp.post_send(near, cookie, &[from]);
        at_once += u64::from(near.counter(Counter::TxCalls) > before);
        // Near does not poll before the answer can have arrived.
        let received = bed.pass_until(|| pair.responder.recv_cq.poll());
        assert_cqe(&received, cookie, WcStatus::Success);
    }
    // Four or five doorbells, eight flushes without data, some thirty doorbells, eight flushes;
    // then hundreds of doorbells.
    assert!(at_once > ROUNDS * 2 / 3, "{at_once} of {ROUNDS}");
}

/// The program posts, and then makes no other call: no poll, no arming, no post.
/// Also what waits for a poll: there must be room for the completions.
#[test]
fn a_resized_queue_has_the_completions_of_all_that_was_posted() {
    let (near, far) = (Driver::start(), Driver::start());
    let mut pair = Pair::connect(&near, &far);
    post_burst(&near, &far, &mut pair, 20);
    let queue = &mut pair.initiator.send_cq;
    assert_eq!(queue.resize(&near, 4), Err(Status::InvalidArgument));
    assert_eq!(queue.resize(&near, 8), Ok(20));
    for cookie in 0..20 {
        assert_cqe(&queue.poll().unwrap(), cookie, WcStatus::Success);
    }
}

#[test]
fn gathered_sends_leave_without_the_program() {
    let (near, far) = (Driver::start(), Driver::start());
    let mut pair = Pair::connect(&near, &far);
    for round in 1..20 {
        post_burst(&near, &far, &mut pair, round);
        for cookie in 0..round {
            let received = pair.responder.recv_cq.await_idly();
            assert_cqe(&received, cookie, WcStatus::Success);
        }
        for cookie in 0..round {
            let sent = pair.initiator.send_cq.await_idly();
            assert_cqe(&sent, cookie, WcStatus::Success);
        }
    }
}

#[test]
fn a_device_with_nothing_to_do_does_not_wake() {
    let (near, far) = (Driver::start(), Driver::start());
    let mut pair = Pair::connect(&near, &far);
    post_burst(&near, &far, &mut pair, 50);
    for _ in 0..50 {
        pair.initiator.send_cq.await_completion(&near);
        pair.responder.recv_cq.await_completion(&far);
    }
    let wakeups = || (near.counter(Counter::Wakeups), far.counter(Counter::Wakeups));
    let asleep = |driver: &Driver| {
        let schedule = &driver.device.core().schedule;
        schedule.sleeper.is_asleep() && schedule.next_timer().is_none()
    };
    // Some time after the last burst and the last poll each device sleeps, without a time limit,
    // and does not wake again.
    wait_for("sleep", || {
        let before = (asleep(&near) && asleep(&far)).then(wakeups)?;
        std::thread::sleep(Duration::from_millis(50));
        (asleep(&near) && asleep(&far) && wakeups() == before).then_some(())
    });
    let before = wakeups();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(wakeups(), before);
    // It wakes for arriving data.
    post_burst(&near, &far, &mut pair, 1);
    assert_cqe(&pair.responder.recv_cq.await_idly(), 0, WcStatus::Success);
}
