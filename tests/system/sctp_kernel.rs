//! The SCTP of Linux (`tests/programs/sctp_peer.c`, in the guest) against itself, and against our
//! associations without a device: `urnic_sctp` over a UDP socket, with a session layer that
//! echoes what it gets.
//!
//! QEMU's user network translates addresses and UDP ports, as a NAT does: each end sees the other
//! at a port that the other does not know of (RFC 6951 §5.4).

use std::collections::{BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use urnic_sctp::endpoint::{AssociationId, Endpoint, Event, Peer, Reason, SendError, Settings};
use urnic_sctp::order::{Incoming, Message, Outgoing};
use urnic_tests::capture::{AS_DDP, Wire};
use urnic_tests::guest::{Guest, HOST};
use urnic_tests::or_skip;
use urnic_tests::random::Random;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, free_port};
use urnic_wire::ddp::{Header, UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::mpa::startup::EnhancedWord;
use urnic_wire::sctp::chunk::{Contents, SSN_LEN};
use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionMessage};

/// Bytes of an SCTP packet with IPv4 and UDP in front of it, on a network of 1500 bytes.
const PACKET: usize = 1500 - 20 - 8;

/// Sends of a session that wait for their echoes at once: fewer than the kernel's receive buffer
/// takes.
const WINDOW: u32 = 8;

/// The session layer of our end of an association: it accepts each session and echoes its chunks.
/// An echoed Send is one, with the right MSN, as long as the peer sends nothing else.
struct Host {
    socket: UdpSocket,
    settings: Settings,
    endpoint: Endpoint,
    begun: Instant,
    /// Of so many packets, one is lost and one is repeated, in each direction; 0: none.
    faults: usize,
    random: Random,
    /// The number of packets that were sent.
    sent: usize,
    /// After so many, this end has another UDP port.
    moves_after: Option<usize>,
    association: Option<AssociationId>,
    ended: Option<Reason>,
    streams: Vec<(Incoming, Outgoing)>,
    unsent: VecDeque<(u16, Message)>,
    /// The chunks that came, in the order of each stream.
    came: Vec<(u16, Message)>,
    /// The number of chunks that came before their turn.
    early: usize,
}

impl Host {
    fn new(port: u16, sessions: u16, faults: usize) -> Host {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).expect("a free port");
        let settings = Settings {
            packet_len: PACKET,
            streams: sessions,
            ..Settings::of_port(port)
        };
        let stream = |_| (incoming_of_session(), Outgoing::default());
        Host {
            socket,
            settings,
            endpoint: Endpoint::new(settings, [7; 16]),
            begun: Instant::now(),
            faults,
            random: Random(0x5c70),
            sent: 0,
            moves_after: None,
            association: None,
            ended: None,
            streams: (0..sessions).map(stream).collect(),
            unsent: VecDeque::new(),
            came: Vec::new(),
            early: 0,
        }
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    /// How often a packet arrives.
    fn copies(&mut self) -> usize {
        match self.faults {
            0 => 1,
            faults => match self.random.below(faults) {
                0 => 0,
                1 => 2,
                _ => 1,
            },
        }
    }

