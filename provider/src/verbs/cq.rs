//! Completion queues: creating and destroying, polling, arming.
//!
//! Completions that the program polls are shown to what looks at the requests, and those in error
//! are counted. The log has a line for the first failure of each queue pair that is not merely a
//! flush. The device's own lines name both ends of the connection and the memory; this one names
//! the program's work request.

use std::collections::HashMap;
use std::ffi::c_int;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_driver::{Driver, Reason, Refusal};
use urnic_model::Nanos;
use urnic_model::log_limit::LogLimit;
use urnic_presence::fork::CreationProcess;
use urnic_presence::{ChannelSender, registry};
use urnic_process::queue_lock::Lock;
use urnic_rdma_core::{
    IBV_CQ_ATTR_MODERATE, ibv_comp_channel, ibv_cq, ibv_cq_ex, ibv_moderate_cq, ibv_modify_cq_attr, ibv_wc,
    verbs_cq,
};
use urnic_wire::rdmap::TerminateError;

use super::faulted;
use super::ledger::Ledger;
use super::pd::{DomainMembership, Pd, Resource, Rings};
use super::reported::{Acknowledgements, Reported, send_completion};
use super::work_completion::{is_receive, work_completion};
use crate::context::{Context, OpenContext};
use urnic_driver::rings::CompletionRing;
use urnic_sys::Plain;

use crate::from_c::{Room, SharedWithC, ToFree, objects};
use crate::guard::contained;
use crate::probes;
use crate::strict::{self, PairCheck, QueueCheck};
use crate::trace::{Outcome, trace};

/// A channel that `ibv_create_comp_channel` of this device did not create, or that is destroyed.
const UNKNOWN_CHANNEL: Reason = Reason::Rule("channel is not an open channel of this device");

/// A completion queue: the part of libibverbs, then the part of the provider.
#[repr(C)]
pub(crate) struct Cq {
    /// Must be first: libibverbs' pointer is also the provider's.
    pub(super) abi: SharedWithC<verbs_cq>,
    /// Checked before any lock is taken.
    pub(super) created_in: CreationProcess,
    /// Whether a request for an event covers completions that no event announced and that the
    /// program has not taken.
    reports_missed: bool,
    driver: &'static Arc<Driver>,
    pub(super) device: Arc<urnic_driver::Cq>,
    pub(super) completions: Lock<Completions>,
    /// The destination of completion events; `None`: no destination.
    channel: Option<Arc<ChannelSender>>,
    async_channel: Arc<ChannelSender>,
    pub(super) reported: Reported,
    pub(super) asynchronous: Reported,
    rings: Rings,
    /// The check of the option `strict`.
    pub(super) check: Option<Arc<QueueCheck>>,
    /// The membership in a parent domain, if there is one.
    _membership: Option<DomainMembership>,
}

objects! { Cq: ibv_cq, ibv_cq_ex; }

/// The state that polling changes, under the queue's lock.
pub(super) struct Completions {
    pub(super) ring: CompletionRing,
    driver: &'static Arc<Driver>,
    /// The ledgers of the queue pairs that complete here, by qid.
    members: HashMap<u32, Arc<Ledger>, BuildHasherDefault<QidHasher>>,
    /// The completion between `ibv_start_poll` and `ibv_end_poll`.
    pub(super) current: Cqe,
    /// Index behind the newest completion at the time of the newest event.
    announced: u32,
    /// The queue pair whose completion was taken last, by its number in the device; 0 = none was.
    pub(super) last: u32,
    /// The number of the queue in the device.
    id: u32,
    /// A plan of faults lets it show nothing any more.
    overflowed_by_plan: bool,
}

/// Multiplicative hashing: qids are small numbers that this device chooses.
#[derive(Default)]
struct QidHasher(u64);

impl Hasher for QidHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u32((*b).into()));
    }

    #[inline]
    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

