//! The kind of a ULPDU from the peer, and the part of the queue pair that handles it: requester or
//! responder.
//!
//! Faults are found in the order of the layers, cheap ones first; the first one is the one that a
//! Terminate reports (rows DDP-V-15, RDM-T-07).

use super::answers::PeerRequest;
use super::confirming::{self, is_confirmation};
use super::early::Early;
use super::requester::{Answer, Requester};
use super::responder::{Refusal, Responder};
use super::startup::Startup;
use super::terminate;
use super::terminate::Received;
use crate::counters::Counter;
use crate::memory::{Violation, Window};
use crate::transport::Env;
use crate::transport::placement;
use std::collections::VecDeque;
use urnic_device::vocabulary::WcStatus;
use urnic_wire::ddp::{Header, TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::{
    AtomicRequest, AtomicResponse, Headers, ImmediateData, Opcode, QN_ATOMIC_RESPONSE, ReadRequest,
    Terminate, TerminateError,
};

/// A ULPDU from the peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ulpdu<'u> {
    pub(super) bytes: &'u [u8],
    /// The length of its payload, if that is not in `bytes`, because it was placed early; or 0.
    pub(super) placed: usize,
}

impl<'u> From<&'u [u8]> for Ulpdu<'u> {
    #[inline]
    fn from(bytes: &'u [u8]) -> Ulpdu<'u> {
        Ulpdu { bytes, placed: 0 }
    }
}

impl Ulpdu<'_> {
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.bytes.len() + self.placed
    }
}

/// A segment with payload to place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    opcode: Opcode,
    pub(super) header: Header,
    /// Bytes of payload.
    pub(super) len: usize,
}

/// RDMAP and DDP of a queue pair, in both directions.
#[derive(Debug)]
pub(super) struct Rdmap {
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    pub(super) startup: Startup,
    early: Early,
    /// The last message that we sent was an answer.
    pub(super) answered_last: bool,
    /// MSN of the next message on queue 3.
    pub(super) response_msn: u32,
}

impl Rdmap {
    pub(super) fn new(requester: Requester, responder: Responder) -> Rdmap {
        Rdmap {
            requester,
            responder,
            startup: Startup::default(),
            early: Early::default(),
            answered_last: false,
            response_msn: 1,
        }
    }

    /// Takes a whole ULPDU.
    #[inline]
    pub(super) fn receive(&mut self, env: &mut Env<'_>, ulpdu: Ulpdu<'_>) -> Result<(), Refusal> {
        let (opcode, header, payload) = Rdmap::parse(env, ulpdu.bytes)?;
        let len = payload.len() + ulpdu.placed;
        if self.startup.awaits_message() {
            let first_msn = self.responder.msn;
            let message = (&header, payload);
            if self.startup.first_message(env, opcode, message, first_msn)? {
                self.responder.swallow();
                return Ok(());
            }
        }
        match (&header, opcode) {
            (
                Header::Untagged(header),
                Opcode::Send
                | Opcode::SendInvalidate
                | Opcode::SendSolicited
                | Opcode::SendSolicitedInvalidate,
            ) => {
                let responder = &mut self.responder;
                responder.begin_send(env, opcode, header, payload.len())?;
                responder.place_send(env, payload)?;
                responder.end_send(env, opcode, header)
            }
            (Header::Untagged(header), _) => self.control(env, opcode, header, ulpdu.bytes, payload),
            (Header::Tagged(header), Opcode::Write)
                if is_confirmation(header, len) && self.requester.confirmation.is_announced() =>
            {
                self.requester.confirmation.received(header.to);
                env.counters.add(Counter::RxConfirmations, 1);
                Ok(())
            }
            (Header::Tagged(_), _) => {
                let segment = Segment { opcode, header, len };
                self.begin(env, &segment)?;
                match ulpdu.placed {
                    0 => self.place(env, &segment, 0, payload)?,
                    _ => self.pass_early(env, &segment)?,
                }
                self.end(env, &segment)
            }
        }
    }

