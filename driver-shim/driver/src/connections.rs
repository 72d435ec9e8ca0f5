//! The state of native connections, and the connection manager.

use std::sync::{Arc, Mutex, OnceLock};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::attributes::Attributes;
use crate::rdma_cm::manager::{Buffers, Manager};
use crate::rdma_cm::number::Slot;
use urnic_cm::native;
use urnic_config::Config;

/// Native connections of the device, and the connection manager of the process. No thread holds
/// both locks.
pub(crate) struct Connections {
    pub(crate) native: Mutex<Native>,
    pub(crate) rdma_cm: Arc<Manager>,
    /// The device's place in the connection manager.
    pub(crate) slot: Slot,
}

/// Native connections of the device.
pub(crate) struct Native {
    pub(crate) engine: native::Engine,
    pub(crate) buffers: Buffers,
}

impl Connections {
    /// The connections of the device with this index; the connection manager is at `manager`, or
    /// made there.
    ///
    /// # Errors
    /// The errors of getrandom(2); `ENOMEM` if the process has opened too many devices.
    pub(crate) fn new(
        config: &Config,
        index: usize,
        attributes: &Attributes,
        manager: &OnceLock<Arc<Manager>>,
    ) -> Result<Connections, Errno> {
        let mut seed = [0; 16];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let native = Native {
            engine: native::Engine::new(config, u128::from_ne_bytes(seed)),
            buffers: Buffers::new(),
        };
        let (rdma_cm, slot) = Manager::join(manager, config, index, attributes)?;
        Ok(Connections {
            native: Mutex::new(native),
            rdma_cm,
            slot,
        })
    }
}
