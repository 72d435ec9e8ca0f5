//! Faults on simulated connections.

use super::Faulty;
use crate::stream::{Network, Probing, Stream, StreamError};
use crate::testing::mock::{plan_of, wait_for};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::Nanos;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use urnic_faults::Plan;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::mpa::startup::{FrameKind, StartupFrame};
use urnic_wire::rdmap::{Body, Segment};

/// A connection of a network with this plan: the initiator's end, and the other.
fn connection(faults: &str) -> Result<[Box<dyn Stream>; 2], Errno> {
    connection_of(plan_of(faults))
}

/// A connection with this plan, which may change later.
fn connection_of(plan: &'static Plan) -> Result<[Box<dyn Stream>; 2], Errno> {
    let conditions = Conditions {
        latency: Duration::ZERO,
        ..Conditions::default()
    };
    let plain = SimNetwork::new(conditions, Arc::default());
    let faulty = Faulty::new(Arc::new(plain.clone()), plan, "urnic0");
    let address: SocketAddr = "192.0.2.1:7471".parse().unwrap();
    // The other end is not part of it.
    let mut listener = plain.listen(address, 1, 0, false)?;
    let initiator = faulty.connect(address, None, 0)?;
    let responder = listener.accept()?.expect("a connection");
    Ok([initiator, responder])
}

fn send(stream: &mut dyn Stream, bytes: &[u8]) -> Result<usize, StreamError> {
    stream.send_bytes(bytes)
}

fn receive(stream: &mut dyn Stream) -> Result<Vec<u8>, StreamError> {
    let mut bytes = vec![0; 64];
    let n = stream.receive_bytes(&mut bytes)?;
    bytes.truncate(n);
    Ok(bytes)
}

#[test]
fn a_connection_is_reset_at_its_position() {
    let [mut here, mut there] = connection("reset after=8").unwrap();
    assert_eq!(send(&mut *here, b"12345678"), Ok(8));
    assert_eq!(receive(&mut *there).unwrap(), b"12345678");
    assert_eq!(send(&mut *here, b"9"), Ok(1));
    assert_eq!(
        send(&mut *here, b"10"),
        Err(StreamError::Closed(Errno::CONNRESET))
    );
    assert_eq!(receive(&mut *there).unwrap(), b"9", "it had arrived before");
    assert!(receive(&mut *there).is_err());
}

/// Nothing else tells of an end that the real connection knows nothing of.
#[test]
fn an_end_requests_a_check_once() {
    let now = Nanos(7);
    for faults in ["reset after=8", "close after=8"] {
        let [mut here, _there] = connection(faults).unwrap();
        send(&mut *here, b"1234").unwrap();
        assert_eq!(here.advance(now), None);
        send(&mut *here, b"56789").unwrap();
        assert_eq!(
            (here.advance(now), here.advance(now)),
            (Some(now), None),
            "{faults}"
        );
    }
}

#[test]
fn a_connection_is_closed_in_order_at_its_position() {
    let [mut here, mut there] = connection("close after=2").unwrap();
    assert_eq!(send(&mut *here, b"123"), Ok(3));
    assert_eq!(receive(&mut *there).unwrap(), b"123");
    assert_eq!(receive(&mut *there).unwrap(), b"");
    assert_eq!(receive(&mut *here).unwrap(), b"");
}

#[test]
fn a_silent_connection_takes_bytes_and_passes_none() {
    let [mut here, mut there] = connection("silence").unwrap();
    assert_eq!(send(&mut *here, b"1"), Ok(1));
    assert_eq!(receive(&mut *there).unwrap(), b"1");
    assert_eq!(send(&mut *here, b"23"), Ok(2));
    assert_eq!(receive(&mut *there), Err(StreamError::WouldBlock));
    send(&mut *there, b"4").unwrap();
    assert_eq!(receive(&mut *here), Err(StreamError::WouldBlock));
    assert_eq!(here.unacknowledged(), 1);
}

#[test]
fn one_byte_is_damaged() {
    let [mut here, mut there] = connection("corrupt after=4").unwrap();
    assert_eq!(send(&mut *here, b"000"), Ok(3));
    assert_eq!(send(&mut *here, b"000000"), Ok(6));
    assert_eq!(receive(&mut *there).unwrap(), b"000010000");
}

/// Adds a fault while the connection is in use, after nine bytes of this end and four of the peer.
fn added_later(fault: &str) -> [Box<dyn Stream>; 2] {
    let plan = plan_of("none");
    let [mut here, mut there] = connection_of(plan).unwrap();
    send(&mut *here, b"000000000").unwrap();
    receive(&mut *there).unwrap();
    send(&mut *there, b"1111").unwrap();
    receive(&mut *here).unwrap();
    plan.change(fault, false).unwrap();
    [here, there]
}