    /// Does what is due, and waits for a packet for a short time.
    fn step(&mut self) {
        const POLL: Duration = Duration::from_millis(5);
        let mut bytes = [0; 1 << 16];
        self.socket.set_read_timeout(Some(POLL)).expect("not zero");
        if let Ok((len, from)) = self.socket.recv_from(&mut bytes) {
            for _ in 0..self.copies() {
                let now = self.now();
                self.endpoint.receive(from, &bytes[..len], now);
            }
        }
        let now = self.now();
        self.endpoint.advance(now);
        self.events();
        self.send();
        while let Some((to, packet)) = self.endpoint.next_packet() {
            assert!(packet.len() <= PACKET, "no packet is fragmented");
            self.sent += 1;
            if self.moves_after == Some(self.sent) {
                self.socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, free_port())).expect("a free port");
            }
            for _ in 0..self.copies() {
                self.socket.send_to(&packet, to).expect("it is sent");
            }
        }
    }

    fn events(&mut self) {
        while let Some(event) = self.endpoint.next_event() {
            match event {
                Event::Accepted(id, _) | Event::Connected(id) => self.association = Some(id),
                Event::Readable(id) => self.take(id),
                Event::Moved(..) => {}
                Event::Ended(_, reason) => (self.association, self.ended) = (None, Some(reason)),
            }
        }
    }

    fn take(&mut self, id: AssociationId) {
        while let Some(received) = self.endpoint.take(id, self.begun.elapsed()) {
            let (incoming, _) = &mut self.streams[usize::from(received.stream)];
            let early = incoming.insert(received.contents, &received.data);
            self.early += usize::from(early.expect("a number that is due"));
            let due = std::iter::from_fn(|| incoming.take());
            let came = self.came.len();
            self.came.extend(due.map(|message| (received.stream, message)));
            // Nothing of the next session comes before this end has ended its direction, too.
            if self.came[came..]
                .last()
                .is_some_and(|(_, last)| is_terminate(last))
            {
                self.streams[usize::from(received.stream)].0 = incoming_of_session();
            }
        }
    }

    fn send(&mut self) {
        let now = self.now();
        let Some(id) = self.association else { return };
        while let Some((stream, message)) = self.unsent.front() {
            let (_, outgoing) = &mut self.streams[usize::from(*stream)];
            let numbered = outgoing.number(&message.data);
            match self.endpoint.send(id, (*stream, message.contents), numbered, now) {
                // The next session of the stream begins with DDP-SSN 0.
                Ok(()) if is_terminate(message) => *outgoing = Outgoing::default(),
                Ok(()) => outgoing.advance(),
                Err(SendError::Full) => return,
                Err(error) => panic!("{error}: {} bytes on stream {stream}", message.data.len()),
            }
            self.unsent.pop_front();
        }
    }

    /// The longest Send that is one segment.
    fn longest(&self) -> usize {
        self.settings.longest_message() - SSN_LEN - UNTAGGED_LEN
    }

    /// Sends a segment back: in two, if the kernel's packets have room for longer ones than ours.
    fn echo(&mut self, stream: u16, message: Message) {
        let contents = Contents::Segment;
        let (Header::Untagged(header), payload) = Header::parse(&message.data).expect("a segment") else {
            panic!("a tagged segment");
        };
        let (first, rest) = payload.split_at(payload.len().min(self.longest()));
        let mut put = |header: UntaggedHeader, payload: &[u8]| {
            let mut data = vec![0; UNTAGGED_LEN];
            header.emit(&mut data);
            data.extend(payload);
            self.unsent.push_back((stream, Message::new(contents, data)));
        };
        let last = header.last && rest.is_empty();
        put(UntaggedHeader { last, ..header }, first);
        if !rest.is_empty() {
            let mo = header.mo + first.len() as u32;
            put(UntaggedHeader { mo, ..header }, rest);
        }
    }

    fn control(&mut self, stream: u16, message: &SessionMessage<'_>) {
        let mut data = [0; MAX_MESSAGE_LEN];
        let len = message.emit(&mut data).expect("it fits");
        let contents = Contents::SessionControl;
        let data = data[..len].to_vec();
        self.unsent.push_back((stream, Message::new(contents, data)));
    }

    /// Runs until the association has ended; each message goes through `handle`.
    #[track_caller]
    fn run(&mut self, mut handle: impl FnMut(&mut Self, u16, Message)) {
        let limit = 3 * TIME_LIMIT;
        while self.ended.is_none() {
            assert!(self.now() < limit, "{:?}", self.came.last());
            self.step();
            for (stream, message) in std::mem::take(&mut self.came) {
                handle(self, stream, message);
            }
        }
    }

    /// The passive end of each session; returns what the initiators said.
    #[track_caller]
    fn serve(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        self.run(|host, stream, message| {
            if message.contents == Contents::Segment {
                return host.echo(stream, message);
            }
            let parsed = SessionMessage::parse(&message.data).expect("session control");
            said.push(format!("{stream}: {parsed}"));
            let answer = match parsed.function {
                Function::Initiate => SessionMessage::new(Function::Accept, parsed.word, b"accepted"),
                Function::Terminate => SessionMessage::TERMINATE,
                other => panic!("{other} from an initiator"),
            };
            host.control(stream, &answer);
        });
        said
    }

    /// The active end of each session: sends `sends` Sends of `len` bytes, of which [`WINDOW`] wait
    /// for their echoes, and ends the session after the last. Returns what the responder said.
    #[track_caller]
    fn request(
        &mut self,
        peer: SocketAddr,
        word: Option<EnhancedWord>,
        sends: u32,
        len: usize,
    ) -> Vec<String> {
        let port = peer.port();
        let now = self.now();
        let peer = Peer { address: peer, port };
        self.association = self.endpoint.connect(peer, now);
        let sessions = self.streams.len() as u16;
        for stream in 0..sessions {
            self.control(stream, &SessionMessage::new(Function::Initiate, word, b"asked"));
        }
        let mut said = Vec::new();
        let mut due = vec![1; usize::from(sessions)];
        self.run(|host, stream, message| {
            if message.contents == Contents::Segment {
                let due = &mut due[usize::from(stream)];
                assert_eq!(
                    message,
                    segment(stream, *due, len),
                    "Send {due} of stream {stream}"
                );
                *due += 1;
                let next = *due + WINDOW - 1;
                if next <= sends {
                    host.unsent.push_back((stream, segment(stream, next, len)));
                } else if *due > sends {
                    host.control(stream, &SessionMessage::TERMINATE);
                }
                return;
            }
            let parsed = SessionMessage::parse(&message.data).expect("session control");
            said.push(format!("{stream}: {parsed}"));
            if parsed.function == Function::Accept {
                let first = (1..=sends.min(WINDOW)).map(|msn| (stream, segment(stream, msn, len)));
                host.unsent.extend(first);
            }
        });
        assert!(
            due.iter().all(|due| *due == sends + 1),
            "not all came: {due:?}, {:?}",
            self.ended
        );
        said
    }
}