    #[inline(always)]
    fn parse<'u>(env: &Env<'_>, ulpdu: &'u [u8]) -> Result<(Opcode, Header, &'u [u8]), Refusal> {
        let (headers, payload) = Headers::parse(ulpdu)?;
        let Headers { opcode, header } = headers;
        if !env.qp.extensions {
            if opcode.is_extension() {
                return Err(TerminateError::RdmapUnexpectedOpcode.into());
            }
            if matches!(
                header,
                Header::Untagged(UntaggedHeader {
                    qn: QN_ATOMIC_RESPONSE,
                    ..
                })
            ) {
                return Err(TerminateError::DdpInvalidQueue.into());
            }
        }
        match headers.check_placement() {
            Ok(()) => Ok((opcode, header, payload)),
            // No Terminate answers a Terminate (row RDM-T-08).
            Err(_) if opcode == Opcode::Terminate => Err(Refusal::Silent),
            Err(error) => Err(error.into()),
        }
    }

    /// The segment that begins with `head` and will have `ulpdu_len` bytes, if its payload may be
    /// placed as it arrives. The payload that `head` contains is placed.
    pub(super) fn begin_direct(
        &mut self,
        env: &mut Env<'_>,
        head: &[u8],
        ulpdu_len: usize,
    ) -> Result<Option<Segment>, Refusal> {
        let (opcode, header, payload) = Rdmap::parse(env, head)?;
        let len = ulpdu_len - (head.len() - payload.len());
        let segment = Segment { opcode, header, len };
        match (opcode, &header) {
            // The whole segment must have arrived.
            (Opcode::Write, _) if env.qp.last_first => return Ok(None),
            // The whole range must be permitted before a byte is placed (row DDP-V-02).
            (Opcode::Write, Header::Tagged(h)) => {
                if !env.qp.unreliable {
                    self.responder.write_window(env, h.stag, h.to, len)?;
                }
            }
            (Opcode::ReadResponse, _) if !self.requester.reads.is_discarded() => {}
            (_, Header::Untagged(h)) if h.qn == urnic_wire::rdmap::QN_SEND && !opcode.is_extension() => {}
            // A message with a fixed header is refused for that length when it is complete.
            _ => return Ok(None),
        }
        self.startup.first_message_with_payload(env, opcode)?;
        self.begin(env, &segment)?;
        self.place(env, &segment, 0, payload)?;
        Ok(Some(segment))
    }

    /// Checks a segment's position in its message or queue.
    #[inline]
    fn begin(&mut self, env: &mut Env<'_>, segment: &Segment) -> Result<(), Refusal> {
        match (&segment.header, segment.opcode) {
            (Header::Untagged(header), opcode) => self.responder.begin_send(env, opcode, header, segment.len),
            (Header::Tagged(header), Opcode::ReadResponse) => {
                Ok(self.requester.reads.check(header, segment.len)?)
            }
            (Header::Tagged(header), _) => {
                if env.qp.unreliable {
                    self.responder.screen_write(env, header, segment.len);
                }
                self.responder.begin_write(segment.len)
            }
        }
    }

    /// Places `bytes`, which start at offset `at` of the segment's payload.
    #[inline]
    fn place(&mut self, env: &Env<'_>, segment: &Segment, at: usize, bytes: &[u8]) -> Result<(), Refusal> {
        if bytes.is_empty() {
            // STag and TO of a zero-length segment are not checked (RFC 5041 §5.2).
            return Ok(());
        }
        match (&segment.header, segment.opcode) {
            (Header::Untagged(_), _) => self.responder.place_send(env, bytes),
            (Header::Tagged(_), Opcode::ReadResponse) => {
                let requester = &mut self.requester;
                let placed = requester.reads.place(env, &requester.sq, bytes);
                placed.map_err(|violation| self.sink_failed(violation))
            }
            (Header::Tagged(_), _) if self.responder.drops.drops_write() => Ok(()),
            (Header::Tagged(h), _) => {
                let to = h.to.wrapping_add(at as u64);
                let window = self.responder.write_window(env, h.stag, to, bytes.len());
                let gone = |_| terminate::tagged(Violation::InvalidStag).into();
                let placed = window.and_then(|window| {
                    let placed = match env.qp.last_first {
                        true => placement::last_first(&window, bytes),
                        false => self.early.outside(h.stag, (to, bytes.len()), |part| {
                            window.copy_in(part.start as u64, &bytes[part])
                        }),
                    };
                    placed.map_err(gone)
                });
                placed.or_else(|refusal| self.responder.drops.refuse_write(refusal))
            }
        }
    }

    /// The place of the segment's payload from `at` on: the next extent and its length; `None` if
    /// the message is dropped.
    pub(super) fn window<'t>(
        &mut self,
        env: &Env<'t>,
        segment: &Segment,
        at: usize,
    ) -> Result<Option<(Window<'t>, usize)>, Refusal> {
        let left = segment.len - at;
        match (&segment.header, segment.opcode) {
            (Header::Untagged(_), _) | (_, Opcode::ReadResponse) => self.window_ahead(env, segment, left),
            (Header::Tagged(_), _) if self.responder.drops.drops_write() => Ok(None),
            (Header::Tagged(h), _) => {
                let to = h.to.wrapping_add(at as u64);
                match self.responder.write_window(env, h.stag, to, left) {
                    Ok(window) => Ok(Some((window, left))),
                    Err(refusal) => self.responder.drops.refuse_write(refusal).map(|()| None),
                }
            }
        }
    }

    /// The place of the next bytes of the segment's message, at most `max`, which may include bytes
    /// of later segments; `None`: the place of each segment must be queried by itself.
    pub(super) fn window_ahead<'t>(
        &mut self,
        env: &Env<'t>,
        segment: &Segment,
        max: usize,
    ) -> Result<Option<(Window<'t>, usize)>, Refusal> {
        match (&segment.header, segment.opcode) {
            (Header::Untagged(_), _) => self.responder.send_window(env, max),
            (Header::Tagged(_), Opcode::ReadResponse) => {
                let requester = &mut self.requester;
                let window = requester.reads.window(env, &requester.sq, max);
                window.map(Some).map_err(|violation| self.sink_failed(violation))
            }
            (Header::Tagged(_), _) => Ok(None),
        }
    }

    /// Notes that `n` bytes of the segment were placed.
    pub(super) fn placed(&mut self, segment: &Segment, n: usize) {
        match (&segment.header, segment.opcode) {
            (Header::Untagged(_), _) => self.responder.send_placed(n),
            (Header::Tagged(_), Opcode::ReadResponse) => self.requester.reads.placed(n),
            (Header::Tagged(_), _) => {}
        }
    }

    /// The destination memory of the segment is inaccessible.
    pub(super) fn place_failed(&mut self, segment: &Segment) -> Refusal {
        match (&segment.header, segment.opcode) {
            (Header::Untagged(_), _) => self.responder.fail_receive(),
            (Header::Tagged(_), Opcode::ReadResponse) => self.sink_failed(Violation::InvalidStag),
            (Header::Tagged(_), _) => terminate::tagged(Violation::InvalidStag).into(),
        }
    }

    /// The sink of a Read is refused: the local request fails, and no request of the peer.
    fn sink_failed(&mut self, violation: Violation) -> Refusal {
        self.requester.fail_answer(WcStatus::LocProtErr);
        Refusal::Sink(terminate::tagged(violation))
    }

    /// The segment's payload is placed; the last one ends its message.
    #[inline]
    pub(super) fn end(&mut self, env: &mut Env<'_>, segment: &Segment) -> Result<(), Refusal> {
        match (&segment.header, segment.opcode) {
            (Header::Untagged(header), opcode) => self.responder.end_send(env, opcode, header),
            (Header::Tagged(TaggedHeader { last, .. }), Opcode::ReadResponse) => match last {
                true => self.answered(env),
                false => Ok(()),
            },
            (Header::Tagged(header), _) => {
                if !env.qp.unreliable || !self.responder.end_dropped_write(env, header.last) {
                    self.responder.end_write(env, header, segment.len);
                }
                Ok(())
            }
        }
    }

    fn answered(&mut self, env: &mut Env<'_>) -> Result<(), Refusal> {
        env.counters.add(Counter::RxMessages, 1);
        self.requester
            .answered(env)
            .map_err(|_| TerminateError::RdmapLocalCatastrophic.into())
    }

    /// Takes a message that consists of a fixed header.
    fn control(
        &mut self,
        env: &mut Env<'_>,
        opcode: Opcode,
        header: &UntaggedHeader,
        ulpdu: &[u8],
        payload: &[u8],
    ) -> Result<(), Refusal> {
        match opcode {
            Opcode::ReadRequest => {
                self.responder.answers.check(header)?;
                let request = ReadRequest::parse(payload)?;
                if confirming::is_announcement(&request) {
                    self.responder.confirming.announced();
                }
                let peer_request = PeerRequest::Read { request, sent: 0 };
                self.accept(env, ulpdu, peer_request)
                    .map_err(|error| Refusal::ReadRequest(error, request))
            }
            Opcode::AtomicRequest => {
                self.responder.answers.check(header)?;
                let request = AtomicRequest::parse(payload)?;
                Ok(self.accept(env, ulpdu, PeerRequest::Atomic(request))?)
            }
            Opcode::AtomicResponse => self.atomic_response(env, header, payload),
            Opcode::Immediate | Opcode::ImmediateSolicited => {
                let ImmediateData(bytes) = ImmediateData::parse(payload)?;
                self.responder.immediate(env, opcode, header, bytes)
            }
            _ => self.terminated(header, payload),
        }
    }

    /// Notes a message that waits because there is no receive for it, or for one before it. The
    /// announcement of a peer counts at once: this end confirms what it has processed before.
    #[cold]
    pub(super) fn note_parked(&mut self, ulpdu: &[u8]) {
        if let Ok((headers, payload)) = Headers::parse(ulpdu)
            && headers.opcode == Opcode::ReadRequest
            && ReadRequest::parse(payload).is_ok_and(|request| confirming::is_announcement(&request))
        {
            self.responder.confirming.announced();
        }
    }

    fn accept(
        &mut self,
        env: &Env<'_>,
        ulpdu: &[u8],
        peer_request: PeerRequest,
    ) -> Result<(), TerminateError> {
        let header = *ulpdu
            .first_chunk::<UNTAGGED_LEN>()
            .ok_or(TerminateError::DdpLocalCatastrophic)?;
        self.responder
            .answers
            .accept(env, self.responder.access, header, peer_request)
    }

    fn atomic_response(
        &mut self,
        env: &mut Env<'_>,
        header: &UntaggedHeader,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        if header.msn != self.response_msn {
            return Err(TerminateError::DdpInvalidMsn.into());
        }
        let Some(Answer::Atomic(request_id)) = self.requester.reads.front().map(|p| p.answer) else {
            return Err(TerminateError::DdpNoBuffer.into());
        };
        if header.mo != 0 {
            return Err(TerminateError::DdpInvalidMo.into());
        }
        let response = AtomicResponse::parse(payload)?;
        if response.request_id != request_id || !header.last {
            return Err(TerminateError::RdmapOperation.into());
        }
        self.response_msn = self.response_msn.wrapping_add(1);
        let requester = &mut self.requester;
        requester
            .reads
            .place(env, &requester.sq, &response.original.to_ne_bytes())
            .map_err(|_| {
                self.requester.fail_answer(WcStatus::LocProtErr);
                // The message is untagged and well-formed, so DDP has no error for it.
                Refusal::Sink(TerminateError::RdmapLocalCatastrophic)
            })?;
        self.answered(env)
    }

    fn terminated(&self, header: &UntaggedHeader, payload: &[u8]) -> Result<(), Refusal> {
        let parse = match self.startup.has_sent() {
            true => Terminate::parse,
            false => Terminate::parse_at_startup,
        };
        match parse(payload) {
            Ok(terminate) if header.msn == 1 && header.mo == 0 && header.last => {
                Err(Refusal::Terminated(Received::new(&terminate)))
            }
            _ => Err(Refusal::Silent),
        }
    }
}

