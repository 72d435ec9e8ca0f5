//! Linux's rdma_rxe, in a guest, as the peer of our queue pairs whose wire is RoCE v2: either is
//! the server. The guest and a network namespace are on one Ethernet link.

use std::path::Path;
use std::process::Command as Process;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Signal;
use urnic_sync::{Mutex, MutexGuard};
use urnic_testkit::Folder;
use urnic_tests::build::scratch;
use urnic_tests::guest::{Guest, LINK_GUEST, LINK_HOST};
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::Served;
use urnic_tests::shell::Task;
use urnic_tests::skip::installed;
use urnic_tests::wait::{free_port, until};
use urnic_tests::{compiled, or_skip};

use crate::rdma_cm::{LOST_RACE, is_done};
use crate::roce_datagrams::UDADDY_PORT;

/// rxe computes its checksums by the kernel's `crc32`.
const DEVICE: &str = "modprobe -a rdma_rxe crc32_generic && rdma link add rxe0 type rxe netdev eth1";

/// The time limit of a program in the guest, in seconds.
const SECONDS: u32 = 60;

/// The time limit of a program here: that of the guest's, and its start.
const LIMIT: Duration = Duration::from_secs(90);

/// The indexes of the GIDs that are the link's IPv4 addresses with RoCE v2.
const OUR_GID: u8 = 3;
const RXE_GID: u8 = 1;

type Settings<'a> = &'a [(&'a str, &'a str)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Urnic,
    Rxe,
}

const BOTH: [Server; 2] = [Server::Urnic, Server::Rxe];

/// The guest with rxe0.
pub(crate) struct Rxe(Guest);

impl Rxe {
    /// The guest, for this test alone.
    pub(crate) fn borrowed() -> Result<MutexGuard<'static, Self>, String> {
        static RXE: OnceLock<Result<Mutex<Rxe>, String>> = OnceLock::new();
        let boot = || {
            let guest = Guest::linked()?;
            guest.start(DEVICE).success();
            Ok(Mutex::new(Self(guest)))
        };
        let rxe = RXE.get_or_init(boot).as_ref().map_err(Clone::clone)?;
        let rxe = rxe.lock();
        rxe.0.stop();
        Ok(rxe)
    }

    pub(crate) fn guest(&self) -> &Guest {
        &self.0
    }

    /// A program at our end of the link, whose wire is RoCE v2.
    pub(crate) fn here(&self, program: Program) -> Program {
        self.0
            .netns()
            .program(program.env("URNIC_IDENTITY", "roce").env("URNIC_WIRE", "roce"))
    }

    /// Runs both ends of a command, ours with these settings; returns what our end and rxe's
    /// printed.
    #[track_caller]
    fn both(&self, server: Server, command: &str, settings: Settings<'_>) -> [String; 2] {
        let port = free_port();
        let (ours, theirs) = (self.ours(command, port, settings), Self::theirs(command, port));
        let (ours, (ok, theirs)) = match server {
            Server::Urnic => {
                let mut ours = ours.spawn();
                ours.wait_until_listening(port);
                let theirs = self.0.start(&format!("{theirs} {LINK_HOST}")).ends();
                (ours, theirs)
            }
            Server::Rxe => {
                let theirs = self.0.listener_at(port, &theirs);
                let mut ours = ours.arg(LINK_GUEST).spawn();
                until(LIMIT, || ours.ended());
                (ours, theirs.ends())
            }
        };
        // The end of one that failed may leave the other waiting.
        let ours = match ok {
            true => ours.wait_for(LIMIT),
            false => ours.stopped(),
        };
        assert!(
            ours.ok() && ok,
            "{command}, the server is {server:?}:\n--- urnic: {ours}\n--- rxe: {theirs}"
        );
        [ours.output, theirs]
    }

    /// Our end of a command. Programs of the distribution have a name, ours a path.
    fn ours(&self, command: &str, port: u16, settings: Settings<'_>) -> Program {
        let (name, options) = command.split_once(' ').unwrap_or((command, ""));
        let name = match name.strip_prefix("/tmp/") {
            Some(ours) => scratch().join(ours),
            None => name.into(),
        };
        let gid = gid_option(command);
        let program = Program::new(name).line(&format!("{options} {gid} {OUR_GID} -p {port}"));
        self.here(set(program, settings))
    }

    /// rxe's end of a command.
    fn theirs(command: &str, port: u16) -> String {
        let gid = gid_option(command);
        let device = match command.starts_with("ib") {
            true => "-d rxe0",
            false => "",
        };
        let (name, options) = command.split_once(' ').unwrap_or((command, ""));
        format!("DEVICE=rxe0 timeout {SECONDS} {name} {device} {options} {gid} {RXE_GID} -p {port}")
    }

    /// Starts a command line that listens by rdma_cm, and waits until it does.
    #[track_caller]
    fn listener_of_rdma_cm(&self, port: u16, line: &str) -> Task {
        self.0.listens(
            line,
            &format!("rdma res show cm_id | grep -q 'link rxe0/.* LISTEN .*:{port} '"),
        )
    }

    /// Waits until rxe has received a thousand packets more.
    #[track_caller]
    fn transfers(&self) {
        let count = "cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts";
        let count = || -> u64 {
            let printed = self.0.start(count).success();
            let number = printed.split_whitespace().next().map(str::parse);
            number.expect("a word").expect("a number")
        };
        let before = count();
        let passes = until(LIMIT, || (count() > before + 1000).then_some(()));
        assert!(passes.is_some(), "rxe receives no packets");
    }

    /// Puts one of our programs into the guest; commands name it by this path.
    fn with(&self, name: &str) -> Result<(), String> {
        let program = compiled(name)?;
        self.0.bring(&program, &format!("/tmp/{name}"));
        Ok(())
    }
}

