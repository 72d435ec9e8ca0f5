//! The IP, TCP and UDP headers of captured packets, with checksums.

use std::net::{IpAddr, SocketAddr};
use urnic_device::stream::octets_of;

/// The maximum payload of a packet: that of IPv4 behind its header and that of TCP (RFC 791 §3.1).
pub(super) const MAX_PAYLOAD: usize = 65_535 - 40;

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;

/// Protocol numbers.
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The options of a SYN: segments as large as possible, and windows in units of 2¹⁴ bytes (RFC 9293
/// §3.7.1, RFC 7323 §2.2), so that no window is ever full.
const SYN_OPTIONS: [u8; 8] = [2, 4, (MAX_PAYLOAD >> 8) as u8, MAX_PAYLOAD as u8, 1, 3, 3, 14];

/// A datagram of UDP without its payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Datagram {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) traffic_class: u8,
}

/// A segment without its payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) sequence: u32,
    pub(super) acknowledged: u32,
    pub(super) flags: u8,
}

/// The sum of RFC 1071, folded but not complemented; every part but the last must have an even
/// length.
fn sum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        let (words, rest) = part.as_chunks::<2>();
        sum += words
            .iter()
            .map(|word| u64::from(u16::from_be_bytes(*word)))
            .sum::<u64>();
        sum += rest.iter().map(|byte| u64::from(*byte) << 8).sum::<u64>();
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Puts the IP header of a packet that carries `carried` bytes of `protocol` into `packet`; returns
/// the sum of the addresses, which the checksum of the protocol covers, too.
fn ip_header(packet: &mut Vec<u8>, ends: (IpAddr, IpAddr), class: u8, protocol: u8, carried: u16) -> u16 {
    match ends {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            // Identification 0, no fragment; 64 hops.
            packet.extend([0x45, class]);
            packet.extend((20 + carried).to_be_bytes());
            packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let checksum = !sum(&[packet]);
            packet[10..12].copy_from_slice(&checksum.to_be_bytes());
            sum(&[&packet[12..20]])
        }
        (from, to) => {
            packet.extend([0x60 | class >> 4, class << 4, 0, 0]);
            packet.extend(carried.to_be_bytes());
            packet.extend([protocol, 64]);
            for ip in [from, to] {
                packet.extend(octets_of(ip));
            }
            sum(&[&packet[8..40]])
        }
    }
}

/// The checksum of `header` and `payload` with the pseudo-header of `protocol` in front.
fn checksum(addresses: u16, protocol: u8, header: &[u8], payload: &[u8]) -> u16 {
    let carried = (header.len() + payload.len()) as u16;
    let pseudo = [addresses.to_be_bytes(), [0, protocol], carried.to_be_bytes()].concat();
    !sum(&[&pseudo, header, payload])
}

