//! A datagram from the network.

#![no_main]

use core::net::SocketAddr;
use libfuzzer_sys::fuzz_target;
use urnic_wire::roce::{Ends, MAX_HEADER_LEN, MAX_TRAILER_LEN, PacketError, parse, seal};

fuzz_target!(|packet: &[u8]| {
    let ends = Ends {
        source: SocketAddr::from(([10, 1, 2, 3], 5000)),
        destination: SocketAddr::from(([10, 1, 2, 4], 6000)),
    };
    let mut packet = packet.to_vec();
    if parse(&packet, &ends) == Err(PacketError::Icrc) {
        // The fuzzer does not find an ICRC by itself.
        let len = packet.len() - 4;
        packet.resize(len + MAX_TRAILER_LEN, 0);
        let len = seal(&mut packet, len, &ends);
        packet.truncate(len);
    }
    match parse(&packet, &ends) {
        Ok((header, payload)) => {
            assert!(!header.to_string().contains('\n'));
            let mut again = vec![0; MAX_HEADER_LEN + payload.len() + MAX_TRAILER_LEN];
            let at = header.emit(&mut again, payload.len());
            again[at..at + payload.len()].copy_from_slice(payload);
            let len = seal(&mut again, at + payload.len(), &ends);
            assert_eq!(parse(&again[..len], &ends), Ok((header, payload)));
        }
        Err(error) => drop(error.to_string()),
    }
});
