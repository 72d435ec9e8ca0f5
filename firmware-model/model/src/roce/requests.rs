//! Work requests: taken from the send queue, sent as messages, and completed in order.

use super::machines::{Outbound, Sending};
use crate::counters::Counter;
use crate::memory::{InvalidateBy, Need};
use crate::queues::{BadWqe, CompletionQueue, Overflow, SendQueue, SendWqe};
use crate::time::Nanos;
use crate::transport::Env;
use crate::transport::completions::Completions;
use crate::transport::placement::{Cursor, scatter};
use std::collections::VecDeque;
use std::sync::Arc;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags};
use urnic_roce::message::{ATOMIC_LEN, Kind, MAX_MESSAGE_LEN, Message, Remote};
use urnic_roce::requester::{Attributes, Effect, Requester};
use urnic_roce::unreliable::Sender;
use urnic_wire::roce::{Psn, Response};

/// A request that was taken and is not complete.
#[derive(Debug)]
struct Taken {
    wqe: SendWqe,
    len: u32,
    /// The result of a request that is no message: a bind or an invalidation, or one that is
    /// refused.
    local: Option<WcStatus>,
}

/// The requester of a queue pair.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) sq: SendQueue,
    cq: Completions,
    /// Present once the queue pair was in the state RTS.
    machine: Option<Sending>,
    /// In the order of the send queue.
    taken: VecDeque<Taken>,
    /// The number of the first of them, which is the name of its message.
    first: u64,
    /// A request was refused, or cannot be read: none after it is begun.
    stopped: bool,
}

impl Requests {
    pub(super) fn new(sq: SendQueue, cq: Arc<CompletionQueue>) -> Requests {
        Requests {
            sq,
            cq: Completions::new(cq),
            machine: None,
            taken: VecDeque::new(),
            first: 0,
            stopped: false,
        }
    }

    pub(super) fn begin(&mut self, attributes: Attributes, is_unreliable: bool) {
        self.machine = Some(match is_unreliable {
            true => Sending::unreliable(Sender::new(
                attributes.mtu,
                attributes.first_psn,
                attributes.depth,
            )),
            false => Sending::Reliable(Box::new(Requester::new(attributes))),
        });
    }

    /// The machine of kind RC.
    fn requester(&mut self) -> Option<&mut Requester> {
        self.machine.as_mut()?.reliable()
    }

    pub(super) fn completion_queue(&self) -> Arc<CompletionQueue> {
        self.cq.queue.clone()
    }

    pub(super) fn drain(&mut self, draining: bool) {
        if let Some(machine) = self.requester() {
            machine.drain(draining);
        }
    }

    /// Sends nothing more.
    pub(super) fn end(&mut self) {
        if let Some(machine) = self.requester() {
            machine.flush();
        }
    }

    /// Whether [`transmit`](Self::transmit) has no packet until something arrives or is posted.
    pub(super) fn is_waiting(&self) -> bool {
        self.machine.as_ref().is_none_or(Sending::is_waiting)
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.machine.as_ref()?.deadline()
    }

    pub(super) fn tick(&mut self, now: Nanos) {
        if let Some(machine) = self.requester() {
            machine.on_timer(now.0);
        }
    }

    /// Takes the requests that are posted.
    pub(super) fn take(&mut self, state: QpState, env: &mut Env<'_>) {
        if state != QpState::Rts {
            return;
        }
        while !self.stopped && self.machine.is_some() {
            let wqe = match self.sq.peek() {
                None => return,
                // `flush` finds the entry again and completes it.
                Some(Err(BadWqe { .. })) => {
                    self.stopped = true;
                    return;
                }
                Some(Ok(wqe)) => wqe,
            };
            self.sq.advance(wqe.blocks);
            let len = self.payload_len(&wqe);
            let local = match self.post(&wqe, len, env) {
                Ok(None) => None,
                Ok(Some(())) => Some(WcStatus::Success),
                Err(status) => {
                    self.stopped = true;
                    Some(status)
                }
            };
            let len = len as u32;
            self.taken.push_back(Taken { wqe, len, local });
        }
    }

