//! The life of contexts: the functions that libibverbs calls when a program opens, imports and
//! closes the device.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Config;
use urnic_driver::{CmChannel, Driver};
use urnic_presence::{Presence, command};
use urnic_rdma_core::{ibv_context, ibv_device, verbs_context, verbs_device};

use crate::context::{Context, Tail, close_of_program};
use crate::file::File;
use crate::guard::{guarded, set_errno};
use crate::library::{Library, Registration};
use crate::log::complaining;
use crate::verbs::{self, Events};

/// A value of `enum rdma_driver_id` that no kernel driver has.
const RDMA_DRIVER_UNKNOWN: u32 = 0;

const CANNOT_OPEN: &str = "cannot open urnic0";

/// The device as it is presented, and its driver. The first use in the process opens the device.
fn open_device() -> Result<(&'static Presence, Arc<Driver>), Errno> {
    let presence = Presence::current()?;
    let config = Config::from_env().map_err(|error| {
        tracing::error!("{error}");
        Errno::INVAL
    })?;
    let driver = Driver::open(&config, presence.gids())?;
    driver.open_stat_socket(presence);
    Ok((presence, driver))
}

/// Makes `opened`, an fd that the program got for `/dev/infiniband/rdma_cm`, a channel to the
/// connection manager.
///
/// # Errors
/// The errors of opening the device; `EMFILE`, `ENOMEM`.
pub(crate) fn open_cm_channel(opened: BorrowedFd<'_>) -> Result<(), Errno> {
    complaining(CANNOT_OPEN, || {
        let (presence, driver) = open_device()?;
        CmChannel::open(driver, presence.node_guid(), opened)
    })
}

/// `verbs_device_ops.alloc_context`: opens the device on `cmd_fd`, which this function or the
/// context closes from here on.
pub(crate) unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private_data: *mut c_void,
) -> *mut verbs_context {
    answer(|| {
        let opened = || {
            let (presence, driver) = open_device()?;
            let file = File::open(cmd_fd, presence, driver)?;
            // SAFETY: libibverbs passes a device that this plug-in allocated.
            Context::make(unsafe { library_of(device) }, file, Events::new)
        };
        let (ours, async_fd) = complaining(CANNOT_OPEN, opened).inspect_err(|_| close_of_program(cmd_fd))?;
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
