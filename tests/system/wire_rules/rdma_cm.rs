//! rdma_cm listeners as MPA's responder (RFC 5044 §7, RFC 6581; conformance §§1.4, 2, 3, 13.3):
//! answers byte by byte, and the events that the program gets.

use std::net::SocketAddr;
use std::time::Duration;

use urnic_tests::framing::Framing;
use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::{CRC, ENHANCED, Frame, MARKERS, REJECT};
use urnic_tests::target_process::cm::{CmTargetProcess, Event, cm_event};
use urnic_tests::target_process::{state, status};
use urnic_tests::ulpdu::{complaint, read_request, send, terminate, write};

pub(super) const REQUEST_KEY: &str = "4d504120 49442052 65712046 72616d65";
pub(super) const REPLY_KEY: &str = "4d504120 49442052 65702046 72616d65";
/// The key of the mail of 2007, in bytes and in words.
const RTR_KEYS: [&str; 2] = [
    "4d504120 49442052 74522046 72616d65",
    "4d504120 49442052 74722046 72616d65",
];
/// The IRD and ORD of the program.
pub(super) const DEPTHS: (u8, u8) = (8, 16);
/// `ECONNRESET`, `ETIMEDOUT`.
pub(super) const ECONNRESET: i64 = 104;
pub(super) const ETIMEDOUT: i64 = 110;
/// Completions of a queue pair's initial receives when no message comes.
pub(super) const ALL_FLUSHED: [(u64, u64); 4] = [
    (0, status::FLUSHED),
    (1, status::FLUSHED),
    (2, status::FLUSHED),
    (3, status::FLUSHED),
];

/// The zero-length Read and Write that open connections.
pub(super) fn rtr_read() -> Vec<u8> {
    read_request(1, 1, 0, 0)
}

pub(super) fn rtr_write() -> Vec<u8> {
    write(1, 0, b"")
}

/// A program with a listener.
pub(super) struct Scene {
    pub(super) target: CmTargetProcess,
    pub(super) listener: u64,
    pub(super) at: SocketAddr,
}

impl Scene {
    pub(super) fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        let mut target = CmTargetProcess::start(variables)?;
        let (listener, at) = target.listens(16);
        Ok(Self { target, listener, at })
    }

    /// Connects and sends these bytes.
    pub(super) fn connect(&self, bytes: &[u8]) -> Peer {
        let mut peer = Peer::connect(self.at);
        peer.send(bytes);
        peer
    }

    /// Waits until the program gets the event of a Request.
    #[track_caller]
    pub(super) fn request_event(&mut self) -> Event {
        self.target
            .expects_event(self.listener, cm_event::CONNECT_REQUEST, 0)
    }

    /// Accepts a Request with these parameters; returns its event, the connection and the Reply.
    #[track_caller]
    pub(super) fn accepted(&mut self, request: &[u8], depths: (u8, u8), data: &[u8]) -> (Event, Peer, Frame) {
        let mut peer = self.connect(request);
        let event = self.request_event();
        assert_eq!(self.target.accepts(event.about, depths, data), 0);
        let reply = Frame::read(&mut peer);
        (event, peer, reply)
    }

    /// Checks that this message opens the fence and traffic goes both ways; then the peer closes.
    #[track_caller]
    pub(super) fn opens(&mut self, id: u64, peer: &mut Peer, rtr: &[u8], established: bool) {
        peer.send_ulpdus(&[rtr]);
        if !established {
            self.target.expects_event(id, cm_event::ESTABLISHED, 0);
        }
        if rtr[1] == 0x41 {
            assert_eq!(peer.ulpdu()[..2], [0xc1, 0x42]);
        }
        let sends = u32::from(rtr[1] == 0x43);
        peer.send_ulpdus(&[send(sends + 1, b"hello")]);
        self.target.completes(id, &[(0, status::SUCCESS)]);
        self.target.sends(id, 100, 0);
        assert_eq!(peer.ulpdu(), send(1, b""));
        self.target.completes(id, &[(100, status::SUCCESS)]);
        peer.finish();
        self.target.expects_event(id, cm_event::DISCONNECTED, 0);
        assert_eq!(peer.end(), End::Closed);
        self.target.completes(id, &ALL_FLUSHED[1..]);
        assert!(self.target.has_no_completion(id));
        assert_eq!(self.target.state(id), state::ERR);
        self.target.destroys(id);
    }

    /// Checks that the listener serves others, and that the program got no unexpected event.
    #[track_caller]
    pub(super) fn continues(&mut self) {
        assert!(self.target.is_quiet(), "an event too many");
        let request = hex(&format!("{REQUEST_KEY} 50020004 8010c008"));
        let (event, mut peer, _) = self.accepted(&request, DEPTHS, &[]);
        self.opens(event.about, &mut peer, &rtr_read(), false);
        assert!(self.target.is_quiet(), "an event too many");
    }

    #[track_caller]
    pub(super) fn ends(mut self) {
        self.continues();
        self.target.quits();
    }
}

