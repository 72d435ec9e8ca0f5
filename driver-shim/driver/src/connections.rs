//! The state of native connections.

use std::sync::Mutex;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::rdma_cm::manager::Buffers;
use urnic_cm::native;
use urnic_config::Config;

/// Native connections. No thread holds this lock and that of the connection manager.
pub(crate) struct Connections {
    pub(crate) native: Mutex<Native>,
}

/// Native connections of the device.
pub(crate) struct Native {
    pub(crate) engine: native::Engine,
    pub(crate) buffers: Buffers,
}

impl Connections {
    /// # Errors
    /// The errors of getrandom(2).
    pub(crate) fn new(config: &Config) -> Result<Connections, Errno> {
        let mut seed = [0; 16];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let native = Native {
            engine: native::Engine::new(config, u128::from_ne_bytes(seed)),
            buffers: Buffers::new(),
        };
        Ok(Connections {
            native: Mutex::new(native),
        })
    }
}