impl Completions {
    /// Index of the first completion that causes the event which the program requests.
    ///
    /// By the verbs it is the next one: completions that are already in the queue, taken or not,
    /// cause no event. Adapters for RoCE also report those that came before the request, and
    /// programs rely on it: UCX polls, requests an event, and sleeps. Completions that an event
    /// announced cause no second one: perftest takes one completion for each event, and treats an
    /// additional event as a free place to post into.
    fn next_to_announce(&self, reports_missed: bool) -> u32 {
        let (newest, taken) = (self.ring.newest(), self.ring.consumer());
        if !reports_missed {
            return newest;
        }
        let announced = self.announced.wrapping_sub(taken);
        match announced <= newest.wrapping_sub(taken) {
            true => self.announced,
            // All that was announced is taken.
            false => taken,
        }
    }

    /// Takes the oldest completion, settles its slot, and returns it with its `wr_id`.
    // Inlined: otherwise the completion is moved through memory twice.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<(Cqe, u64)> {
        loop {
            if !self.ring.has_front() || self.overflowed_by_plan {
                return None;
            }
            let mut cqe = self.ring.front();
            self.ring.advance();
            let Some(ledger) = self.members.get(&cqe.qid.get()) else {
                continue;
            };
            self.last = cqe.qid.get();
            if urnic_faults::is_on() {
                let mut queue = faulted::Queue::Well;
                contained(|| queue = faulted::completion(self.driver, &mut cqe, ledger));
                if queue == faulted::Queue::Overflowed {
                    self.overflow_by_plan();
                    return None;
                }
            }
            let wr_id = if is_receive(&cqe) {
                ledger.settle_receive();
                let mut wr_id = cqe.cookie.get();
                if ledger.is_observed() {
                    contained(|| wr_id = wr_id_of(ledger, &cqe));
                }
                wr_id
            } else {
                ledger.settle_send(cqe.cookie.get() as u32)
            };
            probes::poll(ledger.qpn(), wr_id, cqe.status, cqe.byte_len.get());
            if cqe.status != WcStatus::Success as u8 {
                note_failure(self.driver, &cqe, wr_id, ledger);
            }
            if ledger.is_observed() {
                contained(|| show(ledger, &cqe, wr_id));
            }
            return Some((cqe, wr_id));
        }
    }

    #[cold]
    fn overflow_by_plan(&mut self) {
        self.overflowed_by_plan = true;
        let pairs = self.members.keys().copied().collect();
        self.driver.overflow_later(self.id, pairs);
    }
}

impl Cq {
    /// Creates a completion queue of at least `cqe` entries.
    pub(super) fn make(
        context: &Context,
        cqe: u32,
        channel: Option<&ibv_comp_channel>,
        vector: u32,
        pd: Option<&Pd>,
        timed: bool,
    ) -> Result<Box<Cq>, Refusal> {
        faulted::call(context.driver, "create_cq")?;
        let channel = match channel {
            Some(channel) => Some(registry::channel(channel.fd).ok_or(UNKNOWN_CHANNEL.invalid())?),
            None => None,
        };
        let place = Box::<Cq>::new_uninit();
        let cookie = place.as_ptr().addr() as u64;
        let membership = pd.map(Pd::admit).transpose()?;
        let resource = Resource::Completions;
        let rings = pd.map_or_else(|| Rings::anywhere(resource), |pd| pd.rings(resource));
        let device = context.driver.create_cq(
            &context.device,
            cqe,
            vector,
            cookie,
            timed || trace().is_some(),
            &rings,
        )?;
        // SAFETY: ring and record exist as long as `device`, which the new queue keeps as long as
        // the value (for the ring, `RingPlacement` promises this).
        let ring = unsafe { CompletionRing::new(device.ring(), device.record(), device.log_size())? };
        let mut abi = verbs_cq::zeroes();
        // SAFETY: both variants of the union begin with these fields.
        let public = unsafe { &mut *abi.cq };
        public.handle = device.id;
        public.cqe = c_int::try_from(device.entries()).unwrap_or(c_int::MAX);
        // No event comes before a queue pair completes here, so no code has read this field yet.
        Ok(Box::write(
            place,
            Cq {
                abi: SharedWithC::new(abi),
                created_in: CreationProcess::current(),
                reports_missed: context.driver.identity().is_roce(),
                driver: context.driver,
                completions: Lock::new(Completions {
                    ring,
                    driver: context.driver,
                    members: HashMap::default(),
                    current: Cqe::default(),
                    announced: 0,
                    id: device.id,
                    last: 0,
                    overflowed_by_plan: false,
                }),
                device,
                channel,
                async_channel: context.async_channel.clone(),
                reported: Reported::default(),
                asynchronous: Reported::default(),
                rings,
                check: strict::current().map(|_| Arc::new(QueueCheck::new(cqe))),
                _membership: membership,
            },
        ))
    }