/// A Request without private data beyond its word.
fn request(flags: u8, revision: u8, word: Option<u32>) -> Vec<u8> {
    let flags = flags | if word.is_some() { ENHANCED } else { 0 };
    let private_data = word.map_or(Vec::new(), |word| word.to_be_bytes().to_vec());
    Frame {
        request: true,
        flags,
        revision,
        private_data,
    }
    .to_bytes()
}

/// Checks that the listener closes the connection after these bytes, without an answer or an event.
#[track_caller]
fn closed_without_a_reply(frames: &[Vec<u8>]) {
    let scene = or_skip!(Scene::start(&[]));
    for bytes in frames {
        scene.connect(bytes).end();
    }
    scene.ends();
}

#[test]
fn mpa_s_04_a_wrong_key_is_closed_without_a_reply() {
    closed_without_a_reply(&[
        hex(&format!("{REPLY_KEY} 40010000")),
        hex(&format!("{} 00010000", RTR_KEYS[0])),
        hex(&format!("{} 00010000", RTR_KEYS[1])),
        hex("4d504120 49442052 65712046 72616d64 40010000"),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0; 64],
        vec![0xff; 4096],
    ]);
}

#[test]
fn mpa_s_09_s_10_empa_08_malformed_requests_are_closed() {
    closed_without_a_reply(
        &[
            "40 03 0000",
            "40 81 0000",
            "40 ff 0000",
            "40 01 0201",
            "40 01 ffff",
            "50 02 0000",
            "50 02 0003 aaaaaa",
        ]
        .map(|rest| hex(&format!("{REQUEST_KEY} {rest}"))),
    );
}

#[test]
fn mpa_s_20_a_revision_0_peer_gets_revision_1_and_is_closed() {
    let scene = or_skip!(Scene::start(&[]));
    let mut peer = scene.connect(&hex(&format!("{REQUEST_KEY} c0000000")));
    assert_eq!(peer.read_bytes(20), hex(&format!("{REPLY_KEY} 60010000")));
    assert_eq!(peer.end(), End::Closed);
    scene.ends();
}

#[test]
fn mpa_s_06_silence_and_half_frames_are_closed_in_time() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_STARTUP_TIMEOUT_RESPONDER_S", "1")]));
    let bytes = hex(&format!("{REQUEST_KEY} 50020008 8010c008 554c5021"));
    let foreign_peers = [0, 1, 19, 20, 24, 27].map(|len| scene.connect(&bytes[..len]));
    // They do not affect others meanwhile.
    scene.continues();
    for mut foreign_peer in foreign_peers {
        foreign_peer.end();
    }
    scene.ends();
}

