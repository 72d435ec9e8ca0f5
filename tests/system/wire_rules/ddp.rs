//! DDP (RFC 5041; conformance §4). Codes as the Terminate has them: layer and error type, then the
//! code.

use urnic_tests::or_skip;
use urnic_tests::peer::hex;
use urnic_tests::startup::CRC;
use urnic_tests::target_process::{
    ARENA_SEED, LARGE_SEED, Link, PAGE, QpParams, ROLES, Role, TargetProcess, filled, opcode, status,
};
use urnic_tests::ulpdu::{invalidating, read_request, send, tagged, untagged, write};

use super::{ALL_FLUSHED, INVALIDATION_REFUSED, Scene};

/// Completions of receives of which one took an invalid message, and the others none.
fn first(status: u64) -> Vec<(u64, u64)> {
    [&[(0, status)], &ALL_FLUSHED[1..]].concat()
}

// Headers.

#[test]
fn ddp_h_01_reserved_bits_are_ignored() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let (stag, at) = (target.stag("all"), target.buffer());
        link.peer.send_ulpdus(&[
            tagged(0xc1 | 0x3c, 0x40 | 0x30, stag, at, b"reserved"),
            untagged(0x41 | 0x3c, 0x43 | 0x30, 0, 1, 0, b"hello"),
        ]);
        assert_eq!(target.received(link.qp), (0, 5));
        assert_eq!(target.dump("arena", PAGE, 8), b"reserved");
    }
    target.quits();
}

#[test]
fn ddp_h_05_another_message_type_does_not_continue_one() {
    let mut scene = or_skip!(Scene::start(&[]));
    scene.refuses(
        0x0206,
        &[
            untagged(0x01, 0x43, 0, 1, 0, b"abcd"),
            untagged(0x41, 0x45, 0, 1, 4, b"efgh"),
        ],
    );
    scene.ends();
}

#[test]
fn ddp_h_06_msns_begin_at_one_and_go_on_by_one() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        for msn in 1..=4 {
            target.sends(link.qp, 9, 1);
            let ulpdu = link.peer.ulpdu();
            assert_eq!(ulpdu[10..14], u32::to_be_bytes(msn));
            link.peer.send_ulpdus(&[send(msn, b"")]);
            target.completes(
                link.qp,
                &[(9, status::SUCCESS), (u64::from(msn) - 1, status::SUCCESS)],
            );
        }
    }
    target.quits();
}

// Tagged buffers: RFC 5041 §7.1, error type 1.

#[test]
fn ddp_v_01_a_write_to_no_stag_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let at = scene.target.buffer();
    let all = scene.target.stag("all");
    // Of another index, of another key, and STags that were never allocated.
    for stag in [scene.target.no_stag(), all ^ 1, 0, u32::MAX, 1] {
        scene.refuses(0x1100, &[write(stag, at, b"abcd")]);
    }
    scene.ends();
}

#[test]
fn ddp_v_01_a_write_to_a_deregistered_stag_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("write"), scene.target.buffer());
    scene.target.deregisters("write");
    scene.refuses(0x1100, &[write(stag, at, b"abcd")]);
    scene.ends();
}

#[test]
fn ddp_v_02_a_write_out_of_bounds_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    let page = PAGE as u64;
    for (to, len) in [
        (at + page - 3, 4),
        (at - 1, 4),
        (at + page, 1),
        (at - page, 4096),
        (at, 4097),
        (0, 1),
    ] {
        scene.refuses(0x1101, &[write(stag, to, &vec![0xee; len])]);
    }
    let zero = scene.target.stag("zero");
    for (to, len) in [(page, 1), (page - 1, 2), (at, 4)] {
        scene.refuses(0x1101, &[write(zero, to, &vec![0xee; len])]);
    }
    scene.ends();
}