// Segments that come before their turn.

impl Rdmap {
    /// Places the payload of a ULPDU that comes before its turn, if that is permitted now. Returns
    /// the number of bytes that are placed: all of the payload, or none.
    pub(super) fn place_early(&mut self, env: &Env<'_>, ulpdu: &[u8]) -> usize {
        self.try_early(env, ulpdu).unwrap_or(0)
    }

    fn try_early(&mut self, env: &Env<'_>, ulpdu: &[u8]) -> Option<usize> {
        // Kind UC drops messages; `last_first` shows a program the order of placement.
        if env.qp.unreliable || env.qp.last_first || self.startup.awaits_message() {
            return None;
        }
        let (opcode, header, payload) = Rdmap::parse(env, ulpdu).ok()?;
        let Header::Tagged(header) = header else {
            return None;
        };
        if payload.is_empty() {
            return None;
        }
        match opcode {
            Opcode::Write => {
                if self.early.overlaps(&header, payload.len()) {
                    return None;
                }
                let window = self
                    .responder
                    .write_window(env, header.stag, header.to, payload.len());
                window.ok()?.copy_in(0, payload).ok()?;
                self.early.insert(&header, payload.len());
            }
            Opcode::ReadResponse => {
                let requester = &mut self.requester;
                let placed = requester.reads.place_early(env, &requester.sq, &header, payload);
                env.recent.forget();
                placed?;
            }
            _ => return None,
        }
        Some(payload.len())
    }