#[test]
fn every_request_vector_gets_its_reply() {
    let mut scene = or_skip!(Scene::start(&[]));
    let all = (255, 255);
    let p2p = (8, 16);
    // Request; Reply; the peer's ORD and IRD as the program gets them; the first message.
    for (requested, replied, depths, rtr) in [
        // MPA-REQ-R1, -MC, -NOCRC: our setting decides about the CRC.
        ("40010000", "40010000", None, rtr_write()),
        ("c0010000", "40010000", None, rtr_write()),
        ("00010000", "40010000", None, rtr_write()),
        // S001-REQ, with the option off.
        ("50010000", "40010000", None, rtr_write()),
        // EMPA-09: revision 2 without a word.
        ("40020000", "40020000", None, rtr_write()),
        // MPA-REQ-R2-P2P, -CS, -ALLRTR, -NONEG, -PD, -RPCRDMA.
        ("50020004 8010c008", "50020004 80084010", Some(p2p), rtr_read()),
        ("50020004 00100008", "50020004 00080010", Some(p2p), rtr_write()),
        ("50020004 c001c001", "50020004 80084001", Some((1, 1)), rtr_read()),
        ("50020004 3fff3fff", "50020004 3fff3fff", None, rtr_write()),
        (
            "50020008 8010c008 554c5021",
            "50020004 80084010",
            Some(p2p),
            rtr_read(),
        ),
        (
            "5002000c 80104001 f6ab0e18 01010303",
            "50020004 80084010",
            Some((1, 16)),
            rtr_read(),
        ),
    ] {
        let bytes = hex(&format!("{REQUEST_KEY} {requested}"));
        let (event, mut peer, reply) = scene.accepted(&bytes, DEPTHS, &[]);
        assert_eq!(
            reply.to_bytes(),
            hex(&format!("{REPLY_KEY} {replied}")),
            "to {requested}"
        );
        let reported = (event.ird, event.ord);
        match depths {
            // EMPA-36: as they came.
            Some(depths) => assert_eq!(reported, depths, "of {requested}"),
            None => assert!(
                reported.0 > 1 && reported.1 > 1 && reported <= all,
                "{reported:?} of {requested}"
            ),
        }
        let word = if bytes[16] & ENHANCED != 0 && bytes[17] == 2 {
            4
        } else {
            0
        };
        assert_eq!(event.private_data, bytes[20 + word..], "of {requested}");
        peer.inbound = Framing::new(true, bytes[16] & MARKERS != 0);
        // Without an RTR to wait for, the program gets its event at once.
        let at_once = reply.word().is_none_or(|word| word & 0x8000_0000 == 0);
        if at_once {
            scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
        }
        scene.opens(event.about, &mut peer, &rtr, at_once);
    }
    scene.ends();
}

#[test]
fn mpa_s_07_s_08_reserved_flags_and_reject_are_ignored() {
    let mut scene = or_skip!(Scene::start(&[]));
    for flags in [0x0f, REJECT, REJECT | 0x0f] {
        let bytes = request(CRC | flags, 2, Some(0x8010_c008));
        let (event, mut peer, reply) = scene.accepted(&bytes, DEPTHS, &[]);
        assert_eq!((reply.flags, reply.revision), (CRC | ENHANCED, 2));
        scene.opens(event.about, &mut peer, &rtr_read(), false);
    }
    scene.ends();
}

#[test]
fn mpa_s_02_frames_come_byte_by_byte_and_with_fpdus_after() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut peer = Peer::connect(scene.at);
    let bytes = hex(&format!("{REQUEST_KEY} 50020008 8010c008 554c5021"));
    peer.send_in_pieces(&bytes, 1);
    let id = scene.request_event().about;
    assert_eq!(scene.target.accepts(id, DEPTHS, b""), 0);
    assert_eq!(Frame::read(&mut peer).word(), Some(0x8008_4010));
    let fpdus = peer.framed(&[rtr_write(), send(1, b"hello")]);
    peer.send_in_pieces(&fpdus, 1);
    scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
    scene.target.completes(id, &[(0, status::SUCCESS)]);
    // MPA-S-14: all at once after the Reply.
    let (event, mut peer, _) = scene.accepted(&bytes, DEPTHS, &[]);
    peer.send_ulpdus(&[rtr_read(), send(1, b"hello"), send(2, b"again")]);
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    scene
        .target
        .completes(event.about, &[(0, status::SUCCESS), (1, status::SUCCESS)]);
    scene.ends();
}