    /// Reports the completion of an armed queue.
    pub(super) fn notify(&self) {
        if let Some(channel) = &self.channel {
            // Before the program can know of the event. While another call holds the lock, possibly
            // for long, the index stays old: that causes at most one event more.
            if let Some(mut completions) = self.completions.try_hold() {
                completions.announced = completions.ring.newest();
            }
            if urnic_faults::is_on() && faulted::event_is_lost(self.driver) {
                return;
            }
            send_completion(&self.reported, channel, self.address());
        }
    }

    fn address(&self) -> u64 {
        self.abi.get().addr() as u64
    }

    /// The number of completions that the program has not taken; 0 while a thread holds the queue.
    pub(super) fn waiting(&self) -> u32 {
        let completions = self.completions.try_hold();
        completions.map_or(0, |held| held.ring.newest().wrapping_sub(held.ring.consumer()))
    }

    /// Adds a queue pair with this ledger, which completes here from now on.
    pub(super) fn attach(&self, qid: u32, ledger: &Arc<Ledger>) {
        self.completions.hold().members.insert(qid, ledger.clone());
    }

    /// The queue pair was destroyed: its remaining completions are not polled any more.
    pub(super) fn detach(&self, qid: u32) {
        let mut completions = self.completions.hold();
        completions.members.remove(&qid);
        completions.ring.purge(qid);
        // A poller that names a queue pair which is gone has all others looked at each time.
        if completions.last == qid {
            completions.last = 0;
        }
    }

    /// The queue pair was reset: its remaining completions are not polled any more.
    pub(super) fn purge(&self, qid: u32) {
        self.completions.hold().ring.purge(qid);
    }

    /// The first send slot of a queue pair for which no completion arrived, taken or not; `None`
    /// while a thread holds the queue.
    pub(super) fn sends_completed(&self, qid: u32, ledger: &Ledger) -> Option<u32> {
        let completions = self.completions.try_hold()?;
        let waiting = completions.ring.waiting(qid).filter(|cqe| !is_receive(cqe));
        let newest = waiting.last().map(|cqe| cqe.cookie.get() as u32);
        Some(newest.map_or_else(|| ledger.sends_settled(), |slot| slot.wrapping_add(1)))
    }

    /// The number of receives of a queue pair for which a completion arrived, taken or not; `None`
    /// while a thread holds the queue.
    pub(super) fn receives_completed(&self, qid: u32, ledger: &Ledger) -> Option<u32> {
        let completions = self.completions.try_hold()?;
        let waiting = completions.ring.waiting(qid).filter(is_receive).count();
        Some(ledger.receives_settled().wrapping_add(waiting as u32))
    }

    /// Takes completions while there is room; returns how many, and the queue pair of the last one
    /// that was ever taken.
    #[inline]
    fn poll(&self, mut room: Room<'_, ibv_wc>) -> (c_int, u32) {
        let mut completions = self.completions.hold();
        let before = completions.ring.consumer();
        let mut taken = 0;
        while !room.is_full()
            && let Some((cqe, wr_id)) = completions.take()
        {
            room.push(work_completion(&cqe, wr_id));
            taken += 1;
        }
        if completions.ring.consumer() != before {
            completions.ring.publish();
        }
        (taken, completions.last)
    }

    /// Moves the queue to a ring of at least `cqe` entries.
    fn resize(&self, cqe: u32) -> Result<(), Refusal> {
        self.rings.replaced(|| self.move_ring(cqe))?;
        if let Some(check) = &self.check {
            check.resized(cqe);
        }
        Ok(())
    }