fn incoming_of_session() -> Incoming {
    Incoming::new(1 << 14, 1 << 20)
}

fn is_terminate(message: &Message) -> bool {
    let parsed = SessionMessage::parse(&message.data);
    message.contents == Contents::SessionControl && parsed == Ok(SessionMessage::TERMINATE)
}

/// A Send of one segment.
fn segment(stream: u16, msn: u32, len: usize) -> Message {
    const SEND: u8 = 0x43;
    let header = UntaggedHeader {
        last: true,
        rsvd_ulp: SEND,
        rsvd_ulp_word: 0,
        qn: 0,
        msn,
        mo: 0,
    };
    let mut data = vec![(msn as u8) ^ (stream as u8); UNTAGGED_LEN + len];
    header.emit(&mut data);
    let contents = Contents::Segment;
    Message::new(contents, data)
}

/// The address of the guest's port here.
fn there(guest: &Guest) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, guest.port))
}

/// The kernel connects to us.
#[track_caller]
fn kernel_connects(
    guest: &Guest,
    peer: &str,
    (sessions, faults): (u16, usize),
    options: &str,
) -> (Host, Vec<String>, String) {
    let port = free_port();
    let mut host = Host::new(port, sessions, faults);
    let line = format!("{peer} active {HOST} {port} encap {port} sessions {sessions} {options}");
    let task = guest.start(&line);
    let said = host.serve();
    let printed = task.success();
    assert_eq!(host.ended, Some(Reason::Closed), "{printed}");
    (host, said, printed)
}

/// The number of messages of which the kernel has got fragments (RFC 5043 §9: there must be none).
#[track_caller]
pub(crate) fn fragments(guest: &Guest) -> String {
    guest.start("grep SctpReasmUsrMsgs /proc/net/sctp/snmp").success()
}

/// The lines of a peer's output that have these words.
pub(crate) fn count(printed: &str, words: &str) -> usize {
    printed.lines().filter(|line| line.contains(words)).count()
}

