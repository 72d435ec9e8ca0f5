//! An SCTP endpoint takes any packets of a peer that has an association and of one that has none:
//! it does not panic, and keeps no more associations than it may.
//!
//! The input is packets, each with its length (two bytes) in front; ports and checksums are mended,
//! and a packet whose first byte is odd gets the tag of the association.

#![no_main]

use std::net::SocketAddr;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use urnic_sctp::endpoint::{Endpoint, Event, Peer, Settings};
use urnic_wire::sctp::chunk::Contents;
use urnic_wire::sctp::packet;

const PORTS: [u16; 2] = [4000, 5000];

fn endpoint(end: usize) -> Endpoint {
    let settings = Settings {
        associations: 4,
        ..Settings::of_port(PORTS[end])
    };
    Endpoint::new(settings, [end as u8; 16])
}

fn address(end: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, end as u8 + 1], 9899))
}

/// Two endpoints with an association, and the packets that made it, and carried a message.
fn associated() -> ([Endpoint; 2], Vec<Vec<u8>>) {
    let mut ends = [endpoint(0), endpoint(1)];
    let peer = Peer {
        address: address(1),
        port: PORTS[1],
    };
    let now = Duration::from_secs(1);
    let id = ends[0].connect(peer, now).expect("there is room");
    let mut packets = Vec::new();
    let message = vec![0, 0, 0, 1];
    for round in 0..6 {
        if round == 3 {
            let sent = ends[0].send(id, (0, Contents::SessionControl), message.clone(), now);
            assert_eq!(sent, Ok(()));
        }
        for from in 0..2 {
            while let Some((_, packet)) = ends[from].next_packet() {
                ends[1 - from].receive(address(from), &packet, now);
                packets.push(packet);
            }
        }
    }
    (ends, packets)
}

fn seeds() -> Vec<Vec<u8>> {
    let with_length = |packet: &Vec<u8>| [&(packet.len() as u16).to_be_bytes()[..], packet].concat();
    let (_, packets) = associated();
    let all = packets.iter().flat_map(with_length).collect();
    packets.iter().map(with_length).chain([all]).collect()
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |input: &[u8]| {
    // An end with an association, or one that is being connected.
    let is_connecting = input.len() % 2 == 1;
    let ([client, server], packets) = associated();
    let mut end = if is_connecting { endpoint(1) } else { server };
    drop(client);
    let mut now = Duration::from_secs(1);
    let mut ids = Vec::new();
    if is_connecting {
        let peer = Peer {
            address: address(0),
            port: PORTS[0],
        };
        ids.extend(end.connect(peer, now));
    }
    // The first packet after the INIT ACK has the tag of this end.
    let tag = packets.get(2).and_then(|packet| packet.get(4..8)).map(<[u8]>::to_vec);
    let mut rest = input;
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let (bytes, after) = after.split_at(usize::from(u16::from_be_bytes(*length)).min(after.len()));
        rest = after;
        let mut packet = bytes.to_vec();
        let knows = packet.first().is_some_and(|byte| byte % 2 == 1);
        let ports = [PORTS[0].to_be_bytes(), PORTS[1].to_be_bytes()].concat();
        if let Some(place) = packet.get_mut(..4) {
            place.copy_from_slice(&ports);
        }
        if let (Some(place), Some(tag), true) = (packet.get_mut(4..8), &tag, knows) {
            place.copy_from_slice(tag);
        }
        packet::seal(&mut packet);
        end.receive(address(0), &packet, now);
        now += Duration::from_millis(100);
        end.advance(now);
        while end.next_packet().is_some() {}
        while let Some(event) = end.next_event() {
            if let Event::Readable(id) | Event::Connected(id) = event {
                ids.push(id);
            }
        }
        for id in &ids {
            while end.take(*id, now).is_some() {}
        }
    }
    assert!(end.associations() <= 4);
});
