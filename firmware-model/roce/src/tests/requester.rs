//! Rules of the requester, packet by packet.

use super::network::{at, requester_attributes};
use crate::message::{Kind, MAX_MESSAGE_LEN, Message, Mtu, PostError};
use crate::requester::{Attributes, Completion, Effect, Packet, Requester, Status};
use urnic_wire::roce::{
    Aeth, Credits, NakCode, Psn, Request, Response, Reth, Syndrome, Transfer, local_ack_timeout_ns,
    rnr_timer_ns,
};

const FIRST: Psn = Psn::new(0xff_fffe);
const MTU: usize = 256;

fn attributes() -> Attributes {
    requester_attributes(Mtu::Bytes256, FIRST)
}

fn aeth(syndrome: Syndrome) -> Aeth {
    Aeth { syndrome, msn: 0 }
}

const ACK: Aeth = Aeth {
    syndrome: Syndrome::Ack(Credits::INVALID),
    msn: 0,
};

fn message(id: u64, kind: Kind, length: usize) -> Message {
    Message {
        id,
        kind,
        length: length as u32,
        solicited: false,
        fence: false,
    }
}

/// A requester with these messages, numbered from 0.
fn posted(attributes: Attributes, messages: &[(Kind, usize)]) -> Requester {
    let mut requester = Requester::new(attributes);
    for (id, (kind, length)) in (0..).zip(messages) {
        requester.post(message(id, *kind, *length)).unwrap();
    }
    requester
}

fn sent(requester: &mut Requester, now: u64) -> Vec<Packet> {
    std::iter::from_fn(|| requester.transmit(now)).collect()
}

fn completed(requester: &mut Requester) -> Vec<(u64, Status)> {
    let polled = std::iter::from_fn(|| requester.poll());
    polled.map(|Completion { id, status }| (id, status)).collect()
}

/// Gives the response for the packet `index` of the connection.
fn respond(requester: &mut Requester, index: u32, response: Response) {
    assert_eq!(
        requester.receive(0, FIRST.after(index), &response, 0),
        Effect::None
    );
}

fn nak(code: NakCode) -> Response {
    Response::Acknowledge(aeth(Syndrome::Nak(code)))
}

fn transfers(packets: &[Packet]) -> Vec<Request> {
    packets.iter().map(|packet| packet.request).collect()
}

#[test]
fn messages_are_cut_by_the_path_mtu() {
    let memory = at(5);
    let reth = Reth {
        address: memory.address,
        rkey: memory.rkey,
        length: 600,
    };
    let immediate = [1, 2, 3, 4];
    let only_invalidates = [Request::SendOnlyInvalidate(9)];
    let send = |last| [Transfer::SendFirst, Transfer::SendMiddle, last].map(Request::Transfer);
    let write = |last| [Transfer::WriteFirst(reth), Transfer::WriteMiddle, last].map(Request::Transfer);
    let invalidates = [
        Request::Transfer(Transfer::SendFirst),
        Request::Transfer(Transfer::SendMiddle),
        Request::SendLastInvalidate(9),
    ];
    for (kind, length, expected) in [
        (Kind::Send, 600, &send(Transfer::SendLast(None))[..]),
        (
            Kind::SendImmediate(immediate),
            600,
            &send(Transfer::SendLast(Some(immediate))),
        ),
        (Kind::SendInvalidate(9), 600, &invalidates),
        (Kind::SendInvalidate(9), 256, &only_invalidates),
        (Kind::Send, 0, &[Request::Transfer(Transfer::SendOnly(None))]),
        (Kind::Write(memory), 600, &write(Transfer::WriteLast(None))),
        (
            Kind::WriteImmediate(memory, immediate),
            600,
            &write(Transfer::WriteLast(Some(immediate))),
        ),
        (Kind::Read(memory), 600, &[Request::Read(reth)]),
    ] {
        let packets = sent(&mut posted(attributes(), &[(kind, length)]), 0);
        assert_eq!(transfers(&packets), expected, "{kind:?}");
        let ack_requests: Vec<_> = packets.iter().map(|packet| packet.ack_request).collect();
        assert_eq!(ack_requests.last(), Some(&true));
        if !kind.needs_resource() {
            let (mut offset, mut psn) = (0, FIRST);
            for packet in &packets {
                assert_eq!((packet.offset, packet.psn), (offset, psn));
                (offset, psn) = (offset + packet.length, psn.after(1));
            }
            assert_eq!(offset as usize, length);
        }
    }
}

