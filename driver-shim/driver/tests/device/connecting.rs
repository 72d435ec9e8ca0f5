//! Native connections over real TCP.

use urnic_device::registers;
use urnic_device::stream::attached;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendHeader};

use super::program::{DRIVER, LIMIT, Program, TestQp, start, status, until};
use urnic_bus::inproc::{InprocBus, Options};
use urnic_config::{Config, Llp};
use urnic_device::bus::Bus;
use urnic_driver::{AddressVector, Driver, QpAttr};
use urnic_process::gids::GidTable;
use urnic_testkit::{Wait, request};

/// Index of the loopback GID.
fn loopback() -> usize {
    let gids = DRIVER.gids();
    gids.iter()
        .position(|gid| gid.ip.is_loopback())
        .expect("a host has a loopback address")
}

fn name(qp: &TestQp) -> (u32, u32) {
    (qp.qp.qpn, qp.psn())
}

/// Sends one message in each direction.
fn exchange(program: &Program, a: &TestQp, b: &TestQp) {
    let mut memory = vec![0u8; 4096];
    let mr = program.register(&mut memory);
    memory[..5].copy_from_slice(b"hello");
    let at = |n: usize| memory.as_ptr().wrapping_add(n);
    b.receive(1, at(1000), 100, &mr);
    a.receive(2, at(2000), 100, &mr);
    a.send(3, at(0), 5, &mr);
    b.send(4, at(0), 4, &mr);
    let mut done: Vec<_> = (0..4).map(|_| program.completion()).collect();
    done.sort_by_key(|cqe| cqe.cookie.get());
    assert!(
        done.iter().all(|cqe| status(cqe) == Some(WcStatus::Success)),
        "{done:?}"
    );
    assert_eq!(done[0].byte_len.get(), 5);
    assert_eq!(done[1].byte_len.get(), 4);
    assert_eq!((done[0].label.get(), done[2].label.get()), (b.qp.qpn, a.qp.qpn));
    assert_eq!(
        (&memory[1000..1005], &memory[2000..2005]),
        (&b"hello"[..], &b"hell\0"[..])
    );
    program.driver.deregister(&mr).unwrap();
}

#[test]
fn two_queue_pairs_of_one_thread_exchange_messages() {
    let program = Program::new(&DRIVER);
    let (a, b) = (program.qp(), program.qp());
    assert_ne!(a.qp.qpn, b.qp.qpn);
    a.up(&DRIVER, loopback(), name(&b));
    assert!(!a.qp.gate_is_open());
    b.up(&DRIVER, loopback(), name(&a));
    exchange(&program, &a, &b);
    assert!(a.qp.gate_is_open() && b.qp.gate_is_open());
    assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Rts));
    assert!(program.received.events.lock().is_empty());
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.close();
}

#[test]
fn two_queue_pairs_exchange_messages_over_sctp() {
    let driver = start(Config {
        llp: Llp::Sctp,
        ..Config::default()
    });
    let program = Program::new(&driver);
    let (a, b) = (program.qp(), program.qp());
    a.up(&driver, loopback(), name(&b));
    b.up(&driver, loopback(), name(&a));
    exchange(&program, &a, &b);
    let way = |qp: &TestQp| qp.qp.status().unwrap().attached.get();
    assert_eq!((way(&a), way(&b)), (attached::SCTP, attached::SCTP));
    // A queue pair that is its own peer has no stream.
    let own = program.qp();
    own.up(&driver, loopback(), name(&own));
    assert!(own.qp.gate_is_open());
    assert_ne!(way(&own), attached::SCTP);
    for qp in [a, b, own] {
        qp.qp.destroy().unwrap();
    }
    program.close();
}

#[test]
fn every_gid_and_the_lid_reach_this_host() {
    let program = Program::new(&DRIVER);
    for gid in 0..DRIVER.gids().len() {
        let (a, b) = (program.qp(), program.qp());
        a.up(&DRIVER, gid, name(&b));
        b.up(&DRIVER, gid, name(&a));
        exchange(&program, &a, &b);
        a.qp.destroy().unwrap();
        b.qp.destroy().unwrap();
    }
    let (a, b) = (program.qp(), program.qp());
    for (us, peer) in [(&a, &b), (&b, &a)] {
        let av = AddressVector {
            dlid: DRIVER.lid(),
            port: 1,
            ..AddressVector::default()
        };
        let attr = QpAttr {
            av,
            ..us.attr(&DRIVER, 0, name(peer))
        };
        [QpState::Init, QpState::Rtr, QpState::Rts]
            .into_iter()
            .for_each(|state| us.to(state, &attr));
    }
    exchange(&program, &a, &b);
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.close();
}

