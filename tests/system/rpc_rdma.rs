//! RPC-over-RDMA's headers, read by an independent dissector.

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use urnic_rpc_rdma::engine::{
    Action, Call, Config, Connection, Event, Exposed, Item, Reply, Role, Source, Span, Terms,
};
use urnic_rpc_rdma::{Body, ErrorBody, Header, Limits, Segment, procedure};
use urnic_tests::framing::Framing;
use urnic_tests::or_skip;
use urnic_tests::peer::hex;
use urnic_tests::skip::installed;

const REQUEST: &str = "4d504120 49442052 65712046 72616d65 40010000";
const REPLY: &str = "4d504120 49442052 65702046 72616d65 40010000";

/// A transient program (RFC 5531 §13), so that tshark does not parse its arguments.
const PROGRAM: u32 = 0x2000_0001;

fn words(words: &[u32], len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    bytes.resize(bytes.len().max(len), 0);
    bytes
}

fn item(offset: usize, len: u32) -> Item<()> {
    Item {
        offset,
        memory: (),
        len,
    }
}

/// The parameters of a call: bytes of the call, its arguments after that, room for results, bytes
/// of the longest reply; then bytes of the reply and of the results in it.
type Job = (
    usize,
    &'static [u32],
    &'static [u32],
    usize,
    usize,
    &'static [u32],
);

/// Every kind of call and reply, with thresholds of 1024 bytes.
const JOBS: [Job; 9] = [
    (40, &[], &[], 100, 24, &[]),
    (44, &[100], &[100], 100, 28, &[77]),
    (44, &[5001, 7000], &[], 100, 28, &[]),
    (44, &[], &[8192], 100, 28, &[8191]),
    (44, &[], &[8192, 3000], 100, 32, &[10]),
    (4000, &[], &[], 6000, 5996, &[]),
    (4000, &[9], &[4096], 3000, 200, &[]),
    (40, &[], &[], 3000, 24, &[]),
    // A reply that is longer than the call allowed.
    (40, &[], &[], 100, 2000, &[]),
];

/// One Send, and whether the client made it.
struct Sent {
    forward: bool,
    message: Vec<u8>,
}

fn bytes(pieces: &[Span<()>]) -> Vec<u8> {
    let mut all = Vec::new();
    for Span { source, at, len } in pieces {
        match source {
            Source::Bytes(bytes) => all.extend(&bytes[*at..][..*len]),
            Source::Memory(()) => all.resize(all.len() + len, 0),
        }
    }
    all
}

/// Executes the actions of one end; messages go to the other end and into the record.
fn carry(from: &mut Connection<()>, to: &mut Connection<()>, forward: bool, record: &mut Vec<Sent>) {
    for action in from.actions() {
        match action {
            Action::Register { region, what, .. } => {
                let length = match what {
                    Exposed::Memory((), len) | Exposed::Fresh(len) => len,
                    Exposed::Bytes(bytes) => bytes.len() as u32,
                };
                let handle = 0xabc0_0000 + region.0 as u32;
                let part = |length, offset| Segment {
                    handle,
                    length,
                    offset,
                };
                let half = length / 2;
                let segments = vec![
                    part(half, 0x7f00_0000_1000),
                    part(length - half, 0x7f00_0000_1000 + u64::from(half)),
                ];
                from.registered(region, segments);
            }
            Action::Release { region, .. } => from.released(region),
            Action::Send { work, pieces, .. } => {
                let message = bytes(&pieces);
                from.completed(work);
                to.received(&message, None);
                record.push(Sent { forward, message });
            }
            Action::Read { work, .. } => from.completed(work),
            Action::Receive(_) | Action::Write { .. } => {}
            Action::Close(why) => panic!("{why}"),
        }
    }
}

/// The messages of two ends for these jobs.
fn conversation() -> Vec<Sent> {
    let end = |role| {
        let mut end = Connection::new(&Config {
            segments: 2,
            ..Config::new(role)
        });
        end.connected(Terms::default());
        end
    };
    let (mut client, mut server) = (end(Role::Client), end(Role::Server));
    let mut record = Vec::new();
    for (xid, (len, arguments, results, max_reply, reply, returned)) in (0x1000..).zip(JOBS) {
        let message = words(&[xid, 0, 2, PROGRAM, 1, 1, 0, 0, 0, 0], len);
        let call = Call {
            arguments: arguments.iter().map(|argument| item(len, *argument)).collect(),
            results: results.iter().map(|room| item(0, *room)).collect(),
            message: message.into(),
            max_reply,
        };
        client.call(call).expect("it is a call");
        let mut answered = 0;
        while answered == 0 {
            carry(&mut client, &mut server, true, &mut record);
            for event in server.events() {
                if let Event::CallReceived(incoming) = event {
                    let results = returned.iter().map(|len| item(reply, *len)).collect();
                    let message = words(&[xid, 1, 0, 0, 0, 0], reply).into();
                    server
                        .reply(incoming.call, &Reply { message, results })
                        .expect("the call is there");
                }
            }
            carry(&mut server, &mut client, false, &mut record);
            let over = |event: &Event<()>| matches!(event, Event::Answered { .. });
            answered = client.events().iter().filter(|event| over(event)).count();
        }
    }
    record
}

