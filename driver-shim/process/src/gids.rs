//! The port's GID table, made from the host's IP addresses.
//!
//! A GID is an IPv6 address, or an IPv4 address in IPv4-mapped form. Entry 0 is the address of the
//! default route, so that programs which take the first GID find one that other hosts can reach;
//! loopback comes last. There are no holes, and the table does not change while a process has the
//! device open.

use std::net::{IpAddr, Ipv4Addr};

use crate::addressing::Gid as DeviceAddress;

use crate::port_gids::{MAX_GIDS, gid_of};

use super::netlink::{self, InterfaceAddress, Link};

/// The headers of RoCE v2 for which Linux leaves room in each packet: GRH, UDP, BTH, XRCETH,
/// AtomicETH and ICRC. The sockets do not fragment, so each packet must fit the interface.
const ROCE_HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;

/// MTU of a network that is not the host's, in bytes.
const USUAL_MTU: u32 = 1500;

/// An address of the public Internet: the default route leads to it.
const FAR_AWAY: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);

/// One entry of the GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// The address of the entry.
    pub ip: IpAddr,
    /// Length of the network's prefix, in bits.
    pub prefix_len: u8,
    /// Index of the network interface that has the address; 0 if no interface has it.
    pub ifindex: u32,
    /// The interface's name; empty if the address belongs to a device and to no interface of the
    /// host.
    pub netdev: String,
}

impl Gid {
    /// The 128 bits of the GID, in network byte order.
    pub fn bytes(&self) -> [u8; 16] {
        gid_of(self.ip)
    }

    /// IPv6 scope of the address: the interface's index for a link-local address, else 0.
    pub fn scope(&self) -> u32 {
        match self.ip {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => self.ifindex,
            _ => 0,
        }
    }
}

/// The GID table of the port, with other values that follow from the host's addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GidTable {
    entries: Vec<Gid>,
    mtu: u32,
}

impl GidTable {
    /// Makes the table for the present state of the host; empty if no interface is up or the kernel
    /// reports an error.
    pub fn of_host() -> GidTable {
        match (netlink::links(), netlink::addresses()) {
            (Ok(links), Ok(addresses)) => {
                GidTable::new(&links, &addresses, netlink::source_towards(FAR_AWAY))
            }
            (Err(errno), _) | (_, Err(errno)) => {
                tracing::warn!("cannot list this host's addresses ({errno}): the device has no GID");
                GidTable::default()
            }
        }
    }

    /// Makes the table of a device that has addresses of its own, in the device's order. An address
    /// that this host has, too, gets the interface of the host.
    pub fn of_device(addresses: &[DeviceAddress]) -> GidTable {
        let links = netlink::links().unwrap_or_default();
        let host = netlink::addresses().unwrap_or_default();
        let gid = |address: &DeviceAddress| {
            let link = host
                .iter()
                .find(|known| known.ip == address.ip)
                .and_then(|known| links.iter().find(|link| link.index == known.link));
            Gid {
                ip: address.ip,
                prefix_len: address.prefix_len,
                ifindex: link.map_or(0, |link| link.index),
                netdev: link.map(|link| link.name.clone()).unwrap_or_default(),
            }
        };
        let entries: Vec<Gid> = addresses.iter().take(MAX_GIDS).map(gid).collect();
        let first = entries
            .first()
            .and_then(|gid| links.iter().find(|link| link.name == gid.netdev));
        let mtu = first.map_or(USUAL_MTU, |link| link.mtu);
        GidTable { entries, mtu }
    }

    /// Makes the table of a host with these interfaces and addresses; `default` is the source
    /// address towards the default route.
    pub fn new(links: &[Link], addresses: &[InterfaceAddress], default: Option<IpAddr>) -> GidTable {
        let mut entries: Vec<Gid> = Vec::new();
        for address in addresses {
            let Some(link) = links.iter().find(|link| link.index == address.link && link.up) else {
                continue;
            };
            let gid = Gid {
                ip: address.ip,
                prefix_len: address.prefix_len,
                ifindex: link.index,
                netdev: link.name.clone(),
            };
            if !entries
                .iter()
                .any(|known| (known.ip, known.scope()) == (gid.ip, gid.scope()))
            {
                entries.push(gid);
            }
        }
        entries.sort_by_key(|gid| rank(gid.ip, default));
        entries.truncate(MAX_GIDS);
        let netdev = entries.first().map(|gid| gid.ifindex);
        let mtu = links
            .iter()
            .find(|link| Some(link.index) == netdev)
            .map_or(0, |link| link.mtu);
        GidTable { entries, mtu }
    }

