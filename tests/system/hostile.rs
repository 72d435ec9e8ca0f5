//! Bad input at a live process, row by row: the right Terminate, only that queue pair fails, the program's other traffic goes on.
//! Start-up has its own file.

use std::time::Duration;

use urnic_tests::or_skip;
use urnic_tests::peer::{End, hex, sealed};
use urnic_tests::victim::{FLUSHED, SUCCESS, Victim, Wc, read_request, send, tagged, untagged, write};
use urnic_wire::crc::crc32c;
use urnic_wire::rdmap::TerminateError::{self, *};

/// What the victim's buffer holds at first: `fill()` of rc.h with seed 3.
fn pristine() -> Vec<u8> {
    let byte = |at: u64| {
        let x = (at + 3 * 0x1_0001).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x >> 56) ^ (x >> 24)) as u8
    };
    (0..4096).map(byte).collect()
}

/// Connects, sends what `attack` makes, and expects a Terminate that is one of these, an orderly end, and no other harm.
#[track_caller]
fn terminates(attack: impl FnOnce(&Victim) -> Vec<u8>, expected: &[TerminateError]) {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&attack(&victim));
    // DDP-T-01: whatever follows is dropped in silence.
    peer.send(&write(victim.stag, victim.address, b"too late"));
    let error = peer.terminate();
    assert!(
        error.is_some_and(|error| expected.contains(&error)),
        "{error:?}, not {expected:?}"
    );
    // RDM-T-04, RDM-T-05: nothing follows, and the end is orderly once ours is.
    peer.finish();
    assert_eq!(peer.end(), End::Closed);
    let completion = victim.completion();
    assert_ne!(completion.status, SUCCESS, "{completion:?}");
    assert_eq!(victim.memory(), pristine());
    victim.is_healthy();
    victim.leaves();
}

/// Connects, sends what `input` makes, and expects the next receive to take these bytes.
#[track_caller]
fn delivers(input: impl FnOnce(&Victim) -> Vec<u8>, lengths: &[i32]) {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&input(&victim));
    for (id, len) in (0..).zip(lengths) {
        let got = victim.completion();
        assert_eq!(
            got,
            Wc {
                status: SUCCESS,
                opcode: got.opcode,
                len: *len,
                wr_id: id
            }
        );
    }
    victim.is_healthy();
    victim.leaves();
}

// RFC 5044 §§4.1, 4.4: framing and CRC.

#[test]
fn mpa_f_03_pad_of_any_value_is_taken_if_the_crc_covers_it() {
    let mut fpdu = hex("00174143 00000000 00000000 00000001 00000000 68656c6c 6f");
    fpdu.extend([0xde, 0xad, 0x00]);
    let crc = crc32c(&fpdu);
    fpdu.extend(crc.to_le_bytes());
    delivers(|_| fpdu, &[5]);
}

#[test]
fn mpa_f_12_fpdus_may_come_in_pieces_and_in_heaps() {
    let mut victim = or_skip!(Victim::start(16, &[]));
    let mut peer = victim.connect();
    let three = [send(1, b"one"), send(2, &[7; 1500]), send(3, b"")].concat();
    for size in [1, 3, 7, 1461] {
        let first = match size {
            1 => 0,
            3 => 3,
            7 => 6,
            _ => 9,
        };
        let heap = [
            send(first + 1, b"one"),
            send(first + 2, &[7; 1500]),
            send(first + 3, b""),
        ]
        .concat();
        assert_eq!(heap.len(), three.len());
        peer.send_in_pieces(&heap, size);
        for len in [3, 1500, 0] {
            let got = victim.completion();
            assert_eq!((got.status, got.len), (SUCCESS, len), "in pieces of {size}");
        }
    }
    victim.leaves();
}

#[test]
fn mpa_f_16_a_ulpdu_too_short_for_its_header_terminates() {
    for ulpdu in [&[][..], &[0xc1], &[0xc1; 13], &[0x41; 17]] {
        // The code is ours to choose (row MPA-F-16): DDP, local catastrophic; LLP, marker and length disagree, is as good.
        terminates(|_| sealed(ulpdu), &[DdpLocalCatastrophic, MpaMarker]);
    }
}

