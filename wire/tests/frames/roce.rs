//! Datagrams of RoCE v2. The bytes of the vectors come from scapy.

use core::net::SocketAddr;
use hex_literal::hex;
use proptest::prelude::*;
use urnic_wire::roce::*;

fn ends(source: &str, destination: &str) -> Ends {
    Ends {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
    }
}

const HEADER: Header = Header {
    solicited: false,
    pkey: DEFAULT_PKEY,
    destination_qpn: 0x17_7000,
    psn: 1,
    qkey: 0x1111_1111,
    source_qpn: 0x13_8800,
    immediate: None,
};

fn emitted(header: &Header, payload: &[u8], ends: &Ends) -> Vec<u8> {
    let mut packet = vec![0xaa; MAX_HEADER_LEN + payload.len() + MAX_TRAILER_LEN];
    let at = header.emit(&mut packet, payload.len());
    packet[at..at + payload.len()].copy_from_slice(payload);
    let len = seal(&mut packet, at + payload.len(), ends);
    packet.truncate(len);
    packet
}

#[test]
fn ud_01_packets_have_the_bytes_of_the_specification() {
    let with_immediate = Header {
        solicited: true,
        destination_qpn: 0x9c_4101,
        psn: 0xff_ffff,
        qkey: 0x8001_0000,
        source_qpn: 0x9c_4000,
        immediate: Some([0xde, 0xad, 0xbe, 0xef]),
        ..HEADER
    };
    let to_group = Header {
        destination_qpn: MULTICAST_QPN,
        psn: 0,
        qkey: 0,
        source_qpn: 1,
        ..HEADER
    };
    let vectors: [(Ends, Header, &[u8], &[u8]); 4] = [
        (
            ends("10.1.2.3:5000", "10.1.2.4:6000"),
            HEADER,
            b"hello, datagram!",
            &hex!("6400ffff 00177000 00000001 11111111 00138800 68656c6c6f2c20646174616772616d21 dc96b255"),
        ),
        (
            ends("10.1.2.3:5000", "10.1.2.4:6000"),
            Header { psn: 2, ..HEADER },
            b"hello",
            &hex!("6430ffff 00177000 00000002 11111111 00138800 68656c6c6f 000000 d0f078d8"),
        ),
        (
            ends("192.0.2.1:40000", "192.0.2.9:40001"),
            with_immediate,
            b"ab",
            &hex!("65a0ffff 009c4101 00ffffff 80010000 009c4000 deadbeef 6162 0000 cfbf3dff"),
        ),
        (
            ends("127.0.0.1:4791", "127.0.0.1:4791"),
            to_group,
            b"",
            &hex!("6400ffff 00ffffff 00000000 00000000 00000001 3be3e986"),
        ),
    ];
    for (ends, header, payload, packet) in vectors {
        assert_eq!(emitted(&header, payload, &ends), packet, "{header}");
        assert_eq!(parse(packet, &ends), Ok((header, payload)), "{header}");
    }
}

#[test]
fn ud_02_other_packets_are_refused() {
    let ends = ends("[2001:db8::1]:5000", "[2001:db8::2]:6000");
    let packet = emitted(&HEADER, b"hello", &ends);
    let changed = |at: usize, byte: u8| {
        let mut packet = packet.clone();
        packet[at] = byte;
        parse(&packet, &ends).map(|_| ())
    };
    assert_eq!(changed(0, 0x04), Err(PacketError::Opcode(0x04)));
    assert_eq!(changed(1, 0x31), Err(PacketError::Version(1)));
    assert_eq!(changed(22, 0), Err(PacketError::Icrc));
    // Routers may change this byte.
    assert_eq!(changed(4, 0xc0), Ok(()));
    for len in 0..24 {
        assert_eq!(parse(&packet[..len], &ends), Err(PacketError::Length(len)));
    }
    let with_immediate_only = &hex!("6500ffff 00177000 00000001 11111111 00138800 00000000");
    assert_eq!(
        parse(with_immediate_only, &ends),
        Err(PacketError::Length(with_immediate_only.len()))
    );
    let pad_without_payload = &hex!("6430ffff 00177000 00000001 11111111 00138800 00000000");
    assert_eq!(
        parse(pad_without_payload, &ends),
        Err(PacketError::Length(pad_without_payload.len()))
    );
}

