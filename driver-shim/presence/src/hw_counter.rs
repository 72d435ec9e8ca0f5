//! The files of `hw_counters`: the counters of the device, and the completions in error that
//! programs polled, by status. The files of `counters`, which InfiniBand's ports have, are sums of
//! counters of the device.

use urnic_device::counter::Counter;
use urnic_device::vocabulary::WcStatus;

/// The beginning of the names of completions in error.
const FAILED: &str = "wc_";

/// A counter of a port (InfiniBand's PortCounters and PortCountersExtended).
#[derive(Debug, PartialEq, Eq)]
pub struct PortCounter {
    /// The name of the file.
    pub name: &'static str,
    /// The counters of the device of which it is the sum.
    pub of: &'static [Counter],
    /// The bytes, or other units, that it counts as one.
    pub unit: u64,
}

/// Data is counted in words of 4 bytes.
const WORD: u64 = 4;

const fn counted(name: &'static str, of: &'static [Counter], unit: u64) -> PortCounter {
    PortCounter { name, of, unit }
}

/// The files of `counters`. Those without counters are 0: a device without a link of its own has no
/// such errors.
const OF_PORT: [PortCounter; 21] = [
    counted("port_xmit_data", &[Counter::TxBytes], WORD),
    counted("port_rcv_data", &[Counter::RxBytes], WORD),
    counted("port_xmit_packets", &[Counter::TxFpdus, Counter::TxDatagrams], 1),
    counted("port_rcv_packets", &[Counter::RxFpdus, Counter::RxDatagrams], 1),
    counted(
        "unicast_xmit_packets",
        &[Counter::TxFpdus, Counter::TxDatagrams],
        1,
    ),
    counted(
        "unicast_rcv_packets",
        &[Counter::RxFpdus, Counter::RxDatagrams],
        1,
    ),
    counted("multicast_xmit_packets", &[], 1),
    counted("multicast_rcv_packets", &[], 1),
    counted(
        "port_rcv_errors",
        &[
            Counter::RxCrcErrors,
            Counter::RxMarkerErrors,
            Counter::RxDatagramErrors,
        ],
        1,
    ),
    counted("port_xmit_discards", &[Counter::TxDatagramDrops], 1),
    counted("port_xmit_wait", &[], 1),
    counted("symbol_error", &[], 1),
    counted("link_error_recovery", &[], 1),
    counted("link_downed", &[], 1),
    counted("port_rcv_remote_physical_errors", &[], 1),
    counted("port_rcv_switch_relay_errors", &[], 1),
    counted("port_xmit_constraint_errors", &[], 1),
    counted("port_rcv_constraint_errors", &[], 1),
    counted("local_link_integrity_errors", &[], 1),
    counted("excessive_buffer_overrun_errors", &[], 1),
    counted("VL15_dropped", &[], 1),
];

/// The subject of a file of `hw_counters`, or of `counters`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HwCounter {
    /// A counter of the device.
    Device(Counter),
    /// Completions with this status, which is not success.
    Failed(WcStatus),
    /// A counter of the port.
    Port(&'static PortCounter),
}

impl HwCounter {
    /// The files of `counters`.
    pub fn of_port() -> impl Iterator<Item = HwCounter> {
        OF_PORT.iter().map(HwCounter::Port)
    }

    /// The files of `hw_counters`, in the order of their numbers.
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
            HwCounter::Port(counter) => counter.name.to_owned(),
        }
    }

    /// The counter with this name in `counters`.
    pub(crate) fn named_of_port(name: &[u8]) -> Option<HwCounter> {
        let counter = OF_PORT.iter().find(|counter| counter.name.as_bytes() == name);
        counter.map(HwCounter::Port)
    }

    /// The counter with this name in `hw_counters`. Allocates nothing: a signal handler may open a
    /// file.
    pub(crate) fn named(name: &[u8]) -> Option<HwCounter> {
        let is_it = |counter: &HwCounter| match counter {
            HwCounter::Device(counter) => counter.name().as_bytes() == name,
            HwCounter::Failed(status) => name.strip_prefix(FAILED.as_bytes()).is_some_and(|rest| {
                let name = status.verbs_name().bytes().map(|byte| byte.to_ascii_lowercase());
                name.eq(rest.iter().copied())
            }),
            HwCounter::Port(_) => false,
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
        for counter in HwCounter::of_port() {
            assert_eq!(HwCounter::named_of_port(counter.name().as_bytes()), Some(counter));
        }
        let refused = HwCounter::Failed(WcStatus::RemAccessErr);
        assert_eq!(refused.name(), "wc_rem_access_err");
        assert_eq!(HwCounter::named(b"wc_REM_ACCESS_ERR"), None);
        assert_eq!(HwCounter::named(b"wc_success"), None);
    }
}
