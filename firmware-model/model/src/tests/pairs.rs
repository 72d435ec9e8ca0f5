//! Two devices over real TCP.

use super::{one_sided, send_between};
use crate::Counter;
use crate::testing::mock::{Driver, End, Pair, assert_cqe, wait_for};
use std::net::SocketAddr;
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe;

#[test]
fn a_send_arrives_in_the_posted_receive() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    near.arena.write(initiator.region.iova, b"hello, RNIC");
    responder.qp.post_recv(&far, 77, &[responder.region.sge(0, 64)]);
    initiator.qp.post_send(&near, 42, &[initiator.region.sge(0, 11)]);
    assert_cqe(&initiator.send_cq.await_completion(&near), 42, WcStatus::Success);
    let received = responder.recv_cq.await_idly();
    assert_cqe(&received, 77, WcStatus::Success);
    assert_eq!(received.byte_len.get(), 11);
    assert_eq!(received.opcode, WcOpcode::Recv as u8);
    assert_eq!(received.label.get(), 0xbeef);
    assert_eq!(received.qid.get(), responder.qp.id);
    assert_eq!(far.arena.read(responder.region.iova, 11), b"hello, RNIC");
    far.await_event(EventKind::FirstFpdu, responder.qp.id);
    assert_eq!(initiator.qp.sq_consumer(), initiator.qp.sq_producer());
    assert_eq!(
        (
            near.counter(Counter::TxMessages),
            far.counter(Counter::RxMessages)
        ),
        (1, 1)
    );
}

/// Both directions, sizes around all limits, several outstanding.
#[test]
fn messages_of_all_sizes_go_both_ways_in_order() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    let sizes = [
        0u32,
        1,
        3,
        4,
        1442,
        1443,
        2048,
        2049,
        16 << 10,
        64768,
        70_000,
        1 << 19,
    ];
    for (cookie, size) in (0..).zip(sizes) {
        send_between((&near, &mut initiator), (&far, &mut responder), cookie, size);
        send_between((&far, &mut responder), (&near, &mut initiator), cookie, size);
    }
}

/// The target's program makes no calls: the device's background thread serves the peer.
#[test]
fn writes_and_reads_are_served_by_a_passive_target() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        responder,
    } = Pair::connect(&near, &far);
    let bytes: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    near.arena.write(initiator.region.iova, &bytes);
    let from = initiator.region.sge(0, bytes.len() as u32);
    let write = one_sided(wqe::Opcode::Write, 1, &responder);
    initiator.qp.post(&near, write, &[from]);
    assert_cqe(&initiator.send_cq.await_idly(), 1, WcStatus::Success);
    let into = initiator.region.sge(500_000, bytes.len() as u32);
    let read = one_sided(wqe::Opcode::Read, 2, &responder);
    initiator.qp.post(&near, read, &[into]);
    let done = initiator.send_cq.await_idly();
    assert_cqe(&done, 2, WcStatus::Success);
    assert_eq!(done.byte_len.get(), bytes.len() as u32);
    assert_eq!(far.arena.read(responder.region.iova, bytes.len()), bytes);
    assert_eq!(
        near.arena.read(initiator.region.iova + 500_000, bytes.len()),
        bytes
    );
}

#[test]
fn a_write_outside_of_the_region_ends_both_queue_pairs() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    initiator.qp.post_recv(&near, 8, &[initiator.region.sge(0, 8)]);
    responder.qp.post_recv(&far, 9, &[responder.region.sge(0, 8)]);
    let mut write = one_sided(wqe::Opcode::Write, 1, &responder);
    write.remote_offset = (responder.region.iova + (1 << 20) - 4).into();
    initiator.qp.post(&near, write, &[initiator.region.sge(0, 8)]);
    near.await_event(EventKind::QpError, initiator.qp.id);
    far.await_event(EventKind::QpError, responder.qp.id);
    assert_cqe(&responder.recv_cq.await_idly(), 9, WcStatus::WrFlushErr);
    assert_cqe(&initiator.recv_cq.await_idly(), 8, WcStatus::WrFlushErr);
    assert_eq!(near.state(&initiator.qp), QpState::Err);
    // What is posted in the error state is flushed, sends and receives: by the thread that rings,
    // or by the background thread if that is running the queue pair for the end of the stream.
    while initiator.send_cq.poll().is_some() {}
    initiator.qp.post_send(&near, 21, &[initiator.region.sge(0, 1)]);
    assert_cqe(&initiator.send_cq.await_idly(), 21, WcStatus::WrFlushErr);
    initiator.qp.post_recv(&near, 22, &[initiator.region.sge(0, 1)]);
    assert_cqe(&initiator.recv_cq.await_idly(), 22, WcStatus::WrFlushErr);
}

