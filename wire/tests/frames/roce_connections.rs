//! The packets of RoCE v2's connections, from the tables of the InfiniBand Architecture
//! Specification.

use core::net::SocketAddr;
use hex_literal::hex;
use std::io::Write;
use std::process::Command;
use urnic_wire::roce::*;

const RETH: Reth = Reth {
    address: 0x0123_4567_89ab_cdef,
    rkey: 0x1122_3344,
    length: 5,
};
const ATOMIC: AtomicEth = AtomicEth {
    address: 0x0123_4567_89ab_cdef,
    rkey: 0x1122_3344,
    swap_or_add: 7,
    compare: 9,
};
const IMMEDIATE: Immediate = [0xde, 0xad, 0xbe, 0xef];

const fn acknowledged(syndrome: Syndrome) -> Aeth {
    Aeth {
        syndrome,
        msn: 0x0a0b0c,
    }
}

const ACK: Aeth = acknowledged(Syndrome::Ack(Credits::INVALID));

fn ends() -> Ends {
    Ends {
        source: SocketAddr::from(([10, 1, 2, 3], 49152)),
        destination: SocketAddr::from(([10, 1, 2, 4], UDP_PORT)),
    }
}

fn sent(transfer: Transfer) -> Body {
    Body::Request(Request::Transfer(transfer))
}

/// A body, its opcode, and the bytes of its extended headers.
type Vector = (Body, u8, &'static [u8]);

const RETH_BYTES: [u8; 16] = hex!("0123456789abcdef 11223344 00000005");
const RETH_AND_IMMEDIATE: [u8; 20] = hex!("0123456789abcdef 11223344 00000005 deadbeef");
const ATOMIC_BYTES: [u8; 28] = hex!("0123456789abcdef 11223344 0000000000000007 0000000000000009");

/// Sends and Writes, by their opcode of a reliable connection.
const TRANSFERS: [(Transfer, u8, &[u8]); 12] = [
    (Transfer::SendFirst, 0x00, &[]),
    (Transfer::SendMiddle, 0x01, &[]),
    (Transfer::SendLast(None), 0x02, &[]),
    (Transfer::SendLast(Some(IMMEDIATE)), 0x03, &IMMEDIATE),
    (Transfer::SendOnly(None), 0x04, &[]),
    (Transfer::SendOnly(Some(IMMEDIATE)), 0x05, &IMMEDIATE),
    (Transfer::WriteFirst(RETH), 0x06, &RETH_BYTES),
    (Transfer::WriteMiddle, 0x07, &[]),
    (Transfer::WriteLast(None), 0x08, &[]),
    (Transfer::WriteLast(Some(IMMEDIATE)), 0x09, &IMMEDIATE),
    (Transfer::WriteOnly(RETH, None), 0x0a, &RETH_BYTES),
    (
        Transfer::WriteOnly(RETH, Some(IMMEDIATE)),
        0x0b,
        &RETH_AND_IMMEDIATE,
    ),
];

const REQUESTS: [(Request, u8, &[u8]); 5] = [
    (Request::Read(RETH), 0x0c, &RETH_BYTES),
    (Request::CompareSwap(ATOMIC), 0x13, &ATOMIC_BYTES),
    (Request::FetchAdd(ATOMIC), 0x14, &ATOMIC_BYTES),
    (Request::SendLastInvalidate(0x1122_3344), 0x16, &hex!("11223344")),
    (Request::SendOnlyInvalidate(0x1122_3344), 0x17, &hex!("11223344")),
];

const RESPONSES: [(Response, u8, &[u8]); 12] = [
    (Response::ReadFirst(ACK), 0x0d, &hex!("1f0a0b0c")),
    (Response::ReadMiddle, 0x0e, &[]),
    (Response::ReadLast(ACK), 0x0f, &hex!("1f0a0b0c")),
    (Response::ReadOnly(ACK), 0x10, &hex!("1f0a0b0c")),
    (Response::Acknowledge(ACK), 0x11, &hex!("1f0a0b0c")),
    (
        Response::Acknowledge(acknowledged(Syndrome::RnrNak(12))),
        0x11,
        &hex!("2c0a0b0c"),
    ),
    (nak(NakCode::PsnSequenceError), 0x11, &hex!("600a0b0c")),
    (nak(NakCode::InvalidRequest), 0x11, &hex!("610a0b0c")),
    (nak(NakCode::RemoteAccessError), 0x11, &hex!("620a0b0c")),
    (nak(NakCode::RemoteOperationalError), 0x11, &hex!("630a0b0c")),
    (nak(NakCode::InvalidRdRequest), 0x11, &hex!("640a0b0c")),
    (
        Response::AtomicAcknowledge(ACK, 0x8877_6655_4433_2211),
        0x12,
        &hex!("1f0a0b0c 8877665544332211"),
    ),
];

const fn nak(code: NakCode) -> Response {
    Response::Acknowledge(acknowledged(Syndrome::Nak(code)))
}

fn vectors() -> Vec<Vector> {
    let reliable = TRANSFERS.map(|(transfer, opcode, bytes)| (sent(transfer), opcode, bytes));
    // Those of an unreliable connection differ by the service.
    let unreliable =
        TRANSFERS.map(|(transfer, opcode, bytes)| (Body::Unreliable(transfer), 0x20 | opcode, bytes));
    let requests = REQUESTS.map(|(request, opcode, bytes)| (Body::Request(request), opcode, bytes));
    let responses = RESPONSES.map(|(response, opcode, bytes)| (Body::Response(response), opcode, bytes));
    let congestion: Vector = (Body::CongestionNotification, 0x81, &[0; 16]);
    let all = reliable
        .into_iter()
        .chain(requests)
        .chain(responses)
        .chain(unreliable);
    all.chain([congestion]).collect()
}

fn emitted(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0xaa; MAX_HEADER_LEN + payload.len() + MAX_TRAILER_LEN];
    let at = header.emit(&mut packet, payload.len());
    packet[at..at + payload.len()].copy_from_slice(payload);
    let len = seal(&mut packet, at + payload.len(), &ends());
    packet.truncate(len);
    packet
}