#[test]
fn a_fault_that_is_added_counts_bytes_from_then_on() {
    let [mut here, mut there] = added_later("close after=4");
    assert_eq!(send(&mut *here, b"0000"), Ok(4));
    assert_eq!(receive(&mut *there).unwrap(), b"0000");
    assert_eq!(send(&mut *here, b"0"), Ok(1));
    assert_eq!(receive(&mut *here).unwrap(), b"", "the fifth byte has passed");

    let [mut here, mut there] = added_later("corrupt after=4");
    send(&mut *here, b"000").unwrap();
    send(&mut *here, b"000").unwrap();
    assert_eq!(receive(&mut *there).unwrap(), b"000010");

    let [mut here, _there] = added_later("reset");
    assert_eq!(send(&mut *here, b"0"), Ok(1));
    let gone = Err(StreamError::Closed(Errno::CONNRESET));
    assert_eq!(send(&mut *here, b"0"), gone, "at once");
}

#[test]
fn a_fault_that_is_added_counts_messages_from_then_on() {
    let plan = plan_of("none");
    let [mut here, mut there] = connection_of(plan).unwrap();
    send(&mut *here, REQUEST).unwrap();
    send(&mut *there, REPLY).unwrap();
    receive(&mut *here).unwrap();
    for _ in 0..3 {
        send(&mut *here, &message(true)).unwrap();
    }
    plan.change("reset after=2msg", false).unwrap();
    send(&mut *here, &message(true)).unwrap();
    assert_eq!(here.peek(), Err(StreamError::WouldBlock), "the first of two");
    send(&mut *here, &message(true)).unwrap();
    assert_eq!(here.peek(), Err(StreamError::Closed(Errno::CONNRESET)));
}

#[test]
fn an_attempt_to_connect_fails_as_specified() {
    assert_eq!(connection("refuse").unwrap_err(), Errno::CONNREFUSED);
    assert_eq!(connection("unreachable").unwrap_err(), Errno::NETUNREACH);
    let [mut here, _there] = connection("unanswered").unwrap();
    assert_eq!(here.established(), Ok(false));
    let [mut here, _there] = connection("refuse nth=2").unwrap();
    assert_eq!(here.established(), Ok(true));
}

/// A plan by which the port is down for this time from the next call of `due` on.
fn down_for(time: &str) -> &'static Plan {
    plan_of(&format!("port-down for={time} at=0s"))
}

#[test]
fn a_port_that_is_down_passes_nothing() {
    let plan = down_for("1000s");
    let [mut here, mut there] = connection_of(plan).unwrap();
    plan.due("urnic0");
    send(&mut *there, b"from there").unwrap();
    send(&mut *here, b"from here").unwrap();
    here.finish();
    assert_eq!(receive(&mut *there), Err(StreamError::WouldBlock));
    assert_eq!(receive(&mut *here), Err(StreamError::WouldBlock));
    assert_eq!(here.peek(), Err(StreamError::WouldBlock));
    assert!(here.advance(Nanos(5)).is_some(), "it looks again");
    assert_eq!(receive(&mut *there), Err(StreamError::WouldBlock));
}

#[test]
fn a_port_that_was_down_has_lost_nothing() {
    let plan = down_for("50ms");
    let [mut here, mut there] = connection_of(plan).unwrap();
    plan.due("urnic0");
    send(&mut *there, b"from there").unwrap();
    send(&mut *here, b"from ").unwrap();
    send(&mut *here, b"here").unwrap();
    here.finish();
    wait_for("the port", || {
        plan.port_down_for("urnic0").is_none().then_some(())
    });
    here.advance(Nanos(9));
    assert_eq!(receive(&mut *there).unwrap(), b"from here");
    assert_eq!(receive(&mut *there).unwrap(), b"");
    assert_eq!(receive(&mut *here).unwrap(), b"from there");
}

#[test]
fn a_peer_that_waits_for_a_port_that_is_down_gives_up() {
    let plan = down_for("1000s");
    let [mut here, mut there] = connection_of(plan).unwrap();
    plan.due("urnic0");
    let second = Duration::from_secs(1);
    // Nothing waits on an idle connection.
    assert!(here.advance(Nanos(0)).is_some());
    assert!(here.advance(Nanos(0) + 60 * second).is_some());
    send(&mut *there, b"1").unwrap();
    let since = Nanos(0) + 100 * second;
    assert_eq!(here.advance(since), Some(since + 2 * second));
    assert!(send(&mut *there, b"2").is_ok());
    here.advance(since + 2 * second);
    assert!(receive(&mut *there).is_err());
    assert_eq!(receive(&mut *here), Err(StreamError::Closed(Errno::CONNRESET)));
}

/// The peer asked before, and the answer waits for the port.
#[test]
fn a_peer_whose_answer_waits_for_a_port_gives_up() {
    let plan = down_for("1000s");
    let [mut here, mut there] = connection_of(plan).unwrap();
    plan.due("urnic0");
    assert!(here.advance(Nanos(0)).is_some());
    send(&mut *here, b"answer").unwrap();
    let since = Nanos(0) + Duration::from_secs(1);
    let gives_up = since + Duration::from_secs(2);
    assert_eq!(here.advance(since), Some(gives_up));
    here.advance(gives_up);
    assert!(receive(&mut *there).is_err());
}

