//! Sends whose payload a peer on this host has placed in the receive: the checks of the message.

use super::Scripted;
use crate::testing::rig::*;
use urnic_device::vocabulary::WcStatus;

const SUCCESS: WcStatus = WcStatus::Success;

/// An end whose peer fills receives, with a receive of two elements, of 64 and 16 bytes.
fn with_receive() -> (Scripted, Region) {
    let mut peer = Scripted::new();
    peer.node.engine.let_peer_fill();
    let region = peer.node.region(200, everything());
    peer.node.post_recv(1, &[region.sge(0, 64), region.sge(100, 16)]);
    (peer, region)
}

/// A segment of a Send at this offset, with the claim that all payload before the offset is in
/// receive `number`.
fn segment(last: bool, number: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(if last { 0x41 } else { 0x01 }, 0x43, number, 0, 1, mo, payload)
}

#[test]
fn shm_21_a_message_whose_payload_is_placed_is_delivered() {
    for mo in [1, 63, 64] {
        let (mut peer, region) = with_receive();
        region.write(0, &[b'p'; 200]);
        peer.send_ulpdu(&segment(true, 0, mo, b""));
        assert_eq!(peer.node.received(), [(1, SUCCESS, mo)]);
        assert_eq!(region.bytes(), [b'p'; 200]);
    }
}

#[test]
fn shm_21_the_rest_of_a_message_comes_by_the_stream() {
    let (mut peer, region) = with_receive();
    region.write(0, &[b'p'; 200]);
    peer.send_ulpdu(&segment(false, 0, 62, b"ab"));
    peer.send_ulpdu(&segment(true, 0, 64, b"cd"));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 66)]);
    let bytes = region.bytes();
    assert_eq!((&bytes[61..65], &bytes[99..103]), (&b"pabp"[..], &b"pcdp"[..]));
}

#[test]
fn shm_21_a_message_that_cannot_be_is_refused() {
    let refused = |peer: &mut Scripted, ulpdu: &[u8], code: &str| {
        peer.send_ulpdu(ulpdu);
        assert_eq!(peer.terminate()[..2], hex(code), "{ulpdu:?}");
        let received = peer.node.received();
        assert!(
            received.iter().all(|(_, status, _)| *status != SUCCESS),
            "{ulpdu:?}"
        );
    };
    let (mut peer, _region) = with_receive();
    refused(&mut peer, &segment(true, 1, 64, b""), "1204");
    let (mut peer, _region) = with_receive();
    refused(&mut peer, &segment(true, 0, 65, b""), "1204");
    let (mut peer, _region) = with_receive();
    refused(&mut peer, &segment(true, 0, 64, &[7; 17]), "1205");
    // Within a message there are no gaps.
    let (mut peer, _region) = with_receive();
    peer.send_ulpdu(&segment(false, 0, 10, b"ab"));
    refused(&mut peer, &segment(true, 0, 20, b""), "1204");
    // Nor where the peer does not fill receives.
    let mut peer = Scripted::new();
    let region = peer.node.region(64, everything());
    peer.node.post_recv(1, &[region.sge(0, 64)]);
    refused(&mut peer, &segment(true, 0, 64, b""), "1204");
    // A receive that is not posted has no payload.
    let mut peer = Scripted::new();
    peer.node.engine.let_peer_fill();
    refused(&mut peer, &segment(true, 0, 64, b""), "1202");
}

/// The number is that of the queue, which counts all receives.
#[test]
fn shm_21_receives_are_counted() {
    let (mut peer, region) = with_receive();
    peer.send_ulpdu(&send_segment(true, 1, 0, b"one"));
    peer.node.post_recv(2, &[region.sge(0, 64)]);
    peer.send_ulpdu(&untagged(0x41, 0x43, 1, 0, 2, 7, b""));
    assert_eq!(peer.node.received(), [(1, SUCCESS, 3), (2, SUCCESS, 7)]);
}
