//! The actions when the program first searches for RDMA devices.

// The test binary must not interpose itself, so nothing searches there.
#![cfg_attr(test, allow(dead_code))]

use std::sync::atomic::{AtomicBool, Ordering};

use urnic_config::Config;
use urnic_presence::Settings;
use urnic_presence::fork::OwnLock;
use urnic_process::usage::{self, Step};

use crate::{exit, log, opening, refusals, strict, trace};

/// Held during the first search; whether there was a search.
pub(crate) static SEARCHED: OwnLock<bool> = OwnLock::new();
/// The first search is finished. Signal handlers check this flag, because they must not wait for
/// the lock, which the interrupted thread may hold.
static OVER: AtomicBool = AtomicBool::new(false);

/// Reads the configuration, once, and starts the parts that depend on it.
pub(crate) fn first_search() {
    if OVER.load(Ordering::Acquire) {
        return;
    }
    let mut searched = SEARCHED.lock();
    if std::mem::replace(&mut *searched, true) {
        return;
    }
    let config = Config::from_env();
    log::start(config.as_ref().map_or("warn", |config| &config.log));
    // The error is reported again when the device is opened, which then fails.
    let config = config
        .inspect_err(|error| tracing::error!("{error}"))
        .unwrap_or_default();
    refusals::start(config.refusals);
    usage::start();
    opening::reached(Step::Searched);
    exit::start(&config);
    strict::start(&config);
    trace::start(&config);
    if let Some(faults) = &config.faults
        && let Err(error) = urnic_faults::plan().add(faults)
    {
        tracing::error!("faults: {error}");
    }
    let settings = Settings {
        dir: config.present.dir.clone(),
        digest: urnic_presence::digest(&format!("{:?} {:?}", config.each_device(), config.identity)),
        config,
    };
    urnic_presence::configure(settings, urnic_driver::addresses);
    OVER.store(true, Ordering::Release);
}
