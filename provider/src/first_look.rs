//! What happens when the program first looks for RDMA devices.

// The test binary must not interpose itself, so nobody looks there.
#![cfg_attr(test, allow(dead_code))]

use std::sync::Once;

use urnic_driver_shim::config::Config;
use urnic_driver_shim::driver;
use urnic_driver_shim::presence::{self, Settings};

use crate::log;

/// Reads the configuration, once, and starts what follows from it.
pub(crate) fn first_look() {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        let config = Config::from_env();
        log::start(config.as_ref().map_or("warn", |config| &config.log));
        // Said again, and refused, when the device is opened.
        let config = config
            .inspect_err(|error| tracing::error!("{error}"))
            .unwrap_or_default();
        let settings = Settings {
            dir: config.present.dir.clone(),
            digest: presence::digest(&format!("{:?}", config.device)),
            config,
        };
        presence::configure(settings, driver::addresses);
    });
}
