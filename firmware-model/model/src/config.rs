//! The configuration of a device.

use crate::capture::Capture;
pub use crate::stream::descriptor::DescriptorWatch;
pub use crate::stream::sctp::SctpTransport;
pub use crate::sys::thread_start::{ThreadMain, ThreadStart};
use std::net::IpAddr;
use std::time::Duration;
use urnic_device::command::{DeviceAttributes, features};
use urnic_device::wqe::{MAX_INLINE, MAX_SGE};
use urnic_faults::Network;

/// Elements per entry that the device advertises.
const SGE: u32 = 16;
const _: () = assert!(SGE as usize <= MAX_SGE);

/// An address of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceAddress {
    /// The address.
    pub ip: IpAddr,
    /// IPv6 scope of a link-local address, else 0.
    pub scope: u32,
    /// Prefix length in bits.
    pub prefix_len: u32,
}

/// The addresses to which the driver may connect, and on which it may listen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Reach {
    /// Wherever the process may: the driver is the process itself.
    #[default]
    Unrestricted,
    /// From and on the addresses of the table only, and not to the host that the device runs on: a
    /// guest must not gain a TCP client there.
    Confined {
        /// The host's own addresses. (Loopback and unspecified ones need not be listed.)
        host: Vec<IpAddr>,
        /// Addresses that the driver may connect to in any case.
        allow: Vec<Network>,
    },
}

/// The device's limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Queue pairs.
    pub qps: u32,
    /// Entries per work queue.
    pub work_requests: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Entries per completion queue.
    pub cqes: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Memory regions.
    pub mrs: u32,
    /// Memory windows.
    pub mws: u32,
    /// Protection domains.
    pub pds: u32,
    /// Event queues.
    pub eqs: u32,
    /// Doorbell pages.
    pub uars: u32,
    /// Streams in streaming mode, and listeners.
    pub streams: u32,
    /// File descriptors: one for each stream, also while it closes, one for each address of a
    /// listener, and two more.
    pub descriptors: u32,
    /// Inbound Reads and atomics per queue pair.
    pub ird: u32,
    /// Outbound Reads and atomics per queue pair.
    pub ord: u32,
    /// Bytes of a region.
    pub mr_size: u64,
    /// Pages in the lists of all regions together.
    pub mr_pages: u32,
    /// Events that wait for room in an event queue, beyond which no command may cause more.
    pub waiting_events: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            qps: 16 << 10,
            work_requests: 16 << 10,
            cqs: 16 << 10,
            cqes: 1 << 22,
            srqs: 4 << 10,
            mrs: 1 << 20,
            mws: 256 << 10,
            pds: 64 << 10,
            eqs: 256,
            uars: 4 << 10,
            streams: 16 << 10,
            descriptors: u32::MAX,
            ird: 128,
            ord: 128,
            mr_size: 1 << 46,
            mr_pages: 4 << 20,
            waiting_events: 64 << 10,
        }
    }
}

/// Busy-polling by the device's thread for messages that give the program no completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BusyPoll {
    /// How long the thread waits for the next message; 0 = the thread never busy-polls.
    pub limit: Duration,
    /// Percent of one processor that the threads of all devices of the process may spend together.
    pub share: u32,
}

impl Default for BusyPoll {
    fn default() -> BusyPoll {
        BusyPoll {
            limit: Duration::from_micros(50),
            share: 100,
        }
    }
}

/// The configuration of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelConfig {
    /// Addresses of the device, the first being the default one.
    pub addresses: Vec<DeviceAddress>,
    /// The addresses to which the driver may connect, and on which it may listen.
    pub reach: Reach,
    /// Limits of the device.
    pub limits: Limits,
    /// Interrupt vectors; vector 0 is that of the asynchronous events.
    pub vectors: u32,
    /// RFC 7306 atomics and immediate data are offered.
    pub rfc7306: bool,
    /// Connections between processes of this host pass their bytes through shared memory, unless a
    /// capture, faults or the order of placement works on each byte.
    pub same_host: bool,
    /// Busy-polling by the device's thread.
    pub busy_poll: BusyPoll,
    /// What carries the packets of SCTP. Captures and faults of packets do not act on the kernel's.
    pub sctp: SctpTransport,
    /// Longest that a stream without a queue pair is kept until the peer has acknowledged all.
    pub linger: Duration,
    /// The watch that is informed of the device's file descriptors.
    pub descriptors: Option<DescriptorWatch>,
    /// The function that starts the device's thread.
    pub thread_start: ThreadStart,
    /// The driver is in another process, and rings in plain memory:
    /// [`Device::doorbell_pages`](crate::Device::doorbell_pages).
    pub doorbell_memory: bool,
    /// The capture of its streams.
    pub capture: Option<Capture>,
    /// The device's connections and UDP ports follow the plan of faults of the process, in which
    /// the device has this name.
    pub faulty: Option<String>,
    /// The last byte of each segment of an RDMA Write is placed before the others, and some time
    /// passes: so programs that rely on the order are found.
    pub last_first: bool,
}