/// A program with these settings.
fn set(program: Program, settings: Settings<'_>) -> Program {
    let set = |program: Program, (name, value): &(&str, &str)| program.env(name, value);
    settings.iter().fold(program, set)
}

/// The option that selects the GID, as the last of perftest's own. Its Local ACK Timeout is four
/// times the default: a guest on a busy machine may stand still for longer than seven retries.
fn gid_option(command: &str) -> &'static str {
    match command.starts_with("ib_") {
        true => "-F -u 16 -x",
        false => "-g",
    }
}

#[test]
fn rxe_and_urnic_exchange_messages_checked() {
    or_skip!(installed("ibv_srq_pingpong"));
    let rxe = or_skip!(Rxe::borrowed());
    for server in BOTH {
        for command in [
            "ibv_rc_pingpong -c -n 200",
            "ibv_rc_pingpong -c -n 200 -e",
            "ibv_rc_pingpong -c -n 20 -s 262144 -r 20",
            "ibv_rc_pingpong -c -n 200 -m 256 -s 5000",
            "ibv_srq_pingpong -c -n 50 -q 4",
            "ibv_srq_pingpong -c -n 50 -q 4 -e",
        ] {
            for printed in rxe.both(server, command, &[]) {
                assert!(printed.contains("iters in"), "{command}:\n{printed}");
            }
        }
    }
}

#[test]
fn perftest_between_rxe_and_urnic() {
    or_skip!(installed("ib_atomic_bw"));
    let rxe = or_skip!(Rxe::borrowed());
    for server in BOTH {
        for command in [
            "ib_send_bw -n 10 -s 1048576",
            "ib_send_bw -n 100 -q 4",
            "ib_send_bw -n 100 -b -e",
            "ib_send_lat -n 50 -s 4000",
            "ib_send_lat -n 50 -e",
            "ib_write_bw -n 10 -s 1048576",
            "ib_write_bw -n 100 -q 4",
            "ib_write_lat -n 50 -s 4000",
            "ib_read_bw -n 10 -s 1048576",
            "ib_read_bw -n 50 -q 4",
            "ib_read_lat -n 50 -s 4000 -e",
            "ib_atomic_bw -n 50 -A FETCH_AND_ADD",
            "ib_atomic_lat -n 50 -A CMP_AND_SWAP",
        ] {
            rxe.both(server, command, &[]);
        }
    }
}

#[test]
fn rxe_and_urnic_exchange_datagrams_and_unreliable_messages() {
    or_skip!(installed("ibv_ud_pingpong"));
    let rxe = or_skip!(Rxe::borrowed());
    for server in BOTH {
        for command in [
            "ibv_ud_pingpong -c -n 100",
            "ibv_ud_pingpong -c -n 100 -s 1000 -e",
            "ibv_uc_pingpong -c -n 100",
            "ibv_uc_pingpong -c -n 50 -s 5000 -e",
        ] {
            for printed in rxe.both(server, command, &[]) {
                assert!(printed.contains("iters in"), "{command}:\n{printed}");
            }
        }
        for command in [
            "ib_send_bw -c UD -n 50 -s 1000",
            "ib_send_lat -c UD -n 50 -s 1000",
            "ib_send_bw -c UC -n 20 -s 4000",
            "ib_send_lat -c UC -n 50 -s 1000",
            "ib_write_bw -c UC -n 20 -s 4000",
            "ib_write_lat -c UC -n 50 -s 1000",
        ] {
            rxe.both(server, command, &[]);
        }
    }
}

