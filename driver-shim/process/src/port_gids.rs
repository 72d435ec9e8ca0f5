//! The GID table of the port, as programs see it, made from the addresses of the device.
//!
//! An iWARP RNIC has one GID for each address, in the order of the addresses.
//!
//! A RoCE NIC has two: each GID exists with type RoCE v1 and with type RoCE v2. The order is that
//! of Mellanox's adapters, since many programs are configured with index 3, the RoCE v2 GID of the
//! IPv4 address:
//!
//! | index | GID | type |
//! |---|---|---|
//! | 0, 1 | link-local | v1, v2 |
//! | 2, 3 | first IPv4 address | v1, v2 |
//! | 4 … | the other addresses | v1 and v2 of each |
//!
//! A loopback address has GIDs only where the device has no other address of the family, as the
//! netdev of an adapter has no such address: a program that chooses among the GIDs might choose one
//! that no other host reaches.
//!
//! The link-local GID of such an adapter is made from its MAC address, and exists also when IPv6
//! is off. Here it contains the first IPv4 address, in the form of RFC 5214 §6.1
//! (`fe80::5efe:192.0.2.1`), so that it names the same host as index 3.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Most entries of a table: a GID index is a byte in `ibv_ah_attr`.
pub const MAX_GIDS: usize = 256;

/// The first 96 bits of a link-local address that contains an IPv4 address (RFC 5214 §6.1).
const LINK_LOCAL_IPV4: [u8; 12] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0x5e, 0xfe];

/// The type of a GID (`enum ibv_gid_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidType {
    /// RoCE v1; also every GID that does not belong to a RoCE NIC.
    RoceV1,
    /// RoCE v2.
    RoceV2,
}

impl GidType {
    /// The type as sysfs shows it.
    pub fn name(self) -> &'static str {
        match self {
            GidType::RoceV1 => "IB/RoCE v1",
            GidType::RoceV2 => "RoCE v2",
        }
    }
}

/// An entry of the port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortGid {
    /// The 128 bits of the GID, in network byte order.
    pub raw: [u8; 16],
    /// The type of the GID.
    pub gid_type: GidType,
    /// The index of the address that the GID names among the addresses of the device.
    pub address: usize,
}

/// The GID of an address: IPv4 addresses are mapped.
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The address that a GID names: IPv4 for a mapped address, and for a link-local GID that contains
/// an IPv4 address.
pub fn ip_of(gid: &[u8; 16]) -> IpAddr {
    match gid {
        [prefix @ .., a, b, c, d] if *prefix == LINK_LOCAL_IPV4 => Ipv4Addr::new(*a, *b, *c, *d).into(),
        _ => IpAddr::V6(Ipv6Addr::from(*gid)).to_canonical(),
    }
}

/// The table of an iWARP RNIC with these addresses.
pub fn of_rnic(addresses: impl IntoIterator<Item = IpAddr>) -> Vec<PortGid> {
    let entry = |(address, ip)| PortGid {
        raw: gid_of(ip),
        gid_type: GidType::RoceV1,
        address,
    };
    addresses
        .into_iter()
        .enumerate()
        .map(entry)
        .take(MAX_GIDS)
        .collect()
}

/// Whether an address of a RoCE NIC has GIDs: all but a loopback address beside another address of
/// its family.
fn has_roce_gid(ip: IpAddr, all: &[(usize, IpAddr)]) -> bool {
    let is_other = |other: IpAddr| !other.is_loopback() && other.is_ipv4() == ip.is_ipv4();
    !(ip.is_loopback() && all.iter().any(|(_, other)| is_other(*other)))
}