#[test]
fn ddp_v_02_segments_within_bounds_stay_placed() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
        let mut link = scene.target.link(role);
        let ulpdus = [
            tagged(0x81, 0x40, stag, at + 4000, &[1; 90]),
            tagged(0xc1, 0x40, stag, at + 4090, &[2; 7]),
        ];
        let bytes = link.peer.framed(&ulpdus);
        scene.breaks_by(&mut link, 0x1101, &bytes, &ulpdus[1], &ALL_FLUSHED);
        let mut expected = filled(ARENA_SEED, 3 * PAGE);
        expected[PAGE + 4000..PAGE + 4090].fill(1);
        assert!(scene.target.arena() == expected);
        scene.target.command(&format!("fill arena {ARENA_SEED:x}"));
    }
    scene.ends();
}

#[test]
fn ddp_v_02_all_of_the_buffer_may_be_written() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let (all, zero, at) = (target.stag("all"), target.stag("zero"), target.buffer());
        let last = PAGE as u64 - 1;
        link.peer.send_ulpdus(&[
            write(all, at, &[1; PAGE]),
            write(zero, last, b"z"),
            write(zero, 0, b"a"),
            send(1, b""),
        ]);
        assert_eq!(target.received(link.qp), (0, 0));
        let mut expected = filled(ARENA_SEED, 3 * PAGE);
        expected[PAGE..2 * PAGE].fill(1);
        (expected[PAGE], expected[2 * PAGE - 1]) = (b'a', b'z');
        assert!(target.arena() == expected);
    }
    target.quits();
}

#[test]
fn ddp_v_03_a_write_to_another_protection_domain_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("foreign"), scene.target.buffer());
    scene.refuses(0x1102, &[write(stag, at, b"abcd")]);
    scene.ends();
}

#[test]
fn ddp_v_04_a_write_that_wraps_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for name in ["all", "zero"] {
        let stag = scene.target.stag(name);
        for (to, len) in [(u64::MAX, 2), (u64::MAX - 99, 200)] {
            scene.refuses(0x1103, &[write(stag, to, &vec![0xee; len])]);
        }
    }
    scene.ends();
}

#[test]
fn ddp_v_05_a_tagged_segment_of_another_version_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    for control in [0xc0, 0xc2, 0xc3] {
        scene.refuses(0x1104, &[tagged(control, 0x40, stag, at, b"abcd")]);
    }
    scene.ends();
}

// Untagged buffers: error type 2.

#[test]
fn ddp_v_06_an_untagged_segment_for_no_queue_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for qn in [4, 9, 0x8000_0000, u32::MAX] {
        scene.refuses(0x1201, &[untagged(0x41, 0x43, qn, 1, 0, b"hello")]);
    }
    scene.ends();
}

#[test]
fn ddp_v_06_the_terminate_is_the_vector() {
    // Vector F-TERM-QN-121.
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        link.peer.send_ulpdus(&[untagged(0x41, 0x43, 9, 1, 0, b"hello")]);
        assert_eq!(
            link.peer.read_bytes(48),
            hex(
                "002a4147 00000000 00000002 00000001 00000000 1201c000 00174143 00000000 00000009 00000001 00000000 \
                 0c131cbe"
            )
        );
    }
    target.quits();
}

#[test]
fn ddp_v_07_a_send_without_a_receive_times_out() {
    // rnr_retry 0: native connections let a Send wait at most as long as the sender's retries
    // would.
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        rnr_retry: 0,
        receives: 1,
        ..QpParams::default()
    };
    for role in ROLES {
        let link = scene.target.link_as(role, &params, CRC);
        let ulpdus = [send(1, b"one"), send(2, b"two")];
        scene.breaks(link, 0x1202, &ulpdus, &[(0, status::SUCCESS)]);
    }
    scene.ends();
}

#[test]
fn ddp_v_07_a_send_waits_for_a_receive_and_is_not_lost() {
    // rnr_retry 7: for ever.
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        receives: 1,
        ..QpParams::default()
    };
    for role in ROLES {
        let Link { qp, mut peer } = scene.target.link_as(role, &params, CRC);
        peer.send_ulpdus(&[send(1, b"one"), send(2, &[2; 3000]), send(3, b"")]);
        assert_eq!(scene.target.received(qp), (0, 3));
        scene.continues();
        assert!(scene.target.has_no_completion(qp));
        for (id, len) in [(1, 3000), (2, 0)] {
            scene.target.receives(qp, id);
            assert_eq!(scene.target.received(qp), (id, len));
        }
    }
    scene.ends();
}

