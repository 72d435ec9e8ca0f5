//! A PCI function by the kernel's VFIO: registers and doorbells in its BARs, interrupts by eventfd,
//! DMA through the IOMMU.
//!
//! | way | files | memory |
//! |---|---|---|
//! | device and iommufd | `/dev/vfio/devices/vfioN`, `/dev/iommu` | pinned, IOVAs |
//! | group and container | `/dev/vfio/N`, `/dev/vfio/vfio` | pinned, IOVAs |
//! | no IOMMU | `/dev/vfio/noiommu-N`, `/dev/vfio/vfio` | in place, physical addresses |
//!
//! The function belongs to one process at a time. It is reset when the process opens it, and the
//! kernel resets it when the process ends.

mod access;
mod error;
mod function;
mod holder;
mod inner;
mod iommu;
mod iova;
mod pci;
mod physical;
mod sources;
mod uapi;
mod watch;

pub use error::Refused;
pub use function::{DRIVER, Function, Group, Sysfs};
pub use holder::{Holder, holder_of};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

use rustix::io::Errno;
use urnic_device::registers;

use super::anonymous;
use access::Dma;
use inner::Inner;
use pci::{PciFunction, Unusable};
use sources::Sources;
use urnic_config::VfioApi;
use urnic_device::bus::{Bus, Mapping, QueueMemory, SignalHandler};
use urnic_process::lock::lock;

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
        let thread = watch::start(inner.clone()).map_err(step("starting a thread"))?;
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
                let ptr = anonymous::allocate(len)?;
                match iommu.map(ptr.as_ptr().expose_provenance(), len, true) {
                    Ok(iova) => Ok(QueueMemory { ptr, iova }),
                    Err(errno) => {
                        // SAFETY: `ptr` was allocated above with `len`, and no other code has it.
                        unsafe { anonymous::free(ptr, len) };
                        Err(errno)
                    }
                }
            }
        }
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        match &self.inner.dma {
            Dma::Physical(physical) => physical.free(memory),
            Dma::Iommu(iommu) => {
                iommu.unmap(memory.iova, len);
                // SAFETY: the memory came from `allocate` with this length, as the caller promises.
                unsafe { anonymous::free(memory.ptr, len) };
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
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}
