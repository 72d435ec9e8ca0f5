//! What SCTP carries of DDP (RFC 5043, RFC 6581 §7), against bytes written by hand from the RFCs.

use crate::vectors::P2P;
use hex_literal::hex;
use proptest::prelude::*;
use urnic_wire::mpa::startup::{EnhancedWord, NO_NEGOTIATION};
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::chunk::{Contents, MAX_IN_FLIGHT, MIN_MULPDU, SSN_LEN, Ssn};
use urnic_wire::sctp::packet::{self, Packet, PacketError};
use urnic_wire::sctp::session::*;

const ANY: EnhancedWord = EnhancedWord {
    peer_to_peer: false,
    rtr_send: false,
    rtr_write: false,
    rtr_read: false,
    ird: NO_NEGOTIATION,
    ord: NO_NEGOTIATION,
};

/// Each function in each form, its bytes and its line.
fn messages() -> [(SessionMessage<'static>, Vec<u8>, &'static str); 8] {
    let new = SessionMessage::new;
    [
        (
            new(Function::Initiate, None, b"ULP!"),
            hex!("0001 554c5021").to_vec(),
            "DDP session Initiate private data 4",
        ),
        (
            new(Function::Accept, None, b""),
            hex!("0002").to_vec(),
            "DDP session Accept private data 0",
        ),
        (
            SessionMessage::reject(false, b"no"),
            hex!("0003 6e6f").to_vec(),
            "DDP session Reject private data 2",
        ),
        (
            SessionMessage::TERMINATE,
            hex!("0004").to_vec(),
            "DDP session Terminate",
        ),
        (
            new(Function::Initiate, Some(P2P), b"ULP!"),
            hex!("0005 8010c008 554c5021").to_vec(),
            "DDP session Enhanced Initiate p2p ird 16 ord 8 rtr write|read private data 4",
        ),
        (
            new(Function::Accept, Some(P2P), b""),
            hex!("0006 8010c008").to_vec(),
            "DDP session Enhanced Accept p2p ird 16 ord 8 rtr write|read private data 0",
        ),
        (
            new(Function::Accept, Some(ANY), b"\0"),
            hex!("0006 3fff3fff 00").to_vec(),
            "DDP session Enhanced Accept client/server ird any ord any private data 1",
        ),
        (
            SessionMessage::reject(true, b"no"),
            hex!("0007 6e6f").to_vec(),
            "DDP session Enhanced Reject private data 2",
        ),
    ]
}

#[test]
fn sctp_04_and_05_each_function_has_its_code_and_data() {
    for (message, bytes, line) in messages() {
        assert_eq!(SessionMessage::parse(&bytes), Ok(message), "{line}");
        let mut again = [0xee; MAX_MESSAGE_LEN];
        let len = message.emit(&mut again).unwrap();
        assert_eq!(again[..len], bytes, "{line}");
        assert_eq!(message.to_string(), line);
    }
}

#[test]
fn sctp_07_and_14_malformed_messages_are_refused() {
    let cases: [(&[u8], SessionError); 7] = [
        (b"", SessionError::Truncated(0)),
        (&[0], SessionError::Truncated(1)),
        (&[0, 0], SessionError::Function(0)),
        (&[0, 8], SessionError::Function(8)),
        (&[1, 1], SessionError::Function(0x101)),
        (&[0, 4, 9], SessionError::InTerminate(1)),
        (&[0, 6, 1, 2, 3], SessionError::NoWord(3)),
    ];
    for (bytes, error) in cases {
        assert_eq!(SessionMessage::parse(bytes), Err(error));
    }
    assert_eq!(
        SessionError::Function(8).to_string(),
        "DDP session control function 0x0008 is not defined"
    );
}