const FIELDS: [&str; 12] = [
    "rpcordma.xid",
    "rpcordma.flow_control",
    "rpcordma.msg_type",
    "rpcordma.errcode",
    "rpcordma.reads_count",
    "rpcordma.writes_count",
    "rpcordma.reply_count",
    "rpcordma.position",
    "rpcordma.rdma_handle",
    "rpcordma.rdma_length",
    "rpcordma.rdma_offset",
    "_ws.malformed",
];

/// The line that tshark must print about a message.
fn expected(message: &[u8]) -> String {
    let (header, _) = Header::parse(message, &Limits::default()).expect("our own message");
    let Header { xid, credits, .. } = header;
    let fixed = |procedure, error: &str| format!("{xid:#010x}\t{credits}\t{procedure}\t{error}");
    let lists = match &header.body {
        Body::Msg(lists) | Body::NoMsg(lists) => lists,
        Body::Error(ErrorBody::Chunk) => return fixed(procedure::ERROR, "2") + "\t\t\t\t\t\t\t\t",
        Body::Error(ErrorBody::Version { .. }) => panic!("both speak version 1"),
    };
    let reads = lists.reads.iter().map(|read| &read.segment);
    let writes = lists.writes.iter().chain(&lists.reply).flat_map(|chunk| &chunk.0);
    let segments: Vec<_> = reads.chain(writes).collect();
    let list = |text: &dyn Fn(&Segment) -> String| {
        let all: Vec<_> = segments.iter().map(|segment| text(segment)).collect();
        all.join(",")
    };
    let positions: Vec<_> = lists.reads.iter().map(|read| read.position.to_string()).collect();
    let procedure = match header.body {
        Body::Msg(_) => procedure::MSG,
        _ => procedure::NOMSG,
    };
    format!(
        "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t",
        fixed(procedure, ""),
        lists.reads.len(),
        lists.writes.len(),
        u32::from(lists.reply.is_some()),
        positions.join(","),
        list(&|segment| format!("{:#010x}", segment.handle)),
        list(&|segment| segment.length.to_string()),
        list(&|segment| format!("{:#018x}", segment.offset)),
    )
}

/// text2pcap's hexdump of one packet in either direction.
fn dump(forward: bool, packet: &[u8], text: &mut String) {
    text.push_str(if forward { "O\n" } else { "I\n" });
    for (line, bytes) in packet.chunks(16).enumerate() {
        let bytes: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{:06x} {}", 16 * line, bytes.join(" ")).expect("a String takes it");
    }
}

#[test]
fn rpc_h_06_wireshark_decodes_the_engines_messages() {
    or_skip!(installed("tshark"));
    or_skip!(installed("text2pcap"));
    let record = conversation();
    assert_eq!(record.len(), 2 * JOBS.len());

    let mut text = String::new();
    dump(true, &hex(REQUEST), &mut text);
    dump(false, &hex(REPLY), &mut text);
    let mut framings = [Framing::default(), Framing::default()];
    let mut msns = [0_u32; 2];
    for Sent { forward, message } in &record {
        let direction = usize::from(*forward);
        msns[direction] += 1;
        // An RDMAP Send in one DDP segment: the last of queue 0's message MSN.
        let header = words(&[0, 0, msns[direction], 0], 16);
        let ulpdu = [&[0x41, 0x43], &header[..], message].concat();
        dump(*forward, &framings[direction].frame(&ulpdu), &mut text);
    }
    let folder = urnic_testkit::Folder::new("rpc-rdma");
    let (hexdump, capture) = (folder.file("txt"), folder.file("pcap"));
    std::fs::write(&hexdump, text).expect("the folder for temporary files takes one");
    let made = Command::new("text2pcap")
        .args(["-q", "-D", "-T", "20000,20049"])
        .args([&hexdump, &capture])
        .stdout(Stdio::null())
        .output()
        .expect("text2pcap runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let mut tshark = Command::new("tshark");
    tshark
        .arg("-r")
        .arg(&capture)
        .args(["-n", "-Y", "rpcordma", "-T", "fields"]);
    for option in ["tcp.try_heuristic_first:TRUE", "tcp.check_checksum:FALSE"] {
        tshark.args(["-o", option]);
    }
    tshark.args(["--enable-heuristic", "iwarp_mpa_tcp"]);
    tshark.args(FIELDS.iter().flat_map(|field| ["-e", field]));
    let read = tshark.output().expect("tshark runs");
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read = String::from_utf8_lossy(&read.stdout);
    let expected: Vec<_> = record.iter().map(|sent| expected(&sent.message)).collect();
    assert_eq!(read.lines().collect::<Vec<_>>(), expected);
}