/// The header and payload of a vector.
fn packet(body: Body) -> (Header, &'static [u8]) {
    let header = Header {
        ack_request: true,
        migrated: true,
        ..Header::new(0x11, Psn::new(0x0102_0304), body)
    };
    let payload: &[u8] = match body.opcode().has_payload() {
        true => b"hello",
        false => b"",
    };
    (header, payload)
}

#[test]
fn connections_have_the_bytes_of_the_specification() {
    for (body, opcode, extended) in vectors() {
        let (header, payload) = packet(body);
        let bytes = emitted(&header, payload);
        let flags = if payload.is_empty() { 0x40 } else { 0x70 };
        let bth = [opcode, flags, 0xff, 0xff, 0, 0, 0, 0x11, 0x80, 2, 3, 4];
        let pad: &[u8] = if payload.is_empty() { b"" } else { &[0; 3] };
        let expected = [&bth, extended, payload, pad].concat();
        assert_eq!(bytes[..bytes.len() - ICRC_LEN], expected, "{header}");
        assert_eq!(parse(&bytes, &ends()), Ok((header, payload)), "{header}");
    }
    let opcodes: std::collections::BTreeSet<_> = vectors().iter().map(|vector| vector.1).collect();
    let known = Opcode::ALL.iter().map(|opcode| opcode.value());
    let connected = known.filter(|value| !matches!(value, 0x64 | 0x65));
    assert!(opcodes.into_iter().eq(connected), "each opcode has a vector");
}