/// rdma_cm looks up queue pairs of kind UD by messages between queue pairs 1.
#[test]
fn rxe_and_urnic_answer_each_others_lookups() {
    or_skip!(installed("udaddy"));
    let rxe = or_skip!(Rxe::borrowed());
    let ours = |options: &str| rxe.here(Program::new("udaddy").line(options));
    let theirs = |options: &str| format!("timeout {SECONDS} udaddy {options}");
    let server = ours("").spawn();
    rxe.0.netns().has_udp_sockets(UDADDY_PORT, 1);
    let client = rxe.0.start(&theirs(&format!("-s {LINK_HOST}")));
    client.success();
    server.wait_for(LIMIT).success();

    let server = rxe.listener_of_rdma_cm(UDADDY_PORT, &theirs(""));
    ours(&format!("-s {LINK_GUEST}")).run_for(LIMIT).success();
    server.success();
}

/// Sends, Writes and Reads of which every byte is compared.
const TRANSFERS: [&str; 3] = [
    "/tmp/transfer -o send -b 4000000 -c 100003 -t 16",
    "/tmp/transfer -o write -b 4000000 -c 100003 -t 16",
    "/tmp/transfer -o read -b 4000000 -c 100003 -t 16",
];

#[test]
fn rxe_and_urnic_transfer_megabytes_bit_exact() {
    let rxe = or_skip!(Rxe::borrowed());
    or_skip!(rxe.with("transfer"));
    for server in BOTH {
        for command in TRANSFERS {
            rxe.both(server, command, &[]);
        }
    }
}

/// Probabilities, because rxe's repetitions can be in step with every nth packet. Acknowledgements
/// are few, so one fault strikes at the third packet.
#[test]
fn lost_packets_between_rxe_and_urnic_are_repeated() {
    let rxe = or_skip!(Rxe::borrowed());
    or_skip!(rxe.with("transfer"));
    for server in BOTH {
        for command in TRANSFERS {
            for faults in [
                "drop nth=3; drop p=0.02",
                "duplicate nth=3; duplicate p=0.02; reorder p=0.02",
            ] {
                let [ours, _] = rxe.both(server, command, &[("URNIC_FAULTS", faults)]);
                assert!(ours.contains("fault 1: "), "no fault struck:\n{ours}");
            }
        }
    }
}

#[test]
fn rxe_and_urnic_refuse_the_same_requests() {
    let rxe = or_skip!(Rxe::borrowed());
    or_skip!(rxe.with("refused"));
    for server in BOTH {
        let [ours, theirs] = match server {
            Server::Urnic => rxe.both(server, "/tmp/refused", &[]),
            Server::Rxe => rxe.both(server, "/tmp/refused -x", &[]),
        };
        let client = match server {
            Server::Urnic => theirs,
            Server::Rxe => ours,
        };
        assert!(client.contains("Send without a receive: "), "{client}");
    }
}

/// What perftest prints if its second connection is requested before the server listens again: with
/// `-R` neither end waits for that, on any device. The client then fails, and the server keeps the
/// first connection, so that it takes the next client for the second one.
const LOST_LISTENER: &str = "Event: RDMA_CM_EVENT_REJECTED; error: 8";

/// Runs of perftest at most, until one does not meet [`LOST_LISTENER`]: a guest on a busy machine
/// meets it every other time.
const RUNS: usize = 14;

/// The ends of a command of rdma_cm, ours with these settings; its client names the server's
/// address by `ADDRESS`. Both begin again after [`LOST_LISTENER`].
fn by_rdma_cm(rxe: &Rxe, server: Server, command: [&str; 2], settings: Settings<'_>) {
    for _ in 0..RUNS {
        let (ours, (ok, theirs)) = once_by_rdma_cm(rxe, server, command, settings);
        if [&ours.output, &theirs]
            .iter()
            .any(|output| output.contains(LOST_LISTENER))
        {
            continue;
        }
        assert!(
            is_done(&ours) && (ok || theirs.contains(LOST_RACE)),
            "{command:?}, the server is {server:?}:\n--- urnic: {ours}\n--- rxe: {theirs}"
        );
        return;
    }
    panic!("{command:?}, the server is {server:?}: it never listens in time");
}

