//! `--pcap`: the device's own capture, which Wireshark reads without any set-up.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use urnic_testkit::Folder;
use urnic_tests::build::scratch;
use urnic_tests::capture::HEURISTIC_DISSECTORS;
use urnic_tests::netns::Netns;
use urnic_tests::peer::hex;
use urnic_tests::program::Program;
use urnic_tests::served::{Served, in_process};
use urnic_tests::skip::installed;
use urnic_tests::target_process::{Role, TargetProcess};
use urnic_tests::{Pair, compiled, or_skip};

use crate::rdma_cm::is_done;
use crate::roce::roce;

/// A folder of captures, removed with the test unless that failed.
struct Captures(Folder);

impl Captures {
    fn new(name: &str) -> Result<Self, String> {
        installed("tshark")?;
        in_process("the wire is in the server, which has a test of its own")?;
        Ok(Self(Folder::inside(&scratch(), &format!("pcap-{name}"))))
    }

    fn file(&self) -> PathBuf {
        self.0.file("wire.pcapng")
    }

    /// Removes the files, so that a restarted pair can create them.
    fn clear(&self) {
        for file in self.all() {
            std::fs::remove_file(file).expect("a file of ours");
        }
    }

    fn all(&self) -> Vec<PathBuf> {
        self.0.names().iter().map(|name| self.0.file(name)).collect()
    }
}

impl Drop for Captures {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("capture kept: {}", self.0.path().display());
            self.0.keep();
        }
    }
}

