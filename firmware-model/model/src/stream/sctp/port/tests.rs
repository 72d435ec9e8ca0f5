//! Two ports over a network that loses and records packets, under a virtual clock.

use super::super::over_udp::UdpEndpoint;
use super::super::session::{MESSAGE_COST, Session};
use super::*;
use crate::stream::StreamError;
use crate::stream::datagram::{DatagramSocket, Incoming, Outgoing, PACKET_ROOM};
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use urnic_sctp::endpoint::Settings;
use urnic_sync::Mutex;
use urnic_wire::sctp::packet::Packet;
use urnic_wire::sctp::session::{MAX_MESSAGE_LEN, SessionMessage};

const STEP: Duration = Duration::from_millis(10);
const TERMINATE: [u8; 2] = [0, 4];

fn address(end: usize) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(10, 0, 0, end as u8 + 1).into(), 4000)
}

/// What one end sends.
#[derive(Debug, Default)]
struct Direction {
    packets: Mutex<VecDeque<Vec<u8>>>,
    is_lossy: AtomicBool,
    /// Packets with the message of this DDP-SSN are lost; 0: none are.
    lost: AtomicU16,
    /// The chunks of messages that were sent, lost or not: stream, contents, user data.
    log: Mutex<Vec<(u16, u32, Vec<u8>)>>,
}

impl Direction {
    fn sent(&self, stream: u16) -> Vec<(u32, Vec<u8>)> {
        let log = self.log.lock();
        let of_stream = log.iter().filter(|(number, ..)| *number == stream);
        of_stream.map(|(_, ppid, data)| (*ppid, data.clone())).collect()
    }
}

#[derive(Debug)]
struct FakeSocket {
    end: usize,
    directions: [Arc<Direction>; 2],
}

impl DatagramSocket for FakeSocket {
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        let ours = &self.directions[self.end];
        for packet in packets {
            let bytes = &buffer[packet.at..packet.at + packet.len];
            let lost = ours.lost.load(Ordering::Relaxed);
            let mut is_lost = ours.is_lossy.load(Ordering::Relaxed);
            for chunk in Packet::parse(bytes).unwrap().chunks() {
                let chunk = chunk.unwrap();
                if let Some(data) = chunk.data() {
                    let user_data = chunk.value[12..].to_vec();
                    is_lost |= lost > 0 && user_data.starts_with(&lost.to_be_bytes());
                    ours.log.lock().push((data.stream, data.ppid, user_data));
                }
            }
            if !is_lost {
                ours.packets.lock().push_back(bytes.to_vec());
            }
        }
        Ok(packets.len())
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        for (index, room) in buffer.chunks_mut(PACKET_ROOM).enumerate() {
            let Some(packet) = self.directions[1 - self.end].packets.lock().pop_front() else {
                return false;
            };
            room[..packet.len()].copy_from_slice(&packet);
            packets.push(Incoming {
                at: index * PACKET_ROOM,
                len: packet.len(),
                source: address(1 - self.end),
                destination: address(self.end).ip(),
                traffic_class: 0,
            });
        }
        true
    }

    fn refused(&mut self, _: &mut [u8]) -> Option<super::super::super::datagram::Refused> {
        None
    }

    fn reports_refused(&self) -> bool {
        false
    }

    fn dropped(&mut self) -> u32 {
        0
    }

    fn join(&mut self, _: IpAddr, _: IpAddr, _: u32) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    fn local(&self) -> SocketAddr {
        address(self.end)
    }

    fn descriptor(&self) -> Option<rustix::fd::BorrowedFd<'_>> {
        None
    }
}

/// Two ports: sessions begin at the first one.
struct Net {
    ports: [Port; 2],
    sessions: [SharedSessions; 2],
    directions: [Arc<Direction>; 2],
    descriptors: Arc<Descriptors>,
    now: Duration,
}

