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
const UDP: u8 = 17;
/// "Don't fragment", and fragment offset 0.
const DONT_FRAGMENT: u16 = 0x4000;
/// The byte of the BTH that routers may change: FECN, BECN and reserved bits.
const BTH_VARIANT: usize = 4;

/// The addresses and ports of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The sender.
    pub source: SocketAddr,
    /// The receiver, or a multicast group.
    pub destination: SocketAddr,
}

/// The ICRC of a packet that begins with its BTH and ends before its ICRC; zero for a packet longer
/// than UDP can carry.
pub(super) fn icrc(packet: &[u8], ends: &Ends) -> [u8; ICRC_LEN] {
    let udp_len = UDP_HEADER_LEN + packet.len() + ICRC_LEN;
    let (Ok(udp_len), Ok(ip_len)) = (u16::try_from(udp_len), u16::try_from(IPV4_HEADER_LEN + udp_len)) else {
        return [0; ICRC_LEN];
    };
    let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
    digest.update(&[0xff; 8]);
    let canonical = |address: SocketAddr| address.ip().to_canonical();
    match (canonical(ends.source), canonical(ends.destination)) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            digest.update(&[0x45, 0xff]);
            digest.update(&ip_len.to_be_bytes());
            digest.update(&[0, 0]);
            digest.update(&DONT_FRAGMENT.to_be_bytes());
            digest.update(&[0xff, UDP, 0xff, 0xff]);
            digest.update(&source.octets());
            digest.update(&destination.octets());
        }
        (source, destination) => {
            digest.update(&[0x6f, 0xff, 0xff, 0xff]);
            digest.update(&udp_len.to_be_bytes());
            digest.update(&[UDP, 0xff]);
            digest.update(&mapped(source));
            digest.update(&mapped(destination));
        }
    }
    digest.update(&ends.source.port().to_be_bytes());
    digest.update(&ends.destination.port().to_be_bytes());
    digest.update(&udp_len.to_be_bytes());
    digest.update(&[0xff; 2]);
    let (before, rest) = packet.split_at(packet.len().min(BTH_VARIANT));
    digest.update(before);
    digest.update(&[0xff]);
    digest.update(rest.get(1..).unwrap_or_default());
    (digest.finalize() as u32).to_le_bytes()
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
