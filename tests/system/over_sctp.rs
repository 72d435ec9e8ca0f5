//! Unmodified programs with `llp=sctp`, both ends on this machine.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::program::{Program, Running};
use urnic_tests::random::Random;
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, free_port, resident, until};
use urnic_tests::{Pair, or_skip};

use crate::rdma_cm::succeed_with;

/// The processors are shared with other tests, and each end has a thread for SCTP.
const LIMIT: Duration = Duration::from_secs(240);
const IDENTITIES: [&str; 2] = ["iwarp", "roce"];

fn over_sctp(line: &str, identity: &str) -> Pair {
    Pair::line(line)
        .within(LIMIT)
        .env("URNIC_LLP", "sctp")
        .env("URNIC_IDENTITY", identity)
}

/// rping over SCTP, at a port.
fn rping(port: u16, line: &str) -> Program {
    Program::new("rping")
        .line(line)
        .line(&format!("-a 127.0.0.1 -p {port}"))
        .env("URNIC_LLP", "sctp")
}

/// An rping that serves at a new port.
fn serving(line: &str, with: impl Fn(Program) -> Program) -> (Running, u16) {
    let port = free_port();
    let mut server = with(rping(port, line)).spawn();
    server.wait_until_listening(port);
    (server, port)
}

#[test]
fn pingpong_with_its_data_checked() {
    or_skip!(installed("ibv_rc_pingpong"));
    for identity in IDENTITIES {
        for options in [
            "-g 0 -c -n 200",
            "-g 0 -c -e -n 200 -s 1",
            "-g 0 -c -n 20 -s 100000",
        ] {
            let line = format!("ibv_rc_pingpong {options}");
            let both = over_sctp(&line, identity).succeeds();
            for end in [both.server, both.client] {
                assert!(end.output.contains(" iters in "), "{end}");
                assert!(!end.output.contains("invalid data"), "{end}");
            }
        }
    }
}

#[test]
fn perftest_with_exchanged_numbers() {
    or_skip!(installed("ib_send_bw"));
    for name in ["ib_send_bw", "ib_write_lat", "ib_read_bw", "ib_atomic_lat"] {
        // Latencies are measured with one queue pair.
        let pairs = if name.ends_with("lat") {
            "-x 0"
        } else {
            "-x 0 -q 3"
        };
        for identity in IDENTITIES {
            over_sctp(&format!("{name} -d urnic0 -F -n 50 {pairs}"), identity).succeeds();
        }
    }
}

#[test]
fn examples_of_librdmacm() {
    or_skip!(installed("ucmatose"));
    for identity in IDENTITIES {
        for program in ["ucmatose -c 10 -C 20 -S 5000", "rstream -I 20 -C 20 -S 65536"] {
            let server = format!("{program} -p PORT");
            let client = format!("{program} -p PORT -s 127.0.0.1");
            succeed_with(&server, &client, |program| {
                program.env("URNIC_LLP", "sctp").env("URNIC_IDENTITY", identity)
            });
        }
    }
}

#[test]
fn rping_between_ends_of_both_identities() {
    or_skip!(installed("rping"));
    for (here, there) in [("iwarp", "roce"), ("roce", "iwarp"), ("roce", "roce")] {
        let (server, port) = serving("-s -C 20 -V -S 3000", |program| {
            program.env("URNIC_IDENTITY", here)
        });
        let client = rping(port, "-c -C 20 -V -S 3000").env("URNIC_IDENTITY", there);
        client.run_for(LIMIT).success();
        server.wait_for(LIMIT).success();
    }
}

/// The faults of datagrams act on its packets.
#[test]
fn packets_that_are_lost_or_repeated_or_overtaken_change_nothing() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(in_process("faults are those of the device in the process"));
    for faults in [
        "drop p=0.03",
        "duplicate every=5",
        "reorder every=7",
        "drop p=0.02; duplicate every=9; reorder every=5",
    ] {
        let both = over_sctp("ibv_rc_pingpong -g 0 -c -n 100 -s 20000", "iwarp")
            .env("URNIC_FAULTS", faults)
            .succeeds();
        for end in [both.server, both.client] {
            assert!(
                end.output.contains(": at a datagram to "),
                "{faults} never strikes: {end}"
            );
        }
    }
}

#[test]
fn stat_names_the_lower_layer() {
    or_skip!(installed("rping"));
    let place = Folder::inside(&scratch(), "over-sctp-stat");
    let placed = |program: Program| program.env("URNIC_PRESENT_DIR", place.path());
    let (_server, port) = serving("-s -C 1000000", placed);
    let _client = placed(rping(port, "-c -C 1000000")).spawn();
    let stat = || {
        Program::plain(urnic())
            .line("stat --json")
            .env("URNIC_PRESENT_DIR", place.path())
            .run()
            .success()
    };
    let found = until(TIME_LIMIT, || {
        (stat().matches("\"bytes\":\"sctp\"").count() == 2).then_some(())
    });
    assert!(found.is_some(), "{}", stat());
}