/// Design §6: a completed send arrives even if the queue pair is destroyed right after.
#[test]
fn completed_data_arrives_after_the_queue_pair_is_destroyed() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    // The initiator's output must arrive though it never reads its input.
    responder
        .qp
        .post_recv(&far, 0, &[responder.region.sge(0, 1 << 20)]);
    initiator.qp.post_send(&near, 0, &[initiator.region.sge(0, 1)]);
    assert_cqe(&responder.recv_cq.await_completion(&far), 0, WcStatus::Success);
    let bytes: Vec<u8> = (0..400_000u32).map(|i| (i % 253) as u8).collect();
    near.arena.write(initiator.region.iova, &bytes);
    responder
        .qp
        .post_recv(&far, 1, &[responder.region.sge(0, 1 << 20)]);
    let len = bytes.len() as u32;
    initiator.qp.post_send(&near, 1, &[initiator.region.sge(0, len)]);
    let mut completed = 0;
    while completed < 2 {
        let cqe = initiator.send_cq.await_completion(&near);
        assert_cqe(&cqe, completed, WcStatus::Success);
        completed += 1;
    }
    near.on(Opcode::DestroyQp, initiator.qp.id).unwrap();
    let received = responder.recv_cq.await_idly();
    assert_cqe(&received, 1, WcStatus::Success);
    assert_eq!(far.arena.read(responder.region.iova, bytes.len()), bytes);
}

#[test]
fn completed_data_arrives_after_the_process_ends() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    responder
        .qp
        .post_recv(&far, 1, &[responder.region.sge(0, 1 << 20)]);
    initiator
        .qp
        .post_send(&near, 1, &[initiator.region.sge(0, 900_000)]);
    assert_cqe(&initiator.send_cq.await_completion(&near), 1, WcStatus::Success);
    near.device.shutdown();
    drop(near);
    let received = responder.recv_cq.await_idly();
    assert_cqe(&received, 1, WcStatus::Success);
    assert_eq!(received.byte_len.get(), 900_000);
}

#[test]
fn a_reset_queue_pair_begins_anew() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair { initiator, responder } = Pair::connect(&near, &far);
    let mut qp = initiator.qp;
    // A reset discards posted requests.
    qp.post_recv(&near, 1, &[initiator.region.sge(0, 8)]);
    near.modify(&qp, QpState::Reset).unwrap();
    assert_eq!(near.state(&qp), QpState::Reset);
    far.await_event(EventKind::PeerClosed, responder.qp.id);
    near.ready(&qp);
    let mut peer = End::new(&far);
    let (lid, port) = far.listen("127.0.0.1:0".parse().unwrap(), 1).unwrap();
    let sid = near
        .connect(SocketAddr::new([127, 0, 0, 1].into(), port))
        .unwrap();
    near.await_event(EventKind::StreamConnected, sid);
    let accepted = far.await_event(EventKind::StreamAccepted, lid);
    far.attach(accepted.data.get() as u32, &peer.qp, false).unwrap();
    near.attach(sid, &qp, true).unwrap();
    peer.qp.post_recv(&far, 3, &[peer.region.sge(0, 8)]);
    qp.post_send(&near, 4, &[initiator.region.sge(0, 8)]);
    assert_cqe(&peer.recv_cq.await_completion(&far), 3, WcStatus::Success);
    let mut recv_cq = initiator.recv_cq;
    assert!(recv_cq.poll().is_none());
}

/// An FPDU may come in one segment with the end of start-up (MPA-S-16): it waits in the stream for
/// the attachment.
#[test]
fn mpa_s_16_data_before_the_attachment_is_not_lost() {
    let (near, far) = (Driver::start(), Driver::start());
    let (pair, calling, answering) = Pair::prepare(&near, &far);
    let Pair {
        mut initiator,
        mut responder,
    } = pair;
    near.attach(calling, &initiator.qp, true).unwrap();
    near.arena.write(initiator.region.iova, b"early");
    initiator.qp.post_send(&near, 1, &[initiator.region.sge(0, 5)]);
    assert_cqe(&initiator.send_cq.await_completion(&near), 1, WcStatus::Success);
    responder.qp.post_recv(&far, 2, &[responder.region.sge(0, 5)]);
    far.attach(answering, &responder.qp, false).unwrap();
    assert_cqe(&responder.recv_cq.await_idly(), 2, WcStatus::Success);
    assert_eq!(far.arena.read(responder.region.iova, 5), b"early");
}

