//! A packet of RoCE v2 from the network.

#![no_main]

use core::net::SocketAddr;
use libfuzzer_sys::fuzz_target;
use urnic_wire::roce::{
    Ends, ICRC_LEN, MAX_HEADER_LEN, MAX_TRAILER_LEN, Opcode, PacketError, parse, parse_numbered, seal,
};

/// A packet of each opcode, whose ICRC the target makes.
fn seeds() -> Vec<Vec<u8>> {
    let seed = |opcode: &Opcode| {
        let payload = if opcode.has_payload() { 4 } else { 0 };
        let mut packet = vec![0; 12 + opcode.extended().buffer_len() + payload + ICRC_LEN];
        packet[0] = opcode.value();
        packet
    };
    Opcode::ALL.iter().map(seed).collect()
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |packet: &[u8]| {
    let ends = Ends {
        source: SocketAddr::from(([10, 1, 2, 3], 5000)),
        destination: SocketAddr::from(([10, 1, 2, 4], 6000)),
    };
    let mut packet = packet.to_vec();
    if parse(&packet, &ends) == Err(PacketError::Icrc) {
        // The fuzzer does not find an ICRC by itself.
        let len = packet.len() - ICRC_LEN;
        packet.resize(len + MAX_TRAILER_LEN, 0);
        let len = seal(&mut packet, len, &ends);
        packet.truncate(len);
    }
    match parse(&packet, &ends) {
        Ok((header, payload)) => {
            assert!(!header.to_string().contains('\n'));
            assert!(header.body.opcode().has_payload() || payload.is_empty());
            let mut again = vec![0; MAX_HEADER_LEN + payload.len() + MAX_TRAILER_LEN];
            let at = header.emit(&mut again, payload.len());
            again[at..at + payload.len()].copy_from_slice(payload);
            let len = seal(&mut again, at + payload.len(), &ends);
            assert_eq!(parse(&again[..len], &ends), Ok((header, payload)));
            assert_eq!(parse_numbered(&again[..len], &ends), Ok((header, payload)));
        }
        Err(error) => drop(error.to_string()),
    }
});