#[test]
fn mpa_c_04_a_bad_crc_terminates_and_nothing_is_placed() {
    terminates(
        |_| hex("00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c"),
        &[MpaCrc],
    );
    terminates(
        |victim| {
            let mut fpdu = write(victim.stag, victim.address, &[0xaa; 512]);
            let last = fpdu.len() - 1;
            fpdu[last] ^= 1;
            fpdu
        },
        &[MpaCrc],
    );
}

#[test]
fn mpa_f_04_with_crc_off_on_both_sides_the_field_is_not_looked_at() {
    let mut victim = or_skip!(Victim::start(
        4,
        &[("URNIC_MPA_CRC", "false"), ("URNIC_LOG", "off")]
    ));
    let mut peer = urnic_tests::peer::Peer::call(victim.listener());
    let mut request = victim.request();
    request[16] &= !0x40;
    peer.send(&request);
    let reply = peer.take(56);
    assert_eq!(reply[16], 0x10, "C=0, accepted");
    peer.send(&hex("000ec140 00000001 00000000 00000000 badbadba"));
    peer.send(&hex(
        "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 badbadba",
    ));
    assert_eq!(victim.completion().len, 5);
    victim.leaves();
}

#[test]
fn mpa_c_05_one_side_that_wants_crc_gets_it() {
    let mut victim = or_skip!(Victim::start(
        4,
        &[("URNIC_MPA_CRC", "false"), ("URNIC_LOG", "off")]
    ));
    let mut peer = victim.connect();
    peer.send(&hex(
        "00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c",
    ));
    assert_eq!(peer.terminate(), Some(MpaCrc));
    assert_ne!(victim.completion().status, SUCCESS);
    victim.leaves();
}

/// Request and Reply with markers wanted by the victim, and what follows from us, marked by hand.
#[track_caller]
fn marked(stream: &[u8]) -> Option<TerminateError> {
    let victim = match Victim::start(4, &[("URNIC_MPA_MARKERS", "true")]) {
        Ok(victim) => victim,
        Err(reason) => {
            urnic_tests::skip::say(&reason);
            return Some(MpaMarker);
        }
    };
    let mut peer = urnic_tests::peer::Peer::call(victim.listener());
    peer.send(&victim.request());
    let reply = peer.take(56);
    assert_eq!(reply[16] & 0x80, 0x80, "M=1: it wants markers");
    peer.send(stream);
    peer.terminate()
}

#[test]
fn mpa_m_11_a_marker_that_points_elsewhere_terminates() {
    // The stream's first four octets are a marker that belongs to the first FPDU (RFC 5044 §4.3), and points at it: 0.
    let mut stream = hex("00000008 000ec140 00000001 00000000 00000000");
    let crc = crc32c(&stream);
    stream.extend(crc.to_le_bytes());
    assert_eq!(marked(&stream), Some(MpaMarker));
}

// RFC 5041 §7: DDP.

#[test]
fn ddp_v_01_a_write_to_no_stag_terminates() {
    terminates(
        |victim| write(victim.stag ^ 0x5555_5500, victim.address, b"abcd"),
        &[DdpInvalidStag],
    );
}

#[test]
fn ddp_v_02_a_write_out_of_bounds_terminates() {
    terminates(
        |victim| write(victim.stag, victim.address + 4093, b"abcd"),
        &[DdpBaseOrBounds],
    );
    terminates(
        |victim| write(victim.stag, victim.address - 1, b"abcd"),
        &[DdpBaseOrBounds],
    );
}

#[test]
fn ddp_v_03_a_write_to_another_protection_domain_terminates() {
    terminates(
        |victim| write(victim.elsewhere, victim.address, b"abcd"),
        &[DdpStagNotAssociated],
    );
}

#[test]
fn ddp_v_04_a_write_that_wraps_terminates() {
    terminates(|victim| write(victim.stag, u64::MAX, b"ab"), &[DdpToWrap]);
}

#[test]
fn ddp_v_05_a_tagged_segment_of_another_version_terminates() {
    for control in [0xc0, 0xc2, 0xc3] {
        terminates(
            |victim| tagged(control, 0x40, victim.stag, victim.address, b"abcd"),
            &[DdpTaggedVersion],
        );
    }
}

#[test]
fn ddp_v_06_an_untagged_segment_for_no_queue_terminates() {
    terminates(|_| untagged(0x41, 0x43, 9, 1, 0, b"hello"), &[DdpInvalidQueue]);
}

