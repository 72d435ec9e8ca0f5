//! Both ends of a stream on one device: the sender's completion has the receiver's result.

use super::same_host;
use crate::testing::mock::{Driver, End, Pair, assert_cqe};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::Nanos;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{self, SendFlags, SendHeader};

const LEN: u32 = 3000;
/// Polls after which the test concludes that no completion comes.
const POLLS: u32 = 2000;

/// A pair on one device whose ends wait for receives.
fn pair_without_timeout(driver: &Driver) -> Pair {
    let (pair, connecting, accepted) = Pair::prepare(driver, driver);
    let flags = attach::CRC | attach::STALL_ON_EMPTY_RQ | attach::PEER_MAY_CLOSE | attach::FENCE_OPEN;
    driver.attach_with(accepted, &pair.responder.qp, flags).unwrap();
    driver
        .attach_with(connecting, &pair.initiator.qp, flags | attach::INITIATOR)
        .unwrap();
    pair
}

/// A request for `end`'s region, from `at` on.
fn request(opcode: wqe::Opcode, cookie: u64, end: &End, at: u64) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        flags: SendFlags::SIGNALED.bits(),
        cookie: cookie.into(),
        remote_offset: (end.region.iova + at).into(),
        stag: end.region.stag.into(),
        ..SendHeader::default()
    }
}

/// Posts Writes of which the third goes over the region's end, and a Read after them.
fn post_three_good_of_five(driver: &Driver, pair: &mut Pair) {
    let Pair { initiator, responder } = pair;
    for cookie in 1..=4 {
        let at = if cookie == 3 { (1 << 20) - 1 } else { cookie * 4096 };
        let mut write = request(wqe::Opcode::Write, cookie, responder, at);
        if cookie == 1 {
            // That request completes without a CQE, but frees its entry in the ring.
            write.flags = 0;
        }
        initiator.qp.post(driver, write, &[initiator.region.sge(0, LEN)]);
    }
    let read = request(wqe::Opcode::Read, 5, responder, 0);
    initiator
        .qp
        .post(driver, read, &[initiator.region.sge(1 << 16, LEN)]);
}

const OUTCOMES: [(u64, WcStatus); 4] = [
    (2, WcStatus::Success),
    (3, WcStatus::RemAccessErr),
    (4, WcStatus::WrFlushErr),
    (5, WcStatus::WrFlushErr),
];

#[test]
fn a_refused_write_fails_and_those_before_it_succeed() {
    for _ in 0..50 {
        let driver = Driver::start();
        let mut pair = Pair::connect(&driver, &driver);
        post_three_good_of_five(&driver, &mut pair);
        for (cookie, status) in OUTCOMES {
            let done = pair.initiator.send_cq.await_completion(&driver);
            assert_cqe(&done, cookie, status);
            assert_eq!(done.vendor_error.get() != 0, cookie == 3, "{done:?}");
        }
        assert_eq!(pair.initiator.qp.sq_consumer(), pair.initiator.qp.sq_producer());
        driver.await_event(EventKind::QpError, pair.initiator.qp.id);
        driver.await_event(EventKind::QpError, pair.responder.qp.id);
    }
}

/// The completions do not depend on how the stream splits its bytes. The test advances the clock.
#[test]
fn however_the_stream_is_cut() {
    const STEPS: usize = 1_000_000;
    for chunk in [1, 7, 1461, 1 << 20] {
        let clock = Arc::new(AtomicU64::new(1));
        let conditions = Conditions {
            chunk,
            ..Conditions::default()
        };
        let network = SimNetwork::new(conditions, clock.clone());
        let driver = Driver::start_manual(Arc::new(network));
        let pass = || {
            let now = clock.fetch_add(10_000, Ordering::Relaxed);
            driver.device.step(Nanos(now));
        };
        let mut pair = Pair::connect_while(&driver, &driver, attach::CRC, pass);
        post_three_good_of_five(&driver, &mut pair);
        for (cookie, status) in OUTCOMES {
            let done = (0..STEPS).find_map(|_| {
                pass();
                pair.initiator.send_cq.poll()
            });
            assert_cqe(
                &done.expect("a completion within ten virtual seconds"),
                cookie,
                status,
            );
        }
    }
}

/// The initiator may be in full operation, with its first message in flight, before the responder
/// is.
#[test]
fn a_peer_attached_later_checks_from_the_first_message() {
    let driver = Driver::start();
    let (mut pair, connecting, accepted) = Pair::prepare(&driver, &driver);
    driver.attach(connecting, &pair.initiator.qp, true).unwrap();
    post_three_good_of_five(&driver, &mut pair);
    for _ in 0..POLLS {
        assert!(
            pair.initiator.send_cq.poll().is_none(),
            "the peer has processed nothing yet"
        );
        driver.device.progress(0);
    }
    driver.attach(accepted, &pair.responder.qp, false).unwrap();
    for (cookie, status) in OUTCOMES {
        assert_cqe(&pair.initiator.send_cq.await_completion(&driver), cookie, status);
    }
}

