//! Hostile input: at the listener, in full operation, and when the target's own process ends.

use rustix::process::{Pid, Signal};
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::random::Random;
use urnic_tests::served::in_process;
use urnic_tests::startup::CRC;
use urnic_tests::target_process::{LARGE, LARGE_SEED, Link, QpParams, ROLES, TargetProcess, filled, opcode};
use urnic_tests::ulpdu::{complaint, read_request, send, write};
use urnic_tests::wait::{TIME_LIMIT, descriptors, limit_descriptors, resident, until};

use super::rdmap::response_until_something_else;
use super::{ALL_FLUSHED, Scene};

#[test]
fn thousands_of_foreign_peers_cost_little_and_stall_none() {
    const KEY: &str = "4d504120 49442052 65712046 72616d65";
    or_skip!(urnic_tests::skip::descriptors(4096));
    let mut scene = or_skip!(Scene::start(&[]));
    let pid = scene.target.pid();
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    let before = resident(pid);
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut foreign_peers = std::collections::VecDeque::new();
    for number in 0..4000 {
        let mut foreign_peer = Peer::connect(scene.target.listener(qp));
        match number % 6 {
            0 | 1 => {}
            2 => foreign_peer.send(&hex(KEY)),
            3 => {
                let len = random.next() as usize % 300;
                foreign_peer.send(&random.bytes(len));
            }
            4 => foreign_peer.finish(),
            _ => foreign_peer.send(b"GET / HTTP/1.1\r\n\r\n"),
        }
        // Held open, as an attacker would; as many at a time as our own limits allow.
        foreign_peers.push_back(foreign_peer);
        if foreign_peers.len() > 1500 {
            foreign_peers.pop_front();
        }
        if number % 1000 == 999 {
            scene.continues();
        }
    }
    // A genuine peer connects while all of them are open.
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&request.to_bytes());
    urnic_tests::startup::Frame::read(&mut peer);
    peer.send_ulpdus(&[write(1, 0, b""), send(1, b"hello")]);
    assert_eq!(scene.target.received(qp), (0, 5));
    let grown = resident(pid).saturating_sub(before);
    assert!(grown < 16 * 1024, "{grown} KiB for foreign peers");
    // The device keeps a limited number of these connections, and none after their end.
    let most = descriptors(pid);
    assert!(most < 700, "{most} descriptors");
    foreign_peers.clear();
    let over = until(TIME_LIMIT, || (descriptors(pid) < 64).then_some(()));
    assert!(over.is_some(), "{} descriptors", descriptors(pid));
    scene.ends();
}

#[test]
fn a_process_accepts_once_it_has_descriptors_again() {
    or_skip!(in_process(
        "the descriptors are those of the process that has the device"
    ));
    let mut scene = or_skip!(Scene::start(&[]));
    let pid = scene.target.pid();
    let (qp, request) = scene.target.awaits_request(&QpParams::default());
    limit_descriptors(pid, Some(3));
    let mut peer = Peer::connect(scene.target.listener(qp));
    peer.send(&request.to_bytes());
    let complaints =
        |target: &TargetProcess| target.output().matches("connections cannot be accepted").count();
    let noticed = until(TIME_LIMIT, || (complaints(&scene.target) > 0).then_some(()));
    assert!(noticed.is_some(), "{}", scene.target.output());
    scene.continues();
    limit_descriptors(pid, None);
    urnic_tests::startup::Frame::read(&mut peer);
    peer.send_ulpdus(&[write(1, 0, b""), send(1, b"hello")]);
    assert_eq!(scene.target.received(qp), (0, 5));
    // The device reported it once, and retried at intervals: a loop would have reported it
    // thousands of times.
    let count = complaints(&scene.target);
    assert!(count < 10, "{count} complaints");
    scene.ends();
}

#[test]
fn random_streams_do_not_harm_other_connections() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for number in 0..40 {
        let mut link = scene.target.link(ROLES[number % 2]);
        let len = 1 + random.next() as usize % 3000;
        let bytes = random.bytes(len);
        link.peer.send(&bytes);
        link.peer.finish();
        // A Terminate, or nothing; then the end.
        let (answer, _) = link.peer.read_to_end();
        assert!(answer.len() <= 80, "{answer:02x?}");
        for _ in 0..4 {
            assert_ne!(scene.target.completion(link.qp).status, 0);
        }
    }
    scene.is_pristine();
    drain_events(&mut scene.target);
    scene.ends();
}

