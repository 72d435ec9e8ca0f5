//! A PCI function by the kernel's VFIO: registers and doorbells in its BARs, interrupts by eventfd,
//! DMA through the IOMMU.
//!
//! | way | files | memory |
//! |---|---|---|
//! | device and iommufd | `/dev/vfio/devices/vfioN`, `/dev/iommu` | pinned, IOVAs |
//! | group and container | `/dev/vfio/N`, `/dev/vfio/vfio` | pinned, IOVAs |
//! | no IOMMU | `/dev/vfio/noiommu-N`, `/dev/vfio/vfio` | in place, physical addresses |
//!
//! A thread of the bus waits for the function's interrupts, and detects that the function is gone.
//! The function belongs to one process at a time. It is reset when the process opens it, and the
//! kernel resets it when the process ends.

mod access;
mod error;
mod function;
mod holder;
mod iommu;
mod iova;
mod pci;
mod physical;
mod uapi;

pub use error::Refused;
pub use function::{DRIVER, Function, Group, Sysfs};
pub use holder::{Holder, holder_of};

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use urnic_sync::Mutex;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use urnic_device::registers;

use crate::doorbells::DoorbellPages;
use access::Dma;
use pci::{PciFunction, Unusable};
use urnic_config::VfioApi;
use urnic_device::bus::{Bus, Mapping, QueueMemory, Signal, SignalHandler};
use urnic_process::fds::InternalFd;
use urnic_process::signals;
use urnic_process::threads;
use urnic_sys::Pages;

/// Number of checks, and the pause between two, whether a reset of the device is complete: two
/// seconds in all.
const SILENCE_LOOKS: u32 = 2000;
const SILENCE_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 1_000_000,
};

/// Time between two reads of a register, which check whether the device responds: no other event
/// reports that the process of a device died.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// The bus to a PCI function.
pub struct VfioBus {
    inner: Arc<Inner>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl VfioBus {
    /// Opens the function at `address` (`DDDD:BB:DD.F`). The function is reset and belongs to this
    /// process.
    ///
    /// # Errors
    /// The errno of [`Refused`], which is also written to the log.
    pub fn open(address: &str, api: VfioApi) -> Result<Arc<VfioBus>, Errno> {
        Self::opened(address, api).map_err(|refused| {
            tracing::error!("{refused}");
            refused.errno()
        })
    }

    fn opened(address: &str, api: VfioApi) -> Result<Arc<VfioBus>, Refused> {
        let access = access::access(address, api)?;
        let (function, doorbells) =
            PciFunction::new(access.device).map_err(|unfit| refused(address, unfit))?;
        let step = |step| {
            move |errno| Refused::Step {
                address: address.to_owned(),
                step,
                errno,
            }
        };
        let sources = Sources::new(&function).map_err(step("VFIO_DEVICE_SET_IRQS"))?;
        let inner = Arc::new(Inner {
            address: address.to_owned(),
            doorbells,
            function,
            dma: access.dma,
            _group: access.group,
            sources,
            handler: OnceLock::new(),
            lost: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
        });
        let thread = start_thread(inner.clone()).map_err(step("starting a thread"))?;
        Ok(Arc::new(VfioBus {
            inner,
            thread: Mutex::new(Some(thread)),
        }))
    }
}

fn refused(address: &str, unfit: Unusable) -> Refused {
    let address = address.to_owned();
    match unfit {
        Unusable::WrongId(vendor, device) => Refused::WrongId {
            address,
            vendor,
            device,
        },
        Unusable::Lacks(what) => Refused::Unusable { address, what },
        Unusable::Step(step, errno) => Refused::Step { address, step, errno },
    }
}

impl Bus for VfioBus {
    fn read32(&self, offset: u32) -> u32 {
        let inner = &self.inner;
        if inner.abandoned.load(Ordering::Relaxed) {
            return 0;
        }
        if inner.is_lost() {
            return registers::GONE;
        }
        let value = inner.function.read32(offset);
        if value == registers::GONE {
            inner.look();
        }
        value
    }

    fn write32(&self, offset: u32, value: u32) {
        if !self.inner.abandoned.load(Ordering::Relaxed) && !self.inner.is_lost() {
            self.inner.function.write32(offset, value);
        }
    }

