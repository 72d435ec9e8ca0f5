//! Native connections under a virtual clock.

mod failures;
mod forged_requests;
mod hostile;
mod net;
mod over_sctp;
mod rendezvous;
mod sctp;
mod unreliable;

use super::identity::Identity;
use super::*;

use crate::carrier::Carrier;
use crate::carrier::testing::llp;
use crate::mpa_startup::{Close, Settings, Time};
use crate::startup::Initiator;
use crate::timeouts::{MIN_RNR, retry_time, rnr_timeout};
use net::{Net, address};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::time::Duration;
use urnic_config::{Config, Llp};
use urnic_wire::sctp::session::{Function, SessionMessage};

/// A queue pair of a test: its host, and its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Qp {
    host: usize,
    qid: u32,
    qpn: u32,
}

/// Makes a queue pair with the device number `qid`.
fn make(net: &mut Net, host: usize, qid: u32) -> Qp {
    let qpn = net
        .on(host, |engine, world| engine.add_queue_pair(world))
        .unwrap();
    Qp { host, qid, qpn }
}

/// The PSN of a queue pair's sends, which its peer expects.
fn psn(qp: Qp) -> u32 {
    qp.qpn.wrapping_mul(7) & PSN_MASK
}

fn peer_of(us: Qp, peer: Qp) -> Peer {
    Peer {
        address: SocketAddr::new(address(peer.host), super::address::port_of(peer.qpn)),
        qpn: peer.qpn,
        is_self: us == peer,
        we_initiate: (us.host, us.qpn) < (peer.host, peer.qpn),
        source: Some(SocketAddr::new(address(us.host), 0)),
    }
}

fn params(us: Qp, peer: Qp) -> PeerParams {
    PeerParams {
        qid: us.qid,
        peer: peer_of(us, peer),
        rq_psn: psn(peer),
        ird: 16,
        min_rnr_timer: 12,
        unreliable: false,
    }
}

/// The attributes that `ibv_rc_pingpong` sets.
fn rts(us: Qp) -> RtsParams {
    RtsParams {
        sq_psn: psn(us),
        ord: 8,
        rnr_retry: 7,
        retry_time: retry_time(14, 7),
    }
}

fn to_rtr(net: &mut Net, us: Qp, peer: Qp) {
    net.on(us.host, |engine, world| {
        engine.reached_rtr(world, us.qpn, params(us, peer))
    });
}

fn to_rts(net: &mut Net, us: Qp) {
    net.on(us.host, |engine, world| {
        engine.reached_rts(world, us.qpn, rts(us))
    });
}

fn up(net: &mut Net, us: Qp, peer: Qp) {
    to_rtr(net, us, peer);
    to_rts(net, us);
}

fn both_open(a: Qp, b: Qp) -> impl Fn(&Net) -> bool {
    move |net| net.is_open(a.host, a.qid) && net.is_open(b.host, b.qid)
}

/// Checks that both queue pairs are open over one stream, as initiator and responder, and that no
/// other stream is left.
fn assert_joined(net: &Net, a: Qp, b: Qp) {
    assert!(
        net.are_joined((a.host, a.qid), (b.host, b.qid)),
        "not attached to one stream"
    );
    let ends = [net.attached(a.host, a.qid), net.attached(b.host, b.qid)].concat();
    let roles: Vec<bool> = ends.iter().map(|end| end.negotiated.unwrap().initiator).collect();
    assert!(
        roles == [true, false] || roles == [false, true],
        "roles {roles:?}"
    );
    for qp in [a, b] {
        let opened = net
            .notices(qp.host)
            .iter()
            .filter(|n| **n == Notice::Open(qp.qid))
            .count();
        assert_eq!((opened, net.is_unreachable(qp.host, qp.qid)), (1, false));
        assert_eq!(net.in_start_up(qp.host), 0);
    }
}

/// The Request of an initiator that identifies itself so.
fn request_of(us: Identity) -> Vec<u8> {
    let settings = Settings::from(&Config::default().mpa);
    let (_, request) = Initiator::new(llp(), settings, None, &us.emit(), Duration::ZERO).unwrap();
    request
}

/// Whether the bytes are a rejecting Reply.
fn is_rejection(reply: &[u8]) -> bool {
    match llp() {
        Llp::Tcp => reply.starts_with(b"MPA ID Rep Frame") && reply[16] & 0x20 != 0,
        Llp::Sctp => SessionMessage::parse(reply).is_ok_and(|reply| reply.function == Function::Reject),
    }
}

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// The time that a Send of the peer waits for a receive of an attached queue pair.
fn rnr_timeout_of(attachment: &Attachment) -> Option<Duration> {
    match attachment.terms {
        Terms::Native { rnr_timeout, .. } => rnr_timeout,
        Terms::RdmaCm { .. } => panic!("{attachment:?}"),
    }
}
