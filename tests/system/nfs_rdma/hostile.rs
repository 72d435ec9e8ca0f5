//! A requester made by hand, byte by byte: headers that are invalid, and others that may be valid
//! or not. The expected answers are written here a second time, without the code under test.

mod backward;
mod overload;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use urnic_tests::build::example;
use urnic_tests::peer::Peer;
use urnic_tests::program::Program;
use urnic_tests::random::Random;
use urnic_tests::startup::{CRC, Frame, REJECT};
use urnic_tests::ulpdu::{complaint, send, tagged};
use urnic_tests::wait::{TIME_LIMIT, descriptors, resident, until};

use super::{Export, idle, listening, pattern, read, urnic_nfs, write};

/// Credits that the server grants.
const GRANT: u32 = 64;
/// The XID of a call.
const X: u32 = 0x00c0_ffee;
/// A handle; its value is not checked.
const H: u32 = 0x5ead;

/// rdma_proc (RFC 8166 §4.2.4).
const MSG: u32 = 0;
const NOMSG: u32 = 1;
const DONE: u32 = 3;
const ERROR: u32 = 4;

/// Three absent lists.
const ABSENT: [u32; 3] = [0; 3];
/// A call of procedure 0 of NFS (RFC 5531 §9), and its reply.
const NULL: [u32; 10] = [X, 0, 2, 100_003, 3, 0, 0, 0, 0, 0];
const DONE_NOTHING: [u32; 6] = [X, 1, 0, 0, 0, 0];
const GARBAGE_ARGS: [u32; 6] = [X, 1, 0, 0, 0, 4];

fn words(parts: &[&[u32]]) -> Vec<u8> {
    parts
        .iter()
        .copied()
        .flatten()
        .flat_map(|word| word.to_be_bytes())
        .collect()
}

fn msg(lists: &[u32], payload: &[u32]) -> Vec<u8> {
    words(&[&[X, 1, 8, MSG], lists, payload])
}

fn nomsg(lists: &[u32]) -> Vec<u8> {
    words(&[&[X, 1, 8, NOMSG], lists])
}

/// The first four words of a correct header, with this version and procedure.
fn fixed(version: u32, procedure: u32) -> Vec<u8> {
    words(&[&[X, version, 8, procedure], &ABSENT, &NULL])
}

fn err_chunk(xid: u32) -> Vec<u8> {
    words(&[&[xid, 1, GRANT, ERROR, 2]])
}

fn err_vers(xid: u32, version: u32) -> Vec<u8> {
    words(&[&[xid, version, GRANT, ERROR, 1, 1, 1]])
}

fn reply(lists: &[u32], payload: &[u32]) -> Vec<u8> {
    words(&[&[X, 1, GRANT, MSG], lists, payload])
}

fn of(xid: u32, mut message: Vec<u8>) -> Vec<u8> {
    message[..4].copy_from_slice(&xid.to_be_bytes());
    if message[12..16] == [0; 4] {
        message[28..32].copy_from_slice(&xid.to_be_bytes());
    }
    message
}

/// The requester. It sends no sizes, so they are 1024 bytes each way (RFC 8166 §3.3.2).
struct Requester {
    peer: Peer,
    sent: u32,
    last: u32,
}

impl Requester {
    #[track_caller]
    fn of(export: &Export) -> Self {
        Self::at(export.rdma.parse().expect("a port"))
    }

    #[track_caller]
    fn at(port: u16) -> Self {
        Self::over(Peer::connect(([127, 0, 0, 1], port).into()))
    }

    #[track_caller]
    fn over(peer: Peer) -> Self {
        Self::try_over(peer).expect("a connection")
    }

    /// `None` if the server does not accept.
    #[track_caller]
    fn try_over(mut peer: Peer) -> Option<Self> {
        let request = Frame {
            request: true,
            flags: CRC,
            revision: 1,
            private_data: Vec::new(),
        };
        peer.send(&request.to_bytes());
        let answer = peer.has_data().then(|| Frame::read(&mut peer))?;
        assert!(!answer.request, "{answer:02x?}");
        let requester = Self {
            peer,
            sent: 0,
            last: 0xfeed_0000,
        };
        (answer.flags & REJECT == 0).then_some(requester)
    }

