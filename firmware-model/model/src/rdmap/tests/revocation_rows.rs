//! Revocation while payload waits for a slow stream: framed segments carry the bytes from before
//! the revocation, and the device does not read the memory again.

use super::{Pair, Scripted};
use crate::host::Piece;
use crate::memory::{Accessor, Invalidable, InvalidateBy, MemoryAccess, MemoryTable, Need};
use crate::rdmap::Attachment;
use crate::stream::wrapper::Wrapper;
use crate::stream::{Stream, StreamError};
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BindOperands, Opcode};

const SUCCESS: WcStatus = WcStatus::Success;
/// More bytes than the stream and the staging buffer can take.
const LEN: usize = 4 << 20;
/// Bytes of an FPDU, so large that payload is sent without a copy.
const MULPDU: usize = 60_000;
/// The bytes that the program writes after the revocation.
const SECRET: u8 = 0xee;

/// An engine whose stream takes a quarter of a megabyte, with CRCs or without.
fn slow_peer(crc: bool) -> Scripted {
    let attachment = Attachment { crc, ..agreed(true) };
    let mut peer = Scripted::with(&Shape::default(), attachment);
    peer.wire.set_capacity(0, 1 << 18);
    peer.node.engine.set_mulpdu(MULPDU);
    peer
}

/// The bytes that the peer may read.
fn content() -> Vec<u8> {
    pattern(LEN).into_iter().map(|byte| byte & 0x7f).collect()
}

/// The program revokes its memory and uses it for other data.
fn reuse(region: &Region) {
    region.write(0, &vec![SECRET; region.len]);
}

/// The payload of these segments, which are in order and have headers of `header_len` bytes.
fn payload(ulpdus: &[Vec<u8>], header_len: usize) -> Vec<u8> {
    ulpdus
        .iter()
        .flat_map(|ulpdu| ulpdu[header_len..].to_vec())
        .collect()
}

/// The way in which the source of a Read is revoked.
#[derive(Debug, Clone, Copy)]
enum Revocation {
    /// `ibv_dereg_mr`.
    Deregistered,
    /// `ibv_rereg_mr` without the right to read.
    Reregistered,
    /// The host unmaps the memory.
    Unmapped,
    /// A local invalidation, by another queue pair.
    Invalidated,
}

/// RDM-R-09, DDP-T-08, SEC-02: the Response ends with a Terminate that names the address.
#[test]
fn rdm_r_09_a_source_revoked_under_a_slow_response() {
    use Revocation::*;
    for crc in [false, true] {
        for how in [Deregistered, Reregistered, Unmapped, Invalidated] {
            let mut peer = slow_peer(crc);
            let source = peer.node.filled(&content());
            let request = read_request(1, (0x100, 0x1000), LEN as u32, (source.stag, source.base));
            peer.send_unread(&fpdu_of(&request));
            let memory = peer.node.memory.clone();
            match how {
                Deregistered => memory.deregister(source.stag).unwrap(),
                Reregistered => memory
                    .reregister(source.stag, |registration| {
                        registration.access = Access::LOCAL_WRITE;
                    })
                    .unwrap(),
                Unmapped => memory.revoke_over(source.base + 5, 1),
                Invalidated => memory
                    .invalidate(
                        source.stag,
                        Accessor {
                            pd: peer.node.pd,
                            qid: 99,
                        },
                        InvalidateBy::Local,
                        Invalidable::All,
                    )
                    .unwrap(),
            }
            reuse(&source);
            let ulpdus = peer.output_ulpdus();
            let (terminate, responses) = ulpdus.split_last().unwrap();
            let sent = payload(responses, 14);
            assert!(content().starts_with(&sent), "{how:?}, CRC {crc}: bytes of later");
            assert!(sent.len() >= 1 << 18 && sent.len() < LEN);
            let payload = &terminate[18..];
            let code = match how {
                Reregistered => "0102e000 002e",
                _ => "0100e000 002e",
            };
            assert_eq!(payload[..6], hex(code), "{how:?}, CRC {crc}");
            assert_eq!(payload[6..24], request[..18]);
            let at = sent.len() as u64;
            let source = (source.stag, source.base + at);
            let rest = read_request(1, (0x100, 0x1000 + at), LEN as u32 - at as u32, source);
            assert_eq!(payload[24..], rest[18..]);
        }
    }
}