    /// The table of a device that has only these of the host's addresses, in this order. Each
    /// interface that has an address makes an entry, as link-local addresses may be on several.
    ///
    /// # Errors
    /// The first address that no interface has which is up.
    pub fn of_addresses(&self, addresses: &[IpAddr]) -> Result<GidTable, IpAddr> {
        let mut entries = Vec::new();
        for ip in addresses {
            let before = entries.len();
            entries.extend(self.entries.iter().filter(|gid| gid.ip == *ip).cloned());
            if entries.len() == before {
                return Err(*ip);
            }
        }
        let first = entries.first().map(|gid: &Gid| gid.ifindex);
        let link = netlink::links().unwrap_or_default();
        let link = link.iter().find(|link| Some(link.index) == first);
        let mtu = link.map_or(self.mtu, |link| link.mtu);
        Ok(GidTable { entries, mtu })
    }

    /// The entries, by GID index.
    pub fn entries(&self) -> &[Gid] {
        &self.entries
    }

    /// The port's LID: the low 16 bits of entry 0's address, or 0 without an entry. A LID names
    /// this host, or a host in the same /16.
    pub fn lid(&self) -> u16 {
        self.entries.first().map_or(0, |gid| {
            let [.., high, low] = gid.bytes();
            u16::from_be_bytes([high, low])
        })
    }

    /// MTU of entry 0's interface, in bytes; 0 without one.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// The largest path MTU (`enum ibv_mtu`) that this interface has room for: as Linux reports it
    /// for a NIC of RoCE (`is_roce`), whose packets have headers, too, or of iWARP.
    pub fn path_mtu(&self, is_roce: bool) -> u8 {
        path_mtu(self.mtu, is_roce)
    }
}

/// The largest path MTU that an interface MTU has room for; 256 bytes at least.
fn path_mtu(interface: u32, is_roce: bool) -> u8 {
    let headers = match is_roce {
        true => ROCE_HEADERS,
        false => 0,
    };
    match interface.saturating_sub(headers) {
        ..=511 => 1,
        512..=1023 => 2,
        1024..=2047 => 3,
        2048..=4095 => 4,
        4096.. => 5,
    }
}