#[test]
fn ddp_v_08_an_msn_out_of_turn_terminates() {
    for msn in [0, 5, u32::MAX] {
        terminates(|_| send(msn, b"hello"), &[DdpInvalidMsn]);
    }
}

#[test]
fn ddp_v_08_an_msn_that_comes_again_terminates() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&[send(1, b"hello"), send(1, b"hello")].concat());
    assert_eq!(peer.terminate(), Some(DdpInvalidMsn));
    assert_eq!(victim.completion().status, SUCCESS);
    assert_eq!(victim.completion().status, FLUSHED);
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn ddp_v_09_an_mo_outside_the_buffer_terminates() {
    terminates(
        |_| untagged(0x41, 0x43, 0, 1, 0x1_0000, b"hello"),
        &[DdpInvalidMo],
    );
}

#[test]
fn ddp_s_08_an_mo_with_a_gap_terminates() {
    terminates(
        |_| {
            [
                untagged(0x01, 0x43, 0, 1, 0, b"abcd"),
                untagged(0x41, 0x43, 0, 1, 8, b"efgh"),
            ]
            .concat()
        },
        &[DdpInvalidMo],
    );
}

#[test]
fn ddp_v_10_a_send_longer_than_its_buffer_terminates() {
    terminates(|_| send(1, &[0x33; 4097]), &[DdpTooLong]);
}

#[test]
fn ddp_v_11_an_untagged_segment_of_another_version_terminates() {
    for control in [0x40, 0x42, 0x43] {
        terminates(
            |_| untagged(control, 0x43, 0, 1, 0, b"hello"),
            &[DdpUntaggedVersion],
        );
    }
}

#[test]
fn ddp_v_14_a_write_without_the_right_terminates() {
    terminates(
        |victim| write(victim.read_only, victim.address, b"abcd"),
        &[RdmapAccessRights, DdpInvalidStag],
    );
}

#[test]
fn ddp_v_15_of_two_faults_the_first_check_speaks() {
    // DV before STag.
    terminates(
        |victim| tagged(0xc2, 0x40, victim.stag ^ 0x5555_5500, 0, b"abcd"),
        &[DdpTaggedVersion],
    );
    // QN before MSN.
    terminates(|_| untagged(0x41, 0x43, 9, 77, 0, b"hello"), &[DdpInvalidQueue]);
}

#[test]
fn ddp_v_16_a_message_in_the_wrong_kind_of_segment_terminates() {
    terminates(
        |victim| tagged(0xc1, 0x43, victim.stag, victim.address, b"abcd"),
        &[RdmapUnexpectedOpcode],
    );
    terminates(
        |_| untagged(0x41, 0x40, 0, 1, 0, b"abcd"),
        &[RdmapUnexpectedOpcode],
    );
}

#[test]
fn ddp_h_01_reserved_bits_are_ignored() {
    delivers(|_| untagged(0x41 | 0x3c, 0x43 | 0x30, 0, 1, 0, b"hello"), &[5]);
}

#[test]
fn ddp_s_04_a_zero_length_write_is_not_checked() {
    let odd = |_: &Victim| {
        [
            write(0, u64::MAX, b""),
            write(0xdead_beef, 0, b""),
            send(1, b"hello"),
        ]
        .concat()
    };
    delivers(odd, &[5]);
}

#[test]
fn ddp_t_08_after_deregistration_nothing_is_placed() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&[write(victim.stag, victim.address, b"before"), send(1, b"")].concat());
    assert_eq!(victim.completion().status, SUCCESS);
    let memory = victim.memory();
    assert_eq!(&memory[..6], b"before");
    victim.revokes();
    peer.send(&write(victim.stag, victim.address, b"after!"));
    assert_eq!(peer.terminate(), Some(DdpInvalidStag));
    assert_eq!(victim.memory(), memory);
    victim.is_healthy();
    victim.leaves();
}

// RFC 5040: RDMAP.

#[test]
fn rdm_m_05_another_rdmap_version_terminates() {
    for octet in [0x03, 0x83, 0xc3] {
        terminates(|_| untagged(0x41, octet, 0, 1, 0, b"hello"), &[RdmapVersion]);
    }
}

#[test]
fn rdm_m_05_an_unknown_opcode_terminates() {
    for opcode in [0x4c, 0x4d, 0x4e, 0x4f] {
        terminates(|_| untagged(0x41, opcode, 0, 1, 0, b""), &[RdmapUnexpectedOpcode]);
    }
}