#[test]
fn mpa_s_15_bytes_after_the_request_end_the_stream() {
    let mut scene = or_skip!(Scene::start(&[]));
    for excess in [1, 4, 3000] {
        let bytes = [request(CRC, 2, Some(0x8010_c008)), vec![0xff; excess]].concat();
        let mut peer = scene.connect(&bytes);
        let id = scene.request_event().about;
        assert_eq!(scene.target.accepts(id, DEPTHS, &[]), ECONNRESET as u64);
        assert_eq!(peer.read_to_end(), (Vec::new(), End::Reset));
        scene.target.destroys(id);
    }
    scene.ends();
}

#[test]
fn empa_04_mpa_s_12_private_data_to_its_limits() {
    let mut scene = or_skip!(Scene::start(&[]));
    let data: Vec<u8> = (0..512).map(|at| at as u8 ^ 0x5a).collect();
    for (revision, word, len) in [
        (1, None, 512),
        (1, None, 256),
        (1, None, 255),
        (1, None, 1),
        (2, Some(0x8010_c008_u32), 508),
        (2, Some(0x8010_c008), 256),
        (2, Some(0x8010_c008), 255),
    ] {
        let word_bytes = word.map_or(Vec::new(), |word| word.to_be_bytes().to_vec());
        let frame = Frame {
            request: true,
            flags: CRC | if word.is_some() { ENHANCED } else { 0 },
            revision,
            private_data: [&word_bytes[..], &data[..len]].concat(),
        };
        // The program may get 255 bytes, and send as many. The frame is valid beyond that, but
        // there is no program for it: a rejecting Reply answers it.
        if len > 255 {
            let mut peer = scene.connect(&frame.to_bytes());
            let reply = match word {
                Some(_) => "7002 0004 80014000",
                None => "6001 0000",
            };
            let reply = hex(&format!("{REPLY_KEY} {reply}"));
            assert_eq!(peer.read_to_end(), (reply, End::Closed), "{len} bytes");
            assert!(scene.target.is_quiet());
            continue;
        }
        let (event, mut peer, reply) = scene.accepted(&frame.to_bytes(), DEPTHS, &data[..255]);
        assert_eq!(event.private_data, data[..len]);
        assert_eq!(reply.private_data[word_bytes.len()..], data[..255]);
        if word.is_none() {
            scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
        }
        scene.opens(event.about, &mut peer, &rtr_write(), word.is_none());
    }
    scene.ends();
}

#[test]
fn mpa_s_12_a_rejection_carries_private_data() {
    let mut scene = or_skip!(Scene::start(&[]));
    let long = [0x77; 255];
    for (requested, data, flags, word) in [
        // Vector MPA-REP-R1-REJ.
        ("40010000", &b"no"[..], "6001", ""),
        ("40010000", b"", "6001", ""),
        ("40020000", b"no", "6002", ""),
        // Enhanced like its Request: A mirrored, one RTR, and nothing to read.
        ("50020004 8010c008", b"no", "7002", "80014000"),
        ("50020004 00100008", b"", "7002", "00000000"),
        ("50020004 3fff3fff", &long, "7002", "3fff3fff"),
    ] {
        let mut peer = scene.connect(&hex(&format!("{REQUEST_KEY} {requested}")));
        let id = scene.request_event().about;
        assert_eq!(scene.target.rejects(id, data), 0);
        let body = [&hex(word), data].concat();
        let head = hex(&format!("{REPLY_KEY} {flags} {:04x}", body.len()));
        let reply = [head, body].concat();
        assert_eq!(peer.read_to_end(), (reply, End::Closed), "to {requested}");
        // A Request can be answered once.
        assert_ne!(scene.target.rejects(id, data), 0);
        assert_ne!(scene.target.accepts(id, DEPTHS, &[]), 0);
        scene.target.destroys(id);
    }
    scene.ends();
}