    fn sends(&mut self, message: &[u8]) {
        self.sent += 1;
        self.peer.send_ulpdus(&[send(self.sent, message)]);
    }

    /// The server's next message; `None` if the server ends the connection instead. The server's
    /// Reads are answered; data that it writes is dropped.
    #[track_caller]
    fn receives(&mut self) -> Option<Vec<u8>> {
        loop {
            let ulpdu = self.peer.next_ulpdu()?;
            match ulpdu[1] & 0xf {
                0 => {}
                1 => self.is_read(&ulpdu),
                3 => {
                    // The last segment of queue 0's next message: all of it.
                    assert_eq!(
                        (ulpdu[0], &ulpdu[6..10], &ulpdu[14..18]),
                        (0x41, &[0; 4][..], &[0; 4][..])
                    );
                    return Some(ulpdu[18..].to_vec());
                }
                7 => return None,
                other => panic!("RDMAP opcode {other}: {ulpdu:02x?}"),
            }
        }
    }

    fn is_read(&mut self, request: &[u8]) {
        const SEGMENT: u64 = 32 << 10;
        let word = |at: usize| u32::from_be_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let (sink, len) = (word(18), u64::from(word(30)));
        let to = u64::from(word(22)) << 32 | u64::from(word(26));
        let mut at = 0;
        loop {
            let end = len.min(at + SEGMENT);
            let control = if end == len { 0xc1 } else { 0x81 };
            let bytes = vec![0; (end - at) as usize];
            self.peer
                .send_ulpdus(&[tagged(control, 0x42, sink, to + at, &bytes)]);
            if end == len {
                return;
            }
            at = end;
        }
    }

    /// Checks that the server answers a valid call, and sends nothing but that answer.
    #[track_caller]
    fn continues(&mut self, after: &str) {
        self.last += 1;
        let xid = self.last;
        self.sends(&of(xid, fixed(1, MSG)));
        let received = self.receives();
        assert_eq!(
            received,
            Some(of(xid, reply(&ABSENT, &DONE_NOTHING))),
            "after {after}"
        );
    }
}