/// What tshark prints about the packets that pass the filter, by its defaults but for names.
fn tshark(file: &Path, args: &[&str], filter: &str) -> String {
    let mut tshark = Command::new("tshark");
    // The user of the tests may have set preferences.
    tshark
        .env("HOME", "/nonexistent")
        .env_remove("WIRESHARK_CONFIG_DIR");
    let out = tshark
        .arg("-nr")
        .arg(file)
        .args(args)
        .args(["-Y", filter])
        .output()
        .expect("tshark runs");
    let complaint = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{}: {complaint}", file.display());
    assert!(!complaint.contains("cut short"), "{complaint}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn fields(file: &Path, names: &[&str], filter: &str) -> String {
    let names = names.iter().flat_map(|name| ["-e", name]);
    tshark(
        file,
        &[&["-T", "fields"], &names.collect::<Vec<_>>()[..]].concat(),
        filter,
    )
}

/// Checks that TCP's analysis and the dissectors, checksums included, find no fault in the file,
/// and that RDMAP was found.
#[track_caller]
fn is_clean(file: &Path) {
    let mut args = vec![
        "-o",
        "tcp.check_checksum:TRUE",
        "-o",
        "ip.check_checksum:TRUE",
        "-T",
        "fields",
    ];
    for guesser in HEURISTIC_DISSECTORS {
        args.extend(["--disable-protocol", guesser]);
    }
    args.extend(["-e", "frame.number", "-e", "_ws.expert.message"]);
    let wrong = "_ws.malformed || tcp.analysis.flags || tcp.checksum.status == \"Bad\" || ip.checksum.status == \"Bad\" \
                 || _ws.expert.severity == \"Error\"";
    assert_eq!(tshark(file, &args, wrong), "", "{}", file.display());
    let text = tshark(file, &["-V", "-O", "iwarp_mpa"], "iwarp_mpa");
    assert!(
        text.contains("Good CRC32") && !text.contains("Bad CRC32"),
        "{text}"
    );
}

/// The bytes from one port to another, by both ports.
type Directions = BTreeMap<(String, String), String>;

/// Both directions of each connection, each in the order of its stream.
fn bytes(file: &Path) -> Directions {
    let names = ["tcp.srcport", "tcp.dstport", "tcp.seq", "tcp.payload"];
    let text = fields(file, &names, "tcp.len > 0");
    let mut segments: Vec<_> = text
        .lines()
        .map(|line| {
            let [from, to, at, payload] = line.split('\t').collect::<Vec<_>>()[..] else {
                panic!("four fields: {line}");
            };
            let at: u64 = at.parse().expect("a sequence number");
            ((from.to_owned(), to.to_owned()), at, payload)
        })
        .collect();
    segments.sort();
    let mut directions = Directions::new();
    for (ports, _, payload) in segments {
        directions.entry(ports).or_default().push_str(payload);
    }
    directions
}

/// How many messages with this opcode of RDMAP there are (RFC 5040 §4.3).
fn count(file: &Path, opcode: u8) -> usize {
    fields(file, &["frame.number"], &format!("iwarp_rdma.opcode == {opcode}"))
        .lines()
        .count()
}

const WRITE: u8 = 0;
const READ_REQUEST: u8 = 1;
const READ_RESPONSE: u8 = 2;
const SEND: u8 = 3;
const TERMINATE: u8 = 7;

/// Runs a pair that captures to one name, and gives the files of both.
fn captured(name: &str, pair: &Pair) -> Result<(Captures, Vec<PathBuf>), String> {
    let captures = Captures::new(name)?;
    let file = captures.file();
    pair.clone()
        .env("URNIC_PCAP", file.to_str().expect("our path"))
        .succeeds_after(|| captures.clear());
    let files = captures.all();
    assert!(files.len() == 2 && files.contains(&file), "{files:?}");
    for file in &files {
        is_clean(file);
    }
    agree(&files, |_| false);
    Ok((captures, files))
}

/// The captures of both ends have the same bytes; but an end that closes does not read the last
/// that was sent: answers that it does not wait for any more, and what `unread` takes.
#[track_caller]
fn agree(files: &[PathBuf], unread: impl Fn(&str) -> bool) {
    let (here, there) = (bytes(&files[0]), bytes(&files[1]));
    for ports in here.keys().chain(there.keys()) {
        let of = |directions: &Directions| directions.get(ports).cloned().unwrap_or_default();
        let (one, other) = (of(&here), of(&there));
        let (short, long) = if one.len() < other.len() {
            (one, other)
        } else {
            (other, one)
        };
        let Some(rest) = long.strip_prefix(&short) else {
            panic!("{ports:?}: {long}\nand {short}");
        };
        let is_unread = rest.is_empty() || is_rejection(&long) || is_confirmation(rest) || unread(rest);
        assert!(is_unread, "{ports:?}: one end has {rest}, after {short}");
    }
}

/// Whether a direction begins with the MPA Reply that rejects a connection, which nothing follows.
/// Both ends of a native connection initiate it, and of two that cross one is rejected.
fn is_rejection(direction: &str) -> bool {
    let flags = direction.strip_prefix("4d504120494420526570204672616d65");
    let flags = flags.and_then(|rest| u8::from_str_radix(rest.get(..2)?, 16).ok());
    flags.is_some_and(|flags| flags & 0x20 != 0)
}

/// Whether these bytes are FPDUs of length zero that confirm requests: Read Responses, or Writes to
/// the STag of confirmations. The ULPDU is the tagged header of 14 bytes, with the Last flag.
fn is_confirmation(bytes: &str) -> bool {
    const FPDU: usize = 2 * 20;
    bytes.len().is_multiple_of(FPDU)
        && (0..bytes.len()).step_by(FPDU).all(|at| {
            ["000ec142", "000ec140000000c5"]
                .iter()
                .any(|head| bytes[at..].starts_with(head))
        })
}

#[test]
fn both_ends_of_a_pingpong_capture_the_same() {
    or_skip!(installed("ibv_rc_pingpong"));
    let pair = Pair::line("ibv_rc_pingpong -n 50 -s 5000 -g 0");
    let (_captures, files) = or_skip!(captured("pingpong", &pair));
    assert!(count(&files[0], SEND) >= 100);
    // Each end's first messages announce that it takes confirmations, which then need no Reads.
    assert!(count(&files[0], READ_REQUEST) <= 4);
    let confirmations = fields(&files[0], &["iwarp_ddp.stag"], "iwarp_rdma.opcode == 0");
    let confirmations = confirmations.lines().filter(|stag| stag.ends_with("c5"));
    assert!(confirmations.count() >= 90);
    for file in &files {
        let count = |filter| fields(file, &["frame.number"], filter).lines().count();
        assert_eq!(count("tcp.flags.syn == 1"), 2);
        // The end that finishes first may be closed when the FIN of the other arrives.
        assert!(matches!(count("tcp.flags.fin == 1"), 1 | 2));
    }
}

#[test]
fn both_ends_of_perftest_capture_the_same() {
    or_skip!(installed("ib_read_bw"));
    // Two programs that both wait for all data that the peer sends. A Write's target may close
    // before its device has read the last of the Write.
    let pair = Pair::line("ib_read_bw -R -F -n 10 -s 70000");
    let (_captures, files) = or_skip!(captured("read", &pair));
    assert!(count(&files[0], READ_REQUEST) >= 10 && count(&files[0], READ_RESPONSE) >= 10);
    // FPDUs that no IPv4 packet holds: 65,483 is what a loopback interface carries.
    let (_captures, files) = or_skip!(captured("send", &Pair::line("ib_send_bw -F -n 5 -s 200000")));
    assert!(count(&files[0], SEND) >= 15);
}

#[test]
fn streams_of_large_messages_go_on_under_capture() {
    or_skip!(installed("ib_write_bw"));
    let captures = or_skip!(Captures::new("large"));
    let file = captures.file();
    // The program passes more than a message to the socket at once.
    Pair::line("ib_write_bw -F -n 20 -s 1048576 -c RC")
        .env("URNIC_PCAP", file.to_str().expect("our path"))
        .succeeds();
    let most = captures.all().iter().map(|file| count(file, WRITE)).max();
    assert!(most >= Some(20 * 17), "{most:?}");
}

#[test]
fn rping_and_rstream_over_ipv6_are_captured() {
    or_skip!(installed("rping"));
    or_skip!(installed("rstream"));
    for (name, server, client, port) in [
        (
            "rping",
            "rping -s -a ::1 -C 5 -v -p",
            "rping -c -a ::1 -C 5 -v -p",
            0,
        ),
        (
            "rstream",
            "rstream -b ::1 -S 4000 -C 20 -p",
            "rstream -s ::1 -S 4000 -C 20 -p",
            0,
        ),
    ] {
        let captures = or_skip!(Captures::new(name));
        let port = urnic_tests::wait::free_port() + port;
        let end = |line: &str| {
            let (name, args) = line.split_once(' ').expect("a program and its options");
            Program::new(name)
                .line(args)
                .arg(port.to_string())
                .env("URNIC_PCAP", captures.file())
        };
        let mut server = end(server).spawn();
        server.wait_until_listening(port);
        let client = end(client).run();
        assert!(is_done(&client), "{client}");
        server.wait();
        let files = captures.all();
        assert_eq!(files.len(), 2, "{files:?}");
        for file in &files {
            is_clean(file);
            let addresses = fields(file, &["ipv6.src"], "iwarp_rdma");
            assert!(
                !addresses.is_empty() && addresses.lines().all(|ip| ip == "::1"),
                "{addresses}"
            );
        }
        // A program that closes an rsocket does not wait for the last data of its peer: a message
        // of a few words.
        agree(&files, |rest| name == "rstream" && rest.len() <= 2 * 128);
    }
}

#[test]
fn a_terminate_is_captured() {
    let captures = or_skip!(Captures::new("terminate"));
    let file = captures.file();
    let mut target = or_skip!(TargetProcess::start(&[(
        "URNIC_PCAP",
        file.to_str().expect("our path")
    )]));
    let mut link = target.link(Role::Responder);
    // A Send of "hello" with one bit of it flipped.
    link.peer.send(&hex(
        "00174143 00000000 00000000 00000001 00000000 69656c6c 6f000000 b990b10c",
    ));
    link.peer.read_bytes(28);
    link.peer.end();
    target.quits();
    let seen = tshark(
        &file,
        &["-V", "-O", "iwarp_mpa,iwarp_ddp_rdmap"],
        &format!("iwarp_rdma.opcode == {TERMINATE}"),
    );
    assert!(seen.contains("LLP") && seen.contains("MPA CRC Error"), "{seen}");
}

#[test]
fn a_queue_pair_that_is_its_own_peer_is_captured() {
    let captures = or_skip!(Captures::new("own-peer"));
    let rounds = Program::new(or_skip!(compiled("rounds"))).arg("3");
    rounds.env("URNIC_PCAP", captures.file()).run().success();
    is_clean(&captures.file());
    // Three rounds come before the requested ones.
    assert_eq!(count(&captures.file(), SEND), 6);
}

/// The lookups of rdma_cm go to the UDP port of the listener's number.
#[test]
fn cmu_11_tshark_reads_the_lookups_of_rdma_cm() {
    const PORT: u16 = 7174;
    or_skip!(installed("udaddy"));
    let captures = or_skip!(Captures::new("lookups"));
    let host = or_skip!(Netns::new());
    let server = host.program(roce("udaddy")).spawn();
    host.has_udp_sockets(PORT, 1);
    let client = roce("udaddy").line("-s 127.0.0.1");
    let client = client.env("URNIC_PCAP", captures.file());
    host.program(client).run().success();
    server.wait().success();
    let names = [
        "infiniband.bth.destqp",
        "infiniband.deth.q_key",
        "infiniband.mad.mgmtclass",
        "infiniband.mad.attributeid",
        "_ws.malformed",
    ];
    let port = format!("infiniband.rroce.port:{PORT}");
    let mut args = vec!["-o", &port, "-T", "fields"];
    args.extend(names.iter().flat_map(|name| ["-e", name]));
    let lookups = tshark(&captures.file(), &args, "infiniband.mad");
    let mut seen: Vec<&str> = lookups.lines().collect();
    // The request may have been repeated.
    seen.sort_unstable();
    seen.dedup();
    let expected = [
        "0x000001\t0x0000000080010000\t0x07\t0x0017\t",
        "0x000001\t0x0000000080010000\t0x07\t0x0018\t",
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_server_captures_the_wire_of_its_functions() {
    or_skip!(installed("tshark"));
    or_skip!(installed("ibv_rc_pingpong"));
    let file = scratch().join(format!("pcap-{}-served.pcapng", std::process::id()));
    let served = Served::with(&format!("--pcap {}", file.display()));
    let mut pair = Pair::line("ibv_rc_pingpong -n 50 -s 5000 -g 0");
    pair = pair.env("URNIC_DEVICE", &served.device());
    pair.succeeds();
    drop(served);
    is_clean(&file);
    // Both functions are in this server: each message is there once.
    assert_eq!(count(&file, SEND), 100);
    let _ = std::fs::remove_file(file);
}
