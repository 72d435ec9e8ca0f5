//! Two engines on a wire, and one with a test at the other end.

use super::frames::{fpdu_of, hex};
use super::node::{Node, table};
use super::queues::{Shape, Work};
use crate::host::{Piece, PieceMut};
use crate::memory::MemoryTable;
use crate::rdmap::{Attachment, Rtr, WithoutReceive};
use crate::stream::{Stream, StreamError};
use crate::testing::sim::{Conditions, SimStream, Wire, pair};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::sctp::chunk::MIN_MULPDU;

/// Bytes of an FPDU before and after its ULPDU (RFC 5044 §4).
const LENGTH_LEN: u32 = 2;
const CRC_LEN: u32 = 4;

/// The parameters of most connections in tests.
pub(crate) fn agreed(initiator: bool) -> Attachment {
    Attachment {
        initiator,
        crc: true,
        markers_tx: false,
        markers_rx: false,
        without_receive: WithoutReceive::Refused,
        peer_may_close: false,
        fence_open: false,
        delivered: false,
        spare_read: false,
        ord: 16,
        ord_limit: 0,
        ird: 16,
        first_msn: 1,
        rtr_send: None,
        rtr_expect: None,
        strict_rtr: false,
        fin_grace: Duration::from_secs(2),
        terminate: 0,
    }
}

/// The parameters of native connections: no Terminate for an empty receive queue, either side may
/// close.
pub(crate) fn native(initiator: bool) -> Attachment {
    Attachment {
        without_receive: WithoutReceive::Waits,
        peer_may_close: true,
        rtr_send: initiator.then_some(Rtr::Write),
        rtr_expect: (!initiator).then_some(Rtr::Write),
        ..agreed(initiator)
    }
}

/// Two engines on one wire. `a` is the initiator.
pub(crate) type Pair = PairOver<false>;

/// Two engines on one wire, over a stream of bytes with MPA, or of messages.
#[derive(Debug)]
pub(crate) struct PairOver<const MESSAGES: bool> {
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) wire: Wire,
    pub(crate) clock: Arc<AtomicU64>,
}

impl<const MESSAGES: bool> PairOver<MESSAGES> {
    /// The stream is one of bytes, in FPDUs with CRCs.
    pub(crate) const HAS_FPDUS: bool = !MESSAGES;

    pub(crate) fn new() -> Self {
        Self::with(
            &Shape::default(),
            Conditions::default(),
            agreed(true),
            agreed(false),
        )
    }

    pub(crate) fn with(shape: &Shape, conditions: Conditions, a: Attachment, b: Attachment) -> Self {
        let conditions = over::<MESSAGES>(conditions);
        let clock = Arc::new(AtomicU64::new(0));
        let (left, right, wire) = pair(conditions, &clock);
        let node = |attachment, stream| {
            let (memory, pd) = table();
            let mut node = Node::new(shape, memory, pd, &clock);
            node.attach(attachment, stream);
            node
        };
        let (a, b) = (node(&a, left), node(&b, right));
        PairOver { a, b, wire, clock }
    }

    /// Runs both engines, and advances the clock, until neither has anything to do.
    pub(crate) fn run(&mut self) {
        for _ in 0..1_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the engines never come to rest");
    }

    /// Runs both engines without expiring a timer.
    pub(crate) fn run_now(&mut self) {
        for _ in 0..1_000_000 {
            if self.a.pump() | self.b.pump() {
                continue;
            }
            match self.wire.next_arrival() {
                Some(at) => self.clock.store(at.0, Ordering::Relaxed),
                None => return,
            }
        }
        panic!("the engines never come to rest");
    }

    pub(crate) fn step(&mut self) -> bool {
        if self.a.pump() | self.b.pump() {
            return true;
        }
        let next = [self.wire.next_arrival(), self.a.deadline(), self.b.deadline()];
        match next.into_iter().flatten().min() {
            Some(at) => {
                self.clock.fetch_max(at.0, Ordering::Relaxed);
                true
            }
            None => false,
        }
    }

