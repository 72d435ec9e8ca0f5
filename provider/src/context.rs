//! An open device: what `ibv_open_device` returns, and what of ours belongs to it.

use std::os::fd::RawFd;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_driver::{ContextEvents, Driver};
use urnic_presence::{ChannelSender, Presence};
use urnic_rdma_core::ibv_context;

use crate::file::File;
use crate::library::Library;

/// Our part of an open device.
pub(crate) struct Context {
    /// The libibverbs that it was opened through.
    pub(crate) library: &'static Library,
    pub(crate) driver: Arc<Driver>,
    /// The driver's name for this context.
    pub(crate) device: urnic_driver::Context,
    /// Where its asynchronous events go: `async_fd` is the program's end.
    pub(crate) async_channel: Arc<ChannelSender>,
    /// See [`Context::file`].
    file: Arc<File>,
}

/// The end of the memory of a context. `verbs_context` before it differs in length from release to
/// release; it ends with `ibv_context`, so what follows is at the same place everywhere.
#[repr(C)]
pub(crate) struct Tail {
    pub(crate) ibv: ibv_context,
    pub(crate) ours: *mut Context,
}

impl Context {
    /// Our part of a context.
    ///
    /// # Safety
    /// `context` is one that libibverbs got from us, and is open for as long as the result is used.
    pub(crate) unsafe fn of<'a>(context: *mut ibv_context) -> &'a Context {
        // SAFETY: the caller promises an open context of ours: its tail is there and filled.
        unsafe { &*(*context.cast::<Tail>()).ours }
    }

    /// The rdma-core release that it was opened through; None if that is unknown.
    pub(crate) fn release(&self) -> Option<u32> {
        self.library.release
    }

    /// The device as it was shown when it was opened.
    pub(crate) fn presence(&self) -> &'static Presence {
        self.file.presence
    }

    /// What it shares with those that were imported from it, or it from. None in a forked child,
    /// where the device is not: locks there may be held by threads of the parent's.
    pub(crate) fn file(&self) -> Option<&Arc<File>> {
        self.driver.here().is_ok().then_some(&self.file)
    }

    /// Everything but the memory: our part of the context, and the program's end of its
    /// asynchronous events. What the driver gives them to, `events` makes: that knows the objects
    /// they are of, which know the context.
    pub(crate) fn make<E: ContextEvents + 'static>(
        library: &'static Library,
        file: Arc<File>,
        events: impl FnOnce(Arc<ChannelSender>) -> E,
    ) -> Result<(Context, RawFd), Errno> {
        let driver = file.driver.clone();
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

/// Closes an fd of the program's, as the program would: through the interposed function, which
/// forgets it.
pub(crate) fn close_of_program(fd: RawFd) {
    // SAFETY: an fd that the caller gave away.
    unsafe { libc::close(fd) };
}
