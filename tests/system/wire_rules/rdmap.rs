//! RDMAP (RFC 5040; conformance §5).

use urnic_tests::or_skip;
use urnic_tests::peer::{End, hex};
use urnic_tests::startup::CRC;
use urnic_tests::target_process::{
    ARENA_SEED, LARGE, LARGE_SEED, Link, PAGE, QpParams, ROLES, Role, TargetProcess, filled, opcode, status,
};
use urnic_tests::ulpdu::{
    SINK_STAG, SINK_TO, complaint, invalidating, read_header, read_request, read_response, send, tagged,
    terminate, untagged, write,
};

use super::{ALL_FLUSHED, INVALIDATION_REFUSED, Scene};

/// The content of the buffer.
fn buffer() -> Vec<u8> {
    filled(ARENA_SEED, 2 * PAGE).split_off(PAGE)
}

// Control field.

#[test]
fn rdm_c_02_the_invalidate_word_of_a_plain_send_is_ignored() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let (stag, at) = (target.stag("all"), target.buffer());
        for (msn, opcode) in [(1, 0x43), (2, 0x45)] {
            link.peer
                .send_ulpdus(&[invalidating(0x41, opcode, stag, 0, msn, 0, b"hello")]);
            let wc = target.completion(link.qp);
            assert_eq!((wc.status, wc.flags), (status::SUCCESS, 0), "{wc:?}");
        }
        link.peer.send_ulpdus(&[write(stag, at, b"still"), send(3, b"")]);
        target.received(link.qp);
        assert_eq!(target.dump("arena", PAGE, 5), b"still");
    }
    target.quits();
}

#[test]
fn rdm_m_05_another_rdmap_version_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    for byte in [0x03, 0x83, 0xc3] {
        scene.refuses(0x0205, &[untagged(0x41, byte, 0, 1, 0, b"hello")]);
    }
    scene.refuses(0x0205, &[tagged(0xc1, 0x80, stag, at, b"abcd")]);
    scene.ends();
}

#[test]
fn rdm_m_05_an_unknown_opcode_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for opcode in [0x4c, 0x4d, 0x4e, 0x4f] {
        scene.refuses(0x0206, &[untagged(0x41, opcode, 0, 1, 0, b"hello")]);
    }
    // Vector F-TERM-OPC-026.
    let mut link = scene.target.link(Role::Responder);
    link.peer.send_ulpdus(&[untagged(0x41, 0x4c, 0, 1, 0, b"hello")]);
    assert_eq!(
        link.peer.read_bytes(48),
        hex(
            "002a4147 00000000 00000002 00000001 00000000 0206c000 0017414c 00000000 00000000 00000001 00000000 \
             87f98155"
        )
    );
    scene.target.event();
    scene.ends();
}

// Reads that the peer requests.

#[test]
fn rdm_r_01_a_read_request_is_answered() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let at = target.buffer();
        // Any STag that may be read; all of the buffer; its first and last byte.
        for (msn, (name, offset, len)) in (1..).zip([
            ("all", 8, 100),
            ("read", 0, 4096),
            ("read", 0, 1),
            ("all", 4095, 1),
        ]) {
            link.peer
                .send_ulpdus(&[read_request(msn, target.stag(name), at + offset, len)]);
            let expected = &buffer()[offset as usize..][..len as usize];
            assert_eq!(link.peer.ulpdu(), read_response(SINK_STAG, SINK_TO, expected));
        }
        assert!(
            target.has_no_completion(link.qp),
            "the program gets no completion"
        );
    }
    target.quits();
}

#[test]
fn rdm_r_02_the_sink_is_returned_uninterpreted() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let (stag, at) = (target.stag("all"), target.buffer());
    for role in ROLES {
        let mut link = target.link(role);
        for (msn, (sink_stag, sink_to)) in (1..).zip([(0_u32, u64::MAX), (u32::MAX, 0), (stag, at)]) {
            let mut header = read_header(sink_to, 4, stag, at);
            header[..4].copy_from_slice(&sink_stag.to_be_bytes());
            link.peer.send_ulpdus(&[untagged(0x41, 0x41, 1, msn, 0, &header)]);
            assert_eq!(
                link.peer.ulpdu(),
                read_response(sink_stag, sink_to, &buffer()[..4])
            );
        }
    }
    target.quits();
}

