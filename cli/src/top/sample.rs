//! A sample of the counters, and the changes since an earlier one.

use std::time::Instant;

use urnic_driver::watch::{QueuePair, Snapshot};

use crate::stat::value;

/// A device of a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Device {
    pub(super) pid: u32,
    pub(super) name: String,
}

/// The devices at a moment.
#[derive(Debug, Default)]
pub(super) struct Sample {
    snapshots: Vec<Snapshot>,
    at: Option<Instant>,
}

impl Sample {
    pub(super) fn new(snapshots: Vec<Snapshot>, at: Instant) -> Sample {
        Sample {
            snapshots,
            at: Some(at),
        }
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = Device> {
        self.snapshots.iter().map(|one| Device {
            pid: one.pid,
            name: one.name.clone(),
        })
    }

    pub(super) fn of(&self, device: &Device) -> Option<&Snapshot> {
        let is_it = |one: &&Snapshot| one.pid == device.pid && one.name == device.name;
        self.snapshots.iter().find(is_it)
    }

    /// The growth of a device's counter per second since an earlier sample that had the device.
    pub(super) fn rate(&self, before: &Sample, device: &Device, counter: &str) -> Option<f64> {
        let (now, then) = (self.of(device)?, before.of(device)?);
        let grown = value(&now.counters, counter).saturating_sub(value(&then.counters, counter));
        self.per_second(before, grown)
    }

    /// The rates of a queue pair.
    pub(super) fn pair_rate(
        &self,
        before: &Sample,
        device: &Device,
        pair: &QueuePair,
        counter: &str,
    ) -> Option<f64> {
        let pairs = &before.of(device)?.queue_pairs;
        let then = pairs.iter().find(|then| then.qpn == pair.qpn)?;
        let grown = value(&pair.counters, counter).saturating_sub(value(&then.counters, counter));
        self.per_second(before, grown)
    }

    fn per_second(&self, before: &Sample, grown: u64) -> Option<f64> {
        let span = self.at?.saturating_duration_since(before.at?);
        (!span.is_zero()).then(|| grown as f64 / span.as_secs_f64())
    }
}