/// The rank of an address in the table; equal ranks keep the kernel's order.
fn rank(ip: IpAddr, default: Option<IpAddr>) -> u8 {
    match ip {
        _ if ip.is_loopback() => 4,
        _ if Some(ip) == default => 0,
        IpAddr::V4(_) => 1,
        IpAddr::V6(ip) if ip.is_unicast_link_local() => 3,
        IpAddr::V6(_) => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_active_mtu_fits_the_interface() {
        for (interface, of_roce, of_iwarp) in [
            (0, 256, 256),
            (1119, 512, 1024),
            (1120, 1024, 1024),
            (1500, 1024, 1024),
            (2048, 1024, 2048),
            (4096, 2048, 4096),
            (4191, 2048, 4096),
            (4192, 4096, 4096),
            (9000, 4096, 4096),
            (65536, 4096, 4096),
        ] {
            assert_eq!(128 << path_mtu(interface, true), of_roce, "{interface}");
            assert_eq!(128 << path_mtu(interface, false), of_iwarp, "{interface}");
        }
    }

    fn link(index: u32, name: &str, up: bool) -> Link {
        Link {
            index,
            name: name.to_owned(),
            up,
            mtu: 1000 + index,
        }
    }

    fn table(addresses: &[(&str, u32)], default: Option<&str>) -> GidTable {
        let links = [
            link(1, "lo", true),
            link(2, "eth0", true),
            link(3, "eth1", true),
            link(4, "down0", false),
        ];
        let addresses: Vec<_> = addresses
            .iter()
            .map(|&(ip, link)| InterfaceAddress {
                ip: ip.parse().unwrap(),
                prefix_len: 24,
                link,
            })
            .collect();
        GidTable::new(&links, &addresses, default.map(|ip| ip.parse().unwrap()))
    }

    fn order(table: &GidTable) -> Vec<String> {
        table.entries().iter().map(|gid| gid.ip.to_string()).collect()
    }

    #[test]
    fn the_default_route_comes_first_and_loopback_last() {
        let table = table(
            &[
                ("127.0.0.1", 1),
                ("::1", 1),
                ("10.0.0.7", 2),
                ("fe80::7", 2),
                ("2001:db8::7", 2),
                ("192.168.1.7", 3),
                ("fd00::8", 3),
            ],
            Some("192.168.1.7"),
        );
        let expected = [
            "192.168.1.7",
            "10.0.0.7",
            "2001:db8::7",
            "fd00::8",
            "fe80::7",
            "127.0.0.1",
            "::1",
        ];
        assert_eq!(order(&table), expected);
        assert_eq!(table.lid(), 0x0107);
        assert_eq!(table.mtu(), 1003);
    }

    #[test]
    fn without_a_default_route_the_first_ipv4_address_leads() {
        let table = table(&[("::1", 1), ("2001:db8::7", 2), ("10.0.0.7", 2)], None);
        assert_eq!(order(&table), ["10.0.0.7", "2001:db8::7", "::1"]);
    }

    #[test]
    fn addresses_of_interfaces_that_are_down_are_left_out() {
        assert_eq!(
            order(&table(&[("10.0.0.7", 4), ("127.0.0.1", 1)], None)),
            ["127.0.0.1"]
        );
        let empty = table(&[("10.0.0.7", 4)], None);
        assert_eq!((empty.entries().len(), empty.lid(), empty.mtu()), (0, 0, 0));
    }

    #[test]
    fn a_link_local_address_keeps_its_scope_and_others_appear_once() {
        let table = table(
            &[("fe80::1", 2), ("fe80::1", 3), ("10.0.0.7", 2), ("10.0.0.7", 3)],
            None,
        );
        assert_eq!(order(&table), ["10.0.0.7", "fe80::1", "fe80::1"]);
        let scopes: Vec<u32> = table.entries().iter().map(Gid::scope).collect();
        assert_eq!(scopes, [0, 2, 3]);
    }

    #[test]
    fn a_device_has_the_addresses_that_it_was_given() {
        let host = table(
            &[
                ("10.0.0.7", 2),
                ("10.0.1.7", 3),
                ("fe80::1", 2),
                ("fe80::1", 3),
                ("127.0.0.1", 1),
            ],
            None,
        );
        let of = |ips: &[&str]| {
            let ips: Vec<IpAddr> = ips.iter().map(|ip| ip.parse().unwrap()).collect();
            host.of_addresses(&ips)
        };
        assert_eq!(
            order(&of(&["10.0.1.7", "10.0.0.7"]).unwrap()),
            ["10.0.1.7", "10.0.0.7"]
        );
        assert_eq!(order(&of(&["fe80::1"]).unwrap()), ["fe80::1", "fe80::1"]);
        assert_eq!(of(&["10.0.0.7", "192.0.2.1"]), Err("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn ipv4_is_mapped() {
        let table = table(&[("10.1.2.3", 2)], None);
        assert_eq!(
            table.entries()[0].bytes(),
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]
        );
    }

    #[test]
    fn the_table_has_at_most_256_entries() {
        let many: Vec<(String, u32)> = (0..400)
            .map(|n| (format!("10.0.{}.{}", n / 200, n % 200 + 1), 2))
            .collect();
        let many: Vec<(&str, u32)> = many.iter().map(|(ip, link)| (ip.as_str(), *link)).collect();
        assert_eq!(table(&many, None).entries().len(), 256);
    }
}