#[test]
fn ddp_v_08_an_msn_out_of_turn_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for msn in [0, 2, 5, u32::MAX] {
        scene.refuses(0x1203, &[send(msn, b"hello")]);
    }
    scene.ends();
}

#[test]
fn ddp_v_08_a_repeated_msn_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    scene.refuses_after(
        0x1203,
        &[send(1, b"hello"), send(1, b"hello")],
        &first(status::SUCCESS),
    );
    scene.ends();
}

#[test]
fn ddp_v_09_an_mo_outside_the_buffer_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for mo in [1, 4096, 0x1_0000, u32::MAX] {
        scene.refuses(0x1204, &[untagged(0x41, 0x43, 0, 1, mo, b"hello")]);
    }
    scene.ends();
}

#[test]
fn ddp_s_08_a_gap_or_an_overlap_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for mo in [8, 3, 0] {
        scene.refuses(
            0x1204,
            &[
                untagged(0x01, 0x43, 0, 1, 0, b"abcd"),
                untagged(0x41, 0x43, 0, 1, mo, b"efgh"),
            ],
        );
    }
    scene.ends();
}

#[test]
fn ddp_v_10_a_send_longer_than_its_buffer_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let too_long = first(status::LOC_LEN_ERR);
    scene.refuses_after(0x1205, &[send(1, &[0x33; 4097])], &too_long);
    // The last segment is at fault.
    let ulpdus = [
        untagged(0x01, 0x43, 0, 1, 0, &[1; 4096]),
        untagged(0x41, 0x43, 0, 1, 4096, b"!"),
    ];
    scene.refuses_after(0x1205, &ulpdus, &too_long);
    scene.ends();
}

#[test]
fn ddp_v_10_no_byte_is_placed_beyond_the_receive() {
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        receives: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let link = scene.target.link_as(role, &params, CRC);
        scene.target.receives_at(link.qp, 5, 100, 50);
        scene.breaks(link, 0x1205, &[send(1, &[0x33; 51])], &[(5, status::LOC_LEN_ERR)]);
        assert_eq!(scene.target.dump("inbox", 0, 200), [0; 200]);
    }
    scene.ends();
}

#[test]
fn ddp_v_11_an_untagged_segment_of_another_version_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for control in [0x40, 0x42, 0x43] {
        scene.refuses(0x1206, &[untagged(control, 0x43, 0, 1, 0, b"hello")]);
    }
    scene.ends();
}

#[test]
fn ddp_v_14_a_write_without_the_right_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let at = scene.target.buffer();
    for name in ["read", "local"] {
        scene.refuses(0x0102, &[write(scene.target.stag(name), at, b"abcd")]);
    }
    // The queue pair's own rights count as well: reading alone.
    let params = QpParams {
        access: 4,
        ..QpParams::default()
    };
    let stag = scene.target.stag("all");
    for role in ROLES {
        let link = scene.target.link_as(role, &params, CRC);
        scene.breaks(link, 0x0102, &[write(stag, at, b"abcd")], &ALL_FLUSHED);
    }
    scene.ends();
}

