//! A queue pair that is its own peer.
//!
//! It has no stream and no framing: ULPDUs are handed back in memory. The capture contains them as
//! FPDUs on a connection between two invented ports of the device's first address, with start-up
//! frames in front by which dissectors recognise the protocol. All frames are in one direction.

use super::{Capture, Side, Tap};
use crate::stream::Ends;
use std::net::{IpAddr, SocketAddr};
use urnic_wire::mpa::fpdu::{self, CrcMode};

/// MPA revision 1, with CRCs and without private data (RFC 5044 §7.1.1).
const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\0\0";
const REPLY: &[u8] = b"MPA ID Rep Frame\x40\x01\0\0";

/// The capture of a queue pair that is its own peer.
#[derive(Debug)]
pub(crate) struct OwnPeerTap {
    tap: Tap,
    fpdu: Vec<u8>,
}

impl Capture {
    /// A queue pair became its own peer.
    pub(crate) fn own_peer(&self, ip: IpAddr, qp: u32) -> OwnPeerTap {
        // One of the two is odd, the other even.
        let port = qp as u16;
        let (local, remote) = (SocketAddr::new(ip, port), SocketAddr::new(ip, !port));
        let mut tap = self.open(Ends { local, remote }, Side::Initiator);
        tap.sent(REQUEST);
        tap.received(REPLY);
        OwnPeerTap {
            tap,
            fpdu: Vec::new(),
        }
    }
}

impl OwnPeerTap {
    /// Records a ULPDU that the queue pair handed to itself.
    pub(crate) fn ulpdu(&mut self, ulpdu: &[u8]) {
        self.fpdu.resize(fpdu::fpdu_len(ulpdu.len()), 0);
        let len = fpdu::emit(ulpdu, CrcMode::On, &mut self.fpdu);
        self.tap.sent(&self.fpdu[..len]);
    }
}

impl Drop for OwnPeerTap {
    fn drop(&mut self) {
        self.tap.finished(true);
        self.tap.finished(false);
    }
}
