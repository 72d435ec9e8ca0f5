//! Start-up and Terminates of soft-iWARP and of Chelsio's (cxgb4) and Intel's (irdma) drivers,
//! emulated from their sources towards a live program. Not tested on the hardware.

use urnic_tests::or_skip;
use urnic_tests::peer::{End, Peer, hex};
use urnic_tests::startup::{CRC, ENHANCED};
use urnic_tests::target_process::cm::{CmTargetProcess, cm_event};
use urnic_tests::target_process::{state, status};
use urnic_tests::ulpdu::send;

use super::rdma_cm::{ALL_FLUSHED, DEPTHS, REQUEST_KEY, Scene, rtr_read};
use super::rdma_cm_calls::{connecting, reply, works};

/// The zero-length Read that opens connections, as soft-iWARP sends it: its sink is STag 0 (vector
/// F-RREQ0-RTR-siw).
const SIW_READ: &str =
    "4141 00000000 00000001 00000001 00000000 00000000 00000000 00000000 00000000 00000001 00000000 00000000";
/// Vectors F-WRITE0-RTR and F-RREQ0-RTR.
const WRITE_RTR: &str = "000ec140 00000001 00000000 00000000 ebd34c5f";
const READ_RTR: &str = "002e4141 00000000 00000001 00000001 00000000 00000001 00000000 00000000 00000000 00000001 \
                        00000000 00000000 27dbd7e7";
/// Vector F-RRESP0.
const READ_RESPONSE: &str = "000ec142 00000001 00000000 00000000 21a3e83e";

#[test]
fn peer_05_soft_iwarp_connects_without_crc_and_peer_to_peer() {
    let mut scene = or_skip!(Scene::start(&[]));
    let request = hex(&format!("{REQUEST_KEY} 10020004 00100008"));
    let (event, mut peer, answer) = scene.accepted(&request, DEPTHS, &[]);
    // We require CRCs, and the peer checks for that.
    assert_eq!(answer.flags, CRC | ENHANCED);
    assert_eq!(answer.word(), Some(8 << 16 | 16));
    let id = event.about;
    scene.target.expects_event(id, cm_event::ESTABLISHED, 0);
    peer.send_ulpdus(&[send(1, b"hello")]);
    scene.target.completes(id, &[(0, status::SUCCESS)]);
    scene.target.sends(id, 100, 0);
    assert_eq!(peer.ulpdu(), send(1, b""));
    scene.target.completes(id, &[(100, status::SUCCESS)]);
    peer.finish();
    scene.target.expects_event(id, cm_event::DISCONNECTED, 0);
    assert_eq!(peer.end(), End::Closed);
    scene.target.completes(id, &ALL_FLUSHED[1..]);
    scene.target.destroys(id);
    scene.ends();
}

#[test]
fn peer_04_soft_iwarp_opens_by_a_read_to_stag_0() {
    let mut scene = or_skip!(Scene::start(&[]));
    let request = hex(&format!("{REQUEST_KEY} 10020004 8010c008"));
    let (event, mut peer, answer) = scene.accepted(&request, DEPTHS, &[]);
    assert_eq!(answer.word(), Some(0x8008_4010));
    peer.send_ulpdus(&[hex(SIW_READ)]);
    scene.target.expects_event(event.about, cm_event::ESTABLISHED, 0);
    assert_eq!(peer.ulpdu(), hex("c142 00000000 00000000 00000000"));
    works(&mut scene.target, event.about, &mut peer, 1);
    scene.ends();
}

#[test]
fn peer_09_cxgb4_and_irdma_connect_and_open_by_a_read() {
    let mut scene = or_skip!(Scene::start(&[]));
    // cxgb4 offers the one type that it is set to, irdma two.
    for word in ["80104008", "8010c008"] {
        let request = hex(&format!("{REQUEST_KEY} 50020004 {word}"));
        let (event, mut peer, answer) = scene.accepted(&request, DEPTHS, &[]);
        // One type, which must be the peer's own; otherwise it ends the connection.
        assert_eq!((answer.flags, answer.word()), (CRC | ENHANCED, Some(0x8008_4010)));
        scene.opens(event.about, &mut peer, &rtr_read(), false);
    }
    scene.ends();
}

#[test]
fn peer_07_soft_iwarp_answers_with_our_flags_and_sends_at_once() {
    let mut target = or_skip!(CmTargetProcess::start(&[("URNIC_MPA_PEER_TO_PEER", "false")]));
    let (id, mut peer, _listener) = target.connects_to_peer((16, 8), &[]);
    assert_eq!(
        peer.read_bytes(24),
        hex(&format!("{REQUEST_KEY} 50020004 00100008"))
    );
    // Where neither side requests the peer-to-peer mode the peer keeps no fence.
    let first = peer.framed(&[send(1, b"hello")]);
    peer.send(&[reply(0x0008_0010), first].concat());
    target.expects_event(id, cm_event::ESTABLISHED, 0);
    target.completes(id, &[(0, status::SUCCESS)]);
    target.sends(id, 100, 0);
    assert_eq!(peer.ulpdu(), send(1, b""));
    target.completes(id, &[(100, status::SUCCESS)]);
    target.destroys(id);
    assert!(matches!(peer.end(), End::Closed | End::Reset));
    target.quits();
}

#[test]
fn peer_09_cxgb4_and_irdma_answer_with_one_type_and_get_that() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for (word, rtr) in [(0x8008_4010, READ_RTR), (0x8008_8010, WRITE_RTR)] {
        let (id, mut peer, _listener) = connecting(&mut target);
        peer.send(&reply(word));
        let rtr = hex(rtr);
        assert_eq!(peer.read_bytes(rtr.len()), rtr);
        if word & 0x4000 != 0 {
            peer.send(&hex(READ_RESPONSE));
        }
        target.expects_event(id, cm_event::ESTABLISHED, 0);
        works(&mut target, id, &mut peer, 1);
    }
    target.quits();
}

/// A connect of the target that was answered, with its RTR read.
#[track_caller]
fn answered(target: &mut CmTargetProcess) -> (u64, Peer) {
    let (id, mut peer, _listener) = connecting(target);
    peer.send(&reply(0x8008_8010));
    assert_eq!(peer.read_bytes(20), hex(WRITE_RTR));
    target.expects_event(id, cm_event::ESTABLISHED, 0);
    (id, peer)
}

#[test]
fn peer_01_10_terminates_of_other_rnics_are_not_answered() {
    let mut target = or_skip!(CmTargetProcess::start(&[]));
    for bytes in [
        // Insufficient IRD by soft-iWARP, no matching RTR by the others, both as they send it.
        "00164147 00000000 00000002 00000001 00000000 02060000 6f77b973",
        "00164147 00000000 00000002 00000001 00000000 23070000 225b98dc",
    ] {
        let (id, mut peer) = answered(&mut target);
        peer.send(&hex(bytes));
        assert_eq!(peer.read_to_end(), (vec![], End::Closed), "{bytes}");
        target.expects_event(id, cm_event::DISCONNECTED, 0);
        target.completes(id, &ALL_FLUSHED);
        assert_eq!(target.state(id), state::ERR);
        target.destroys(id);
    }
    target.quits();
}