impl Default for ModelConfig {
    fn default() -> ModelConfig {
        ModelConfig {
            addresses: Vec::new(),
            reach: Reach::default(),
            limits: Limits::default(),
            vectors: 9,
            rfc7306: true,
            same_host: false,
            busy_poll: BusyPoll::default(),
            sctp: SctpTransport::default(),
            linger: Duration::from_secs(3),
            descriptors: None,
            thread_start: ThreadStart::default(),
            doorbell_memory: false,
            capture: None,
            faulty: None,
            last_first: false,
        }
    }
}

impl ModelConfig {
    /// Whether connections on this host may pass their bytes through memory. Captures, faults and a
    /// placement in another order work on each byte that passes, and memory has no such place.
    pub(crate) fn shares_memory(&self) -> bool {
        self.same_host && self.capture.is_none() && self.faulty.is_none() && !self.last_first
    }

    /// The answer to `QueryDevice`.
    pub(crate) fn attributes(&self) -> DeviceAttributes {
        let limits = &self.limits;
        let mut offered = features::SRQ
            | features::WINDOWS
            | features::MODERATION
            | features::UNRELIABLE
            | features::DATAGRAMS
            | features::ROCE
            | features::SCTP;
        if self.rfc7306 {
            offered |= features::ATOMICS | features::IMMEDIATE;
        }
        if self.doorbell_memory {
            offered |= features::DOORBELL_MEMORY;
        }
        let version = |text: &str| text.parse::<u64>().unwrap_or(0) & 0xffff;
        let firmware = version(env!("CARGO_PKG_VERSION_MAJOR")) << 32
            | version(env!("CARGO_PKG_VERSION_MINOR")) << 16
            | version(env!("CARGO_PKG_VERSION_PATCH"));
        DeviceAttributes {
            max_mr_size: limits.mr_size.into(),
            firmware: firmware.into(),
            max_qp: limits.qps.into(),
            max_qp_wr: limits.work_requests.into(),
            max_sge: SGE.into(),
            // The wire names the first element only (row RDM-R-08).
            max_sge_rd: SGE.into(),
            max_inline: (MAX_INLINE as u32).into(),
            max_cq: limits.cqs.into(),
            max_cqe: limits.cqes.into(),
            max_mr: limits.mrs.into(),
            max_pd: limits.pds.into(),
            max_mw: limits.mws.into(),
            max_srq: limits.srqs.into(),
            max_srq_wr: limits.work_requests.into(),
            max_ird: limits.ird.into(),
            max_ord: limits.ord.into(),
            completion_vectors: self.vectors.saturating_sub(1).max(1).into(),
            features: offered.into(),
        }
    }

    /// Whether a stream may go from `local` to `remote`.
    pub(crate) fn may_connect(&self, remote: IpAddr, local: Option<IpAddr>) -> bool {
        let Reach::Confined { host, allow } = &self.reach else {
            return true;
        };
        let own = |ip: &IpAddr| self.addresses.iter().any(|a| a.ip == *ip);
        // A request without a local address needs one of that family in the table.
        let has_one = || self.addresses.iter().any(|a| a.ip.is_ipv4() == remote.is_ipv4());
        let here = remote.is_loopback() || remote.is_unspecified() || host.contains(&remote);
        let allowed = allow.iter().any(|network| network.contains(remote)) || own(&remote);
        local.as_ref().map_or_else(has_one, own) && (!here || allowed)
    }