#[test]
fn an_unanswered_request_is_rejected_when_its_id_is_destroyed() {
    let mut scene = or_skip!(Scene::start(&[]));
    let mut peer = scene.connect(&request(CRC, 1, None));
    let id = scene.request_event().about;
    scene.target.destroys(id);
    assert_eq!(peer.read_bytes(20), hex(&format!("{REPLY_KEY} 60010000")));
    assert_eq!(peer.end(), End::Closed);
    scene.ends();
}

#[test]
fn empa_06_a_revision_1_listener_resets_on_an_enhanced_request() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_REVISION", "1")]));
    assert_eq!(
        scene.connect(&request(CRC, 2, Some(0x8010_c008))).read_to_end(),
        (Vec::new(), End::Reset)
    );
    assert!(scene.target.is_quiet());
    // The target accepts the second attempt.
    let (event, mut peer, reply) = scene.accepted(&request(CRC, 1, None), DEPTHS, &[]);
    assert_eq!(reply.to_bytes(), hex(&format!("{REPLY_KEY} 40010000")));
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    scene.opens(event.about, &mut peer, &rtr_write(), true);
    scene.target.quits();
}

#[test]
fn empa_11_to_14_the_rtr_that_is_chosen() {
    const A: u32 = 0x8000_0000;
    const B: u32 = 0x4000_0000;
    const C: u32 = 0x8000;
    const D: u32 = 0x4000;
    const ALL: u32 = A | B | C | D;
    for (types, choices) in [
        (
            "write,read",
            &[
                (A | C | D, A | D),
                (A | C, A | C),
                (A | D, A | D),
                (ALL, A | D),
                // EMPA-12: nothing in common, so the answer is one of our types.
                (A | B, A | D),
                (A, A | D),
                // EMPA-11: without A the others have no meaning.
                (B | C | D, 0),
            ][..],
        ),
        (
            "send,write,read",
            &[(A | B, A | B), (A | B | C, A | C), (ALL, A | D)],
        ),
        ("send", &[(ALL, A | B), (A | C | D, A | B)]),
        ("write", &[(ALL, A | C), (A | D, A | C)]),
    ] {
        let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_RTR_TYPES", types)]));
        for (requested, answered) in choices {
            let bytes = request(CRC, 2, Some(requested | 8 << 16 | 8));
            let (event, mut peer, reply) = scene.accepted(&bytes, (8, 8), &[]);
            assert_eq!(
                reply.word(),
                Some(answered | 8 << 16 | 8),
                "to {requested:08x} with {types}"
            );
            let rtr = match answered & (B | C | D) {
                B => send(1, b""),
                D => rtr_read(),
                _ => rtr_write(),
            };
            // EMPA-18, EMPA-19: the RTR takes no receive, makes no completion, and the next message
            // of its queue is number 2.
            let at_once = answered & A == 0;
            if at_once {
                scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
            }
            scene.opens(event.about, &mut peer, &rtr, at_once);
        }
        scene.target.quits();
    }
}

#[test]
fn empa_19_a_read_as_rtr_counts_in_its_queue() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
    let (at, rkey) = scene.target.buffer();
    // EMPA-20: the device ignores the addresses of the Read.
    peer.send_ulpdus(&[read_request(1, 0, u64::MAX, 0), read_request(2, rkey, at, 4)]);
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    assert_eq!(peer.ulpdu().len(), 14);
    assert_eq!(peer.ulpdu()[14..], [0; 4]);
    scene.ends();
}

#[test]
fn empa_21_another_first_message_than_agreed_is_taken() {
    let mut scene = or_skip!(Scene::start(&[]));
    for first in [rtr_write(), write(0, u64::MAX, b"")] {
        let (event, mut peer, reply) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
        assert_eq!(reply.word(), Some(0x8008_4010));
        scene.opens(event.about, &mut peer, &first, false);
    }
    // A real message opens as well.
    let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
    peer.send_ulpdus(&[send(1, b"hello")]);
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    scene.target.completes(event.about, &[(0, status::SUCCESS)]);
    scene.ends();
}

