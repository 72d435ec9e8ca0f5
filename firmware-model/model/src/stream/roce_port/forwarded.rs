//! The message by which one member passes a packet to another: the packet, after the addresses that
//! the member's socket reported.
//!
//! ```text
//! magic(4) source port(2) traffic class(1) reserved(1) scope(4) source(16) destination(16) packet
//! ```
//!
//! Numbers are little-endian, IPv4 addresses are mapped. A message comes from another process: what
//! it says is checked as far as a socket would have, and the packet is checked later, as one that
//! the own socket received is.

use crate::stream::datagram::{Incoming, PACKET_ROOM};
use crate::sys::datagrams::scope_of;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use urnic_device::stream::{ip_of, octets_of};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// "urnic" and the version of the message.
const MAGIC: [u8; 4] = *b"urF\x01";
/// A BTH and an ICRC.
const SHORTEST: usize = 16;
/// Bytes before the packet.
pub(super) const HEADER_LEN: usize = size_of::<Layout>();
/// The longest message.
pub(super) const MESSAGE_ROOM: usize = HEADER_LEN + PACKET_ROOM;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    magic: [u8; 4],
    port: U16,
    traffic_class: u8,
    reserved: u8,
    scope: U32,
    source: [u8; 16],
    destination: [u8; 16],
}

/// The part of a message before the packet.
pub(super) fn header(packet: &Incoming) -> [u8; HEADER_LEN] {
    zerocopy::transmute!(Layout {
        magic: MAGIC,
        port: packet.source.port().into(),
        traffic_class: packet.traffic_class,
        reserved: 0,
        scope: scope_of(packet.source).into(),
        source: octets_of(packet.source.ip()),
        destination: octets_of(packet.destination),
    })
}

/// The packet in a message; `None` for a message that no member sends.
pub(super) fn parse(message: &[u8]) -> Option<(Incoming, &[u8])> {
    let (layout, packet) = Layout::ref_from_prefix(message).ok()?;
    let (source, destination) = (ip_of(&layout.source), ip_of(&layout.destination));
    let is_link_local = matches!(source, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let is_valid = layout.magic == MAGIC && layout.reserved == 0 && (layout.scope == 0 || is_link_local);
    let port = layout.port.get();
    let source = match source {
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, layout.scope.get()).into(),
        ip => SocketAddr::new(ip, port),
    };
    let incoming = Incoming {
        at: HEADER_LEN,
        len: packet.len(),
        source,
        destination,
        traffic_class: layout.traffic_class,
    };
    (is_valid && can_be_passed(&incoming)).then_some((incoming, packet))
}

/// Whether a packet may be one of a connection. Others are not passed on, nor taken.
pub(super) fn can_be_passed(packet: &Incoming) -> bool {
    let (source, destination) = (packet.source.ip(), packet.destination);
    packet.source.port() != 0
        && source.is_ipv4() == destination.is_ipv4()
        && [source, destination].into_iter().all(is_of_one_host)
        && (SHORTEST..=PACKET_ROOM).contains(&packet.len)
}

/// Whether an address can be that of one host.
fn is_of_one_host(ip: IpAddr) -> bool {
    !(ip.is_unspecified() || ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(source: SocketAddr, destination: IpAddr, packet: &[u8]) -> Vec<u8> {
        let incoming = Incoming {
            at: 0,
            len: packet.len(),
            source,
            destination,
            traffic_class: 0xb8,
        };
        [&header(&incoming)[..], packet].concat()
    }

    fn usual() -> Vec<u8> {
        message("10.0.0.1:50000".parse().unwrap(), [10, 0, 0, 2].into(), &[7; 20])
    }

    proptest! {
        #[test]
        fn a_packet_arrives_as_it_was_passed_on(
            ips in prop_oneof![
                any::<[[u8; 4]; 2]>().prop_map(|ips| ips.map(IpAddr::from)),
                any::<[[u8; 16]; 2]>().prop_map(|ips| ips.map(|ip| IpAddr::from(ip).to_canonical())),
                any::<[u64; 2]>().prop_map(|ips| ips.map(|ip| {
                    // Link-local.
                    IpAddr::from((0xfe80_u128 << 112 | u128::from(ip)).to_be_bytes())
                })),
            ],
            port in 1_u16..,
            scope: u32,
            traffic_class: u8,
            packet in prop::collection::vec(any::<u8>(), SHORTEST..200),
        ) {
            let [from, destination] = ips;
            prop_assume!(ips.into_iter().all(is_of_one_host) && from.is_ipv4() == destination.is_ipv4());
            let source = match from {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => SocketAddrV6::new(ip, port, 0, scope).into(),
                ip => SocketAddr::new(ip, port),
            };
            let incoming = Incoming { at: 0, len: packet.len(), source, destination, traffic_class };
            let message = [&header(&incoming)[..], &packet].concat();
            let (parsed, bytes) = parse(&message).unwrap();
            prop_assert_eq!(bytes, &packet);
            prop_assert_eq!(
                (parsed.len, parsed.source, parsed.destination, parsed.traffic_class),
                (packet.len(), source, destination, traffic_class)
            );
        }

        #[test]
        fn any_message_that_is_taken_is_one_that_a_member_sends(
            at in 0..HEADER_LEN,
            byte: u8,
            len in 0..HEADER_LEN + 40,
        ) {
            let mut bytes = message("[fe80::1%3]:9".parse().unwrap(), [0xfe; 16].into(), &[1; 40]);
            bytes[HEADER_LEN - 16..HEADER_LEN].copy_from_slice(&"fe80::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
            bytes[at] = byte;
            bytes.truncate(len);
            if let Some((packet, rest)) = parse(&bytes) {
                prop_assert_eq!(&header(&packet)[..], &bytes[..HEADER_LEN]);
                prop_assert_eq!(rest, &bytes[HEADER_LEN..]);
            }
        }
    }

    #[test]
    fn packets_that_no_socket_gives_are_refused() {
        assert!(parse(&usual()).is_some());
        let packet = [7; 20];
        for (source, destination) in [
            ("0.0.0.0:9", "10.0.0.2"),
            ("10.0.0.1:0", "10.0.0.2"),
            ("255.255.255.255:9", "10.0.0.2"),
            ("239.0.0.1:9", "10.0.0.2"),
            ("10.0.0.1:9", "0.0.0.0"),
            ("10.0.0.1:9", "239.0.0.1"),
            ("10.0.0.1:9", "fd00::1"),
            ("[fd00::1]:9", "10.0.0.1"),
            ("[fd00::1]:9", "ff02::1"),
            ("[fd00::1%2]:9", "fd00::2"),
        ] {
            let message = message(source.parse().unwrap(), destination.parse().unwrap(), &packet);
            assert!(parse(&message).is_none(), "{source} to {destination}");
        }
        for len in [0, 1, HEADER_LEN, HEADER_LEN + SHORTEST - 1] {
            assert!(parse(&usual()[..len]).is_none(), "{len}");
        }
        let mut long = usual();
        long.resize(MESSAGE_ROOM + 1, 0);
        assert!(parse(&long).is_none());
        assert!(parse(&long[..MESSAGE_ROOM]).is_some());
    }
}