#[test]
fn messages_that_cannot_be_are_refused() {
    let mut requester = Requester::new(Attributes {
        max_rd_atomic: 0,
        ..attributes()
    });
    let long = MAX_MESSAGE_LEN as usize + 1;
    assert_eq!(
        requester.post(message(0, Kind::Send, long)),
        Err(PostError::Length(MAX_MESSAGE_LEN + 1))
    );
    assert_eq!(requester.post(message(0, Kind::Send, long - 1)), Ok(()));
    for kind in [
        Kind::Read(at(0)),
        Kind::FetchAdd {
            remote: at(0),
            add: 1,
        },
    ] {
        assert_eq!(requester.post(message(0, kind, 8)), Err(PostError::NoResources));
    }
}

#[test]
fn only_the_last_packet_is_solicited_if_it_takes_a_receive() {
    for (kind, expected) in [
        (Kind::Send, [false, true]),
        (Kind::WriteImmediate(at(0), [0; 4]), [false, true]),
        (Kind::Write(at(0)), [false, false]),
    ] {
        let mut requester = Requester::new(attributes());
        let solicited = Message {
            solicited: true,
            ..message(0, kind, 300)
        };
        requester.post(solicited).unwrap();
        let packets = sent(&mut requester, 0);
        assert_eq!(
            packets.iter().map(|it| it.solicited).collect::<Vec<_>>(),
            expected
        );
    }
}

#[test]
fn one_acknowledgement_completes_all_before_it() {
    let mut requester = posted(
        attributes(),
        &[(Kind::Send, 0), (Kind::Write(at(0)), 300), (Kind::Send, 300)],
    );
    assert_eq!(sent(&mut requester, 0).len(), 5);
    // The first packet of the third message.
    respond(&mut requester, 3, Response::Acknowledge(ACK));
    assert_eq!(
        completed(&mut requester),
        [(0, Status::Success), (1, Status::Success)]
    );
    respond(&mut requester, 4, Response::Acknowledge(ACK));
    assert_eq!(completed(&mut requester), [(2, Status::Success)]);
    assert_eq!(requester.deadline(), None, "nothing is in flight");
}

#[test]
fn a_read_response_acknowledges_what_is_before_the_read() {
    let mut requester = posted(
        attributes(),
        &[(Kind::Send, 0), (Kind::Read(at(0)), 100), (Kind::Send, 0)],
    );
    assert_eq!(sent(&mut requester, 0).len(), 3);
    let effect = requester.receive(0, FIRST.after(1), &Response::ReadOnly(ACK), 100);
    assert_eq!(effect, Effect::Place { id: 1, offset: 0 });
    assert_eq!(
        completed(&mut requester),
        [(0, Status::Success), (1, Status::Success)]
    );
}

#[test]
fn a_later_acknowledgement_shows_that_a_response_was_lost() {
    let mut requester = posted(attributes(), &[(Kind::Read(at(0)), 100), (Kind::Send, 0)]);
    assert_eq!(sent(&mut requester, 0).len(), 2);
    respond(&mut requester, 1, Response::Acknowledge(ACK));
    assert!(completed(&mut requester).is_empty());
    let again = sent(&mut requester, 0);
    assert_eq!(again.len(), 2);
    assert!(again.iter().all(|packet| packet.repeated));
    // It is shown once more by a duplicate, which changes nothing.
    respond(&mut requester, 1, Response::Acknowledge(ACK));
    assert!(sent(&mut requester, 0).is_empty());
}

