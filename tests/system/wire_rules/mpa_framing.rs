//! FPDUs, MULPDU, segmentation (RFC 5044 §§3, 4.1, 4.5; conformance §1.1).

use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::peer::hex;
use urnic_tests::startup::{CRC, MARKERS};
use urnic_tests::target_process::{
    ARENA_SEED, LARGE_SEED, PAGE, QpParams, ROLES, Role, TargetProcess, filled, opcode, status,
};
use urnic_tests::ulpdu::{SINK_STAG, SINK_TO, read_request, read_response, send, tagged, untagged, write};

use super::{Scene, variables};

/// The content of the target's buffer.
fn buffer(len: usize) -> Vec<u8> {
    filled(ARENA_SEED, PAGE + len)[PAGE..].to_vec()
}

#[test]
fn mpa_f_01_three_messages_in_one_piece_and_one_in_three() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        link.peer
            .send_ulpdus(&[send(1, b"a"), send(2, b"bc"), send(3, b"def")]);
        let fpdu = link.peer.framed(&[send(4, &[9; 300])]);
        link.peer.send_in_pieces(&fpdu, fpdu.len().div_ceil(3));
        for expected in [(0, 1), (1, 2), (2, 3), (3, 300)] {
            assert_eq!(target.received(link.qp), expected);
        }
    }
    target.quits();
}

#[test]
fn mpa_f_02_a_send_of_five_bytes_makes_32_on_the_wire() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        // Vector F-SEND-hello, inwards.
        link.peer.send(&hex(
            "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c",
        ));
        assert_eq!(target.received(link.qp), (0, 5));
        target.sends(link.qp, 9, 5);
        let fpdu = link.peer.read_bytes(32);
        assert_eq!(fpdu[..20], hex("00174143 00000000 00000000 00000001 00000000"));
        assert_eq!(fpdu[20..25], buffer(5));
        assert_eq!(fpdu[25..28], [0; 3]);
        // Vector F-SEND0-RTR but for its MSN, 2 here: the length again, and a CRC computed by hand.
        target.sends(link.qp, 10, 0);
        let fpdu = link.peer.read_bytes(24);
        assert_eq!(fpdu[..20], hex("00124143 00000000 00000000 00000002 00000000"));
        assert_eq!(fpdu[20..], urnic_tests::framing::crc32c(&fpdu[..20]));
    }
    target.quits();
}

#[test]
fn mpa_f_03_pad_makes_fpdu_multiple_of_four() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let mut link = target.link(Role::Responder);
    for (len, pad) in (0..8).zip([0, 3, 2, 1, 0, 3, 2, 1]) {
        target.sends(link.qp, 9, len);
        let fpdu = link.peer.read_bytes(2 + 18 + len as usize + pad + 4);
        assert_eq!(usize::from(fpdu[1]), 18 + len as usize);
        assert!(fpdu[20 + len as usize..][..pad].iter().all(|byte| *byte == 0));
        assert_eq!(fpdu.len() % 4, 0);
        target.completes(link.qp, &[(9, status::SUCCESS)]);
    }
    target.quits();
}

#[test]
fn mpa_f_03_pad_of_any_value_is_accepted_if_the_crc_matches() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let mut link = target.link(role);
        for (msn, len) in (1..).zip([1, 2, 3, 5]) {
            let fpdu = link
                .peer
                .outbound
                .frame_padded(&send(msn, &vec![1; len]), 0xde + msn as u8);
            link.peer.send(&fpdu);
            assert_eq!(target.received(link.qp), (u64::from(msn) - 1, len as u64));
        }
    }
    target.quits();
}

#[test]
fn mpa_f_04_with_crc_off_the_field_is_present_and_ignored() {
    let mut target = or_skip!(TargetProcess::start(&variables(0)));
    let params = QpParams {
        flags: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = target.link_as(role, &params, 0);
        link.peer.send_ulpdus(&[send(1, b"hello"), send(2, &[5; 4000])]);
        assert_eq!(target.received(link.qp), (0, 5));
        assert_eq!(target.received(link.qp), (1, 4000));
        // The reader expects the field's four bytes.
        target.sends(link.qp, 9, 5);
        target.sends(link.qp, 10, 4000);
        assert_eq!(link.peer.ulpdu(), send(1, &buffer(5)));
        assert_eq!(link.peer.ulpdu(), send(2, &buffer(4000)));
    }
    target.quits();
}