#[test]
fn empa_30_to_37_read_depths() {
    let mut scene = or_skip!(Scene::start(&[]));
    const NO: u32 = 0x3fff;
    // Their IRD and ORD; ours; what we answer.
    for ((ird, ord), own, (our_ird, our_ord)) in [
        // EMPA-31: our ORD keeps to their IRD.
        ((4, 8), (8, 8), (8, 4)),
        ((0, 8), (8, 8), (8, 0)),
        ((200, 200), (8, 8), (8, 8)),
        // EMPA-32: a Read is the RTR, and so needs a place.
        ((16, 0), (0, 16), (1, 16)),
        ((16, 8), (0, 16), (1, 16)),
        // EMPA-37: each direction for itself.
        ((NO, NO), (8, 16), (NO, NO)),
        ((16, NO), (8, 16), (NO, 16)),
        ((4, NO), (8, 16), (NO, 4)),
        ((NO, 8), (8, 16), (8, NO)),
        // EMPA-39: more than fits into a byte.
        ((0x3ffe, 0x3ffe), (128, 128), (128, 128)),
    ] {
        let bytes = request(CRC, 2, Some(0x8000_4000 | ird << 16 | ord));
        let (event, mut peer, reply) = scene.accepted(&bytes, own, &[]);
        let expected = 0x8000_4000 | our_ird << 16 | our_ord;
        assert_eq!(
            reply.word(),
            Some(expected),
            "to IRD {ird} and ORD {ord} with {own:?}"
        );
        // EMPA-36, as far as a byte goes.
        if ord != NO {
            assert_eq!(event.ird, u64::from(ord.min(255)));
        }
        if ird != NO {
            assert_eq!(event.ord, u64::from(ird.min(255)));
        }
        scene.opens(event.about, &mut peer, &rtr_read(), false);
    }
    scene.ends();
}

#[test]
fn empa_31_reads_keep_to_the_initiator_s_ird() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (event, mut peer, reply) = scene.accepted(&request(CRC, 2, Some(0x8001_8008)), DEPTHS, &[]);
    assert_eq!(reply.word(), Some(0x8008_8001));
    peer.send_ulpdus(&[rtr_write()]);
    let id = event.about;
    scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
    for wr_id in [200, 201] {
        assert_eq!(scene.target.posts(id, 4, wr_id, 8, (0x1000, 0x2000)), 0);
    }
    let first = peer.ulpdu();
    assert_eq!(first[..2], [0x41, 0x41]);
    peer.stays_silent(Duration::from_millis(100));
    let stag = u32::from_be_bytes([first[18], first[19], first[20], first[21]]);
    let (at, _) = scene.target.buffer();
    peer.send_ulpdus(&[urnic_tests::ulpdu::read_response(stag, at, &[1; 8])]);
    assert_eq!(peer.ulpdu()[..2], [0x41, 0x41]);
    scene.ends();
}

#[test]
fn mpa_s_13_empa_22_a_responder_waits_for_the_first_fpdu() {
    // With queues of their own and with one that all share; with an RTR to come, and without.
    for shared in [false, true] {
        let mut scene = or_skip!(Scene::start(&[]));
        if shared {
            scene.target.shares_completion_queue();
        }
        for word in [Some(0x8010_c008), Some(0x0010_0008), None] {
            let revision = if word.is_some() { 2 } else { 1 };
            let (event, mut peer, _) = scene.accepted(&request(CRC, revision, word), DEPTHS, &[]);
            let id = event.about;
            let at_once = word != Some(0x8010_c008);
            if at_once {
                scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
            }
            scene.target.sends(id, 100, 5);
            scene.target.sends(id, 101, 0);
            peer.stays_silent(Duration::from_millis(100));
            // Half an FPDU does not open the fence.
            let rtr = peer.framed(&[rtr_write()]);
            peer.send(&rtr[..rtr.len() - 1]);
            peer.stays_silent(Duration::from_millis(50));
            assert!(scene.target.has_no_completion(id));
            peer.send(&rtr[rtr.len() - 1..]);
            assert_eq!(peer.ulpdu()[10..14], [0, 0, 0, 1]);
            assert_eq!(peer.ulpdu(), send(2, b""));
            scene
                .target
                .completes(id, &[(100, status::SUCCESS), (101, status::SUCCESS)]);
            if !at_once {
                scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
            }
            peer.reset();
            scene.target.expects_event(id, cm_event::DISCONNECTED, 0);
            scene.target.completes(id, &ALL_FLUSHED);
            scene.target.destroys(id);
        }
        scene.ends();
    }
}

