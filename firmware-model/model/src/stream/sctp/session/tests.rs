//! A session alone, and two ends of one: any order of arrival.

use super::*;
use crate::stream::descriptor::Descriptors;
use crate::stream::sctp::sessions::new_eventfd;
use proptest::prelude::*;
use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use urnic_wire::sctp::chunk::Ssn;

const TERMINATE: [u8; 2] = [0, 4];

fn session() -> Session {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1);
    let ends = Ends {
        local: address,
        remote: address,
    };
    let notification = new_eventfd(&Descriptors::new(1, None)).unwrap();
    let mut session = Session::new(ends, Arc::new(notification));
    session.establish(1000);
    session
}

/// The bytes of the next message.
fn read(session: &mut Session) -> Result<Option<Vec<u8>>, StreamError> {
    Ok(session.read()?.map(|message| message.data))
}

fn control(function: Function) -> Vec<u8> {
    let mut bytes = vec![0; MAX_MESSAGE_LEN];
    let message = match function {
        Function::Reject => SessionMessage::reject(false, b"no"),
        _ => SessionMessage::new(function, None, b""),
    };
    let len = message.emit(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// A message with its DDP-SSN.
fn numbered(ssn: u16, message: &[u8]) -> Vec<u8> {
    [&Ssn(ssn).to_bytes()[..], message].concat()
}

/// Takes all that may be sent.
fn taken(session: &mut Session, is_confirmed: bool) -> Vec<(Contents, Vec<u8>)> {
    std::iter::from_fn(|| {
        let (contents, message) = session.next_unsent(|| is_confirmed)?;
        session.taken(contents, message.len());
        Some((contents, message))
    })
    .collect()
}

/// An active end that has sent an Initiate, and got an Accept.
fn accepted() -> Session {
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    assert_eq!(
        taken(&mut active, false),
        [(
            Contents::SessionControl,
            numbered(0, &control(Function::Initiate))
        )]
    );
    let accept = control(Function::Accept);
    assert_eq!(
        active.arrived(Contents::SessionControl, &numbered(0, &accept)),
        Ok(true)
    );
    assert_eq!(read(&mut active), Ok(Some(accept)));
    active.enter_full_operation();
    active
}

fn segment(session: &mut Session, ssn: u16, bytes: &[u8]) -> Result<bool, Errno> {
    session.arrived(Contents::Segment, &numbered(ssn, bytes))
}

#[test]
fn sctp_02_and_12_and_18_numbers_have_no_gap_up_to_the_terminate() {
    let mut active = accepted();
    for byte in 0..3 {
        active.send(&[byte; 20]).unwrap();
    }
    active.finish();
    assert_eq!(active.send(b"late"), Err(StreamError::Closed(Errno::PIPE)));
    let sent = taken(&mut active, true);
    let expected: Vec<_> = (1..4)
        .map(|ssn| (Contents::Segment, numbered(ssn, &[ssn as u8 - 1; 20])))
        .chain([(Contents::SessionControl, numbered(4, &TERMINATE))])
        .collect();
    assert_eq!(sent, expected);
    active.finish();
    assert_eq!(taken(&mut active, true), [], "one Terminate");
}

#[test]
fn sctp_12_numbers_wrap_within_a_session() {
    let (mut near, mut far) = (accepted(), accepted());
    for number in 0..70_000u32 {
        near.send(&number.to_be_bytes()).unwrap();
        for (contents, message) in taken(&mut near, false) {
            assert_eq!(far.arrived(contents, &message), Ok(true));
        }
        assert_eq!(read(&mut far), Ok(Some(number.to_be_bytes().to_vec())));
    }
}

/// The limits of an association count the DDP-SSN, those of DDP do not.
#[test]
fn sctp_08_the_longest_message_has_room_for_its_number() {
    let mut session = session();
    assert_eq!(session.longest(), 1000 - SSN_LEN);
    for longest in [0, 516] {
        session.establish(longest);
        assert_eq!(session.longest(), 514, "of {longest}");
    }
}

#[test]
fn sctp_13_segments_are_read_in_the_order_of_their_numbers() {
    let mut active = accepted();
    assert_eq!(segment(&mut active, 3, b"three"), Ok(true), "it may be placed");
    assert_eq!(segment(&mut active, 2, b"two"), Ok(false));
    assert_eq!(read(&mut active), Err(StreamError::WouldBlock));
    assert_eq!(segment(&mut active, 1, b"one"), Ok(true), "the reader is told");
    for expected in ["one", "two", "three"] {
        assert_eq!(read(&mut active), Ok(Some(expected.into())));
    }
    assert_eq!(read(&mut active), Err(StreamError::WouldBlock));
}

#[test]
fn ddp_s_05_a_segment_may_be_placed_before_its_turn() {
    let mut active = accepted();
    assert_eq!(active.next_early(), None);
    assert_eq!(segment(&mut active, 3, b"three"), Ok(true), "the device may look");
    assert_eq!(
        segment(&mut active, 2, b"two"),
        Ok(false),
        "it has not looked yet"
    );
    assert_eq!(active.next_early(), Some((Ssn(2), b"two".to_vec())));
    assert_eq!(active.next_early(), Some((Ssn(3), b"three".to_vec())));
    assert_eq!(active.next_early(), None, "each only once");
    active.note_placed(Ssn(3), 2);
    assert_eq!((active.unread(), active.unread_messages()), (5, 2));
    assert_eq!(segment(&mut active, 4, b"four"), Ok(true));
    assert_eq!(active.read().unwrap_err(), StreamError::WouldBlock);
    assert_eq!(
        segment(&mut active, 3, b"three"),
        Err(Errno::PROTO),
        "a repeated one"
    );
    assert_eq!(segment(&mut active, 1, b"one"), Ok(true));
    let mut next = || {
        active
            .read()
            .unwrap()
            .map(|message| (message.data, message.placed))
    };
    assert_eq!(next(), Some((b"one".to_vec(), 0)));
    assert_eq!(next(), Some((b"two".to_vec(), 0)));
    assert_eq!(next(), Some((b"th".to_vec(), 3)));
    assert_eq!(next(), Some((b"four".to_vec(), 0)));
    assert_eq!(active.next_early(), None, "its turn has come");
    assert_eq!((active.unread(), active.unread_messages()), (0, 0));
}

#[test]
fn sctp_06_and_13_a_segment_waits_for_the_accept_before_it() {
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    taken(&mut active, false);
    // The passive end sends at once after its Accept, which SCTP may overtake.
    assert_eq!(segment(&mut active, 1, b"first"), Ok(false));
    let accept = control(Function::Accept);
    assert_eq!(
        active.arrived(Contents::SessionControl, &numbered(0, &accept)),
        Ok(true)
    );
    assert_eq!(read(&mut active), Ok(Some(accept)));
    assert_eq!(
        read(&mut active),
        Err(StreamError::WouldBlock),
        "not before full operation"
    );
    active.enter_full_operation();
    assert_eq!(read(&mut active), Ok(Some(b"first".to_vec())));
}

#[test]
fn sctp_22_a_terminate_does_not_overtake_the_message_before_it() {
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    active.finish();
    assert_eq!(taken(&mut active, false).len(), 1, "the Initiate");
    assert_eq!(taken(&mut active, false), []);
    assert!(active.owes());
    assert_eq!(
        taken(&mut active, true),
        [(Contents::SessionControl, numbered(1, &TERMINATE))]
    );
    // An answer shows as well that the Initiate has arrived.
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    taken(&mut active, false);
    let accept = numbered(0, &control(Function::Accept));
    active.arrived(Contents::SessionControl, &accept).unwrap();
    active.finish();
    assert_eq!(taken(&mut active, false).len(), 1, "the Terminate");
    // A Terminate of the peer is no answer to the Accept.
    let mut passive = session();
    let initiate = numbered(0, &control(Function::Initiate));
    passive.arrived(Contents::SessionControl, &initiate).unwrap();
    read(&mut passive).unwrap();
    passive.send(&control(Function::Accept)).unwrap();
    taken(&mut passive, false);
    let cancel = numbered(1, &TERMINATE);
    passive.arrived(Contents::SessionControl, &cancel).unwrap();
    passive.finish();
    assert_eq!(taken(&mut passive, false), []);
    assert_eq!(taken(&mut passive, true).len(), 1, "the Terminate");
}

#[test]
fn sctp_23_a_segment_does_not_overtake_the_initiate() {
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    active.enter_full_operation();
    active.send(b"segment").unwrap();
    assert_eq!(taken(&mut active, false).len(), 1, "the Initiate");
    assert_eq!(taken(&mut active, false), []);
    assert_eq!(
        taken(&mut active, true),
        [(Contents::Segment, numbered(1, b"segment"))]
    );
    // The passive end need not wait.
    let mut passive = session();
    passive.send(&control(Function::Accept)).unwrap();
    passive.enter_full_operation();
    passive.send(b"segment").unwrap();
    assert_eq!(taken(&mut passive, false).len(), 2);
}

#[test]
fn sctp_07_what_no_legal_sequence_has_ends_the_session() {
    let initiate = control(Function::Initiate);
    // A number that was used; one that is too far ahead; no number; too many bytes, or none.
    let far_ahead = numbered(MAX_IN_FLIGHT + 1, b"x");
    let long = numbered(1, &vec![0; LONGEST_MESSAGE + 1]);
    let empty = numbered(1, b"");
    for wrong in [&numbered(0, b"again")[..], &far_ahead, &[0], &long, &empty] {
        let mut active = accepted();
        assert_eq!(active.arrived(Contents::Segment, wrong), Err(Errno::PROTO));
        active.refuse(Errno::PROTO);
        assert_eq!(read(&mut active), Err(StreamError::Closed(Errno::PROTO)));
        assert_eq!(active.send(b"more"), Err(StreamError::Closed(Errno::PROTO)));
        assert_eq!(
            taken(&mut active, true),
            [(Contents::SessionControl, numbered(1, &TERMINATE))]
        );
        assert!(active.is_over() && active.may_be_outstanding());
        assert_eq!(segment(&mut active, 1, b"more"), Ok(false), "the rest is ignored");
    }
    // Session control within full operation, other than a Terminate.
    let mut active = accepted();
    active
        .arrived(Contents::SessionControl, &numbered(1, &initiate))
        .unwrap();
    assert_eq!(read(&mut active), Err(StreamError::Closed(Errno::PROTO)));
}

#[test]
fn sctp_07_and_18_nothing_is_read_after_the_last_message() {
    let last = control(Function::Terminate);
    for is_early in [true, false] {
        let mut active = accepted();
        if is_early {
            assert_eq!(segment(&mut active, 3, b"beyond"), Ok(true));
        }
        segment(&mut active, 1, b"one").unwrap();
        active
            .arrived(Contents::SessionControl, &numbered(2, &last))
            .unwrap();
        assert_eq!(read(&mut active), Ok(Some(b"one".to_vec())));
        assert_eq!(read(&mut active), Ok(None), "the Terminate");
        assert_eq!(read(&mut active), Ok(None));
        assert_eq!((active.unread(), active.unread_messages()), (0, 0));
        if !is_early {
            assert_eq!(segment(&mut active, 3, b"beyond"), Err(Errno::PROTO));
        }
        assert!(active.may_be_replaced() && !active.is_over());
        // Our direction goes on until our own Terminate.
        active.send(b"more").unwrap();
        active.finish();
        assert_eq!(taken(&mut active, true).len(), 2);
        assert!(active.is_over() && !active.may_be_outstanding());
    }
}

#[test]
fn sctp_18_a_terminate_before_the_accept_ends_both_directions() {
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    taken(&mut active, false);
    let refused = numbered(0, &TERMINATE);
    active.arrived(Contents::SessionControl, &refused).unwrap();
    assert_eq!(read(&mut active), Ok(Some(TERMINATE.to_vec())));
    assert_eq!(read(&mut active), Ok(None));
    active.close();
    assert_eq!(taken(&mut active, true), [], "it is not answered by another one");
    assert!(active.is_over());
}

// Two ends.

#[derive(Debug, Clone)]
enum Step {
    /// An end sends a segment of this length.
    Send(usize, usize),
    /// SCTP takes what may be sent.
    Pass(usize),
    /// One of the messages in flight arrives at an end.
    Deliver(usize, usize),
    /// One of the messages that arrived at an end does so again.
    Repeat(usize, usize),
    Read(usize),
    Finish(usize),
    Close(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let end = 0..2usize;
    let len = prop_oneof![8 => 0..100usize, 1 => 1000..30_000usize];
    let step = prop_oneof![
        6 => (end.clone(), len).prop_map(|(end, len)| Step::Send(end, len)),
        4 => end.clone().prop_map(Step::Pass),
        8 => (end.clone(), any::<usize>()).prop_map(|(end, which)| Step::Deliver(end, which)),
        1 => (end.clone(), any::<usize>()).prop_map(|(end, which)| Step::Repeat(end, which)),
        6 => end.clone().prop_map(Step::Read),
        1 => end.clone().prop_map(Step::Finish),
        1 => end.prop_map(Step::Close),
    ];
    proptest::collection::vec(step, 0..300)
}

/// How the passive end answers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Answer {
    Accept,
    Reject,
    Close,
}

/// One end, and what a network of any order does.
struct End {
    session: Session,
    /// What was submitted, and what was read.
    submitted: Vec<Vec<u8>>,
    read: Vec<Vec<u8>>,
    /// What was placed early, by the number of its message.
    placed: HashMap<u16, Vec<u8>>,
    /// In flight to this end, and arrived here.
    flying: Vec<(Contents, Vec<u8>)>,
    came: Vec<(Contents, Vec<u8>)>,
    terminates: usize,
    has_sent_last: bool,
    saw_end: bool,
    repeated: bool,
    closed: bool,
}

fn end() -> End {
    End {
        session: session(),
        submitted: Vec::new(),
        read: Vec::new(),
        placed: HashMap::new(),
        flying: Vec::new(),
        came: Vec::new(),
        terminates: 0,
        has_sent_last: false,
        saw_end: false,
        repeated: false,
        closed: false,
    }
}

struct Two {
    ends: [End; 2],
    answer: Answer,
}

impl Two {
    fn send(&mut self, end: usize, message: Vec<u8>) {
        let end = &mut self.ends[end];
        if end.session.send(&message).is_ok() {
            end.submitted.push(message);
        }
        assert!(end.session.unsent_bytes < MOST_UNSENT + 30_002);
    }

    fn pass(&mut self, from: usize) {
        loop {
            let is_confirmed = self.ends[1 - from].flying.is_empty();
            let sender = &mut self.ends[from];
            let Some((contents, message)) = sender.session.next_unsent(|| is_confirmed) else {
                return;
            };
            sender.session.taken(contents, message.len());
            assert!(!sender.has_sent_last, "nothing follows the last message");
            if contents == Contents::SessionControl {
                let is = function(&message[SSN_LEN..]);
                sender.terminates += usize::from(is == Some(Function::Terminate));
                sender.has_sent_last |= matches!(is, Some(Function::Terminate | Function::Reject));
            }
            let others = &self.ends[1 - from].flying;
            let overtakes = others
                .iter()
                .any(|(other, _)| *other == Contents::SessionControl && (contents == *other || from == 0));
            assert!(!overtakes, "RFC 5043 §6.6");
            self.ends[1 - from].flying.push((contents, message));
        }
    }

    fn deliver(&mut self, to: usize, which: usize) {
        let end = &mut self.ends[to];
        if end.flying.is_empty() {
            return;
        }
        let (contents, message) = end.flying.swap_remove(which % end.flying.len());
        let arrived = end.session.arrived(contents, &message);
        end.came.push((contents, message));
        let may_fail = end.repeated || self.ends[1 - to].session.fault.is_some();
        assert!(arrived.is_ok() || may_fail, "{arrived:?}");
        self.note(to, arrived);
    }

    fn repeat(&mut self, to: usize, which: usize) {
        let end = &mut self.ends[to];
        if end.came.is_empty() {
            return;
        }
        let (contents, message) = end.came[which % end.came.len()].clone();
        end.repeated = true;
        let session = &end.session;
        let ignores = session.fault.is_some() || session.received_last && !session.saw_last;
        let arrived = end.session.arrived(contents, &message);
        assert!(arrived.is_err() || ignores, "SCTP repeats nothing");
        self.note(to, arrived);
    }

    fn note(&mut self, to: usize, arrived: Result<bool, Errno>) {
        let session = &mut self.ends[to].session;
        if let Err(errno) = arrived {
            session.refuse(errno);
        }
        assert!(session.unread() <= MOST_UNREAD_BYTES && session.unread_messages() <= MOST_UNREAD);
    }

    fn read(&mut self, at: usize) {
        if self.ends[at].closed {
            return;
        }
        let end = &mut self.ends[at];
        // An odd one cannot be placed.
        while let Some((ssn, segment)) = end.session.next_early() {
            if segment.len() % 2 == 0 {
                end.session.note_placed(ssn, 1);
                assert!(end.placed.insert(ssn.0, segment[1..].to_vec()).is_none());
            }
        }
        match end.session.read() {
            Ok(Some(message)) => {
                assert!(!end.saw_end, "nothing is read after the end");
                let placed = end.placed.remove(&(end.read.len() as u16)).unwrap_or_default();
                assert_eq!(message.placed, placed.len());
                end.read.push([message.data, placed].concat());
                self.act_on(at);
            }
            Ok(None) => self.ends[at].saw_end = true,
            Err(_) => {}
        }
        let (reader, sender) = (&self.ends[at], &self.ends[1 - at]);
        let is_ours = sender
            .submitted
            .iter()
            .zip(&reader.read)
            .all(|(ours, read)| ours == read);
        let terminates = &reader.read[sender.submitted.len().min(reader.read.len())..];
        assert!(is_ours && (terminates.is_empty() || terminates == [TERMINATE]));
    }

    /// Start-up, as the driver does it.
    fn act_on(&mut self, at: usize) {
        let last = self.ends[at].read.last().and_then(|message| function(message));
        if self.ends[at].read.len() != 1 {
            return;
        }
        match (last, self.answer) {
            (Some(Function::Initiate), Answer::Accept) => {
                self.send(at, control(Function::Accept));
                self.ends[at].session.enter_full_operation();
            }
            (Some(Function::Initiate), Answer::Reject) => self.send(at, control(Function::Reject)),
            (Some(Function::Initiate), Answer::Close) => self.close(at),
            (Some(Function::Accept), _) => self.ends[at].session.enter_full_operation(),
            _ => {}
        }
    }

    fn close(&mut self, at: usize) {
        self.ends[at].closed = true;
        self.ends[at].session.close();
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Send(at, len) if self.ends[at].session.full_operation => {
                self.send(at, vec![len as u8 | 0x80; len + 2]);
            }
            Step::Send(..) => {}
            Step::Pass(at) => self.pass(at),
            Step::Deliver(to, which) => self.deliver(to, which),
            Step::Repeat(to, which) => self.repeat(to, which),
            Step::Read(at) => self.read(at),
            // The passive end begins with the Initiate.
            Step::Finish(at) | Step::Close(at) if at == 1 && self.ends[1].read.is_empty() => {}
            Step::Finish(at) => self.ends[at].session.finish(),
            Step::Close(at) => self.close(at),
        }
    }

    /// All arrives and is read, and both ends finish.
    fn settle(&mut self) {
        for _ in 0..1000 {
            for at in 0..2 {
                self.pass(at);
                self.deliver(at, 0);
                self.read(at);
            }
        }
        for at in 0..2 {
            self.ends[at].session.finish();
        }
        for _ in 0..100 {
            for at in 0..2 {
                self.pass(at);
                self.deliver(at, 0);
                self.read(at);
            }
        }
    }
}

proptest! {
    #[test]
    fn sctp_12_and_13_and_18_and_22_any_order_keeps_a_session_legal(
        steps in steps(),
        answer in prop_oneof![6 => Just(Answer::Accept), 1 => Just(Answer::Reject), 1 => Just(Answer::Close)],
    ) {
        let mut two = Two { ends: [end(), end()], answer };
        two.send(0, control(Function::Initiate));
        for step in &steps {
            two.step(step);
        }
        two.settle();
        let is_clean = two.ends.iter().all(|end| !end.repeated);
        for at in 0..2 {
            let (end, peer) = (&two.ends[at], &two.ends[1 - at]);
            prop_assert!(end.terminates <= 1);
            if is_clean {
                prop_assert!(end.session.is_over());
                let has_cancelled = end.session.may_be_outstanding();
                let has_all = end.read.len() >= peer.submitted.len();
                prop_assert!(has_all || end.closed || has_cancelled, "{:?}", end.read);
            }
        }
    }
}

/// RFC 5043 §6.2: a segment follows the Accept, which its sender must have.
#[test]
fn sctp_07_a_segment_before_the_accept_ends_a_session_of_the_peer() {
    let mut passive = session();
    passive.by_peer = true;
    let initiate = numbered(0, &control(Function::Initiate));
    assert_eq!(passive.arrived(Contents::SessionControl, &initiate), Ok(true));
    assert_eq!(read(&mut passive), Ok(Some(control(Function::Initiate))));
    let segment = numbered(1, b"segment");
    assert_eq!(passive.arrived(Contents::Segment, &segment), Err(Errno::PROTO));
    passive.send(&control(Function::Accept)).unwrap();
    assert_eq!(passive.arrived(Contents::Segment, &segment), Ok(true));
    // The passive end's may overtake its Accept.
    let mut active = session();
    active.send(&control(Function::Initiate)).unwrap();
    assert_eq!(active.arrived(Contents::Segment, &segment), Ok(false));
}