/// Makes the target send `len` bytes of its large region by a Send and a Write, and checks the
/// segments (DDP-H-04 to -07); returns the lengths of all ULPDUs.
#[track_caller]
fn segments(target: &mut TargetProcess, role: Role, params: &QpParams, len: usize) -> Vec<usize> {
    const TO: u64 = 0xffff_ffff_0000_0000;
    let mut link = target.link_as(role, params, CRC);
    let from = target.address("large");
    target.posts(link.qp, opcode::SEND, 9, "big", from, len as u64, (0, 0));
    target.posts(
        link.qp,
        opcode::WRITE,
        10,
        "big",
        from,
        len as u64,
        (TO, 0x1122_3344),
    );
    let content = filled(LARGE_SEED, len);
    let mut lengths = Vec::new();
    for is_send in [true, false] {
        let mut placed = 0;
        loop {
            let ulpdu = link.peer.ulpdu();
            let header_len = if is_send { 18 } else { 14 };
            let payload = content
                .get(placed..placed + ulpdu.len() - header_len)
                .expect("no more than was posted");
            let last = placed + payload.len() == len;
            let control = if last { 0x41 } else { 0x01 };
            let expected = match is_send {
                true => untagged(control, 0x43, 0, 1, placed as u32, payload),
                false => tagged(0x80 | control, 0x40, 0x1122_3344, TO + placed as u64, payload),
            };
            assert!(
                ulpdu == expected,
                "at {placed}: {:02x?}, not {:02x?}",
                &ulpdu[..header_len],
                &expected[..header_len]
            );
            lengths.push(ulpdu.len());
            placed += payload.len();
            if last {
                break;
            }
        }
    }
    target.completes(link.qp, &[(9, status::SUCCESS), (10, status::SUCCESS)]);
    lengths
}

#[test]
fn mpa_f_06_no_ulpdu_is_longer_than_64768() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    for role in ROLES {
        let lengths = segments(&mut target, role, &QpParams::default(), 1 << 20);
        assert!(lengths.iter().all(|len| *len <= 64768), "{lengths:?}");
    }
    target.quits();
}

#[test]
fn mpa_f_07_longer_ulpdus_are_accepted() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let params = QpParams {
        receives: 0,
        ..QpParams::default()
    };
    let content = filled(7, 65535);
    for role in ROLES {
        let mut link = target.link_as(role, &params, CRC);
        for (msn, ulpdu_len) in (1..).zip([64768, 64769, 65474, 65535]) {
            let payload = &content[..ulpdu_len - 18];
            target.receives_at(link.qp, msn, 0, 0x10000);
            link.peer.send_ulpdus(&[send(msn as u32, payload)]);
            assert_eq!(target.received(link.qp), (msn, payload.len() as u64));
            assert!(target.dump("inbox", 0, payload.len()) == payload);
        }
    }
    target.quits();
}

/// Segments on a loopback of this MTU, in a network namespace: lengths of the full ULPDUs.
fn full_lengths(mtu: u32, flags: u8) -> Result<Vec<usize>, String> {
    let netns = Netns::new()?;
    // No IPv6, whose least MTU is 1280; and no segments that exist only inside this host.
    netns.ip(&format!("link set lo mtu {mtu}"));
    let mut target = TargetProcess::start_by(&[], |program| netns.program(program))?;
    let params = QpParams {
        flags,
        ..QpParams::default()
    };
    let lengths = netns.within(|| {
        ROLES
            .map(|role| segments(&mut target, role, &params, 20_000))
            .concat()
    });
    target.quits();
    Ok(lengths)
}

#[test]
fn mpa_f_08_mulpdu_without_markers() {
    // EMSS 1448: 1500 less IP's, TCP's and the time stamps' bytes; MULPDU 1442.
    let lengths = or_skip!(full_lengths(1500, CRC));
    assert_eq!(lengths.iter().max(), Some(&1442), "{lengths:?}");
    assert_eq!(
        lengths.iter().filter(|len| **len != 1442).count(),
        4,
        "{lengths:?}"
    );
}

#[test]
fn mpa_f_09_mulpdu_with_markers() {
    let lengths = or_skip!(full_lengths(1500, CRC | MARKERS));
    assert_eq!(lengths.iter().max(), Some(&1430), "{lengths:?}");
    assert_eq!(
        lengths.iter().filter(|len| **len != 1430).count(),
        4,
        "{lengths:?}"
    );
}

#[test]
fn mpa_f_10_mulpdu_never_falls_below_128() {
    for flags in [CRC, CRC | MARKERS] {
        let lengths = or_skip!(full_lengths(140, flags));
        assert_eq!(lengths.iter().max(), Some(&128), "{lengths:?}");
        assert_eq!(
            lengths.iter().filter(|len| **len != 128).count(),
            4,
            "{lengths:?}"
        );
    }
}

