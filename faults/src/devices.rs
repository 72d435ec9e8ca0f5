//! The devices of a process, and which of their ports are down.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Most devices of a process that a plan distinguishes: each is a bit of a word.
const MOST: usize = u64::BITS as usize;

/// The devices of a process, in the order in which the plan met them; only more are added.
#[derive(Debug)]
pub(crate) struct Devices([OnceLock<Device>; MOST]);

#[derive(Debug)]
struct Device {
    name: String,
    /// The end of the time for which its port is down, in nanoseconds of the plan's clock.
    down_until: AtomicU64,
}

impl Devices {
    pub(crate) const fn new() -> Devices {
        Devices([const { OnceLock::new() }; MOST])
    }

    fn find(&self, name: &str) -> Option<(usize, &Device)> {
        let mut known = self.0.iter().map_while(OnceLock::get).enumerate();
        known.find(|(_, device)| device.name == name)
    }

    /// The place of this device, which is added if it is new; `None` if there is no place left.
    fn place(&self, name: &str) -> Option<(usize, &Device)> {
        for (index, place) in self.0.iter().enumerate() {
            let device = place.get_or_init(|| Device {
                name: name.to_owned(),
                down_until: AtomicU64::new(0),
            });
            if device.name == name {
                return Some((index, device));
            }
        }
        None
    }

    /// A word with the bit of this device alone, which is added if it is new.
    pub(crate) fn bit(&self, name: &str) -> Option<u64> {
        self.place(name).map(|(index, _)| 1 << index)
    }

    /// The port of this device is down until then, or longer if it was already.
    pub(crate) fn take_down(&self, name: &str, until: Duration) {
        if let Some((_, device)) = self.place(name) {
            let until = u64::try_from(until.as_nanos()).unwrap_or(u64::MAX);
            device.down_until.fetch_max(until, Ordering::Relaxed);
        }
    }

    /// The end of the time for which the port of this device was taken down last.
    pub(crate) fn down_until(&self, name: &str) -> Duration {
        self.find(name).map_or(Duration::ZERO, |(_, device)| {
            Duration::from_nanos(device.down_until.load(Ordering::Relaxed))
        })
    }
}

/// Whether `wanted` of a specification means this device: its name, or the number at the end of its
/// name.
pub(crate) fn means(wanted: &str, name: &str) -> bool {
    let number_at_end = || {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        name.get(stem.len()..)?.parse::<u64>().ok()
    };
    let is_number = !wanted.is_empty() && wanted.bytes().all(|byte| byte.is_ascii_digit());
    wanted == name || (is_number && number_at_end().is_some_and(|number| wanted.parse() == Ok(number)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_meant_by_its_name_or_its_number() {
        for (wanted, name, expected) in [
            ("urnic1", "urnic1", true),
            ("1", "urnic1", true),
            ("1", "mlx5_1", true),
            ("1", "urnic11", false),
            ("11", "urnic11", true),
            ("1", "urnic0", false),
            ("0", "rail", false),
            ("rail", "rail", true),
            ("8", "rail08", true),
            ("", "urnic0", false),
        ] {
            assert_eq!(means(wanted, name), expected, "{wanted} {name}");
        }
    }

    #[test]
    fn a_port_is_down_until_the_last_end() {
        let devices = Devices::new();
        let second = Duration::from_secs(1);
        assert_eq!(devices.down_until("urnic0"), Duration::ZERO);
        devices.take_down("urnic0", 5 * second);
        devices.take_down("urnic0", 3 * second);
        assert_eq!(devices.down_until("urnic0"), 5 * second);
        assert_eq!(devices.down_until("urnic1"), Duration::ZERO);
        assert_eq!((devices.bit("urnic0"), devices.bit("urnic1")), (Some(1), Some(2)));
    }

    #[test]
    fn there_is_a_limit_of_devices() {
        let devices = Devices::new();
        let bits: u64 = (0..MOST).filter_map(|n| devices.bit(&n.to_string())).sum();
        assert_eq!(bits, u64::MAX);
        assert_eq!(devices.bit("one more"), None);
    }
}
