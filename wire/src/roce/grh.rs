//! The global route header in front of a received datagram.

use core::net::IpAddr;

/// Bytes in front of the payload in the buffer of a UD receive.
pub const GRH_LEN: usize = 40;

const UDP_HEADER_LEN: usize = 8;
const IPV4_HEADER_LEN: usize = 20;
const UDP: u8 = 17;

/// The 40 bytes in front of the payload of a receive (annex A17.4.5 of the InfiniBand Architecture
/// Specification): the IPv6 header; or 20 bytes without meaning, here zeroes, and the IPv4 header.
/// `packet_len` is the length from the BTH to the ICRC. The hop limit is that of the sender.
pub fn grh(
    source: IpAddr,
    destination: IpAddr,
    packet_len: usize,
    hop_limit: u8,
    traffic_class: u8,
) -> [u8; GRH_LEN] {
    let mut header = [0; GRH_LEN];
    let udp_len = (UDP_HEADER_LEN + packet_len) as u16;
    match (source.to_canonical(), destination.to_canonical()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ipv4 = &mut header[GRH_LEN - IPV4_HEADER_LEN..];
            (ipv4[0], ipv4[1]) = (0x45, traffic_class);
            ipv4[2..4].copy_from_slice(&(IPV4_HEADER_LEN as u16).wrapping_add(udp_len).to_be_bytes());
            ipv4[6] = 0x40;
            (ipv4[8], ipv4[9]) = (hop_limit, UDP);
            ipv4[12..16].copy_from_slice(&source.octets());
            ipv4[16..].copy_from_slice(&destination.octets());
            let sum = checksum(ipv4);
            ipv4[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (source, destination) => {
            let octets = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            (header[0], header[1]) = (0x60 | traffic_class >> 4, traffic_class << 4);
            header[4..6].copy_from_slice(&udp_len.to_be_bytes());
            (header[6], header[7]) = (UDP, hop_limit);
            header[8..24].copy_from_slice(&octets(source));
            header[24..].copy_from_slice(&octets(destination));
        }
    }
    header
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| match pair {
        [high, low] => u32::from(u16::from_be_bytes([*high, *low])),
        _ => 0,
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