#[test]
fn a_read_begins_again_with_its_first_missing_byte() {
    let mut requester = posted(attributes(), &[(Kind::Read(at(0)), 3 * MTU + 10)]);
    let first = sent(&mut requester, 0);
    assert_eq!(first.len(), 1);
    requester.receive(0, FIRST, &Response::ReadFirst(ACK), MTU);
    // The second packet is missing.
    respond_len(&mut requester, 2, Response::ReadMiddle, MTU);
    let again = sent(&mut requester, 0);
    let reth = Reth {
        address: at(MTU).address,
        rkey: at(0).rkey,
        length: 2 * MTU as u32 + 10,
    };
    assert_eq!(transfers(&again), [Request::Read(reth)]);
    assert_eq!((again[0].psn, again[0].offset), (FIRST.after(1), MTU as u32));
    // The response to the repeated request, in which the first packet is called First.
    for (index, response, len) in [
        (1, Response::ReadFirst(ACK), MTU),
        (2, Response::ReadMiddle, MTU),
        (3, Response::ReadLast(ACK), 10),
    ] {
        let effect = requester.receive(0, FIRST.after(index), &response, len);
        let offset = index * MTU as u32;
        assert_eq!(effect, Effect::Place { id: 0, offset });
    }
    assert_eq!(completed(&mut requester), [(0, Status::Success)]);
}

fn respond_len(requester: &mut Requester, index: u32, response: Response, len: usize) {
    assert_eq!(
        requester.receive(0, FIRST.after(index), &response, len),
        Effect::None
    );
}

#[test]
fn a_sequence_error_sends_again_from_its_packet() {
    let mut requester = posted(attributes(), &[(Kind::Send, 5 * MTU)]);
    assert_eq!(sent(&mut requester, 0).len(), 5);
    respond(&mut requester, 2, nak(NakCode::PsnSequenceError));
    let again = sent(&mut requester, 0);
    assert_eq!(again[0].psn, FIRST.after(2));
    assert_eq!(again.len(), 3);
    assert!(again[0].repeated && again[0].offset == 2 * MTU as u32);
}

#[test]
fn retries_are_counted_until_something_is_acknowledged() {
    let limited = Attributes {
        retry_cnt: 1,
        ..attributes()
    };
    let mut requester = posted(limited, &[(Kind::Send, 2 * MTU)]);
    for index in [0, 1] {
        sent(&mut requester, 0);
        respond(&mut requester, index, nak(NakCode::PsnSequenceError));
        assert!(!requester.is_ended(), "the second one acknowledges a packet");
    }
    sent(&mut requester, 0);
    respond(&mut requester, 1, nak(NakCode::PsnSequenceError));
    assert_eq!(completed(&mut requester), [(0, Status::RetryExceeded)]);
    assert!(requester.transmit(0).is_none());
}

#[test]
fn negative_acknowledgements_end_with_their_status() {
    for (code, status) in [
        (NakCode::InvalidRequest, Status::RemoteInvalidRequest),
        (NakCode::RemoteAccessError, Status::RemoteAccess),
        (NakCode::RemoteOperationalError, Status::RemoteOperation),
        (NakCode::InvalidRdRequest, Status::BadResponse),
    ] {
        let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0), (Kind::Send, 0)]);
        sent(&mut requester, 0);
        respond(&mut requester, 1, nak(code));
        assert_eq!(
            completed(&mut requester),
            [(0, Status::Success), (1, status), (2, Status::Flushed)]
        );
        requester.post(message(3, Kind::Send, 0)).unwrap();
        assert_eq!(completed(&mut requester), [(3, Status::Flushed)]);
        assert_eq!(requester.deadline(), None);
    }
}

