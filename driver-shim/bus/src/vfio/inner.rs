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

/// Number of checks, and the pause between two, whether a reset of the device is complete: two
/// seconds in all.
const SILENCE_LOOKS: u32 = 2000;
const SILENCE_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// The state that the bus shares with its thread. The fields are in the order in which they must be
/// dropped.
pub(super) struct Inner {
    pub(super) address: String,
    pub(super) doorbells: DoorbellPages,
    pub(super) function: PciFunction,
    pub(super) dma: Dma,
    pub(super) _group: Option<InternalFd>,
    pub(super) sources: Sources,
    pub(super) handler: OnceLock<SignalHandler>,
    pub(super) lost: AtomicBool,
    /// The thread must end.
    pub(super) stopped: AtomicBool,
    /// This is a forked child: the parent owns the function.
    pub(super) abandoned: AtomicBool,
}

impl Inner {
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(super) fn notify(&self, signal: Signal) {
        if let Some(handler) = self.handler.get() {
            handler(signal);
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Marks the device as lost. The bus's thread reports the loss, since the calling thread may
    /// hold locks.
    pub(super) fn lose(&self, why: &str) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            tracing::error!("PCI function {} is lost: {why}", self.address);
            self.sources.wake();
        }
    }

    /// Checks whether the device still responds. A register that is all ones may be a missing
    /// device; the first register is never all ones.
    pub(super) fn look(&self) {
        if !self.is_lost() && self.function.read32(registers::MAGIC) == registers::GONE {
            self.lose("its registers read as all ones");
        }
    }

    /// Makes a device that still responds, for example one that is being removed, release all
    /// memory. From then on the driver completes what is posted.
    pub(super) fn silence(&self) {
        let reset = registers::Control::RESET.bits();
        self.function.write32(registers::CONTROL, reset);
        for _ in 0..SILENCE_LOOKS {
            let control = self.function.read32(registers::CONTROL);
            // All ones: the device is gone, and has released all memory.
            if control == registers::GONE || control & reset == 0 {
                return;
            }
            let _ = rustix::thread::nanosleep(&SILENCE_PAUSE);
        }
    }

    /// Returns the function to the kernel, which waits for it when the device is unplugged.
    pub(super) fn give_back(&self) {
        self.doorbells.cut();
        self.function.give_back();
    }
}
