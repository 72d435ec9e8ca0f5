//! Requests that are posted one at a time to a peer on the same host, which take a short way, and
//! what must be as on the usual one.

use super::one_sided;
use super::same_host::{connect_with, driver};
use crate::Counter;
use crate::testing::mock::{Driver, Pair, assert_cqe, wait_for};
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags, SendHeader};

const FLAGS: u32 = attach::DELIVERED | attach::STALL_ON_EMPTY_RQ;

fn connected(in_memory: bool) -> (Driver, Driver, Pair) {
    let (near, far) = (driver(in_memory), driver(in_memory));
    let pair = connect_with(&near, &far, FLAGS);
    (near, far, pair)
}

/// What a test does with a pair.
type Scenario<'a> = &'a dyn Fn(&Driver, &Driver, &mut Pair);

/// How the bytes of a request are given.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Inline,
    One,
    /// In two elements of a list, around an empty one.
    List,
}

fn request(opcode: Opcode, cookie: u64, pair: &Pair) -> SendHeader {
    match opcode {
        Opcode::Send => SendHeader {
            opcode: opcode as u8,
            flags: SendFlags::SIGNALED.bits(),
            cookie: cookie.into(),
            ..SendHeader::default()
        },
        _ => one_sided(opcode, cookie, &pair.responder),
    }
}

/// Posts `bytes`, which are at the beginning of the initiator's region, alone.
fn post(near: &Driver, pair: &mut Pair, mut header: SendHeader, shape: Shape, bytes: &[u8]) {
    let len = bytes.len() as u32;
    let (region, qp) = (pair.initiator.region, &mut pair.initiator.qp);
    match shape {
        Shape::Inline => {
            header.flags |= SendFlags::INLINE.bits();
            header.inline_len = len.into();
            qp.post_inline_unrung(header, bytes);
        }
        Shape::One => qp.post_unrung(header, &[region.sge(0, len)]),
        Shape::List => {
            let half = len / 2;
            let list = [
                region.sge(0, half),
                region.sge(9, 0),
                region.sge(half.into(), len - half),
            ];
            qp.post_unrung(header, &list);
        }
    }
    qp.ring(near);
}

/// Sends, Writes and Reads in turn, of lengths on both sides of what is short, in every shape.
#[test]
fn shm_02_requests_that_are_posted_alone_arrive_whole() {
    let (near, far, mut pair) = connected(true);
    let (here, there) = (pair.initiator.region, pair.responder.region);
    let mut sends = 0;
    for len in (0..=130).chain([511, 512, 4096]) {
        for (n, shape) in [Shape::Inline, Shape::One, Shape::List].into_iter().enumerate() {
            let inline_too_long = matches!(shape, Shape::Inline) && len > 200;
            for opcode in [Opcode::Send, Opcode::Write, Opcode::Read] {
                if inline_too_long || (opcode == Opcode::Read && matches!(shape, Shape::Inline)) {
                    continue;
                }
                let what = format!("{opcode:?} of {len} bytes, {shape:?}");
                let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + n + opcode as usize) as u8).collect();
                let (from, to) = match opcode {
                    Opcode::Read => ((&far, there), (&near, here)),
                    _ => ((&near, here), (&far, there)),
                };
                to.0.arena.write(to.1.iova, &vec![0xee; len + 1]);
                from.0.arena.write(from.1.iova, &bytes);
                if opcode == Opcode::Send {
                    sends += 1;
                    pair.responder.qp.post_recv(&far, 5, &[there.sge(0, 1 << 16)]);
                }
                let header = request(opcode, 4, &pair);
                post(&near, &mut pair, header, shape, &bytes);
                if opcode == Opcode::Send {
                    let received = pair.responder.recv_cq.await_completion(&far);
                    assert_cqe(&received, 5, WcStatus::Success);
                    assert_eq!(received.byte_len.get() as usize, len, "{what}");
                }
                assert_cqe(
                    &pair.initiator.send_cq.await_completion(&near),
                    4,
                    WcStatus::Success,
                );
                assert!(to.0.arena.read(to.1.iova, len) == bytes, "{what}");
                assert_eq!(to.0.arena.read(to.1.iova + len as u64, 1), [0xee], "{what}");
            }
        }
    }
    assert!(pair.initiator.send_cq.poll().is_none() && pair.responder.recv_cq.poll().is_none());
    // Those of no bytes touch no memory, and are messages.
    let direct = [Counter::DirectWrites, Counter::DirectReads].map(|c| near.counter(c));
    assert_eq!(direct, [130 * 3 + 3 * 2, 133 * 2]);
    assert_eq!(far.counter(Counter::RxMessages), sends + 3);
}