/// A row: the description of a message, the message, and its answer.
type Row = (&'static str, Vec<u8>, Option<Vec<u8>>);

fn refused_headers() -> Vec<Row> {
    let chunk = |what, message| (what, message, Some(err_chunk(X)));
    let mut other = NULL;
    other[0] ^= 1;
    let mut sideways = NULL;
    sideways[1] = 7;
    let mut rows = vec![
        chunk("the payload of another transaction", msg(&ABSENT, &other)),
        chunk("no payload", msg(&ABSENT, &[])),
        chunk("a payload of one word", msg(&ABSENT, &[X])),
        chunk(
            "a payload that is neither call nor reply",
            msg(&ABSENT, &sideways),
        ),
        chunk("RDMA_MSGP", fixed(1, 2)),
        chunk("procedure 5", fixed(1, 5)),
        chunk("procedure 9", fixed(1, 9)),
        chunk("procedure 2^32-1", fixed(1, u32::MAX)),
        chunk("RDMA_NOMSG with nothing", nomsg(&ABSENT)),
        chunk(
            "RDMA_NOMSG with a Write list",
            nomsg(&[0, 1, 1, H, 64, 0, 0, 0, 0]),
        ),
        chunk("RDMA_NOMSG with a Reply chunk", nomsg(&[0, 0, 1, 1, H, 64, 0, 0])),
        chunk(
            "RDMA_NOMSG without position zero",
            nomsg(&[1, 4, H, 40, 0, 0, 0, 0, 0]),
        ),
        chunk("RDMA_NOMSG with no bytes", nomsg(&[1, 0, H, 0, 0, 0, 0, 0, 0])),
        chunk("a Read list marked 2", msg(&[2, 0, 0], &NULL)),
        chunk("a Write list marked 9", msg(&[0, 9, 0], &NULL)),
        chunk("a Reply chunk marked 2^32-1", msg(&[0, 0, u32::MAX], &NULL)),
        chunk("Position 3", msg(&[1, 3, H, 8, 0, 0, 0, 0, 0], &NULL)),
        chunk("Position 0 of RDMA_MSG", msg(&[1, 0, H, 8, 0, 0, 0, 0, 0], &NULL)),
        chunk(
            "a Position beyond the payload",
            msg(&[1, 44, H, 8, 0, 0, 0, 0, 0], &NULL),
        ),
        chunk(
            "a Position within another item",
            msg(&[1, 36, H, 8, 0, 0, 1, 40, H, 8, 0, 0, 0, 0, 0], &NULL),
        ),
        chunk(
            "a million segments",
            msg(&[0, 1, 1_000_000, H, 8, 0, 0, 0, 0], &NULL),
        ),
        chunk("2^32-1 segments", msg(&[0, 0, 1, u32::MAX, H, 8, 0, 0], &NULL)),
        chunk(
            "an argument of 4 GiB",
            msg(&[1, 40, H, u32::MAX, 0, 0, 0, 0, 0], &NULL),
        ),
        chunk("a call of 4 GiB", nomsg(&[1, 0, H, u32::MAX, 0, 0, 0, 0, 0])),
    ];
    let all = msg(
        &[
            1, 40, H, 8, 0, 0, 0, 1, 2, H, 8, 0, 0, H, 8, 0, 8, 0, 1, 1, H, 8, 0, 0,
        ],
        &[],
    );
    rows.extend((28..=all.len()).map(|len| chunk("lists that are cut short", all[..len].to_vec())));
    for version in [0, 2, 3, u32::MAX] {
        let refusal = || Some(err_vers(X, version));
        rows.push(("another version", fixed(version, MSG), refusal()));
        rows.push(("another version's procedure", fixed(version, 77), refusal()));
        let unknown = words(&[&[X, version, 0, 9, 0xffff_ffff, 5, 5]]);
        rows.push(("another version's lists", unknown, refusal()));
    }
    rows
}

fn discarded_messages() -> Vec<Row> {
    let silence = |what, message| (what, message, None);
    let mut rows = vec![
        silence("RDMA_DONE", fixed(1, DONE)),
        silence("RDMA_DONE alone", words(&[&[X, 1, 8, DONE]])),
        silence("ERR_VERS", words(&[&[X, 1, 8, ERROR, 1, 1, 1]])),
        silence("ERR_CHUNK", words(&[&[X, 1, 8, ERROR, 2]])),
        silence("an unknown error", words(&[&[X, 1, 8, ERROR, 99, 0, 0]])),
        silence("an error cut short", words(&[&[X, 1, 8, ERROR]])),
        silence("another version's error", words(&[&[X, 2, 8, ERROR, 2, 0, 0]])),
        silence("a reply to no call", msg(&ABSENT, &DONE_NOTHING)),
    ];
    rows.extend((0..28).map(|len| silence("less than 28 bytes", fixed(1, MSG)[..len].to_vec())));
    rows.extend((16..28).map(|len| silence("less than 28 bytes", fixed(2, MSG)[..len].to_vec())));
    rows
}

/// Unusual calls that are valid.
fn answered_calls() -> Vec<Row> {
    let asking = |credits| words(&[&[X, 1, credits, MSG], &ABSENT, &NULL]);
    let well = |lists: &[u32]| Some(reply(lists, &DONE_NOTHING));
    vec![
        ("a call for 0 credits", asking(0), well(&ABSENT)),
        ("a call for 2^32-1 credits", asking(u32::MAX), well(&ABSENT)),
        (
            "an empty Write chunk",
            msg(&[0, 1, 0, 0, 0], &NULL),
            well(&[0, 1, 0, 0, 0]),
        ),
        (
            "Write chunks that are not needed",
            msg(&[0, 1, 2, H, 8, 0, 0, H, 8, 0, 8, 1, 1, H, 8, 0, 0, 0, 0], &NULL),
            well(&[0, 1, 2, H, 0, 0, 0, H, 0, 0, 8, 1, 1, H, 0, 0, 0, 0, 0]),
        ),
        (
            "a Reply chunk that is not needed",
            msg(&[0, 0, 1, 1, H, 8, 0, 0], &NULL),
            well(&[0, 0, 1, 1, H, 0, 0, 0]),
        ),
        (
            "GETATTR of nothing",
            msg(&ABSENT, &[X, 0, 2, 100_003, 3, 1, 0, 0, 0, 0]),
            Some(reply(&ABSENT, &GARBAGE_ARGS)),
        ),
        (
            "RPCSEC_GSS: denied",
            msg(&ABSENT, &[X, 0, 2, 100_003, 3, 0, 6, 20, 1, 1, 0, 1, 0, 0, 0]),
            // MSG_DENIED, AUTH_ERROR, AUTH_BADCRED.
            Some(reply(&ABSENT, &[X, 1, 1, 1, 1])),
        ),
        (
            "an argument by chunk where there is none",
            msg(&[1, 40, H, 8, 0, 0, 0, 0, 0], &NULL),
            Some(reply(&ABSENT, &GARBAGE_ARGS)),
        ),
    ]
}

#[test]
fn a_malformed_header_is_refused_or_discarded() {
    let export = Export::new("headers", &[]);
    let mut requester = Requester::of(&export);
    for (what, message, answer) in [refused_headers(), discarded_messages(), answered_calls()].concat() {
        requester.sends(&message);
        if let Some(answer) = answer {
            assert_eq!(requester.receives(), Some(answer), "to {what}: {message:02x?}");
        }
        requester.continues(what);
    }
    // RFC 8166 §3.3.2: a message longer than the receives ends its connection, and no other.
    let mut other = Requester::of(&export);
    other.sends(&[0; 5000]);
    assert_eq!(other.receives(), None);
    requester.continues("a message that was too long elsewhere");
}

/// Draft 04 has no rule that discards RDMA_DONE, or headers of less than 28 bytes: both are
/// answered, if they have an xid, a version and a procedure.
#[test]
fn rpc_e_06_and_h_08_the_draft_answers_done_and_short_headers() {
    let mut server =
        urnic_nfs("serve --memory 64M --tcp-port 0 --rdma-port 0 --rdma-profile draft-04").spawn();
    let (_, rdma) = listening(&mut server);
    let mut requester = Requester::at(rdma.parse().expect("a port"));
    let mut rows = vec![
        ("RDMA_DONE", fixed(1, DONE), Some(err_chunk(X))),
        ("RDMA_DONE alone", words(&[&[X, 1, 8, DONE]]), Some(err_chunk(X))),
        ("ERR_CHUNK", words(&[&[X, 1, 8, ERROR, 2]]), None),
    ];
    rows.extend((0..16).map(|len| ("no procedure", fixed(1, MSG)[..len].to_vec(), None)));
    rows.extend((16..28).map(|len| {
        (
            "a short header",
            fixed(1, MSG)[..len].to_vec(),
            Some(err_chunk(X)),
        )
    }));
    rows.extend((16..28).map(|len| {
        let refusal = Some(err_vers(X, 2));
        (
            "another version's short header",
            fixed(2, MSG)[..len].to_vec(),
            refusal,
        )
    }));
    for (what, message, answer) in rows {
        requester.sends(&message);
        if let Some(answer) = answer {
            assert_eq!(requester.receives(), Some(answer), "to {what}: {message:02x?}");
        }
        requester.continues(what);
    }
    server.stopped();
}

/// RFC 8166 §4.5.3: a client that cannot find out what ended its connection sends the call again,
/// and would repeat it for ever.
#[test]
fn a_call_whose_memory_cannot_be_read_ends_the_connection_once() {
    let export = Export::new("unreadable", &[]);
    let call = msg(&[1, 40, H, 8, 0, 0, 0, 0, 0], &NULL);
    let mut requester = Requester::of(&export);
    requester.sends(&call);
    let request = requester.peer.ulpdu();
    assert_eq!(request[1], 0x41, "a Read Request: {request:02x?}");
    // "Invalid Stag" (RFC 5040 §4.8).
    requester.peer.send_ulpdus(&[complaint(0x0100, &request)]);
    requester.peer.finish();
    requester.peer.read_to_end();
    // The server has the result of the last connection only when that connection is closed.
    let refused = until(TIME_LIMIT, || {
        let mut again = Requester::of(&export);
        again.sends(&call);
        let received = again.receives();
        again.continues("the call that broke the connection");
        (received == Some(err_chunk(X))).then_some(())
    });
    assert!(refused.is_some(), "the call is not refused");
}

/// The refusal of a call that broke a connection while the server did not read the connection: the
/// server's one thread waits for the answer of another client.
#[test]
fn a_call_that_broke_a_connection_unseen_is_refused() {
    /// A procedure that makes a call backward before it answers, to the procedure that its argument
    /// names.
    const BACK: [u32; 11] = [X, 0, 2, 0x2000_0003, 1, 4, 0, 0, 0, 0, 6];
    let scenes = example("rpc-rdma/verbs", "scenes");
    let mut server = Program::new(scenes).arg("serves").spawn();
    let port = server.wait_for_output("where it listens", |guest_output| {
        guest_output.strip_suffix('\n')?.rsplit(':').next()?.parse().ok()
    });
    let call = msg(&[1, 40, H, 8, 0, 0, 0, 0, 0], &NULL);
    let mut requester = Requester::at(port);
    requester.sends(&call);
    let request = requester.peer.ulpdu();
    assert_eq!(request[1], 0x41, "a Read Request: {request:02x?}");
    let mut other = Requester::at(port);
    other.sends(&msg(&ABSENT, &BACK));
    let back = other.receives().expect("a call backward");
    assert_eq!(back[32..36], [0; 4], "a call: {back:02x?}");
    requester.peer.send_ulpdus(&[complaint(0x0100, &request)]);
    requester.peer.finish();
    requester.peer.read_to_end();
    // When the next connection is established, the server has noticed the last one's end, or soon
    // will.
    let mut again = Requester::at(port);
    let xid = u32::from_be_bytes(back[..4].try_into().expect("four bytes"));
    other.sends(&of(
        xid,
        reply(&ABSENT, &[DONE_NOTHING.as_slice(), &[7]].concat()),
    ));
    let refused = until(TIME_LIMIT, || {
        again.sends(&call);
        let received = again.receives();
        again = Requester::at(port);
        (received == Some(err_chunk(X))).then_some(())
    });
    assert!(refused.is_some(), "the call is not refused");
}

/// Messages that are the same in every run.
struct Messages(Random);

impl Messages {
    /// A random word, mostly one that has a meaning.
    fn word(&mut self) -> u32 {
        const WORDS: [u32; 12] = [0, 0, 0, 1, 1, 2, 3, 4, 8, 40, 4096, u32::MAX];
        match self.0.below(10) {
            0 => self.0.next() as u32,
            _ => WORDS[self.0.below(WORDS.len())],
        }
    }

    /// A message, of this transaction if it is long enough for one.
    fn message(&mut self, xid: u32) -> Vec<u8> {
        let mut message = match self.0.below(4) {
            0 => (0..self.0.below(256))
                .map(|_| self.word())
                .flat_map(u32::to_be_bytes)
                .collect(),
            1 => (0..self.0.below(1024)).map(|_| self.0.next() as u8).collect(),
            _ => {
                // A message that some row is about, with a few words of it changed.
                let rows = [refused_headers(), answered_calls()][self.0.below(2)].clone();
                let mut message = rows[self.0.below(rows.len())].1.clone();
                for _ in 0..self.0.below(4) {
                    let at = self.0.below(message.len() / 4) * 4;
                    message[at..at + 4].copy_from_slice(&self.word().to_be_bytes());
                }
                message
            }
        };
        if let Some(first) = message.first_chunk_mut() {
            *first = xid.to_be_bytes();
        }
        message
    }
}

/// The permitted answers to a message: an error of this kind, for certain; or any answer, when the
/// message may be a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Nothing,
    Version(u32),
    Chunk,
    Anything,
}