#[test]
fn rdm_r_03_a_read_of_zero_bytes_is_not_checked() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        // Vectors F-RREQ0-RTR, and F-RRESP0 in answer; then the frame of siw, for whose source STag
        // 1 there is no region either.
        link.peer.send(&hex(
            "002e4141 00000000 00000001 00000001 00000000 00000001 00000000 00000000 00000000 00000001 00000000 \
             00000000 27dbd7e7",
        ));
        assert_eq!(
            link.peer.read_bytes(20),
            hex("000ec142 00000001 00000000 00000000 21a3e83e")
        );
        let sources = [(0, 0), (u32::MAX, u64::MAX), (target.stag("foreign"), 0)];
        for (msn, (stag, to)) in (2..).zip(sources) {
            link.peer.send_ulpdus(&[read_request(msn, stag, to, 0)]);
            assert_eq!(link.peer.ulpdu(), read_response(SINK_STAG, SINK_TO, b""));
        }
    }
    target.quits();
}

#[test]
fn rdm_r_04_reads_are_answered_in_order() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams {
        ird: 16,
        ..QpParams::default()
    };
    let lens = [5000, 1, 100_000, 0, 70_000, 3, 200_000, 17];
    for role in ROLES {
        let mut link = target.link_as(role, &params, CRC);
        let (stag, at) = (target.stag("big"), target.address("large"));
        let content = filled(LARGE_SEED, 200_000);
        let requests: Vec<_> = (1..)
            .zip(lens)
            .map(|(msn, len)| read_request(msn, stag, at, len))
            .collect();
        link.peer.send_ulpdus(&requests);
        for len in lens {
            let mut came = Vec::<u8>::new();
            loop {
                let ulpdu = link.peer.ulpdu();
                assert_eq!(
                    ulpdu[2..14],
                    read_response(SINK_STAG, SINK_TO + came.len() as u64, b"")[2..]
                );
                came.extend(&ulpdu[14..]);
                if ulpdu[..2] == [0xc1, 0x42] {
                    break;
                }
                assert_eq!(ulpdu[..2], [0x81, 0x42]);
            }
            assert!(came == content[..len as usize]);
        }
    }
    target.quits();
}

#[test]
fn rdm_m_03_a_read_request_is_checked() {
    let mut scene = or_skip!(Scene::start(&[]));
    let at = scene.target.buffer();
    let [all, foreign, write_only, local, zero] =
        ["all", "foreign", "write", "local", "zero"].map(|name| scene.target.stag(name));
    let no_stag = scene.target.no_stag();
    for (error, stag, to, len) in [
        (0x0100, no_stag, at, 64),
        (0x0100, all ^ 1, at, 64),
        (0x0101, all, at + 4000, 97),
        (0x0101, all, at - 1, 2),
        (0x0101, all, at, u32::MAX),
        (0x0101, zero, 4096, 1),
        (0x0102, write_only, at, 64),
        (0x0102, local, at, 64),
        (0x0103, foreign, at, 64),
        (0x0104, all, u64::MAX, 2),
        (0x0104, zero, u64::MAX - 99, 200),
    ] {
        scene.refuses(error, &[read_request(1, stag, to, len)]);
    }
    // The queue pair's own rights: writing alone.
    let params = QpParams {
        access: 2,
        ..QpParams::default()
    };
    for role in ROLES {
        let link = scene.target.link_as(role, &params, CRC);
        scene.breaks(link, 0x0102, &[read_request(1, all, at, 64)], &ALL_FLUSHED);
    }
    scene.ends();
}

#[test]
fn rdm_m_03_a_read_request_s_place_on_its_queue_is_checked() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    let header = read_header(SINK_TO, 64, stag, at);
    for msn in [0, 2, 77] {
        scene.refuses(0x1203, &[read_request(msn, stag, at, 64)]);
    }
    scene.refuses(0x1204, &[untagged(0x41, 0x41, 1, 1, 4, &header)]);
    // The only segment must be the last (L), and no longer or shorter than the header.
    scene.refuses(0x1205, &[untagged(0x01, 0x41, 1, 1, 0, &header)]);
    for role in ROLES {
        for payload in [&header[..27], &[&header[..], b"!"].concat(), b""] {
            let mut link = scene.target.link(role);
            let bad = untagged(0x41, 0x41, 1, 1, 0, payload);
            link.peer.send_ulpdus(&[&bad]);
            // No RFC states which error; the Terminate includes the DDP header.
            let answer = link.peer.ulpdu();
            assert_eq!(answer[..18], terminate(b"")[..]);
            assert_eq!(answer[20..22], [0xc0, 0]);
            assert_eq!(answer[22..24], (bad.len() as u16).to_be_bytes());
            assert_eq!(answer[24..], bad[..18]);
            scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
            assert_eq!(scene.target.event().1, link.qp.index);
        }
    }
    scene.ends();
}

