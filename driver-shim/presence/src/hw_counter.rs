//! The files of `hw_counters`: the counters of the device, and the completions in error that
//! programs polled, by status.

use urnic_device::counter::Counter;
use urnic_device::vocabulary::WcStatus;

/// The beginning of the names of completions in error.
const FAILED: &str = "wc_";

/// The subject of a file of `hw_counters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HwCounter {
    /// A counter of the device.
    Device(Counter),
    /// Completions with this status, which is not success.
    Failed(WcStatus),
}

impl HwCounter {
    /// All files, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = HwCounter> {
        let failed = (1..=u8::MAX).filter_map(WcStatus::from_raw);
        let device = Counter::ALL.iter().copied().map(HwCounter::Device);
        device.chain(failed.map(HwCounter::Failed))
    }

    /// The name of the file: that of the counter, or `wc_` and the status, in lower case.
    pub fn name(self) -> String {
        match self {
            HwCounter::Device(counter) => counter.name().to_owned(),
            HwCounter::Failed(status) => FAILED.to_owned() + &status.verbs_name().to_ascii_lowercase(),
        }
    }

    /// The counter with this name. Allocates nothing: a signal handler may open a file.
    pub(crate) fn named(name: &[u8]) -> Option<HwCounter> {
        let is_it = |counter: &HwCounter| match counter {
            HwCounter::Device(counter) => counter.name().as_bytes() == name,
            HwCounter::Failed(status) => name.strip_prefix(FAILED.as_bytes()).is_some_and(|rest| {
                let name = status.verbs_name().bytes().map(|byte| byte.to_ascii_lowercase());
                name.eq(rest.iter().copied())
            }),
        };
        HwCounter::all().find(is_it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_is_known_by_its_name() {
        for counter in HwCounter::all() {
            assert_eq!(HwCounter::named(counter.name().as_bytes()), Some(counter));
        }
        let refused = HwCounter::Failed(WcStatus::RemAccessErr);
        assert_eq!(refused.name(), "wc_rem_access_err");
        assert_eq!(HwCounter::named(b"wc_REM_ACCESS_ERR"), None);
        assert_eq!(HwCounter::named(b"wc_success"), None);
    }
}
