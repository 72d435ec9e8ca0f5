//! A device that a presence shows.

use urnic_process::gids::GidTable;

/// A device as this process sees it.
#[derive(Debug)]
pub struct Shown {
    pub(super) index: usize,
    pub(super) name: String,
    pub(super) uverbs: String,
    pub(super) node_guid: u64,
    pub(super) gids: GidTable,
}

impl Shown {
    /// The number of the device in the process, from 0 on.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the device node: `uverbs0`, or another number that no real device has.
    pub fn uverbs(&self) -> &str {
        &self.uverbs
    }

    /// The node GUID, in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.node_guid
    }

    /// The port's GID table.
    pub fn gids(&self) -> &GidTable {
        &self.gids
    }
}
