//! The peer's requests: Sends fill receives, Writes, Reads and atomic operations access memory.

use super::machines::{Dropping, Taking};
use crate::counters::Counter;
use crate::memory::{InvalidateBy, MemoryAccess, Need, Window};
use crate::queues::{CompletionQueue, Overflow, ReceiveSource, RecvWqe};
use crate::time::Nanos;
use crate::transport::Env;
use crate::transport::completions::Completions;
use crate::transport::piggyback::Piggyback;
use crate::transport::placement::{Cursor, scatter};
use std::sync::Arc;
use std::time::Duration;
use urnic_device::cqe::CqeFlags;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{Access, WcOpcode, WcStatus};
use urnic_roce::responder::{
    Arrival, Attributes, End, Execution, Fault, Packet, Place, Placement, ReadCheck, Refusal, Responder,
    Step, Target,
};
use urnic_roce::unreliable::Receiver;
use urnic_wire::roce::{Psn, Request, Reth, Transfer};

/// The responder of a queue pair.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Present once the queue pair was in the state RTR.
    machine: Option<Taking>,
    pub(super) receives: Receives,
    /// The remote rights of the queue pair.
    pub(super) access: Access,
    /// Whether the acknowledgement waits for a message.
    piggyback: Piggyback,
    congestion: Congestion,
}

/// Reports of congestion to the peer (annex A17, A17.9.3).
#[derive(Debug, Default)]
struct Congestion {
    /// A notification is to be sent.
    is_reported: bool,
    /// When the next one may be, at the earliest.
    next: Nanos,
}

/// The time between two notifications for a queue pair, as adapters have it.
const NOTIFICATION_INTERVAL: Duration = Duration::from_micros(50);

/// Packets of the peer that are acknowledged without waiting for a message to it.
const ACKNOWLEDGED: u32 = 16;

impl Arrivals {
    pub(super) fn new((rq, cq): (ReceiveSource, Arc<CompletionQueue>), access: Access) -> Arrivals {
        Arrivals {
            machine: None,
            receives: Receives {
                rq,
                cq: Completions::new(cq),
                wqe: RecvWqe::default(),
                is_taken: false,
                cursor: Cursor::default(),
                drops_long: false,
                is_broken: false,
            },
            access,
            piggyback: Piggyback::default(),
            congestion: Congestion::default(),
        }
    }

    pub(super) fn begin(&mut self, attributes: Attributes, is_unreliable: bool) {
        self.receives.drops_long = is_unreliable;
        self.machine = Some(match is_unreliable {
            true => {
                let receiver = Receiver::new(attributes.mtu, attributes.first_psn);
                Taking::Unreliable(Box::new(receiver), Dropping::default())
            }
            false => Taking::Reliable(Box::new(Responder::new(attributes))),
        });
    }

    /// Takes a request, and executes it if it is the next one.
    pub(super) fn request(&mut self, arrival: &Arrival, solicited: bool, payload: &[u8], env: &mut Env<'_>) {
        let Some(Taking::Reliable(machine)) = &mut self.machine else {
            return env.counters.add(Counter::RxDatagramErrors, 1);
        };
        match machine.receive(arrival) {
            Step::Ignored => {}
            Step::Place(placement) => {
                let bytes = Bytes { payload, solicited };
                place(placement, &mut self.receives, self.access, bytes, env);
            }
            Step::Read(check) => check_read(check, self.access, env),
            Step::Atomic(execution) => execute(execution, self.access, env),
        }
    }

    /// Takes a packet of an unreliable connection.
    pub(super) fn unreliable(
        &mut self,
        psn: Psn,
        transfer: Transfer,
        (payload, solicited): (&[u8], bool),
        env: &mut Env<'_>,
    ) {
        let Some(Taking::Unreliable(machine, dropping)) = &mut self.machine else {
            return env.counters.add(Counter::RxDatagramErrors, 1);
        };
        let mut drops = u64::from(dropping.lost(&transfer));
        match machine.receive(psn, transfer, payload.len()) {
            None => drops += u64::from(dropping.dropped(&transfer)),
            Some(placement) => {
                let place = *placement.place();
                let bytes = Bytes { payload, solicited };
                match put(&place, &mut self.receives, self.access, bytes, env) {
                    Ok(()) => {
                        placement.done();
                        dropping.placed(place.end.is_some());
                        end(&place, &mut self.receives, solicited, env);
                    }
                    // The memory of the receive is the program's fault.
                    Err(Refusal::Operation) => self.receives.is_broken = true,
                    Err(_) => drops += u64::from(dropping.dropped(&transfer)),
                }
            }
        }
        env.counters.add(Counter::RxMessageDrops, drops);
    }