/// Each Send completes when its own receive is posted, not earlier, and needs no other receive.
#[test]
fn a_send_completes_when_it_is_delivered() {
    let driver = Driver::start();
    let Pair {
        mut initiator,
        mut responder,
    } = pair_without_timeout(&driver);
    let write = request(wqe::Opcode::Write, 0, &responder, 0);
    initiator.qp.post(&driver, write, &[initiator.region.sge(0, 64)]);
    for cookie in 1..=3 {
        initiator
            .qp
            .post_send(&driver, cookie, &[initiator.region.sge(0, 64)]);
    }
    // A message that needs no receive does not wait for one.
    assert_cqe(&initiator.send_cq.await_idly(), 0, WcStatus::Success);
    for cookie in 1..=3 {
        for _ in 0..POLLS {
            assert!(initiator.send_cq.poll().is_none(), "{cookie} is not delivered");
            driver.device.progress(0);
        }
        responder
            .qp
            .post_recv(&driver, cookie, &[responder.region.sge(0, 64)]);
        assert_cqe(&initiator.send_cq.await_idly(), cookie, WcStatus::Success);
        assert_cqe(&responder.recv_cq.await_idly(), cookie, WcStatus::Success);
    }
}

/// A receive that is too short, and a receive in memory without local write permission.
#[test]
fn a_send_that_finds_a_bad_receive_completes_with_an_error() {
    for (len, stag, status) in [
        (8, 0, WcStatus::RemInvReqErr),
        (64, 0xdead_0000, WcStatus::RemOpErr),
    ] {
        let driver = Driver::start();
        let Pair {
            mut initiator,
            mut responder,
        } = Pair::connect(&driver, &driver);
        let mut into = responder.region.sge(0, len);
        if stag != 0 {
            into.stag = stag.into();
        }
        responder.qp.post_recv(&driver, 1, &[responder.region.sge(0, 64)]);
        responder.qp.post_recv(&driver, 2, &[into]);
        for cookie in 1..=3 {
            initiator
                .qp
                .post_send(&driver, cookie, &[initiator.region.sge(0, 64)]);
        }
        for (cookie, status) in [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)] {
            assert_cqe(&initiator.send_cq.await_completion(&driver), cookie, status);
        }
    }
}

/// If the peer ends the connection before it processed a message, the message completes as sent, as
/// with a peer on another device.
#[test]
fn an_end_completes_sends_the_peer_has_not_processed() {
    let ends: [fn(&Driver, &Pair); 4] = [
        |driver, pair| driver.on(Opcode::DestroyQp, pair.responder.qp.id).unwrap(),
        |driver, pair| driver.modify(&pair.responder.qp, QpState::Err).unwrap(),
        |driver, pair| driver.modify(&pair.initiator.qp, QpState::Err).unwrap(),
        |driver, pair| driver.modify(&pair.initiator.qp, QpState::Sqd).unwrap(),
    ];
    for (n, end) in ends.iter().enumerate() {
        let driver = Driver::start();
        let mut pair = pair_without_timeout(&driver);
        let from = pair.initiator.region.sge(0, 64);
        for cookie in 1..=3 {
            pair.initiator.qp.post_send(&driver, cookie, &[from]);
        }
        assert!(pair.initiator.send_cq.poll().is_none());
        end(&driver, &pair);
        for cookie in 1..=3 {
            let done = pair.initiator.send_cq.await_idly();
            assert_eq!(done.cookie.get(), cookie, "end {n}");
            assert_eq!(done.status, WcStatus::Success as u8, "end {n}");
        }
    }
}

/// Queue pairs are created and destroyed with the ends of their streams: no request waits for an
/// end that no longer exists.
#[test]
fn numbers_are_visited_once_each() {
    let driver = Driver::start();
    for round in 0..6 {
        let mut pair = Pair::connect(&driver, &driver);
        let write = request(wqe::Opcode::Write, round, &pair.responder, 0);
        let from = pair.initiator.region.sge(0, LEN);
        pair.initiator.qp.post(&driver, write, &[from]);
        assert_cqe(
            &pair.initiator.send_cq.await_completion(&driver),
            round,
            WcStatus::Success,
        );
        driver.on(Opcode::DestroyQp, pair.initiator.qp.id).unwrap();
        driver.on(Opcode::DestroyQp, pair.responder.qp.id).unwrap();
    }
}

/// A thread at each end, for several pairs at once: neither lets the queue pairs of the other
/// receive, and neither waits for ever for what the other one's have done, whether it polls or not.
/// Messages go one way for a while, so that no answer brings what is waited for along.
#[test]
fn a_thread_at_each_end_finds_its_bytes() {
    for same_host in [false, true] {
        let driver = same_host::driver(same_host);
        let driver = &driver;
        let pairs = (0..3).map(|_| same_host::connect_with(driver, driver, attach::STALL_ON_EMPTY_RQ));
        let (near, far): (Vec<End>, Vec<End>) = pairs.map(|p| (p.initiator, p.responder)).unzip();
        std::thread::scope(|scope| {
            for (mut ends, begins) in [(near, true), (far, false)] {
                scope.spawn(move || {
                    for cookie in 0..1000 {
                        let sends = begins == (cookie / 8 % 2 == 0);
                        for end in &mut ends {
                            let place = [end.region.sge(0, 8)];
                            let done = if sends {
                                end.qp.post_send(driver, cookie, &place);
                                match cookie % 5 {
                                    0 => end.send_cq.await_idly(),
                                    _ => end.send_cq.await_completion(driver),
                                }
                            } else {
                                end.qp.post_recv(driver, cookie, &place);
                                end.recv_cq.await_completion(driver)
                            };
                            assert_cqe(&done, cookie, WcStatus::Success);
                        }
                    }
                });
            }
        });
    }
}