/// Reads a Read Response into `content` from `at` on; returns the ULPDU after it.
#[track_caller]
pub(super) fn response_until_something_else(
    link: &mut Link,
    mut at: usize,
    content: &[u8],
) -> (usize, Vec<u8>) {
    loop {
        let ulpdu = link.peer.ulpdu();
        if ulpdu[1] != 0x42 {
            return (at, ulpdu);
        }
        assert_eq!(
            ulpdu[..14],
            tagged(0x81, 0x42, SINK_STAG, SINK_TO + at as u64, b"")[..]
        );
        assert!(content[at..].starts_with(&ulpdu[14..]), "at {at}");
        at += ulpdu.len() - 14;
    }
}

#[test]
fn rdm_r_06_more_reads_than_agreed_terminate() {
    // Answers longer than TCP buffers, and a peer that receives none: the requests accumulate.
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        ird: 2,
        ..QpParams::default()
    };
    let content = filled(LARGE_SEED, LARGE as usize);
    for role in ROLES {
        let mut link = scene.target.link_as(role, &params, CRC);
        let (stag, at) = (scene.target.stag("big"), scene.target.address("large"));
        let requests = [1, 2, 3].map(|msn| read_request(msn, stag, at, LARGE));
        link.peer.send_ulpdus(&requests);
        scene.others_continue();
        let (came, answer) = response_until_something_else(&mut link, 0, &content);
        assert!(came < LARGE as usize);
        assert_eq!(answer, complaint(0x1202, &requests[2]));
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    scene.ends();
}

#[test]
fn rdm_r_06_as_many_reads_as_agreed_are_answered() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams {
        ird: 2,
        ..QpParams::default()
    };
    let content = filled(LARGE_SEED, LARGE as usize);
    for role in ROLES {
        let mut link = target.link_as(role, &params, CRC);
        let (stag, at) = (target.stag("big"), target.address("large"));
        link.peer
            .send_ulpdus(&[1, 2].map(|msn| read_request(msn, stag, at, LARGE)));
        target.is_healthy();
        for _ in [1, 2] {
            let mut came = 0;
            while came < content.len() {
                let ulpdu = link.peer.ulpdu();
                assert_eq!(ulpdu[1], 0x42);
                assert!(content[came..].starts_with(&ulpdu[14..]));
                came += ulpdu.len() - 14;
            }
        }
    }
    target.quits();
}

/// The device reads nothing after the region is deregistered, with CRCs or without, however slowly
/// the peer receives the data that it requested.
fn deregistered_source(flags: u8) {
    let mut scene = or_skip!(Scene::with(flags));
    let params = QpParams {
        flags,
        ..QpParams::default()
    };
    let content = filled(LARGE_SEED, LARGE as usize);
    let mut link = scene.target.link_as(Role::Responder, &params, flags);
    let (stag, at) = (scene.target.stag("big"), scene.target.address("large"));
    let request = read_request(1, stag, at, LARGE);
    link.peer.send_ulpdus(&[&request]);
    // Part of the answer has arrived, the rest is queued after it.
    let first = link.peer.ulpdu();
    assert_eq!(first[..2], [0x81, 0x42]);
    scene.target.deregisters("big");
    // The memory belongs to the program again, which uses it for other data.
    assert_eq!(scene.target.command("fill large 5ec2e7"), "done");
    let (came, answer) = response_until_something_else(&mut link, first.len() - 14, &content);
    assert!(came < LARGE as usize, "TCP buffered {came} bytes");
    let sent = came as u64;
    let rest = read_header(SINK_TO + sent, LARGE - came as u32, stag, at + sent);
    assert_eq!(
        answer,
        terminate(&[&hex("0100e000 002e")[..], &request[..18], &rest].concat())
    );
    scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
    assert_eq!(scene.target.event().1, link.qp.index);
    scene.ends();
}

#[test]
fn rdm_r_09_a_source_deregistered_in_the_answer_terminates() {
    deregistered_source(CRC);
}

#[test]
fn rdm_r_09_a_deregistered_source_without_crc_terminates() {
    deregistered_source(0);
}

// Reads that the target requests.

/// Bytes of a Read of ours, which goes to the front of the inbox.
pub(super) const READ: usize = 64;

