//! Networks: ranges of addresses with a common prefix.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A network, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    /// Number of leading bits that all addresses of the network have in common.
    bits: u8,
}

impl Network {
    /// Reads `192.0.2.0/24`, `fd00::/8`, `192.0.2.7`; `None` if the text is neither a network nor
    /// an address, has bits set after the prefix, or is an IPv4-mapped address: those are written
    /// as IPv4.
    pub fn parse(text: &str) -> Option<Network> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        // Addresses are compared in their own family (`contains`).
        if address != address.to_canonical() {
            return None;
        }
        let network = Network::of(address, bits)?;
        (network.address == address).then_some(network)
    }

    /// The network with this number of bits to which `address` belongs; the address alone, without
    /// a number. `None` if the address has fewer bits.
    pub fn of(address: IpAddr, bits: Option<u8>) -> Option<Network> {
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        let network = Network { address, bits };
        (bits <= most).then(|| Network {
            address: network.prefix_of(address),
            bits,
        })
    }

    /// Whether `address` belongs to the network. IPv4-mapped addresses count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        address.is_ipv4() == self.address.is_ipv4() && self.prefix_of(address) == self.address
    }

    /// The leading bits of `address`.
    fn prefix_of(&self, address: IpAddr) -> IpAddr {
        let bits = u32::from(self.bits);
        match address {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - bits.min(32)).unwrap_or(0);
                Ipv4Addr::from(u32::from(ip) & mask).into()
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(128 - bits.min(128)).unwrap_or(0);
                Ipv6Addr::from(u128::from(ip) & mask).into()
            }
        }
    }
}

impl fmt::Display for Network {
    /// Writes the network in the form of a specification: a single address has no number of bits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = if self.address.is_ipv4() { 32 } else { 128 };
        write!(f, "{}", self.address)?;
        match self.bits {
            bits if bits == most => Ok(()),
            bits => write!(f, "/{bits}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_what_begins_as_it_does() {
        for (network, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.7", "::ffff:192.0.2.7", "192.0.2.6"),
            ("fd00::/8", "fd12::1", "fe80::1"),
            ("fd00::1", "fd00::1", "fd00::2"),
            ("0.0.0.0/0", "255.0.0.1", "::1"),
            ("::/0", "::1", "127.0.0.1"),
        ] {
            let network = Network::parse(network).unwrap();
            assert!(network.contains(inside.parse().unwrap()), "{network:?}");
            assert!(!network.contains(outside.parse().unwrap()), "{network:?}");
        }
    }

    #[test]
    fn invalid_networks_are_refused() {
        for text in [
            "",
            "/",
            "192.0.2.0/33",
            "192.0.2.1/24",
            "fd00::/129",
            "192.0.2.0/-1",
            "localhost",
        ] {
            assert_eq!(Network::parse(text), None, "{text}");
        }
    }
}