#[test]
fn rdm_m_03_a_read_request_is_checked() {
    terminates(
        |victim| read_request(1, victim.stag ^ 0x5555_5500, victim.address, 64),
        &[RdmapInvalidStag],
    );
    terminates(
        |victim| read_request(1, victim.stag, victim.address + 4000, 97),
        &[RdmapBaseOrBounds],
    );
    terminates(
        |victim| read_request(1, victim.elsewhere, victim.address, 64),
        &[RdmapStagNotAssociated],
    );
    terminates(
        |victim| read_request(1, victim.stag, u64::MAX, 2),
        &[RdmapToWrap, RdmapBaseOrBounds],
    );
}

#[test]
fn rdm_r_01_a_good_read_request_is_answered() {
    let victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&read_request(1, victim.stag, victim.address + 8, 100));
    let response = peer.ulpdu();
    // Sink STag and offset come back uninterpreted (RDM-R-02).
    assert_eq!(response[..14], hex("c142 00000077 0000000000001000"));
    assert_eq!(response[14..], pristine()[8..108]);
    victim.leaves();
}

#[test]
fn rdm_r_03_a_read_of_nothing_is_not_checked() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&read_request(1, 0xdead_beef, 0x1234, 0));
    assert_eq!(peer.ulpdu(), hex("c142 00000077 0000000000001000"));
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn rdm_r_06_more_reads_than_agreed_terminate_or_wait() {
    // More answers than TCP buffers hold, and nobody who takes them: the device may refuse what exceeds its IRD, or leave
    // further requests in the stream. It may not lose one, nor pile them up.
    const MANY: u32 = 4000;
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    let requests: Vec<u8> = (1..=MANY)
        .flat_map(|msn| read_request(msn, victim.stag, victim.address, 4096))
        .collect();
    peer.send(&requests);
    victim.is_healthy();
    let mut answers = 0;
    while answers < MANY {
        let ulpdu = peer.ulpdu();
        match ulpdu[1] & 0x0f {
            0x2 => answers += u32::from(ulpdu[0] & 0x40 != 0),
            // DDP untagged, no buffer; 1/2/03 and 0/2/07 are what others send.
            0x7 => {
                let codes = [hex("1202"), hex("1203"), hex("0207")];
                assert!(codes.contains(&ulpdu[18..20].to_vec()), "{ulpdu:02x?}");
                break;
            }
            other => panic!("opcode {other}"),
        }
    }
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn rdm_r_07_a_response_nobody_asked_for_terminates() {
    let expected = [
        DdpInvalidStag,
        DdpLocalCatastrophic,
        RdmapUnexpectedOpcode,
        DdpStagNotAssociated,
    ];
    terminates(
        |victim| tagged(0xc1, 0x42, victim.stag, victim.address, b"abcd"),
        &expected,
    );
}

#[test]
fn rdm_s_01_a_send_of_nothing_takes_a_receive() {
    delivers(|_| [send(1, b""), send(2, b"hello")].concat(), &[0, 5]);
}

#[test]
fn rdm_s_04_an_stag_that_cannot_be_invalidated_terminates() {
    let invalidate = |stag: u32| {
        let mut ulpdu = vec![0x41, 0x44];
        ulpdu.extend(stag.to_be_bytes());
        ulpdu.extend([0, 1, 0].map(u32::to_be_bytes).concat());
        ulpdu.extend(b"hello");
        sealed(&ulpdu)
    };
    let expected = [RdmapCannotInvalidate, RdmapProtectedFromInvalidate];
    terminates(|victim| invalidate(victim.stag ^ 0x5555_5500), &expected);
    terminates(|victim| invalidate(victim.elsewhere), &expected);
}

#[test]
fn rdm_c_02_the_invalidate_word_of_a_plain_send_is_ignored() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    let mut ulpdu = vec![0x41, 0x43];
    ulpdu.extend(victim.stag.to_be_bytes());
    ulpdu.extend([0, 1, 0].map(u32::to_be_bytes).concat());
    peer.send(&sealed(&ulpdu));
    assert_eq!(victim.completion().status, SUCCESS);
    peer.send(&[write(victim.stag, victim.address, b"still"), send(2, b"")].concat());
    assert_eq!(victim.completion().status, SUCCESS);
    assert_eq!(&victim.memory()[..5], b"still");
    victim.leaves();
}