#[test]
fn ud_03_the_icrc_covers_the_addresses() {
    let packet = emitted(&HEADER, b"hello", &ends("10.1.2.3:5000", "10.1.2.4:6000"));
    for (source, destination) in [
        ("10.1.2.9:5000", "10.1.2.4:6000"),
        ("10.1.2.3:5000", "10.1.2.5:6000"),
        ("10.1.2.3:5001", "10.1.2.4:6000"),
        ("10.1.2.3:5000", "10.1.2.4:6001"),
    ] {
        assert_eq!(parse(&packet, &ends(source, destination)), Err(PacketError::Icrc));
    }
    let mapped = ends("[::ffff:10.1.2.3]:5000", "[::ffff:10.1.2.4]:6000");
    assert!(parse(&packet, &mapped).is_ok());
}

#[test]
fn ud_04_the_grh_is_an_ipv6_header_or_an_ipv4_header_at_its_end() {
    let v4 = grh([10, 1, 2, 3].into(), [10, 1, 2, 4].into(), 40, 64, 0xfc);
    assert_eq!(
        v4,
        hex!("0000000000000000000000000000000000000000 45fc0044 00004000 401121a5 0a010203 0a010204")
    );
    let v6 = grh(
        "2001:db8::1".parse().unwrap(),
        "2001:db8::2".parse().unwrap(),
        40,
        64,
        0xfc,
    );
    assert_eq!(
        v6,
        hex!("6fc00000 0030 11 40 20010db8000000000000000000000001 20010db8000000000000000000000002")
    );
}

fn any_ends() -> impl Strategy<Value = Ends> {
    let v4 = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<(u16, u16)>()).prop_map(|(a, b, (p, q))| Ends {
        source: SocketAddr::from((a, p)),
        destination: SocketAddr::from((b, q)),
    });
    let v6 = (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<(u16, u16)>()).prop_map(|(a, b, (p, q))| Ends {
        source: SocketAddr::from((a, p)),
        destination: SocketAddr::from((b, q)),
    });
    prop_oneof![v4, v6]
}

fn any_header() -> impl Strategy<Value = Header> {
    (
        any::<(bool, u16, u32)>(),
        0u32..1 << 24,
        0u32..1 << 24,
        0u32..1 << 24,
        any::<Option<[u8; 4]>>(),
    )
        .prop_map(
            |((solicited, pkey, qkey), destination_qpn, psn, source_qpn, immediate)| Header {
                solicited,
                pkey,
                destination_qpn,
                psn,
                qkey,
                source_qpn,
                immediate,
            },
        )
}

proptest! {
    #[test]
    fn an_emitted_datagram_is_parsed(
        header in any_header(),
        payload in proptest::collection::vec(any::<u8>(), 0..4100),
        ends in any_ends(),
    ) {
        let packet = emitted(&header, &payload, &ends);
        prop_assert_eq!(packet.len() % 4, 0);
        prop_assert_eq!(parse(&packet, &ends), Ok((header, payload.as_slice())));
        prop_assert!(!header.to_string().contains('\n'));
        // The beginning of a packet, as the network returns it, has the PSN.
        prop_assert_eq!(psn_of(&packet), Some(header.psn));
        prop_assert_eq!(psn_of(&packet[..12]), Some(header.psn));
        prop_assert_eq!(psn_of(&packet[..11]), None);
    }

    #[test]
    fn no_bit_may_flip(
        header in any_header(),
        payload in proptest::collection::vec(any::<u8>(), 0..200),
        ends in any_ends(),
        bit in any::<prop::sample::Index>(),
    ) {
        let mut packet = emitted(&header, &payload, &ends);
        let bit = bit.index(packet.len() * 8);
        packet[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(bit / 8 == 4 || parse(&packet, &ends).is_err());
    }

    #[test]
    fn any_bytes_may_arrive(bytes in proptest::collection::vec(any::<u8>(), 0..100), ends in any_ends()) {
        let _ = parse(&bytes, &ends);
    }
}
