//! The state of native connections and of the connection manager.

use std::collections::HashMap;
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::attributes::Attributes;
use crate::dma::DmaMemory;
use urnic_cm::{native, rdma_cm};
use urnic_config::Config;
use urnic_presence::token::Token;

/// Destinations of receives, by stream.
pub(crate) type Buffers = HashMap<u32, DmaMemory>;

/// Native connections and the connection manager. No thread holds both locks.
pub(crate) struct Connections {
    pub(crate) native: Mutex<Native>,
    pub(crate) rdma_cm: Mutex<RdmaCm>,
}

/// Native connections of the process.
pub(crate) struct Native {
    pub(crate) engine: native::Engine,
    pub(crate) buffers: Buffers,
}

/// The connection manager of the process.
pub(crate) struct RdmaCm {
    pub(crate) engine: rdma_cm::Engine,
    pub(crate) buffers: Buffers,
    /// Descriptors that show the events of a channel, by channel.
    pub(crate) tokens: HashMap<u64, Token>,
}

impl Connections {
    /// # Errors
    /// The errors of getrandom(2).
    pub(crate) fn new(config: &Config, attributes: &Attributes) -> Result<Connections, Errno> {
        let mut seed = [0; 16];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let native = Native {
            engine: native::Engine::new(config, u128::from_ne_bytes(seed)),
            buffers: Buffers::new(),
        };
        let mut seed = [0; 8];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let depth = |limit: u32| u8::try_from(limit).unwrap_or(u8::MAX);
        let rdma_cm = RdmaCm {
            engine: rdma_cm::Engine::new(
                config,
                depth(attributes.max_ird),
                depth(attributes.max_ord),
                u64::from_ne_bytes(seed),
            ),
            buffers: Buffers::new(),
            tokens: HashMap::new(),
        };
        Ok(Connections {
            native: Mutex::new(native),
            rdma_cm: Mutex::new(rdma_cm),
        })
    }
}