#[test]
fn empa_22_fenced_sends_are_flushed_when_the_peer_closes() {
    for shared in [false, true] {
        let mut scene = or_skip!(Scene::start(&[]));
        if shared {
            scene.target.shares_completion_queue();
        }
        for reset in [true, false] {
            let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
            let id = event.about;
            scene.target.sends(id, 100, 5);
            scene.target.sends(id, 101, 0);
            if reset {
                peer.reset();
            } else {
                peer.finish();
                // EMPA-23: nothing may be sent.
                peer.end();
            }
            let event = scene.target.event();
            assert_eq!((event.id, event.kind), (id, cm_event::CONNECT_ERROR), "{event:?}");
            assert_eq!(event.status, -ECONNRESET);
            let mut seen: Vec<(u64, u64)> = (0..6)
                .map(|_| scene.target.completion(id).1)
                .map(|wc| (wc.id, wc.status))
                .collect();
            seen.sort_unstable();
            let flushed = [0, 1, 2, 3, 100, 101].map(|wr_id| (wr_id, status::FLUSHED));
            assert_eq!(seen, flushed);
            assert!(scene.target.has_no_completion(id));
            scene.target.destroys(id);
        }
        scene.ends();
    }
}

#[test]
fn mpa_s_21_a_missing_first_fpdu_times_out() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_RTR_TIMEOUT_S", "1")]));
    let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
    scene.target.sends(event.about, 100, 5);
    scene
        .target
        .expects_event(event.about, cm_event::UNREACHABLE, -ETIMEDOUT);
    // EMPA-23: no Terminate.
    peer.end();
    scene.ends();
}

#[test]
fn empa_23_an_error_before_the_fence_opens_makes_no_terminate() {
    let mut scene = or_skip!(Scene::start(&[]));
    // A bad CRC; no FPDU at all; a Read Request that is cut off by FIN.
    for bytes in [
        hex("000ec140 00000001 00000000 00000000 00000000"),
        vec![0xff; 2000],
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
    ] {
        let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
        peer.send(&bytes);
        peer.finish();
        peer.end();
        let learned = scene.target.event();
        assert_eq!(
            (learned.id, learned.kind),
            (event.about, cm_event::CONNECT_ERROR),
            "{learned:?}"
        );
        assert!(learned.status < 0);
        scene.target.completes(event.about, &ALL_FLUSHED);
        scene.target.destroys(event.about);
    }
    scene.ends();
}

#[test]
fn empa_40_a_refused_first_fpdu_does_not_establish() {
    let word = Some(0x8010_c008);
    for (what, set, first) in [
        ("a Terminate", "", terminate(&hex("20070000"))),
        ("a Send with a wrong MSN", "", send(2, b"x")),
        ("another RTR than agreed on", "mpa.strict_rtr=true", send(1, b"")),
    ] {
        let mut scene = or_skip!(Scene::start(&[("URNIC_SET", set)]));
        let (event, mut peer, _) = scene.accepted(&request(CRC, 2, word), DEPTHS, &[]);
        let id = event.about;
        scene.target.sends(id, 100, 5);
        peer.send_ulpdus(&[first]);
        let learned = scene.target.event();
        assert_eq!(
            (learned.id, learned.kind),
            (id, cm_event::CONNECT_ERROR),
            "{what}: {learned:?}"
        );
        assert!(learned.status < 0, "{what}: {learned:?}");
        for _ in 0..5 {
            let wc = scene.target.completion(id).1;
            assert_ne!(wc.status, status::SUCCESS, "{what}: {wc:?}");
        }
        assert!(scene.target.has_no_completion(id), "{what}");
        scene.target.destroys(id);
        scene.ends();
    }
}

