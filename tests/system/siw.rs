//! A real peer: Linux soft-iWARP in a virtual machine, with Debian's own programs on both sides.

use std::collections::BTreeMap;

use urnic_tests::capture::Wire;
use urnic_tests::guest::{Guest, HOST};
use urnic_tests::or_skip;
use urnic_tests::pair::{CONNECT_ATTEMPTS, was_rejected};
use urnic_tests::program::Program;
use urnic_tests::shell::LIMIT;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use crate::rdma_cm::LOST_RACE;

/// Variables of our program's environment.
pub(crate) type Settings<'a> = &'a [(&'a str, &'a str)];

/// The output of both ends, and whether they succeeded.
pub(crate) struct Ends {
    pub(crate) ours: String,
    pub(crate) theirs: String,
    ok: bool,
}

impl Ends {
    #[track_caller]
    pub(crate) fn succeed(self) -> Self {
        assert!(self.ok, "--- urnic:\n{}\n--- siw:\n{}", self.ours, self.theirs);
        self
    }
}

pub(crate) fn program(line: &str, settings: Settings<'_>) -> Program {
    let (name, options) = line.split_once(' ').unwrap_or((line, ""));
    settings
        .iter()
        .fold(Program::new(name).line(options), |program, (name, value)| {
            program.env(name, value)
        })
}

/// We connect, siw listens. Both lines contain `PORT`, and the client's line contains `ADDRESS`.
#[track_caller]
pub(crate) fn urnic_connects(guest: &Guest, server: &str, client: &str, settings: Settings<'_>) -> Ends {
    let port = guest.port.to_string();
    let there = guest.listener(&server.replace("PORT", &port));
    let client = client.replace("PORT", &port).replace("ADDRESS", "127.0.0.1");
    let here = program(&client, settings).run_for(LIMIT);
    if !here.ok() {
        // The server of siw may wait for another initiator.
        guest.stop();
    }
    let (ok, theirs) = there.ends();
    Ends {
        ok: ok && here.ok(),
        ours: here.to_string(),
        theirs,
    }
}

/// siw connects, we listen.
#[track_caller]
pub(crate) fn siw_connects(guest: &Guest, server: &str, client: &str, settings: Settings<'_>) -> Ends {
    let port = free_port();
    let number = port.to_string();
    let mut here = program(&server.replace("PORT", &number), settings).spawn();
    here.wait_until_listening(port);
    let client = client.replace("PORT", &number).replace("ADDRESS", HOST);
    let (ok, theirs) = guest.start(&client).ends();
    if !ok && !theirs.contains(LOST_RACE) {
        // Our server may wait for another initiator.
        let ours = here.output();
        return Ends { ours, theirs, ok };
    }
    let here = here.wait_for(LIMIT);
    Ends {
        ok: ok && here.ok(),
        ours: here.to_string(),
        theirs,
    }
}

/// RDMAP opcodes, as tshark writes them.
pub(crate) const WRITE: &str = "0x00";
pub(crate) const READ: &str = "0x01";
pub(crate) const SEND: &str = "0x03";

pub(crate) const RPING: &str = "rping -c -a ADDRESS -p PORT -v -V -C 100 -S 4000";
pub(crate) const RPING_SERVER: &str = "rping -s -p PORT -v -V -C 100 -S 4000";
/// With a queue pair that it creates itself, rping sets the number of Reads under way itself, and
/// does not take the initiator's number: siw reports 0 for initiators of MPA revision 1, which
/// cannot send it.
pub(crate) const RPING_SERVER_WITH_READS: &str = "rping -s -q -p PORT -v -V -C 100 -S 4000";

/// rping's client ends as soon as it has the server's last message, the last of four for each ping.
/// With completion=delivered, siw may close before it answers the Read that asks whether it has it.
const LAST_UNCONFIRMED: &str = "(request 400 of its send queue) failed: RETRY_EXC_ERR";

/// Checks that all hundred pings completed with correct data: rping verifies the data.
#[track_caller]
pub(crate) fn all_pings(ends: Ends) {
    // Messages that rping prints at once, at a correct end, may appear within its buffered output.
    let at_once = [
        "client DISCONNECT EVENT...\n",
        "server DISCONNECT EVENT...\n",
        "wait for RDMA_READ_ADV state 10\n",
        LOST_RACE,
    ];
    let late = ends.ours.contains(LOST_RACE)
        || ends.theirs.contains(LOST_RACE)
        || ends.ours.contains(LAST_UNCONFIRMED);
    let ends = if late { ends } else { ends.succeed() };
    for printed in [ends.ours, ends.theirs] {
        let pings = at_once
            .iter()
            .fold(printed, |printed, words| printed.replace(words, ""));
        assert_eq!(pings.matches("rdma-ping-").count(), 100, "{pings}");
    }
}