    /// A packet of the peer was marked by a congested router.
    pub(super) fn congestion_experienced(&mut self, now: Nanos) {
        if now >= self.congestion.next {
            self.congestion = Congestion {
                is_reported: true,
                next: now + NOTIFICATION_INTERVAL,
            };
        }
    }

    /// Whether a notification of congestion is to be sent now.
    pub(super) fn take_congestion(&mut self) -> bool {
        std::mem::take(&mut self.congestion.is_reported)
    }

    fn responder(&self) -> Option<&Responder> {
        self.machine.as_ref()?.reliable()
    }

    fn responder_mut(&mut self) -> Option<&mut Responder> {
        self.machine.as_mut()?.reliable_mut()
    }

    /// The next packet to send before requests.
    pub(super) fn answer(&mut self) -> Option<Packet> {
        self.responder_mut()?.answer()
    }

    /// The acknowledgement to send after requests: `with_others`, or if it need not wait for them.
    pub(super) fn acknowledge(&mut self, with_others: bool) -> Option<Packet> {
        if !with_others && !self.piggyback.is_alone() {
            return None;
        }
        let packet = self.responder_mut()?.acknowledge()?;
        self.piggyback.is_sent();
        Some(packet)
    }

    /// Whether the peer is owed an acknowledgement, and nothing else.
    pub(super) fn owes_only_acknowledgement(&self) -> bool {
        self.responder().is_some_and(Responder::owes_only_acknowledgement)
    }

    /// Lets the acknowledgement go alone, as [`Piggyback::go_alone`].
    pub(super) fn acknowledge_alone(&mut self, polled_again: bool, is_drained: bool) -> bool {
        let packets = self.responder().map_or(0, Responder::unacknowledged);
        self.piggyback
            .go_alone(packets >= ACKNOWLEDGED, polled_again, is_drained)
    }

    /// A request is sent.
    pub(super) fn request_sent(&mut self) {
        self.piggyback.message_sent();
    }

    /// Copies the payload of a Read's response into `payload`. If the memory cannot be read any
    /// more, the connection ends, and there is no packet.
    pub(super) fn read(&mut self, packet: &Packet, payload: &mut [u8], env: &Env<'_>) -> bool {
        if payload.is_empty() {
            return true;
        }
        // Each packet is checked: the key may have been revoked since.
        let read = window(&packet.data, Need::RemoteRead, self.access, env)
            .is_some_and(|window| window.copy_out(0, payload).is_ok());
        if !read && let Some(machine) = self.responder_mut() {
            machine.refuse(packet, Fault::Access);
        }
        read
    }

    /// Why the queue pair must end, if it must.
    pub(super) fn fault(&self) -> Option<QpFault> {
        let fault = match self.machine.as_ref()? {
            Taking::Reliable(machine) => machine.fault()?,
            Taking::Unreliable(..) => return self.receives.is_broken.then_some(QpFault::LocalWork),
        };
        tracing::debug!(?fault, "a request of the peer ends the queue pair");
        Some(QpFault::TerminateSent)
    }

    /// Whether there are packets to send before requests.
    pub(super) fn has_answers(&self) -> bool {
        self.congestion.is_reported || self.responder().is_some_and(Responder::has_answers)
    }

    /// Completes the receives in error, in order.
    pub(super) fn flush(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.machine = None;
        self.receives.flush(env)
    }
}

/// The payload of a packet.
#[derive(Debug, Clone, Copy)]
struct Bytes<'p> {
    payload: &'p [u8],
    /// SE of the packet's header.
    solicited: bool,
}