    pub(crate) fn advance(&mut self, duration: Duration) {
        self.clock
            .fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The FPDUs that a direction sent since it is recorded.
    pub(crate) fn recorded(&self, direction: usize) -> Vec<u8> {
        match MESSAGES {
            false => self.wire.recorded(direction),
            true => {
                let messages = self.wire.recorded_messages(direction);
                messages.iter().flat_map(|message| fpdu_of(message)).collect()
            }
        }
    }

    /// The first message of the initiator, which opens the responder's fence: a zero-length Write.
    pub(crate) fn open_fence(&mut self) {
        self.a.post(&Work::write(u64::MAX, 1, 0));
        self.run_now();
        assert_eq!(self.a.sent(), [(u64::MAX, WcStatus::Success)]);
    }
}

/// The same conditions over the lower layer. The longest ULPDU is that of MPA without markers.
fn over<const MESSAGES: bool>(conditions: Conditions) -> Conditions {
    let longest = (conditions.mss.max(MIN_MULPDU.into()) - CRC_LEN) / 4 * 4 - LENGTH_LEN;
    Conditions {
        messages: MESSAGES,
        mss: if MESSAGES { longest } else { conditions.mss },
        ..conditions
    }
}

/// An engine with a test at the other end of its wire.
pub(crate) type Scripted = ScriptedOver<false>;

/// An engine with a test at the other end of its wire: a stream of bytes with MPA, or of messages.
/// In a test the peer sends and receives FPDUs in either case; of messages only their ULPDUs pass.
#[derive(Debug)]
pub(crate) struct ScriptedOver<const MESSAGES: bool> {
    pub(crate) node: Node,
    pub(crate) wire: Wire,
    peer: SimStream,
    clock: Arc<AtomicU64>,
    output: Vec<u8>,
    crc: CrcMode,
    pub(crate) finished: bool,
}

impl<const MESSAGES: bool> ScriptedOver<MESSAGES> {
    /// The stream is one of bytes, in FPDUs with CRCs.
    pub(crate) const HAS_FPDUS: bool = !MESSAGES;

    pub(crate) fn new() -> Self {
        Self::with(&Shape::default(), agreed(true))
    }

    /// Makes an engine; the attachment decides whether the engine is the initiator.
    pub(crate) fn with(shape: &Shape, attachment: Attachment) -> Self {
        let (memory, pd) = table();
        Self::on(shape, attachment, memory, pd)
    }

    /// An engine that shares memory with others.
    pub(crate) fn on(shape: &Shape, attachment: Attachment, memory: Arc<MemoryTable>, pd: u32) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        let conditions = Conditions {
            latency: Duration::ZERO,
            mss: 1460,
            ..Conditions::default()
        };
        let conditions = over::<MESSAGES>(conditions);
        let (ours, peer, wire) = pair(conditions, &clock);
        let mut node = Node::new(shape, memory, pd, &clock);
        node.attach(&attachment, ours);
        ScriptedOver {
            node,
            wire,
            peer,
            clock,
            output: Vec::new(),
            crc: if attachment.crc { CrcMode::On } else { CrcMode::Off },
            finished: false,
        }
    }

