//! The send queue and its gate, as the program and the driver share it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::wqe::Opcode;
use urnic_driver::{Completed, DoorbellWrite, Poster};
use urnic_process::queue_lock::{Held, Lock};

use super::cq::Cq;
use super::ledger::Ledger;
use super::send_queue::{Entry, SendQueue};
use crate::probes;

/// The send queue. The driver publishes the requests that wait for the gate, and never waits for
/// the lock: a program may hold it without limit, between `ibv_wr_start` and `ibv_wr_complete`.
pub(super) struct Sends {
    pub(super) side: Lock<SendSide>,
    /// Since when requests wait at the closed gate, in nanoseconds of the driver's clock; 0: no
    /// request waits. Written while the send queue is locked. Without meaning once the gate is
    /// open.
    waiting_since: AtomicU64,
    /// Held by a thread that released the queue while the gate was closed, as long as it checks the
    /// gate again. Taken before the other lock is released.
    checking_again: Lock<()>,
    device: Weak<urnic_driver::Qp>,
    ledger: Arc<Ledger>,
    cqs: Destinations,
}

/// The completion queues of the sends and of the receives of a queue pair.
struct Destinations([NonNull<Cq>; 2]);

// SAFETY: shared references to `Cq` may be used on any thread.
unsafe impl Send for Destinations {}
// SAFETY: shared references to `Cq` may be used on any thread, and this type contains nothing else.
unsafe impl Sync for Destinations {}

/// The part of a send queue that its lock protects.
pub(super) struct SendSide {
    pub(super) queue: SendQueue,
    pub(super) building: Building,
}

/// The state between `wr_start` and `wr_complete` ([`qp_ex`](super::qp_ex)).
#[derive(Default)]
pub(crate) struct Building {
    /// The mark of the queue at `wr_start`.
    pub(super) mark: (u32, u32),
    /// The entry that gets the next operands.
    pub(super) entry: Option<Entry>,
    /// The first error.
    pub(super) error: Option<Errno>,
}

impl Building {
    /// Begins the next entry.
    pub(super) fn begin(
        &mut self,
        queue: &mut SendQueue,
        opcode: Opcode,
        flags: u32,
        wr_id: u64,
        fill: impl FnOnce(&mut SendQueue, &mut Entry),
    ) {
        self.finish(queue);
        match queue.begin(opcode, flags, wr_id) {
            Ok(mut entry) => {
                fill(queue, &mut entry);
                self.entry = Some(entry);
            }
            Err(errno) => self.fail(errno),
        }
    }

    /// Ends the last entry.
    pub(super) fn finish(&mut self, queue: &mut SendQueue) {
        if let Some(mut entry) = self.entry.take() {
            queue.commit(&mut entry);
        }
    }

    /// Records an error.
    pub(super) fn fail(&mut self, errno: Errno) {
        self.error.get_or_insert(errno);
    }
}

impl Poster for Sends {
    fn gate_opened(&self) {
        if let Some(device) = self.device.upgrade()
            && let Some(doorbell) = self.publish_unless_held(&device)
        {
            device.driver().ring(doorbell);
        }
    }

    fn waiting_since(&self) -> Option<Duration> {
        match self.waiting_since.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }

    fn completed(&self) -> Option<Completed> {
        let qid = self.device.upgrade()?.qid;
        let [sends, receives] = self.cqs();
        Some(Completed {
            sends: sends.sends_completed(qid, &self.ledger)?,
            receives: receives.receives_completed(qid, &self.ledger)?,
        })
    }
}

impl Sends {
    /// The send queue of `device`, whose sends and receives complete to `cqs`.
    pub(super) fn new(
        device: &Arc<urnic_driver::Qp>,
        queue: SendQueue,
        ledger: Arc<Ledger>,
        cqs: [&Cq; 2],
    ) -> Arc<Sends> {
        Arc::new(Sends {
            side: Lock::new(SendSide {
                queue,
                building: Building::default(),
            }),
            waiting_since: AtomicU64::new(0),
            checking_again: Lock::new(()),
            device: Arc::downgrade(device),
            ledger,
            cqs: Destinations(cqs.map(NonNull::from)),
        })
    }

    /// The completion queues of the sends and of the receives.
    pub(super) fn cqs(&self) -> [&Cq; 2] {
        // SAFETY: a completion queue outlives its queue pairs (EBUSY), and before a queue pair is
        // destroyed the driver drops its reference to this value, after a call that is in progress.
        self.cqs.0.map(|cq| unsafe { cq.as_ref() })
    }

    /// Publishes the written entries if the gate is open, and releases the send queue. Returns the
    /// doorbell that the device requests. The queue pair may be destroyed by then: another thread
    /// may have polled the completions of these entries.
    #[inline(always)]
    pub(super) fn release_queue(
        &self,
        device: &urnic_driver::Qp,
        mut side: Held<'_, SendSide>,
    ) -> Option<DoorbellWrite> {
        if device.gate_is_open() {
            return publish(device, &mut side.queue);
        }
        self.release_gated(device, side)
    }

    #[cold]
    fn release_gated(&self, device: &urnic_driver::Qp, side: Held<'_, SendSide>) -> Option<DoorbellWrite> {
        self.note_waiting(&side);
        let _checking_again = self.checking_again.hold();
        drop(side);
        // A thread that opened the gate since the check may have found the queue locked.
        fence(Ordering::SeqCst);
        if device.gate_is_open() {
            self.publish_unless_held(device)
        } else {
            None
        }
    }

    /// Notes since when requests wait, if they do.
    fn note_waiting(&self, side: &SendSide) {
        let waits = side.queue.is_waiting();
        if !waits {
            self.waiting_since.store(0, Ordering::Relaxed);
        } else if self.waiting_since.load(Ordering::Relaxed) == 0 {
            let now = urnic_driver::now().as_nanos() as u64;
            self.waiting_since.store(now, Ordering::Relaxed);
        }
    }

    /// Empties the queue: the queue pair is reset. Returns the number of slots taken so far.
    pub(super) fn discard(&self) -> u32 {
        let mut side = self.side.hold();
        let discarded = side.queue.discard();
        self.note_waiting(&side);
        discarded
    }

    /// Publishes while the gate is open, unless the queue is locked. The holder of the lock checks
    /// the gate in [`release_queue`](Self::release_queue): fences separate store and check on both
    /// sides, so at least one side sees the other's store.
    fn publish_unless_held(&self, device: &urnic_driver::Qp) -> Option<DoorbellWrite> {
        fence(Ordering::SeqCst);
        let mut side = self.side.try_hold()?;
        let doorbell = publish(device, &mut side.queue);
        self.note_waiting(&side);
        doorbell
    }

    /// Waits until no call posts any more: before the queue pair is freed.
    pub(super) fn outlast_posts(&self) {
        self.side.outlast_holders();
        self.checking_again.outlast_holders();
    }
}

/// Publishes the written entries. Returns the doorbell that the device requests.
#[inline]
fn publish(device: &urnic_driver::Qp, queue: &mut SendQueue) -> Option<DoorbellWrite> {
    let index = queue.publish()?;
    probes::doorbell(device.qpn, index);
    Some(device.send_doorbell(index))
}
