//! MPA's rows: framing, markers, CRC, errors, and the parameters of start-up that apply in full
//! operation.

use super::vector;
use crate::counters::Counter;
use crate::host::HostMemory;
use crate::memory::{Backing, Registration, Remote};
use crate::rdmap::{Attachment, Rtr, WithoutReceive};
use crate::testing::mock::{ARENA_IOVA, Arena, REMOTE};
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use urnic_device::event::{EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe::SendFlags;
use urnic_wire::mpa::fpdu::{CrcMode, fpdu_len};
use urnic_wire::mpa::{MAX_MULPDU, fpdu, marker};

const SUCCESS: WcStatus = WcStatus::Success;

/// An engine with receives posted, and the region they fill.
fn with_receives(mut peer: Scripted, count: u64, len: usize) -> (Scripted, Region) {
    let region = peer.node.region(count as usize * len, everything());
    for n in 0..count {
        peer.node.post_recv(n, &[region.sge(n as usize * len, len)]);
    }
    (peer, region)
}

fn without_crc(initiator: bool) -> Attachment {
    Attachment {
        crc: false,
        ..agreed(initiator)
    }
}

#[test]
fn mpa_f_01_record_boundaries_survive_any_cut() {
    let (mut peer, _) = with_receives(Scripted::new(), 4, 64);
    let three: Vec<u8> = (1..=3)
        .flat_map(|msn| fpdu_of(&send_segment(true, msn, 0, b"abc")))
        .collect();
    peer.send(&three);
    assert_eq!(
        peer.node.received(),
        [(0, SUCCESS, 3), (1, SUCCESS, 3), (2, SUCCESS, 3)]
    );
    let one = fpdu_of(&send_segment(true, 4, 0, b"defgh"));
    for part in one.chunks(one.len().div_ceil(3)) {
        assert_eq!(peer.node.received(), []);
        peer.send(part);
    }
    assert_eq!(peer.node.received(), [(3, SUCCESS, 5)]);
}

#[test]
fn mpa_f_02_length_counts_only_the_ulpdu() {
    let mut peer = Scripted::new();
    let region = peer.node.filled(b"hello");
    peer.node.post(&Work::send(1).sge(region.sge(0, 5)));
    let received = peer.output();
    assert_eq!(received, vector("F-SEND-hello"));
    assert_eq!((received.len(), &received[..2]), (32, &[0x00, 0x17][..]));
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
}

#[test]
fn mpa_f_03_pad_makes_fpdu_multiple_of_four() {
    let mut peer = Scripted::new();
    for (len, pad) in [0, 3, 2, 1, 0, 3, 2, 1].into_iter().enumerate() {
        peer.node.post(&Work::send(1).inline(&vec![0xee; len]));
        let received = peer.output();
        assert_eq!(received.len(), 2 + 18 + len + pad + 4);
        assert_eq!(received.len() % 4, 0);
        assert!(
            received[20 + len..20 + len + pad].iter().all(|b| *b == 0),
            "pad is sent as zero"
        );
    }
}

#[test]
fn mpa_f_03_pad_of_any_value_is_accepted_under_its_crc() {
    let (mut peer, region) = with_receives(Scripted::new(), 1, 64);
    let mut fpdu = fpdu_of(&send_segment(true, 1, 0, b"hello"));
    let end = fpdu.len() - 4;
    fpdu[end - 3..end].copy_from_slice(&[1, 2, 3]);
    let crc = urnic_wire::crc::crc32c(&fpdu[..end]);
    fpdu[end..].copy_from_slice(&crc.to_le_bytes());
    peer.send(&fpdu);
    assert_eq!(peer.node.received(), [(0, SUCCESS, 5)]);
    assert_eq!(&region.bytes()[..6], b"hello\0");
}

#[test]
fn mpa_f_04_crc_field_is_there_and_ignored_when_crcs_are_off() {
    let peer = Scripted::with(&Shape::default(), without_crc(true));
    let (mut peer, _) = with_receives(peer, 1, 64);
    peer.node.post(&Work::send(1).inline(b"hello"));
    assert_eq!(peer.output().len(), 32);
    let mut fpdu = fpdu_of(&send_segment(true, 1, 0, b"hello"));
    let end = fpdu.len() - 4;
    fpdu[end..].copy_from_slice(&[0xde, 0xad, 0xbe, 0xef]);
    peer.send(&fpdu);
    assert_eq!(peer.node.received(), [(0, SUCCESS, 5)]);
}

#[test]
fn memory_may_be_copied_from_the_middle_of_a_segment() {
    const LEN: usize = 60_000;
    let mut peer = Scripted::with(&Shape::default(), without_crc(true));
    let region = peer.node.region(LEN, everything());
    let payload = pattern(LEN);
    let fpdu = fpdu_of(&write_segment(region.stag, region.base, &payload));
    let (first, second) = fpdu.split_at(LEN / 2);
    peer.send(first);
    let placed = LEN / 2 - 16;
    assert_eq!(&region.bytes()[..placed], &payload[..placed], "read to its place");
    let arena = Arena::new(1 << 16);
    let host: Arc<dyn HostMemory> = arena.clone();
    let elsewhere = Remote::new(&host, REMOTE + ARENA_IOVA, LEN as u64).unwrap();
    let moved = |registration: &mut Registration| registration.backing = Arc::new(Backing::Remote(elsewhere));
    peer.node.memory.reregister(region.stag, moved).unwrap();
    peer.send(second);
    assert_eq!(
        arena.read(ARENA_IOVA + placed as u64, LEN - placed),
        &payload[placed..]
    );
    // The FPDU is placed again; then the memory is unmapped.
    peer.send(&fpdu);
    assert_eq!(arena.read(ARENA_IOVA, LEN), payload);
    assert!(peer.output().is_empty());
    arena.unmapped.store(true, Ordering::Relaxed);
    peer.send(&fpdu);
    // The Terminate's control comes after the length and DDP's header.
    assert_eq!(peer.output()[20..22], [0x11, 0x00], "the STag is invalid");
}

/// The ULPDU lengths of a long Send over a stream with that segment size.
fn ulpdu_lengths(mss: u32, markers: bool, len: usize) -> Vec<usize> {
    let conditions = Conditions {
        mss,
        ..Conditions::default()
    };
    let a = Attachment {
        markers_tx: markers,
        ..agreed(true)
    };
    let b = Attachment {
        markers_rx: markers,
        ..agreed(false)
    };
    let mut pair = Pair::with(&Shape::default(), conditions, a, b);
    pair.wire.record(0);
    let (source, sink) = (pair.a.filled(&pattern(len)), pair.b.region(len, everything()));
    pair.b.post_recv(1, &[sink.sge(0, len)]);
    pair.a.post(&Work::send(1).sge(source.sge(0, len)));
    pair.run_now();
    assert_eq!(pair.b.received(), [(1, SUCCESS, len as u32)]);
    assert!(sink.bytes() == pattern(len));
    let mut bytes = pair.wire.recorded(0);
    let (mut offset, mut lengths) = (0, Vec::new());
    while !bytes.is_empty() {
        let taken = if markers {
            let (ulpdu, taken) = marker::parse(offset, &mut bytes, CrcMode::On).unwrap();
            lengths.push(ulpdu.len());
            taken
        } else {
            let (ulpdu, _) = fpdu::parse(&bytes, CrcMode::On).unwrap();
            lengths.push(ulpdu.len());
            fpdu_len(ulpdu.len())
        };
        bytes.drain(..taken);
        offset += taken as u64;
    }
    lengths
}

#[test]
fn mpa_f_06_no_ulpdu_exceeds_64768_however_large_the_segments() {
    for markers in [false, true] {
        let lengths = ulpdu_lengths(65483, markers, 200_000);
        // Two bytes less than the limit, so the longest need no padding.
        assert_eq!(lengths.iter().max(), Some(&usize::from(MAX_MULPDU - 2)));
    }
}

#[test]
fn mpa_f_07_longer_ulpdus_are_accepted_and_counted() {
    let (mut peer, region) = with_receives(Scripted::new(), 1, 65474);
    let payload = pattern(65474 - 18);
    peer.send_ulpdu(&send_segment(true, 1, 0, &payload));
    assert_eq!(peer.node.received(), [(0, SUCCESS, 65456)]);
    assert!(region.bytes()[..65456] == payload);
    assert_eq!(peer.node.count(Counter::OversizeUlpdus), 1);
}

#[test]
fn mpa_f_08_mulpdu_without_markers() {
    for (mss, mulpdu) in [(1460, 1454), (1448, 1442), (8948, 8942)] {
        assert_eq!(ulpdu_lengths(mss, false, 40_000)[0], mulpdu);
    }
}

#[test]
fn mpa_f_09_mulpdu_with_markers() {
    for (mss, mulpdu) in [(1460, 1442), (1448, 1430), (536, 522), (8948, 8870)] {
        assert_eq!(ulpdu_lengths(mss, true, 40_000)[0], mulpdu);
    }
}

#[test]
fn mpa_f_10_mulpdu_is_never_below_128() {
    for markers in [false, true] {
        assert_eq!(ulpdu_lengths(88, markers, 1000)[0], 128);
    }
}

#[test]
fn mpa_f_12_identical_completions_however_the_stream_is_cut() {
    let mut script = Vec::new();
    for msn in 1..=20u32 {
        script.extend(fpdu_of(&send_segment(true, msn, 0, &pattern(msn as usize * 37))));
    }
    let mut outcomes = Vec::new();
    for cut in [1, 3, 7, 1461, script.len()] {
        let (mut peer, region) = with_receives(Scripted::new(), 20, 1024);
        for part in script.chunks(cut) {
            peer.send(part);
        }
        outcomes.push((peer.node.received(), region.bytes()));
    }
    assert_eq!(outcomes[0].0.len(), 20);
    assert!(outcomes.windows(2).all(|o| o[0] == o[1]));
}

#[test]
fn mpa_f_13_nothing_of_an_fpdu_with_a_bad_crc_is_placed() {
    let conditions = Conditions {
        mss: 1460,
        ..Conditions::default()
    };
    let mut pair = Pair::with(&Shape::default(), conditions, agreed(true), agreed(false));
    let (source, target) = (pair.a.filled(&pattern(4000)), pair.b.region(4000, everything()));
    // Segments of 1440 bytes, the third of them 1120; its last bytes are damaged.
    let third = 2 * fpdu_len(1454);
    pair.wire.damage(0, third as u64 + 1000, 0x10);
    pair.a
        .post(&Work::write(1, target.stag, target.base).sge(source.sge(0, 4000)));
    pair.run_now();
    let placed = target.bytes();
    assert!(placed[..2880] == pattern(4000)[..2880]);
    assert!(placed[2880..].iter().all(|b| *b == 0));
    assert_eq!(pair.b.faults(), [(QpFault::TerminateSent, 0x2002_0000)]);
    assert_eq!(pair.b.count(Counter::RxCrcErrors), 1);
}

#[test]
fn mpa_f_15_a_smaller_segment_size_makes_later_fpdus_smaller() {
    let conditions = Conditions {
        mss: 8948,
        capacity: 65536,
        ..Conditions::default()
    };
    let mut pair = Pair::with(&Shape::default(), conditions, agreed(true), agreed(false));
    let len = 2 << 20;
    let (source, target) = (pair.a.filled(&pattern(len)), pair.b.region(len, everything()));
    pair.wire.record(0);
    pair.a
        .post(&Work::write(1, target.stag, target.base).sge(source.sge(0, len)));
    pair.a.pump();
    pair.wire.set_mss(1460);
    pair.advance(Duration::from_secs(2));
    pair.run_now();
    assert!(target.bytes() == pattern(len), "offsets are continuous");
    let bytes = pair.wire.recorded(0);
    let (mut rest, mut lengths) = (&bytes[..], Vec::new());
    while let Ok((ulpdu, after)) = fpdu::parse(rest, CrcMode::On) {
        (rest, _) = (after, lengths.push(ulpdu.len()));
    }
    assert_eq!((lengths[0], lengths[lengths.len() - 2]), (8942, 1454));
}

#[test]
fn mpa_f_16_ulpdus_too_short_for_a_header_end_the_stream() {
    for (length, first) in [(0, 0x41), (13, 0xc1), (17, 0x41)] {
        let (mut peer, _) = with_receives(Scripted::new(), 1, 64);
        let mut ulpdu = vec![0; length];
        if let Some(byte) = ulpdu.first_mut() {
            *byte = first;
        }
        peer.send_ulpdu(&ulpdu);
        assert_eq!(peer.terminate()[..2], [0x10, 0x00]);
        assert_eq!(peer.node.received(), [(0, WcStatus::WrFlushErr, 0)]);
    }
}

#[test]
fn mpa_m_01_and_02_markers_only_when_requested() {
    let a = Attachment {
        markers_tx: true,
        ..agreed(true)
    };
    let b = Attachment {
        markers_rx: true,
        ..agreed(false)
    };
    let mut pair = Pair::with(&Shape::default(), Conditions::default(), a, b);
    pair.wire.record(0);
    pair.wire.record(1);
    let (left, right) = (pair.a.region(64, everything()), pair.b.region(64, everything()));
    pair.a.post_recv(1, &[left.sge(0, 64)]);
    pair.b.post_recv(1, &[right.sge(0, 64)]);
    pair.a.post(&Work::send(1).inline(b"hello"));
    pair.run_now();
    pair.b.post(&Work::send(1).inline(b"hello"));
    pair.run_now();
    let marked = pair.wire.recorded(0);
    assert_eq!(marked[..4], [0; 4], "the first bytes are a marker");
    assert_eq!(marked.len(), 36);
    assert_eq!(pair.wire.recorded(1), vector("F-SEND-hello"));
    assert_eq!(pair.a.received(), [(1, SUCCESS, 5)]);
    assert_eq!(pair.b.received(), [(1, SUCCESS, 5)]);
}

/// The output of an engine that inserts markers, for zeros of these lengths.
fn marked_sends(lengths: &[usize]) -> Vec<u8> {
    let attachment = Attachment {
        markers_tx: true,
        ..agreed(true)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.wire.set_mss(9000);
    peer.advance(Duration::from_secs(2));
    for len in lengths {
        if *len == 5 {
            peer.node.post(&Work::send(1).inline(b"hello"));
        } else {
            let zeros = peer.node.filled(&vec![0; *len]);
            peer.node.post(&Work::send(1).sge(zeros.sge(0, *len)));
            peer.run();
        }
    }
    peer.output()
}

#[test]
fn mpa_m_03_first_marker_opens_the_stream() {
    assert_eq!(marked_sends(&[24]), vector("RFC5044-FIG5"));
}

#[test]
fn mpa_m_05_fpduptr_inside_an_fpdu() {
    // A first FPDU of 492 bytes, with the marker before it 496: figure 6 begins there less one
    // word.
    let sent = marked_sends(&[462, 24]);
    let figure = vector("RFC5044-FIG6");
    assert_eq!(sent[492..], figure[..]);
}

#[test]
fn mpa_m_06_marker_between_fpdus_belongs_to_the_next() {
    let sent = marked_sends(&[484, 5]);
    assert_eq!(sent[512..], vector("M-BETWEEN-2nd"));
}

#[test]
fn mpa_m_07_marker_between_pad_and_crc() {
    let sent = marked_sends(&[488, 5]);
    assert_eq!(sent[508..520], vector("M-PADCRC-tail"));
    assert_eq!(sent[520..], vector("M-PADCRC-2nd"));
}

#[test]
fn mpa_m_08_all_markers_of_an_fpdu_point_to_its_start() {
    let sent = marked_sends(&[1200]);
    assert_eq!(sent.len(), 1236);
    assert_eq!(sent[512..516], vector("M-MULTI-m1"));
    assert_eq!(sent[1024..1028], vector("M-MULTI-m2"));
    assert_eq!(sent[1232..], vector("M-MULTI-crc"));
}

/// An engine that receives markers, and the bytes of one marked Send.
fn marked_peer(len: usize) -> (Scripted, Region, Vec<u8>) {
    let attachment = Attachment {
        markers_rx: true,
        ..agreed(true)
    };
    let (peer, region) = with_receives(Scripted::with(&Shape::default(), attachment), 1, len);
    let ulpdu = send_segment(true, 1, 0, &pattern(len));
    let mut bytes = vec![0; 2 * len + 64];
    let taken = marker::emit(0, &ulpdu, CrcMode::On, &mut bytes);
    bytes.truncate(taken);
    (peer, region, bytes)
}

fn seal_fpdu(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let crc = urnic_wire::crc::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn mpa_m_04_reserved_half_of_a_marker_is_ignored() {
    let (mut peer, _, mut bytes) = marked_peer(1200);
    bytes[512..514].copy_from_slice(&[0xff, 0xff]);
    seal_fpdu(&mut bytes);
    peer.send(&bytes);
    assert_eq!(peer.node.received(), [(0, SUCCESS, 1200)]);
}

#[test]
fn mpa_m_10_payload_is_delivered_without_markers() {
    let (mut peer, region, bytes) = marked_peer(3000);
    for part in bytes.chunks(100) {
        peer.send(part);
    }
    assert_eq!(peer.node.received(), [(0, SUCCESS, 3000)]);
    assert!(region.bytes() == pattern(3000));
}

#[test]
fn mpa_m_11_wrong_fpduptr_with_a_good_crc() {
    let (mut peer, region, mut bytes) = marked_peer(1200);
    bytes[514..516].copy_from_slice(&[0x01, 0x00]);
    seal_fpdu(&mut bytes);
    peer.send(&bytes);
    assert_eq!(peer.terminate(), hex("20030000"));
    assert!(region.bytes().iter().all(|b| *b == 0));
}

#[test]
fn mpa_c_03_and_04_a_damaged_fpdu_ends_the_stream_with_code_2() {
    let (mut peer, _) = with_receives(Scripted::new(), 1, 64);
    let mut damaged = vector("F-SEND-hello");
    damaged[20] ^= 1;
    peer.send(&damaged);
    let received = peer.output();
    assert_eq!(received, vector("F-TERM-202"));
    assert!(peer.finished);
    assert_eq!(peer.node.received(), [(0, WcStatus::WrFlushErr, 0)]);
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x2002_0000)]);
}

