//! The life of contexts: the functions that libibverbs calls when a program opens, imports and
//! closes the device.

use std::ffi::{CStr, CString, c_int};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Config;
use urnic_driver::{CmChannel, Driver};
use urnic_presence::{Presence, Shown, command};
use urnic_process::usage::{self, Step};
use urnic_rdma_core::{ibv_context, ibv_device, verbs_context, verbs_device};

use urnic_sys::loader::loaded_files;

use crate::context::{Context, OpenContext, Tail, close_of_program};
use crate::file::File;
use crate::from_c::{Answer, FromC, called_by_c};
use crate::guard::{guarded, set_errno};
use crate::library::{Library, Registration};
use crate::log::complaining;
use crate::verbs::{self, Events};

/// A value of `enum rdma_driver_id` that no kernel driver has.
const RDMA_DRIVER_UNKNOWN: u32 = 0;

/// The error line for a device that cannot be opened.
fn cannot_open(name: &str) -> String {
    format!("cannot open {name}")
}

/// The devices as they are presented, and the configuration.
fn devices() -> Result<(&'static Presence, Config), Errno> {
    let presence = Presence::current()?;
    let config = Config::from_env().map_err(|error| {
        tracing::error!("{error}");
        Errno::INVAL
    })?;
    Ok((presence, config))
}

/// The device of this name as it is presented, and its driver. The first use in the process opens
/// the device.
fn open_device(name: &CStr) -> Result<(&'static Shown, &'static Arc<Driver>), Errno> {
    let (presence, config) = devices()?;
    let shown = presence.device(name.to_bytes()).ok_or(Errno::NODEV)?;
    let driver = Driver::open_shown(shown.index(), &config, presence)?;
    reached(Step::Opened);
    Ok((shown, driver))
}

/// Writes a step for `urnic run --require`, and whether UCX's transports are loaded.
pub(crate) fn reached(step: Step) {
    usage::reached(step);
    let is_uct = |file: &CString| file.to_bytes().windows(6).any(|part| part == b"libuct");
    if loaded_files().iter().any(is_uct) {
        usage::reached(Step::HasUcx);
    }
}

/// Makes `opened`, an fd that the program got for `/dev/infiniband/rdma_cm`, a channel to the
/// connection manager.
///
/// # Errors
/// The errors of opening the first device; `EMFILE`, `ENOMEM`.
pub(crate) fn open_cm_channel(opened: BorrowedFd<'_>) -> Result<(), Errno> {
    let (presence, config) = devices()?;
    let first = presence.devices().first().map_or("a device", Shown::name);
    complaining(&cannot_open(first), || CmChannel::open(config, presence, opened))
}

/// A device in libibverbs' list, which this plug-in has allocated.
pub(crate) struct ListedDevice(*mut ibv_device);

/// A device that `alloc_device` of this plug-in has allocated, with its name, of the libibverbs
/// with which this plug-in's operations are registered.
impl FromC<*mut ibv_device> for ListedDevice {
    unsafe fn from_c(given: *mut ibv_device) -> ListedDevice {
        ListedDevice(given)
    }
}

/// A context of libibverbs.
pub(crate) struct NewContext(*mut verbs_context);

/// The context, or null with `errno` set.
impl Answer<*mut verbs_context> for Result<NewContext, Errno> {
    fn answer(_: &'static str, open: impl FnOnce() -> Self) -> *mut verbs_context {
        guarded(open).map_or_else(
            |errno| {
                set_errno(errno);
                std::ptr::null_mut()
            },
            |context| context.0,
        )
    }
}