/// The time of the queue pair's attributes, not the usual one.
#[test]
fn a_peer_gives_up_after_the_time_of_the_queue_pair() {
    let plan = down_for("1000s");
    let [mut here, mut there] = connection_of(plan).unwrap();
    here.probe_peer(Probing::Within(Duration::from_secs(30)));
    plan.due("urnic0");
    send(&mut *there, b"1").unwrap();
    let gives_up = Nanos(0) + Duration::from_secs(30);
    assert_eq!(here.advance(Nanos(0)), Some(gives_up));
}

#[test]
fn requests_to_a_port_that_is_down_are_unanswered() {
    let plan = down_for("1000s");
    let [mut here, _there] = connection_of(plan).unwrap();
    assert_eq!(here.unacknowledged(), 0);
    here.advance(Nanos(0));
    plan.due("urnic0");
    send(&mut *here, b"123").unwrap();
    here.advance(Nanos(0) + Duration::from_secs(3));
    let answers = here.answers().unwrap();
    assert!(here.unacknowledged() >= 3);
    assert_eq!(answers.last, Duration::from_secs(3));
    assert!(answers.retransmissions >= 3, "{answers:?}");
    assert_eq!(connection_of(plan).unwrap_err(), Errno::NETUNREACH);
}

const REQUEST: &[u8] = b"MPA ID Req Frame\x50\x02\x00\x06\x80\x01\x40\x01hi";
const REPLY: &[u8] = b"MPA ID Rep Frame\x40\x01\x00\x00";

/// An FPDU whose message ends with it, or goes on.
fn message(last: bool) -> Vec<u8> {
    let mut buffer = [0; 64];
    let control = if last { 0xc1 } else { 0x81 };
    let ulpdu = [&[control, 0x40][..], &[0; 28]].concat();
    let len = fpdu::emit(&ulpdu, CrcMode::On, &mut buffer);
    buffer[..len].to_vec()
}

#[test]
fn a_connection_is_rejected_as_if_by_the_peer() {
    let [mut here, mut there] = connection("reject").unwrap();
    assert_eq!(send(&mut *here, &REQUEST[..9]), Ok(9));
    assert_eq!(receive(&mut *here), Err(StreamError::WouldBlock));
    assert_eq!(send(&mut *here, &REQUEST[9..]), Ok(REQUEST.len() - 9));
    assert_eq!(here.peek(), Ok(true));
    let said = receive(&mut *here).unwrap();
    let (reply, rest) = StartupFrame::parse(&said).unwrap();
    assert!(reply.kind == FrameKind::Reply && reply.flags.reject && rest.is_empty());
    assert_eq!((reply.revision, reply.word.is_some()), (2, true));
    assert_eq!(receive(&mut *here).unwrap(), b"");
    // The peer sees a connection on which nothing is sent.
    assert_eq!(receive(&mut *there).unwrap(), b"");
}

#[test]
fn messages_of_both_directions_count() {
    let [mut here, mut there] = connection("reset after=2msg").unwrap();
    send(&mut *here, REQUEST).unwrap();
    send(&mut *there, REPLY).unwrap();
    receive(&mut *here).unwrap();
    send(&mut *here, &message(false)).unwrap();
    send(&mut *here, &message(true)).unwrap();
    assert_eq!(here.peek(), Err(StreamError::WouldBlock));
    send(&mut *there, &message(true)).unwrap();
    receive(&mut *here).unwrap();
    assert_eq!(
        send(&mut *here, &message(true)),
        Err(StreamError::Closed(Errno::CONNRESET))
    );
}

/// It comes after a whole frame, wherever the stream is cut.
#[test]
fn a_terminate_comes_when_a_frame_has_ended() {
    let [mut here, mut there] = connection("terminate code=0x1202 after=1msg").unwrap();
    send(&mut *here, REQUEST).unwrap();
    let frame = message(false);
    send(&mut *there, &[REPLY, &frame[..10]].concat()).unwrap();
    assert_eq!(receive(&mut *here).unwrap().len(), REPLY.len() + 10);
    assert_ne!(here.has_input(), Some(true));
    send(&mut *here, &message(true)).unwrap();
    send(&mut *there, &[&frame[10..], &message(true)].concat()).unwrap();
    let mut rest = Vec::new();
    while rest.len() < frame.len() - 10 {
        rest.extend(receive(&mut *here).unwrap());
        // There is more: nobody tells of that.
        assert_eq!(here.has_input(), Some(true));
    }
    assert_eq!(rest, frame[10..]);
    let said = receive(&mut *here).unwrap();
    let (ulpdu, rest) = fpdu::parse(&said, CrcMode::On).unwrap();
    let Body::Terminate(terminate) = Segment::parse(ulpdu).unwrap().body else {
        panic!("{said:?}")
    };
    assert_eq!((terminate.layer, terminate.etype, terminate.code), (1, 2, 2));
    assert_eq!((rest, receive(&mut *here).unwrap()), (&b""[..], vec![]));
    // Nobody receives what is sent after it.
    assert!(send(&mut *here, &message(true)).is_ok());
}