#[test]
fn garbage_after_the_first_fpdu_is_terminated() {
    let mut scene = or_skip!(Scene::start(&[]));
    let (event, mut peer, _) = scene.accepted(&request(CRC, 2, Some(0x8010_c008)), DEPTHS, &[]);
    peer.send_ulpdus(&[rtr_write()]);
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    peer.send(&hex("000ec140 00000001 00000000 00000000 00000000"));
    assert_eq!(peer.ulpdu(), complaint(0x2002, &[]));
    assert_eq!(peer.end(), End::Closed);
    drop(peer);
    scene.target.expects_event(event.about, cm_event::DISCONNECTED, 0);
    scene.target.completes(event.about, &ALL_FLUSHED);
    scene.ends();
}

// The frame of 2007.

#[test]
fn s001_03_to_05_the_rtr_frame_opens_the_fence() {
    let mut scene = or_skip!(Scene::start(&[("URNIC_MPA_RTR_FRAME", "hex")]));
    for key in RTR_KEYS {
        // The frame's flags follow the Reply's, or not; its private data have no meaning.
        for rest in ["00010000", "40010000", "40010004 01020304"] {
            let requested = hex(&format!("{REQUEST_KEY} 50010000"));
            let (event, mut peer, reply) = scene.accepted(&requested, DEPTHS, &[]);
            assert_eq!(reply.to_bytes(), hex(&format!("{REPLY_KEY} 50010000")));
            peer.stays_silent(Duration::from_millis(20));
            assert!(scene.target.is_quiet());
            peer.send(&hex(&format!("{key} {rest}")));
            scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
            // The responder may begin.
            scene.target.sends(event.about, 100, 0);
            assert_eq!(peer.ulpdu(), send(1, b""));
            peer.send_ulpdus(&[send(1, b"hello")]);
            scene
                .target
                .completes(event.about, &[(100, status::SUCCESS), (0, status::SUCCESS)]);
            peer.reset();
            scene.target.expects_event(event.about, cm_event::DISCONNECTED, 0);
            scene.target.destroys(event.about);
        }
    }
    // S001-02, S001-08: the option does not affect initiators without an offer or enhanced ones.
    let (event, mut peer, reply) = scene.accepted(&request(CRC, 1, None), DEPTHS, &[]);
    assert_eq!(reply.to_bytes(), hex(&format!("{REPLY_KEY} 40010000")));
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    scene.opens(event.about, &mut peer, &rtr_write(), true);
    scene.ends();
}

#[test]
fn s001_06_something_else_than_the_rtr_frame_closes() {
    let mut scene = or_skip!(Scene::start(&[
        ("URNIC_MPA_RTR_FRAME", "hex"),
        ("URNIC_MPA_RTR_TIMEOUT_S", "1")
    ]));
    for (bytes, expected) in [
        (
            hex(&format!("{REQUEST_KEY} 40010000")),
            (cm_event::CONNECT_ERROR, -71),
        ),
        (
            Framing::default().frame(&send(1, b"hello")),
            (cm_event::CONNECT_ERROR, -71),
        ),
        (hex(RTR_KEYS[0]), (cm_event::UNREACHABLE, -ETIMEDOUT)),
        (Vec::new(), (cm_event::UNREACHABLE, -ETIMEDOUT)),
    ] {
        let requested = hex(&format!("{REQUEST_KEY} 50010000"));
        let (event, mut peer, _) = scene.accepted(&requested, DEPTHS, &[]);
        peer.send(&bytes);
        let learned = scene.target.event();
        assert_eq!((learned.id, learned.kind_and_status()), (event.about, expected));
        assert!(peer.read_to_end().0.is_empty());
        scene.target.destroys(event.about);
    }
    scene.ends();
}
