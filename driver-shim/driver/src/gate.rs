//! The gate in front of a send queue, and the interface to the code that writes the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use urnic_sync::Mutex;

/// The code that writes work requests into a queue pair's send queue.
pub trait Poster: Send + Sync {
    /// The gate opened: publish the entries that were written while it was closed, and ring. Called
    /// with no lock of the driver held, except the one that [`Qp::destroy`](crate::Qp::destroy)
    /// waits for, on the thread that makes all connections: the implementation must not wait for
    /// the program.
    fn gate_opened(&self);

    /// The time, by [`now`](crate::now), since which work requests wait for the gate; `None`: no
    /// request waits. The implementation must not wait for the program.
    fn waiting_since(&self) -> Option<Duration>;

    /// The requests that have a completion, whether the program took it or not; `None` while the
    /// program holds a lock that protects this state. Called after the loss of the device. The
    /// implementation must not wait for the program.
    fn completed(&self) -> Option<Completed>;
}

/// The progress of a queue pair, in completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// Cookie of the oldest send that may still complete: entries of a send queue carry running
    /// numbers.
    pub sends: u32,
    /// Number of receives that completed, modulo 2^32.
    pub receives: u32,
}

/// The gate of a queue pair.
///
/// Until the connection is established (and on an MPA responder until the first FPDU arrived: RFC
/// 5044 §7.1.2(4)) nothing may reach the device. The poster writes entries and checks
/// [`Gate::is_open`]. If the gate is closed, the poster neither publishes nor rings, and checks
/// again after it released the lock of the send queue: [`Poster::gate_opened`], which is called
/// after the gate is open, may have found that lock held.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: AtomicBool,
    /// The reasons that decide `is_open`.
    reasons: Mutex<Reasons>,
    /// Locked during calls to the poster, so that no call is in progress after the poster is
    /// removed.
    poster: Mutex<Option<Arc<dyn Poster>>>,
}

/// Why a gate is open or closed.
#[derive(Debug, Clone, Copy, Default)]
struct Reasons {
    /// The connection is established, or the queue pair failed: requests may reach the device.
    connected: bool,
    /// The program of a RoCE NIC drains the send queue: the state that programs see is SQD.
    draining: bool,
}

impl Gate {
    /// Whether posted sends may be published.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Opens the gate, unless the send queue drains, and makes the poster publish the entries
    /// after it.
    pub(crate) fn open(&self) {
        self.change(|reasons| reasons.connected = true);
    }

    pub(crate) fn close(&self) {
        self.change(|reasons| *reasons = Reasons::default());
    }

    /// Requests that are not published yet wait for the gate again: state SQD of a RoCE NIC.
    pub(crate) fn drain(&self) {
        self.change(|reasons| reasons.draining = true);
    }

    /// Ends [`drain`](Self::drain).
    pub(crate) fn end_draining(&self) {
        self.change(|reasons| reasons.draining = false);
    }

    /// Whether the send queue drains.
    pub(crate) fn is_draining(&self) -> bool {
        self.reasons.lock().draining
    }

    fn change(&self, change: impl FnOnce(&mut Reasons)) {
        let opened = {
            let mut reasons = self.reasons.lock();
            change(&mut reasons);
            let open = reasons.connected && !reasons.draining;
            !self.is_open.swap(open, Ordering::AcqRel) && open
        };
        if opened && let Some(poster) = &*self.poster.lock() {
            poster.gate_opened();
        }
    }

    /// Since when work requests wait for the gate; `None`: no request waits.
    pub(crate) fn waiting_since(&self) -> Option<Duration> {
        if self.is_open() {
            return None;
        }
        self.poster.lock().as_ref()?.waiting_since()
    }

    /// The requests that have a completion; `None` if that cannot be determined at the moment.
    pub(crate) fn completed(&self) -> Option<Completed> {
        self.poster.lock().as_ref()?.completed()
    }

    pub(crate) fn set_poster(&self, poster: Arc<dyn Poster>) {
        *self.poster.lock() = Some(poster);
    }

    /// Removes the poster, and waits for a call to it that is in progress.
    pub(crate) fn remove_poster(&self) {
        *self.poster.lock() = None;
    }
}