#[test]
fn an_rnr_nak_waits_for_its_time() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0)]);
    sent(&mut requester, 0);
    respond(
        &mut requester,
        0,
        Response::Acknowledge(aeth(Syndrome::RnrNak(12))),
    );
    // A duplicate of it does not prolong the time.
    respond(
        &mut requester,
        0,
        Response::Acknowledge(aeth(Syndrome::RnrNak(1))),
    );
    let at = rnr_timer_ns(12);
    assert_eq!(requester.deadline(), Some(at));
    requester.on_timer(at - 1);
    assert!(requester.transmit(at - 1).is_none());
    requester.on_timer(at);
    assert_eq!(sent(&mut requester, at).len(), 2);
}

#[test]
fn rnr_retries_are_counted_until_something_is_acknowledged() {
    let limited = Attributes {
        rnr_retry: 1,
        ..attributes()
    };
    let not_ready = Response::Acknowledge(aeth(Syndrome::RnrNak(1)));
    let mut requester = posted(limited, &[(Kind::Send, 0), (Kind::Send, 0)]);
    for index in [0, 1] {
        sent(&mut requester, 0);
        respond(&mut requester, index, not_ready);
        assert!(!requester.is_ended(), "the second one acknowledges a message");
        requester.on_timer(requester.deadline().unwrap());
    }
    sent(&mut requester, 0);
    respond(&mut requester, 1, not_ready);
    assert_eq!(
        completed(&mut requester),
        [(0, Status::Success), (1, Status::RnrRetryExceeded)]
    );
}

#[test]
fn an_acknowledgement_ends_the_wait_for_a_receive() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0)]);
    sent(&mut requester, 0);
    respond(
        &mut requester,
        0,
        Response::Acknowledge(aeth(Syndrome::RnrNak(12))),
    );
    respond(&mut requester, 0, Response::Acknowledge(ACK));
    assert_eq!(requester.deadline(), None);
    assert_eq!(sent(&mut requester, 0).len(), 1);
}

#[test]
fn a_response_that_is_lost_twice_is_requested_after_the_timeout() {
    let mut requester = posted(attributes(), &[(Kind::Read(at(0)), 3 * MTU)]);
    for _ in 0..2 {
        assert_eq!(sent(&mut requester, 0).len(), 1);
        respond_len(&mut requester, 1, Response::ReadMiddle, MTU);
        assert_eq!(sent(&mut requester, 0).len(), 1, "the first packet is missing");
        respond_len(&mut requester, 1, Response::ReadMiddle, MTU);
        assert!(sent(&mut requester, 0).is_empty(), "as was shown before");
        requester.on_timer(requester.deadline().unwrap());
    }
}

#[test]
fn completions_may_wait_while_packets_are_sent_again() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0), (Kind::Send, 0)]);
    sent(&mut requester, 0);
    respond(&mut requester, 1, nak(NakCode::PsnSequenceError));
    let again: Vec<_> = sent(&mut requester, 0).iter().map(|packet| packet.id).collect();
    assert_eq!(again, [1, 2]);
    assert_eq!(completed(&mut requester), [(0, Status::Success)]);
}

#[test]
fn the_first_failure_counts() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0)]);
    sent(&mut requester, 0);
    respond(&mut requester, 0, nak(NakCode::RemoteAccessError));
    requester.flush();
    assert_eq!(completed(&mut requester), [(0, Status::RemoteAccess)]);
}

#[test]
fn the_timer_runs_while_packets_are_in_flight() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0)]);
    assert_eq!(requester.deadline(), None);
    let timeout = local_ack_timeout_ns(attributes().timeout).unwrap();
    sent(&mut requester, 100);
    assert_eq!(requester.deadline(), Some(100 + timeout));
    requester.receive(500, FIRST, &Response::Acknowledge(ACK), 0);
    assert_eq!(
        requester.deadline(),
        Some(500 + timeout),
        "each acknowledgement starts it again"
    );
    let disabled = Attributes {
        timeout: 0,
        ..attributes()
    };
    let mut requester = posted(disabled, &[(Kind::Send, 0)]);
    sent(&mut requester, 0);
    assert_eq!(requester.deadline(), None);
}

