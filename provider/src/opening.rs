//! The life of contexts: the functions that libibverbs calls when a program opens, imports and
//! closes the device.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Config;
use urnic_driver::{CmChannel, Driver};
use urnic_presence::{Presence, Shown, command};
use urnic_rdma_core::{ibv_context, ibv_device, verbs_context, verbs_device};

use crate::context::{Context, Tail, close_of_program};
use crate::file::File;
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
    Ok((shown, driver))
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

/// `verbs_device_ops.alloc_context`: opens the device on `cmd_fd`, which this function or the
/// context closes from here on.
pub(crate) unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private_data: *mut c_void,
) -> *mut verbs_context {
    answer(|| {
        // SAFETY: libibverbs passes a device whose name is terminated.
        let name = unsafe { CStr::from_ptr((*device).name.as_ptr()) };
        let opened = || {
            let (shown, driver) = open_device(name)?;
            let file = File::open(cmd_fd, shown, driver)?;
            // SAFETY: libibverbs passes a device that this plug-in allocated.
            Context::make(unsafe { library_of(device) }, file, Events::new)
        };
        let (ours, async_fd) = complaining(&cannot_open(&name.to_string_lossy()), opened)
            .inspect_err(|_| close_of_program(cmd_fd))?;
        // SAFETY: libibverbs passes a device that this plug-in allocated.
        unsafe { give(device, cmd_fd, ours, async_fd) }
    })
}

/// `verbs_device_ops.import_context`: makes another context on the file behind `cmd_fd`. If that
/// succeeds, the context closes `cmd_fd`; if there is no memory for a context, `cmd_fd` is closed
/// already, as libibverbs requires. Errors are those of [`File::of`] and of opening a context;
/// `EIO` if the device is lost.
pub(crate) unsafe extern "C" fn import_context(device: *mut ibv_device, cmd_fd: c_int) -> *mut verbs_context {
    answer(|| {
        // SAFETY: libibverbs passes a device that this plug-in allocated.
        let (ours, async_fd) = Context::make(unsafe { library_of(device) }, File::of(cmd_fd)?, Events::new)?;
        // SAFETY: libibverbs passes a device that this plug-in allocated.
        let context = unsafe { give(device, cmd_fd, ours, async_fd) }?;
        command::offer_async_fd(async_fd);
        Ok(context)
    })
}

fn answer(open: impl FnOnce() -> Result<*mut verbs_context, Errno>) -> *mut verbs_context {
    guarded(open).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// The copy of libibverbs whose device list contains `device`.
///
/// # Safety
/// `alloc_device` of this plug-in allocated the device, and libibverbs registered this plug-in's
/// operations with it.
unsafe fn library_of(device: *mut ibv_device) -> &'static Library {
    // SAFETY: the caller promises a device of this plug-in, whose operations are in a
    // `Registration`.
    unsafe { &Registration::of((*device.cast::<verbs_device>()).ops).library }
}

/// Makes a context of libibverbs from `ours`. The context owns `cmd_fd` and `async_fd` from now on,
/// also if this function fails.
///
/// # Safety
/// `device` is a device of the libibverbs through which `ours` was opened; the caller gives up both
/// fds.
unsafe fn give(
    device: *mut ibv_device,
    cmd_fd: RawFd,
    ours: Context,
    async_fd: RawFd,
) -> Result<*mut verbs_context, Errno> {
    let library = ours.library;
    let level = library.level;
    let size = level.context_offset() + size_of::<Tail>();
    // SAFETY: `verbs_context` is the first part of the requested memory, and fits.
    let memory = unsafe {
        (library.init_and_alloc_context)(device, cmd_fd, size, std::ptr::null_mut(), RDMA_DRIVER_UNKNOWN)
    };
    if memory.is_null() {
        // libibverbs closed cmd_fd.
        let _ = ours.driver.close_context(&ours.device);
        close_of_program(async_fd);
        return Err(Errno::NOMEM);
    }
    // SAFETY: the memory is `size` long: a verbs_context of this level, which ends with the tail's
    // first member, and the tail.
    unsafe {
        let tail: *mut Tail = memory.byte_add(level.context_offset()).cast();
        (*tail).ibv.async_fd = async_fd;
        (*tail).ibv.num_comp_vectors = ours.driver.attributes().completion_vectors as c_int;
        (*tail).ours = Box::into_raw(Box::new(ours));
        let operations = verbs::operations(level).free_context(free_context);
        (library.set_ops)(memory.cast(), operations.as_ptr());
    }
    Ok(memory.cast())
}

/// `ibv_close_device`.
unsafe extern "C" fn free_context(context: *mut ibv_context) {
    let _ = guarded(|| {
        // SAFETY: the context belongs to this plug-in and is closed now: the box of open(), and the
        // memory of init_and_alloc_context, which the provider frees.
        unsafe {
            let ours = Box::from_raw((*context.cast::<Tail>()).ours);
            let memory = context.byte_sub(ours.library.level.context_offset());
            if let Err(errno) = ours.driver.close_context(&ours.device) {
                tracing::debug!("closing a context: {errno}");
            }
            // Closes cmd_fd and async_fd, by the interposed close().
            (ours.library.uninit_context)(memory.cast());
            libc::free(memory.cast());
        }
        Ok(())
    });
}