/// The receives of the queue pair, and the one that the present message fills.
#[derive(Debug)]
pub(super) struct Receives {
    pub(super) rq: ReceiveSource,
    pub(super) cq: Completions,
    wqe: RecvWqe,
    /// The receive is taken and not complete.
    is_taken: bool,
    cursor: Cursor,
    /// A message that is too long is dropped, and the receive waits for another one: kind UC.
    drops_long: bool,
    /// A receive could not be filled, in a queue pair of kind UC.
    is_broken: bool,
}

impl Receives {
    /// Takes the next receive for a message.
    fn take(&mut self, env: &mut Env<'_>) -> Result<(), Refusal> {
        // A message that was sent again has its receive already.
        if self.is_taken {
            return Ok(());
        }
        match self.rq.take(&mut self.wqe, env.effects) {
            None => Err(Refusal::NotReady),
            Some(taken) => {
                (self.is_taken, self.cursor) = (true, Cursor::default());
                taken.or_else(|_| self.complete_in_error(WcStatus::LocQpOpErr, Refusal::Operation, env))
            }
        }
    }

    /// Places the payload of a Send.
    fn place(&mut self, offset: u32, payload: &[u8], env: &mut Env<'_>) -> Result<(), Refusal> {
        // The receive may be one that a dropped message has left.
        if offset == 0 {
            self.cursor = Cursor::default();
        }
        if self.wqe.room() < u64::from(offset) + payload.len() as u64 {
            if self.drops_long {
                return Err(Refusal::Invalid);
            }
            return self.complete_in_error(WcStatus::LocLenErr, Refusal::Invalid, env);
        }
        let sges = self.wqe.sges();
        let list = |n: usize| sges.get(n).copied();
        match scatter(self.rq.pd(env.qp.pd), env, list, &mut self.cursor, payload) {
            Ok(()) => Ok(()),
            Err(_) => self.complete_in_error(WcStatus::LocProtErr, Refusal::Operation, env),
        }
    }

    /// Completes the receive in error. The peer gets the refusal.
    fn complete_in_error<T>(
        &mut self,
        status: WcStatus,
        refusal: Refusal,
        env: &mut Env<'_>,
    ) -> Result<T, Refusal> {
        self.is_taken = false;
        let cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, status);
        // An overflow is reported by the flush that follows.
        let (Ok(()) | Err(Overflow)) = self.cq.push(cqe, env);
        Err(refusal)
    }

    /// Completes the receive of a message that has arrived.
    fn complete(&mut self, end: &End, is_write: bool, solicited: bool, env: &mut Env<'_>) {
        let opcode = match is_write {
            true => WcOpcode::RecvRdmaWithImm,
            false => WcOpcode::Recv,
        };
        let mut cqe = env.qp.cqe(self.wqe.cookie, opcode, WcStatus::Success);
        cqe.byte_len = end.length.into();
        let mut flags = CqeFlags::empty();
        flags.set(CqeFlags::SOLICITED, solicited);
        if let Some(immediate) = end.immediate {
            (cqe.extra, flags) = (immediate, flags | CqeFlags::WITH_IMM);
        }
        if let Some(rkey) = end.invalidated {
            (cqe.extra, flags) = (rkey.to_ne_bytes(), flags | CqeFlags::WITH_INV);
        }
        cqe.flags = flags.bits();
        self.is_taken = false;
        // An overflow is reported by the flush that follows.
        let (Ok(()) | Err(Overflow)) = self.cq.push(cqe, env);
    }

    /// Completes the receives in error, in order. Entries of a shared queue do not belong to a
    /// queue pair yet.
    fn flush(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        if std::mem::take(&mut self.is_taken) {
            self.fail(env)?;
        }
        if let ReceiveSource::Own(_) = self.rq {
            while self.rq.take(&mut self.wqe, env.effects).is_some() {
                self.fail(env)?;
            }
        }
        self.cq.flush(env)
    }

    fn fail(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        let cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, WcStatus::WrFlushErr);
        self.cq.push(cqe, env)
    }
}

/// Places the payload of a packet of a Send or Write, and completes the message if it ends there.
fn place(
    placement: Placement<'_>,
    receives: &mut Receives,
    access: Access,
    bytes: Bytes<'_>,
    env: &mut Env<'_>,
) {
    let place = *placement.place();
    match put(&place, receives, access, bytes, env) {
        Ok(()) => placement.done(),
        Err(refusal) => return placement.refuse(refusal),
    }
    end(&place, receives, bytes.solicited, env);
}