#[test]
fn the_opcode_table_agrees_with_itself() {
    for value in 0..=u8::MAX {
        let Some(opcode) = Opcode::new(value) else {
            continue;
        };
        assert_eq!(opcode.value(), value);
        let service = match value >> 5 {
            0 => Service::ReliableConnection,
            1 => Service::UnreliableConnection,
            3 => Service::UnreliableDatagram,
            _ => Service::CongestionNotification,
        };
        assert_eq!(opcode.service(), service, "{opcode}");
        for (word, position) in [
            ("First", Position::First),
            ("Middle", Position::Middle),
            ("Last", Position::Last),
        ] {
            assert_eq!(
                opcode.name().contains(word),
                opcode.position() == position,
                "{opcode}"
            );
        }
    }
    assert_eq!(Opcode::ALL.len(), 23 + 12 + 2 + 1);
    for unknown in [0x15, 0x18, 0x2c, 0x40, 0x66, 0x80, 0xff] {
        assert_eq!(Opcode::new(unknown), None);
    }
}

#[test]
fn malformed_packets_of_connections_are_refused() {
    for (body, _, extended) in vectors() {
        let (header, payload) = packet(body);
        let bytes = emitted(&header, payload);
        for len in 0..12 + extended.len() + ICRC_LEN {
            assert_eq!(
                parse(&bytes[..len], &ends()),
                Err(PacketError::Length(len)),
                "{header}"
            );
        }
        // Four bytes more are a payload, which only some opcodes permit.
        let long = [&bytes[..bytes.len() - ICRC_LEN], &[0; 4 + ICRC_LEN]].concat();
        let error = match body.opcode().has_payload() {
            true => PacketError::Icrc,
            false => PacketError::Length(long.len()),
        };
        assert_eq!(parse(&long, &ends()), Err(error), "{header}");
        let unaligned = [&bytes[..], &[0]].concat();
        assert_eq!(
            parse(&unaligned, &ends()),
            Err(PacketError::Length(unaligned.len()))
        );
        // A pad, where there is nothing to pad.
        let mut padded = bytes.clone();
        padded[1] = 0x70;
        if payload.is_empty() {
            assert_eq!(parse(&padded, &ends()), Err(PacketError::Length(padded.len())));
        }
    }
    let (header, _) = packet(Body::Response(Response::Acknowledge(ACK)));
    for reserved in [0x40, 0x5f, 0x65, 0x7f, 0x80, 0xff] {
        let mut bytes = emitted(&header, b"");
        bytes[12] = reserved;
        assert_eq!(parse(&bytes, &ends()), Err(PacketError::Syndrome(reserved)));
    }
}

#[test]
fn reserved_bits_have_no_meaning() {
    let (header, payload) = packet(sent(Transfer::SendOnly(None)));
    let mut bytes = emitted(&header, payload);
    assert_eq!((bytes[4], bytes[8]), (0, 0x80));
    bytes[4] |= 0x3f;
    bytes[8] |= 0x7f;
    let len = bytes.len() - ICRC_LEN - 3;
    let len = seal(&mut bytes, len + 3, &ends());
    assert_eq!(parse(&bytes[..len], &ends()), Ok((header, payload)));
}

#[test]
fn congestion_bits_are_read_and_are_not_protected() {
    let (header, payload) = packet(sent(Transfer::SendOnly(None)));
    let mut bytes = emitted(&header, payload);
    bytes[4] = 0xc0;
    let marked = Header {
        fecn: true,
        becn: true,
        ..header
    };
    assert_eq!(parse(&bytes, &ends()), Ok((marked, payload)));
    assert_eq!(emitted(&marked, payload), bytes);
}

#[test]
fn packets_of_connections_are_one_line() {
    for (body, expected) in [
        (
            sent(Transfer::WriteOnly(RETH, Some(IMMEDIATE))),
            "RC RDMA WRITE Only with Immediate to qp 0x000011, psn 131844, address 0x123456789abcdef, \
             rkey 0x11223344, length 5, immediate 0xdeadbeef, ack requested",
        ),
        (
            Body::Response(Response::Acknowledge(acknowledged(Syndrome::RnrNak(12)))),
            "RC Acknowledge to qp 0x000011, psn 131844, RNR NAK, timer 12, msn 658188, ack requested",
        ),
        (
            Body::Response(Response::AtomicAcknowledge(
                acknowledged(Syndrome::Ack(Credits::new(7))),
                3,
            )),
            "RC ATOMIC Acknowledge to qp 0x000011, psn 131844, ACK, credits 12, msn 658188, original 3, \
             ack requested",
        ),
    ] {
        assert_eq!(packet(body).0.to_string(), expected);
    }
}