impl Net {
    fn new() -> Net {
        let descriptors = Descriptors::new(4096, None);
        let directions: [Arc<Direction>; 2] = Default::default();
        let sessions = [0, 1].map(|end| Arc::new(Mutex::new(Sessions::new(address(end)))));
        let port = |end: usize| {
            let settings = Settings {
                listens: end == 1,
                streams: 4,
                unsent_of_stream: 64,
                ..Settings::of_port(4000)
            };
            let socket = FakeSocket {
                end,
                directions: directions.clone(),
            };
            let library = urnic_sctp::endpoint::Endpoint::new(settings, [end as u8; 16]);
            let endpoint = UdpEndpoint::new(library, Box::new(socket), 0);
            Port::new(Box::new(endpoint), descriptors.clone(), sessions[end].clone())
        };
        sessions[1].lock().listen(16, &descriptors).unwrap();
        Net {
            ports: [port(0), port(1)],
            sessions,
            directions,
            descriptors,
            now: Duration::from_secs(1),
        }
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.now += STEP;
            for port in &mut self.ports {
                port.run(self.now);
            }
        }
    }

    fn connect(&mut self) -> SessionId {
        let ends = Ends {
            local: address(0),
            remote: address(1),
        };
        let id = self.sessions[0].lock().connect(ends, &self.descriptors).unwrap();
        self.run(10);
        id
    }

    fn with<T>(&self, end: usize, id: SessionId, act: impl FnOnce(&mut Session) -> T) -> T {
        act(self.sessions[end].lock().get(id).expect("a session"))
    }

    fn send(&mut self, end: usize, id: SessionId, message: &[u8]) {
        self.with(end, id, |session| session.send(message).unwrap());
        self.run(10);
    }

    fn read(&self, end: usize, id: SessionId) -> Result<Option<Vec<u8>>, StreamError> {
        let read = self.with(end, id, Session::read)?;
        Ok(read.map(|message| message.data))
    }

    /// A session in full operation: its ends, and the number of its streams.
    fn accepted(&mut self) -> ([SessionId; 2], u16) {
        let near = self.connect();
        self.send(0, near, &control(Function::Initiate));
        let far = self.sessions[1].lock().accept().expect("a session");
        assert_eq!(self.read(1, far), Ok(Some(control(Function::Initiate))));
        self.send(1, far, &control(Function::Accept));
        assert_eq!(self.read(0, near), Ok(Some(control(Function::Accept))));
        self.with(0, near, Session::enter_full_operation);
        self.with(1, far, Session::enter_full_operation);
        let number = self.number(near);
        ([near, far], number)
    }

    /// The number of a session's streams.
    fn number(&self, id: SessionId) -> u16 {
        let association = self.ports[0]
            .associations
            .values()
            .next()
            .expect("an association");
        let mut all = association.sessions.iter();
        *all.find(|(_, session)| **session == id).expect("a number").0
    }

    fn lose(&self, end: usize, is_lossy: bool) {
        self.directions[end].is_lossy.store(is_lossy, Ordering::Relaxed);
    }
}

