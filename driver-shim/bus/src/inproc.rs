//! The device inside this process: DMA addresses are pointers, a doorbell is a function call, and
//! an interrupt is a call of the handler.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use urnic_model::capture::{Capture, CaptureFile};
use urnic_model::config::DescriptorWatch;
use urnic_model::{
    BusyPoll, Device, DeviceAddress, FailedCall, HostMemory, Interrupts, ModelConfig, OwnProcess,
    RemoteMemory, SctpTransport, ThreadStart, host::fault,
};

use urnic_device::bus::{Bus, Mapping, QueueMemory, Signal, SignalHandler};
use urnic_process::failure;
use urnic_process::fds;
use urnic_process::gids::GidTable;
use urnic_process::interrupt_context;
use urnic_process::threads;
use urnic_sys::Pages;

/// The bus to a device model in this process.
pub struct InprocBus {
    device: Device,
    line: Arc<Line>,
}

/// The memory of this process, untranslated.
struct OwnMemory {
    /// Copies from and to regions on demand, whose pages may be missing.
    copied: Option<OwnProcess>,
}

// SAFETY: the IOVAs that the device gets are pointers that `InprocBus::map` or `adopt` was given,
// or that `allocate` made. The code that maps memory keeps it mapped until it unmaps or frees it
// (contracts of `Bus`), which the driver does after the objects over it are destroyed; adopted
// memory stays mapped until then as well.
unsafe impl HostMemory for OwnMemory {
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>> {
        let start = usize::try_from(iova).ok()?;
        start.checked_add(len)?;
        NonNull::new(std::ptr::with_exposed_provenance_mut(start))
    }

    fn remote(&self) -> Option<&dyn RemoteMemory> {
        Some(self.copied.as_ref()?)
    }

    fn on_demand(&self) -> bool {
        self.copied.is_some()
    }
}

/// The interrupt line, from the device to the handler.
#[derive(Default)]
struct Line(OnceLock<SignalHandler>);

impl Interrupts for Line {
    fn raise(&self, vector: u32) {
        if let Some(handler) = self.0.get() {
            handler(Signal::Interrupt(vector));
        }
    }

    fn on_own_thread(&self) {
        interrupt_context::enter_interrupt_thread();
    }
}

/// The program may close any descriptor number, so the device's descriptors are registered.
const DESCRIPTORS: DescriptorWatch = DescriptorWatch {
    opened: fds::claim,
    closing: fds::disclaim,
};

/// A capture file of the devices in this process.
pub(super) fn capture_file(path: PathBuf) -> CaptureFile {
    CaptureFile::new(path, Some(DESCRIPTORS))
}

/// Optional features of a device in this process.
#[derive(Debug, Default)]
pub struct Options {
    /// It captures its streams.
    pub capture: Option<Capture>,
    /// If not, it may pass those to peers on this host through memory.
    pub same_host: bool,
    /// Busy-polling by the device's thread.
    pub busy_poll: BusyPoll,
    /// The device's connections follow the plan of faults, in which the device has this name.
    pub faulty: Option<String>,
    /// What carries the packets of SCTP.
    pub sctp: SctpTransport,
    /// It places the last byte of a segment of a Write first.
    pub last_first: bool,
}

impl InprocBus {
    /// Starts a device with these addresses.
    ///
    /// # Errors
    /// The errors of starting the device's thread and of making descriptors.
    pub fn start(gids: &GidTable, options: Options) -> Result<Arc<InprocBus>, Errno> {
        let addresses = gids
            .entries()
            .iter()
            .map(|gid| DeviceAddress {
                ip: gid.ip,
                scope: gid.scope(),
                prefix_len: gid.prefix_len.into(),
            })
            .collect();
        let config = ModelConfig {
            addresses,
            same_host: options.same_host,
            busy_poll: options.busy_poll,
            capture: options.capture,
            faulty: options.faulty,
            last_first: options.last_first,
            sctp: options.sctp,
            descriptors: Some(DESCRIPTORS),
            thread_start: ThreadStart(threads::start),
            ..ModelConfig::default()
        };
        let line = Arc::new(Line::default());
        let memory = OwnMemory {
            copied: OwnProcess::new(),
        };
        // The program may unmap memory while it is registered.
        fault::install();
        let device = Device::start(config, Arc::new(memory), line.clone()).or_else(|error| {
            match FailedCall::of(&error) {
                Some(failed) => failure::named(failed.call, Err(failed.errno)),
                None => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        })?;
        Ok(Arc::new(InprocBus { device, line }))
    }
}

impl Bus for InprocBus {
    fn read32(&self, offset: u32) -> u32 {
        self.device.bar0_read(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.device.bar0_write(offset, value);
    }

    #[inline]
    fn doorbell(&self, uar: u32, offset: u32, value: u64) {
        self.device.doorbell(uar, offset, value);
    }

    #[inline]
    fn progress(&self, queue_pair: u32) {
        self.device.progress(queue_pair);
    }

    fn lend(&self, timeout: Duration, readable: BorrowedFd<'_>, done: &mut dyn FnMut() -> bool) -> bool {
        self.device.lend(timeout, readable, done)
    }

    fn will_lend(&self) {
        self.device.will_lend();
    }

    #[inline]
    fn has_gathered(&self) -> bool {
        self.device.has_gathered()
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        let ptr = Pages::zeroed(len)?.leak();
        let iova = ptr.as_ptr().expose_provenance() as u64;
        Ok(QueueMemory { ptr, iova })
    }

    fn adopts(&self) -> bool {
        true
    }

    unsafe fn adopt(&self, ptr: NonNull<u8>) -> Option<QueueMemory> {
        let iova = ptr.as_ptr().expose_provenance() as u64;
        Some(QueueMemory { ptr, iova })
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        // SAFETY: the memory came from `allocate` with this length, as the caller promises.
        drop(unsafe { Pages::of_leaked(memory.ptr, len) });
    }

    fn map(&self, ptr: *mut u8, _len: usize, _write: bool) -> Result<Mapping, Errno> {
        Ok(Mapping::Contiguous(ptr.expose_provenance() as u64))
    }

    fn unmap(&self, _mapping: &Mapping, _len: usize) {}

    fn signals(&self, handler: SignalHandler) {
        let _ = self.line.0.set(handler);
    }

    fn memory(&self) -> &'static str {
        "the process's own"
    }

    fn shutdown(&self) {
        self.device.shutdown();
    }

    fn abandon_in_child(&self) {
        self.device.abandon_in_child();
    }
}
