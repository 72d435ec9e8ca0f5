//! The invariant CRC (annex A17.4.5.1 of the InfiniBand Architecture Specification).
//!
//! CRC-32 of Ethernet, over 8 bytes of ones, the IP and UDP headers and the packet, in which all
//! fields that routers may change are ones. It is sent least significant byte first.

use core::net::{IpAddr, SocketAddr};
use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of an ICRC.
pub const ICRC_LEN: usize = 4;

const UDP_HEADER_LEN: usize = 8;
const IPV4_HEADER_LEN: usize = 20;
const IPV6_HEADER_LEN: usize = 40;
const UDP: u8 = 17;
/// "Don't fragment", and fragment offset 0.
const DONT_FRAGMENT: u16 = 0x4000;
/// The byte of the BTH that routers may change: FECN, BECN and reserved bits.
const BTH_VARIANT: usize = 4;
/// Most bytes that the ICRC covers up to [`BTH_VARIANT`].
const HEAD_LEN: usize = 8 + IPV6_HEADER_LEN + UDP_HEADER_LEN + BTH_VARIANT + 1;

/// The addresses and ports of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The sender.
    pub source: SocketAddr,
    /// The receiver, or a multicast group.
    pub destination: SocketAddr,
}

/// The ICRC of a packet that begins with its BTH and ends before its ICRC; zero for a packet longer
/// than UDP can carry. The IPv4 identification has no meaning with IPv6.
pub(super) fn icrc(packet: &[u8], ends: &Ends, identification: u16) -> [u8; ICRC_LEN] {
    let udp_len = UDP_HEADER_LEN + packet.len() + ICRC_LEN;
    let (Ok(udp_len), Ok(ip_len)) = (u16::try_from(udp_len), u16::try_from(IPV4_HEADER_LEN + udp_len)) else {
        return [0; ICRC_LEN];
    };
    // One update of the digest costs as much for a few bytes as for a whole header, so the fields
    // in front are gathered first.
    let mut head = Head {
        bytes: [0; HEAD_LEN],
        len: 0,
    };
    head.push(&[0xff; 8]);
    let canonical = |address: SocketAddr| address.ip().to_canonical();
    match (canonical(ends.source), canonical(ends.destination)) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            head.push(&[0x45, 0xff]);
            head.push(&ip_len.to_be_bytes());
            head.push(&identification.to_be_bytes());
            head.push(&DONT_FRAGMENT.to_be_bytes());
            head.push(&[0xff, UDP, 0xff, 0xff]);
            head.push(&source.octets());
            head.push(&destination.octets());
        }
        (source, destination) => {
            head.push(&[0x6f, 0xff, 0xff, 0xff]);
            head.push(&udp_len.to_be_bytes());
            head.push(&[UDP, 0xff]);
            head.push(&mapped(source));
            head.push(&mapped(destination));
        }
    }
    head.push(&ends.source.port().to_be_bytes());
    head.push(&ends.destination.port().to_be_bytes());
    head.push(&udp_len.to_be_bytes());
    head.push(&[0xff; 2]);
    let (before, rest) = packet.split_at(packet.len().min(BTH_VARIANT));
    head.push(before);
    head.push(&[0xff]);
    let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
    digest.update(head.bytes());
    digest.update(rest.get(1..).unwrap_or_default());
    (digest.finalize() as u32).to_le_bytes()
}

/// The bytes that the ICRC covers up to [`BTH_VARIANT`].
struct Head {
    bytes: [u8; HEAD_LEN],
    len: usize,
}

impl Head {
    #[inline]
    fn push(&mut self, field: &[u8]) {
        let end = self.len + field.len();
        self.bytes[self.len..end].copy_from_slice(field);
        self.len = end;
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
