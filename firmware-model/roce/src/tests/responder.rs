//! Rules of the responder, packet by packet.

use super::network::{at, responder_attributes};
use crate::message::{MAX_MESSAGE_LEN, Mtu};
use crate::responder::{Arrival, Fault, Packet, Refusal, Responder, Step, Target};
use urnic_wire::roce::{Aeth, AtomicEth, Credits, NakCode, Psn, Request, Response, Reth, Syndrome, Transfer};

const FIRST: Psn = Psn::new(0xff_fffe);
const MTU: usize = 256;
/// Reads and atomic operations at a time.
const MOST: u32 = 4;

fn responder() -> Responder {
    Responder::new(responder_attributes(Mtu::Bytes256, FIRST))
}

fn arrival(index: u32, request: Request, payload_len: usize) -> Arrival {
    Arrival {
        psn: FIRST.after(index),
        request,
        payload_len,
        ack_request: true,
    }
}

fn transfer(index: u32, transfer: Transfer, payload_len: usize) -> Arrival {
    arrival(index, Request::Transfer(transfer), payload_len)
}

fn send(index: u32) -> Arrival {
    transfer(index, Transfer::SendOnly(None), 10)
}

fn reth(length: usize) -> Reth {
    Reth {
        address: at(0).address,
        rkey: at(0).rkey,
        length: length as u32,
    }
}

fn add(address: u64) -> Request {
    Request::FetchAdd(AtomicEth {
        address,
        rkey: 1,
        swap_or_add: 1,
        compare: 0,
    })
}

/// Executes a request, whatever it is; returns whether there was something to execute.
fn execute(responder: &mut Responder, arrival: &Arrival) -> bool {
    match responder.receive(arrival) {
        Step::Ignored => return false,
        Step::Place(placement) => placement.done(),
        Step::Read(check) => check.done(),
        Step::Atomic(execution) => execution.done(arrival.psn.number().into()),
    }
    true
}

fn refuse(responder: &mut Responder, arrival: &Arrival, refusal: Refusal) {
    match responder.receive(arrival) {
        Step::Ignored => panic!("nothing to refuse"),
        Step::Place(placement) => placement.refuse(refusal),
        Step::Read(check) => check.refuse(refusal),
        Step::Atomic(execution) => execution.refuse(refusal),
    }
}

fn answers(responder: &mut Responder) -> Vec<Packet> {
    std::iter::from_fn(|| responder.transmit()).collect()
}

/// The only packet to send: an acknowledgement, by the index of its PSN, and its MSN.
fn acknowledgement(responder: &mut Responder) -> (u32, Syndrome, u32) {
    let answers = answers(responder);
    let [packet] = answers[..] else {
        panic!("{answers:?}");
    };
    let Response::Acknowledge(Aeth { syndrome, msn }) = packet.response else {
        panic!("{packet:?}");
    };
    (packet.psn.since(FIRST) as u32, syndrome, msn)
}

const ACK: Syndrome = Syndrome::Ack(Credits::INVALID);

#[test]
fn packets_of_a_message_are_placed_one_after_the_other() {
    let mut responder = responder();
    let immediate = Some([1, 2, 3, 4]);
    for (index, packet, len, offset, ends) in [
        (0, Transfer::SendFirst, MTU, 0, false),
        (1, Transfer::SendMiddle, MTU, MTU, false),
        (2, Transfer::SendLast(immediate), 7, 2 * MTU, true),
    ] {
        let arrival = transfer(index, packet, len);
        let Step::Place(placement) = responder.receive(&arrival) else {
            panic!("packet {index}");
        };
        let place = placement.place();
        let offset = offset as u32;
        assert_eq!(place.target, Target::Receive { offset });
        assert_eq!((place.takes_receive, place.length), (index == 0, len as u32));
        assert_eq!(place.end.is_some(), ends);
        if let Some(end) = place.end {
            assert_eq!((end.length, end.completes_receive), (2 * MTU as u32 + 7, true));
            assert_eq!(end.immediate, immediate);
        }
        placement.done();
    }
    assert_eq!(acknowledgement(&mut responder), (2, ACK, 1));
}