    #[inline]
    fn doorbell(&self, uar: u32, offset: u32, value: u64) {
        if self.inner.doorbells.ring(uar, offset, value) {
            self.write32(registers::KICK, 1);
        }
    }

    fn features(&self, features: u32) {
        self.inner.doorbells.features(features);
    }

    #[inline]
    fn progress(&self, _queue_pair: u32) {
        self.inner.doorbells.yield_when_idle();
    }

    #[inline]
    fn has_gathered(&self) -> bool {
        false
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        match &self.inner.dma {
            Dma::Physical(physical) => physical.allocate(len),
            Dma::Iommu(iommu) => {
                let pages = Pages::zeroed(len)?;
                let iova = iommu.map(pages.start().as_ptr().expose_provenance(), len, true)?;
                let ptr = pages.leak();
                Ok(QueueMemory { ptr, iova })
            }
        }
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        match &self.inner.dma {
            Dma::Physical(physical) => physical.free(memory),
            Dma::Iommu(iommu) => {
                iommu.unmap(memory.iova, len);
                // SAFETY: the memory came from `allocate` with this length, as the caller promises.
                drop(unsafe { Pages::of_leaked(memory.ptr, len) });
            }
        }
    }

    fn map(&self, ptr: *mut u8, len: usize, write: bool) -> Result<Mapping, Errno> {
        match &self.inner.dma {
            Dma::Physical(physical) => physical.map(ptr, len),
            Dma::Iommu(iommu) => iommu
                .map(ptr.expose_provenance(), len, write)
                .map(Mapping::Contiguous),
        }
    }

    fn unmap(&self, mapping: &Mapping, len: usize) {
        if let (Dma::Iommu(iommu), Mapping::Contiguous(iova)) = (&self.inner.dma, mapping) {
            iommu.unmap(*iova, len);
        }
    }

    fn signals(&self, handler: SignalHandler) {
        let _ = self.inner.handler.set(handler);
    }

    fn memory(&self) -> &'static str {
        match &self.inner.dma {
            Dma::Iommu(iommu) => iommu.name(),
            Dma::Physical(_) => "physical addresses, not pinned",
        }
    }

    /// The kernel resets the function. The function outlives the process and finishes the work in
    /// progress.
    fn shutdown(&self) {}

    fn abandon_in_child(&self) {
        self.inner.abandoned.store(true, Ordering::Relaxed);
        self.inner.doorbells.cut();
    }
}