/// Takes a receive for a packet if it needs one, and places the payload.
fn put(
    place: &Place,
    receives: &mut Receives,
    access: Access,
    bytes: Bytes<'_>,
    env: &mut Env<'_>,
) -> Result<(), Refusal> {
    if place.takes_receive {
        receives.take(env)?;
    }
    place_bytes(place, receives, access, bytes.payload, env)?;
    match place.end.and_then(|end| end.invalidated) {
        Some(rkey) => invalidate(rkey, receives, env),
        None => Ok(()),
    }
}

/// Completes the message if it ends with the packet.
fn end(place: &Place, receives: &mut Receives, solicited: bool, env: &mut Env<'_>) {
    if let Some(end) = place.end {
        env.counters.add(Counter::RxMessages, 1);
        let is_write = matches!(place.target, Target::Memory { .. });
        if end.completes_receive {
            receives.complete(&end, is_write, solicited, env);
        } else if end.length > 0 {
            env.counters.add(Counter::RxOneSided, 1);
        }
    }
}

fn place_bytes(
    place: &Place,
    receives: &mut Receives,
    access: Access,
    payload: &[u8],
    env: &mut Env<'_>,
) -> Result<(), Refusal> {
    if let Some(whole) = place.whole {
        window(&whole, Need::RemoteWrite, access, env).ok_or(Refusal::Access)?;
    }
    match place.target {
        _ if payload.is_empty() => Ok(()),
        Target::Receive { offset } => receives.place(offset, payload, env),
        Target::Memory { address, rkey } => {
            let length = place.length;
            let reth = Reth {
                address,
                rkey,
                length,
            };
            let window = window(&reth, Need::RemoteWrite, access, env).ok_or(Refusal::Access)?;
            window.copy_in(0, payload).map_err(|_| Refusal::Access)
        }
    }
}

/// Invalidates the key that a Send names. If that is not possible, the receive fails, too.
fn invalidate(rkey: u32, receives: &mut Receives, env: &mut Env<'_>) -> Result<(), Refusal> {
    let what = env.qp.invalidable();
    let memory = env.memory_to_revoke();
    match memory.invalidate(rkey, env.qp.accessor(), InvalidateBy::Peer, what) {
        Ok(()) => Ok(()),
        Err(_) => receives.complete_in_error(WcStatus::RemInvReqErr, Refusal::Access, env),
    }
}

fn check_read(check: ReadCheck<'_>, access: Access, env: &Env<'_>) {
    let reth = check.memory();
    let allowed = reth.length == 0 || window(&reth, Need::RemoteRead, access, env).is_some();
    match allowed {
        true => {
            env.counters.add(Counter::RxOneSided, 1);
            check.done();
        }
        false => check.refuse(Refusal::Access),
    }
}

/// Carries out an atomic operation. It is atomic for all other queue pairs and for the host's own
/// atomic instructions.
fn execute(execution: Execution<'_>, access: Access, env: &Env<'_>) {
    let operand = *execution.operand();
    let reth = Reth {
        address: operand.address,
        rkey: operand.rkey,
        length: size_of::<u64>() as u32,
    };
    let Some(window) = window(&reth, Need::RemoteAtomic, access, env) else {
        return execution.refuse(Refusal::Access);
    };
    let compares = matches!(execution.request(), Request::CompareSwap(_));
    let original = window.update_word(0, |old| match compares {
        true if old == operand.compare => operand.swap_or_add,
        true => old,
        false => old.wrapping_add(operand.swap_or_add),
    });
    match original {
        Ok(original) => {
            env.counters.add(Counter::RxOneSided, 1);
            execution.done(original);
        }
        Err(_) => execution.refuse(Refusal::Access),
    }
}

/// The memory that a peer accesses; none if it may not.
fn window<'t>(reth: &Reth, need: Need, access: Access, env: &Env<'t>) -> Option<Window<'t>> {
    let (right, _) = need.right();
    let asked = MemoryAccess {
        stag: reth.rkey,
        offset: reth.address,
        len: reth.length.into(),
        need,
    };
    let window = env.memory.check(env.qp.accessor(), asked).ok()?;
    access.contains(right).then_some(window)
}