#[test]
fn a_write_checks_all_its_memory_first() {
    let mut responder = responder();
    let reth = reth(MTU + 3);
    for (index, packet, len) in [
        (0, Transfer::WriteFirst(reth), MTU),
        (1, Transfer::WriteLast(Some([0; 4])), 3),
    ] {
        let arrival = transfer(index, packet, len);
        let Step::Place(placement) = responder.receive(&arrival) else {
            panic!("packet {index}");
        };
        let place = placement.place();
        let target = Target::Memory {
            address: at(index as usize * MTU).address,
            rkey: reth.rkey,
        };
        assert_eq!(place.target, target);
        assert_eq!(place.whole, (index == 0).then_some(reth));
        assert_eq!(
            place.takes_receive,
            index == 1,
            "the receive is that of the immediate data"
        );
        placement.done();
    }
    // A Write of no bytes needs no rights.
    let empty = Reth { length: 0, ..reth };
    let arrival = transfer(2, Transfer::WriteOnly(empty, None), 0);
    let Step::Place(placement) = responder.receive(&arrival) else {
        panic!("an empty Write");
    };
    assert_eq!((placement.place().whole, placement.place().length), (None, 0));
}

#[test]
fn acknowledgements_come_together_or_when_they_are_requested() {
    let mut responder = responder();
    for index in 0..3 {
        assert!(execute(&mut responder, &send(index)));
    }
    assert_eq!(acknowledgement(&mut responder), (2, ACK, 3));
    assert!(answers(&mut responder).is_empty());
    let unrequested = |index| Arrival {
        ack_request: false,
        ..send(index)
    };
    for index in 3..18 {
        execute(&mut responder, &unrequested(index));
    }
    assert!(answers(&mut responder).is_empty());
    execute(&mut responder, &unrequested(18));
    assert_eq!(acknowledgement(&mut responder), (18, ACK, 19), "the sixteenth");
}

#[test]
fn a_gap_is_reported_once() {
    let mut responder = responder();
    execute(&mut responder, &send(0));
    assert_eq!(acknowledgement(&mut responder), (0, ACK, 1));
    for index in [2, 3, 4] {
        assert!(!execute(&mut responder, &send(index)));
    }
    let gap = Syndrome::Nak(NakCode::PsnSequenceError);
    assert_eq!(acknowledgement(&mut responder), (1, gap, 1));
    assert!(!execute(&mut responder, &send(5)));
    assert!(answers(&mut responder).is_empty());
    // The next gap is another one.
    execute(&mut responder, &send(1));
    execute(&mut responder, &send(3));
    assert_eq!(acknowledgement(&mut responder), (2, gap, 2));
    // A gap that is filled before it is reported needs no report.
    execute(&mut responder, &send(2));
    execute(&mut responder, &send(4));
    execute(&mut responder, &send(3));
    assert_eq!(acknowledgement(&mut responder), (3, ACK, 4));
}

#[test]
fn a_message_without_a_receive_comes_again() {
    let mut responder = responder();
    refuse(&mut responder, &send(0), Refusal::NotReady);
    // Those that were sent after it are not asked for.
    assert!(!execute(&mut responder, &send(1)));
    assert_eq!(acknowledgement(&mut responder), (0, Syndrome::RnrNak(3), 0));
    refuse(&mut responder, &send(0), Refusal::NotReady);
    assert_eq!(
        acknowledgement(&mut responder),
        (0, Syndrome::RnrNak(3), 0),
        "each time"
    );
    assert!(execute(&mut responder, &send(0)));
    assert_eq!(acknowledgement(&mut responder), (0, ACK, 1));
}

#[test]
fn a_step_that_is_dropped_did_not_happen() {
    let mut responder = responder();
    let Step::Place(_) = responder.receive(&send(0)) else {
        panic!("a step");
    };
    assert_eq!(responder.expected(), FIRST);
    assert!(answers(&mut responder).is_empty());
    assert!(execute(&mut responder, &send(0)));
}

#[test]
fn duplicates_are_acknowledged_and_not_executed() {
    let mut responder = responder();
    for index in 0..3 {
        execute(&mut responder, &send(index));
    }
    answers(&mut responder);
    for index in [0, 1] {
        assert!(!execute(&mut responder, &send(index)));
    }
    assert_eq!(acknowledgement(&mut responder), (2, ACK, 3));
}

#[test]
fn refusals_end_the_connection_with_their_code() {
    for (refusal, fault, code) in [
        (Refusal::Invalid, Fault::InvalidRequest, NakCode::InvalidRequest),
        (Refusal::Access, Fault::Access, NakCode::RemoteAccessError),
        (
            Refusal::Operation,
            Fault::Operation,
            NakCode::RemoteOperationalError,
        ),
    ] {
        for request in [
            send(0),
            arrival(0, Request::Read(reth(5)), 0),
            arrival(0, add(8), 0),
        ] {
            let mut responder = responder();
            refuse(&mut responder, &request, refusal);
            assert_eq!(responder.fault(), Some(fault));
            assert!(!execute(&mut responder, &send(0)) && !execute(&mut responder, &send(1)));
            assert_eq!(acknowledgement(&mut responder), (0, Syndrome::Nak(code), 0));
            assert!(answers(&mut responder).is_empty());
        }
    }
}