/// Revision and C bit of every Request and Reply.
pub(crate) fn startups(wire: &Wire) -> Vec<String> {
    let fields = ["-T", "fields", "-e", "iwarp_mpa.rev", "-e", "iwarp_mpa.crc_flag"];
    let seen = wire.tshark(&fields, "iwarp_mpa.req || iwarp_mpa.rep");
    seen.lines().map(|line| line.replace('\t', " ")).collect()
}

/// The opcode of each connection's first FPDU.
pub(crate) fn first_opcodes(wire: &Wire) -> Vec<String> {
    let fields = ["-T", "fields", "-e", "tcp.stream", "-e", "iwarp_rdma.opcode"];
    let seen = wire.tshark(&fields, "iwarp_rdma.opcode");
    let mut first = BTreeMap::new();
    for line in seen.lines() {
        let (stream, opcodes) = line.split_once('\t').expect("two fields");
        let opcode = opcodes.split(',').next().unwrap_or_default().to_owned();
        first
            .entry(stream.parse::<u32>().expect("a number"))
            .or_insert(opcode);
    }
    first.into_values().collect()
}

#[track_caller]
fn rping_both_ways(guest: &Guest, settings: Settings<'_>) {
    all_pings(urnic_connects(guest, RPING_SERVER, RPING, settings));
    all_pings(siw_connects(guest, RPING_SERVER, RPING, settings));
}

#[test]
fn rping_both_ways_in_mpa_revision_2() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    rping_both_ways(&guest, &[]);
    // A Request and a Reply each. siw does not request CRC, but uses it with a peer that does.
    assert_eq!(startups(&guest.wire()), ["2 1", "2 1", "2 0", "2 1"]);
    // We are peer-to-peer and siw takes our offer to write; siw with its defaults is not
    // peer-to-peer.
    assert_eq!(first_opcodes(&guest.wire()), [WRITE, SEND]);
    guest.wire().dissect().is_clean();
}

#[test]
fn rping_both_ways_in_mpa_revision_1() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    guest.set(&[("mpa_version", 1)]);
    let revision = [("URNIC_MPA_REVISION", "1")];
    all_pings(urnic_connects(&guest, RPING_SERVER_WITH_READS, RPING, &revision));
    all_pings(siw_connects(&guest, RPING_SERVER, RPING, &revision));
    // A responder that accepts either revision answers in the revision of the initiator.
    all_pings(siw_connects(&guest, RPING_SERVER, RPING, &[]));
    assert_eq!(
        startups(&guest.wire()),
        ["1 1", "1 1", "1 0", "1 1", "1 0", "1 1"]
    );
    assert_eq!(first_opcodes(&guest.wire()), [SEND, SEND, SEND]);
    guest.wire().dissect().is_clean();
}

#[test]
fn rping_with_each_rtr_that_siw_supports() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    guest.set(&[("peer_to_peer", 1)]);
    for types in ["write", "read"] {
        rping_both_ways(&guest, &[("URNIC_MPA_RTR_TYPES", types)]);
    }
    // Of the RTR types that both support, siw takes the Write, and we the Read. (With a Send alone
    // siw answers that it requires a Write, and we with a Terminate, 2/0/7, upon which its kernel
    // stops at a BUG() in iw_cm: not tried here.)
    rping_both_ways(&guest, &[]);
    assert_eq!(
        first_opcodes(&guest.wire()),
        [WRITE, WRITE, READ, READ, WRITE, READ]
    );
}

#[test]
fn rping_without_ready_to_receive() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    rping_both_ways(&guest, &[("URNIC_MPA_PEER_TO_PEER", "false")]);
    assert_eq!(first_opcodes(&guest.wire()), [SEND, SEND]);
}

#[test]
fn a_strict_siw_agrees_with_us_about_crc() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    for (wanted, ours) in [(1, "true"), (0, "false")] {
        guest.set(&[("mpa_crc_required", wanted), ("mpa_crc_strict", 1)]);
        rping_both_ways(&guest, &[("URNIC_MPA_CRC", ours)]);
    }
    let (with, without) = (["2 1"; 4], ["2 0"; 4]);
    assert_eq!(startups(&guest.wire()), [with, without].concat());
}

