//! Events on their way to the program, and the count of those it has not acknowledged.
//!
//! An object may be destroyed only when the program acknowledged every event it read of it (`ibv_ack_cq_events(3)`,
//! `ibv_ack_async_event(3)`); events it has not read are taken back. The kernel keeps these counts for other providers.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use urnic_driver_shim::driver::{AsyncEvent, ContextEvents};
use urnic_driver_shim::presence::{ChannelSender, Sent};
use urnic_verbs_api::rdma_core::{ib_uverbs_async_event_desc, ib_uverbs_comp_event_desc};

use super::cq::Cq;
use super::qp::Qp;
use super::srq::Srq;

/// Events of one kind given for one object.
#[derive(Default)]
pub(crate) struct Reported(AtomicU32);

impl Reported {
    /// Gives one to the program.
    fn send(&self, channel: &ChannelSender, record: &[u8]) {
        // Counted first: the program may acknowledge it before we are back.
        self.0.fetch_add(1, Ordering::Relaxed);
        if channel.send(record) == Sent::Dropped {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Takes back what the program has not read; `element` is the object's address.
    pub(super) fn purge(&self, channel: &ChannelSender, element: u64) {
        let purged = channel.purge(|record| record.get(..8) == Some(&element.to_ne_bytes()));
        self.0.fetch_sub(purged as u32, Ordering::Relaxed);
    }

    /// How many the program has read, or will.
    pub(super) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A completion event for the queue at that address.
pub(super) fn send_completion(reported: &Reported, channel: &ChannelSender, cq: u64) {
    let record = ib_uverbs_comp_event_desc { cq_handle: cq };
    reported.send(channel, &record.cq_handle.to_ne_bytes());
}

/// The events of one context: completions go to their queue's channel, asynchronous ones to its `async_fd`.
pub(crate) struct Events {
    channel: Arc<ChannelSender>,
}

impl Events {
    /// Events of a context whose `async_fd` is the program's end of that channel.
    pub(crate) fn new(channel: Arc<ChannelSender>) -> Events {
        Events { channel }
    }

    /// The asynchronous channel.
    pub(crate) fn channel(&self) -> &ChannelSender {
        &self.channel
    }

    fn send(&self, reported: &Reported, event: AsyncEvent, element: u64) {
        let record = ib_uverbs_async_event_desc {
            element,
            event_type: event as u32,
            reserved: 0,
        };
        let mut bytes = [0; size_of::<ib_uverbs_async_event_desc>()];
        let (head, tail) = bytes.split_at_mut(8);
        head.copy_from_slice(&record.element.to_ne_bytes());
        tail.split_at_mut(4)
            .0
            .copy_from_slice(&record.event_type.to_ne_bytes());
        reported.send(&self.channel, &bytes);
    }
}

// Cookies are the addresses of our objects. The driver delivers no event of an object after its destruction returned, and
// we free an object only then.
impl ContextEvents for Events {
    fn completion(&self, cq_cookie: u64) {
        // SAFETY: the cookie of a live completion queue, see above.
        if let Some(cq) = unsafe { (cq_cookie as *const Cq).as_ref() } {
            cq.notify();
        }
    }

    fn async_event(&self, event: AsyncEvent, element_cookie: u64) {
        match event {
            AsyncEvent::CqErr => {
                // SAFETY: the cookie of a live completion queue, see above.
                if let Some(cq) = unsafe { (element_cookie as *const Cq).as_ref() } {
                    self.send(&cq.asynchronous, event, element_cookie);
                }
            }
            AsyncEvent::QpFatal | AsyncEvent::QpReqErr | AsyncEvent::QpAccessErr | AsyncEvent::QpLastWqe => {
                // SAFETY: the cookie of a live queue pair, see above.
                if let Some(qp) = unsafe { (element_cookie as *const Qp).as_ref() } {
                    self.send(&qp.asynchronous, event, element_cookie);
                }
            }
            // The element is the port; nobody counts.
            AsyncEvent::DeviceFatal | AsyncEvent::GidChange => self.send(&Reported::default(), event, 1),
            AsyncEvent::SrqLimit => {
                // SAFETY: the cookie of a live shared receive queue, see above.
                if let Some(srq) = unsafe { (element_cookie as *const Srq).as_ref() } {
                    self.send(&srq.asynchronous, event, element_cookie);
                }
            }
        }
    }
}

/// An object's mutex, condition variable and counts that libibverbs moves in `ibv_ack_*`.
pub(super) struct Acknowledgements<'a, const N: usize> {
    pub(super) mutex: *mut libc::pthread_mutex_t,
    pub(super) cond: *mut libc::pthread_cond_t,
    /// For each kind of event: the program's count, and ours.
    pub(super) counts: [(*const u32, &'a Reported); N],
}

impl<const N: usize> Acknowledgements<'_, N> {
    /// Waits until the program acknowledged what it read. Nothing more is reported. A cancellation point of its own, so that
    /// cancellation is off (`guard`).
    ///
    /// # Safety
    /// The pointers lead to the live object's fields.
    pub(super) unsafe fn wait(&self) {
        // SAFETY: as promised.
        unsafe {
            libc::pthread_mutex_lock(self.mutex);
            while self
                .counts
                .iter()
                .any(|(acknowledged, reported)| acknowledged.read_volatile() != reported.count())
            {
                libc::pthread_cond_wait(self.cond, self.mutex);
            }
            libc::pthread_mutex_unlock(self.mutex);
        }
    }
}

/// Part of an object that libibverbs and the program write too.
pub(crate) struct Foreign<T>(UnsafeCell<T>);

// SAFETY: reached by raw pointer only; which thread may touch which field is the contract of libibverbs.
unsafe impl<T> Sync for Foreign<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Foreign<T> {}

impl<T> Foreign<T> {
    pub(crate) fn new(value: T) -> Foreign<T> {
        Foreign(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }
}