#[test]
fn sctp_04_and_05_private_data_ends_at_512_with_the_word() {
    for code in [1u8, 2, 3, 5, 6, 7] {
        let parsed = |len: usize| SessionMessage::parse(&[&[0, code], &vec![0; len][..]].concat()).map(drop);
        assert_eq!(parsed(512), Ok(()));
        assert_eq!(parsed(513), Err(SessionError::PrivateData(513)));
    }
    let data = [7; 513];
    let emit = |word, len: usize| {
        let message = SessionMessage::new(Function::Initiate, word, &data[..len]);
        message.emit(&mut [0; MAX_MESSAGE_LEN])
    };
    assert_eq!(emit(None, 512), Ok(514));
    assert_eq!(emit(None, 513), Err(SessionError::PrivateData(513)));
    assert_eq!(emit(Some(P2P), 508), Ok(514));
    assert_eq!(emit(Some(P2P), 509), Err(SessionError::PrivateData(513)));
    assert!(SSN_LEN + MAX_MESSAGE_LEN <= usize::from(MIN_MULPDU));
}

#[test]
fn sctp_02_and_12_chunks_have_an_identifier_and_a_number() {
    assert_eq!(Contents::of(16), Some(Contents::Segment));
    assert_eq!(Contents::of(17), Some(Contents::SessionControl));
    // Network byte order: 0x10000000 is no DDP, as WebRTC's 51 is none.
    for other in [0, 15, 18, 51, 0x1000_0000] {
        assert_eq!(Contents::of(other), None);
    }
    assert_eq!(
        Ssn::split(&hex!("0102 0304")),
        Some((Ssn(0x102), &hex!("0304")[..]))
    );
    assert_eq!(Ssn::split(&[1]), None);
    assert_eq!(Ssn(0x102).to_bytes(), hex!("0102"));
}

#[test]
fn sctp_13_numbers_wrap_and_keep_their_order() {
    assert_eq!(Ssn(0xffff).next(), Ssn(0));
    assert_eq!(Ssn(0xfffe).until(Ssn(1)), Some(3));
    assert_eq!(Ssn(1).until(Ssn(0xfffe)), None);
    assert_eq!(Ssn(5).until(Ssn(5)), Some(0));
    assert_eq!(Ssn(0).until(Ssn(MAX_IN_FLIGHT)), Some(MAX_IN_FLIGHT));
    assert_eq!(Ssn(0).until(Ssn(MAX_IN_FLIGHT + 1)), None);
}

#[test]
fn sctp_01_the_indication_is_found_among_parameters() {
    // Supported Extensions (ASCONF, ASCONF-ACK, RE-CONFIG: 7 bytes and one of padding) come first.
    let extensions = hex!("8008 0007 c1 80 82 00");
    let ddp = hex!("c006 0008 00000001");
    let other = hex!("c006 0008 00000002");
    assert_eq!(Adaptation::Ddp.parameter(), Some(ddp));
    assert_eq!(Adaptation::Other(2).parameter(), Some(other));
    assert_eq!(Adaptation::None.parameter(), None);
    let of = |parameters: &[&[u8]]| Adaptation::of_parameters(&parameters.concat());
    assert_eq!(of(&[]), Adaptation::None);
    assert_eq!(of(&[&extensions]), Adaptation::None);
    assert_eq!(of(&[&extensions[..7]]), Adaptation::None);
    assert_eq!(of(&[&extensions, &ddp]), Adaptation::Ddp);
    assert_eq!(of(&[&ddp, &extensions]), Adaptation::Ddp);
    assert_eq!(of(&[&other, &ddp]), Adaptation::Other(2));
    // Too short, too long, and after a parameter that does not fit.
    assert_eq!(of(&[&hex!("c006 0006 0001 0000")]), Adaptation::None);
    assert_eq!(of(&[&hex!("c006 000c 00000001 00000000")]), Adaptation::None);
    assert_eq!(of(&[&hex!("8008 0003"), &ddp]), Adaptation::None);
    assert_eq!(of(&[&hex!("8008 ffff"), &ddp]), Adaptation::None);
    assert_eq!(Adaptation::Other(2).to_string(), "adaptation 0x00000002");
}

