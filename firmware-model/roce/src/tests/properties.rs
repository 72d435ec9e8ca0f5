//! Properties: any network and any mix of messages, and a peer that sends anything.

use super::network::{Weather, at, requester_attributes, responder_attributes};
use super::pair::both_ways;
use crate::message::{Kind, MAX_MESSAGE_LEN, Message, Mtu};
use crate::requester::{Requester, Status};
use crate::responder::{Arrival, Responder, Step};
use proptest::prelude::*;
use urnic_wire::roce::{Aeth, AtomicEth, Credits, NakCode, Psn, Request, Response, Reth, Syndrome, Transfer};

fn any_aeth() -> impl Strategy<Value = Aeth> {
    let syndrome = prop_oneof![
        6 => Just(Syndrome::Ack(Credits::INVALID)),
        1 => (0u8..32).prop_map(Syndrome::RnrNak),
        1 => Just(Syndrome::Nak(NakCode::PsnSequenceError)),
        1 => Just(Syndrome::Nak(NakCode::RemoteAccessError)),
    ];
    syndrome.prop_map(|syndrome| Aeth { syndrome, msn: 0 })
}

fn any_response() -> impl Strategy<Value = Response> {
    prop_oneof![
        any_aeth().prop_map(Response::Acknowledge),
        any_aeth().prop_map(Response::ReadFirst),
        Just(Response::ReadMiddle),
        any_aeth().prop_map(Response::ReadLast),
        any_aeth().prop_map(Response::ReadOnly),
        any_aeth().prop_map(|aeth| Response::AtomicAcknowledge(aeth, 1)),
    ]
}

fn any_request() -> impl Strategy<Value = Request> {
    let reth = any::<u32>().prop_map(|length| Reth {
        address: u64::MAX - 100,
        rkey: 1,
        length,
    });
    let add = any::<u64>().prop_map(|address| AtomicEth {
        address,
        rkey: 1,
        swap_or_add: 1,
        compare: 0,
    });
    let transfer = prop_oneof![
        Just(Transfer::SendFirst),
        Just(Transfer::SendMiddle),
        Just(Transfer::SendLast(None)),
        Just(Transfer::SendOnly(None)),
        reth.clone().prop_map(Transfer::WriteFirst),
        Just(Transfer::WriteMiddle),
        Just(Transfer::WriteLast(None)),
    ];
    prop_oneof![
        4 => transfer.prop_map(Request::Transfer),
        2 => reth.prop_map(Request::Read),
        1 => add.prop_map(Request::FetchAdd),
    ]
}

/// A PSN near the window, or any.
fn any_distance() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0u32..12, 1 => (0u32..12).prop_map(|n| 0u32.wrapping_sub(n)), 1 => any::<u32>()]
}

fn any_len() -> impl Strategy<Value = usize> {
    prop_oneof![Just(256usize), 0usize..300]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn messages_survive_any_network(
        (mtu, seed, count) in (prop::sample::select(Mtu::ALL.to_vec()), any::<u64>(), 1u64..30),
        (loss, duplication, congestion) in (0u64..8, 0u64..30, 0u64..10),
        (delay, late_receives) in (1u64..200_000, 0u64..300_000),
    ) {
        let weather = Weather { loss, duplication, delay, late_receives, congestion };
        both_ways(mtu, seed, weather, count);
    }
}

proptest! {
    #[test]
    fn a_hostile_responder_ends_at_most_the_connection(
        packets in prop::collection::vec((any_distance(), any_response(), any_len(), 0u64..100_000), 0..60),
    ) {
        let first = Psn::new(0xff_fffa);
        let mut requester = Requester::new(requester_attributes(Mtu::Bytes256, first));
        let kinds = [
            (Kind::Send, 600),
            (Kind::Read(at(0)), 1000),
            (Kind::FetchAdd { remote: at(0), add: 1 }, 8),
            (Kind::Write(at(0)), 300),
        ];
        for (id, (kind, length)) in (0..).zip(kinds) {
            let message = Message { id, kind, length, solicited: false, fence: false };
            requester.post(message).unwrap();
        }
        let (mut now, mut completions) = (0, Vec::new());
        for (distance, response, len, wait) in packets {
            while requester.transmit(now).is_some() {}
            requester.receive(now, first.after(distance), &response, len);
            now += wait;
            requester.on_timer(now);
            completions.extend(std::iter::from_fn(|| requester.poll()));
        }
        let ids: Vec<_> = completions.iter().map(|it| it.id).collect();
        prop_assert!(ids.iter().copied().eq(0..ids.len() as u64), "each once, in order");
        let mut statuses = completions.iter().map(|it| it.status).skip_while(|it| *it == Status::Success);
        let failed = statuses.next();
        prop_assert!(failed != Some(Status::Flushed) && statuses.all(|it| it == Status::Flushed));
        prop_assert_eq!(failed.is_some(), requester.is_ended());
        prop_assert!(failed.is_none() || ids.len() == kinds.len());
    }

    #[test]
    fn a_hostile_requester_ends_at_most_the_connection(
        packets in prop::collection::vec((any_distance(), any_request(), any_len(), 0usize..20), 0..60),
    ) {
        let mut responder = Responder::new(responder_attributes(Mtu::Bytes256, Psn::MAX));
        for (distance, request, payload_len, answers) in packets {
            // Most are the next one.
            let psn = responder.expected().after(distance.saturating_sub(8));
            let arrival = Arrival { psn, request, payload_len, ack_request: false };
            let before = responder.expected();
            match responder.receive(&arrival) {
                Step::Ignored => prop_assert_eq!(responder.expected(), before),
                Step::Place(placement) => {
                    prop_assert!(placement.place().length as usize == payload_len && payload_len <= 256);
                    placement.done();
                    prop_assert_eq!(responder.expected(), before.after(1));
                }
                Step::Read(check) => {
                    prop_assert!(check.memory().length <= MAX_MESSAGE_LEN);
                    check.done();
                }
                Step::Atomic(execution) => {
                    prop_assert!(execution.operand().address % 8 == 0);
                    execution.done(1);
                }
            }
            for _ in 0..answers {
                match responder.transmit() {
                    Some(packet) => prop_assert!(packet.data.length <= 256),
                    None => break,
                }
            }
        }
    }
}
