//! The contents of a capture file: the blocks of pcapng that we write (sections, interfaces,
//! packets: draft-ietf-opsawg-pcapng §4), and the packets' headers.

use std::net::{IpAddr, SocketAddr};
use urnic_device::stream::octets_of;

/// Packets begin with an IP header (`LINKTYPE_RAW`).
const RAW_IP: u16 = 101;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;

const END_OF_OPTIONS: u16 = 0;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_DESCRIPTION: u16 = 3;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;

/// The direction of a packet at its interface, as the low bits of `epb_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    In = 1,
    Out = 2,
}

/// The interface, time and direction of a packet; the time in nanoseconds since 1970 began.
#[derive(Debug, Clone, Copy)]
pub(super) struct PacketMeta {
    pub(super) interface: u32,
    pub(super) at: u64,
    /// `None` = both.
    pub(super) way: Option<Way>,
}

/// Adds a block with the body that `body` writes.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    // The total length, which includes padding and both length fields, is at either end.
    pad(out, start);
    let total = ((out.len() - start + 4) as u32).to_le_bytes();
    out.extend(total);
    out[start + 4..start + 8].copy_from_slice(&total);
}

/// Zeroes up to a multiple of 4 from `start` on.
fn pad(out: &mut Vec<u8>, start: usize) {
    let len = (out.len() - start).next_multiple_of(4);
    out.resize(start + len, 0);
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    let start = out.len();
    out.extend(value);
    pad(out, start);
}

/// Begins a section, written by this application.
pub(super) fn section(out: &mut Vec<u8>, application: &str) {
    block(out, SECTION_HEADER, |out| {
        // The byte order, version 1.0, and an unspecified length.
        out.extend(0x1a2b_3c4d_u32.to_le_bytes());
        out.extend([1, 0, 0, 0]);
        out.extend([0xff; 8]);
        option(out, SHB_USERAPPL, application.as_bytes());
        option(out, END_OF_OPTIONS, &[]);
    });
}

/// Describes the section's next interface, of IP packets with times in nanoseconds.
pub(super) fn interface(out: &mut Vec<u8>, name: &str, description: &str) {
    block(out, INTERFACE_DESCRIPTION, |out| {
        out.extend(RAW_IP.to_le_bytes());
        // Reserved, and no limit to a packet's length.
        out.extend([0; 6]);
        option(out, IF_NAME, name.as_bytes());
        option(out, IF_DESCRIPTION, description.as_bytes());
        option(out, IF_TSRESOL, &[9]);
        option(out, END_OF_OPTIONS, &[]);
    });
}