/// A window bound to part of a region, through which the peer reads; unbinding it revokes.
#[test]
fn ddp_t_08_a_window_unbound_under_a_slow_response() {
    let mut peer = slow_peer(false);
    let source = peer.node.filled(&content());
    let window = peer.node.memory.create_window(peer.node.pd, true).unwrap();
    let mut operands = BindOperands::default();
    operands.offset = source.base.into();
    operands.len = (LEN as u64).into();
    operands.mr_stag = source.stag.into();
    operands.access = Access::REMOTE_READ.bits().into();
    operands.new_stag = window.into();
    peer.node.memory.bind(&operands, peer.node.pd, 7).unwrap();
    let request = read_request(1, (0x100, 0), LEN as u32, (window, source.base));
    peer.send_unread(&fpdu_of(&request));
    // The peer itself invalidates the window before it has received the whole Response.
    peer.node.post_recv(1, &[]);
    peer.send_unread(&fpdu_of(&untagged(0x41, 0x44, window, 0, 1, 0, b"")));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 0)]);
    reuse(&source);
    let ulpdus = peer.output_ulpdus();
    let (terminate, responses) = ulpdus.split_last().unwrap();
    assert_eq!(terminate[18..22], hex("0100e000"));
    assert!(content().starts_with(&payload(responses, 14)));
}

/// A Send or Write of memory that is deregistered before the stream took it: framed segments are
/// sent unchanged, the others fail.
#[test]
fn sec_02_untaken_bytes_are_not_read_after_revocation() {
    for crc in [false, true] {
        for opcode in [Opcode::Send, Opcode::Write] {
            let mut peer = slow_peer(crc);
            let source = peer.node.filled(&content());
            // With a CRC, framed segments are copies, and fewer bytes fit in the staging buffer.
            let half = match (Scripted::HAS_FPDUS, crc) {
                (true, false) => LEN / 8,
                (true, true) => LEN / 16,
                // Each message is a copy, and the stream's last one may go beyond its capacity.
                (false, _) => (1 << 18) + (48 << 10),
            };
            // The first message fits in the stream and the staging buffer, the second does not.
            for (cookie, at, len) in [(1, 0, half), (2, half, LEN - half)] {
                peer.node
                    .post(&Work::new(opcode, cookie).to(9, 0).sge(source.sge(at, len)));
            }
            while peer.node.pump() {}
            assert!(peer.node.sent().is_empty(), "the stream has not taken it");
            peer.node.memory.deregister(source.stag).unwrap();
            reuse(&source);
            let ulpdus = peer.output_ulpdus();
            let (terminate, segments) = ulpdus.split_last().unwrap();
            assert_eq!(terminate[18..22], hex("00000000"), "an error of ours");
            let sent = payload(segments, if opcode == Opcode::Send { 18 } else { 14 });
            assert!(content().starts_with(&sent), "{opcode:?}, CRC {crc}");
            assert!(sent.len() > half && sent.len() < LEN);
            assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, WcStatus::LocProtErr)]);
            assert_eq!(peer.node.memory.borrows().count(), 0);
        }
    }
}