#[test]
fn a_siw_that_requires_crcs_gets_them() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    guest.set(&[("mpa_crc_required", 1)]);
    // Only as the initiator: a siw responder without the flag does not use CRC, against RFC 5044
    // §7.1.1.
    all_pings(siw_connects(
        &guest,
        RPING_SERVER,
        RPING,
        &[("URNIC_MPA_CRC", "false")],
    ));
    assert_eq!(startups(&guest.wire()), ["2 1", "2 1"]);
    guest.wire().dissect().is_clean();
}

#[test]
fn a_siw_without_crcs_rejects_our_request() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    guest.set(&[("mpa_crc_strict", 1)]);
    let port = guest.port.to_string();
    let there = guest.listener(&RPING_SERVER.replace("PORT", &port));
    let client = RPING.replace("PORT", &port).replace("ADDRESS", "127.0.0.1");
    let printed = program(&client, &[("URNIC_MPA_CRC", "true")])
        .run_for(LIMIT)
        .failure();
    assert!(printed.contains("RDMA_CM_EVENT_REJECTED"), "{printed}");
    // siw's listener did not see the connection, and waits for the next.
    guest.stop();
    let (ok, printed) = there.ends();
    assert!(!ok && !printed.contains("DISCONNECT"), "{printed}");
}

/// The last message of siw's client if our server finishes and closes before siw has completed its
/// own last Send, which arrived (an emulated machine takes that long): siw then reports the Send as
/// failed.
const OVERTAKEN: &str = " Bad wc status 2\n Unable to write to socket/rdma_cm\nFailed to close connection between server and client\n";

/// A perftest with us as the initiator; again, if we connected before the server listened, which an
/// emulated machine may take long for.
#[track_caller]
pub(crate) fn urnic_measures(guest: &Guest, line: &str, settings: Settings<'_>) -> Ends {
    let server = format!("{line} -R -F -p PORT");
    let client = format!("{server} ADDRESS");
    for _ in 1..CONNECT_ATTEMPTS {
        let ends = urnic_connects(guest, &server, &client, settings);
        if !was_rejected(&ends.ours) {
            return ends.succeed();
        }
    }
    urnic_connects(guest, &server, &client, settings).succeed()
}

/// A perftest with siw as the initiator; again, if siw connected before our server listened.
#[track_caller]
pub(crate) fn siw_measures(guest: &Guest, line: &str, settings: Settings<'_>) -> Ends {
    let server = format!("{line} -R -F -p PORT");
    let client = format!("{server} ADDRESS");
    let mut ends = siw_connects(guest, &server, &client, settings);
    for _ in 1..CONNECT_ATTEMPTS {
        if !was_rejected(&ends.theirs) {
            break;
        }
        ends = siw_connects(guest, &server, &client, settings);
    }
    // The results are printed before that.
    let measured = ends.theirs.contains("#bytes") && ends.theirs.contains(OVERTAKEN);
    if measured { ends } else { ends.succeed() }
}

#[test]
fn perftest_both_ways() {
    or_skip!(installed("ib_send_bw"));
    let guest = or_skip!(Guest::borrowed());
    // siw stores the second part of a CRC that TCP brings in two pieces in place of the first, and
    // reports it as wrong. This happens with a TCP window that is full, for instance with more than
    // one Read under way.
    let lines = [("ib_send_bw", ""), ("ib_write_bw", ""), ("ib_read_bw", " -t 1")];
    for (name, for_siw) in lines {
        let line = format!("{name} -n 20");
        urnic_measures(&guest, &line, &[]);
        let ends = siw_measures(&guest, &format!("{line}{for_siw}"), &[]);
        assert!(ends.theirs.contains(" 65536      20 "), "{}", ends.theirs);
    }
    guest.wire().dissect().is_clean();
}

#[test]
fn rsockets_both_ways() {
    // The two ends exchange the addresses for their writes by private data.
    or_skip!(installed("rstream"));
    let guest = or_skip!(Guest::borrowed());
    let server = "rstream -p PORT -S 4096 -I 20 -C 2 -T v";
    let client = format!("{server} -s ADDRESS");
    urnic_connects(&guest, server, &client, &[]).succeed();
    siw_connects(&guest, server, &client, &[]).succeed();
}
