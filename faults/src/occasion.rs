//! Occasions for faults: what is about to happen, as far as filters ask for it.

use std::fmt;
use std::net::IpAddr;

/// What is about to happen.
#[derive(Debug, Clone, Copy)]
pub enum Occasion<'a> {
    /// An attempt to connect to a peer.
    Connect(IpAddr),
    /// A connection with a peer has passed bytes: from a position to another.
    Passed {
        /// The peer.
        peer: IpAddr,
        /// The position before.
        from: u64,
        /// The position behind.
        to: u64,
    },
    /// A connection with a peer is about to send the bytes from a position to another of those that
    /// it sends.
    Sending {
        /// The peer.
        peer: IpAddr,
        /// The position before.
        from: u64,
        /// The position behind.
        to: u64,
    },
    /// A connection is about to send this many bytes to a peer.
    Send(IpAddr, usize),
    /// A datagram is about to be sent to a peer.
    Datagram(IpAddr),
    /// A call of this name, without `ibv_`.
    Call(&'a str),
    /// A program polls the successful completion of a request: its operation, by the name in verbs
    /// without `IBV_WC_`, and its queue pair.
    Completion(&'a str, u32),
    /// An event is about to be sent to a completion channel.
    Event,
}

impl Occasion<'_> {
    /// The peer, if there is one.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        match *self {
            Occasion::Connect(peer)
            | Occasion::Passed { peer, .. }
            | Occasion::Sending { peer, .. }
            | Occasion::Send(peer, _)
            | Occasion::Datagram(peer) => Some(peer),
            _ => None,
        }
    }
}

impl fmt::Display for Occasion<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Occasion::Connect(peer) => write!(f, "connecting to {peer}"),
            Occasion::Passed { peer, .. } | Occasion::Sending { peer, .. } => {
                write!(f, "a connection with {peer}")
            }
            Occasion::Send(peer, _) => write!(f, "sending to {peer}"),
            Occasion::Datagram(peer) => write!(f, "a datagram to {peer}"),
            Occasion::Call(call) => write!(f, "ibv_{call}"),
            Occasion::Completion(opcode, qp) => write!(f, "{opcode} of qp {qp:#x}"),
            Occasion::Event => f.write_str("a completion event"),
        }
    }
}

/// A range of addresses with a common prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u32,
}

impl Network {
    /// Reads `192.0.2.0/24`, `fd00::1`.
    pub(crate) fn parse(text: &str) -> Option<Network> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        (bits <= most).then_some(Network { address, bits })
    }

    /// Whether an address is in it. IPv4-mapped addresses count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                let mask = u32::MAX.checked_shl(32 - self.bits).unwrap_or(0);
                (ours.to_bits() ^ theirs.to_bits()) & mask == 0
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => {
                let mask = u128::MAX.checked_shl(128 - self.bits).unwrap_or(0);
                (ours.to_bits() ^ theirs.to_bits()) & mask == 0
            }
            _ => false,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_what_begins_as_it_does() {
        for (network, address, inside) in [
            ("192.0.2.0/24", "192.0.2.9", true),
            ("192.0.2.0/24", "::ffff:192.0.2.9", true),
            ("192.0.2.0/24", "192.0.3.9", false),
            ("fd00::/8", "fd12::1", true),
            ("0.0.0.0/0", "1.2.3.4", true),
            ("::1", "::2", false),
        ] {
            let network = Network::parse(network).unwrap();
            assert_eq!(
                network.contains(address.parse().unwrap()),
                inside,
                "{network} {address}"
            );
        }
        for wrong in ["", "1.2.3", "1.2.3.4/33", "::/x"] {
            assert_eq!(Network::parse(wrong), None, "{wrong}");
        }
    }
}
