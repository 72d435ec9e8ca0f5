//! An open device: the context that `ibv_open_device` returns, and the provider's data of it.

use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_driver::{ContextEvents, Driver};
use urnic_presence::{ChannelSender, Shown};
use urnic_rdma_core::ibv_context;

use crate::file::File;
use crate::from_c::FromC;
use crate::library::Library;

/// The provider's part of an open device.
pub(crate) struct Context {
    /// The libibverbs through which the device was opened.
    pub(crate) library: &'static Library,
    pub(crate) driver: &'static Arc<Driver>,
    /// The driver's context.
    pub(crate) device: urnic_driver::Context,
    /// The channel of asynchronous events: `async_fd` is the program's end.
    pub(crate) async_channel: Arc<ChannelSender>,
    /// See [`Context::file`].
    file: Arc<File>,
}

/// The end of the memory of a context. `verbs_context` before it has a different length in each
/// release; it ends with `ibv_context`, so the fields after it are at the same place in all
/// releases.
#[repr(C)]
pub(crate) struct Tail {
    pub(crate) ibv: ibv_context,
    pub(crate) ours: *mut Context,
}

/// libibverbs' pointer to an open context of this provider.
#[derive(Clone, Copy)]
pub(crate) struct OpenContext(*mut ibv_context);

/// A context that libibverbs got from this provider, and that is open as long as the value is used:
/// it outlives the objects that were created in it.
impl FromC<*mut ibv_context> for OpenContext {
    unsafe fn from_c(given: *mut ibv_context) -> OpenContext {
        OpenContext(given)
    }
}

impl OpenContext {
    /// libibverbs' pointer.
    pub(crate) fn public(self) -> *mut ibv_context {
        self.0
    }
}

impl Deref for OpenContext {
    type Target = Context;
    fn deref(&self) -> &Context {
        // SAFETY: the promise of this type: an open context of this provider, whose tail is filled.
        unsafe { &*(*self.0.cast::<Tail>()).ours }
    }
}

impl Context {
    /// The rdma-core release through which the device was opened; None if the release is unknown.
    pub(crate) fn release(&self) -> Option<u32> {
        self.library.release
    }

    /// The device as it was presented when it was opened.
    pub(crate) fn shown(&self) -> &'static Shown {
        self.file.shown
    }

    /// The file that the context shares with other contexts by import. None in a forked child,
    /// which has no device: threads of the parent may hold locks there.
    pub(crate) fn file(&self) -> Option<&Arc<File>> {
        self.driver.check_process().is_ok().then_some(&self.file)
    }

    /// Makes everything except the memory: the provider's part of the context, and the program's
    /// end of its asynchronous events. `events` makes the receiver of the driver's events, which
    /// has access to the objects and, through them, to the context.
    pub(crate) fn make<E: ContextEvents + 'static>(
        library: &'static Library,
        file: Arc<File>,
        events: impl FnOnce(Arc<ChannelSender>) -> E,
    ) -> Result<(Context, RawFd), Errno> {
        let driver = file.driver;
        let (async_fd, async_channel) = urnic_presence::events::open()?;
        let device = driver
            .open_context(Arc::new(events(async_channel.clone())))
            .inspect_err(|_| close_of_program(async_fd))?;
        let context = Context {
            library,
            driver,
            device,
            async_channel,
            file,
        };
        Ok((context, async_fd))
    }
}

/// Closes an fd of the program as the program would: through the interposed function, which removes
/// the record of the fd.
pub(crate) fn close_of_program(fd: RawFd) {
    // SAFETY: the caller gave up this fd.
    unsafe { libc::close(fd) };
}