/// The policy of InfiniBand: an empty receive queue stalls the stream, and a posted receive resumes
/// it.
#[test]
fn a_stalled_stream_continues_when_receives_are_posted() {
    let (near, far) = (Driver::start(), Driver::start());
    let (pair, calling, answering) = Pair::prepare(&near, &far);
    let Pair {
        mut initiator,
        mut responder,
    } = pair;
    near.attach(calling, &initiator.qp, true).unwrap();
    let flags = attach::CRC | attach::STALL_ON_EMPTY_RQ;
    far.attach_with(answering, &responder.qp, flags).unwrap();
    for cookie in 0..100 {
        initiator
            .qp
            .post_send(&near, cookie, &[initiator.region.sge(0, 16 << 10)]);
    }
    wait_for("a stall", || (far.counter(Counter::RxStalls) > 0).then_some(()));
    for cookie in 0..100 {
        let into = responder.region.sge(0, 1 << 20);
        responder.qp.post_recv(&far, cookie, &[into]);
        assert_cqe(&responder.recv_cq.await_idly(), cookie, WcStatus::Success);
        assert_cqe(&initiator.send_cq.await_idly(), cookie, WcStatus::Success);
    }
}

/// VRB-Q-03, DDP-T-05: what was posted before the graceful close still goes out, then FIN both
/// ways.
#[test]
fn vrb_q_03_a_graceful_close_flushes_and_ends_in_both() {
    let (near, far) = (Driver::start(), Driver::start());
    let Pair {
        mut initiator,
        mut responder,
    } = Pair::connect(&near, &far);
    for cookie in 0..20 {
        let into = responder.region.sge(0, 1 << 20);
        responder.qp.post_recv(&far, cookie, &[into]);
        initiator
            .qp
            .post_send(&near, cookie, &[initiator.region.sge(0, 50_000)]);
    }
    near.modify(&initiator.qp, QpState::Sqd).unwrap();
    for cookie in 0..20 {
        assert_cqe(&responder.recv_cq.await_idly(), cookie, WcStatus::Success);
        assert_cqe(&initiator.send_cq.await_idly(), cookie, WcStatus::Success);
    }
    far.await_event(EventKind::PeerClosed, responder.qp.id);
    far.modify(&responder.qp, QpState::Sqd).ok();
    near.await_event(EventKind::Closed, initiator.qp.id);
    let streams = || {
        (
            near.device.core().descriptor_numbers().len(),
            far.device.core().descriptor_numbers().len(),
        )
    };
    wait_for("both ends closed", || (streams() == (2, 2)).then_some(()));
}

/// Many queue pairs, several threads at each, and some that go away under them.
#[test]
fn queue_pairs_do_not_disturb_one_another() {
    let (near, far) = (Driver::start(), Driver::start());
    let pairs: Vec<Pair> = (0..8).map(|_| Pair::connect(&near, &far)).collect();
    let (near, far) = (&near, &far);
    std::thread::scope(|scope| {
        for (number, pair) in pairs.into_iter().enumerate() {
            let Pair {
                mut initiator,
                mut responder,
            } = pair;
            let rounds = if number % 4 == 3 { 20 } else { 200u64 };
            let sge = responder.region.sge(0, 8);
            responder.qp.post_recv(far, 0, &[sge]);
            scope.spawn(move || {
                for cookie in 0..rounds {
                    let bytes = (cookie << 8 | number as u64).to_le_bytes();
                    near.arena.write(initiator.region.iova, &bytes);
                    initiator
                        .qp
                        .post_recv(near, cookie, &[initiator.region.sge(64, 8)]);
                    initiator
                        .qp
                        .post_send(near, cookie, &[initiator.region.sge(0, 8)]);
                    let echoed = initiator.recv_cq.await_completion(near);
                    assert_cqe(&echoed, cookie, WcStatus::Success);
                    assert_eq!(near.arena.read(initiator.region.iova + 64, 8), bytes);
                    assert_cqe(
                        &initiator.send_cq.await_completion(near),
                        cookie,
                        WcStatus::Success,
                    );
                }
                near.on(Opcode::DestroyQp, initiator.qp.id).unwrap();
            });
            scope.spawn(move || {
                for cookie in 0..rounds {
                    // Half of the threads poll, the others only read the ring.
                    let received = if number % 2 == 0 {
                        responder.recv_cq.await_completion(far)
                    } else {
                        responder.recv_cq.await_idly()
                    };
                    assert_cqe(&received, cookie, WcStatus::Success);
                    responder.qp.post_recv(far, cookie + 1, &[sge]);
                    responder.qp.post_send(far, cookie, &[sge]);
                    assert_cqe(
                        &responder.send_cq.await_completion(far),
                        cookie,
                        WcStatus::Success,
                    );
                }
            });
        }
    });
}