    /// Gives the stream the next of these bytes, or the ULPDU of the next FPDU; returns the rest.
    fn pass<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let there = "the connection is there";
        if !MESSAGES {
            let taken = self.peer.send(&[Piece::of(bytes)]).expect(there);
            return &bytes[taken..];
        }
        let (ulpdu, rest) = fpdu::parse(bytes, self.crc).expect("whole FPDUs");
        if ulpdu.is_empty() {
            // The stream refuses it.
            return rest;
        }
        self.peer.send(&[Piece::of(ulpdu)]).expect(there);
        rest
    }

    /// How much these FPDUs advance the position in the stream.
    pub(crate) fn advance_of(&self, fpdus: &[u8]) -> u64 {
        if !MESSAGES {
            return fpdus.len() as u64;
        }
        let mut rest = fpdus;
        let mut position = 0;
        while let Ok((ulpdu, after)) = fpdu::parse(rest, self.crc) {
            position += (size_of::<u32>() + ulpdu.len()) as u64;
            rest = after;
        }
        position
    }

    /// The peer sends any bytes, which are no FPDU, or a message.
    pub(crate) fn send_noise(&mut self, bytes: &[u8]) {
        match MESSAGES {
            false => self.send(bytes),
            true => self.send_ulpdu(bytes),
        }
    }

    /// Keeps what was received: bytes, or a message, as an FPDU.
    fn keep(&mut self, received: &[u8]) {
        if !MESSAGES {
            return self.output.extend_from_slice(received);
        }
        let mut frame = vec![0; fpdu::fpdu_len(received.len())];
        fpdu::emit(received, self.crc, &mut frame);
        self.output.extend_from_slice(&frame);
    }

    /// The peer sends these bytes, and the engine runs until it waits.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = self.pass(rest);
            self.run();
        }
    }

    /// The peer sends these bytes and reads nothing; the engine runs until it waits.
    pub(crate) fn send_unread(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = self.pass(rest);
            while self.node.pump() {}
        }
    }

    /// The peer sends these bytes; the engine does not run.
    pub(crate) fn leave_open(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = self.pass(rest);
        }
    }

    /// The peer sends these bytes, and RST; the engine does not run.
    pub(crate) fn leave(&mut self, bytes: &[u8]) {
        self.leave_open(bytes);
        self.peer.reset();
    }

    /// The peer sends an FPDU with this ULPDU.
    pub(crate) fn send_ulpdu(&mut self, ulpdu: &[u8]) {
        self.send(&fpdu_of(ulpdu));
    }

    /// The peer sends FIN.
    pub(crate) fn fin(&mut self) {
        self.peer.finish();
        self.run();
    }

    /// The peer sends FIN and reads nothing; the engine runs until it waits.
    pub(crate) fn fin_unread(&mut self) {
        self.peer.finish();
        while self.node.pump() {}
    }

    /// The peer reads this many bytes, or a message, or all that have arrived, once; the engine
    /// then runs until it waits.
    pub(crate) fn read(&mut self, len: usize) {
        let mut buffer = vec![0; if MESSAGES { len.max(65536) } else { len }];
        match self.peer.receive(&mut [PieceMut::of(&mut buffer)]) {
            Ok(0) => self.finished = true,
            Ok(n) => self.keep(&buffer[..n]),
            Err(StreamError::WouldBlock | StreamError::Closed(_) | StreamError::Fault) => {}
        }
        while self.node.pump() {}
    }

    /// Time passes while the peer reads nothing.
    pub(crate) fn wait_unread(&mut self, duration: Duration) {
        self.clock
            .fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
        while self.node.pump() {}
    }

    /// The peer sends RST.
    pub(crate) fn rst(&mut self) {
        self.peer.reset();
        self.run();
    }

    /// Runs the engine until it waits, and reads the bytes that it sent.
    pub(crate) fn run(&mut self) {
        loop {
            while self.node.pump() {}
            let mut buffer = [0; 65536];
            match self.peer.receive(&mut [PieceMut::of(&mut buffer)]) {
                Ok(0) => {
                    self.finished = true;
                    return;
                }
                Ok(n) => self.keep(&buffer[..n]),
                Err(StreamError::WouldBlock | StreamError::Closed(_) | StreamError::Fault) => return,
            }
        }
    }

    pub(crate) fn advance(&mut self, duration: Duration) {
        self.clock
            .fetch_add(duration.as_nanos() as u64, Ordering::Relaxed);
        self.run();
    }

    /// Takes the bytes that the engine has sent since the last call.
    pub(crate) fn output(&mut self) -> Vec<u8> {
        self.run();
        std::mem::take(&mut self.output)
    }

    /// Takes the ULPDUs that the engine has sent; CRCs must be correct, if CRCs are on.
    pub(crate) fn output_ulpdus(&mut self) -> Vec<Vec<u8>> {
        let bytes = self.output();
        let mut rest = &bytes[..];
        let mut ulpdus = Vec::new();
        while !rest.is_empty() {
            let (ulpdu, behind) = fpdu::parse(rest, self.crc).expect("whole FPDUs with good CRCs");
            ulpdus.push(ulpdu.to_vec());
            rest = behind;
        }
        ulpdus
    }

    /// The payload of the Terminate that the engine must have sent, as its only FPDU, before its
    /// FIN.
    pub(crate) fn terminate(&mut self) -> Vec<u8> {
        let ulpdus = self.output_ulpdus();
        assert_eq!(ulpdus.len(), 1, "exactly a Terminate: {ulpdus:02x?}");
        assert!(self.finished, "FIN follows the Terminate");
        assert_eq!(self.node.engine.state(), QpState::Err);
        let header = hex("41 47 00000000 00000002 00000001 00000000");
        assert_eq!(ulpdus[0][..18], header[..], "header of a Terminate");
        ulpdus[0][18..].to_vec()
    }
}