/// What our end and rxe's printed, and how they ended.
fn once_by_rdma_cm(
    rxe: &Rxe,
    server: Server,
    [at, to]: [&str; 2],
    settings: Settings<'_>,
) -> (Ended, (bool, String)) {
    let port = free_port();
    let address = match server {
        Server::Urnic => LINK_HOST,
        Server::Rxe => LINK_GUEST,
    };
    let line = |line: &str| format!("{} -p {port}", line.replace("ADDRESS", address));
    let ours = |command: &str| {
        let command = line(command);
        let (name, options) = command.split_once(' ').expect("a program and its options");
        rxe.here(set(Program::new(name).line(options), settings))
    };
    // The guest has another device, too.
    let theirs = |command: &str| {
        let command = line(command).replace(" -R ", " -R -d rxe0 ");
        format!("timeout {SECONDS} {command}")
    };
    match server {
        Server::Urnic => {
            let mut ours = ours(at).spawn();
            ours.wait_until_listening(port);
            let (ok, theirs) = rxe.0.start(&theirs(to)).ends();
            let ours = match ok || theirs.contains(LOST_RACE) {
                true => ours.wait_for(LIMIT),
                false => ours.stopped(),
            };
            (ours, (ok, theirs))
        }
        Server::Rxe => {
            let theirs = rxe.listener_of_rdma_cm(port, &theirs(at));
            let ours = ours(to).run_for(LIMIT);
            if !is_done(&ours) {
                // It may wait for ever.
                rxe.0.stop();
            }
            (ours, theirs.ends())
        }
    }
}

/// Servers and clients of rdma_cm.
const RDMA_CM: [[&str; 2]; 6] = [
    [
        "rping -s -a ADDRESS -C 20 -V -S 3000",
        "rping -c -a ADDRESS -C 20 -V -S 3000",
    ],
    ["ucmatose -b ADDRESS -c 4 -C 20", "ucmatose -s ADDRESS -c 4 -C 20"],
    ["rdma_server", "rdma_client -s ADDRESS"],
    ["rdma_xserver", "rdma_xclient -s ADDRESS"],
    // rsockets, whose messages the programs compare.
    [
        "rstream -b ADDRESS -C 20 -S 20000 -T v",
        "rstream -s ADDRESS -C 20 -S 20000 -T v",
    ],
    [
        "riostream -b ADDRESS -C 20 -S 20000 -T v",
        "riostream -s ADDRESS -C 20 -S 20000 -T v",
    ],
];

const PERFTEST_BY_RDMA_CM: [[&str; 2]; 2] = [
    ["ib_send_bw -R -F -n 100", "ib_send_bw -R -F -n 100 ADDRESS"],
    ["ib_read_bw -R -F -n 50", "ib_read_bw -R -F -n 50 ADDRESS"],
];

/// The server is ours: that of qperf 0.4.11 names its port before it listens, which an emulated
/// machine does too late.
#[test]
fn qperf_from_rxe() {
    or_skip!(installed("qperf"));
    let rxe = or_skip!(Rxe::borrowed());
    rxe.0.start("modprobe rdma_ucm").success();
    let port = free_port();
    let mut server = rxe
        .here(Program::new("qperf").line(&format!("-lp {port}")))
        .spawn();
    server.wait_until_listening(port);
    let client = |line: &str| {
        let line = format!("timeout {SECONDS} qperf {LINK_HOST} -lp {port} -to 60 {line}");
        rxe.0.start(&line).success()
    };
    for tests in [
        "rc_bi_bw rc_bw rc_lat",
        "rc_rdma_read_bw rc_rdma_read_lat rc_rdma_write_bw rc_rdma_write_lat",
        "rc_compare_swap_mr rc_fetch_add_mr ver_rc_compare_swap ver_rc_fetch_add",
    ] {
        let printed = client(&format!("-cm 1 -t 1 {tests}"));
        assert_eq!(
            printed.matches(" = ").count(),
            tests.split(' ').count(),
            "{printed}"
        );
    }
    client("quit");
    server.wait_for(LIMIT).success();
}

#[test]
fn programs_of_rdma_cm_connect_to_rxe() {
    or_skip!(installed("rping"));
    or_skip!(installed("ib_send_bw"));
    let rxe = or_skip!(Rxe::borrowed());
    rxe.0.start("modprobe rdma_ucm").success();
    for server in BOTH {
        for command in RDMA_CM.into_iter().chain(PERFTEST_BY_RDMA_CM) {
            by_rdma_cm(&rxe, server, command, &[]);
        }
    }
}

