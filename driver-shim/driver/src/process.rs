//! The driver of the process: started at the first use and after the loss of a device, abandoned in
//! a forked child, shut down at exit.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::io::Errno;

use crate::attributes::read_gids;
use crate::command::CommandQueue;
use crate::dma::DmaPool;
use crate::driver::Driver;
use urnic_config::Config;
use urnic_process::addressing::Gid;
use urnic_process::gids::GidTable;
use urnic_process::lock::lock;

/// The state of one process. A child gets a new one, since locks of the old one may be held by
/// threads that the child does not have.
#[derive(Default)]
struct Process {
    opening: Mutex<()>,
    driver: OnceLock<Arc<Driver>>,
    /// The state whose device was lost: the objects that the program made with it keep failing.
    previous: Option<&'static Process>,
}

impl Process {
    /// This state and all earlier states.
    fn all(&self) -> impl Iterator<Item = &Process> {
        std::iter::successors(Some(self), |process| process.previous)
    }
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

fn current() -> &'static Process {
    let mut process = CURRENT.load(Ordering::Acquire);
    if process.is_null() {
        let new = Box::into_raw(Box::<Process>::default());
        match CURRENT.compare_exchange(process, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => process = new,
            Err(theirs) => {
                process = theirs;
                // SAFETY: `new` was made above, and is not shared.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
    // SAFETY: the pointer is only ever set to a box that is not freed.
    unsafe { &*process }
}

impl Driver {
    /// The driver of this process: opened at the first call, and again in a forked child. The
    /// driver lives until the process ends.
    ///
    /// Configuration and addresses are those of the first call.
    ///
    /// # Errors
    /// `ENODEV` if there is no usable device, `ENOMEM` if no memory is left, `EMFILE` if no fd is
    /// left, and the errors of the device.
    pub fn open(config: &Config, gids: &GidTable) -> Result<Arc<Driver>, Errno> {
        open(config, gids)
    }
}

fn open(config: &Config, gids: &GidTable) -> Result<Arc<Driver>, Errno> {
    loop {
        let process = current();
        let _opening = lock(&process.opening);
        if !std::ptr::eq(process, CURRENT.load(Ordering::Acquire)) {
            // Another thread replaced the lost device.
            continue;
        }
        let start = || Driver::start(urnic_bus::open(config, gids)?, config.clone());
        let Some(driver) = process.driver.get() else {
            for warning in config.warnings() {
                tracing::warn!("{warning}");
            }
            let driver = start()?;
            return Ok(process.driver.get_or_init(|| driver).clone());
        };
        if !driver.is_lost() {
            return Ok(driver.clone());
        }
        // After a loss, a program that opens the device gets the new device, if there is one.
        let fresh = start()?;
        driver.close_stat_socket();
        let next = Process {
            driver: OnceLock::from(fresh.clone()),
            previous: Some(process),
            ..Process::default()
        };
        CURRENT.store(Box::into_raw(Box::new(next)), Ordering::Release);
        return Ok(fresh);
    }
}

/// The address table of a device that is not in this process: from this process's driver of the
/// device, or, without one, from the device, which is opened for a short time.
///
/// # Errors
/// The errors of [`urnic_bus::open`] and of the device.
pub fn addresses(config: &Config) -> Result<Vec<Gid>, Errno> {
    if let Some(driver) = current().driver.get() {
        return Ok(driver.gids().to_vec());
    }
    let bus = urnic_bus::open(config, &GidTable::default())?;
    let pool = DmaPool::new(bus.clone());
    let commands = CommandQueue::start(bus, pool, Arc::new(|_| {}))?;
    let gids = read_gids(&commands);
    commands.reset();
    gids
}

/// Abandons the devices of the parent; to be called in the child after every fork. The objects that
/// the child inherited fail with `EIO` and do nothing; a [`Driver::open`] in the child opens a new
/// device. Async-signal-safe.
pub fn abandon_in_child() {
    // SAFETY: the pointer is only ever set to a box that is not freed.
    let inherited = unsafe { CURRENT.swap(std::ptr::null_mut(), Ordering::AcqRel).as_ref() };
    let drivers = inherited.into_iter().flat_map(Process::all);
    for driver in drivers.filter_map(|process| process.driver.get()) {
        driver.abandoned.store(true, Ordering::Release);
        driver.bus.abandon_in_child();
    }
}

/// Shuts the device down; to be called when the process exits. Data of completed requests still
/// arrives. Takes a bounded time.
pub fn exit() {
    // SAFETY: the pointer is only ever set to a box that is not freed.
    let process = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    if let Some(driver) = process.and_then(|process| process.driver.get()) {
        driver.shutdown();
    }
}