    /// Posts the message of a request, or carries out a request that is none.
    fn post(&mut self, wqe: &SendWqe, len: u64, env: &mut Env<'_>) -> Result<Option<()>, WcStatus> {
        let what = env.qp.invalidable();
        let memory = env.memory_to_revoke();
        match wqe.opcode {
            Opcode::LocalInv => {
                let done = memory.invalidate(wqe.stag, env.qp.accessor(), InvalidateBy::Local, what);
                return done.map(Some).map_err(|_| WcStatus::MwBindErr);
            }
            Opcode::BindMw => {
                let done = memory.bind(&self.sq.bind(wqe), env.qp.pd, env.qp.qid);
                return done.map(Some).map_err(|_| WcStatus::MwBindErr);
            }
            _ => {}
        }
        let kind = self.kind(wqe).ok_or(WcStatus::LocQpOpErr)?;
        let length = u32::try_from(len).ok().filter(|len| *len <= MAX_MESSAGE_LEN);
        let length = length
            .filter(|len| !kind.is_atomic() || *len == ATOMIC_LEN)
            .ok_or(WcStatus::LocLenErr)?;
        let message = Message {
            id: self.first + self.taken.len() as u64,
            kind,
            length,
            solicited: wqe.flags.contains(SendFlags::SOLICITED),
            fence: wqe.flags.contains(SendFlags::FENCE),
        };
        let machine = self.machine.as_mut().ok_or(WcStatus::LocQpOpErr)?;
        machine.post(message).map_err(|_| WcStatus::LocQpOpErr)?;
        Ok(None)
    }

    /// The operation of a request; none for those that RoCE does not have.
    fn kind(&self, wqe: &SendWqe) -> Option<Kind> {
        let remote = Remote {
            address: wqe.remote_offset,
            rkey: wqe.stag,
        };
        Some(match wqe.opcode {
            Opcode::Send => Kind::Send,
            Opcode::SendImm => Kind::SendImmediate(wqe.immediate),
            Opcode::SendInv => Kind::SendInvalidate(wqe.stag),
            Opcode::Write => Kind::Write(remote),
            Opcode::WriteImm => Kind::WriteImmediate(remote, wqe.immediate),
            Opcode::Read => Kind::Read(remote),
            Opcode::CompareSwap => {
                let operands = self.sq.atomic(wqe);
                Kind::CompareSwap {
                    remote,
                    compare: operands.compare_add.get(),
                    swap: operands.swap.get(),
                }
            }
            Opcode::FetchAdd => Kind::FetchAdd {
                remote,
                add: self.sq.atomic(wqe).compare_add.get(),
            },
            Opcode::ReadInv | Opcode::LocalInv | Opcode::BindMw => return None,
        })
    }

    /// Bytes of payload, or of a Read.
    fn payload_len(&self, wqe: &SendWqe) -> u64 {
        if wqe.flags.contains(SendFlags::INLINE) {
            return wqe.inline_len.into();
        }
        let elements = (0..).map_while(|n| self.sq.element(wqe, n));
        elements.map(|sge| u64::from(sge.len.get())).sum()
    }

    /// The next packet to send now.
    pub(super) fn transmit(&mut self, now: Nanos) -> Option<Outbound> {
        self.machine.as_mut()?.transmit(now)
    }

    /// Copies the payload of a packet into `payload`. If the program's memory cannot be read, the
    /// request fails, and there is no packet.
    pub(super) fn gather(&mut self, packet: &Outbound, payload: &mut [u8], env: &Env<'_>) -> bool {
        let gathered = self.try_gather(packet, payload, env).is_some();
        if let Some(machine) = &mut self.machine {
            machine.gathered(packet, gathered);
        }
        gathered
    }

    fn try_gather(&self, packet: &Outbound, payload: &mut [u8], env: &Env<'_>) -> Option<()> {
        let (id, offset, _) = packet.payload();
        let wqe = &self.taken_as(id)?.wqe;
        if wqe.flags.contains(SendFlags::INLINE) {
            self.sq.inline(wqe, offset as usize, payload);
            return Some(());
        }
        let list = |index| self.sq.element(wqe, index);
        let mut cursor = Cursor::at(&list, offset);
        let mut rest = payload;
        while !rest.is_empty() {
            let access = cursor.access(&list, rest.len(), Need::LocalRead)?;
            let n = access.len as usize;
            let window = env
                .memory
                .check_again(&env.recent, env.qp.accessor(), access)
                .ok()?;
            let (head, tail) = rest.split_at_mut(n);
            window.copy_out(0, head).ok()?;
            window.keep(&env.recent);
            cursor.advance(n);
            rest = tail;
        }
        Some(())
    }