/// The rules for the first four words.
fn due(message: &[u8]) -> Due {
    let word = |at: usize| {
        message
            .get(at..at + 4)
            .and_then(|word| word.try_into().ok())
            .map(u32::from_be_bytes)
    };
    match (word(4), word(12)) {
        (_, None | Some(ERROR | DONE)) => Due::Nothing,
        _ if message.len() < 28 => Due::Nothing,
        (Some(1), Some(MSG | NOMSG)) => Due::Anything,
        (Some(1), _) => Due::Chunk,
        (version, _) => Due::Version(version.unwrap_or_default()),
    }
}

#[test]
fn random_messages_harm_neither_server_nor_other_clients() {
    const MESSAGES: u32 = 3000;
    const BATCH: u32 = 16;
    let export = Export::new("random", &[]);
    let bytes = pattern(3_000_001);
    write(&export.here("sent"), &bytes);
    // Another client runs all the while, and obeys the rules.
    let over = AtomicBool::new(false);
    Requester::of(&export).continues("nothing");
    let put = || {
        let put = export.client("put").arg(export.here("sent"));
        put.arg("127.0.0.1:/file")
    };
    // The server keeps the last used file open.
    put().run().success();
    std::fs::write(export.file("file"), "").expect("our file");
    let pid = export.server.pid();
    let before = (idle(pid), resident(pid));
    std::thread::scope(|scope| {
        let mut bystander = Requester::of(&export);
        let over = &over;
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                bystander.continues("something elsewhere");
            }
        });
        let put = put().spawn();
        let ends = Ends(over);
        let mut messages = Messages(Random(0x6a09_e667_f3bc_c908));
        let mut requester = Requester::of(&export);
        for first in (0..MESSAGES).step_by(BATCH as usize) {
            let mut owed = HashMap::new();
            for xid in first + 1..=first + BATCH {
                let message = messages.message(xid);
                owed.insert(xid, due(&message));
                requester.sends(&message);
            }
            if !settled(&mut requester, owed, first) {
                requester = Requester::of(&export);
            }
        }
        put.wait().success();
        drop(ends);
    });
    assert!(read(&export.file("file")) == bytes, "what was put meanwhile");
    let grown = resident(pid).saturating_sub(before.1);
    // The data of one client's calls that the server may fetch: 2 MiB for each call.
    assert!(grown < u64::from(GRANT) * 2048, "{grown} KiB more");
    let back = until(TIME_LIMIT, || (descriptors(pid) <= before.0).then_some(()));
    assert!(
        back.is_some(),
        "{} descriptors, {} before",
        descriptors(pid),
        before.0
    );
}