#[test]
fn reads_and_atomics_in_flight_are_limited() {
    let limited = Attributes {
        max_rd_atomic: 2,
        ..attributes()
    };
    let add = Kind::FetchAdd {
        remote: at(0),
        add: 1,
    };
    let read = Kind::Read(at(0));
    let mut requester = posted(limited, &[(read, 10), (add, 8), (read, 10), (Kind::Send, 0)]);
    assert_eq!(
        sent(&mut requester, 0).len(),
        2,
        "and nothing overtakes the third"
    );
    assert_eq!(
        requester.receive(0, FIRST, &Response::ReadOnly(ACK), 10),
        Effect::Place { id: 0, offset: 0 }
    );
    assert_eq!(sent(&mut requester, 0).len(), 2);
    let effect = requester.receive(0, FIRST.after(1), &Response::AtomicAcknowledge(ACK, 77), 0);
    assert_eq!(effect, Effect::Original { id: 1, value: 77 });
}

#[test]
fn a_fence_waits_for_reads_and_atomics_only() {
    let mut requester = posted(attributes(), &[(Kind::Read(at(0)), 10), (Kind::Send, 10)]);
    let fenced = Message {
        fence: true,
        ..message(2, Kind::Send, 10)
    };
    requester.post(fenced).unwrap();
    assert_eq!(sent(&mut requester, 0).len(), 2);
    requester.receive(0, FIRST, &Response::ReadOnly(ACK), 10);
    assert_eq!(sent(&mut requester, 0).len(), 1);
}

#[test]
fn responses_that_do_not_fit_end_the_connection() {
    let cases: [(Kind, usize, Response, usize); 9] = [
        (Kind::Send, 10, Response::ReadOnly(ACK), 10),
        (Kind::Send, 10, Response::AtomicAcknowledge(ACK, 1), 0),
        (Kind::Read(at(0)), 10, Response::AtomicAcknowledge(ACK, 1), 0),
        (Kind::Read(at(0)), 10, Response::ReadOnly(ACK), 11),
        (Kind::Read(at(0)), 10, Response::ReadOnly(ACK), 9),
        (Kind::Read(at(0)), 10, Response::ReadFirst(ACK), 10),
        (Kind::Read(at(0)), 300, Response::ReadLast(ACK), MTU),
        (
            Kind::Read(at(0)),
            10,
            Response::ReadOnly(aeth(Syndrome::RnrNak(1))),
            10,
        ),
        (
            Kind::FetchAdd {
                remote: at(0),
                add: 1,
            },
            8,
            Response::ReadOnly(ACK),
            8,
        ),
    ];
    for (kind, length, response, payload_len) in cases {
        let mut requester = posted(attributes(), &[(kind, length)]);
        sent(&mut requester, 0);
        assert_eq!(requester.receive(0, FIRST, &response, payload_len), Effect::None);
        assert_eq!(
            completed(&mut requester),
            [(0, Status::BadResponse)],
            "{response:?}"
        );
    }
}

#[test]
fn responses_to_nothing_have_no_effect() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0), (Kind::Send, 0)]);
    let responses = [
        Response::Acknowledge(ACK),
        nak(NakCode::RemoteAccessError),
        nak(NakCode::PsnSequenceError),
        Response::Acknowledge(aeth(Syndrome::RnrNak(5))),
        Response::ReadMiddle,
        Response::ReadOnly(ACK),
        Response::AtomicAcknowledge(ACK, 0),
    ];
    // Nothing was sent.
    for response in responses {
        respond(&mut requester, 0, response);
    }
    sent(&mut requester, 0);
    respond(&mut requester, 1, Response::Acknowledge(ACK));
    assert_eq!(completed(&mut requester).len(), 2);
    // Everything was acknowledged.
    for response in responses {
        for index in [0, 1, 2, 3, 0x7f_ffff, 0x80_0000, 0xff_ffff] {
            respond(&mut requester, index, response);
        }
    }
    assert!(!requester.is_ended() && requester.deadline().is_none());
    requester.post(message(2, Kind::Send, 0)).unwrap();
    assert_eq!(sent(&mut requester, 0)[0].psn, FIRST.after(2));
}