    /// Takes a response, and places its payload.
    pub(super) fn receive(&mut self, psn: Psn, response: &Response, payload: &[u8], env: &Env<'_>) {
        let Some(machine) = self.requester() else {
            return;
        };
        let effect = machine.receive(env.now.get().0, psn, response, payload.len());
        let (id, placed) = match effect {
            Effect::None => return,
            Effect::Place { id, offset } => (id, self.place(id, offset, payload, env)),
            Effect::Original { id, value } => (id, self.place(id, 0, &value.to_ne_bytes(), env)),
        };
        if let (None, Some(machine)) = (placed, &mut self.machine) {
            machine.refuse(id);
        }
    }

    fn place(&self, id: u64, offset: u32, bytes: &[u8], env: &Env<'_>) -> Option<()> {
        let wqe = &self.taken_as(id)?.wqe;
        let list = |index| self.sq.element(wqe, index);
        let mut cursor = Cursor::at(&list, offset);
        scatter(env.qp.pd, env, list, &mut cursor, bytes).ok()
    }

    /// A congestion notification packet has arrived.
    pub(super) fn congestion_notified(&mut self) {
        if let Some(machine) = self.requester() {
            machine.congestion_notified();
        }
    }

    fn taken_as(&self, id: u64) -> Option<&Taken> {
        self.taken.get(usize::try_from(id.checked_sub(self.first)?).ok()?)
    }

    /// Completes the requests that have ended. Returns the status of one that failed: the queue
    /// pair must end.
    pub(super) fn complete(&mut self, env: &mut Env<'_>) -> Result<Option<WcStatus>, Overflow> {
        let mut failed = None;
        while failed.is_none() {
            let status = match self.taken.front() {
                // The entry that cannot be read is completed by the flush.
                None if self.stopped => {
                    failed = Some(WcStatus::LocQpOpErr);
                    break;
                }
                None => break,
                Some(Taken {
                    local: Some(status), ..
                }) => *status,
                Some(_) => match self.machine.as_mut().and_then(Sending::poll) {
                    None => break,
                    Some(status) => status,
                },
            };
            self.end_first(status, env)?;
            failed = (status != WcStatus::Success).then_some(status);
        }
        self.cq.flush(env)?;
        Ok(failed)
    }

    /// Completes the oldest request.
    fn end_first(&mut self, status: WcStatus, env: &mut Env<'_>) -> Result<(), Overflow> {
        let Some(Taken { wqe, len, local }) = self.taken.pop_front() else {
            return Ok(());
        };
        self.first += 1;
        // The blocks are released first, because a program may post as soon as it polls the
        // completion.
        self.sq.retire(wqe.blocks);
        let is_success = status == WcStatus::Success;
        if is_success && local.is_none() {
            env.counters.add(Counter::TxMessages, 1);
        }
        if is_success && !wqe.flags.contains(SendFlags::SIGNALED) {
            return Ok(());
        }
        let mut cqe = env.qp.cqe(wqe.cookie, wqe.opcode.completion(), status);
        if is_success {
            cqe.byte_len = len.into();
        }
        self.cq.push(cqe, env)
    }

    /// Completes everything in error, in order. Kind UC may send again after it.
    pub(super) fn flush(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.end();
        self.machine = self.machine.take().and_then(Sending::flushed);
        while !self.taken.is_empty() {
            self.end_first(WcStatus::WrFlushErr, env)?;
        }
        while let Some(next) = self.sq.peek() {
            let (cookie, opcode, status) = match next {
                Ok(wqe) => {
                    self.sq.advance(wqe.blocks);
                    self.sq.retire(wqe.blocks);
                    (wqe.cookie, wqe.opcode.completion(), WcStatus::WrFlushErr)
                }
                Err(BadWqe { cookie }) => {
                    self.sq.discard();
                    (cookie, WcOpcode::Send, WcStatus::LocQpOpErr)
                }
            };
            self.cq.push(env.qp.cqe(cookie, opcode, status), env)?;
        }
        self.stopped = false;
        self.cq.flush(env)
    }
}