#[test]
fn timers_have_the_times_of_the_tables() {
    let hundredths_of_ms = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    for (code, time) in (0..).zip(hundredths_of_ms) {
        assert_eq!(rnr_timer_ns(code), time * 10_000, "code {code}");
    }
    assert_eq!(local_ack_timeout_ns(0), None);
    assert_eq!(local_ack_timeout_ns(1), Some(8192));
    assert_eq!(local_ack_timeout_ns(14), Some(67_108_864));
    assert_eq!(local_ack_timeout_ns(31), Some(4096 << 31));
    let receives = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48];
    for (code, receives) in (0..).zip(receives) {
        assert_eq!(Credits::new(code).receives(), Some(receives));
    }
    assert_eq!(Credits::new(30).receives(), Some(32768));
    assert_eq!(Credits::INVALID.receives(), None);
}

#[test]
fn sequence_numbers_are_a_circle_of_24_bits() {
    assert_eq!(Psn::MAX.after(1), Psn::default());
    assert_eq!(Psn::new(0x0100_0001), Psn::new(1));
    assert_eq!(Psn::new(1).since(Psn::MAX), 2);
    assert_eq!(Psn::MAX.since(Psn::new(1)), -2);
    assert_eq!(Psn::new(0x7f_ffff).since(Psn::default()), 0x7f_ffff);
    assert_eq!(Psn::new(0x80_0000).since(Psn::default()), -0x80_0000);
    assert_eq!(Psn::new(5).after(u32::MAX), Psn::new(4));
}

/// Packets of Linux's rdma_rxe (6.1), which numbers them by the IPv4 identification.
#[test]
fn packets_with_an_identification_are_taken_if_it_explains_the_icrc() {
    let ends = Ends {
        source: SocketAddr::from(([10, 0, 2, 15], 51175)),
        destination: SocketAddr::from(([10, 0, 2, 2], UDP_PORT)),
    };
    // Their identifications are 0xfb6e, 0xfb6f and 0xfb77.
    let packets: [&[u8]; 3] = [
        &hex!("0c00ffff 00000077 80000000 00007f0000000010 00001234 00000000 7d01c50a"),
        &hex!(
            "1400ffff 00000077 80000001 00007f0000000000 00001234 0000000000000005 0000000000000000 cde4fd10"
        ),
        &hex!(
            "1400ffff 00000077 8000000b 00007f0000000000 00001234 0000000000000005 0000000000000000 0371479b"
        ),
    ];
    for packet in packets {
        assert_eq!(parse(packet, &ends), Err(PacketError::Icrc));
        let (header, _) = parse_numbered(packet, &ends).expect("a packet of rdma_rxe");
        assert_eq!(header.destination_qpn, 0x77);
        // One bit in another place is not explained by an identification.
        for bit in 0..packet.len() * 8 {
            let mut wrong = packet.to_vec();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(
                bit / 8 == 4 || parse_numbered(&wrong, &ends).is_err(),
                "bit {bit}"
            );
        }
    }
}

/// CRC-32, bit by bit, of a packet between [`ends`] with this identification.
fn icrc_with(identification: u16, packet: &[u8]) -> [u8; 4] {
    let udp_len = (8 + packet.len() + ICRC_LEN) as u16;
    let (id, ip_len, udp_len) = (identification.to_be_bytes(), udp_len + 20, udp_len.to_be_bytes());
    let header = [
        &[0xff; 8][..],
        &hex!("45ff"),
        &ip_len.to_be_bytes(),
        &id,
        &hex!("4000 ff11 ffff 0a010203 0a010204 c000 12b7"),
        &udp_len,
        &hex!("ffff"),
        &packet[..4],
        &hex!("ff"),
        &packet[5..],
    ];
    let mut crc = u32::MAX;
    for byte in header.concat() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
        }
    }
    (!crc).to_le_bytes()
}