#[test]
fn malformed_requests_end_the_connection() {
    let too_long = MAX_MESSAGE_LEN as usize + 1;
    let sequences: [&[(Request, usize)]; 16] = [
        &[(Request::Transfer(Transfer::SendMiddle), MTU)],
        &[(Request::Transfer(Transfer::SendLast(None)), 5)],
        &[(Request::SendLastInvalidate(1), 5)],
        &[(Request::Transfer(Transfer::WriteMiddle), MTU)],
        &[(Request::Transfer(Transfer::SendFirst), MTU - 1)],
        &[(Request::Transfer(Transfer::SendOnly(None)), MTU + 1)],
        &[
            (Request::Transfer(Transfer::SendFirst), MTU),
            (Request::Transfer(Transfer::SendOnly(None)), 5),
        ],
        &[
            (Request::Transfer(Transfer::SendFirst), MTU),
            (Request::Transfer(Transfer::SendLast(None)), 0),
        ],
        &[
            (Request::Transfer(Transfer::SendFirst), MTU),
            (Request::Transfer(Transfer::WriteMiddle), MTU),
        ],
        &[
            (Request::Transfer(Transfer::SendFirst), MTU),
            (Request::Read(reth(5)), 0),
        ],
        &[(Request::Transfer(Transfer::SendFirst), MTU), (add(8), 0)],
        &[(Request::Transfer(Transfer::WriteOnly(reth(5), None)), 4)],
        &[(Request::Transfer(Transfer::WriteFirst(reth(5))), MTU)],
        &[(Request::Transfer(Transfer::WriteFirst(reth(too_long))), MTU)],
        &[(Request::Read(reth(too_long)), 0)],
        &[(add(12), 0)],
    ];
    for sequence in sequences {
        let mut responder = responder();
        let (last, before) = sequence.split_last().unwrap();
        for (index, (request, len)) in (0..).zip(before) {
            assert!(execute(&mut responder, &arrival(index, *request, *len)));
        }
        answers(&mut responder);
        let index = before.len() as u32;
        assert!(
            !execute(&mut responder, &arrival(index, last.0, last.1)),
            "{sequence:?}"
        );
        assert_eq!(responder.fault(), Some(Fault::InvalidRequest));
        let nak = Syndrome::Nak(NakCode::InvalidRequest);
        assert_eq!(acknowledgement(&mut responder), (index, nak, 0));
    }
}

#[test]
fn reads_are_answered_in_order_and_cut_by_the_path_mtu() {
    let mut responder = responder();
    execute(&mut responder, &send(0));
    execute(&mut responder, &arrival(1, Request::Read(reth(2 * MTU + 1)), 0));
    execute(&mut responder, &arrival(4, add(8), 0));
    execute(&mut responder, &arrival(5, Request::Read(reth(0)), 0));
    execute(&mut responder, &send(6));
    let aeth = |msn| Aeth { syndrome: ACK, msn };
    let expected = [
        (1, Response::ReadFirst(aeth(2)), MTU),
        (2, Response::ReadMiddle, MTU),
        (3, Response::ReadLast(aeth(2)), 1),
        (
            4,
            Response::AtomicAcknowledge(aeth(3), FIRST.after(4).number().into()),
            0,
        ),
        (5, Response::ReadOnly(aeth(4)), 0),
        // The Send before the Read is acknowledged by its response.
        (6, Response::Acknowledge(aeth(5)), 0),
    ];
    let answers = answers(&mut responder);
    assert_eq!(answers.len(), expected.len());
    for (packet, (index, response, len)) in answers.iter().zip(expected) {
        assert_eq!((packet.psn, packet.response), (FIRST.after(index), response));
        assert_eq!(packet.data.length as usize, len);
        if len > 0 {
            assert_eq!(packet.data.address, at((index as usize - 1) * MTU).address);
        }
    }
}

#[test]
fn more_reads_than_agreed_end_the_connection() {
    let mut responder = responder();
    for index in 0..4 {
        assert!(execute(
            &mut responder,
            &arrival(index, Request::Read(reth(1)), 0)
        ));
    }
    assert!(!execute(&mut responder, &arrival(4, Request::Read(reth(1)), 0)));
    assert_eq!(responder.fault(), Some(Fault::InvalidRequest));
    // Those before it are answered.
    assert_eq!(answers(&mut responder).len(), 5);
}

