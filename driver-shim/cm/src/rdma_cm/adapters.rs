//! The devices of the process as channel adapters of RoCE: their connections, and who listens.

use std::collections::HashMap;
use std::fmt;

use crate::ib_cm::{Connections, State};

/// A connection with `wire=roce`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByMessages {
    /// The device.
    pub(super) device: u32,
    /// The number among the device's connections.
    pub(super) number: u32,
    /// The queue pair, if the program named one that exists.
    pub(super) qid: Option<u32>,
    /// The program requested the connection.
    pub(super) active: bool,
}

/// The devices with connections of `wire=roce`.
#[derive(Debug, Default)]
pub(super) struct Adapters {
    /// By device.
    pub(super) opened: HashMap<u32, Adapter>,
    /// The ids that listen, by service.
    pub(super) listeners: HashMap<u64, Vec<u32>>,
}

/// A device.
pub(super) struct Adapter {
    /// The port of its messages.
    pub(super) port: u32,
    pub(super) connections: Connections,
    /// The ids, by the number of the connection.
    pub(super) ids: HashMap<u32, u32>,
}

impl fmt::Debug for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapter")
            .field("port", &self.port)
            .field("ids", &self.ids)
            .finish_non_exhaustive()
    }
}

impl Adapters {
    /// The state of a connection; `None` if it is over.
    pub(super) fn state(&self, of: ByMessages) -> Option<State> {
        self.opened.get(&of.device)?.connections.state(of.number)
    }

    pub(super) fn stop_listening(&mut self, handle: u32) {
        self.listeners.retain(|_, ids| {
            ids.retain(|id| *id != handle);
            !ids.is_empty()
        });
    }
}