/// A program may change the memory of a Send until the completion, as QEMU does when it migrates a
/// running guest: the CRC matches the bytes on the wire.
#[test]
fn mpa_c_03_payload_that_changes_while_sent_keeps_its_crc() {
    for opcode in [Opcode::Send, Opcode::Write] {
        let mut peer = slow_peer(true);
        let source = peer.node.filled(&content());
        peer.node
            .post(&Work::new(opcode, 1).to(9, 0).sge(source.sge(0, LEN)));
        while peer.node.pump() {}
        assert!(peer.node.sent().is_empty(), "the stream has not taken it");
        reuse(&source);
        let sent = payload(
            &peer.output_ulpdus(),
            if opcode == Opcode::Send { 18 } else { 14 },
        );
        assert_eq!(sent.len(), LEN);
        let old = sent.iter().take_while(|byte| **byte != SECRET).count();
        assert!(old > 1 << 18, "the stream has taken {old} bytes");
        assert!(sent[..old] == content()[..old]);
        assert!(sent[old..].iter().all(|byte| *byte == SECRET));
        assert_eq!(peer.node.sent(), [(1, SUCCESS)]);
    }
}

/// A local invalidation in the same queue is executed in the same run.
#[test]
fn vrb_f_02_an_invalidation_right_after_large_payload() {
    for crc in [false, true] {
        let mut peer = slow_peer(crc);
        let source = peer.node.filled(&content());
        let first = LEN / 16;
        peer.node.post(&Work::write(1, 9, 0).sge(source.sge(0, first)));
        peer.node.post(&Work::new(Opcode::LocalInv, 2).to(source.stag, 0));
        peer.node.post(&Work::send(3).inline(b"done"));
        while peer.node.pump() {}
        let check = |need| {
            let (node, base) = (&peer.node, source.base);
            node.memory
                .check(
                    Accessor { pd: node.pd, qid: 7 },
                    MemoryAccess {
                        stag: source.stag,
                        offset: base,
                        len: 1,
                        need,
                    },
                )
                .is_ok()
        };
        assert!(!check(Need::LocalRead) && !check(Need::RemoteRead));
        reuse(&source);
        let ulpdus = peer.output_ulpdus();
        let (done, segments) = ulpdus.split_last().unwrap();
        assert_eq!(done[18..], *b"done");
        assert!(payload(segments, 14) == content()[..first]);
        assert_eq!(peer.node.sent(), [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS)]);
    }
}

/// A thread that invalidates memory does not wait for its own short message that accessed the
/// memory last.
#[test]
fn vrb_f_02_an_invalidation_right_after_short_messages() {
    let mut peer = slow_peer(false);
    let source = peer.node.filled(b"short and long");
    peer.node.post(&Work::send(1).sge(source.sge(0, 5)));
    peer.node.post(&Work::send(2).sge(source.sge(6, 3)));
    peer.node.post(&Work::new(Opcode::LocalInv, 3).to(source.stag, 0));
    peer.node.post(&Work::send(4).sge(source.sge(10, 4)));
    while peer.node.pump() {}
    let ulpdus = peer.output_ulpdus();
    assert_eq!((&ulpdus[0][18..], &ulpdus[1][18..]), (&b"short"[..], &b"and"[..]));
    let refused = (4, WcStatus::LocProtErr);
    assert_eq!(
        peer.node.sent(),
        [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS), refused]
    );
}

/// A receiver whose peer invalidates the memory of the preceding receive does not wait for itself.
#[test]
fn ddp_t_08_a_send_with_invalidation_after_one_to_its_memory() {
    let mut peer = slow_peer(false);
    let sink = peer.node.region(64, everything());
    peer.node.post_recv(1, &[sink.sge(0, 64)]);
    peer.node.post_recv(2, &[]);
    let send = fpdu_of(&untagged(0x41, 0x43, 0, 0, 1, 0, b"short"));
    let invalidating = fpdu_of(&untagged(0x41, 0x44, sink.stag, 0, 2, 0, b""));
    peer.send_unread(&[send, invalidating].concat());
    assert_eq!(peer.node.received(), [(1, SUCCESS, 5), (2, SUCCESS, 0)]);
    assert!(peer.node.memory.is_revoked(sink.stag));
}

