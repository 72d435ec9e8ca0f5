//! The devices of the process, as the connection manager chooses among them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};
use urnic_config::{Config, Device};
use urnic_presence::Presence;
use urnic_process::addressing::Gid;
use urnic_process::gids::GidTable;

/// The devices that programs see, open or not, by index.
#[derive(Debug)]
pub(crate) struct Inventory {
    devices: Vec<Entry>,
}

/// A device that programs see.
#[derive(Debug)]
struct Entry {
    /// In network order.
    node_guid: u64,
    /// `enum ibv_mtu`.
    path_mtu: u8,
    addresses: Vec<Gid>,
    /// It has all addresses of the host.
    has_all: bool,
}

impl Inventory {
    pub(crate) fn new(config: &Config, presence: &Presence) -> Inventory {
        let configured = config.each_device();
        let entry = |(shown, device): (&urnic_presence::Shown, &urnic_config::DeviceConfig)| Entry {
            node_guid: shown.node_guid().to_be(),
            path_mtu: shown.gids().path_mtu(config.identity.is_roce()),
            addresses: addresses(shown.gids()),
            has_all: device.device == Device::Inproc && device.addresses.is_empty(),
        };
        Inventory {
            devices: presence.devices().iter().zip(&configured).map(entry).collect(),
        }
    }

    /// Whether there are several devices.
    pub(crate) fn is_plural(&self) -> bool {
        self.devices.len() > 1
    }

    pub(crate) fn node_guid(&self, index: usize) -> u64 {
        self.devices.get(index).map_or(0, |device| device.node_guid)
    }

    /// The largest path MTU of a device's port.
    pub(crate) fn path_mtu(&self, index: usize) -> Option<u8> {
        self.devices.get(index).map(|device| device.path_mtu)
    }

    /// The index of the device that has the address: one that was given this address, else the
    /// first that has all addresses. Loopback belongs to the first device unless another was given
    /// it.
    ///
    /// # Errors
    /// `ENODEV` if no device has the address.
    pub(crate) fn device_of(&self, ip: IpAddr) -> Result<usize, Errno> {
        let ip = ip.to_canonical();
        let given = |device: &Entry| !device.has_all && device.addresses.iter().any(|gid| gid.ip == ip);
        let all = || self.devices.iter().position(|device| device.has_all);
        let first = || (ip.is_loopback() || ip.is_unspecified() || !self.chooses()).then_some(0);
        self.devices
            .iter()
            .position(given)
            .or_else(all)
            .or_else(first)
            .ok_or(Errno::NODEV)
    }

    /// Whether the device of an address matters: else it is the first one.
    fn chooses(&self) -> bool {
        match self.devices.as_slice() {
            // One device in another process or a PCI function has addresses that this process may
            // not know.
            [_] => false,
            devices => !devices.iter().all(|device| device.has_all),
        }
    }

    /// The places at which an id that is bound to `local` listens: a device's index and one of its
    /// addresses.
    ///
    /// # Errors
    /// `ENODEV` if no device has the address.
    pub(crate) fn listening(
        &self,
        local: SocketAddr,
        ipv6_only: bool,
    ) -> Result<Vec<(usize, SocketAddr)>, Errno> {
        let ip = local.ip();
        if !ip.is_unspecified() || !self.chooses() {
            return Ok(vec![(self.device_of(ip)?, local)]);
        }
        let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()].map(|ip| Gid {
            ip,
            scope: 0,
            prefix_len: 0,
        });
        let all = self.devices.iter().flat_map(|device| &device.addresses);
        let wanted = |gid: &&Gid| match ip {
            IpAddr::V4(_) => gid.ip.is_ipv4(),
            IpAddr::V6(_) => gid.ip.is_ipv6() || !ipv6_only,
        };
        let mut places = Vec::new();
        for gid in all.chain(&loopback).filter(wanted) {
            let place = (self.device_of(gid.ip)?, end(gid, local.port()));
            if !places.contains(&place) {
                places.push(place);
            }
        }
        Ok(places)
    }

    /// The source address of packets to `remote`: the host's choice, if a device has that address,
    /// else the address with the longest prefix that contains `remote`.
    ///
    /// # Errors
    /// Those of the host's choice; `ENODEV` if no device has an address from which to send.
    pub(crate) fn source(&self, remote: SocketAddr) -> Result<SocketAddr, Errno> {
        let by_host = source_of_host(remote);
        if let Ok(source) = by_host
            && self.device_of(source.ip()).is_ok()
        {
            return by_host;
        }
        // Addresses of devices that are not in this process; the host's routes do not lead to them.
        let elsewhere: Vec<Gid> = self
            .devices
            .iter()
            .flat_map(|device| &device.addresses)
            .copied()
            .collect();
        match source_of_device(&elsewhere, remote) {
            Some(source) if by_host.is_err() => Ok(source),
            _ => by_host.and(Err(Errno::NODEV)),
        }
    }
}

/// The addresses in a GID table.
fn addresses(gids: &GidTable) -> Vec<Gid> {
    let address = |gid: &urnic_process::gids::Gid| Gid {
        ip: gid.ip,
        scope: gid.scope(),
        prefix_len: gid.prefix_len,
    };
    gids.entries().iter().map(address).collect()
}

/// An address with a port.
fn end(gid: &Gid, port: u16) -> SocketAddr {
    match gid.ip {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), port),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, gid.scope).into(),
    }
}

