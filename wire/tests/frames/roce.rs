//! Packets of RoCE v2. The bytes of the datagrams come from scapy; the others follow the tables of
//! the specification, and tshark dissects them.

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

const DETH: Deth = Deth {
    qkey: 0x1111_1111,
    source_qpn: 0x13_8800,
};
const HEADER: Header = Header::new(0x17_7000, Psn::new(1), Body::Datagram(DETH, None));

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
    let deth = Deth {
        qkey: 0x8001_0000,
        source_qpn: 0x9c_4000,
    };
    let body = Body::Datagram(deth, Some([0xde, 0xad, 0xbe, 0xef]));
    let with_immediate = Header {
        solicited: true,
        ..Header::new(0x9c_4101, Psn::MAX, body)
    };
    let deth = Deth {
        qkey: 0,
        source_qpn: 1,
    };
    let to_group = Header::new(MULTICAST_QPN, Psn::default(), Body::Datagram(deth, None));
    let vectors: [(Ends, Header, &[u8], &[u8]); 4] = [
        (
            ends("10.1.2.3:5000", "10.1.2.4:6000"),
            HEADER,
            b"hello, datagram!",
            &hex!("6400ffff 00177000 00000001 11111111 00138800 68656c6c6f2c20646174616772616d21 dc96b255"),
        ),
        (
            ends("10.1.2.3:5000", "10.1.2.4:6000"),
            Header {
                psn: Psn::new(2),
                ..HEADER
            },
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
    assert_eq!(changed(0, 0x44), Err(PacketError::Opcode(0x44)));
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

fn any_aeth() -> impl Strategy<Value = Aeth> {
    let nak = prop::sample::select(vec![
        NakCode::PsnSequenceError,
        NakCode::InvalidRequest,
        NakCode::RemoteAccessError,
        NakCode::RemoteOperationalError,
        NakCode::InvalidRdRequest,
    ]);
    let syndrome = prop_oneof![
        (0u8..32).prop_map(|code| Syndrome::Ack(Credits::new(code))),
        (0u8..32).prop_map(Syndrome::RnrNak),
        nak.prop_map(Syndrome::Nak),
    ];
    (syndrome, 0u32..1 << 24).prop_map(|(syndrome, msn)| Aeth { syndrome, msn })
}

fn any_reth() -> impl Strategy<Value = Reth> {
    any::<(u64, u32, u32)>().prop_map(|(address, rkey, length)| Reth {
        address,
        rkey,
        length,
    })
}

fn any_transfer() -> impl Strategy<Value = Transfer> {
    let immediate = any::<Option<Immediate>>;
    prop_oneof![
        Just(Transfer::SendFirst),
        Just(Transfer::SendMiddle),
        immediate().prop_map(Transfer::SendLast),
        immediate().prop_map(Transfer::SendOnly),
        any_reth().prop_map(Transfer::WriteFirst),
        Just(Transfer::WriteMiddle),
        immediate().prop_map(Transfer::WriteLast),
        (any_reth(), immediate()).prop_map(|(reth, immediate)| Transfer::WriteOnly(reth, immediate)),
    ]
}

fn any_request() -> impl Strategy<Value = Request> {
    let atomic = || {
        any::<(u64, u32, u64, u64)>().prop_map(|(address, rkey, swap_or_add, compare)| AtomicEth {
            address,
            rkey,
            swap_or_add,
            compare,
        })
    };
    prop_oneof![
        any_transfer().prop_map(Request::Transfer),
        any::<u32>().prop_map(Request::SendLastInvalidate),
        any::<u32>().prop_map(Request::SendOnlyInvalidate),
        any_reth().prop_map(Request::Read),
        atomic().prop_map(Request::CompareSwap),
        atomic().prop_map(Request::FetchAdd),
    ]
}

fn any_body() -> impl Strategy<Value = Body> {
    let response = prop_oneof![
        any_aeth().prop_map(Response::ReadFirst),
        Just(Response::ReadMiddle),
        any_aeth().prop_map(Response::ReadLast),
        any_aeth().prop_map(Response::ReadOnly),
        any_aeth().prop_map(Response::Acknowledge),
        (any_aeth(), any::<u64>()).prop_map(|(aeth, original)| Response::AtomicAcknowledge(aeth, original)),
    ];
    let datagram = (any::<u32>(), 0u32..1 << 24, any::<Option<Immediate>>());
    prop_oneof![
        any_request().prop_map(Body::Request),
        response.prop_map(Body::Response),
        any_transfer().prop_map(Body::Unreliable),
        datagram.prop_map(|(qkey, source_qpn, immediate)| {
            Body::Datagram(Deth { qkey, source_qpn }, immediate)
        }),
        Just(Body::CongestionNotification),
    ]
}

fn any_header() -> impl Strategy<Value = Header> {
    (any::<([bool; 5], u16)>(), 0u32..1 << 24, any::<u32>(), any_body()).prop_map(
        |((flags, pkey), destination_qpn, psn, body)| {
            let [solicited, migrated, fecn, becn, ack_request] = flags;
            Header {
                solicited,
                migrated,
                pkey,
                fecn,
                becn,
                destination_qpn,
                ack_request,
                psn: Psn::new(psn),
                body,
            }
        },
    )
}

/// A header, and a payload if its opcode has one.
fn any_packet(longest: usize) -> impl Strategy<Value = (Header, Vec<u8>)> {
    let payload = proptest::collection::vec(any::<u8>(), 0..longest);
    (any_header(), payload).prop_map(|(header, mut payload)| {
        if !header.body.opcode().has_payload() {
            payload.clear();
        }
        (header, payload)
    })
}

proptest! {
    #[test]
    fn an_emitted_packet_is_parsed(
        (header, payload) in any_packet(4100),
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
        (header, payload) in any_packet(200),
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