/// The table of a RoCE NIC with these addresses.
pub fn of_roce(addresses: impl IntoIterator<Item = IpAddr>) -> Vec<PortGid> {
    let all: Vec<(usize, IpAddr)> = addresses.into_iter().enumerate().collect();
    let mut addresses = all.clone();
    addresses.retain(|(_, ip)| has_roce_gid(*ip, &all));
    let ipv4 = |(_, ip): &(usize, IpAddr)| matches!(ip, IpAddr::V4(_));
    let first = addresses.iter().copied().find(ipv4);
    addresses.sort_by_key(|entry| Some(*entry) != first);
    let link_local = first.and_then(|(address, ip)| match ip {
        IpAddr::V4(ip) => {
            let mut raw = [0; 16];
            raw[..12].copy_from_slice(&LINK_LOCAL_IPV4);
            raw[12..].copy_from_slice(&ip.octets());
            Some((address, raw))
        }
        IpAddr::V6(_) => None,
    });
    let others = addresses.into_iter().map(|(address, ip)| (address, gid_of(ip)));
    let both_types = |(address, raw)| {
        [GidType::RoceV1, GidType::RoceV2].map(|gid_type| PortGid {
            raw,
            gid_type,
            address,
        })
    };
    link_local
        .into_iter()
        .chain(others)
        .flat_map(both_types)
        .take(MAX_GIDS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn shown(table: &[PortGid]) -> Vec<(String, GidType, usize)> {
        table
            .iter()
            .map(|gid| (Ipv6Addr::from(gid.raw).to_string(), gid.gid_type, gid.address))
            .collect()
    }

    #[test]
    fn index_3_is_the_roce_v2_gid_of_the_first_ipv4_address() {
        let table = of_roce(ips(&["2001:db8::7", "10.1.2.3", "fe80::7", "127.0.0.1"]));
        let expected = [
            ("fe80::5efe:a01:203", 1),
            ("::ffff:10.1.2.3", 1),
            ("2001:db8::7", 0),
            ("fe80::7", 2),
        ];
        let expected: Vec<_> = expected
            .iter()
            .flat_map(|(gid, address)| {
                [GidType::RoceV1, GidType::RoceV2].map(|gid_type| ((*gid).to_owned(), gid_type, *address))
            })
            .collect();
        assert_eq!(shown(&table), expected);
    }

    #[test]
    fn without_ipv4_a_roce_nic_has_no_own_link_local_gid() {
        let table = of_roce(ips(&["2001:db8::7", "2001:db8::8"]));
        assert_eq!(
            shown(&table),
            [
                ("2001:db8::7".to_owned(), GidType::RoceV1, 0),
                ("2001:db8::7".to_owned(), GidType::RoceV2, 0),
                ("2001:db8::8".to_owned(), GidType::RoceV1, 1),
                ("2001:db8::8".to_owned(), GidType::RoceV2, 1),
            ]
        );
        assert_eq!(of_roce([]), []);
    }

    #[test]
    fn a_roce_nic_has_a_loopback_gid_only_in_place_of_others() {
        let named = |addresses: &[&str]| -> Vec<IpAddr> {
            let mut named: Vec<IpAddr> = of_roce(ips(addresses))
                .iter()
                .map(|gid| ip_of(&gid.raw))
                .collect();
            named.dedup();
            named
        };
        assert_eq!(
            named(&["10.1.2.3", "127.0.0.1", "::1"]),
            ips(&["10.1.2.3", "::1"])
        );
        assert_eq!(
            named(&["fe80::7", "127.0.0.1", "::1"]),
            ips(&["127.0.0.1", "fe80::7"])
        );
        assert_eq!(named(&["127.0.0.1", "::1"]), ips(&["127.0.0.1", "::1"]));
    }

    #[test]
    fn an_rnic_has_its_addresses_in_their_order() {
        let table = of_rnic(ips(&["10.1.2.3", "::1"]));
        assert_eq!(
            shown(&table),
            [
                ("::ffff:10.1.2.3".to_owned(), GidType::RoceV1, 0),
                ("::1".to_owned(), GidType::RoceV1, 1),
            ]
        );
    }

    #[test]
    fn every_gid_names_its_address() {
        let addresses = ips(&["192.0.2.1", "2001:db8::7", "fe80::200:5efe:c000:201", "127.0.0.1"]);
        for table in [of_rnic(addresses.clone()), of_roce(addresses.clone())] {
            for gid in table {
                assert_eq!(ip_of(&gid.raw), addresses[gid.address], "{gid:?}");
            }
        }
    }

    #[test]
    fn a_table_has_at_most_256_entries() {
        let many: Vec<IpAddr> = (0..400).map(|n| Ipv4Addr::from(0x0a00_0000 + n).into()).collect();
        assert_eq!(of_roce(many.clone()).len(), MAX_GIDS);
        assert_eq!(of_rnic(many).len(), MAX_GIDS);
    }
}