#[test]
fn mpa_e_02_nothing_after_an_error_is_delivered() {
    let mut peer = Scripted::new();
    let target = peer.node.region(16, everything());
    let mut damaged = fpdu_of(&write_segment(target.stag, target.base, b"bad!"));
    damaged[17] ^= 1;
    damaged.extend(fpdu_of(&write_segment(target.stag, target.base, b"good")));
    peer.send(&damaged);
    assert_eq!(peer.terminate(), hex("20020000"));
    peer.send_ulpdu(&write_segment(target.stag, target.base, b"good"));
    assert_eq!(target.bytes(), [0; 16]);
}

#[test]
fn mpa_e_01_reset_flushes_and_is_reported() {
    let (mut peer, _) = with_receives(Scripted::new(), 2, 64);
    peer.rst();
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert!(peer.node.has_event(EventKind::Closed));
    assert_eq!(
        peer.node.received(),
        [(0, WcStatus::WrFlushErr, 0), (1, WcStatus::WrFlushErr, 0)]
    );
    assert_eq!(peer.node.engine.state(), QpState::Err);
}

#[test]
fn mpa_e_01_fin_inside_an_fpdu_is_a_lost_stream() {
    let (mut peer, _) = with_receives(Scripted::new(), 1, 64);
    peer.send(&vector("F-SEND-hello")[..20]);
    peer.fin();
    assert_eq!(peer.node.faults(), [(QpFault::StreamLost, 0x2001_0000)]);
    assert_eq!(peer.node.received(), [(0, WcStatus::WrFlushErr, 0)]);
}