/// What tshark prints of a file in which UDP of this port is SCTP.
fn tshark(file: &Path, port: u16, args: &[&str]) -> String {
    let out = Command::new("tshark")
        .env("HOME", "/nonexistent")
        .arg("-nr")
        .arg(file)
        .args([
            "-d",
            &format!("udp.port=={port},sctp"),
            "-o",
            "sctp.checksum:TRUE",
        ])
        .args(args)
        .output()
        .expect("tshark runs");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn captures_have_the_packets() {
    or_skip!(installed("rping"));
    or_skip!(installed("tshark"));
    or_skip!(in_process("the wire is in the server"));
    let folder = Folder::inside(&scratch(), "over-sctp-pcap");
    let captured =
        |program: Program, end: &str| program.env("URNIC_PCAP", folder.file(&format!("{end}.pcapng")));
    let (server, port) = serving("-s -C 5", |program| captured(program, "server"));
    captured(rping(port, "-c -C 5"), "client")
        .run_for(LIMIT)
        .success();
    server.wait_for(LIMIT).success();
    for end in ["server", "client"] {
        let file = folder.file(&format!("{end}.pcapng"));
        let wrong = "_ws.malformed || _ws.expert.severity == \"Error\" || sctp.checksum.status == \"Bad\"";
        assert_eq!(tshark(&file, port, &["-Y", wrong]), "", "{end}");
        let indications = tshark(&file, port, &["-Y", "sctp.adaptation_layer_indication == 1"]);
        assert!(
            indications.lines().count() >= 2,
            "INIT and INIT ACK: {indications}"
        );
        let control = tshark(&file, port, &["-Y", "sctp.data_payload_proto_id == 17"]);
        assert!(
            control.lines().count() >= 3,
            "Initiate, Accept, Terminate: {control}"
        );
        let segments = tshark(&file, port, &["-Y", "sctp.data_payload_proto_id == 16"]);
        assert!(segments.lines().count() >= 5 * 6, "{segments}");
        let parts = "sctp.data_payload_proto_id == 16 && !(sctp.data_b_bit == 1 && sctp.data_e_bit == 1)";
        assert_eq!(tshark(&file, port, &["-Y", parts]), "", "no message is split");
        let ordered = "sctp.chunk_type == 0 && sctp.data_u_bit == 0";
        assert_eq!(tshark(&file, port, &["-Y", ordered]), "", "all are unordered");
    }
}

/// A peer that is killed leaves a closed port, whose host reports it.
#[test]
fn the_end_of_a_killed_peer_is_noticed() {
    or_skip!(installed("rping"));
    let (mut server, port) = serving("-s -v -C 1000000", |program| program);
    let mut client = rping(port, "-c -C 1000000").spawn();
    server.wait_for_output("a ping", |text| text.contains("ping data").then_some(()));
    server.signal(Signal::KILL);
    client.wait_for_output("its end", |text| text.contains("DISCONNECT EVENT").then_some(()));
}

#[test]
fn connecting_to_nothing_is_refused() {
    or_skip!(installed("rping"));
    for identity in IDENTITIES {
        let begun = Instant::now();
        let ended = Program::new("rping")
            .line(&format!("-c -a 127.0.0.1 -p {} -C 1", free_port()))
            .env("URNIC_LLP", "sctp")
            .env("URNIC_IDENTITY", identity)
            .run_for(LIMIT);
        assert!(!ended.ok(), "{ended}");
        assert!(ended.output.contains("RDMA_CM_EVENT_REJECTED"), "{ended}");
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "not by a timeout of rping"
        );
    }
}

/// Strangers send what they like to the port: the sessions there go on.
#[test]
fn a_flood_of_strangers_packets_disturbs_no_session() {
    or_skip!(installed("rping"));
    let (mut server, port) = serving("-s -P -V -S 5000", |program| program);
    let mut client = rping(port, "-c -v -C 2000 -V -S 5000").spawn();
    client.wait_for_output("a ping", |text| text.contains("ping data").then_some(()));
    let mut random = Random(5043);
    let before = resident(server.pid());
    // Until it ends, and not without an end of its own.
    for _ in 0..400 {
        // Each socket is another peer, and each INIT another one's.
        let stranger = UdpSocket::bind("127.0.0.1:0").expect("a port");
        stranger.set_nonblocking(true).expect("it can");
        for _ in 0..50 {
            let packet = match random.below(3) {
                0 => init(&mut random, port, &[0xc0, 6, 0, 8, 0, 0, 0, 1]),
                1 => init(&mut random, port, &[]),
                _ => {
                    let len = random.below(200);
                    random.bytes(len)
                }
            };
            let _ = stranger.send_to(&packet, ("127.0.0.1", port));
        }
        if client.ended().is_some() {
            break;
        }
    }
    assert!(server.ended().is_none(), "{}", server.output());
    let grown = resident(server.pid()).saturating_sub(before);
    client.wait_for(LIMIT).success();
    assert!(grown < 8 << 10, "{grown} KiB for strangers");
}

/// An SCTP packet with an INIT (RFC 9260 §3.3.2) and these parameters.
fn init(random: &mut Random, port: u16, parameters: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    packet.extend_from_slice(&random.bytes(2));
    packet.extend_from_slice(&port.to_be_bytes());
    packet.extend_from_slice(&[0; 8]);
    let len = 20 + parameters.len() as u16;
    packet.extend_from_slice(&[1, 0]);
    packet.extend_from_slice(&len.to_be_bytes());
    // The tag, the window, the streams, and the first TSN.
    packet.extend_from_slice(&random.bytes(1));
    packet.extend_from_slice(&[0, 0, 1, 0, 1, 0, 0, 0, 8, 0, 8, 0, 0, 0, 1]);
    packet.extend_from_slice(parameters);
    let sum = urnic_wire::crc::crc32c(&packet);
    packet[8..12].copy_from_slice(&sum.to_le_bytes());
    packet
}