/// `verbs_device_ops.alloc_context`: opens the device on `cmd_fd`, which this function or the
/// context closes from here on.
pub(crate) fn alloc_context(device: ListedDevice, cmd_fd: c_int) -> Result<NewContext, Errno> {
    let name = device.name();
    let opened = || {
        let (shown, driver) = open_device(name)?;
        urnic_presence::fork::opened_device();
        let file = File::open(cmd_fd, shown, driver)?;
        Context::make(device.library(), file, Events::new)
    };
    let (ours, async_fd) = complaining(&cannot_open(&name.to_string_lossy()), opened)
        .inspect_err(|_| close_of_program(cmd_fd))?;
    device.give(cmd_fd, ours, async_fd)
}

/// `verbs_device_ops.import_context`: makes another context on the file of `cmd_fd`. If that
/// succeeds, the context closes `cmd_fd`; if there is no memory for a context, `cmd_fd` is closed
/// already, as libibverbs requires. Errors are those of [`File::of`] and of opening a context;
/// `EIO` if the device is lost.
pub(crate) fn import_context(device: ListedDevice, cmd_fd: c_int) -> Result<NewContext, Errno> {
    let (ours, async_fd) = Context::make(device.library(), File::of(cmd_fd)?, Events::new)?;
    let context = device.give(cmd_fd, ours, async_fd)?;
    command::offer_async_fd(async_fd);
    Ok(context)
}

impl ListedDevice {
    /// The name of the device.
    fn name(&self) -> &CStr {
        // SAFETY: the promise of this type; the name is terminated.
        unsafe { CStr::from_ptr((*self.0).name.as_ptr()) }
    }

    /// The copy of libibverbs whose device list contains the device.
    fn library(&self) -> &'static Library {
        // SAFETY: the promise of this type: the device's operations are in a `Registration`.
        unsafe { &Registration::of((*self.0.cast::<verbs_device>()).ops).library }
    }

    /// Makes a context of libibverbs from `ours`, which was opened through this device's
    /// libibverbs. The context owns `cmd_fd` and `async_fd` from now on, also if this function
    /// fails.
    fn give(&self, cmd_fd: RawFd, ours: Context, async_fd: RawFd) -> Result<NewContext, Errno> {
        let library = ours.library;
        let level = library.level;
        let size = level.context_offset() + size_of::<Tail>();
        // SAFETY: the promise of this type; `verbs_context` is the first part of the requested
        // memory, and fits.
        let memory = unsafe {
            (library.init_and_alloc_context)(self.0, cmd_fd, size, std::ptr::null_mut(), RDMA_DRIVER_UNKNOWN)
        };
        if memory.is_null() {
            // libibverbs closed cmd_fd.
            let _ = ours.driver.close_context(&ours.device);
            close_of_program(async_fd);
            return Err(Errno::NOMEM);
        }
        called_by_c! { free_context(context: *mut ibv_context) = self::free_context(context) }
        // SAFETY: the memory is `size` long: a verbs_context of this level, which ends with the
        // tail's first member, and the tail.
        unsafe {
            let tail: *mut Tail = memory.byte_add(level.context_offset()).cast();
            (*tail).ibv.async_fd = async_fd;
            (*tail).ibv.num_comp_vectors = ours.driver.attributes().completion_vectors as c_int;
            (*tail).ours = Box::into_raw(Box::new(ours));
            let operations = verbs::operations(level).free_context(free_context);
            (library.set_ops)(memory.cast(), operations.as_ptr());
        }
        Ok(NewContext(memory.cast()))
    }
}

/// `ibv_close_device`: this is the last use of the context.
fn free_context(context: OpenContext) -> Result<(), Errno> {
    // SAFETY: the context is closed now: the box of `give`, and the memory of
    // init_and_alloc_context, which the provider frees.
    unsafe {
        let ours = Box::from_raw((*context.public().cast::<Tail>()).ours);
        let memory = context.public().byte_sub(ours.library.level.context_offset());
        if let Err(errno) = ours.driver.close_context(&ours.device) {
            tracing::debug!("closing a context: {errno}");
        }
        // Closes cmd_fd and async_fd, by the interposed close().
        (ours.library.uninit_context)(memory.cast());
        libc::free(memory.cast());
    }
    Ok(())
}