#[test]
fn mpa_e_05_graceful_close_is_reported_and_is_no_error() {
    let (mut peer, _) = with_receives(Scripted::new(), 1, 64);
    peer.fin();
    assert!(peer.node.has_event(EventKind::PeerClosed));
    assert!(peer.node.has_event(EventKind::Closed));
    assert_eq!(peer.node.faults(), []);
    assert!(peer.finished, "our half closes, too");
    assert_eq!(peer.node.received(), [(0, WcStatus::WrFlushErr, 0)]);
}

#[test]
fn mpa_s_13_responder_sends_nothing_before_a_valid_fpdu() {
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    peer.node.post(&Work::send(1).inline(b"hello"));
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.sent(), []);
    assert!(!peer.node.has_event(EventKind::FirstFpdu));
    peer.send(&vector("F-WRITE0-RTR"));
    assert!(peer.node.has_event(EventKind::FirstFpdu));
    assert_eq!(peer.output(), vector("F-SEND-hello"));
    assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
}

#[test]
fn s001_03_a_responder_with_a_ready_peer_sends_first() {
    let attachment = Attachment {
        fence_open: true,
        ..agreed(false)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.node.post(&Work::send(1).inline(b"hello"));
    assert_eq!(peer.output(), vector("F-SEND-hello"));
}

/// The payload of a large FPDU without CRC goes to its place as it arrives: that is no FPDU yet.
#[test]
fn mpa_s_13_a_part_of_the_first_fpdu_opens_no_fence() {
    let without_crc = Attachment {
        crc: false,
        ..agreed(false)
    };
    let mut peer = Scripted::with(&Shape::default(), without_crc);
    let region = peer.node.region(40_000, everything());
    let write = write_segment(region.stag, region.base, &[7; 40_000]);
    let mut bytes = vec![0; fpdu_len(write.len())];
    fpdu::emit(&write, CrcMode::Off, &mut bytes);
    peer.node.post(&Work::send(1).inline(b"hello"));
    for piece in [
        &bytes[..100],
        &bytes[100..30_000],
        &bytes[30_000..bytes.len() - 1],
    ] {
        peer.send(piece);
        assert!(peer.output().is_empty());
    }
    assert_eq!(region.bytes()[29_000], 7, "placed as it arrived");
    peer.send(&bytes[bytes.len() - 1..]);
    assert_eq!(peer.output_ulpdus().len(), 1);
}

/// A large FPDU that arrives in pieces: nothing of it is in its place before its CRC is known.
#[test]
fn mpa_f_13_a_large_fpdu_is_placed_with_a_good_crc_only() {
    let mut peer = Scripted::new();
    let region = peer.node.region(40_000, everything());
    let mut bytes = fpdu_of(&write_segment(region.stag, region.base, &[7; 40_000]));
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    for piece in [
        &bytes[..100],
        &bytes[100..30_000],
        &bytes[30_000..last],
        &bytes[last..],
    ] {
        peer.send(piece);
        assert!(region.bytes().iter().all(|&byte| byte == 0));
    }
    assert_eq!(peer.terminate(), hex("20020000"));
}

#[test]
fn mpa_s_13_with_markers_not_even_the_first_marker() {
    let attachment = Attachment {
        markers_tx: true,
        ..agreed(false)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.node.post(&Work::send(1).inline(b"hello"));
    assert!(peer.output().is_empty());
}

#[test]
fn empa_16_35_38_start_up_errors_are_sent_in_the_first_fpdu() {
    for (control, name) in [
        (0x2007_0000, "F-TERM-207"),
        (0x2006_0000, "F-TERM-206"),
        (0x2005_0000, "F-TERM-205"),
    ] {
        let attachment = Attachment {
            terminate: control,
            ..agreed(true)
        };
        let mut peer = Scripted::with(&Shape::default(), attachment);
        let received = peer.output();
        assert_eq!(received, vector(name));
        assert!(peer.finished);
        assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, control)]);
    }
}