impl Drop for VfioBus {
    /// The function is free again when this returns, except when the function's own thread drops
    /// the bus.
    fn drop(&mut self) {
        self.inner.stopped.store(true, Ordering::Release);
        self.inner.sources.wake();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// The state that the bus shares with its thread. The fields are in the order in which they must be
/// dropped.
struct Inner {
    address: String,
    doorbells: DoorbellPages,
    function: PciFunction,
    dma: Dma,
    _group: Option<InternalFd>,
    sources: Sources,
    handler: OnceLock<SignalHandler>,
    lost: AtomicBool,
    /// The thread must end.
    stopped: AtomicBool,
    /// This is a forked child: the parent owns the function.
    abandoned: AtomicBool,
}

impl Inner {
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    fn notify(&self, signal: Signal) {
        if let Some(handler) = self.handler.get() {
            handler(signal);
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Marks the device as lost. The bus's thread reports the loss, since the calling thread may
    /// hold locks.
    fn lose(&self, why: &str) {
        if !self.lost.swap(true, Ordering::AcqRel) {
            tracing::error!("PCI function {} is lost: {why}", self.address);
            self.sources.wake();
        }
    }

    /// Checks whether the device still responds. A register that is all ones may be a missing
    /// device; the first register is never all ones.
    fn look(&self) {
        if !self.is_lost() && self.function.read32(registers::MAGIC) == registers::GONE {
            self.lose("its registers read as all ones");
        }
    }

    /// Makes a device that still responds, for example one that is being removed, release all
    /// memory. From then on the driver completes what is posted.
    fn silence(&self) {
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
    fn give_back(&self) {
        self.doorbells.cut();
        self.function.give_back();
    }
}

/// The descriptors on which the thread sleeps.
struct Sources {
    /// Wakes the thread for the end of the bus or the loss of the device.
    wake: InternalFd,
    /// An error that the bus could not correct.
    error: Option<InternalFd>,
    /// The kernel requests the function: it is unplugged or unbound.
    request: Option<InternalFd>,
    vectors: Vec<InternalFd>,
}

impl Sources {
    /// Makes eventfds for the interrupts of the function, and connects them.
    ///
    /// # Errors
    /// `EMFILE` if no fd is left; the kernel's errors.
    fn new(function: &PciFunction) -> Result<Sources, Errno> {
        let fresh = || InternalFd::of_device(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let count = function.vectors().min(uapi::MAX_VECTORS as u32);
        let vectors = (0..count).map(|_| fresh()).collect::<Result<Vec<_>, _>>()?;
        let fds: Vec<BorrowedFd<'_>> = vectors.iter().filter_map(InternalFd::get).collect();
        function.raise(uapi::MSIX, &fds)?;
        let single = |index| -> Result<Option<InternalFd>, Errno> {
            if !function.has_irq(index) {
                return Ok(None);
            }
            let fd = fresh()?;
            function.raise(index, &[fd.get().ok_or(Errno::IO)?])?;
            Ok(Some(fd))
        };
        Ok(Sources {
            wake: fresh()?,
            error: single(uapi::ERR)?,
            request: single(uapi::REQ)?,
            vectors,
        })
    }

    /// Wakes the thread, which then checks the state of the bus.
    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
    }
}

/// Starts the thread, with all signals blocked.
///
/// # Errors
/// `EAGAIN` if the kernel permits no more threads.
fn start_thread(inner: Arc<Inner>) -> Result<JoinHandle<()>, Errno> {
    let thread = std::thread::Builder::new()
        .name("urnic-vfio".to_owned())
        .stack_size(256 << 10);
    signals::blocked(|| threads::start(thread, move || serve(&inner)))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

fn serve(inner: &Inner) {
    let sources = &inner.sources;
    let Some(wake) = sources.wake.get() else { return };
    let special = [sources.error.as_ref(), sources.request.as_ref()].map(|fd| fd.and_then(InternalFd::get));
    let vectors: Vec<BorrowedFd<'_>> = sources.vectors.iter().filter_map(InternalFd::get).collect();
    // The wake-up descriptor replaces the descriptors of interrupts that the function lacks.
    let fds: Vec<BorrowedFd<'_>> = std::iter::once(wake)
        .chain(special.map(|fd| fd.unwrap_or(wake)))
        .chain(vectors.iter().copied())
        .collect();
    let mut reported = false;
    while !inner.is_stopped() {
        let mut polled: Vec<PollFd<'_>> = fds
            .iter()
            .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
            .collect();
        if poll(&mut polled, (!reported).then_some(&LOOK_EVERY)) == Ok(0) {
            inner.look();
        }
        let rang: Vec<bool> = polled
            .iter()
            .map(|fd| fd.revents().contains(PollFlags::IN))
            .collect();
        let rang = |i: usize| rang.get(i) == Some(&true);
        if rang(0) {
            let _ = rustix::io::read(wake, &mut [0; 8]);
        }
        if let (true, Some(error)) = (rang(1), special[0]) {
            let _ = rustix::io::read(error, &mut [0; 8]);
            inner.lose("the bus reports an error that it cannot correct");
        }
        for (vector, fd) in vectors.iter().enumerate().filter(|(i, _)| rang(3 + i)) {
            let _ = rustix::io::read(fd, &mut [0; 8]);
            inner.notify(Signal::Interrupt(vector as u32));
        }
        let wanted_back = rang(2) && special[1].is_some();
        if wanted_back {
            inner.lose("it is being taken out");
        }
        if inner.is_lost() && !std::mem::replace(&mut reported, true) {
            inner.silence();
            inner.notify(Signal::Lost);
        }
        // Returned only after the report: closing a function that does not respond takes the kernel
        // a minute, in which this thread could not end.
        if wanted_back {
            inner.give_back();
            return;
        }
    }
}