impl Datagram {
    /// The headers in front of `payload`, which has at most [`MAX_PAYLOAD`] bytes.
    pub(super) fn headers(&self, payload: &[u8]) -> Vec<u8> {
        let carried = (8 + payload.len()) as u16;
        let ends = (self.from.ip(), self.to.ip());
        let mut packet = Vec::with_capacity(48);
        let addresses = ip_header(&mut packet, ends, self.traffic_class, UDP, carried);
        let udp = packet.len();
        packet.extend(self.from.port().to_be_bytes());
        packet.extend(self.to.port().to_be_bytes());
        packet.extend(carried.to_be_bytes());
        packet.extend([0, 0]);
        // Zero would mean that there is none (RFC 768).
        let checksum = match checksum(addresses, UDP, &packet[udp..], payload) {
            0 => 0xffff,
            checksum => checksum,
        };
        packet[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
        packet
    }
}

impl Segment {
    /// The headers in front of `payload`, which has at most [`MAX_PAYLOAD`] bytes.
    pub(super) fn headers(&self, payload: &[u8]) -> Vec<u8> {
        let options: &[u8] = if self.flags & SYN != 0 { &SYN_OPTIONS } else { &[] };
        let tcp_len = 20 + options.len();
        let carried = (tcp_len + payload.len()) as u16;
        let mut packet = Vec::with_capacity(40 + tcp_len);
        let addresses = ip_header(&mut packet, (self.from.ip(), self.to.ip()), 0, TCP, carried);
        let tcp = packet.len();
        packet.extend(self.from.port().to_be_bytes());
        packet.extend(self.to.port().to_be_bytes());
        packet.extend(self.sequence.to_be_bytes());
        packet.extend(self.acknowledged.to_be_bytes());
        packet.extend([(tcp_len as u8 / 4) << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        packet.extend(options);
        let checksum = checksum(addresses, TCP, &packet[tcp..], payload);
        packet[tcp + 16..tcp + 18].copy_from_slice(&checksum.to_be_bytes());
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment(from: &str, to: &str, flags: u8) -> Segment {
        Segment {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            sequence: 0x0102_0304,
            acknowledged: 0x0506_0708,
            flags,
        }
    }

    #[test]
    fn ipv4() {
        // Checksums worked out by another program.
        let packet = segment("10.0.0.1:1000", "10.0.0.2:2000", PSH | ACK).headers(b"abc");
        let want = "4500002b 00004000 400626cb 0a000001 0a000002 \
                    03e807d0 01020304 05060708 5018ffff bb980000";
        let text: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(text, want.replace(' ', ""));
    }

    #[test]
    fn a_syn_has_options() {
        let packet = segment("[::1]:1", "[::2]:2", SYN).headers(b"");
        assert_eq!(packet.len(), 40 + 28);
        assert_eq!(packet[4..8], [0, 28, 6, 64]);
        assert_eq!(packet[52..54], [0x70, SYN]);
    }

    #[test]
    fn a_datagram() {
        // Checksums worked out by another program.
        let datagram = Datagram {
            from: "10.0.0.1:1000".parse().unwrap(),
            to: "10.0.0.2:2000".parse().unwrap(),
            traffic_class: 4,
        };
        let want = "4504001f 00004000 401126c8 0a000001 0a000002 03e807d0 000b1bbb";
        let text: String = datagram
            .headers(b"abc")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(text, want.replace(' ', ""));
    }

    proptest! {
        #[test]
        fn checksums_of_datagrams_come_out_right(v6: bool, traffic_class: u8, payload in prop::collection::vec(any::<u8>(), 0..100)) {
            let [from, to] = match v6 {
                true => ["[2001:db8::1]:7", "[fe80::2]:65535"],
                false => ["192.0.2.1:7", "198.51.100.254:65535"],
            };
            let datagram = Datagram { from: from.parse().unwrap(), to: to.parse().unwrap(), traffic_class };
            let packet = datagram.headers(&payload);
            let ip = if v6 { 40 } else { 20 };
            let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
            let carried = (8 + payload.len()) as u16;
            let [high, low] = carried.to_be_bytes();
            prop_assert_eq!(packet.len(), ip + 8);
            prop_assert_eq!(&packet[ip + 4..ip + 6], [high, low]);
            prop_assert_eq!(sum(&[addresses, &[0, UDP, high, low], &packet[ip..], &payload]), 0xffff);
        }

        #[test]
        fn checksums_come_out_right(v6: bool, flags: u8, payload in prop::collection::vec(any::<u8>(), 0..100)) {
            let segment = match v6 {
                true => segment("[2001:db8::1]:7", "[fe80::2]:65535", flags),
                false => segment("192.0.2.1:7", "198.51.100.254:65535", flags),
            };
            let packet = segment.headers(&payload);
            let ip = if v6 { 40 } else { 20 };
            let addresses = if v6 { &packet[8..40] } else { &packet[12..20] };
            if !v6 {
                prop_assert_eq!(sum(&[&packet[..20]]), 0xffff);
            }
            let carried = (packet.len() - ip + payload.len()) as u16;
            let [high, low] = carried.to_be_bytes();
            prop_assert_eq!(sum(&[addresses, &[0, TCP, high, low], &packet[ip..], &payload]), 0xffff);
        }
    }
}