#[test]
fn draining_completes_what_has_begun() {
    let mut requester = posted(attributes(), &[(Kind::Send, 0)]);
    sent(&mut requester, 0);
    requester.drain(true);
    requester.post(message(1, Kind::Send, 0)).unwrap();
    assert!(sent(&mut requester, 0).is_empty() && !requester.is_drained());
    respond(&mut requester, 0, Response::Acknowledge(ACK));
    assert!(requester.is_drained());
    requester.drain(false);
    assert_eq!(sent(&mut requester, 0).len(), 1);
}

#[test]
fn a_refused_message_fails_after_those_before_it() {
    let mut requester = posted(
        attributes(),
        &[(Kind::Send, 0), (Kind::Send, 600), (Kind::Send, 0)],
    );
    assert_eq!(
        (
            requester.transmit(0).unwrap().id,
            requester.transmit(0).unwrap().id
        ),
        (0, 1)
    );
    requester.refuse(1);
    assert!(requester.transmit(0).is_none() && completed(&mut requester).is_empty());
    respond(&mut requester, 0, Response::Acknowledge(ACK));
    assert_eq!(
        completed(&mut requester),
        [(0, Status::Success), (1, Status::Local), (2, Status::Flushed)]
    );
}

/// The last response of a Read completes it, and is placed after that.
#[test]
fn a_read_whose_last_response_cannot_be_placed_fails() {
    let kinds = [(Kind::Send, 0), (Kind::Read(at(0)), 10), (Kind::Send, 0)];
    let mut requester = posted(attributes(), &kinds);
    assert_eq!(sent(&mut requester, 0).len(), 3);
    let effect = requester.receive(0, FIRST.after(1), &Response::ReadOnly(ACK), 10);
    assert_eq!(effect, Effect::Place { id: 1, offset: 0 });
    requester.refuse(1);
    assert_eq!(
        completed(&mut requester),
        [(0, Status::Success), (1, Status::Local), (2, Status::Flushed)]
    );
}

#[test]
fn the_window_grows_and_falls() {
    let wide = Attributes {
        window: 1000,
        ..attributes()
    };
    let mut requester = posted(wide, &[(Kind::Send, 3000 * MTU)]);
    assert_eq!(sent(&mut requester, 0).len(), 10, "few at first");
    respond(&mut requester, 9, Response::Acknowledge(ACK));
    assert_eq!(sent(&mut requester, 0).len(), 20, "twice as many each round trip");
    respond(&mut requester, 29, Response::Acknowledge(ACK));
    assert_eq!(sent(&mut requester, 0).len(), 40);
    // One loss is one event, however often it is shown.
    respond(&mut requester, 30, nak(NakCode::PsnSequenceError));
    let half = requester.window();
    assert_eq!(half, 20);
    requester.congestion_notified();
    assert_eq!(requester.window(), half);
    assert_eq!(sent(&mut requester, 0).len(), 20);
    // Then a packet for each round trip.
    respond(&mut requester, 49, Response::Acknowledge(ACK));
    assert_eq!(requester.window(), 21);
    sent(&mut requester, 0);
    requester.on_timer(requester.deadline().unwrap());
    assert_eq!(sent(&mut requester, 0).len(), 1, "one packet after a timeout");
}

#[test]
fn a_full_window_has_an_acknowledgement_on_its_way() {
    let mut requester = posted(attributes(), &[(Kind::Send, 500 * MTU)]);
    let mut index = 0;
    while index < 500 {
        let packets = sent(&mut requester, 0);
        let requested = packets
            .iter()
            .rposition(|packet| packet.ack_request)
            .expect("a request");
        index += requested as u32 + 1;
        respond(&mut requester, index - 1, Response::Acknowledge(ACK));
        // Those after it were sent already.
        index += (packets.len() - requested - 1) as u32;
        respond(&mut requester, index - 1, Response::Acknowledge(ACK));
    }
    assert_eq!(completed(&mut requester), [(0, Status::Success)]);
}