#[test]
fn a_queue_pair_may_be_its_own_peer() {
    let program = Program::new(&DRIVER);
    let a = program.qp();
    a.up(&DRIVER, loopback(), name(&a));
    assert!(a.qp.gate_is_open());
    let mut memory = vec![7u8; 64];
    let mr = program.register(&mut memory);
    a.receive(1, memory.as_ptr().wrapping_add(32), 32, &mr);
    a.send(2, memory.as_ptr(), 16, &mr);
    let done = [program.completion(), program.completion()];
    assert!(
        done.iter().all(|cqe| status(cqe) == Some(WcStatus::Success)),
        "{done:?}"
    );
    a.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn sends_before_the_peers_rtr_are_transmitted_after_it() {
    let program = Program::new(&DRIVER);
    for higher_first in [false, true] {
        let (a, b) = (program.qp(), program.qp());
        let (first, second) = if (a.qp.qpn > b.qp.qpn) == higher_first {
            (&a, &b)
        } else {
            (&b, &a)
        };
        first.up(&DRIVER, loopback(), name(second));
        let mut memory = vec![1u8; 64];
        let mr = program.register(&mut memory);
        (0..8).for_each(|n| first.send(n, memory.as_ptr(), 1, &mr));
        assert_eq!(program.poll().map(|cqe| cqe.cookie.get()), None);
        let attr = second.attr(&DRIVER, loopback(), name(first));
        second.to(QpState::Init, &attr);
        (100..108).for_each(|n| second.receive(n, memory.as_ptr().wrapping_add(32), 1, &mr));
        second.to(QpState::Rtr, &attr);
        second.to(QpState::Rts, &attr);
        let mut done: Vec<_> = (0..16).map(|_| program.completion()).collect();
        assert!(
            done.iter().all(|cqe| status(cqe) == Some(WcStatus::Success)),
            "{done:?}"
        );
        done.sort_by_key(|cqe| cqe.cookie.get());
        assert_eq!(done[15].cookie.get(), 107);
        a.qp.destroy().unwrap();
        b.qp.destroy().unwrap();
        program.driver.deregister(&mr).unwrap();
    }
    program.close();
}

#[test]
fn writes_and_reads_transfer_data() {
    let program = Program::new(&DRIVER);
    let (a, b) = (program.qp(), program.qp());
    a.up(&DRIVER, loopback(), name(&b));
    b.up(&DRIVER, loopback(), name(&a));
    let mut memory = vec![0u8; 1 << 20];
    let mr = program.register(&mut memory);
    memory[..200_000].fill(9);
    let at = |n: usize| memory.as_ptr().wrapping_add(n);
    let there = |opcode, cookie| SendHeader {
        remote_offset: (at(300_000).addr() as u64).into(),
        stag: mr.stag.into(),
        ..request(opcode, cookie)
    };
    a.post_send(there(Opcode::Write, 1), at(0), 200_000, &mr);
    a.post_send(there(Opcode::Read, 2), at(600_000), 200_000, &mr);
    for (cookie, opcode) in [(1, WcOpcode::RdmaWrite), (2, WcOpcode::RdmaRead)] {
        let done = program.completion();
        assert_eq!(
            (done.cookie.get(), status(&done)),
            (cookie, Some(WcStatus::Success))
        );
        assert_eq!(WcOpcode::from_raw(done.opcode), Some(opcode));
    }
    assert!(memory[600_000..800_000].iter().all(|byte| *byte == 9));
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn an_armed_queue_is_notified_without_a_poll() {
    let program = Program::new(&DRIVER);
    let (a, b) = (program.qp(), program.qp());
    a.up(&DRIVER, loopback(), name(&b));
    b.up(&DRIVER, loopback(), name(&a));
    let mut memory = vec![0u8; 64];
    let mr = program.register(&mut memory);
    b.receive(1, memory.as_ptr(), 64, &mr);
    program.arm(0);
    a.send(2, memory.as_ptr(), 1, &mr);
    let mut wait = Wait::new(LIMIT);
    while program
        .received
        .completions
        .load(std::sync::atomic::Ordering::SeqCst)
        == 0
    {
        assert!(!wait.is_over(), "no notification");
        std::thread::yield_now();
    }
    let done = [program.completion(), program.completion()];
    assert!(
        done.iter().all(|cqe| status(cqe) == Some(WcStatus::Success)),
        "{done:?}"
    );
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn a_send_to_a_destroyed_peer_fails_and_others_are_flushed() {
    let program = Program::new(&DRIVER);
    let (a, removed) = (program.qp(), program.qp());
    let (qpn, psn) = name(&removed);
    removed.qp.destroy().unwrap();
    let mut memory = vec![0u8; 64];
    let mr = program.register(&mut memory);
    a.up(&DRIVER, loopback(), (qpn, psn));
    (0..3).for_each(|n| a.send(n, memory.as_ptr(), 1, &mr));
    a.receive(10, memory.as_ptr(), 1, &mr);
    let mut done: Vec<_> = (0..4).map(|_| program.completion()).collect();
    done.sort_by_key(|cqe| cqe.cookie.get());
    let statuses: Vec<_> = done.iter().map(status).collect();
    let flushed = Some(WcStatus::WrFlushErr);
    assert_eq!(statuses, [Some(WcStatus::RetryExcErr), flushed, flushed, flushed]);
    until(&program, "the queue pair is in the error state", || {
        a.state() == QpState::Err
    });
    // A request posted now is flushed, too.
    a.send(20, memory.as_ptr(), 1, &mr);
    assert_eq!(status(&program.completion()), flushed);
    a.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn sends_at_a_closed_gate_are_flushed_by_the_error_state() {
    let program = Program::new(&DRIVER);
    let (a, b) = (program.qp(), program.qp());
    let mut memory = vec![0u8; 64];
    let mr = program.register(&mut memory);
    a.up(&DRIVER, loopback(), name(&b));
    (0..3).for_each(|n| a.send(n, memory.as_ptr(), 1, &mr));
    a.to(QpState::Err, &QpAttr::default());
    for cookie in 0..3 {
        let done = program.completion();
        assert_eq!(
            (done.cookie.get(), status(&done)),
            (cookie, Some(WcStatus::WrFlushErr))
        );
    }
    assert_eq!(a.state(), QpState::Err);
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn a_queue_pair_that_was_reset_connects_again() {
    let program = Program::new(&DRIVER);
    let (a, b) = (program.qp(), program.qp());
    for _ in 0..3 {
        a.up(&DRIVER, loopback(), name(&b));
        b.up(&DRIVER, loopback(), name(&a));
        exchange(&program, &a, &b);
        for qp in [&a, &b] {
            qp.to(QpState::Reset, &QpAttr::default());
            assert!(!qp.qp.gate_is_open());
            assert_eq!(qp.state(), QpState::Init);
        }
    }
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    program.close();
}

#[test]
fn hundreds_of_queue_pairs_connect_at_once() {
    let program = Program::new(&DRIVER);
    let pairs: Vec<(TestQp, TestQp)> = (0..150).map(|_| (program.qp(), program.qp())).collect();
    let ports: std::collections::BTreeSet<u32> = pairs
        .iter()
        .flat_map(|(a, b)| [a.qp.qpn >> 8, b.qp.qpn >> 8])
        .collect();
    assert!(ports.len() >= 2, "300 queue pairs, 256 to a listener");
    pairs.iter().for_each(|(a, b)| a.up(&DRIVER, loopback(), name(b)));
    pairs.iter().for_each(|(a, b)| b.up(&DRIVER, loopback(), name(a)));
    pairs.iter().for_each(|(a, b)| exchange(&program, a, b));
    pairs.iter().for_each(|(a, b)| {
        a.qp.destroy().unwrap();
        b.qp.destroy().unwrap();
    });
    program.close();
}

#[test]
fn markers_and_crcs_are_used_as_configured() {
    for (markers, crc) in [(true, true), (true, false), (false, false)] {
        let mut config = Config::default();
        (config.mpa.markers, config.mpa.crc) = (markers, crc);
        let driver = start(config);
        let program = Program::new(&driver);
        let (a, b) = (program.qp(), program.qp());
        a.up(&driver, loopback(), name(&b));
        b.up(&driver, loopback(), name(&a));
        exchange(&program, &a, &b);
        a.qp.destroy().unwrap();
        b.qp.destroy().unwrap();
        program.close();
        driver.shutdown();
    }
}

#[test]
fn two_drivers_exchange_messages() {
    let (here, there) = (Program::new(&DRIVER), Program::new(&start(Config::default())));
    let (a, b) = (here.qp(), there.qp());
    assert_ne!(a.qp.qpn >> 8, b.qp.qpn >> 8, "each driver has its own listener");
    a.up(&DRIVER, loopback(), name(&b));
    b.up(&there.driver, loopback(), name(&a));
    let mut memory = (vec![5u8; 64], vec![0u8; 64]);
    let (mine, theirs) = (here.register(&mut memory.0), there.register(&mut memory.1));
    b.receive(1, memory.1.as_ptr(), 64, &theirs);
    a.send(2, memory.0.as_ptr(), 64, &mine);
    assert_eq!(status(&here.completion()), Some(WcStatus::Success));
    assert_eq!(status(&there.completion()), Some(WcStatus::Success));
    assert_eq!(memory.0, memory.1);
    // The peer closes the connection gracefully. Nothing was outstanding, so nothing fails before
    // the next send.
    b.qp.destroy().unwrap();
    there.driver.deregister(&theirs).unwrap();
    assert_eq!(a.state(), QpState::Rts);
    until(&here, "a send fails after the peer is destroyed", || {
        a.send(3, memory.0.as_ptr(), 1, &mine);
        status(&here.completion()) == Some(WcStatus::RetryExcErr)
    });
    a.qp.destroy().unwrap();
    here.driver.deregister(&mine).unwrap();
    here.close();
    let driver = there.driver.clone();
    there.close();
    driver.shutdown();
}

#[test]
fn dropping_a_driver_resets_its_device() {
    let bus = InprocBus::start(&GidTable::of_host(), Options::default()).unwrap();
    let is_ready = |bus: &dyn Bus| bus.read32(registers::STATUS) & registers::Status::READY.bits() != 0;
    let driver = Driver::start(bus.clone(), Config::default()).unwrap();
    assert!(is_ready(&*bus));
    driver.shutdown();
    drop(driver);
    // The driver's thread also has a reference, and ends later.
    let mut wait = Wait::new(LIMIT);
    while is_ready(&*bus) {
        assert!(!wait.is_over(), "the device was not reset");
        std::thread::yield_now();
    }
}