/// The device is in a process of its own, for several programs one after the other.
#[test]
fn rxe_and_a_served_device_exchange_messages() {
    or_skip!(installed("ib_atomic_bw"));
    or_skip!(installed("rping"));
    let rxe = or_skip!(Rxe::borrowed());
    rxe.0.start("modprobe rdma_ucm").success();
    let served = Served::through(&rxe.0.netns().entry(), "");
    let device = served.device();
    let settings = [("URNIC_DEVICE", device.as_str())];
    for server in BOTH {
        for command in [
            "ibv_rc_pingpong -c -n 50 -s 20000",
            "ibv_rc_pingpong -c -n 50 -e",
            "ibv_ud_pingpong -c -n 50 -s 1000",
            "ibv_uc_pingpong -c -n 50 -e",
            "ib_send_bw -n 50 -q 2",
            "ib_write_bw -n 10 -s 1048576",
            "ib_read_bw -n 10 -s 1048576",
            "ib_read_lat -n 50 -e",
            "ib_atomic_bw -n 50 -A FETCH_AND_ADD",
        ] {
            rxe.both(server, command, &settings);
        }
        for command in RDMA_CM {
            by_rdma_cm(&rxe, server, command, &settings);
        }
    }
}

/// Processes that are killed leave the device, here and in the guest, to the next ones.
#[test]
fn requests_fail_whose_peer_at_the_other_end_of_the_link_is_killed() {
    or_skip!(installed("ib_write_bw"));
    let rxe = or_skip!(Rxe::borrowed());
    let served = Served::through(&rxe.0.netns().entry(), "");
    let device = served.device();
    let endless = "ib_write_bw -D 60";
    for settings in [&[][..], &[("URNIC_DEVICE", device.as_str())]] {
        let port = free_port();
        let theirs = rxe.0.listener_at(port, &Rxe::theirs(endless, port));
        let ours = rxe.ours(endless, port, settings).arg(LINK_GUEST).spawn();
        rxe.transfers();
        rxe.0.stop();
        let said = ours.wait_for(LIMIT).failure();
        // IBV_WC_RETRY_EXC_ERR.
        assert!(said.contains("Failed status 12"), "{said}");
        theirs.ends();

        let mut ours = rxe.ours(endless, port, settings).spawn();
        ours.wait_until_listening(port);
        let theirs = rxe
            .0
            .start(&format!("{} {LINK_HOST}", Rxe::theirs(endless, port)));
        rxe.transfers();
        ours.signal(Signal::KILL);
        ours.wait();
        // rxe repeats its requests for ever, if it may do so seven times, and no device answers.
        rxe.0.stop();
        theirs.ends();
        rxe.both(Server::Urnic, "ibv_rc_pingpong -c -n 20", settings);
    }
}

/// What tshark prints about the packets of a capture that pass the filter.
fn tshark(file: &Path, field: &str, filter: &str) -> String {
    let mut tshark = Process::new("tshark");
    // The user of the tests may have set preferences.
    tshark
        .env("HOME", "/nonexistent")
        .env_remove("WIRESHARK_CONFIG_DIR");
    let out = tshark
        .arg("-nr")
        .arg(file)
        .args(["-T", "fields", "-e", "frame.number", "-e", field, "-Y", filter])
        .output()
        .expect("tshark runs");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn tshark_reads_the_packets_of_rxe_and_urnic() {
    or_skip!(installed("tshark"));
    let rxe = or_skip!(Rxe::borrowed());
    let folder = Folder::inside(&scratch(), "rxe");
    for server in BOTH {
        for (command, opcodes) in [
            ("ibv_rc_pingpong -c -n 50 -s 5000", &[0, 1, 2, 17][..]),
            ("ib_write_bw -n 20 -s 4000", &[6, 7, 8, 17]),
            ("ib_read_bw -n 20 -s 4000", &[12, 13, 14, 15]),
            ("ib_atomic_bw -n 20 -A CMP_AND_SWAP", &[18, 19]),
            ("ib_atomic_bw -n 20 -A FETCH_AND_ADD", &[18, 20]),
            ("ibv_uc_pingpong -n 20 -s 5000", &[32, 33, 34]),
            ("ib_write_bw -c UC -n 20 -s 4000", &[38, 39, 40]),
            ("ibv_ud_pingpong -n 20 -s 1000", &[100]),
        ] {
            let file = folder.file("wire.pcapng");
            let _ = std::fs::remove_file(&file);
            rxe.both(
                server,
                command,
                &[("URNIC_PCAP", file.to_str().expect("our path"))],
            );
            let wrong = tshark(
                &file,
                "_ws.expert.message",
                "_ws.malformed || _ws.expert.severity == \"Error\"",
            );
            assert_eq!(wrong, "", "{command}");
            for opcode in opcodes {
                let filter = format!("infiniband.bth.opcode == {opcode}");
                let found = tshark(&file, "infiniband.bth.psn", &filter);
                assert!(!found.is_empty(), "{command}: no packet with opcode {opcode}");
            }
        }
    }
}
