//! The start and the end of a driver.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use rustix::io::Errno;

use crate::adaptive_poll::AdaptivePoll;
use crate::attributes::{read_attributes, read_gids};
use crate::clock::now;
use crate::command::{self, CommandQueue};
use crate::connections::Connections;
use crate::dma::DmaPool;
use crate::driver::Driver;
use crate::event::EventQueue;
use crate::event_loop::EventLoop;
use crate::failures::Failures;
use crate::manager::Manager;
use crate::objects::{Contexts, Table};
use crate::resident::Resident;
use crate::thread;
use crate::watch::StatSocket;
use urnic_cm::native::LocalHost;
use urnic_config::Config;
use urnic_device::bus::{Bus, Signal, SignalHandler};
use urnic_presence::Presence;

/// Longest wait for the end of the device when the process ends: longer than its streams take to
/// deliver sent data.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Entries of the queue of asynchronous events.
const ASYNC_EVENTS: u32 = 4096;

impl Driver {
    /// Starts the driver of the device behind `bus`.
    ///
    /// # Errors
    /// `ENODEV` if the device does not have this interface; `ENOMEM` if no memory is left; the
    /// errors of the device and of starting a thread.
    pub fn start(bus: Arc<dyn Bus>, config: Config) -> Result<Arc<Driver>, Errno> {
        Driver::start_among(bus, config, 0, &OnceLock::new())
    }

    /// Starts the driver of the device with this index, whose process has its connection manager at
    /// `manager`.
    ///
    /// # Errors
    /// Those of [`Driver::start`]; `ENOMEM` if the process has opened too many devices.
    pub(crate) fn start_among(
        bus: Arc<dyn Bus>,
        config: Config,
        index: usize,
        manager: &OnceLock<Arc<Manager<Driver>>>,
    ) -> Result<Arc<Driver>, Errno> {
        let pool = DmaPool::new(bus.clone());
        let event_loop = EventLoop::new()?;
        // Interrupts come from the first command on, but the driver that handles them exists only
        // at the end. Their queues are empty until then.
        let started: Arc<OnceLock<Weak<Driver>>> = Arc::default();
        let handler: SignalHandler = {
            let started = started.clone();
            Arc::new(move |signal| {
                if let Some(driver) = started.get().and_then(Weak::upgrade) {
                    match signal {
                        Signal::Interrupt(vector) => driver.interrupt(vector),
                        Signal::Lost => driver.device_lost(),
                    }
                }
            })
        };
        bus.signals(handler.clone());
        let commands = CommandQueue::start(bus.clone(), pool.clone(), handler)?;
        let attributes = read_attributes(&commands)?;
        bus.features(attributes.features);
        let local_host = LocalHost::new(read_gids(&commands)?, config.native.listen, config.identity);
        let async_events = EventQueue::create(&commands, &pool, ASYNC_EVENTS, 0)?;
        // A notification needs an armed queue and disarms it: as many entries as queues never
        // overflow.
        let notifications = (0..attributes.completion_vectors)
            .map(|v| EventQueue::create(&commands, &pool, attributes.max_cq, v + 1))
            .collect::<Result<Vec<_>, _>>()?;
        let connections = Connections::new(&config)?;
        let (rdma_cm, slot) = Manager::join(manager, &config, index, &attributes)?;
        let driver = Arc::new(Driver {
            bus,
            pool,
            commands,
            attributes,
            local_host,
            config,
            async_events,
            notifications,
            contexts: Contexts::new(),
            cqs: Table::default(),
            qps: Table::default(),
            srqs: Table::default(),
            qids: Mutex::default(),
            connections,
            rdma_cm,
            slot,
            event_poll: AdaptivePoll::default(),
            armed: Mutex::default(),
            event_loop,
            failures: Failures::default(),
            resident: Resident::default(),
            planned: Mutex::default(),
            port_reported_down: AtomicBool::new(false),
            returns_at: Mutex::default(),
            stat_socket: OnceLock::new(),
            abandoned: AtomicBool::new(false),
        });
        let _ = started.set(Arc::downgrade(&driver));
        driver.rdma_cm.started(driver.slot, &driver);
        // The device may have been lost before the handler had a driver.
        if !command::is_ready(&*driver.bus) {
            driver.device_lost();
        }
        thread::start(driver.clone())?;
        Ok(driver)
    }

    /// Opens the socket that answers `urnic stat` of the user's other processes.
    pub fn open_stat_socket(&self, presence: &Presence) {
        if self.stat_socket.get().is_some() {
            return;
        }
        let opened = presence.folder().map_err(|refusal| refusal.to_string());
        match opened.and_then(|folder| StatSocket::open(folder).map_err(|errno| errno.to_string())) {
            // If two threads open a socket, the second one is closed again.
            Ok(stat_socket) => drop(self.stat_socket.set(stat_socket)),
            Err(reason) => tracing::warn!(
                "`urnic stat` cannot query this process: no socket in the folder of {}: {reason}",
                presence.root().display()
            ),
        }
        self.event_loop.wake();
    }

    /// Ends the device: data of completed requests still arrives, then every call fails. Takes a
    /// bounded time.
    pub fn shutdown(&self) {
        if self.begin_shutdown() {
            self.event_loop.wait_for_end(EXIT_TIMEOUT);
        }
    }

    /// Makes the driver's thread end the device. The calling thread does not: it may hold the
    /// device's locks, since a signal handler that interrupted a call of the driver may call
    /// exit(3). Returns whether the device must be waited for.
    fn begin_shutdown(&self) -> bool {
        let first = self.check_process().is_ok() && self.event_loop.stop();
        if first {
            self.close_stat_socket();
            self.event_loop.wake();
        }
        first
    }

    /// Ends several devices, in the time of one.
    pub(crate) fn shutdown_all(drivers: Vec<Arc<Driver>>) {
        let ending: Vec<_> = drivers
            .into_iter()
            .filter(|driver| driver.begin_shutdown())
            .collect();
        let until = now() + EXIT_TIMEOUT;
        for driver in ending {
            driver.event_loop.wait_for_end(until.saturating_sub(now()));
        }
    }

    /// Closes the socket that answers `urnic stat`.
    pub(crate) fn close_stat_socket(&self) {
        if let Some(stat_socket) = self.stat_socket.get() {
            stat_socket.close();
        }
    }
}