#[test]
fn the_kernel_initiates_sessions() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let (_, said, printed) = kernel_connects(&guest, peer, (1, 0), "");
    assert_eq!(
        said,
        [
            "0: DDP session Initiate private data 19",
            "0: DDP session Terminate"
        ]
    );
    assert_eq!(
        count(&printed, "received Accept, private data 8 \"accepted\""),
        1,
        "{printed}"
    );
    assert_eq!(count(&printed, "association: adaptation 1"), 1, "{printed}");
    // Of as many bytes as fit a packet, and in several segments.
    for size in [1424, 3000] {
        let options = format!("enhanced sends 50 size {size}");
        let (_, said, printed) = kernel_connects(&guest, peer, (3, 0), &options);
        assert_eq!(said.len(), 6);
        let initiate = "DDP session Enhanced Initiate client/server ird 4 ord 4 private data 19";
        assert!(said[..3].iter().all(|line| line.ends_with(initiate)), "{said:?}");
        assert_eq!(count(&printed, "as filled"), 150, "{printed}");
        // A program that exits aborts it, if it is first.
        let ends = ["association: ended", "association: Connection reset by peer"];
        assert_eq!(
            ends.map(|end| count(&printed, end)).iter().sum::<usize>(),
            1,
            "{printed}"
        );
    }
}

#[test]
fn a_stream_of_the_kernel_has_sessions_one_after_the_other() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let (_, said, printed) = kernel_connects(&guest, peer, (2, 0), "rounds 5 sends 10");
    assert_eq!(said.len(), 20, "{said:?}");
    assert_eq!(count(&printed, "as filled"), 100, "{printed}");
    assert_eq!(count(&printed, "streams"), 1, "one association: {printed}");
}

#[test]
fn a_kernel_without_ddp_is_refused() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    // No indication, and that of another protocol.
    for adaptation in [0, 2] {
        let port = free_port();
        let mut host = Host::new(port, 1, 0);
        let line = format!("{peer} active {HOST} {port} encap {port} adaptation {adaptation}");
        let task = guest.start(&line);
        while host.sent == 0 {
            assert!(host.now() < TIME_LIMIT, "no answer");
            host.step();
        }
        let (ok, printed) = task.ends();
        assert!(!ok && printed.contains("Connection refused"), "{printed}");
        assert_eq!((host.association, host.endpoint.associations()), (None, 0));

        let line = format!("{peer} passive {} adaptation {adaptation}", guest.port);
        let task = guest.sctp_listener(&line);
        let mut host = Host::new(free_port(), 1, 0);
        let said = host.request(there(&guest), None, 0, 0);
        assert_eq!((&said[..], host.ended), (&[][..], Some(Reason::NoDdp)));
        guest.stop();
        let (_, printed) = task.ends();
        assert_eq!(count(&printed, "streams"), 0, "{printed}");
    }
}

#[test]
fn the_kernel_accepts_sessions() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let word = EnhancedWord {
        ird: 2,
        ord: 3,
        ..EnhancedWord::default()
    };
    let before = fragments(&guest);
    let longest = Host::new(free_port(), 1, 0).longest();
    for (sessions, word, len) in [(1, None, 64), (3, Some(word), longest)] {
        let task = guest.sctp_listener(&format!("{peer} passive {} sessions {sessions}", guest.port));
        let mut host = Host::new(free_port(), sessions, 0);
        let said = host.request(there(&guest), word, 50, len);
        let printed = task.success();
        assert_eq!(said.len(), 2 * usize::from(sessions), "{said:?}\n{printed}");
        let accept = match word {
            Some(_) => "DDP session Enhanced Accept client/server ird 3 ord 2 private data 22",
            None => "DDP session Accept private data 22",
        };
        assert_eq!(said[0], format!("0: {accept}"));
        assert_eq!(
            count(&printed, &format!("of {len} bytes")),
            50 * usize::from(sessions),
            "{printed}"
        );
    }
    assert_eq!(fragments(&guest), before);
}

#[test]
fn the_kernel_rejects_sessions() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let task = guest.sctp_listener(&format!("{peer} passive {} reject", guest.port));
    let mut host = Host::new(free_port(), 1, 0);
    let said = host.request(there(&guest), None, 0, 0);
    assert_eq!(said, ["0: DDP session Reject private data 10"]);
    task.success();
}