/// Makes the target read and checks the Request. Returns sink STag and offset.
#[track_caller]
pub(super) fn reads(target: &mut TargetProcess, link: &mut Link, id: u64, msn: u32) -> (u32, u64) {
    let (stag, at) = (target.stag("in"), target.address("inbox"));
    target.posts(
        link.qp,
        opcode::READ,
        id,
        "in",
        at,
        READ as u64,
        (0x7f00_0000_2000, 0x200),
    );
    let mut header = stag.to_be_bytes().to_vec();
    header.extend(at.to_be_bytes());
    header.extend((READ as u32).to_be_bytes());
    header.extend(hex("00000200 00007f00 00002000"));
    assert_eq!(link.peer.ulpdu(), untagged(0x41, 0x41, 1, msn, 0, &header));
    (stag, at)
}

#[test]
fn rdm_r_05_no_more_reads_than_agreed_are_outstanding() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams {
        ord: 2,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &params, CRC);
        let (stag, at) = reads(&mut target, &mut link, 100, 1);
        reads(&mut target, &mut link, 101, 2);
        for id in 102..104 {
            target.posts(link.qp, opcode::READ, id, "in", at, READ as u64, (0, 1));
        }
        target.is_healthy();
        link.peer.stays_silent(std::time::Duration::from_millis(100));
        // Each answer lets one more go.
        for msn in [3, 4] {
            link.peer.send_ulpdus(&[read_response(stag, at, &[1; READ])]);
            let request = link.peer.ulpdu();
            assert_eq!(
                (&request[..2], &request[10..14]),
                (&[0x41, 0x41][..], &u32::to_be_bytes(msn)[..])
            );
        }
        link.peer.send_ulpdus(&[
            read_response(stag, at, &[1; READ]),
            read_response(stag, at, &[2; READ]),
        ]);
        target.completes(link.qp, &[100, 101, 102, 103].map(|id| (id, status::SUCCESS)));
        assert_eq!(target.dump("inbox", 0, READ), [2; READ]);
    }
    target.quits();
}

#[test]
fn rdm_r_07_an_answer_may_come_in_segments() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        let (stag, at) = reads(&mut target, &mut link, 100, 1);
        link.peer.send_ulpdus(&[
            tagged(0x81, 0x42, stag, at, &[1; 40]),
            tagged(0x81, 0x42, stag, at + 40, &[2; 20]),
            send(1, b"between"),
            tagged(0xc1, 0x42, stag, at + 60, &[3; 4]),
        ]);
        target.completes(link.qp, &[(0, status::SUCCESS), (100, status::SUCCESS)]);
        assert_eq!(
            target.dump("inbox", 0, READ),
            [&[1; 40][..], &[2; 20], &[3; 4]].concat()
        );
    }
    target.quits();
}

#[test]
fn rdm_r_07_an_unrequested_response_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let at = scene.target.buffer();
    for stag in [scene.target.stag("all"), scene.target.no_stag()] {
        scene.refuses(0x1100, &[read_response(stag, at, b"abcd")]);
    }
    // A Read Response of no bytes is refused, too: it answers no Request either.
    scene.refuses(0x1100, &[read_response(1, 0, b"")]);
    scene.ends();
}

#[test]
fn rdm_r_07_a_response_that_does_not_fit_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let all = scene.target.stag("all");
    let buffer = scene.target.buffer();
    let before = scene.target.dump("inbox", 0, 2 * READ);
    let (stag, at) = (scene.target.stag("in"), scene.target.address("inbox"));
    for (error, answer) in [
        // Another STag, even a good one.
        (0x1100, read_response(all, buffer, &[1; READ])),
        (0x1100, read_response(scene.target.no_stag(), at, &[1; READ])),
        // Another address, more than requested.
        (0x1101, read_response(stag, at + 1, &[1; READ])),
        (0x1101, read_response(stag, at - 1, &[1; READ])),
        (0x1101, read_response(stag, at, &[1; READ + 1])),
        (0x1101, tagged(0x81, 0x42, stag, at, &[1; READ + 1])),
        // Less, and marked as the last.
        (0x02ff, read_response(stag, at, &[1; READ - 1])),
        (0x02ff, read_response(stag, at, b"")),
    ] {
        for role in ROLES {
            let mut link = scene.target.link(role);
            reads(&mut scene.target, &mut link, 100, 1);
            let completions = [&[(100, status::FLUSHED)], &ALL_FLUSHED[..]].concat();
            scene.breaks(link, error, std::slice::from_ref(&answer), &completions);
            assert_eq!(scene.target.dump("inbox", 0, 2 * READ), before);
        }
    }
    scene.ends();
}