/// Adds a packet in two parts.
pub(super) fn packet(out: &mut Vec<u8>, meta: PacketMeta, headers: &[u8], payload: &[u8]) {
    block(out, ENHANCED_PACKET, |out| {
        let len = (headers.len() + payload.len()) as u32;
        out.extend(meta.interface.to_le_bytes());
        out.extend(((meta.at >> 32) as u32).to_le_bytes());
        out.extend((meta.at as u32).to_le_bytes());
        // All bytes were captured.
        out.extend(len.to_le_bytes());
        out.extend(len.to_le_bytes());
        let start = out.len();
        out.extend(headers);
        out.extend(payload);
        pad(out, start);
        if let Some(way) = meta.way {
            option(out, EPB_FLAGS, &(way as u32).to_le_bytes());
            option(out, END_OF_OPTIONS, &[]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The blocks of a file: kind and body.
    fn blocks(mut file: &[u8]) -> Vec<(u32, &[u8])> {
        let word = |at: &[u8]| u32::from_le_bytes(*at.first_chunk().unwrap());
        let mut found = Vec::new();
        while !file.is_empty() {
            let total = word(&file[4..]) as usize;
            assert_eq!(total % 4, 0);
            assert_eq!(word(&file[total - 4..]) as usize, total);
            found.push((word(file), &file[8..total - 4]));
            file = &file[total..];
        }
        found
    }

    #[test]
    fn a_section_has_its_byte_order_and_its_writer() {
        let mut file = Vec::new();
        section(&mut file, "urnic");
        let [(kind, body)] = blocks(&file)[..] else {
            panic!("one block")
        };
        assert_eq!(kind, SECTION_HEADER);
        assert_eq!(body[..8], [0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0]);
        assert_eq!(body[16..], *b"\x04\0\x05\0urnic\0\0\0\0\0\0\0");
    }

    #[test]
    fn an_interface_declares_times_in_nanoseconds() {
        let mut file = Vec::new();
        interface(&mut file, "abcd", "e");
        let [(kind, body)] = blocks(&file)[..] else {
            panic!("one block")
        };
        assert_eq!(kind, INTERFACE_DESCRIPTION);
        assert_eq!(body[..8], [101, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            body[8..],
            *b"\x02\0\x04\0abcd\x03\0\x01\0e\0\0\0\x09\0\x01\0\x09\0\0\0\0\0\0\0"
        );
    }

    proptest! {
        #[test]
        fn packets_of_any_length_are_found_again(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20), at: u64, way in prop::sample::select(vec![None, Some(Way::In), Some(Way::Out)])) {
            let mut file = Vec::new();
            for payload in &payloads {
                packet(&mut file, PacketMeta { interface: 3, at, way }, b"head", payload);
            }
            let found = blocks(&file);
            prop_assert_eq!(found.len(), payloads.len());
            for ((kind, body), payload) in found.into_iter().zip(payloads) {
                let word = |n: usize| u32::from_le_bytes(*body[4 * n..].first_chunk().unwrap());
                prop_assert_eq!((kind, word(0)), (ENHANCED_PACKET, 3));
                prop_assert_eq!(u64::from(word(1)) << 32 | u64::from(word(2)), at);
                let len = 4 + payload.len();
                prop_assert_eq!((word(3) as usize, word(4) as usize), (len, len));
                prop_assert_eq!(&body[20..24], b"head");
                prop_assert_eq!(&body[24..20 + len], &payload[..]);
                let (padding, options) = body[20 + len..].split_at(len.next_multiple_of(4) - len);
                prop_assert!(padding.iter().all(|byte| *byte == 0));
                let expected = match way {
                    None => vec![],
                    Some(way) => vec![2, 0, 4, 0, way as u8, 0, 0, 0, 0, 0, 0, 0],
                };
                prop_assert_eq!(options, &expected[..]);
            }
        }
    }
}

// The IP, TCP and UDP headers of captured packets, with checksums.

/// The maximum payload of a packet: that of IPv4 after its header and that of TCP (RFC 791 §3.1).
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
    /// The identification in an IPv4 header.
    pub(super) identification: u16,
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

/// What the IP headers of packets have in common.
struct Ip {
    ends: (IpAddr, IpAddr),
    class: u8,
    identification: u16,
    protocol: u8,
}

/// Puts the IP header of a packet that carries `carried` bytes into `packet`; returns the sum of
/// the addresses, which the checksum of the protocol covers, too.
fn ip_header(packet: &mut Vec<u8>, ip: &Ip, carried: u16) -> u16 {
    let Ip { class, protocol, .. } = *ip;
    match ip.ends {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend([0x45, class]);
            packet.extend((20 + carried).to_be_bytes());
            packet.extend(ip.identification.to_be_bytes());
            // No fragment; 64 hops.
            packet.extend([0x40, 0, 64, protocol, 0, 0]);
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
        let mut packet = Vec::with_capacity(48);
        let ip = Ip {
            ends: (self.from.ip(), self.to.ip()),
            class: self.traffic_class,
            identification: self.identification,
            protocol: UDP,
        };
        let addresses = ip_header(&mut packet, &ip, carried);
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
        let ip = Ip {
            ends: (self.from.ip(), self.to.ip()),
            class: 0,
            identification: 0,
            protocol: TCP,
        };
        let addresses = ip_header(&mut packet, &ip, carried);
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
mod packet_tests {
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
            identification: 0,
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
        fn checksums_of_datagrams_come_out_right(v6: bool, traffic_class: u8, identification: u16, payload in prop::collection::vec(any::<u8>(), 0..100)) {
            let [from, to] = match v6 {
                true => ["[2001:db8::1]:7", "[fe80::2]:65535"],
                false => ["192.0.2.1:7", "198.51.100.254:65535"],
            };
            let datagram = Datagram { from: from.parse().unwrap(), to: to.parse().unwrap(), traffic_class, identification };
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