/// An INIT with an indication of DDP, from port 1 to 2, without its checksum.
const INIT: [u8; 40] = hex!(
    "0001 0002 00000000 00000000"
    "01 00 001c 01020304 00020000 000a 000a 0a0b0c0d c006 0008 00000001"
);

#[test]
fn sctp_11_packets_are_checked_and_sealed() {
    let mut init = INIT;
    assert!(matches!(
        Packet::parse(&init),
        Err(PacketError::Checksum { found: 0, .. })
    ));
    packet::seal(&mut init);
    let parsed = Packet::parse(&init).unwrap();
    assert_eq!((parsed.source, parsed.destination, parsed.tag), (1, 2, 0));
    let (tag, parameters) = parsed.init().expect("an INIT");
    assert_eq!(tag, 0x0102_0304);
    assert_eq!(Adaptation::of_parameters(parameters), Adaptation::Ddp);
    for byte in 0..init.len() {
        let mut wrong = init;
        wrong[byte] ^= 0x10;
        assert!(matches!(Packet::parse(&wrong), Err(PacketError::Checksum { .. })));
    }
    assert_eq!(Packet::parse(&init[..11]), Err(PacketError::Truncated(11)));
    let sealed = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        packet::seal(&mut bytes);
        Packet::parse(&bytes).map(|packet| packet.init().is_some())
    };
    assert_eq!(sealed(&INIT[..14]), Err(PacketError::Truncated(14)));
    assert_eq!(sealed(&INIT[..39]), Err(PacketError::ChunkLength(28)));
    assert_eq!(
        sealed(&[&INIT[..14], &[0, 3]].concat()),
        Err(PacketError::ChunkLength(3))
    );
    assert_eq!(
        sealed(&[&INIT[..14], &[0, 8, 1, 2, 3, 4]].concat()),
        Ok(false),
        "a short INIT"
    );
}

#[test]
fn sctp_11_the_checksum_is_that_of_the_rfc() {
    let mut sealed = INIT;
    packet::seal(&mut sealed);
    assert_eq!(sealed[8..12], reference(&INIT).to_le_bytes());
}

/// The CRC32C bit by bit, least significant first (RFC 9260, appendix A).
fn reference(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

fn any_word() -> impl Strategy<Value = EnhancedWord> {
    any::<u32>().prop_map(|word| EnhancedWord::parse(word.to_be_bytes()))
}

proptest! {
    #[test]
    fn session_messages_return(code in 1..=7u16, word in any_word(), data in proptest::collection::vec(any::<u8>(), 0..=508)) {
        let message = match code {
            1 => SessionMessage::new(Function::Initiate, None, &data),
            2 => SessionMessage::new(Function::Accept, None, &data),
            3 => SessionMessage::reject(false, &data),
            4 => SessionMessage::TERMINATE,
            5 => SessionMessage::new(Function::Initiate, Some(word), &data),
            6 => SessionMessage::new(Function::Accept, Some(word), &data),
            _ => SessionMessage::reject(true, &data),
        };
        let mut bytes = vec![0xee; message.buffer_len()];
        prop_assert_eq!(message.emit(&mut bytes), Ok(bytes.len()));
        prop_assert_eq!(&bytes[..2], &code.to_be_bytes()[..]);
        prop_assert_eq!(SessionMessage::parse(&bytes), Ok(message));
    }

    #[test]
    fn session_and_parameter_parsers_take_anything(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        match SessionMessage::parse(&bytes) {
            Ok(message) => {
                let mut again = vec![0; message.buffer_len()];
                prop_assert_eq!(message.emit(&mut again), Ok(bytes.len()));
                prop_assert_eq!(&again, &bytes);
            }
            Err(error) => drop(error.to_string()),
        }
        let _ = Adaptation::of_parameters(&bytes).to_string();
        let mut packet = bytes;
        packet::seal(&mut packet);
        if let Ok(packet) = Packet::parse(&packet) {
            let _ = packet.init().map(|(_, parameters)| packet::parameters(parameters).count());
        }
    }
}