    fn move_ring(&self, cqe: u32) -> Result<(), Refusal> {
        faulted::call(self.driver, "resize_cq")?;
        // The program's allocator may poll, or wait for a thread that polls.
        let new = self.device.new_ring(cqe, &self.rings)?;
        let mut completions = self.completions.hold();
        completions.ring.publish();
        let (ring, log_size) = self.device.resize(new)?;
        // SAFETY: the device uses the new ring from now on, and it exists until the next resize.
        unsafe { completions.ring.move_to(ring, log_size)? };
        // SAFETY: both variants of the union begin with these fields; the program may read this
        // field at any time.
        unsafe { (*self.abi.get().cast::<ibv_cq>()).cqe = 1 << log_size };
        Ok(())
    }

    /// Destroys the queue. Waits until the program acknowledged its events.
    fn destroy(&self) -> Result<(), Refusal> {
        if !self.created_in.is_current() {
            return Err(Errno::IO.into());
        }
        if !self.completions.hold().members.is_empty() {
            return Err(Reason::UsedBy("queue pairs").with(Errno::BUSY));
        }
        self.device.destroy()?;
        if let Some(channel) = &self.channel {
            self.reported.purge(channel, self.address());
        }
        self.asynchronous.purge(&self.async_channel, self.address());
        // SAFETY: the fields belong to this queue, and libibverbs initialised them.
        unsafe {
            let public = self.abi.get().cast::<ibv_cq>();
            Acknowledgements {
                mutex: &raw mut (*public).mutex,
                cond: &raw mut (*public).cond,
                counts: [
                    (&raw const (*public).comp_events_completed, &self.reported),
                    (&raw const (*public).async_events_completed, &self.asynchronous),
                ],
            }
            .wait();
        }
        Ok(())
    }
}

/// `ibv_create_cq(3)`: EINVAL for a size or vector that the device does not support.
pub(super) fn create_cq(
    context: OpenContext,
    cqe: c_int,
    channel: Option<&ibv_comp_channel>,
    comp_vector: c_int,
) -> Result<Box<Cq>, Refusal> {
    let negative = |argument| Reason::Negative(argument).invalid();
    let cqe = u32::try_from(cqe).map_err(|_| negative("cqe"))?;
    let vector = u32::try_from(comp_vector).map_err(|_| negative("comp_vector"))?;
    Cq::make(&context, cqe, channel, vector, None, false)
}

/// `ibv_resize_cq(3)`: EINVAL for a size that the device does not support, or that is too small for
/// the completions in the queue.
pub(super) fn resize_cq(cq: &Cq, cqe: c_int) -> Result<(), Refusal> {
    cq.resize(u32::try_from(cqe).map_err(|_| Reason::Negative("cqe").invalid())?)
}

/// `ibv_modify_cq(3)`: EOPNOTSUPP for attributes other than moderation, or if the device does not
/// support moderation.
pub(super) fn modify_cq(cq: &Cq, attr: &ibv_modify_cq_attr) -> Result<(), Errno> {
    if attr.attr_mask & !IBV_CQ_ATTR_MODERATE != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if attr.attr_mask == 0 {
        return Ok(());
    }
    let ibv_moderate_cq { cq_count, cq_period } = attr.moderate;
    cq.device.moderate(cq_count, cq_period)
}

/// `ibv_destroy_cq(3)`: EBUSY while a queue pair completes to this queue.
pub(super) fn destroy_cq(cq: ToFree<Cq>) -> Result<(), Refusal> {
    cq.destroy()?;
    cq.free();
    Ok(())
}

/// `ibv_poll_cq(3)`: a call that finds no completion lets the device work on this thread, and polls
/// again. Negative (EIO) in a forked child.
#[inline(always)]
pub(super) fn poll_cq(cq: &Cq, mut room: Room<'_, ibv_wc>) -> c_int {
    if !cq.created_in.is_current() {
        return -Errno::IO.raw_os_error();
    }
    let (mut taken, last) = cq.poll(room.again());
    if taken == 0 {
        contained(|| cq.device.progress(last));
        (taken, _) = cq.poll(room);
    } else if cq.device.has_gathered() {
        contained(|| cq.device.progress(last));
    }
    taken
}

/// `ibv_req_notify_cq(3)`: EIO in a forked child.
pub(super) fn req_notify_cq(cq: &Cq, solicited_only: c_int) -> c_int {
    if !cq.created_in.is_current() {
        return Errno::IO.raw_os_error();
    }
    let driver = cq.driver;
    let from = cq.completions.hold().next_to_announce(cq.reports_missed);
    let doorbell = cq.device.arm_doorbell(from, solicited_only != 0);
    // The event that this causes may let another thread destroy the queue.
    if let Some(doorbell) = doorbell {
        contained(|| driver.ring(doorbell));
    }
    0
}