    /// Checks the place of a segment again, whose payload was placed before its turn.
    fn pass_early(&mut self, env: &Env<'_>, segment: &Segment) -> Result<(), Refusal> {
        match (&segment.header, segment.opcode) {
            // None is placed early.
            (Header::Untagged(_), _) => Ok(()),
            (Header::Tagged(_), Opcode::ReadResponse) => {
                let requester = &mut self.requester;
                let passed = requester.reads.pass(env, &requester.sq, segment.len);
                passed.map_err(|violation| self.sink_failed(violation))
            }
            (Header::Tagged(header), _) => {
                self.early.remove(header);
                let window = self
                    .responder
                    .write_window(env, header.stag, header.to, segment.len);
                window.map(drop)
            }
        }
    }
}

// Messages that are parked until a receive is posted (native connections).
//
// The program that should post it may itself wait for a Read that it posted before. So answers to
// our requests pass by. All other messages are parked in order after the first one, up to a limit;
// then the stream is not read any more.

/// The most bytes that may be parked.
const LIMIT: usize = 256 << 10;

/// ULPDUs in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Parked {
    /// With their positions in the stream, and the bytes of payload that are placed.
    ulpdus: VecDeque<(u64, Box<[u8]>, usize)>,
    bytes: usize,
}

impl Parked {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.ulpdus.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.ulpdus.len()
    }

    /// Whether a ULPDU, or one with this beginning, must be parked after the parked ones.
    #[inline]
    pub(super) fn stops(&self, ulpdu: &[u8]) -> bool {
        const PASSING: [u8; 3] = [
            Opcode::ReadResponse as u8,
            Opcode::AtomicResponse as u8,
            Opcode::Terminate as u8,
        ];
        let passes = |control| PASSING.contains(&(control & 0xf));
        !self.is_empty()
            && !ulpdu.get(1).copied().is_some_and(passes)
            && !confirming::is_confirmation_ulpdu(ulpdu)
    }

    /// Parks a ULPDU that begins at `position` of the stream. Returns whether there was room.
    pub(super) fn keep(&mut self, position: u64, ulpdu: Ulpdu<'_>) -> bool {
        let Ulpdu { bytes, placed } = ulpdu;
        let room = self.bytes + bytes.len() <= LIMIT;
        if room {
            self.bytes += bytes.len();
            self.ulpdus.push_back((position, bytes.into(), placed));
        }
        room
    }

    /// The oldest parked ULPDU.
    pub(super) fn front(&self) -> Option<Ulpdu<'_>> {
        let (_, bytes, placed) = self.ulpdus.front()?;
        let placed = *placed;
        Some(Ulpdu { bytes, placed })
    }

    /// The position in the stream where the oldest parked ULPDU begins.
    #[inline]
    pub(super) fn position(&self) -> Option<u64> {
        self.ulpdus.front().map(|(position, ..)| *position)
    }

    /// Removes the oldest parked message.
    pub(super) fn release(&mut self) {
        if let Some((_, bytes, _)) = self.ulpdus.pop_front() {
            self.bytes -= bytes.len();
        }
    }

    pub(super) fn clear(&mut self) {
        self.ulpdus.clear();
        self.bytes = 0;
    }
}