#[test]
fn ddp_v_15_of_two_faults_the_first_check_is_reported() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (no_stag, foreign) = (scene.target.no_stag(), scene.target.stag("foreign"));
    // DV, before RV, opcode, STag.
    scene.refuses(0x1104, &[tagged(0xc2, 0x80, no_stag, 0, b"abcd")]);
    // RV, before the opcode.
    scene.refuses(0x0205, &[tagged(0xc1, 0x8c, no_stag, 0, b"abcd")]);
    // The opcode, before QN and STag.
    scene.refuses(0x0206, &[untagged(0x41, 0x4c, 9, 77, 1, b"hello")]);
    scene.refuses(0x0206, &[tagged(0xc1, 0x4c, no_stag, 0, b"abcd")]);
    // QN before MSN; MSN before MO; MO before length.
    scene.refuses(0x1201, &[untagged(0x41, 0x43, 9, 77, 5, b"hello")]);
    scene.refuses(0x1203, &[untagged(0x41, 0x43, 0, 77, 5, b"hello")]);
    scene.refuses(0x1204, &[untagged(0x41, 0x43, 0, 1, 5, &[1; 5000])]);
    // The STag's domain before its bounds; wrapping before bounds.
    scene.refuses(0x1102, &[write(foreign, 0, b"abcd")]);
    scene.refuses(0x1103, &[write(scene.target.stag("all"), u64::MAX, b"ab")]);
    scene.ends();
}

#[test]
fn ddp_v_16_a_message_in_the_wrong_kind_of_segment_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    // All untagged messages but the Terminate, tagged.
    for opcode in [0x41, 0x43, 0x44, 0x45, 0x46, 0x48, 0x49, 0x4a, 0x4b] {
        scene.refuses(0x0206, &[tagged(0xc1, opcode, stag, at, b"abcd")]);
    }
    // Both tagged ones, untagged.
    for opcode in [0x40, 0x42] {
        scene.refuses(0x0206, &[untagged(0x41, opcode, 0, 1, 0, b"abcd")]);
    }
    scene.ends();
}

#[test]
fn ddp_v_16_a_message_on_another_s_queue_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    // The queue exists; the opcode does not belong to it.
    for (opcode, qn) in [(0x43, 1), (0x43, 2), (0x43, 3), (0x45, 1), (0x41, 0), (0x41, 2)] {
        scene.refuses(0x0206, &[untagged(0x41, opcode, qn, 1, 0, &[0; 28])]);
    }
    scene.ends();
}

// Transfer and completion.

#[test]
fn ddp_s_04_a_zero_length_write_is_not_checked() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let stags = [
        0,
        1,
        target.no_stag(),
        target.stag("foreign"),
        target.stag("read"),
        u32::MAX,
    ];
    for role in ROLES {
        let mut link = target.link(role);
        for stag in stags {
            for to in [0, target.buffer(), u64::MAX] {
                link.peer.send_ulpdus(&[write(stag, to, b"")]);
            }
        }
        link.peer.send_ulpdus(&[send(1, b"hello")]);
        assert_eq!(target.received(link.qp), (0, 5));
    }
    target.quits();
}

#[test]
fn ddp_s_06_messages_are_delivered_in_order() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams {
        receives: 60,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &params, CRC);
        let sends: Vec<_> = (1..=60)
            .map(|msn| send(msn, &vec![0; msn as usize * 60]))
            .collect();
        link.peer.send_ulpdus(&sends);
        for msn in 1..=60 {
            assert_eq!(target.received(link.qp), (msn - 1, msn * 60));
        }
    }
    target.quits();
}

#[test]
fn ddp_s_11_writes_may_come_between_the_segments_of_a_send() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let (stag, at) = (target.stag("all"), target.buffer());
        link.peer.send_ulpdus(&[
            untagged(0x01, 0x43, 0, 1, 0, b"abcd"),
            write(stag, at, b"between"),
            untagged(0x41, 0x43, 0, 1, 4, b"efgh"),
        ]);
        assert_eq!(target.received(link.qp), (0, 8));
        assert_eq!(target.dump("arena", PAGE, 7), b"between");
    }
    target.quits();
}

#[test]
fn ddp_s_11_another_send_may_not() {
    let mut scene = or_skip!(Scene::start(&[]));
    scene.refuses(
        0x1203,
        &[untagged(0x01, 0x43, 0, 1, 0, b"abcd"), send(2, b"hello")],
    );
    scene.ends();
}

// After an error; STags.