/// Ends the other client's thread, also when this one fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads all pending answers, up to the answer to a call that comes last; `false` if the server
/// ends the connection, as it may when one of the messages was a call that cannot be answered.
#[track_caller]
fn settled(requester: &mut Requester, mut owed: HashMap<u32, Due>, seed: u32) -> bool {
    let last = 0xaaaa_0000 + seed;
    requester.sends(&of(last, fixed(1, MSG)));
    while let Some(received) = requester.receives() {
        let xid = u32::from_be_bytes(*received.first_chunk().expect("an xid"));
        if xid == last {
            assert_eq!(received, of(last, reply(&ABSENT, &DONE_NOTHING)));
            // Errors come in order; calls may take any time.
            owed.retain(|_, due| matches!(due, Due::Version(_) | Due::Chunk));
            assert!(owed.is_empty(), "not answered: {owed:x?}");
            return true;
        }
        // Answers to the batch before may still come.
        let due = owed.remove(&xid).unwrap_or(Due::Anything);
        let error = match due {
            Due::Nothing => panic!("answered: {received:02x?}"),
            Due::Version(version) => Some(err_vers(xid, version)),
            Due::Chunk => Some(err_chunk(xid)),
            Due::Anything => (received[12..16] == ERROR.to_be_bytes()).then(|| err_chunk(xid)),
        };
        match error {
            Some(error) => assert_eq!(received, error),
            None => assert_eq!(received[4..12], words(&[&[1, GRANT]])[..], "{received:02x?}"),
        }
    }
    false
}