#[test]
fn rdm_r_07_a_response_twice_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let (stag, at) = reads(&mut scene.target, &mut link, 100, 1);
        let answer = read_response(stag, at, &[1; READ]);
        let completions = [&[(100, status::SUCCESS)], &ALL_FLUSHED[..]].concat();
        scene.breaks(link, 0x1100, &[answer.clone(), answer], &completions);
    }
    scene.ends();
}

#[test]
fn vrb_m_02_a_sink_of_a_read_may_not_be_written_to() {
    // The sink has no remote right; the answer to a Read does not need it.
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let (stag, at) = reads(&mut scene.target, &mut link, 100, 1);
        let completions = [&[(100, status::FLUSHED)], &ALL_FLUSHED[..]].concat();
        scene.breaks(link, 0x0102, &[write(stag, at, &[1; READ])], &completions);
    }
    scene.ends();
}

// Sends.

#[test]
fn rdm_s_01_a_send_of_zero_bytes_takes_a_receive() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        link.peer
            .send_ulpdus(&[send(1, b""), send(2, b"hello"), send(3, b"")]);
        for expected in [(0, 0), (1, 5), (2, 0)] {
            assert_eq!(target.received(link.qp), expected);
        }
    }
    target.quits();
}

#[test]
fn rdm_s_04_an_stag_that_cannot_be_invalidated_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    let invalidate = |opcode: u8, stag: u32| invalidating(0x41, opcode, stag, 0, 1, 0, b"hello");
    let (no_stag, foreign, all) = (
        scene.target.no_stag(),
        scene.target.stag("foreign"),
        scene.target.stag("all"),
    );
    for opcode in [0x44, 0x46] {
        // Unknown; of another domain; and (SEC-03) one that several streams share.
        for (error, stag) in [(0x0209, no_stag), (0x0109, foreign), (0x0209, all)] {
            scene.refuses_after(error, &[invalidate(opcode, stag)], &INVALIDATION_REFUSED);
        }
    }
    let mut link = scene.target.link(Role::Responder);
    let at = scene.target.buffer();
    link.peer.send_ulpdus(&[write(all, at, b"still"), send(1, b"")]);
    scene.target.received(link.qp);
    assert_eq!(scene.target.dump("arena", PAGE, 5), b"still");
    scene.ends();
}

// RFC 7306: all faults that its messages can have.

#[test]
fn x73_09_immediate_data_has_eight_bytes() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut link = scene.target.link(Role::Responder);
    // Vector F-IMM.
    link.peer.send(&hex(
        "001a4148 00000000 00000000 00000001 00000000 01020304 05060708 06c22805",
    ));
    let wc = scene.target.completion(link.qp);
    assert_eq!(
        (wc.status, wc.more, wc.flags & 2),
        (status::SUCCESS, 0x0102_0304, 2),
        "{wc:?}"
    );
    for len in [0, 7, 9, 100] {
        for role in ROLES {
            let mut link = scene.target.link(role);
            let bad = untagged(0x41, 0x48, 0, 1, 0, &vec![1; len]);
            link.peer.send_ulpdus(&[&bad]);
            let answer = link.peer.ulpdu();
            assert_eq!(answer[24..], bad[..18], "{answer:02x?}");
            scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
            assert_eq!(scene.target.event().1, link.qp.index);
        }
    }
    scene.ends();
}

#[test]
fn x73_02_an_atomic_without_the_right_terminates() {
    // The queue pairs do not grant atomics, nor do the regions. Vector F-ATOMIC-FADD but for STag
    // and offset.
    let mut scene = or_skip!(Scene::start(&[]));
    let (stag, at) = (scene.target.stag("all"), scene.target.buffer());
    let mut header = hex("00000000 00000055");
    header.extend(stag.to_be_bytes());
    header.extend(at.to_be_bytes());
    header.extend(hex(
        "00000000 00000001 00000000 00000000 00000000 00000000 ffffffff ffffffff",
    ));
    let request = untagged(0x41, 0x4a, 1, 1, 0, &header);
    for role in ROLES {
        let mut link = scene.target.link(role);
        let bytes = link.peer.framed(&[&request]);
        link.peer.send(&bytes);
        // X73-12: without the RDMA header.
        let expected = [&hex("0102c000 0046")[..], &request[..18]].concat();
        assert_eq!(link.peer.ulpdu(), terminate(&expected));
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
        scene.is_pristine();
    }
    scene.ends();
}

#[test]
fn x73_04_an_unrequested_atomic_response_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    // Vector F-ATOMIC-RESP.
    let response = untagged(0x41, 0x4b, 3, 1, 0, &hex("00000055 00000000 00002222"));
    scene.refuses(0x1202, &[response]);
    scene.ends();
}