/// A receiver without receives takes what it can hold, and the ring the rest. Nothing is lost, and
/// nothing completes before it is received.
#[test]
fn shm_03_sends_that_are_posted_alone_wait_for_receives() {
    let (near, far, mut pair) = connected(true);
    for round in 0..4 {
        const SENDS: u64 = 40;
        for n in 0..SENDS {
            let header = request(Opcode::Send, n, &pair);
            post(&near, &mut pair, header, Shape::Inline, &[(round + n) as u8; 60]);
        }
        wait_for("a Send that waits", || {
            (far.counter(Counter::RxStalls) > round).then_some(())
        });
        assert!(pair.initiator.send_cq.poll().is_none());
        for n in 0..SENDS {
            let into = pair.responder.region.sge(0, 64);
            pair.responder.qp.post_recv(&far, n, &[into]);
            assert_cqe(
                &pair.responder.recv_cq.await_completion(&far),
                n,
                WcStatus::Success,
            );
            let arrived = far.arena.read(pair.responder.region.iova, 60);
            assert_eq!(arrived, [(round + n) as u8; 60]);
            assert_cqe(
                &pair.initiator.send_cq.await_completion(&near),
                n,
                WcStatus::Success,
            );
        }
    }
}

/// What ends the connection does so as over TCP, with the same statuses at both ends.
#[test]
fn shm_04_errors_of_single_requests_are_those_of_tcp() {
    let wrong_source = |near: &Driver, far: &Driver, pair: &mut Pair| {
        pair.responder
            .qp
            .post_recv(far, 3, &[pair.responder.region.sge(0, 64)]);
        let mut wrong = pair.initiator.region.sge(0, 8);
        wrong.stag = (wrong.stag.get() ^ 1).into();
        let header = request(Opcode::Send, 2, pair);
        pair.initiator.qp.post(near, header, &[wrong]);
    };
    let too_long = |near: &Driver, far: &Driver, pair: &mut Pair| {
        pair.responder
            .qp
            .post_recv(far, 3, &[pair.responder.region.sge(0, 7)]);
        let header = request(Opcode::Send, 2, pair);
        post(near, pair, header, Shape::Inline, b"12345678");
    };
    let wrong_sink = |near: &Driver, far: &Driver, pair: &mut Pair| {
        let mut wrong = pair.responder.region.sge(0, 64);
        wrong.stag = (wrong.stag.get() ^ 1).into();
        pair.responder.qp.post_recv(far, 3, &[wrong]);
        let header = request(Opcode::Send, 2, pair);
        post(near, pair, header, Shape::Inline, b"12345678");
    };
    let wrong_target = |near: &Driver, far: &Driver, pair: &mut Pair| {
        pair.responder
            .qp
            .post_recv(far, 3, &[pair.responder.region.sge(0, 64)]);
        let mut header = request(Opcode::Write, 2, pair);
        header.stag = (header.stag.get() ^ 1).into();
        post(near, pair, header, Shape::Inline, b"12345678");
    };
    let scenarios: [Scenario<'_>; 4] = [&wrong_source, &too_long, &wrong_sink, &wrong_target];
    for (n, scenario) in scenarios.into_iter().enumerate() {
        let [memory, tcp] = [true, false].map(|in_memory| {
            let (near, far, mut pair) = connected(in_memory);
            // The first message, after which Writes are direct.
            let into = pair.responder.region.sge(0, 64);
            pair.responder.qp.post_recv(&far, 0, &[into]);
            let header = request(Opcode::Send, 0, &pair);
            post(&near, &mut pair, header, Shape::Inline, b"first");
            assert_cqe(
                &pair.responder.recv_cq.await_completion(&far),
                0,
                WcStatus::Success,
            );
            assert_cqe(
                &pair.initiator.send_cq.await_completion(&near),
                0,
                WcStatus::Success,
            );
            scenario(&near, &far, &mut pair);
            near.await_event(EventKind::QpError, pair.initiator.qp.id);
            far.await_event(EventKind::QpError, pair.responder.qp.id);
            let sent = pair.initiator.send_cq.await_completion(&near);
            let received = pair.responder.recv_cq.await_completion(&far);
            assert_eq!((sent.cookie.get(), received.cookie.get()), (2, 3));
            assert_eq!(near.state(&pair.initiator.qp), QpState::Err);
            (sent.status, sent.vendor_error.get(), received.status)
        });
        assert_eq!(memory, tcp, "scenario {n}");
        assert_ne!(memory.0, WcStatus::Success as u8, "scenario {n}");
    }
}
