//! The drivers of the process, one for each device: started at the first use and after the loss of
//! a device, abandoned in a forked child, shut down at exit.

use std::sync::{Arc, OnceLock};
use urnic_sync::{Mutex, Published};

use rustix::io::Errno;

use crate::attributes::read_gids;
use crate::command::CommandQueue;
use crate::dma::DmaPool;
use crate::driver::Driver;
use crate::manager::Manager;
use crate::watch::Snapshot;
use urnic_config::{Config, MAX_DEVICES};
use urnic_presence::Presence;
use urnic_process::addressing::Gid;
use urnic_process::gids::GidTable;

/// The state of one process. A child gets a new one, since locks of the old one may be held by
/// threads that the child does not have.
struct Process {
    opening: Mutex<()>,
    /// By index of the device; empty until the device is opened.
    devices: [Published<Opened>; MAX_DEVICES as usize],
    manager: OnceLock<Arc<Manager<Driver>>>,
    shared: urnic_bus::Shared,
}

/// An open device. It is never freed.
struct Opened {
    driver: Arc<Driver>,
    /// The lost device that this one replaces: objects that the program made with it continue to
    /// fail.
    previous: Option<&'static Opened>,
}

impl Default for Process {
    fn default() -> Self {
        Process {
            opening: Mutex::default(),
            devices: [const { Published::new() }; MAX_DEVICES as usize],
            manager: OnceLock::new(),
            shared: urnic_bus::Shared::default(),
        }
    }
}

impl Process {
    /// The device with this index, if it is open.
    fn opened(&self, index: usize) -> Option<&'static Opened> {
        self.devices.get(index)?.get()
    }

    /// All open devices.
    fn all(&self) -> impl Iterator<Item = &'static Opened> {
        (0..self.devices.len()).filter_map(|index| self.opened(index))
    }
}

/// The state of this process, if it has opened a device.
static CURRENT: Published<Process> = Published::new();

fn current() -> &'static Process {
    CURRENT.get_or_init(Process::default)
}

impl Driver {
    /// This process's driver of the device with this index: opened at the first call, and again in
    /// a forked child. The driver lives until the process ends.
    ///
    /// Configuration and addresses are those of the first call.
    ///
    /// # Errors
    /// `ENODEV` if there is no usable device, `ENOMEM` if no memory is left, `EMFILE` if no fd is
    /// left, and the errors of the device.
    pub fn open(index: usize, config: &Config, gids: &GidTable) -> Result<&'static Arc<Driver>, Errno> {
        open(index, config, gids)
    }

    /// This process's driver of the device that it sees under this index, with a socket for
    /// `urnic stat`; `config` is the configuration of the process.
    ///
    /// # Errors
    /// Those of [`Driver::open`].
    pub fn open_shown(
        index: usize,
        config: &Config,
        presence: &Presence,
    ) -> Result<&'static Arc<Driver>, Errno> {
        let devices = config.each_device();
        let device = devices.get(index).ok_or(Errno::NODEV)?;
        let shown = presence.devices().get(index).ok_or(Errno::NODEV)?;
        let driver = Driver::open(index, &config.of_device(device), shown.gids())?;
        driver.open_stat_socket(presence);
        Ok(driver)
    }
}

fn open(index: usize, config: &Config, gids: &GidTable) -> Result<&'static Arc<Driver>, Errno> {
    let process = current();
    let _opening = process.opening.lock();
    let place = process.devices.get(index).ok_or(Errno::NODEV)?;
    let start = || {
        let bus = urnic_bus::open(config, gids, &process.shared)?;
        Driver::start_among(bus, config.clone(), index, &process.manager)
    };
    let previous = process.opened(index);
    let driver = match previous {
        Some(opened) if !opened.driver.is_lost() => return Ok(&opened.driver),
        Some(opened) if opened.driver.is_away() => return Err(Errno::NODEV),
        // After a loss, a program that opens the device gets the new device, if there is one.
        Some(opened) => {
            let driver = start()?;
            opened.driver.close_stat_socket();
            driver
        }
        None => {
            if process.all().next().is_none() {
                for warning in config.warnings() {
                    tracing::warn!("{warning}");
                }
            }
            start()?
        }
    };
    Ok(&place.set(Opened { driver, previous }).driver)
}

/// The address table of a device that is not in this process: from this process's driver of the
/// device, or, without one, from the device, which is opened for a short time.
///
/// # Errors
/// The errors of [`urnic_bus::open`] and of the device.
pub fn addresses(config: &Config) -> Result<Vec<Gid>, Errno> {
    let process = current();
    let is_it = |opened: &&Opened| opened.driver.config().name == config.name;
    if let Some(opened) = process.all().find(is_it) {
        return Ok(opened.driver.gids().to_vec());
    }
    let bus = urnic_bus::open(config, &GidTable::default(), &process.shared)?;
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
    for device in CURRENT.take().into_iter().flat_map(Process::all) {
        for opened in std::iter::successors(Some(device), |opened| opened.previous) {
            opened.driver.abandon_in_child();
        }
    }
}

/// The state of each device that this process has opened, also of those that were lost.
pub fn snapshots() -> Vec<Snapshot> {
    let devices = CURRENT.get().into_iter().flat_map(Process::all);
    let all = devices.flat_map(|device| std::iter::successors(Some(device), |opened| opened.previous));
    all.map(|opened| opened.driver.snapshot()).collect()
}

/// Whether a program polled a completion in error, and no mere flush, from any device of this
/// process.
pub fn failed() -> bool {
    let mut devices = CURRENT.get().into_iter().flat_map(Process::all);
    devices.any(|opened| opened.driver.failures().are_there())
}

/// Shuts the devices down; to be called when the process exits. Data of completed requests still
/// arrives. Takes a bounded time.
pub fn exit() {
    let drivers = CURRENT.get().into_iter().flat_map(Process::all);
    Driver::shutdown_all(drivers.map(|opened| opened.driver.clone()).collect());
}
