//! The effect of options on connections.

use std::path::Path;

use super::*;
use crate::mpa_startup::terminate;

/// A configuration whose file contains this text.
fn config(text: &str) -> Config {
    let mut config = Config::default();
    config.set_file(text, Path::new("test.toml")).unwrap();
    config
}

/// Revision, CRC and `strict_rtr` at the responder of a connection from 127.0.0.1.
fn agreed(initiator: &str, responder: &str) -> (u8, bool, bool) {
    let mut net = Net::new(&[config(initiator), config(responder)]);
    let (at, _) = net.listen(1, 7471, 0);
    let ours = net.ready(0, 7471, 5, false);
    net.connect(0, ours, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
    let attached = net.wire.borrow().attached[0].1;
    net.finish();
    let negotiated = attached.negotiated.unwrap();
    let Terms::RdmaCm { strict_rtr, .. } = attached.terms else {
        panic!("{attached:?}");
    };
    (negotiated.revision, negotiated.crc, strict_rtr)
}

#[test]
fn peer_options_apply_to_initiators_and_responders() {
    let near = "[[peer]]\naddress = \"127.0.0.0/8\"\nmpa.revision = 1\n";
    let far = "[[peer]]\naddress = \"192.0.2.0/24\"\nmpa.revision = 1\n";
    let plain = "mpa.crc = false\n";
    assert_eq!(agreed("", ""), (2, true, false));
    assert_eq!(agreed(near, ""), (1, true, false), "at the initiator");
    assert_eq!(agreed("", near), (1, true, false), "at the responder");
    assert_eq!(agreed(far, far), (2, true, false), "options of another peer");
    let strict = format!(
        "{plain}[[peer]]\naddress = \"::1\"\n{near}mpa.crc = true\nmpa.strict_rtr = true\n[[peer]]\naddress = \"127.0.0.1\"\nmpa.crc = false\n"
    );
    assert_eq!(
        agreed(plain, &strict),
        (1, true, true),
        "the first matching entry applies"
    );
}

#[test]
pub(super) fn a_connection_before_listen_waits_for_a_second() {
    // An initiator of revision 2 retries once, with revision 1.
    let mut net = Net::new(&[config("mpa.revision = 1"), Config::default()]);
    let (at, id) = net.at(1, |engine, world| {
        let channel = engine.open_channel();
        let id = engine.create(channel, 100, PS_TCP).unwrap();
        let local = CmAddress::Ip("0.0.0.0:7471".parse().unwrap());
        engine.bind(world, channel, id, local).unwrap();
        (channel, id)
    });
    let early = net.ready(0, 7471, 5, false);
    net.connect(0, early, parameters(3, 1, 1, &[]));
    net.advance(Duration::from_millis(600));
    let later = net.ready(0, 7471, 6, false);
    net.connect(0, later, parameters(4, 1, 1, &[]));
    net.advance(Duration::from_millis(600));
    let event = net.event(0, early.0).unwrap();
    assert_eq!((event.event, event.uid), (8, 5), "rejected after a second");
    net.at(1, |engine, world| engine.listen(world, at, id, 0))
        .unwrap();
    let (child, _) = net.request(1, at);
    net.accept(1, at, child, 200, parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, later.0), [(6, later.1, 9, 0)]);
    net.advance(Duration::from_secs(1));
    assert!(net.take_events(0, later.0).is_empty());
    net.finish();
}

#[test]
fn empa_33_a_strict_responder_reports_the_required_ord() {
    for (option, event) in [("", 9), ("mpa.strict_depths = true", 8)] {
        let mut net = Net::new(&[Config::default(), config(option)]);
        let (at, _) = net.listen(1, 7471, 0);
        let initiator = net.ready(0, 7471, 5, false);
        net.connect(0, initiator, parameters(3, 1, 1, &[]));
        let (id, _) = net.request(1, at);
        let accepted = net.at(1, |engine, world| {
            engine.accept(world, at, id, 200, Some(parameters(9, 8, 8, &[])))
        });
        let answer = net.event(0, initiator.0).unwrap();
        assert_eq!(answer.event, event);
        if event == 8 {
            assert_eq!(accepted, Err(Errno::INVAL));
            assert_eq!(answer.param.responder_resources, 8, "the required ORD");
        }
        net.finish();
    }
}

#[test]
fn empa_38_a_terminate_reports_an_error_after_the_reply() {
    let mut net = Net::pair();
    let (at, _) = net.listen(1, 7471, 0);
    let initiator = net.ready(0, 7471, 5, false);
    net.wire.borrow_mut().unattachable.push(3);
    net.connect(0, initiator, parameters(3, 1, 1, &[]));
    let (id, _) = net.request(1, at);
    net.accept(1, at, id, 200, parameters(9, 1, 1, &[]));
    assert_eq!(net.take_events(0, initiator.0), [(5, initiator.1, 6, -22)]);
    // Vector F-TERM-205.
    let terminate = [
        0x00, 0x16, 0x41, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0x20, 0x05, 0, 0, 0x16, 0x80,
        0xd5, 0xf1,
    ];
    assert_eq!(net.wire.borrow().last_sent, terminate);
    let negotiated = net.wire.borrow().attached[0].1.negotiated.unwrap();
    let marked = Negotiated {
        markers_tx: true,
        ..negotiated
    };
    assert_eq!(
        marked.terminate_frame(terminate::LOCAL).unwrap()[..4],
        [0; 4],
        "a marker precedes the FPDU"
    );
    net.finish();
}