/// Many revocations between calls of the stream, which takes any number of bytes at a time.
#[test]
fn ddp_t_08_all_that_arrives_was_there_before_the_revocation() {
    for seed in 0..20 {
        let conditions = Conditions {
            chunk: 100_000,
            capacity: 150_000,
            seed,
            ..Conditions::default()
        };
        let off = |initiator| Attachment {
            crc: false,
            ..agreed(initiator)
        };
        let mut pair = Pair::with(&Shape::default(), conditions, off(true), off(false));
        let source = pair.a.filled(&content());
        let sink = pair.b.region(LEN, everything());
        let at_once = LEN / 8;
        for n in 0..8usize {
            let work = Work::write(n as u64, sink.stag, sink.base + (n * at_once) as u64);
            pair.a.post(&work.sge(source.sge(n * at_once, at_once)));
        }
        for _ in 0..seed {
            pair.step();
        }
        pair.a.memory.deregister(source.stag).unwrap();
        reuse(&source);
        pair.run_now();
        assert!(!sink.bytes().contains(&SECRET), "seed {seed}");
        assert_eq!(pair.a.engine.state(), QpState::Err);
        assert_eq!(pair.a.memory.borrows().count(), 0);
        let sent = pair.a.sent();
        let well = sent.iter().take_while(|(_, status)| *status == SUCCESS).count();
        assert!(sink.bytes()[..well * at_once] == content()[..well * at_once]);
    }
}

/// Bytes of a call with large payload.
const LARGE: usize = 64 << 10;

/// A stream: during its first call with large payload, another thread deregisters the region of the
/// payload.
#[derive(Debug)]
struct Interrupted {
    stream: Box<dyn Stream>,
    memory: Arc<MemoryTable>,
    stag: u32,
    revoked: Arc<AtomicBool>,
    revoker: Arc<urnic_sync::Mutex<Option<JoinHandle<()>>>>,
}

impl Wrapper for Interrupted {
    fn inner(&self) -> &dyn Stream {
        &*self.stream
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Stream> {
        &mut self.stream
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let mut revoker = self.revoker.lock();
        let len: usize = pieces.iter().map(Piece::len).sum();
        if revoker.is_none() && len >= LARGE {
            let (memory, stag, revoked) = (self.memory.clone(), self.stag, self.revoked.clone());
            *revoker = Some(std::thread::spawn(move || {
                memory.deregister(stag).unwrap();
                revoked.store(true, Ordering::SeqCst);
            }));
            crate::testing::mock::wait_for("a revocation that has begun", || {
                self.memory.is_revoked(stag).then_some(())
            });
            // The deregistration does not end before this call ends.
            for _ in 0..10_000 {
                std::thread::yield_now();
                assert!(!self.revoked.load(Ordering::SeqCst), "the stream still reads");
            }
        }
        self.stream.send(pieces)
    }
}

/// An STag may be revoked between its check and the stream's call: the revocation waits for the
/// call.
#[test]
fn ddp_t_08_a_revocation_waits_for_the_call_that_reads() {
    let clock = Arc::new(AtomicU64::new(0));
    let (ours, _theirs, _wire) = crate::testing::sim::pair(Conditions::default(), &clock);
    let (memory, pd) = table();
    let mut node = Node::new(&Shape::default(), memory.clone(), pd, &clock);
    let source = node.filled(&content());
    let (revoked, revoker) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let stream = Interrupted {
        stream: Box::new(ours),
        memory,
        stag: source.stag,
        revoked: revoked.clone(),
        revoker: Arc::clone(&revoker),
    };
    // Without CRC: with it, the stream is given a copy.
    let agreed = Attachment {
        crc: false,
        ..agreed(true)
    };
    node.attach(&agreed, stream);
    node.post(&Work::write(1, 9, 0).sge(source.sge(0, 1 << 17)));
    while node.pump() {}
    let revoker = revoker.lock().take();
    revoker.expect("the stream was called").join().unwrap();
    assert!(revoked.load(Ordering::SeqCst));
    assert_eq!(node.sent(), [(1, SUCCESS)]);
}