#[test]
fn a_repeated_read_replaces_what_waits_from_there_on() {
    let mut responder = responder();
    execute(&mut responder, &arrival(0, Request::Read(reth(4 * MTU)), 0));
    execute(&mut responder, &arrival(4, Request::Read(reth(MTU)), 0));
    execute(&mut responder, &send(5));
    let _ = [responder.transmit(), responder.transmit()];
    // From its fourth packet on; the third one was not yet sent.
    let rest = Reth {
        address: at(3 * MTU).address,
        ..reth(MTU)
    };
    assert!(execute(&mut responder, &arrival(3, Request::Read(rest), 0)));
    let answers = answers(&mut responder);
    let found: Vec<_> = answers
        .iter()
        .map(|it| (it.psn.since(FIRST), it.data.address))
        .collect();
    assert_eq!(found, [(2, at(2 * MTU).address), (3, at(3 * MTU).address)]);
    assert_eq!(responder.msn(), 3, "no message more");
    // One that reaches beyond what was requested is no repetition.
    assert!(!execute(
        &mut responder,
        &arrival(4, Request::Read(reth(3 * MTU)), 0)
    ));
    let refused = responder.receive(&arrival(4, Request::Read(reth(MTU)), 0));
    let Step::Read(check) = refused else {
        panic!("a repeated Read");
    };
    check.refuse(Refusal::Access);
    assert_eq!(responder.fault(), None, "it is dropped");
}

#[test]
fn atomics_are_executed_once() {
    let mut responder = responder();
    for index in 0..6 {
        assert!(execute(&mut responder, &arrival(index, add(8), 0)));
        assert_eq!(answers(&mut responder).len(), 1);
    }
    for index in 0..6 {
        assert!(!execute(&mut responder, &arrival(index, add(8), 0)));
        let answers = answers(&mut responder);
        // As many results are kept as were agreed.
        match index {
            0 | 1 => assert!(answers.is_empty()),
            _ => {
                let original = FIRST.after(index).number().into();
                let msn = index + 1;
                let aeth = Aeth { syndrome: ACK, msn };
                assert_eq!(answers[0].response, Response::AtomicAcknowledge(aeth, original));
                assert_eq!(answers[0].psn, FIRST.after(index));
            }
        }
    }
}

#[test]
fn memory_that_goes_away_ends_the_connection() {
    let mut responder = responder();
    execute(&mut responder, &arrival(0, Request::Read(reth(3 * MTU)), 0));
    responder.transmit().unwrap();
    let second = responder.transmit().unwrap();
    responder.refuse(&second, Fault::Access);
    let nak = Syndrome::Nak(NakCode::RemoteAccessError);
    assert_eq!(acknowledgement(&mut responder), (1, nak, 1));
}

/// A peer that was asleep repeats what it has the answers of, and goes on.
#[test]
fn answers_of_repeated_requests_give_way_to_new_ones() {
    let mut responder = responder();
    let reads: Vec<Arrival> = (0..MOST)
        .map(|index| arrival(index, Request::Read(reth(10)), 0))
        .collect();
    for read in &reads {
        assert!(execute(&mut responder, read));
    }
    assert_eq!(answers(&mut responder).len(), reads.len());
    for read in &reads {
        assert!(execute(&mut responder, read));
    }
    let next = arrival(MOST, Request::Read(reth(10)), 0);
    assert!(execute(&mut responder, &next));
    assert_eq!(responder.fault(), None);
    let psns: Vec<Psn> = answers(&mut responder).iter().map(|packet| packet.psn).collect();
    assert_eq!(psns, [next.psn]);
}

/// The peer has had the first answer, and may have revoked its key by a request after it.
#[test]
fn a_repeated_read_whose_memory_has_gone_away_is_dropped() {
    let mut responder = responder();
    let read = arrival(0, Request::Read(reth(3 * MTU)), 0);
    assert!(execute(&mut responder, &read));
    assert_eq!(answers(&mut responder).len(), 3);
    assert!(execute(&mut responder, &read));
    let first = responder.transmit().unwrap();
    responder.refuse(&first, Fault::Access);
    assert_eq!(responder.fault(), None);
    assert_eq!(answers(&mut responder), []);
    assert!(execute(&mut responder, &send(3)));
}