/// Messages of every kind, as a stream.
fn messages(target: &TargetProcess) -> Vec<Vec<u8>> {
    let (stag, at) = (target.stag("all"), target.buffer());
    let content = filled(11, 3000);
    vec![
        send(1, b"one"),
        untagged(0x01, 0x43, 0, 2, 0, &content[..1400]),
        write(stag, at, b"between"),
        untagged(0x41, 0x43, 0, 2, 1400, &content[1400..]),
        tagged(0x81, 0x40, stag, at + 100, &content[..1001]),
        tagged(0xc1, 0x40, stag, at + 1101, &content[1001..2002]),
        write(0xdead_beef, u64::MAX, b""),
        read_request(1, stag, at + 100, 2002),
        send(3, b""),
        read_request(2, 0, 0, 0),
        untagged(0x41, 0x45, 0, 4, 0, b"solicited"),
    ]
}

fn takes_messages_in_pieces(flags: u8, peer_flags: u8) {
    let mut target = or_skip!(TargetProcess::start(&variables(flags)));
    let content = filled(11, 3000);
    for size in [1, 3, 7, 1461, usize::MAX] {
        for role in ROLES {
            let params = QpParams {
                flags: peer_flags,
                ..QpParams::default()
            };
            let mut link = target.link_as(role, &params, flags);
            let bytes = link.peer.framed(&messages(&target));
            link.peer.send_in_pieces(&bytes, size.min(bytes.len()));
            for expected in [(0, 3), (1, 3000), (2, 0), (3, 9)] {
                assert_eq!(target.received(link.qp), expected, "in pieces of {size}");
            }
            let mut response = Vec::<u8>::new();
            while response.len() < 2002 {
                let ulpdu = link.peer.ulpdu();
                let to = SINK_TO + response.len() as u64;
                let part = &ulpdu[14..];
                let control = if response.len() + part.len() == 2002 {
                    0xc1
                } else {
                    0x81
                };
                assert_eq!(ulpdu, tagged(control, 0x42, SINK_STAG, to, part));
                response.extend(part);
            }
            assert!(response == content[..2002]);
            assert_eq!(link.peer.ulpdu(), read_response(SINK_STAG, SINK_TO, b""));
            let mut arena = filled(ARENA_SEED, 3 * PAGE);
            arena[PAGE..PAGE + 7].copy_from_slice(b"between");
            arena[PAGE + 100..PAGE + 2102].copy_from_slice(&content[..2002]);
            assert!(target.arena() == arena, "in pieces of {size}");
            target.command(&format!("fill arena {ARENA_SEED:x}"));
            assert!(target.has_no_completion(link.qp));
        }
    }
    target.is_healthy();
    target.quits();
}

#[test]
fn mpa_f_12_a_stream_may_come_in_any_pieces() {
    takes_messages_in_pieces(CRC, CRC);
}

#[test]
fn mpa_f_12_a_stream_without_crc_may_come_in_any_pieces() {
    takes_messages_in_pieces(0, 0);
}

#[test]
fn mpa_f_12_a_stream_with_markers_may_come_in_any_pieces() {
    takes_messages_in_pieces(CRC | MARKERS, CRC | MARKERS);
}

#[test]
fn mpa_f_12_a_marked_stream_without_crc_in_any_segments() {
    takes_messages_in_pieces(MARKERS, MARKERS);
}

#[test]
fn mpa_f_16_a_ulpdu_too_short_for_its_header_terminates() {
    let mut scene = or_skip!(Scene::start(&[]));
    for ulpdu in [&[][..], &[0xc1], &[0x41], &[0xc1; 13], &[0x41; 17]] {
        scene.refuses(0x1000, &[ulpdu.to_vec()]);
    }
    scene.ends();
}

#[test]
fn mpa_f_16_a_ulpdu_shorter_than_its_header_terminates() {
    let mut scene = or_skip!(Scene::with(0));
    let params = QpParams {
        flags: 0,
        ..QpParams::default()
    };
    for ulpdu in [&[][..], &[0xc1; 13], &[0x41; 17]] {
        for role in ROLES {
            let link = scene.target.link_as(role, &params, 0);
            scene.breaks(link, 0x1000, &[ulpdu.to_vec()], &super::ALL_FLUSHED);
        }
    }
    scene.ends();
}

#[test]
fn mpa_f_12_two_fpdus_and_a_half_wait_for_the_other_half() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let mut link = target.link(Role::Responder);
    let bytes = link
        .peer
        .framed(&[send(1, b"a"), send(2, b"b"), send(3, &[1; 3000])]);
    let half = bytes.len() - 1500;
    link.peer.send(&bytes[..half]);
    assert_eq!(target.received(link.qp), (0, 1));
    assert_eq!(target.received(link.qp), (1, 1));
    target.is_healthy();
    assert!(target.has_no_completion(link.qp));
    link.peer.send(&bytes[half..]);
    assert_eq!(target.received(link.qp), (2, 3000));
    target.quits();
}
