//! Messages of a requester, segment by segment.

use super::{MAX_MESSAGE, Requester, Sending, Step};
use crate::counters::Counter;
use crate::llp::Llp;
use crate::memory::Need;
use crate::queues::SendWqe;
use crate::rdmap::confirmation::ANY_STAG;
use crate::rdmap::env::Env;
use crate::rdmap::flights::Wait;
use crate::rdmap::params::{Identity, Rtr};
use crate::rdmap::placement::Cursor;
use crate::rdmap::reads::{Answer, Pending};
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_wire::ddp::{TAGGED_LEN, TaggedHeader, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::rdmap::{
    AtomicOperation, AtomicRequest, Control, ImmediateData, Opcode as Message, QN_READ_REQUEST, QN_SEND,
    ReadRequest,
};

impl Requester {
    /// Frames the next segment of the payload.
    #[inline]
    pub(super) fn frame_payload(
        &mut self,
        sending: &mut Sending,
        qp: &Identity,
        env: &mut Env<'_>,
        llp: &mut Llp,
    ) -> Result<u64, WcStatus> {
        let wqe = &sending.wqe;
        let left = (sending.len - sending.sent) as usize;
        let tagged = matches!(wqe.opcode, Opcode::Write | Opcode::WriteImm);
        let n = left.min(llp.mulpdu() - if tagged { TAGGED_LEN } else { UNTAGGED_LEN });
        let last = n == left;
        if tagged {
            let header = TaggedHeader {
                last,
                rsvd_ulp: Control::from(Message::Write).byte(),
                stag: wqe.stag,
                to: wqe.remote_offset.wrapping_add(sending.sent.into()),
            };
            llp.open(env.buffers, header, n);
        } else {
            let (message, invalidate) = send_message(wqe);
            let header = UntaggedHeader {
                last,
                rsvd_ulp: Control::from(message).byte(),
                // A Send that invalidates has no receive filled.
                rsvd_ulp_word: invalidate | sending.receive,
                qn: QN_SEND,
                msn: self.msn,
                mo: sending.sent,
            };
            llp.open(env.buffers, header, n);
        }
        if wqe.flags.contains(SendFlags::INLINE) {
            self.sq.inline(wqe, sending.sent as usize, llp.put(n));
        } else {
            let list = |index| self.sq.element(wqe, index);
            let mut left = n;
            while left > 0 {
                let (sge, at, n) = sending.cursor.extent(&list, left).ok_or(WcStatus::LocProtErr)?;
                let (by, len) = ((qp.pd, qp.qid), n as u64);
                let window = env
                    .memory
                    .check_again(&env.recent, sge.stag.get(), by, at, len, Need::LocalRead)
                    .map_err(|_| WcStatus::LocProtErr)?;
                llp.gather(&window, 0, n).map_err(|_| WcStatus::LocProtErr)?;
                window.keep(&env.recent);
                sending.cursor.advance(n);
                left -= n;
            }
        }
        sending.sent += n as u32;
        sending.framed = true;
        sending.payload_done = last;
        if last && !tagged {
            self.msn = self.msn.wrapping_add(1);
        }
        Ok(llp.seal())
    }

    /// Frames an Immediate Data message (RFC 7306 §6).
    pub(super) fn frame_immediate(
        &mut self,
        wqe: &SendWqe,
        rest: [u8; 4],
        solicited: bool,
        env: &Env<'_>,
        llp: &mut Llp,
    ) -> u64 {
        let message = if solicited {
            Message::ImmediateSolicited
        } else {
            Message::Immediate
        };
        self.open_untagged(message, QN_SEND, self.msn, ImmediateData::LEN, env, llp);
        let place = llp.put(ImmediateData::LEN);
        place[..4].copy_from_slice(&wqe.immediate);
        place[4..].copy_from_slice(&rest);
        self.msn = self.msn.wrapping_add(1);
        llp.seal()
    }

    /// Opens a message of one segment with a fixed header.
    fn open_untagged(&self, message: Message, qn: u32, msn: u32, len: usize, env: &Env<'_>, llp: &mut Llp) {
        let header = UntaggedHeader {
            last: true,
            rsvd_ulp: Control::from(message).byte(),
            rsvd_ulp_word: 0,
            qn,
            msn,
            mo: 0,
        };
        llp.open(env.buffers, header, len);
    }

    /// Frames the request of a Read or an atomic.
    pub(super) fn request(&mut self, wqe: SendWqe, qp: &Identity, env: &mut Env<'_>, llp: &mut Llp) -> Step {
        let len = self.payload_len(&wqe);
        if len > MAX_MESSAGE {
            return self.refuse(wqe, WcStatus::LocLenErr);
        }
        // The sink is checked before data is requested, and again for every segment that arrives.
        let mut sink = None;
        for sge in (0..)
            .map_while(|n| self.sq.element(&wqe, n))
            .filter(|sge| sge.len.get() > 0)
        {
            let (stag, at, len) = (sge.stag.get(), sge.offset.get(), sge.len.get());
            if env
                .memory
                .check(stag, qp.pd, qp.qid, at, len.into(), Need::LocalWrite)
                .is_err()
            {
                return self.refuse(wqe, WcStatus::LocProtErr);
            }
            sink = sink.or(Some((stag, at)));
        }
        // The peer sees one contiguous sink, named by the list's first element: the payload is
        // placed by its distance from there (row RDM-R-08).
        let (sink_stag, sink_to) = sink.unwrap_or((ANY_STAG, 0));
        let msn = self.request_msn;
        let answer = match self.atomic(&wqe, msn) {
            Some(_) if len != 8 => return self.refuse(wqe, WcStatus::LocLenErr),
            Some(request) => {
                self.open_untagged(
                    Message::AtomicRequest,
                    QN_READ_REQUEST,
                    msn,
                    AtomicRequest::LEN,
                    env,
                    llp,
                );
                request.emit(llp.put(AtomicRequest::LEN));
                Answer::Atomic(request.request_id)
            }
            None => {
                self.open_untagged(
                    Message::ReadRequest,
                    QN_READ_REQUEST,
                    msn,
                    ReadRequest::LEN,
                    env,
                    llp,
                );
                let request = ReadRequest {
                    sink_stag,
                    sink_to,
                    size: len as u32,
                    source_stag: wqe.stag,
                    source_to: wqe.remote_offset,
                };
                request.emit(llp.put(ReadRequest::LEN));
                Answer::Read
            }
        };
        let position = llp.seal();
        env.counters.add(Counter::TxMessages, 1);
        self.delivery.requested(position);
        self.request_msn = msn.wrapping_add(1);
        let number = self.board(wqe, msn, len as u32, Wait::Answer);
        self.reads.push(Pending {
            answer,
            request: Some((number, wqe)),
            position,
            sink_stag,
            sink_to,
            len: len as u32,
            placed: 0,
            cursor: Cursor::default(),
        });
        Step::Done { ended: true }
    }

    fn atomic(&self, wqe: &SendWqe, request_id: u32) -> Option<AtomicRequest> {
        if !matches!(wqe.opcode, Opcode::FetchAdd | Opcode::CompareSwap) {
            return None;
        }
        let operands = self.sq.atomic(wqe);
        let operation = match wqe.opcode {
            Opcode::FetchAdd => AtomicOperation::FetchAdd {
                add: operands.compare_add.get(),
                mask: 0,
            },
            _ => AtomicOperation::CmpSwap {
                swap: operands.swap.get(),
                swap_mask: u64::MAX,
                compare: operands.compare_add.get(),
                compare_mask: u64::MAX,
            },
        };
        Some(AtomicRequest {
            operation,
            request_id,
            stag: wqe.stag,
            to: wqe.remote_offset,
        })
    }

    /// Frames the RTR (RFC 6581 §9.2): a message that no program posted and that completes for no
    /// program.
    pub(in crate::rdmap) fn frame_rtr(&mut self, rtr: Rtr, env: &Env<'_>, llp: &mut Llp) {
        match rtr {
            Rtr::Send => {
                self.open_untagged(Message::Send, QN_SEND, self.msn, 0, env, llp);
                self.msn = self.msn.wrapping_add(1);
                self.first_receive = self.first_receive.wrapping_add(1);
            }
            Rtr::Write => {
                let header = TaggedHeader {
                    last: true,
                    rsvd_ulp: Control::from(Message::Write).byte(),
                    stag: ANY_STAG,
                    to: 0,
                };
                llp.open(env.buffers, header, 0);
            }
            Rtr::Read => {
                self.frame_empty_read(0, env, llp);
                return;
            }
        }
        llp.seal();
    }

    /// Frames a Read of length zero that no program posted; returns the position after it. `mark`
    /// is its source offset, which no peer may check.
    pub(super) fn frame_empty_read(&mut self, mark: u64, env: &Env<'_>, llp: &mut Llp) -> u64 {
        let msn = self.request_msn;
        self.open_untagged(
            Message::ReadRequest,
            QN_READ_REQUEST,
            msn,
            ReadRequest::LEN,
            env,
            llp,
        );
        let request = ReadRequest {
            sink_stag: ANY_STAG,
            sink_to: 0,
            size: 0,
            source_stag: ANY_STAG,
            source_to: mark,
        };
        request.emit(llp.put(ReadRequest::LEN));
        self.request_msn = msn.wrapping_add(1);
        let position = llp.seal();
        self.reads.push(Pending {
            answer: Answer::Read,
            request: None,
            position,
            sink_stag: ANY_STAG,
            sink_to: 0,
            len: 0,
            placed: 0,
            cursor: Cursor::default(),
        });
        position
    }
}

/// The message of a Send, and the STag it invalidates.
#[inline]
pub(super) fn send_message(wqe: &SendWqe) -> (Message, u32) {
    let solicited = wqe.flags.contains(SendFlags::SOLICITED);
    match (wqe.opcode, solicited) {
        (Opcode::SendInv, false) => (Message::SendInvalidate, wqe.stag),
        (Opcode::SendInv, true) => (Message::SendSolicitedInvalidate, wqe.stag),
        (_, false) => (Message::Send, 0),
        (_, true) => (Message::SendSolicited, 0),
    }
}
