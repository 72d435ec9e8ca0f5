//! Every message of the peer in every state, and the same messages of strangers.

use urnic_wire::mad::RejectReason;

use super::messages::{KINDS, from_peer};
use super::*;

/// The connections in each state, with the end that has them.
fn in_each_state() -> Vec<(State, End, u32)> {
    let of = |pair: Pair, client: bool| match client {
        true => (pair.client, pair.active),
        false => (pair.server, pair.passive),
    };
    [
        (State::ReqSent, of(Pair::requested(), true)),
        (State::ReqRcvd, of(Pair::requested(), false)),
        (State::RepRcvd, of(Pair::replied(), true)),
        (State::RepSent, of(Pair::replied(), false)),
        (State::Established, of(Pair::established(), true)),
        (State::Established, of(Pair::established(), false)),
        (State::DreqSent, of(Pair::disconnecting(), true)),
        (State::TimeWait, of(Pair::ended(), true)),
        (State::TimeWait, of(Pair::ended(), false)),
    ]
    .map(|(state, (mut end, id))| {
        assert_eq!(end.state(id), Some(state));
        end.sent.clear();
        (state, end, id)
    })
    .into()
}

/// The state after a message of the peer, what is sent, and the event.
type Outcome = (Option<State>, &'static [&'static str], Option<&'static str>);

/// What the protocol says. Whatever is not in the list has no effect.
fn expected(state: State, active: bool, kind: &str) -> Outcome {
    use State::*;
    match (state, kind) {
        (ReqSent, "REP") => (Some(RepRcvd), &[], Some("CONNECT_RESPONSE")),
        (ReqSent | ReqRcvd, "REJ") => (None, &[], Some("REJECTED")),
        // To the client it is the first REQ of a server, for which it has no listener.
        (ReqSent, "REQ") => (Some(ReqSent), &["REJ"], None),
        (ReqRcvd, "REQ") => (Some(ReqRcvd), &["MRA"], None),
        (RepSent, "REQ") => (Some(RepSent), &["REP"], None),
        (RepSent, "RTU") => (Some(Established), &[], Some("ESTABLISHED")),
        (RepRcvd, "REP") => (Some(RepRcvd), &["MRA"], None),
        (Established, "REP") if active => (Some(Established), &["RTU"], None),
        (RepRcvd | RepSent | Established, "REJ") => (Some(TimeWait), &[], Some("REJECTED")),
        (RepSent | Established | DreqSent, "DREQ") => (Some(TimeWait), &["DREP"], Some("DISCONNECTED")),
        (DreqSent, "DREP" | "REJ") => (Some(TimeWait), &[], Some("DISCONNECTED")),
        (TimeWait, "DREQ") => (Some(TimeWait), &["DREP"], None),
        (TimeWait, "REQ") => (Some(TimeWait), &["REJ"], None),
        // Its sender cannot know the number of this end's connection.
        (ReqSent, "DREQ") => (Some(ReqSent), &["DREP"], None),
        _ => (Some(state), &[], None),
    }
}

#[test]
fn cmc_13_every_message_in_every_state() {
    for kind in KINDS {
        for (state, mut end, id) in in_each_state() {
            let active = end.route.local == CLIENT;
            end.admission = Admission::NoListener;
            let mad = from_peer(&end, id, kind);
            end.receive(&mad);
            let found = (
                end.state(id),
                end.said(),
                end.events.pop().map(|(_, event)| name(&event)),
            );
            let (after, said, event) = expected(state, active, kind);
            assert_eq!(
                found,
                (after, said.to_vec(), event),
                "{kind} in {state}, {active}"
            );
            assert!(end.events.is_empty());
        }
    }
}

/// Strangers get an answer to a REQ, REP or DREQ, as anybody does, and change nothing.
#[test]
fn cmc_14_messages_of_strangers_change_nothing() {
    let stranger: IpAddr = [10, 9, 9, 9].into();
    for kind in KINDS {
        for (state, mut end, id) in in_each_state() {
            end.admission = Admission::NoListener;
            let good = from_peer(&end, id, kind);
            let timers = end.connections.deadline();
            // From another host, and to another address of this one.
            end.receive_by(Route::new(end.route.local, stranger), &good);
            end.receive_by(Route::new(stranger, end.route.remote), &good);
            // From the right host, with a number that is wrong in one bit.
            for bit in 0..64 {
                let mut forged = good;
                messages::flip(&mut forged, bit);
                if messages::is_another(state, &forged, bit) {
                    end.receive(&forged);
                }
            }
            assert_eq!(end.state(id), Some(state), "{kind}");
            assert_eq!(end.connections.deadline(), timers, "{kind} in {state}");
            assert!(end.events.is_empty(), "{kind} in {state}: {:?}", end.events);
            for said in end.said() {
                let to_anybody = [("REQ", "REJ"), ("REP", "REJ"), ("DREQ", "DREP")];
                assert!(
                    to_anybody.contains(&(kind, said)),
                    "{kind} in {state} is answered by {said}"
                );
            }
        }
    }
}

#[test]
fn cmc_14_a_dreq_for_another_queue_pair_changes_nothing() {
    let mut pair = Pair::established();
    let mut forged = from_peer(&pair.server, pair.passive, "DREQ");
    if let Message::Disconnect(request) = &mut forged.message {
        request.remote_qpn ^= 1;
    }
    pair.server.receive(&forged);
    assert_eq!(pair.server.state(pair.passive), Some(State::Established));
    assert_eq!(pair.server.said(), [""; 0]);
}

#[test]
fn cmc_14_a_stranger_cannot_abandon_a_request() {
    let mut pair = Pair::requested();
    pair.client.connections.release(pair.client.now, pair.active);
    pair.client.drain();
    let abandoned = pair.client.only();
    let stranger = Route::new(SERVER, [10, 9, 9, 9].into());
    pair.server.receive_by(stranger, &abandoned);
    let other_address = Route::new([10, 9, 9, 9].into(), CLIENT);
    pair.server.receive_by(other_address, &abandoned);
    for change in [1, 2, 3] {
        let mut forged = abandoned;
        let Message::Reject(reject) = &mut forged.message else {
            panic!();
        };
        match change {
            1 => reject.ids.local ^= 1,
            2 => reject.information = urnic_wire::mad::RejectInformation::new(&[9; 8]).unwrap(),
            _ => reject.reason = RejectReason::CONSUMER,
        }
        pair.server.receive(&forged);
    }
    assert_eq!(pair.server.state(pair.passive), Some(State::ReqRcvd));
    assert!(pair.server.events.is_empty());
}