/// The source address that the host's routing tables choose for `remote`, found with a socket that
/// sends nothing.
pub(crate) fn source_of_host(remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let family = if remote.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let probe = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    connect(&probe, &remote)?;
    SocketAddr::try_from(getsockname(&probe)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The address of a device from which it reaches `remote`: the one with the longest prefix that
/// contains `remote`, else the first of the same family.
pub(crate) fn source_of_device(gids: &[Gid], remote: SocketAddr) -> Option<SocketAddr> {
    let shared = |gid: &Gid| match (gid.ip, remote.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    };
    let of_family = || gids.iter().filter(|gid| gid.ip.is_ipv4() == remote.is_ipv4());
    let best = of_family()
        .filter(|gid| shared(gid) >= gid.prefix_len.into())
        .max_by_key(|gid| gid.prefix_len);
    best.or_else(|| of_family().next()).map(|gid| match gid.ip {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), 0),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, gid.scope).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inventory(devices: &[(&[&str], bool)]) -> Inventory {
        let gid = |ip: &&str| Gid {
            ip: ip.parse().unwrap(),
            scope: 0,
            prefix_len: 24,
        };
        let entry = |(addresses, has_all): &(&[&str], bool)| Entry {
            node_guid: 0,
            path_mtu: 0,
            addresses: addresses.iter().map(gid).collect(),
            has_all: *has_all,
        };
        Inventory {
            devices: devices.iter().map(entry).collect(),
        }
    }

    fn device_of(inventory: &Inventory, ip: &str) -> Result<usize, Errno> {
        inventory.device_of(ip.parse().unwrap())
    }

    fn listening(inventory: &Inventory, local: &str, ipv6_only: bool) -> Vec<(usize, String)> {
        let places = inventory.listening(local.parse().unwrap(), ipv6_only).unwrap();
        places
            .into_iter()
            .map(|(index, place)| (index, place.to_string()))
            .collect()
    }

    #[test]
    fn an_id_gets_the_device_that_was_given_its_address() {
        let rails = inventory(&[(&["10.0.0.1"], false), (&["10.0.1.1", "fd00::1"], false)]);
        assert_eq!(device_of(&rails, "10.0.0.1"), Ok(0));
        assert_eq!(device_of(&rails, "10.0.1.1"), Ok(1));
        assert_eq!(device_of(&rails, "::ffff:10.0.1.1"), Ok(1));
        assert_eq!(device_of(&rails, "127.0.0.1"), Ok(0));
        assert_eq!(device_of(&rails, "192.0.2.1"), Err(Errno::NODEV));
        let mixed = inventory(&[(&["10.0.0.1", "10.0.1.1"], true), (&["10.0.1.1"], false)]);
        assert_eq!(device_of(&mixed, "10.0.1.1"), Ok(1));
        assert_eq!(device_of(&mixed, "192.0.2.1"), Ok(0));
    }

    #[test]
    fn devices_with_all_addresses_leave_ids_to_the_first() {
        let all = inventory(&[(&["10.0.0.1"], true), (&["10.0.0.1"], true)]);
        assert_eq!(device_of(&all, "10.0.0.1"), Ok(0));
        assert_eq!(listening(&all, "0.0.0.0:7", false), [(0, "0.0.0.0:7".to_owned())]);
        let served = inventory(&[(&["10.9.0.1"], false)]);
        assert_eq!(device_of(&served, "192.0.2.1"), Ok(0));
        assert_eq!(listening(&served, "[::]:7", false), [(0, "[::]:7".to_owned())]);
    }

    #[test]
    fn a_listener_on_any_address_listens_at_each_device() {
        let rails = inventory(&[(&["10.0.0.1"], false), (&["10.0.1.1", "fd00::1"], false)]);
        let v4 = ["10.0.0.1:7", "10.0.1.1:7", "127.0.0.1:7"];
        let places = |list: &[(usize, &str)]| -> Vec<(usize, String)> {
            list.iter()
                .map(|(index, place)| (*index, (*place).to_owned()))
                .collect()
        };
        assert_eq!(
            listening(&rails, "0.0.0.0:7", false),
            places(&[(0, v4[0]), (1, v4[1]), (0, v4[2])])
        );
        assert_eq!(
            listening(&rails, "[::]:7", true),
            places(&[(1, "[fd00::1]:7"), (0, "[::1]:7")])
        );
        assert_eq!(listening(&rails, "[::]:7", false).len(), 5);
        assert_eq!(listening(&rails, "10.0.1.1:7", false), places(&[(1, v4[1])]));
    }

    #[test]
    fn the_source_of_a_device_has_the_longest_prefix() {
        let gid = |ip: &str, prefix_len| Gid {
            ip: ip.parse().unwrap(),
            scope: 0,
            prefix_len,
        };
        let gids = [gid("10.0.0.5", 8), gid("10.1.0.5", 16), gid("192.0.2.5", 24)];
        let source = |remote: &str| {
            let source = source_of_device(&gids, SocketAddr::new(remote.parse().unwrap(), 7))?;
            Some(source.ip().to_string())
        };
        assert_eq!(source("10.1.9.9").as_deref(), Some("10.1.0.5"));
        assert_eq!(source("10.2.9.9").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("192.0.2.9").as_deref(), Some("192.0.2.5"));
        assert_eq!(source("198.51.100.1").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("2001:db8::1"), None);
    }
}