/// FPDUs with good CRCs and random content.
#[test]
fn random_fpdus_do_not_harm_other_connections() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut random = Random(0xdead_beef_cafe_f00d);
    for number in 0..80 {
        let mut link = scene.target.link(ROLES[number % 2]);
        let len = random.next() as usize % 200;
        let mut ulpdu = random.bytes(len);
        // Often valid up to an STag, a queue or an MSN.
        let control = random.next();
        if control & 1 == 1 && ulpdu.len() > 2 {
            ulpdu[0] = ulpdu[0] & 0xc0 | 1;
            ulpdu[1] = ulpdu[1] & 0x0f | 0x40;
        }
        if control & 2 == 2 && ulpdu.len() >= 18 {
            ulpdu[2..10].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, control as u8 >> 6]);
        }
        link.peer.send_ulpdus(&[ulpdu.clone(), send(7, b"never in turn")]);
        link.peer.finish();
        let (answer, _) = link.peer.read_to_end();
        assert!(answer.len() <= 200, "{answer:02x?} to {ulpdu:02x?}");
        for _ in 0..4 {
            scene.target.completion(link.qp);
        }
    }
    scene.is_pristine();
    drain_events(&mut scene.target);
    scene.ends();
}

/// Without CRCs, so that data may be read directly to its place: wrong lengths, wrong contents.
#[test]
fn random_fpdus_without_crc_do_not_harm_other_connections() {
    let mut scene = or_skip!(Scene::with(0));
    let mut random = Random(0x0123_4567_89ab_cdef);
    let params = QpParams {
        flags: 0,
        ..QpParams::default()
    };
    for number in 0..40 {
        let mut link = scene.target.link_as(ROLES[number % 2], &params, 0);
        let mut bytes = random.bytes(6000);
        let kind = [0x41_u8, 0xc1, 0x01, 0x81][number % 4];
        bytes[..4].copy_from_slice(&[(number % 0x30) as u8, 0, kind, 0x40 | (number % 13) as u8]);
        link.peer.send(&bytes);
        link.peer.finish();
        link.peer.read_to_end();
        for _ in 0..4 {
            scene.target.completion(link.qp);
        }
    }
    scene.is_pristine();
    drain_events(&mut scene.target);
    scene.ends();
}

/// Takes the events that came, and those that a device in another process sends late.
fn drain_events(target: &mut TargetProcess) {
    loop {
        while !target.is_quiet() {
            target.event();
        }
        target.is_healthy();
        if target.is_quiet() {
            return;
        }
    }
}

#[test]
fn sec_10_half_fpdus_cost_bounded_memory() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut links: Vec<Link> = (0..64)
        .map(|number| scene.target.link(ROLES[number % 2]))
        .collect();
    let pid = scene.target.pid();
    let before = resident(pid);
    // Each FPDU has a length field of 64 KiB, and most of its bytes are sent.
    for link in &mut links {
        link.peer.send(&[0xff; 60_000]);
    }
    scene.continues();
    let grown = resident(pid).saturating_sub(before);
    // Less than half a MiB each.
    assert!(grown < 32 * 1024, "{grown} KiB for {} half FPDUs", links.len());
    drop(links);
    scene.target.is_healthy();
    scene.target.quits();
}

#[test]
fn sec_06_a_peer_that_never_reads_costs_bounded_memory() {
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        ird: 16,
        ..QpParams::default()
    };
    let (stag, at) = (scene.target.stag("big"), scene.target.address("large"));
    let mut links: Vec<Link> = (0..16)
        .map(|number| scene.target.link_as(ROLES[number % 2], &params, CRC))
        .collect();
    let pid = scene.target.pid();
    let before = resident(pid);
    for link in &mut links {
        let requests: Vec<_> = (1..=16).map(|msn| read_request(msn, stag, at, LARGE)).collect();
        link.peer.send_ulpdus(&requests);
    }
    scene.continues();
    let grown = resident(pid).saturating_sub(before);
    assert!(grown < 32 * 1024, "{grown} KiB");
    // The memory is freed at the end.
    scene.target.quits();
}