#[test]
fn the_kernel_and_we_repeat_what_a_network_loses() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let before = fragments(&guest);
    let (host, said, printed) = kernel_connects(&guest, peer, (3, 10), "sends 40 size 1000");
    assert_eq!(said.len(), 6, "{said:?}");
    assert_eq!(count(&printed, "as filled"), 120, "{printed}");
    // Chunks go unordered in both directions: the later ones do not wait for those that were lost.
    assert!(host.early > 0 && count(&printed, "came before") > 0, "{printed}");

    let task = guest.sctp_listener(&format!("{peer} passive {} sessions 3", guest.port));
    let mut host = Host::new(free_port(), 3, 10);
    let said = host.request(there(&guest), None, 40, 1000);
    let printed = task.success();
    assert_eq!(said.len(), 6, "{said:?}");
    assert!(host.early > 0 && count(&printed, "came before") > 0, "{printed}");
    assert_eq!(fragments(&guest), before);
}

#[test]
fn the_kernel_follows_a_peer_to_another_udp_port() {
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let task = guest.sctp_listener(&format!("{peer} passive {}", guest.port));
    let mut host = Host::new(free_port(), 1, 0);
    host.moves_after = Some(20);
    let said = host.request(there(&guest), None, 200, 1000);
    assert!(host.sent > 20, "it has moved");
    assert_eq!((said.len(), count(&task.success(), "of 1000 bytes")), (2, 200));
}

#[test]
fn two_ends_of_the_kernel_agree() {
    or_skip!(installed("tshark"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let port = guest.port;
    // From the guest to this machine, and back by the forwarded port.
    let end_to_end = |active: &str, passive: &str| {
        let passive = guest.sctp_listener(&format!("{peer} passive {port} {passive}"));
        let active = guest.start(&format!("{peer} active {HOST} {port} encap {port} {active}"));
        (active.success(), passive.success())
    };
    let (active, passive) = end_to_end(
        "sessions 2 enhanced sends 20 size 3000 tagged",
        "sessions 2 size 3000",
    );
    assert_eq!(count(&active, "as filled"), 40, "{active}");
    assert_eq!(count(&active, "read what was written"), 2, "{active}");
    assert_eq!(count(&passive, "as filled"), 40, "{passive}");
    let (active, _) = end_to_end("rping 5 size 5000", "rping 1");
    assert_eq!(count(&active, "is well"), 5, "{active}");
    let (active, passive) = end_to_end("enhanced", "reject");
    assert_eq!(
        count(&active, "received Enhanced Reject, private data 10"),
        1,
        "{active}{passive}"
    );
    is_ddp_over_sctp(&guest.wire(), port);
}

/// tshark finds SCTP with DDP's identifiers in the UDP datagrams, and RDMAP in the segments.
#[track_caller]
pub(crate) fn is_ddp_over_sctp(wire: &Wire, port: u16) {
    let decode = format!("udp.port=={port},sctp");
    let field = |name, filter: &str| wire.tshark(&["-d", &decode, "-T", "fields", "-e", name], filter);
    let init = "sctp.chunk_type == 1 || sctp.chunk_type == 2";
    let adaptations = field("sctp.adaptation_layer_indication", init);
    let is_ddp = |line: &str| line == "0x00000001";
    assert!(
        adaptations.lines().count() > 0 && adaptations.lines().all(is_ddp),
        "{adaptations}"
    );
    let identifiers = "sctp.data_payload_proto_id";
    assert_eq!(sorted(&field(identifiers, identifiers)), ["16", "17"]);
    let ordered = "sctp.data_payload_proto_id && !(sctp.data_u_bit == 1)";
    assert_eq!(field("frame.number", ordered), "");
    let segments = wire.segments(port);
    let opcodes = [&AS_DDP[..], &["-T", "fields", "-e", "iwarp_rdma.opcode"]].concat();
    let opcodes = segments.tshark(&opcodes, "iwarp_rdma.opcode");
    assert_eq!(sorted(&opcodes), ["0x00", "0x01", "0x02", "0x03"]);
    let malformed = segments.tshark(&AS_DDP, "_ws.malformed || !iwarp_rdma.opcode");
    assert_eq!(malformed, "");
}

/// The values of a field, each once.
fn sorted(printed: &str) -> Vec<&str> {
    let values: BTreeSet<&str> = printed.lines().flat_map(|line| line.split(',')).collect();
    values.into_iter().collect()
}
