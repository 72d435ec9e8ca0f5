//! The state of a device for connections: its native connections, and its part of the process's
//! connection manager.

use std::sync::{Arc, OnceLock};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::attributes::Attributes;
use crate::manager::{Buffers, Manager, Slot};
use crate::message_queues::Messages;
use urnic_cm::native;
use urnic_config::Config;

/// The connections of a device with a driver of type `D`.
pub(crate) struct Connections<D> {
    /// No thread holds this lock and that of the connection manager.
    native: Mutex<Native>,
    /// The ports of the connection manager for messages to others, from the first one on. This lock
    /// is taken while that of the connection manager is held, and no other lock while this one is.
    messages: OnceLock<Mutex<Messages>>,
    /// The connection manager of the process.
    manager: Arc<Manager<D>>,
    /// The device's place in the connection manager.
    slot: Slot,
}

/// Native connections of the device.
pub(crate) struct Native {
    engine: native::Engine,
    buffers: Buffers,
}

impl Native {
    /// The engine, and the destinations of receives, by stream.
    pub(crate) fn parts(&mut self) -> (&mut native::Engine, &mut Buffers) {
        (&mut self.engine, &mut self.buffers)
    }
}

impl<D> Connections<D> {
    /// The connections of the device with this index, whose process has its connection manager at
    /// `manager`.
    ///
    /// # Errors
    /// `ENOMEM` if the process has opened too many devices; those of getrandom(2).
    pub(crate) fn new(
        config: &Config,
        attributes: &Attributes,
        index: usize,
        manager: &OnceLock<Arc<Manager<D>>>,
    ) -> Result<Connections<D>, Errno> {
        let mut seed = [0; 16];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let native = Native {
            engine: native::Engine::new(config, u128::from_ne_bytes(seed)),
            buffers: Buffers::new(),
        };
        let (manager, slot) = Manager::join(manager, config, index, attributes)?;
        Ok(Connections {
            native: Mutex::new(native),
            messages: OnceLock::new(),
            manager,
            slot,
        })
    }

    /// Native connections, locked.
    pub(crate) fn native(&self) -> MutexGuard<'_, Native> {
        self.native.lock()
    }

    /// The connection manager of the process.
    pub(crate) fn manager(&self) -> &Arc<Manager<D>> {
        &self.manager
    }

    /// The device's place in the connection manager.
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    /// The queues for messages, once a port was opened.
    pub(crate) fn messages(&self) -> Option<&Mutex<Messages>> {
        self.messages.get()
    }

    /// The queues for messages, made by `new` at the first call.
    ///
    /// # Errors
    /// Those of `new`.
    pub(crate) fn messages_or(
        &self,
        new: impl FnOnce() -> Result<Messages, Errno>,
    ) -> Result<&Mutex<Messages>, Errno> {
        match self.messages.get() {
            Some(messages) => Ok(messages),
            None => {
                let messages = Mutex::new(new()?);
                Ok(self.messages.get_or_init(|| messages))
            }
        }
    }
}