static LIMIT: LogLimit = LogLimit::new("failed queue pairs");

/// Counts a completion in error that the program polls.
#[cold]
fn note_failure(driver: &Driver, cqe: &Cqe, wr_id: u64, ledger: &Ledger) {
    contained(|| {
        driver.failures().count(cqe);
        let is_flushed = cqe.status == WcStatus::WrFlushErr as u8;
        if !is_flushed && ledger.fails_first() && LIMIT.may_say(Nanos::monotonic()) {
            tracing::warn!("qp {:#x}: {}", cqe.label.get(), described(cqe, wr_id));
        }
    });
}

/// Shows a completion that the program polls to what looks at the requests of its queue pair.
#[cold]
fn show(ledger: &Ledger, cqe: &Cqe, wr_id: u64) {
    let slot = cqe.cookie.get() as u32;
    if let Some(trace) = ledger.trace() {
        let outcome = Outcome {
            status: cqe.status,
            completed: Nanos(cqe.timestamp.get()),
            bytes: placed(cqe),
        };
        match is_receive(cqe) {
            true => trace.receive_polled(outcome),
            false => trace.send_polled(slot, outcome),
        }
    }
    let Some(check) = ledger.check() else { return };
    let is_error = ![WcStatus::Success as u8, WcStatus::WrFlushErr as u8].contains(&cqe.status);
    let failed = is_error.then(|| described(cqe, wr_id));
    match is_receive(cqe) {
        true => match check.shared() {
            Some(shared) => shared.receive_completed(cqe.cookie.get(), placed(cqe), failed),
            None => check.receive_completed(placed(cqe), failed),
        },
        false => check.send_completed(slot, cqe.status == WcStatus::Success as u8, failed),
    }
}

/// The program's name of a receive, if the device has another one.
#[cold]
fn wr_id_of(ledger: &Ledger, cqe: &Cqe) -> u64 {
    let named = cqe.cookie.get();
    let shared = ledger.check().and_then(PairCheck::shared);
    shared.map_or(named, |shared| shared.wr_id(named))
}

/// The bytes that the device placed in the receive of a completion.
fn placed(cqe: &Cqe) -> u32 {
    let is_placed = cqe.status == WcStatus::Success as u8 && cqe.opcode == WcOpcode::Recv as u8;
    if is_placed { cqe.byte_len.get() } else { 0 }
}

/// The work request and its status.
fn described(cqe: &Cqe, wr_id: u64) -> String {
    let opcode = WcOpcode::from_raw(cqe.opcode).map_or("a request", WcOpcode::verbs_name);
    let status = WcStatus::from_raw(cqe.status).map_or("unknown status", WcStatus::verbs_name);
    let place = match is_receive(cqe) {
        true => String::new(),
        false => format!(
            " (request {} of its send queue)",
            cqe.cookie.get().wrapping_add(1)
        ),
    };
    let mut text = format!(
        "{opcode} with wr_id {wr_id:#x}{place} failed: {status} ({})",
        cqe.status
    );
    let control = cqe.vendor_error.get();
    if control != 0 {
        text += &format!(", vendor_err {control:#010x}");
        if let Some(error) = TerminateError::of_control(control) {
            text += &format!(": {error}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_request_and_the_terminate() {
        let mut cqe = Cqe::new(12, 2, 3, WcOpcode::RdmaWrite, WcStatus::RemAccessErr);
        cqe.vendor_error = 0x1100_c000.into();
        assert_eq!(
            described(&cqe, 7),
            "RDMA_WRITE with wr_id 0x7 (request 13 of its send queue) failed: REM_ACCESS_ERR (10), \
             vendor_err 0x1100c000: DDP invalid STag"
        );
        let receive = Cqe::new(7, 2, 3, WcOpcode::Recv, WcStatus::LocLenErr);
        assert_eq!(
            described(&receive, 7),
            "RECV with wr_id 0x7 failed: LOC_LEN_ERR (1)"
        );
    }
}