/// Each of many peers uses up the Reads that it may request, and receives no answer. Another peer's
/// Reads are answered meanwhile, one after the other.
#[test]
fn sec_06_exhausted_reads_of_one_peer_do_not_affect_others() {
    const LEN: u32 = 5000;
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        ird: 2,
        ..QpParams::default()
    };
    let content = filled(LARGE_SEED, LARGE as usize);
    let (stag, at) = (scene.target.stag("big"), scene.target.address("large"));
    let mut greedy: Vec<Link> = (0..8)
        .map(|number| scene.target.link_as(ROLES[number % 2], &params, CRC))
        .collect();
    for link in &mut greedy {
        link.peer
            .send_ulpdus(&[1, 2].map(|msn| read_request(msn, stag, at, LARGE)));
    }
    let mut modest = scene.target.link_as(ROLES[0], &params, CRC);
    for msn in 1..=20 {
        let from = msn as usize * 7001;
        let request = read_request(msn, stag, at + from as u64, LEN);
        modest.peer.send_ulpdus(&[request]);
        let mut came = 0;
        while came < LEN as usize {
            let ulpdu = modest.peer.ulpdu();
            assert_eq!(ulpdu[1], 0x42, "a Read Response");
            assert!(
                content[from + came..].starts_with(&ulpdu[14..]),
                "Read {msn} at {came}"
            );
            came += ulpdu.len() - 14;
        }
        scene.others_continue();
    }
    // They were used up indeed: one more ends that connection.
    for link in &mut greedy {
        let third = read_request(3, stag, at, LARGE);
        link.peer.send_ulpdus(std::slice::from_ref(&third));
        let (came, answer) = response_until_something_else(link, 0, &content);
        assert!(came < LARGE as usize);
        assert_eq!(answer, complaint(0x1202, &third));
        scene.is_over(link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    drop(modest);
    scene.target.is_healthy();
    scene.target.quits();
}

#[test]
fn a_killed_program_is_noticed_although_its_children_live() {
    for role in ROLES {
        let mut target = or_skip!(TargetProcess::start(&[]));
        let mut before = target.link(role);
        let answer = target.command("fork");
        let children: Vec<u32> = answer
            .split_whitespace()
            .filter_map(|word| u32::from_str_radix(word.split_once('=')?.1, 16).ok())
            .collect();
        assert_eq!(children.len(), 3, "{answer}");
        // The target continues as before, with connections from before and from now.
        before.peer.send_ulpdus(&[send(1, b"hello")]);
        assert_eq!(target.received(before.qp), (0, 5));
        let mut since = target.link(role);
        let from = target.address("large");
        // Amid a transfer.
        target.posts(since.qp, opcode::SEND, 1, "big", from, LARGE.into(), (0, 0));
        assert_eq!(since.peer.ulpdu()[..2], [0x01, 0x43]);
        target.is_healthy();

        target.program().signal(Signal::KILL);
        assert_ne!(ended(&mut since), None);
        assert_ne!(ended(&mut before), None);
        for child in &children {
            assert!(
                urnic_tests::wait::alive(*child),
                "child {child} should have outlived it"
            );
            let pid = i32::try_from(*child)
                .ok()
                .and_then(Pid::from_raw)
                .expect("a process");
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }
}

/// The end of a connection, after any data.
fn ended(link: &mut Link) -> Option<End> {
    Some(link.peer.read_to_end().1)
}

#[test]
fn hundreds_of_failed_queue_pairs_leave_no_resources() {
    let mut scene = or_skip!(Scene::start(&[]));
    let pid = scene.target.pid();
    let round = |scene: &mut Scene| {
        for number in 0..50 {
            let link = scene.target.link(ROLES[number % 2]);
            let qp = link.qp;
            let bad = send(9, b"hello");
            scene.breaks(link, 0x1203, &[bad], &ALL_FLUSHED);
            scene.target.destroys(qp);
        }
        let settled = until(TIME_LIMIT, || (descriptors(pid) < 64).then_some(()));
        assert!(settled.is_some(), "{} descriptors", descriptors(pid));
    };
    round(&mut scene);
    let before = resident(pid);
    for _ in 0..3 {
        round(&mut scene);
    }
    let grown = resident(pid).saturating_sub(before);
    assert!(grown < 512, "{grown} KiB for 150 failures");
    scene.ends();
}
