//! Answers to the peer's Reads and atomics: in the order of the requests, when there is room to
//! send (RFC 5040 §5.2, RFC 7306 §5).

use super::terminate::{self, Outgoing};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::memory::{MemoryAccess, Need, Violation, WordError};
use crate::transport::Env;
use std::collections::VecDeque;
use urnic_device::vocabulary::Access;
use urnic_wire::ddp::{self, TAGGED_LEN, TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::{
    AtomicOperation, AtomicRequest, AtomicResponse, Control, Opcode, QN_ATOMIC_RESPONSE, ReadRequest,
    Terminate, TerminateError,
};

/// A request of the peer.
#[derive(Debug, Clone)]
pub(super) enum PeerRequest {
    /// A Read, of which `sent` bytes are sent.
    Read { request: ReadRequest, sent: u32 },
    /// An operation on a 64-bit word.
    Atomic(AtomicRequest),
}

/// A request, and its DDP header, which a Terminate about it reports.
#[derive(Debug, Clone)]
struct Request {
    peer_request: PeerRequest,
    header: [u8; UNTAGGED_LEN],
}

/// The result of an attempt to answer.
#[derive(Debug)]
pub(super) enum Answered {
    /// A ULPDU was framed; `ended`: it was the last of its answer.
    Done { ended: bool },
    /// Nothing was requested.
    Idle,
    /// The answer cannot be sent; the peer gets a Terminate.
    Failed(Outgoing),
}

/// Requests that wait for their answer.
#[derive(Debug)]
pub(super) struct Answers {
    queue: VecDeque<Request>,
    /// The maximum number of requests at a time: the buffers of queue 1 (RFC 5040 §5.2.2).
    pub(super) ird: u32,
    /// Reads beyond `ird`, by which the peer confirms its messages.
    pub(super) spare: u32,
    /// MSN of the next request on queue 1.
    pub(super) msn: u32,
    /// MSN of the next answer on queue 3.
    pub(super) response_msn: u32,
}

impl Answers {
    pub(super) fn new() -> Answers {
        Answers {
            queue: VecDeque::new(),
            ird: 0,
            spare: 0,
            msn: 1,
            response_msn: 1,
        }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether an answer with data is missing. A Read of length zero may only request a
    /// confirmation.
    pub(super) fn is_data_wanted(&self) -> bool {
        let is_empty = |request: &Request| matches!(&request.peer_request, PeerRequest::Read { request, .. } if request.size == 0);
        !self.queue.iter().all(is_empty)
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Whether part of an answer is framed: no other message may be framed between its segments.
    #[inline]
    pub(super) fn is_within_message(&self) -> bool {
        matches!(
            self.queue.front(),
            Some(Request {
                peer_request: PeerRequest::Read { sent: 1.., .. },
                ..
            })
        )
    }

    /// Checks the position of a request on queue 1 (row DDP-V-15: MSN, buffer, MO, length).
    pub(super) fn check(&self, header: &UntaggedHeader) -> Result<(), TerminateError> {
        if header.msn != self.msn {
            Err(TerminateError::DdpInvalidMsn)
        } else if self.queue.len() >= self.ird.saturating_add(self.spare) as usize {
            Err(TerminateError::DdpNoBuffer)
        } else if header.mo != 0 {
            Err(TerminateError::DdpInvalidMo)
        } else if !header.last {
            Err(TerminateError::DdpTooLong)
        } else {
            Ok(())
        }
    }

    /// Accepts a request that was checked, if its memory is permitted (RFC 5040 §7.2). The memory
    /// is checked again when the request is answered. `rights`: the queue pair's remote rights.
    pub(super) fn accept(
        &mut self,
        env: &Env<'_>,
        rights: Access,
        header: [u8; UNTAGGED_LEN],
        peer_request: PeerRequest,
    ) -> Result<(), TerminateError> {
        let (stag, to, len, need, right) = match &peer_request {
            PeerRequest::Read { request: r, .. } => (
                r.source_stag,
                r.source_to,
                r.size,
                Need::RemoteRead,
                Access::REMOTE_READ,
            ),
            PeerRequest::Atomic(a) => (a.stag, a.to, 8, Need::RemoteAtomic, Access::REMOTE_ATOMIC),
        };
        if len > 0 {
            env.memory
                .check(
                    env.qp.accessor(),
                    MemoryAccess {
                        stag,
                        offset: to,
                        len: len.into(),
                        need,
                    },
                )
                .and_then(|_| {
                    if rights.contains(right) {
                        Ok(())
                    } else {
                        Err(Violation::AccessRights)
                    }
                })
                .map_err(|violation| refused(&peer_request, violation))?;
            env.counters.add(Counter::RxOneSided, 1);
        }
        self.msn = self.msn.wrapping_add(1);
        self.queue.push_back(Request { peer_request, header });
        Ok(())
    }

    /// Frames the next ULPDU of the oldest answer; the lower layer has room for it.
    pub(super) fn step(&mut self, env: &Env<'_>, llp: &mut Llp) -> Answered {
        let Some(Request { peer_request, header }) = self.queue.front_mut() else {
            return Answered::Idle;
        };
        let ended = match peer_request {
            PeerRequest::Read { request, sent } => match respond(env, llp, request, *sent) {
                Ok(n) => {
                    *sent += n;
                    *sent == request.size
                }
                Err(error) => return Answered::Failed(read_failed(error, header, request, *sent)),
            },
            PeerRequest::Atomic(request) => match operate(env, request) {
                Ok(original) => {
                    frame_atomic(env, llp, request.request_id, original, self.response_msn);
                    self.response_msn = self.response_msn.wrapping_add(1);
                    true
                }
                Err(error) => return Answered::Failed(atomic_failed(error, header)),
            },
        };
        if ended {
            env.counters.add(Counter::TxMessages, 1);
            self.queue.pop_front();
        }
        Answered::Done { ended }
    }
}

/// The error of a request whose memory is refused. As with an adapter, the alignment of an atomic
/// counts before its key.
#[cold]
fn refused(peer_request: &PeerRequest, violation: Violation) -> TerminateError {
    match peer_request {
        PeerRequest::Atomic(AtomicRequest { to, .. }) if to % 8 != 0 => {
            TerminateError::RdmapCatastrophicStream
        }
        _ => terminate::source(violation),
    }
}

/// Frames the next segment of a Read Response; returns the bytes in it.
fn respond(env: &Env<'_>, llp: &mut Llp, request: &ReadRequest, sent: u32) -> Result<u32, TerminateError> {
    let left = request.size - sent;
    let n = left.min((llp.mulpdu() - TAGGED_LEN) as u32);
    let header = TaggedHeader {
        last: n == left,
        rsvd_ulp: Control::from(Opcode::ReadResponse).byte(),
        stag: request.sink_stag,
        to: request.sink_to.wrapping_add(sent.into()),
    };
    if n > 0 {
        // Each segment is checked again: the STag may have been revoked since (row RDM-R-09).
        let from = request.source_to.wrapping_add(sent.into());
        let window = env
            .memory
            .check(
                env.qp.accessor(),
                MemoryAccess {
                    stag: request.source_stag,
                    offset: from,
                    len: n.into(),
                    need: Need::RemoteRead,
                },
            )
            .map_err(terminate::source)?;
        llp.open(env.buffers, header, n as usize);
        // For the peer, the STag is revoked.
        if llp.gather(&window, 0, n as usize).is_err() {
            llp.cancel();
            return Err(terminate::source(Violation::InvalidStag));
        }
    } else {
        llp.open(env.buffers, header, 0);
    }
    llp.seal();
    Ok(n)
}

/// The headers describe the missing part of the Read: offsets advanced by the bytes that were sent
/// (RFC 5040 §7.1).
fn read_failed(error: TerminateError, header: &[u8], request: &ReadRequest, sent: u32) -> Outgoing {
    let rest = ReadRequest {
        sink_to: request.sink_to.wrapping_add(sent.into()),
        size: request.size - sent,
        source_to: request.source_to.wrapping_add(sent.into()),
        ..*request
    };
    Outgoing::new(&Terminate {
        segment_length: Some((ddp::UNTAGGED_LEN + ReadRequest::LEN) as u16),
        ddp_header: Some(header),
        read_request: Some(rest),
        ..Terminate::new(error)
    })
}

/// RFC 7306 §8.1 leaves the RDMA header out.
fn atomic_failed(error: TerminateError, header: &[u8]) -> Outgoing {
    Outgoing::new(&Terminate {
        segment_length: Some((ddp::UNTAGGED_LEN + AtomicRequest::LEN) as u16),
        ddp_header: Some(header),
        ..Terminate::new(error)
    })
}

/// Carries out an atomic; returns the old value. The operation is atomic for all other queue pairs
/// and for the host's own atomic instructions.
fn operate(env: &Env<'_>, request: &AtomicRequest) -> Result<u64, TerminateError> {
    let window = env
        .memory
        .check(
            env.qp.accessor(),
            MemoryAccess {
                stag: request.stag,
                offset: request.to,
                len: 8,
                need: Need::RemoteAtomic,
            },
        )
        .map_err(terminate::source)?;
    window
        .update_word(0, |old| result(&request.operation, old))
        .map_err(|error| match error {
            // The operation was not performed (RFC 7306 §5.1, row X73-07).
            WordError::Misaligned => TerminateError::RdmapCatastrophicStream,
            WordError::Unreachable => terminate::source(Violation::InvalidStag),
        })
}

/// The new value.
pub(super) fn result(operation: &AtomicOperation, old: u64) -> u64 {
    match *operation {
        // A set mask bit marks the most significant bit of a field: each field is added without a
        // carry into the next one (RFC 7306 §5.1.1).
        AtomicOperation::FetchAdd { add, mask } => {
            (old & !mask).wrapping_add(add & !mask) ^ ((old ^ add) & mask)
        }
        AtomicOperation::CmpSwap {
            swap,
            swap_mask,
            compare,
            compare_mask,
        } => {
            if (compare ^ old) & compare_mask == 0 {
                (old & !swap_mask) | (swap & swap_mask)
            } else {
                old
            }
        }
    }
}

fn frame_atomic(env: &Env<'_>, llp: &mut Llp, request_id: u32, original: u64, msn: u32) {
    let header = UntaggedHeader {
        last: true,
        rsvd_ulp: Control::from(Opcode::AtomicResponse).byte(),
        rsvd_ulp_word: 0,
        qn: QN_ATOMIC_RESPONSE,
        msn,
        mo: 0,
    };
    llp.open(env.buffers, header, AtomicResponse::LEN);
    AtomicResponse { request_id, original }.emit(llp.put(AtomicResponse::LEN));
    llp.seal();
}