    /// Whether the list of a confined device has this address; `true` for another device.
    pub(crate) fn allows(&self, ip: IpAddr) -> bool {
        match &self.reach {
            Reach::Unrestricted => true,
            Reach::Confined { allow, .. } => allow.iter().any(|network| network.contains(ip)),
        }
    }

    /// The local address of connections to `remote`, if the device may use only one.
    pub(crate) fn own_address_towards(&self, remote: IpAddr) -> Option<IpAddr> {
        let own = || self.addresses.iter().map(|a| a.ip);
        match self.reach {
            Reach::Unrestricted => None,
            Reach::Confined { .. } => own().find(|ip| ip.is_ipv4() == remote.is_ipv4()),
        }
    }

    /// The addresses to listen on for a request for `requested`; `None` if that is not allowed.
    pub(crate) fn listen_addresses(&self, requested: IpAddr, ipv6_only: bool) -> Option<Vec<IpAddr>> {
        let own: Vec<IpAddr> = self.addresses.iter().map(|a| a.ip).collect();
        // "All" of IPv4 are those of IPv4 alone.
        let one_family = requested.is_ipv4() || ipv6_only;
        match self.reach {
            Reach::Unrestricted => Some(vec![requested]),
            Reach::Confined { .. } if requested.is_unspecified() => {
                let meant = |ip: &IpAddr| !one_family || ip.is_ipv4() == requested.is_ipv4();
                (!own.is_empty()).then(|| own.into_iter().filter(meant).collect())
            }
            Reach::Confined { .. } => own.contains(&requested).then(|| vec![requested]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn all_addresses_are_of_the_requested_family() {
        let own = |ip| DeviceAddress {
            ip,
            scope: 0,
            prefix_len: 24,
        };
        let (v4, v6) = (ip("10.0.0.7"), ip("2001:db8::7"));
        let mut config = ModelConfig {
            addresses: vec![own(v4), own(v6)],
            reach: Reach::Confined {
                host: Vec::new(),
                allow: Vec::new(),
            },
            ..ModelConfig::default()
        };
        for (requested, ipv6_only, listens) in [
            ("::", false, Some(vec![v4, v6])),
            ("::", true, Some(vec![v6])),
            ("0.0.0.0", false, Some(vec![v4])),
            ("10.0.0.7", false, Some(vec![v4])),
            ("10.0.0.8", false, None),
        ] {
            assert_eq!(
                config.listen_addresses(ip(requested), ipv6_only),
                listens,
                "{requested}"
            );
        }
        config.addresses = vec![own(v4)];
        assert_eq!(config.listen_addresses(ip("::"), true), Some(vec![]));
        config.addresses = Vec::new();
        assert_eq!(config.listen_addresses(ip("::"), false), None);
    }

    #[test]
    fn a_confined_device_does_not_connect_to_its_host() {
        let mut config = ModelConfig {
            addresses: vec![DeviceAddress {
                ip: ip("10.0.0.7"),
                scope: 0,
                prefix_len: 24,
            }],
            reach: Reach::Confined {
                host: vec![ip("10.0.0.1"), ip("2001:db8::1")],
                allow: Vec::new(),
            },
            ..ModelConfig::default()
        };
        let own = Some(ip("10.0.0.7"));
        assert!(config.may_connect(ip("10.0.0.9"), own));
        assert!(config.may_connect(ip("10.0.0.7"), own));
        for host in [
            "10.0.0.1",
            "127.0.0.1",
            "127.8.8.8",
            "::1",
            "0.0.0.0",
            "::",
            "2001:db8::1",
        ] {
            assert!(!config.may_connect(ip(host), own), "{host}");
        }
        assert!(!config.may_connect(ip("10.0.0.9"), Some(ip("10.0.0.8"))));
        assert!(config.may_connect(ip("10.0.0.9"), None));
        assert!(
            !config.may_connect(ip("2001:db8::9"), None),
            "it has no address of that kind"
        );
        if let Reach::Confined { allow, .. } = &mut config.reach {
            allow.extend(Network::parse("127.0.0.0/8"));
        }
        assert!(config.may_connect(ip("127.0.0.1"), own));
        assert!(!config.may_connect(ip("::1"), own));
    }
}