#[test]
fn rdm_t_07_a_terminate_carries_the_header_of_what_it_is_about() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    let stag = victim.stag ^ 0x5555_5500;
    peer.send(&write(stag, 0x10, b"abcd"));
    let ulpdu = peer.ulpdu();
    // Untagged, queue 2, MSN 1, MO 0; layer 1, tagged, STag; M and D; length 0x12; the header (vector F-TERM-WRITE-111).
    let mut expected = hex("4147 00000000 00000002 00000001 00000000 1100c000 0012 c140");
    expected.extend(stag.to_be_bytes());
    expected.extend(hex("00000000 00000010"));
    assert_eq!(ulpdu, expected);
    assert_ne!(victim.completion().status, SUCCESS);
    victim.leaves();
}

#[test]
fn rdm_t_06_our_terminate_fails_the_queue_pair_and_is_not_answered() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&hex(
        "00164147 00000000 00000002 00000001 00000000 20020000 7fe42585",
    ));
    assert_ne!(victim.completion().status, SUCCESS);
    peer.finish();
    assert_eq!(peer.end(), End::Closed);
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn rdm_t_08_a_bad_terminate_makes_no_loop() {
    for bad in [
        untagged(0x41, 0x47, 2, 5, 0, &hex("20020000")),
        untagged(0x41, 0x47, 2, 1, 0, &hex("20")),
        untagged(0x41, 0x47, 2, 1, 0, &hex("1101c000 0012 c140")),
        tagged(0xc1, 0x47, 1, 0, &hex("20020000")),
    ] {
        let mut victim = or_skip!(Victim::start(4, &[]));
        let mut peer = victim.connect();
        peer.send(&bad);
        assert_ne!(victim.completion().status, SUCCESS);
        peer.finish();
        let (answer, end) = peer.rest();
        assert_eq!(end, End::Closed);
        // At most one Terminate, never another.
        assert!(answer.len() < 100, "{answer:02x?}");
        victim.is_healthy();
        victim.leaves();
    }
}

// RFC 5044 §8, and TCP.

#[test]
fn mpa_e_01_a_reset_flushes() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&send(1, b"hello"));
    assert_eq!(victim.completion().status, SUCCESS);
    peer.reset();
    assert_eq!(victim.completion().status, FLUSHED);
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn mpa_e_01_an_end_within_an_fpdu_flushes() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    peer.send(&send(1, b"hello")[..20]);
    peer.finish();
    assert_eq!(victim.completion().status, FLUSHED);
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn an_orderly_end_flushes_receives_only_after_the_grace() {
    let mut victim = or_skip!(Victim::start(4, &[("URNIC_NATIVE_FIN_GRACE_MS", "700")]));
    let mut peer = victim.connect();
    peer.send(&send(1, b"hello"));
    assert_eq!(victim.completion().status, SUCCESS);
    peer.finish();
    victim.is_healthy();
    assert_eq!(victim.poll().status, -1, "nothing is flushed at once");
    assert_eq!(victim.completion().status, FLUSHED);
    victim.leaves();
}

#[test]
fn random_fpdus_harm_nobody() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..24 {
        let mut victim = or_skip!(Victim::start(4, &[]));
        let mut peer = victim.connect();
        let bytes: Vec<u8> = (0..64).flat_map(|_| random().to_be_bytes()).collect();
        // Now as a stream of no form at all, now as an FPDU with a good CRC and nothing good in it.
        let whole = random() & 1 == 0;
        peer.send(&if whole { sealed(&bytes) } else { bytes });
        peer.finish();
        assert_ne!(victim.completion().status, SUCCESS);
        peer.rest();
        victim.is_healthy();
        assert_eq!(victim.memory(), pristine());
        victim.leaves();
    }
}

#[test]
fn an_empty_receive_queue_stalls_and_loses_nothing() {
    // Native connections have InfiniBand's manners here: rnr_retry 7 waits (ours is 7).
    let mut victim = or_skip!(Victim::start(1, &[]));
    let mut peer = victim.connect();
    peer.send(&[send(1, b"one"), send(2, b"two")].concat());
    let first = victim.completion();
    assert_eq!((first.status, first.len), (SUCCESS, 3));
    victim.is_healthy();
    assert_eq!(victim.poll().status, -1);
    peer.stays_silent(Duration::from_millis(300));
    victim.leaves();
}
