//! The state of native connections, and the connection manager's queues of the device.

use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::manager::Buffers;
use crate::message_queues::Messages;
use urnic_cm::native;
use urnic_config::Config;

/// What a device has for connections.
pub(crate) struct Connections {
    /// No thread holds this lock and that of the connection manager.
    pub(crate) native: Mutex<Native>,
    /// The ports of the connection manager for messages to others, from the first one on. This lock
    /// is taken while that of the connection manager is held, and no other lock while this one is.
    pub(crate) messages: OnceLock<Mutex<Messages>>,
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
            messages: OnceLock::new(),
        })
    }
}