/// The output of an initiator: an RTR, then "hello".
fn after_rtr(rtr: Rtr) -> (Vec<u8>, Scripted) {
    let attachment = Attachment {
        rtr_send: Some(rtr),
        ..agreed(true)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.node.post(&Work::send(9).inline(b"hello"));
    let received = peer.output();
    (received, peer)
}

#[test]
fn empa_17_the_rtr_goes_first() {
    for (rtr, name) in [
        (Rtr::Send, "F-SEND0-RTR"),
        (Rtr::Write, "F-WRITE0-RTR"),
        (Rtr::Read, "F-RREQ0-RTR"),
    ] {
        let (received, _) = after_rtr(rtr);
        assert!(received.starts_with(&vector(name)), "{rtr:?}");
        assert!(received.len() > vector(name).len());
    }
}

#[test]
fn empa_18_the_rtr_makes_no_completion_at_its_sender() {
    for rtr in [Rtr::Send, Rtr::Write, Rtr::Read] {
        let (_, mut peer) = after_rtr(rtr);
        if rtr == Rtr::Read {
            peer.send(&vector("F-RRESP0"));
        }
        assert_eq!(peer.node.sent(), [(9, SUCCESS)], "{rtr:?}");
        assert_eq!(peer.node.sq_outstanding(), 0);
        assert!(peer.node.engine.is_quiet());
    }
}

#[test]
fn empa_18_and_19_the_rtr_takes_no_receive_at_its_receiver() {
    for (rtr, name) in [
        (Rtr::Send, "F-SEND0-RTR"),
        (Rtr::Write, "F-WRITE0-RTR"),
        (Rtr::Read, "F-RREQ0-RTR"),
    ] {
        let attachment = Attachment {
            rtr_expect: Some(rtr),
            ird: 0,
            ..agreed(false)
        };
        let (mut peer, _) = with_receives(Scripted::with(&Shape::default(), attachment), 2, 64);
        peer.send(&vector(name));
        assert_eq!(peer.node.received(), []);
        assert_eq!(peer.node.count(Counter::RtrMismatches), 0);
        let answer = peer.output();
        assert_eq!(
            answer,
            if rtr == Rtr::Read {
                vector("F-RRESP0")
            } else {
                Vec::new()
            }
        );
        // The next Send has MSN 2 only after a Send.
        let msn = if rtr == Rtr::Send { 2 } else { 1 };
        peer.send_ulpdu(&send_segment(true, msn, 0, b"hello"));
        assert_eq!(peer.node.received(), [(0, SUCCESS, 5)]);
    }
}

#[test]
fn empa_19_msns_after_each_rtr() {
    let msn_of_hello = |rtr| {
        let (received, _) = after_rtr(rtr);
        let hello = &received[received.len() - 32..];
        be32(&hello[12..])
    };
    assert_eq!(msn_of_hello(Rtr::Send), 2);
    assert_eq!(msn_of_hello(Rtr::Write), 1);
    assert_eq!(msn_of_hello(Rtr::Read), 1);
    let attachment = Attachment {
        rtr_send: Some(Rtr::Read),
        ..agreed(true)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    let sink = peer.node.region(8, everything());
    peer.node.post(&Work::read(1, 0x200, 0).sge(sink.sge(0, 8)));
    let ulpdus = peer.output_ulpdus();
    assert_eq!(
        be32(&ulpdus[1][10..]),
        2,
        "the Read after a Read RTR has MSN 2 on queue 1"
    );
}

#[test]
fn empa_20_a_zero_length_write_may_name_any_stag_and_offset() {
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    peer.send_ulpdu(&write_segment(0, u64::MAX, b""));
    assert!(peer.node.has_event(EventKind::FirstFpdu));
    assert_eq!(peer.node.engine.state(), QpState::Rts);
}

#[test]
fn empa_21_any_first_fpdu_opens_and_a_mismatch_is_counted() {
    let attachment = Attachment {
        rtr_expect: Some(Rtr::Read),
        ..agreed(false)
    };
    let (mut peer, _) = with_receives(Scripted::with(&Shape::default(), attachment), 1, 64);
    peer.send(&vector("F-SEND-hello"));
    assert_eq!(peer.node.received(), [(0, SUCCESS, 5)]);
    assert_eq!(peer.node.count(Counter::RtrMismatches), 1);
}

#[test]
fn empa_21_a_strict_responder_ends_on_another_first_fpdu() {
    let attachment = Attachment {
        rtr_expect: Some(Rtr::Read),
        strict_rtr: true,
        ..agreed(false)
    };
    let (mut peer, _) = with_receives(Scripted::with(&Shape::default(), attachment.clone()), 1, 64);
    peer.send(&vector("F-SEND-hello"));
    assert_eq!(peer.node.faults(), [(QpFault::TerminateSent, 0x2005_0000)]);
    assert_eq!(peer.node.received(), [(0, WcStatus::WrFlushErr, 0)]);
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.send(&vector("F-RREQ0-RTR"));
    assert_eq!(peer.node.engine.state(), QpState::Rts);
    assert_eq!(peer.node.count(Counter::RtrMismatches), 0);
}

#[test]
fn empa_22_sends_wait_for_the_fence_or_are_flushed() {
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    for n in 0..3 {
        peer.node
            .post(&Work::send(n).inline(b"x").flags(SendFlags::SOLICITED));
    }
    peer.run();
    peer.rst();
    let flushed: Vec<_> = (0..3).map(|n| (n, WcStatus::WrFlushErr)).collect();
    assert_eq!(peer.node.sent(), flushed);
}

#[test]
fn empa_23_an_error_before_the_fence_opens_is_not_reported() {
    let mut peer = Scripted::with(&Shape::default(), agreed(false));
    let mut damaged = vector("F-SEND-hello");
    damaged[20] ^= 1;
    peer.send(&damaged);
    assert!(peer.output().is_empty());
    assert!(peer.wire.is_reset());
    assert_eq!(peer.node.engine.state(), QpState::Err);
}

#[test]
fn empa_40_a_refused_first_fpdu_reports_no_start() {
    let expecting = |strict_rtr| Attachment {
        rtr_expect: Some(Rtr::Write),
        strict_rtr,
        ..agreed(false)
    };
    let terminate = untagged(0x41, 0x47, 0, 2, 1, 0, &hex("20070000"));
    for (what, ulpdu, strict) in [
        ("a Terminate", terminate, false),
        ("a Send with a wrong MSN", send_segment(true, 2, 0, b"x"), false),
        ("a Write to an unknown STag", write_segment(0x99, 0, b"x"), false),
        (
            "a long Write to an unknown STag",
            write_segment(0x99, 0, &[0; 60_000]),
            false,
        ),
        ("another RTR than agreed on", send_segment(true, 1, 0, b""), true),
    ] {
        let mut peer = Scripted::with(&Shape::default(), expecting(strict));
        peer.node.post(&Work::send(1).inline(b"hello"));
        peer.send_ulpdu(&ulpdu);
        assert!(!peer.node.has_event(EventKind::FirstFpdu), "{what}");
        let sent = peer.output_ulpdus();
        let only_terminates = sent.iter().all(|ulpdu| ulpdu[1] & 0xf == 7);
        assert!(sent.len() <= 1 && only_terminates, "{what}: {sent:x?}");
        assert_eq!(peer.node.sent(), [(1, WcStatus::WrFlushErr)], "{what}");
    }
}

#[test]
fn empa_40_a_first_message_without_a_receive_starts() {
    let attachment = Attachment {
        without_receive: WithoutReceive::Waits,
        ..agreed(false)
    };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.send(&vector("F-SEND-hello"));
    assert!(
        peer.node.has_event(EventKind::FirstFpdu),
        "the message waits, and is valid"
    );
}

#[test]
fn mpa_s_16_an_fpdu_with_the_reply_is_delivered_and_counted() {
    for (initiator, early) in [(true, 1), (false, 0)] {
        let scripted = Scripted::with(&Shape::default(), agreed(initiator));
        let (mut peer, _) = with_receives(scripted, 2, 64);
        peer.send(&vector("F-SEND-hello"));
        assert_eq!(peer.node.received(), [(0, WcStatus::Success, 5)]);
        peer.send_ulpdu(&send_segment(true, 2, 0, b"later"));
        assert_eq!(peer.node.count(Counter::EarlyFpdus), early);
    }
}