fn control(function: Function) -> Vec<u8> {
    let mut bytes = vec![0; MAX_MESSAGE_LEN];
    let len = SessionMessage::new(function, None, b"").emit(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn sctp_12_each_session_of_a_stream_begins_with_zero() {
    let mut net = Net::new();
    for _ in 0..3 {
        let ([near, far], number) = net.accepted();
        assert_eq!(number, 0, "the number is free again");
        net.send(0, near, b"segment");
        for (end, id) in [near, far].into_iter().enumerate() {
            net.with(end, id, Session::close);
        }
        net.run(60);
    }
    let expected = [
        (17, [&[0, 0][..], &control(Function::Initiate)].concat()),
        (16, [&[0, 1][..], b"segment"].concat()),
        (17, [&[0, 2][..], &TERMINATE].concat()),
    ];
    let sent = net.directions[0].sent(0);
    assert_eq!(sent.len(), 9);
    for of_session in sent.chunks(3) {
        assert_eq!(of_session, expected);
    }
}

/// RFC 5043 §6.6: our last message may arrive in the next session.
#[test]
fn sctp_24_a_stream_is_not_used_again_before_all_has_arrived() {
    let mut net = Net::new();
    let ([near, far], number) = net.accepted();
    net.with(1, far, Session::close);
    net.run(10);
    net.lose(0, true);
    net.with(0, near, Session::close);
    net.run(5);
    assert!(net.directions[0].sent(number).len() >= 2, "the Terminate is lost");
    let next = net.connect();
    assert_ne!(net.number(next), number);
    net.lose(0, false);
    net.run(500);
    let last = net.connect();
    assert_eq!(net.number(last), number, "it has arrived");
}

#[test]
fn sctp_24_a_stream_whose_peer_may_still_send_is_not_used_again() {
    let mut net = Net::new();
    // Cancelled while the peer accepts.
    let near = net.connect();
    let number = net.number(near);
    net.send(0, near, &control(Function::Initiate));
    net.with(0, near, Session::close);
    net.run(60);
    let far = net.sessions[1].lock().accept().expect("a session");
    net.with(1, far, Session::close);
    let next = net.connect();
    assert_ne!(net.number(next), number);
    // The peer broke the rules, and its messages are not read to the last one.
    let ([near, far], number) = net.accepted();
    net.with(0, near, |session| {
        session.refuse(Errno::PROTO);
        session.close();
    });
    net.run(60);
    assert_eq!(net.read(1, far), Ok(None));
    let next = net.connect();
    assert_ne!(net.number(next), number);
}

/// A session ends although others keep the association busy.
#[test]
fn sctp_22_a_session_ends_while_others_send() {
    let mut net = Net::new();
    let ([busy, _], _) = net.accepted();
    let quiet = net.connect();
    let number = net.number(quiet);
    net.send(0, quiet, &control(Function::Initiate));
    let far = net.sessions[1].lock().accept().expect("a session");
    net.run(60);
    // The peer does not acknowledge the segment that is in flight.
    net.lose(0, true);
    net.send(0, busy, b"segment");
    net.with(0, quiet, Session::finish);
    net.run(1);
    let sent = net.directions[0].sent(number);
    assert_eq!(sent.last(), Some(&(17, [&[0, 1][..], &TERMINATE].concat())));
    net.lose(0, false);
    net.run(500);
    assert_eq!(net.read(1, far), Ok(Some(control(Function::Initiate))));
    assert_eq!(net.read(1, far), Ok(Some(TERMINATE.to_vec())));
}

/// A Terminate of the other end is permitted, not required (RFC 5043 §6.2).
#[test]
fn sctp_18_an_association_ends_although_a_peer_does_not_terminate() {
    let mut net = Net::new();
    let ([near, _], _) = net.accepted();
    net.with(0, near, Session::close);
    net.run(50);
    assert_eq!(net.ports[0].associations.len(), 1);
    net.run((IDLE.as_millis() / STEP.as_millis()) as usize + 100);
    assert_eq!(net.ports[0].associations.len(), 0);
}

/// RFC 5043 §11.3: the consumers learn of it, and no stream has an RDMAP Terminate.
#[test]
fn sctp_10_the_end_of_an_association_ends_its_sessions() {
    let mut net = Net::new();
    let sessions: Vec<_> = (0..3).map(|_| net.accepted()).collect();
    let before = net.directions[1].log.lock().len();
    net.ports[1].end(net.now);
    net.run(5);
    for ([near, _], _) in sessions {
        let gone = Err(StreamError::Closed(Errno::CONNRESET));
        assert_eq!(net.read(0, near), gone);
        assert_eq!(net.with(0, near, |session| session.send(b"x")), gone.map(drop));
    }
    assert_eq!(net.directions[1].log.lock().len(), before, "no message was sent");
}

#[test]
fn sctp_17_what_is_left_of_a_session_does_not_reach_the_next() {
    let mut net = Net::new();
    let ([near, far], number) = net.accepted();
    net.send(0, near, b"unread");
    net.with(1, far, Session::close);
    net.run(10);
    net.with(0, near, Session::close);
    net.run(60);
    let ([near, far], again) = net.accepted();
    assert_eq!(number, again);
    assert_eq!(net.read(1, far), Err(StreamError::WouldBlock));
    net.send(0, near, b"of this one");
    assert_eq!(net.read(1, far), Ok(Some(b"of this one".to_vec())));
}

/// The peer keeps all that comes while one message is missing: that is bounded (RFC 5043 §10).
#[test]
fn sctp_13_and_30_much_may_come_while_a_message_is_missing() {
    let mut net = Net::new();
    let ([near, far], _) = net.accepted();
    let segment = vec![7; 1000];
    let (mut sent, mut read, mut most) = (0, 0, 0);
    for step in 0..400 {
        // All copies of one are lost for a second.
        let lost = if (100..200).contains(&step) { 5000 } else { 0 };
        net.directions[0].lost.store(lost, Ordering::Relaxed);
        while net.with(0, near, |session| session.send(&segment)).is_ok() {
            sent += 1;
        }
        net.run(1);
        most = most.max(net.with(1, far, |session| session.unread()));
        while let Ok(message) = net.read(1, far) {
            assert_eq!(message.as_ref(), Some(&segment));
            read += 1;
        }
        let fault = net.with(1, far, |session| session.send(b"x"));
        assert_eq!(fault, Ok(()), "step {step}: {sent} were sent, {read} read");
    }
    assert!(read > 5000 && most > 100 << 10, "{read} read, {most} bytes kept");
}

/// What can be placed meanwhile takes no room.
#[test]
fn ddp_s_05_and_sctp_13_what_is_placed_early_takes_no_room() {
    let mut net = Net::new();
    let ([near, far], _) = net.accepted();
    let segment = vec![7; 1000];
    net.directions[0].lost.store(1, Ordering::Relaxed);
    let mut placed = 0;
    for _ in 0..10 {
        for _ in 0..40 {
            net.with(0, near, |session| session.send(&segment).unwrap());
        }
        net.run(10);
        net.with(1, far, |session| {
            while let Some((ssn, early)) = session.next_early() {
                assert_eq!(early, segment);
                session.note_placed(ssn, 14);
                placed += 1;
            }
            assert_eq!(session.unread(), 14 * placed);
        });
        assert_eq!(net.read(1, far), Err(StreamError::WouldBlock));
    }
    assert!(placed > 100, "{placed}");
    net.directions[0].lost.store(0, Ordering::Relaxed);
    let mut read = Vec::new();
    while read.len() < 400 {
        assert!(net.now < Duration::from_secs(30), "{} were read", read.len());
        net.run(1);
        while let Ok(message) = net.with(1, far, Session::read) {
            let message = message.expect("no end");
            read.push((message.data.len(), message.placed));
        }
    }
    assert_eq!(read[0], (1000, 0));
    assert_eq!(read[1..=placed], vec![(14, 986); placed]);
    assert!(read[placed + 1..].iter().all(|of| *of == (1000, 0)));
}

/// A session that always has something to send leaves others their turns.
#[test]
fn a_busy_session_does_not_keep_others_from_sending() {
    let mut net = Net::new();
    let ([busy, its_end], _) = net.accepted();
    let others: Vec<_> = (0..3).map(|_| net.accepted().0).collect();
    let mut arrived = [0; 3];
    for _ in 0..400 {
        while net.with(0, busy, |session| session.send(&[7; 1000])).is_ok() {}
        for [near, _] in &others {
            // Those that wait are sent later.
            let _ = net.with(0, *near, |session| session.send(b"hello"));
        }
        net.run(1);
        while let Ok(Some(_)) = net.read(1, its_end) {}
        for ([_, far], arrived) in others.iter().zip(&mut arrived) {
            while let Ok(Some(message)) = net.read(1, *far) {
                assert_eq!(message, b"hello");
                *arrived += 1;
            }
        }
    }
    assert!(arrived.iter().all(|arrived| *arrived > 300), "{arrived:?}");
}

/// An association that ends takes no session; the next one does.
#[test]
fn a_session_that_meets_the_end_of_its_association_begins_later() {
    let mut net = Net::new();
    let ([near, far], _) = net.accepted();
    for (end, id) in [near, far].into_iter().enumerate() {
        net.with(end, id, Session::close);
    }
    net.run(60);
    let begun = net.now;
    let closing = |net: &Net| {
        let mut all = net.ports[0].associations.keys();
        all.any(|id| net.ports[0].endpoint.is_closing(*id))
    };
    net.lose(1, true);
    while !closing(&net) {
        net.run(1);
        assert!(net.now < begun + IDLE * 2, "it ends");
    }
    let session = net.connect();
    assert_eq!(
        net.with(0, session, |session| session.is_established()),
        Ok(false)
    );
    net.lose(1, false);
    net.run(500);
    assert_eq!(net.with(0, session, |session| session.is_established()), Ok(true));
    net.send(0, session, &control(Function::Initiate));
    let far = net.sessions[1].lock().accept().expect("a session");
    assert_eq!(net.read(1, far), Ok(Some(control(Function::Initiate))));
}

#[test]
fn a_session_that_is_closed_before_it_has_streams_sends_nothing() {
    let mut net = Net::new();
    net.lose(0, true);
    let session = net.connect();
    net.with(0, session, Session::close);
    net.lose(0, false);
    net.run(1000);
    assert!(net.sessions[0].lock().get(session).is_none(), "it is forgotten");
    assert_eq!(net.directions[0].log.lock().len(), 0, "no message was sent");
    assert_eq!(net.ports[0].associations.len(), 0, "nobody needs the association");
}

/// What waits for a message that never comes is bounded over all sessions of an association, also
/// if each message has one byte.
#[test]
fn a_peer_that_leaves_out_messages_in_all_sessions_is_cut_off() {
    for len in [1000, 1] {
        let mut net = Net::new();
        let sessions: Vec<_> = (0..4).map(|_| net.accepted().0).collect();
        for [near, _] in &sessions {
            // The first message of each is never submitted.
            net.with(0, *near, Session::skip_a_number);
        }
        let (mut sent, mut memory) = (0, 0);
        while memory < 3 * MOST_HELD_BYTES && !net.ports[1].associations.is_empty() {
            for [near, _] in &sessions {
                for _ in 0..64 {
                    if net.with(0, *near, |session| session.send(&vec![7; len])).is_ok() {
                        sent += 1;
                        memory += len + MESSAGE_COST;
                    }
                }
            }
            net.run(1);
        }
        assert!(net.ports[1].associations.is_empty(), "{sent} messages are kept");
        let [_, far] = sessions[0];
        assert_eq!(net.read(1, far), Err(StreamError::Closed(Errno::PROTO)));
    }
}