#[test]
fn ddp_t_07_a_stag_of_one_domain_serves_all_its_queue_pairs() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (stag, at) = (target.stag("all"), target.buffer());
    for (number, role) in (0..).zip([Role::Responder, Role::Initiator, Role::Responder]) {
        let mut link = target.link(role);
        link.peer
            .send_ulpdus(&[write(stag, at + number, &[number as u8]), send(1, b"")]);
        target.received(link.qp);
    }
    assert_eq!(target.dump("arena", PAGE, 3), [0, 1, 2]);
    target.quits();
}

#[test]
fn ddp_t_08_after_deregistration_nothing_is_placed() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("write"), scene.target.buffer());
    let mut links = ROLES.map(|role| scene.target.link(role));
    for link in &mut links {
        link.peer.send_ulpdus(&[write(stag, at, b"before"), send(1, b"")]);
        assert_eq!(scene.target.received(link.qp), (0, 0));
    }
    scene.target.deregisters("write");
    let before = scene.target.arena();
    for mut link in links {
        let late = write(stag, at, b"after!");
        let bytes = link.peer.framed(&[&late]);
        scene.breaks_by(&mut link, 0x1100, &bytes, &late, &ALL_FLUSHED[1..]);
        // `breaks_by` adds a Write to another STag of the same memory.
        assert!(scene.target.arena() == before);
    }
    scene.ends();
}

#[test]
fn ddp_t_08_a_write_stops_when_its_stag_is_deregistered() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("big"), scene.target.address("large"));
    for (number, role) in ROLES.into_iter().enumerate() {
        let mut link = scene.target.link(role);
        if number == 0 {
            link.peer
                .send_ulpdus(&[tagged(0x81, 0x40, stag, at, &[1; 1000]), send(1, b"")]);
            assert_eq!(scene.target.received(link.qp), (0, 0));
            scene.target.deregisters("big");
            let rest = tagged(0xc1, 0x40, stag, at + 1000, &[1; 1000]);
            scene.breaks(link, 0x1100, &[rest], &ALL_FLUSHED[1..]);
            let large = scene.target.dump("large", 0, 2000);
            assert_eq!(large[..1000], [1; 1000]);
            assert_eq!(large[1000..], filled(LARGE_SEED, 2000)[1000..]);
        } else {
            let late = write(stag, at, b"late");
            scene.breaks(link, 0x1100, &[late], &ALL_FLUSHED);
        }
    }
    scene.ends();
}

#[test]
fn sec_01_another_domains_stag_cannot_be_used() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("foreign"), scene.target.buffer());
    scene.refuses(0x1102, &[write(stag, at, b"abcd")]);
    scene.refuses(0x0103, &[read_request(1, stag, at, 4)]);
    let message = invalidating(0x41, 0x44, stag, 0, 1, 0, b"hello");
    scene.refuses_after(0x0109, &[message], &INVALIDATION_REFUSED);
    scene.ends();
}

#[test]
fn vrb_q_04_an_error_flushes_both_queues_in_order() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let inbox = scene.target.address("inbox");
        scene
            .target
            .posts(link.qp, opcode::READ, 100, "in", inbox, 64, (0x1000, 0x2000));
        for id in 101..108 {
            scene.target.sends(link.qp, id, 5);
        }
        for _ in 100..108 {
            link.peer.ulpdu();
        }
        let sends = (100..108).map(|id| (id, status::FLUSHED));
        let completions: Vec<_> = sends.chain(ALL_FLUSHED).collect();
        scene.breaks(link, 0x1203, &[send(7, b"hello")], &completions);
    }
    scene.ends();
}

#[test]
fn vrb_q_02_requests_in_the_error_state_are_flushed() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let link = scene.target.link(role);
        let qp = link.qp;
        scene.breaks(link, 0x1203, &[send(7, b"hello")], &ALL_FLUSHED);
        scene.target.sends(qp, 100, 5);
        scene.target.receives(qp, 101);
        scene
            .target
            .completes(qp, &[(100, status::FLUSHED), (101, status::FLUSHED)]);
    }
    scene.ends();
}
