//! The state that the bus shares with its thread, and the loss of the device.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::Timespec;
use urnic_device::registers;

use super::access::Dma;
use super::pci::PciFunction;
use super::sources::Sources;
use crate::doorbells::DoorbellPages;
use urnic_device::bus::{Signal, SignalHandler};
use urnic_process::fds::InternalFd;

/// How often, and how far apart, a device that is reset is asked whether it is done: two seconds in
/// all.
const SILENCE_LOOKS: u32 = 2000;
const SILENCE_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// What the bus shares with its thread, in the order in which it is to be let go of.
pub(super) struct Inner {
    pub(super) address: String,
    pub(super) doorbells: DoorbellPages,
    pub(super) function: PciFunction,
    pub(super) dma: Dma,
    pub(super) _group: Option<InternalFd>,
    pub(super) sources: Sources,
    pub(super) handler: OnceLock<SignalHandler>,
    pub(super) lost: AtomicBool,
    /// The thread is to end.
    pub(super) stopped: AtomicBool,
    /// This is a forked child: the function is the parent's.
    pub(super) abandoned: AtomicBool,
}

impl Inner {
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(super) fn tell(&self, signal: Signal) {
        if let Some(handler) = self.handler.get() {
            handler(signal);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Marks the device as lost. The thread reports it, since the calling thread may hold locks.
    pub(super) fn lose(&self, why: &str) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            tracing::error!("PCI function {} is lost: {why}", self.address);
            self.sources.wake();
        }
    }

    /// Looks whether the device still answers. A register that is all ones may be that; the first
    /// one never is.
    pub(super) fn look(&self) {
        if !self.is_lost() && self.function.read32(registers::MAGIC) == registers::GONE {
            self.lose("its registers read as all ones");
        }
    }

    /// Has a device that still hears us, as one that is being taken out does, let go of all memory:
    /// from then on the driver completes what is posted.
    pub(super) fn silence(&self) {
        let reset = registers::Control::RESET.bits();
        self.function.write32(registers::CONTROL, reset);
        for _ in 0..SILENCE_LOOKS {
            let control = self.function.read32(registers::CONTROL);
            // All ones: it is gone, and has let go of everything.
            if control == registers::GONE || control & reset == 0 {
                return;
            }
            let _ = rustix::thread::nanosleep(&SILENCE_PAUSE);
        }
    }

    /// Returns the function to the kernel, which waits for that when the device is unplugged.
    pub(super) fn give_back(&self) {
        self.doorbells.cut();
        self.function.give_back();
    }
}