#[test]
fn any_identification_is_found_at_any_length() {
    let header = Header::new(0x11, Psn::new(5), sent(Transfer::SendOnly(None)));
    for (len, id) in (0..4200)
        .step_by(97)
        .zip((0..=u16::MAX).step_by(1499))
        .chain([(4096, 0), (8900, 1)])
    {
        let payload = vec![0xa5; len];
        let mut packet = emitted(&header, &payload);
        let covered = packet.len() - ICRC_LEN;
        let check = icrc_with(id, &packet[..covered]);
        assert_eq!(check == packet[covered..], id == 0, "identification {id}");
        packet[covered..].copy_from_slice(&check);
        assert_eq!(
            parse_numbered(&packet, &ends()),
            Ok((header, &payload[..])),
            "{len} bytes, {id}"
        );
        // No identification is in an IPv6 header.
        let v6 = Ends {
            source: "[2001:db8::1]:49152".parse().unwrap(),
            destination: "[2001:db8::2]:4791".parse().unwrap(),
        };
        assert_eq!(parse_numbered(&packet, &v6), Err(PacketError::Icrc));
    }
}

/// The packets as tshark reads them: a line each of these fields.
fn dissected(packets: &[Vec<u8>], fields: &[&str]) -> String {
    let folder = std::env::temp_dir().join(format!("urnic-roce-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (text, capture) = (folder.join("packets.txt"), folder.join("packets.pcap"));
    let line = |packet: &Vec<u8>| {
        let bytes: String = packet.iter().map(|byte| format!(" {byte:02x}")).collect();
        format!("0000{bytes}\n")
    };
    std::fs::write(&text, packets.iter().map(line).collect::<String>()).unwrap();
    let made = Command::new("text2pcap")
        .args(["-q", "-4", "10.1.2.3,10.1.2.4", "-u", "49152,4791"])
        .args([&text, &capture])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let read = Command::new("tshark")
        .arg("-r")
        .arg(&capture)
        // Dissectors that take any Send for a message of their own protocol.
        .args(
            ["rpcordma", "smb_direct", "iser"]
                .iter()
                .flat_map(|name| ["--disable-protocol", name]),
        )
        .args(["-T", "fields", "-E", "occurrence=f"])
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(read.status.success(), "{read:?}");
    String::from_utf8(read.stdout).unwrap()
}

#[test]
fn tshark_reads_the_same_fields() {
    if Command::new("tshark").arg("--version").output().is_err() {
        // As the system tests say it; not eprintln, which the test runner captures.
        let line = "SKIPPED tshark_reads_the_same_fields: tshark is not installed\n";
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    }
    let emit = |(body, ..): Vector| {
        let (header, payload) = packet(body);
        emitted(&header, payload)
    };
    let fields = [
        "infiniband.bth.opcode",
        "infiniband.bth.psn",
        "infiniband.reth.dmalen",
        "infiniband.atomiceth.cmpdt",
        "infiniband.aeth.syndrome",
        "infiniband.immdt",
        "infiniband.ieth",
        "_ws.malformed",
    ];
    let lines = dissected(&vectors().into_iter().map(emit).collect::<Vec<_>>(), &fields);
    assert_eq!(lines.lines().count(), vectors().len());
    for ((body, opcode, extended), line) in vectors().into_iter().zip(lines.lines()) {
        let found: Vec<_> = line.split('\t').collect();
        let headers = body.opcode().extended();
        let expected = |header: Extended, text: &str| match headers.contains(header) {
            true => text.to_owned(),
            false => String::new(),
        };
        let syndrome = extended.first().copied().unwrap_or_default();
        let expected = [
            opcode.to_string(),
            (0x02_0304).to_string(),
            expected(Extended::RETH, "5"),
            expected(Extended::ATOMIC_ETH, "9"),
            expected(Extended::AETH, &syndrome.to_string()),
            expected(Extended::IMM_DT, "deadbeef"),
            expected(Extended::IETH, "11223344"),
            String::new(),
        ];
        assert_eq!(found, expected, "{}", packet(body).0);
    }
}
