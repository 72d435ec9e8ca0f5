//! The long form of [`crate::siw`]: every mode that urnic and soft-iWARP have in common, with
//! either as the initiator, with every program that fits, from 0 bytes to 8 MiB.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use urnic_sync::Mutex;

use urnic_tests::build::scratch;
use urnic_tests::capture::Wire;
use urnic_tests::guest::{DEFAULTS, Guest, HOST, Packets};
use urnic_tests::program::{Program, Running};
use urnic_tests::random::Random;
use urnic_tests::shell::LIMIT;
use urnic_tests::skip::installed;
use urnic_tests::wait::{free_port, until};
use urnic_tests::{compiled, or_skip};

use super::table::Table;
use crate::siw::{
    Ends, READ, RPING, RPING_SERVER, RPING_SERVER_WITH_READS, SEND, Settings, WRITE, all_pings,
    first_opcodes, program, siw_connects, siw_measures, startups, urnic_connects, urnic_measures,
};

/// Our programs that run in the guest, too.
const OUR_PROGRAMS: [&str; 3] = ["cm_sizes", "cm_endings", "cm_many"];

/// The start of a connection: revision and C bit of Request and Reply, and the first FPDU's opcode.
type Beginning = ([&'static str; 2], &'static str);

/// The programs that run in a mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Programs that show that the mode is in force, and that data arrives.
    Short,
    /// All programs, and perftest with all its sizes.
    Long,
}

/// The set-up of both sides, and the expected results.
struct Mode {
    name: &'static str,
    ours: Settings<'static>,
    theirs: &'static [(&'static str, u8)],
    /// The expected start with us as the initiator; `None` where the mode equals another mode, or
    /// siw does not support it.
    we_call: Option<Beginning>,
    siw_connects: Option<Beginning>,
    /// The extent of the tests in this mode.
    extent: Extent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Initiator {
    Urnic,
    Siw,
}

/// An impossible combination: a server that sends before the initiator. On iWARP the initiator must
/// send first, at least an RTR (RFC 5044 §7.1.3).
const SILENT: &str = "not without an RTR: the server begins";

/// Another one: siw answers a Read of zero bytes from the scatter list of its own last request, and
/// ends the connection if inline data is in its place, as with rsockets.
const EMPTY_READS: &str = "siw does not answer Reads of zero bytes there";

/// One running row.
struct Run<'a> {
    guest: &'a Guest,
    mode: &'a Mode,
    initiator: Initiator,
}

impl Run<'_> {
    /// Server and client of one line, the client's with ` ADDRESS` options appended.
    #[track_caller]
    fn both(&self, server: &str, client: &str) -> Ends {
        self.both_set(server, client, &[])
    }

    #[track_caller]
    fn both_set(&self, server: &str, client: &str, more: Settings<'_>) -> Ends {
        let settings = [self.mode.ours, more].concat();
        match self.initiator {
            Initiator::Urnic => urnic_connects(self.guest, server, client, &settings),
            Initiator::Siw => siw_connects(self.guest, server, client, &settings),
        }
    }

    fn has_crcs(&self) -> bool {
        let beginning = match self.initiator {
            Initiator::Urnic => self.mode.we_call,
            Initiator::Siw => self.mode.siw_connects,
        };
        beginning.is_some_and(|(startup, _)| startup[1].ends_with('1'))
    }

    /// The initiator, siw, sends no RTR.
    fn is_silent(&self) -> bool {
        self.initiator == Initiator::Siw && self.mode.siw_connects.is_some_and(|(_, opcode)| opcode == SEND)
    }

    fn revision_1(&self) -> bool {
        self.mode.ours.contains(&("URNIC_MPA_REVISION", "1"))
    }
}

/// Checks that the pings are right, and that the wire matches the mode.
fn rping(run: &Run<'_>) -> String {
    let beginning = match run.initiator {
        Initiator::Urnic => run.mode.we_call,
        Initiator::Siw => run.mode.siw_connects,
    };
    let (startup, opcode) = beginning.expect("this mode has this initiator");
    let file = scratch().join(format!("interop-{}.pcapng", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let server = match run.revision_1() && run.initiator == Initiator::Urnic {
        true => RPING_SERVER_WITH_READS,
        false => RPING_SERVER,
    };
    let capture = file.to_str().expect("our path");
    all_pings(run.both_set(server, RPING, &[("URNIC_PCAP", capture)]));
    let wire = Wire::of(file);
    assert_eq!(startups(&wire), startup);
    assert_eq!(first_opcodes(&wire), [opcode]);
    let dissection = wire.dissect_as_captured();
    assert!(
        dissection.bad_crcs == 0 && dissection.malformed.is_empty(),
        "{dissection:?}"
    );
    assert_eq!(
        dissection.good_crcs > 0,
        startup[1].ends_with('1'),
        "{dissection:?}"
    );
    "100 pings, tshark content".to_owned()
}

/// Send, Write and Read of each size, compared byte for byte.
fn sizes(run: &Run<'_>) -> String {
    let most = if run.mode.extent == Extent::Long {
        8 << 20
    } else {
        1 << 16
    };
    let program = compiled("cm_sizes").expect("it was compiled before");
    let options = format!("-p PORT -m {most}");
    // siw's answer to a Read of zero bytes sometimes has a byte, which is out of bounds.
    let here = format!("{} -r", program.display());
    let there = "/bin/cm_sizes";
    let (server, client) = match run.initiator {
        Initiator::Urnic => (there, here.as_str()),
        Initiator::Siw => (here.as_str(), there),
    };
    let ends = run
        .both(
            &format!("{server} {options}"),
            &format!("{client} {options} ADDRESS"),
        )
        .succeed();
    let (done, _) = ends.ours.rsplit_once(" s").expect("it says how long it took");
    done.lines().last().unwrap_or_default().to_owned() + " s"
}

/// Connections with some messages each; the server sends first.
fn ucmatose(run: &Run<'_>) -> String {
    if run.is_silent() {
        return SILENT.to_owned();
    }
    let server = "ucmatose -c 10 -C 20 -S 60000 -p PORT";
    let ends = run.both(server, &format!("{server} -s ADDRESS")).succeed();
    assert!(ends.ours.contains("test complete"), "{}", ends.ours);
    "10 connections, 20 messages of 60000 each way".to_owned()
}

/// Many connections. (Not made at once, like those of ucmatose: some of those Requests are lost on
/// the way into the guest.)
fn many(run: &Run<'_>) -> String {
    let here = compiled("cm_many").expect("it was compiled before");
    let here = here.to_str().expect("our path");
    let there = "/bin/cm_many";
    let (server, client) = match run.initiator {
        Initiator::Urnic => (there, here),
        Initiator::Siw => (here, there),
    };
    let ends = run
        .both(
            &format!("{server} -p PORT -c 200"),
            &format!("{client} -p PORT -c 200 ADDRESS"),
        )
        .succeed();
    assert!(ends.ours.contains("200 connections"), "{}", ends.ours);
    "200 connections at once".to_owned()
}

/// Private data, rejections, disconnections by either side, Sends that invalidate.
fn endings(run: &Run<'_>) -> String {
    let here = compiled("cm_endings").expect("it was compiled before");
    let here = here.to_str().expect("our path");
    let (server, client) = match run.initiator {
        Initiator::Urnic => ("/bin/cm_endings", here),
        Initiator::Siw => (here, "/bin/cm_endings -l"),
    };
    let ends = run
        .both(&format!("{server} -p PORT"), &format!("{client} -p PORT ADDRESS"))
        .succeed();
    assert!(
        ends.ours.contains("invalidated by the responder"),
        "{}",
        ends.ours
    );
    "private data, rejected, ended and invalidated by either".to_owned()
}

fn rstream(run: &Run<'_>) -> String {
    if run.mode.ours.contains(&("URNIC_COMPLETION", "delivered")) {
        return EMPTY_READS.to_owned();
    }
    let mut speeds = Vec::new();
    for options in ["-S 64 -I 100 -C 2", "-S 4096 -I 20 -C 2", "-S 1048576 -I 4 -C 2"] {
        let server = format!("rstream -p PORT {options} -T v");
        let ends = run.both(&server, &format!("{server} -s ADDRESS")).succeed();
        let printed = match run.initiator {
            Initiator::Urnic => ends.ours,
            Initiator::Siw => ends.theirs,
        };
        // name, bytes, xfers, iters, total, time, Gb/sec, usec/xfer
        let row = printed
            .lines()
            .find(|line| line.split_whitespace().count() == 8 && !line.starts_with("name"));
        let words: Vec<&str> = row
            .unwrap_or_else(|| panic!("no result:\n{printed}"))
            .split_whitespace()
            .collect();
        speeds.push(format!("{} {} Gb/s", words[1], words[6]));
    }
    speeds.join(", ")
}

/// A file there and back.
fn rcopy(run: &Run<'_>) -> String {
    let folder = scratch();
    let file = |what: &str| folder.join(format!("interop-{what}-{}", std::process::id()));
    let (first, back) = (file("first"), file("back"));
    let bytes = Random(1).bytes((8 << 20) + 1);
    std::fs::write(&first, &bytes).expect("a file of ours");
    match run.initiator {
        Initiator::Urnic => {
            let port = run.guest.port;
            let _server = run.guest.listener(&format!("rcopy -p {port}"));
            let line = format!("rcopy {} 127.0.0.1:/tmp/copy -p {port}", first.display());
            program(&line, run.mode.ours).run_for(LIMIT).success();
            run.guest.stop();
        }
        Initiator::Siw => {
            run.guest.bring(&first, "/tmp/copy");
            let port = free_port();
            let mut server = program(&format!("rcopy -p {port}"), run.mode.ours).spawn();
            server.wait_until_listening(port);
            let line = format!("rcopy /tmp/copy {HOST}:{} -p {port}", back.display());
            run.guest.start(&line).success();
        }
    }
    let sum = |printed: String| printed.split_whitespace().next().unwrap_or_default().to_owned();
    let expected = sum(Program::plain("sha256sum").arg(&first).run().success());
    let copy = match run.initiator {
        Initiator::Urnic => sum(run.guest.start("sha256sum /tmp/copy").success()),
        Initiator::Siw => sum(Program::plain("sha256sum").arg(&back).run().success()),
    };
    for file in [&first, &back] {
        let _ = std::fs::remove_file(file);
    }
    assert_eq!(copy, expected, "the copy differs");
    format!("{} bytes, the same there", bytes.len())
}

/// Three of all sizes from 2 bytes to 8 MiB; or one size alone.
fn perftest(run: &Run<'_>, name: &str) -> String {
    if name == "ib_write_lat" && run.is_silent() {
        return SILENT.to_owned();
    }
    // siw misreads a CRC that TCP brings in two pieces, as it does when a window is full: by
    // several Reads under way, or a large one.
    let careful = name.starts_with("ib_read") && run.initiator == Initiator::Siw && run.has_crcs();
    let (options, sizes, rows_due) = match (careful, name) {
        (true, "ib_read_bw") => ("-s 65536 -n 20 -t 1", &["65536"][..], 1),
        (true, _) => ("-s 65536 -n 20", &["65536"][..], 1),
        (false, _) => ("-a -n 5", &["2", "65536", "8388608"][..], 23),
    };
    let line = format!("{name} {options}");
    let printed = match run.initiator {
        Initiator::Urnic => urnic_measures(run.guest, &line, run.mode.ours).ours,
        // The last message of siw may follow on the same line.
        Initiator::Siw => siw_measures(run.guest, &line, run.mode.ours)
            .theirs
            .replace(" Bad wc status", "\nBad wc status"),
    };
    let (column, unit) = if name.ends_with("bw") {
        (3, "MB/s")
    } else {
        (4, "us")
    };
    let rows: Vec<Vec<&str>> = printed
        .lines()
        .map(|line| line.split_whitespace().collect())
        .filter(|words: &Vec<&str>| {
            words.len() > column && words.iter().all(|word| word.parse::<f64>().is_ok())
        })
        .collect();
    assert_eq!(rows.len(), rows_due, "{printed}");
    let shown = sizes.iter().map(|&size| {
        let row = rows.iter().find(|row| row[0] == size);
        let value = row.unwrap_or_else(|| panic!("nothing of {size} bytes:\n{printed}"))[column];
        format!("{size}: {value}")
    });
    format!("{} {unit}", shown.collect::<Vec<_>>().join(", "))
}

/// A program of the matrix: its name, and the function that runs it and returns the result.
type Row = (&'static str, fn(&Run<'_>) -> String);

const SHORT: [Row; 5] = [
    ("rping", rping),
    ("cm_sizes", sizes),
    ("cm_endings", endings),
    ("cm_many", many),
    ("rstream", rstream),
];
const LONG: [Row; 8] = [
    ("ucmatose", ucmatose),
    ("rcopy", rcopy),
    ("ib_send_bw", |run| perftest(run, "ib_send_bw")),
    ("ib_write_bw", |run| perftest(run, "ib_write_bw")),
    ("ib_read_bw", |run| perftest(run, "ib_read_bw")),
    ("ib_send_lat", |run| perftest(run, "ib_send_lat")),
    ("ib_write_lat", |run| perftest(run, "ib_write_lat")),
    ("ib_read_lat", |run| perftest(run, "ib_read_lat")),
];

/// The panic message of a test, in a line: of a message with the output of two programs, the last
/// words of each.
fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("panicked");
    let relevant = |line: &&str| !line.is_empty() && !line.starts_with("---") && !line.starts_with("(status");
    let last = |words: &str| {
        words
            .lines()
            .map(str::trim)
            .rfind(relevant)
            .unwrap_or_default()
            .to_owned()
    };
    match text.split_once("--- siw:") {
        Some((ours, theirs)) => format!("urnic: {}; siw: {}", last(ours), last(theirs)),
        None => text.lines().find(relevant).unwrap_or_default().to_owned(),
    }
}

/// The state that all modes share, one after the other.
struct Scene {
    guest: Guest,
    table: Table,
}

/// A guest with our own programs.
fn fresh() -> Result<Guest, String> {
    let guest = Guest::boot(1, 768, Packets::Passing)?;
    for name in OUR_PROGRAMS {
        guest.bring(&compiled(name)?, &format!("/bin/{name}"));
    }
    Ok(guest)
}

impl Scene {
    fn begun() -> Result<Self, String> {
        let guest = fresh()?;
        let kernel = guest.start("uname -r").success();
        let kernel = kernel.lines().next().unwrap_or_default();
        let title = format!(
            "urnic {} and soft-iWARP of Linux {kernel}, in QEMU without hardware virtualisation: the figures show errors, not the real speed",
            env!("CARGO_PKG_VERSION")
        );
        let heads = ["mode", "initiator", "program", "result", "details"];
        let table = Table::new("siw", &title, &heads);
        Ok(Self { guest, table })
    }
}

/// How often a row is repeated because of a known fault of siw.
const AGAIN: usize = 3;

/// A known fault of siw in the log of its kernel: a BUG(), which its connection manager hits now
/// and then with connections that end as they begin (iwcm.c), or a CRC that siw misread.
fn known_fault(guest: &Guest) -> Option<&'static str> {
    let (_, printed) = guest.start("dmesg").ends();
    if printed.contains("kernel BUG at") {
        return Some("a BUG() in its kernel");
    }
    printed
        .lines()
        .any(is_misread)
        .then_some("a CRC that siw misread")
}

/// What siw has said in the log of its kernel.
fn kernel_words(guest: &Guest) -> String {
    let (_, printed) = guest.start("dmesg").ends();
    let words: Vec<&str> = printed.lines().filter(|line| line.contains("siw")).collect();
    words.join(" / ")
}

/// Whether this line is `siw: crc error. in: …, own …, op …` for a correct CRC of which siw stored
/// the second part in place of the first: the value is made of the bytes of the right CRC.
fn is_misread(line: &str) -> bool {
    let bytes = |name: &str| {
        let (_, behind) = line.split_once(name)?;
        u32::from_str_radix(behind.get(..8)?, 16)
            .ok()
            .map(u32::to_le_bytes)
    };
    let (Some(read), Some(own)) = (bytes("crc error. in: "), bytes(", own ")) else {
        return false;
    };
    (1..4).any(|second| {
        let (first, mut made) = (4 - second, own);
        made.copy_within(first.., 0);
        // After both parts are the bytes of before.
        let known = first.max(second);
        read[..known] == made[..known]
    })
}

#[test]
fn a_crc_misread_by_siw_is_distinguished_from_a_wrong_one() {
    // Observed: of the bytes b1 70 03 1c two came late, of 8f cd bc b8 one.
    assert!(is_misread(
        "[  183.473229] siw: crc error. in: 5c0f1c03, own 1c0370b1, op 0"
    ));
    assert!(is_misread(
        "[   14.258887] siw: crc error. in: a5bccdb8, own b8bccd8f, op 0"
    ));
    for wrong in ["5c0f1c04", "1c0370b0", "b170031c", "00000000"] {
        let line = format!("[  183.473229] siw: crc error. in: {wrong}, own 1c0370b1, op 0");
        assert!(!is_misread(&line), "{line}");
    }
    assert!(!is_misread("siw: crc error. in: 5c, own 1c"));
}

/// Runs all programs of this mode, also after a failure.
#[track_caller]
fn in_mode(mode: &Mode) {
    static SCENE: Mutex<Option<Scene>> = Mutex::new(None);
    or_skip!(installed("tshark"));
    or_skip!(installed("ib_send_bw"));
    or_skip!(installed("rping"));
    let mut scene = SCENE.lock();
    let Scene { guest, table } = match &mut *scene {
        Some(scene) => scene,
        none => none.insert(or_skip!(Scene::begun())),
    };
    let mut failures = Vec::new();
    let programs = SHORT
        .iter()
        .chain(LONG.iter().filter(|_| mode.extent == Extent::Long));
    for (name, work) in programs {
        for (initiator, initiator_name, wanted) in [
            (Initiator::Urnic, "urnic", mode.we_call.is_some()),
            (Initiator::Siw, "siw", mode.siw_connects.is_some()),
        ] {
            if !wanted {
                continue;
            }
            let once = |guest: &Guest| {
                // Kernel messages of earlier runs must not excuse this one.
                guest.start("dmesg -c >/dev/null").success();
                let attempt = AssertUnwindSafe(|| {
                    guest.set(&DEFAULTS);
                    guest.set(mode.theirs);
                    work(&Run {
                        guest,
                        mode,
                        initiator,
                    })
                });
                catch_unwind(attempt).map_err(|panic| reason(&*panic))
            };
            let mut result = once(guest);
            for _ in 0..AGAIN {
                let Some(fault) = result.as_ref().err().and_then(|_| known_fault(guest)) else {
                    break;
                };
                *guest = fresh().expect("it booted before");
                result = once(guest).map(|printed| format!("{printed} (repeated after {fault})"));
            }
            match result {
                Ok(printed) if [SILENT, EMPTY_READS].contains(&printed.as_str()) => {
                    table.row(&[mode.name, initiator_name, name, "not run", &printed]);
                }
                Ok(printed) => table.row(&[mode.name, initiator_name, name, "ok", &printed]),
                Err(why) => {
                    let why = format!("{why}; its kernel: {}", kernel_words(guest));
                    table.row(&[mode.name, initiator_name, name, "FAILED", &why]);
                    failures.push(format!("{initiator_name} connects, {name}: {why}"));
                    // Leftovers of the failed program would disturb the next.
                    *guest = fresh().expect("it booted before");
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{}: {} failed:\n{}",
        mode.name,
        failures.len(),
        failures.join("\n")
    );
}

/// A test for each mode.
macro_rules! modes {
    ($($test:ident => $mode:expr,)*) => {$(
        #[test]
        #[ignore = "make interop"]
        fn $test() {
            in_mode(&$mode);
        }
    )*};
}

modes! {
    revision_2_with_crc => Mode {
        name: "revision 2, CRC requested by urnic",
        ours: &[],
        theirs: &[],
        we_call: Some((["2 1", "2 1"], WRITE)),
        siw_connects: Some((["2 0", "2 1"], SEND)),
        extent: Extent::Long,
    },
    without_crc_and_siw_strict => Mode {
        name: "no CRC, siw strict",
        ours: &[("URNIC_MPA_CRC", "false")],
        theirs: &[("mpa_crc_strict", 1)],
        we_call: Some((["2 0", "2 0"], WRITE)),
        siw_connects: Some((["2 0", "2 0"], SEND)),
        extent: Extent::Short,
    },
    without_crc => Mode {
        name: "no CRC",
        ours: &[("URNIC_MPA_CRC", "false")],
        theirs: &[],
        we_call: Some((["2 0", "2 0"], WRITE)),
        siw_connects: Some((["2 0", "2 0"], SEND)),
        extent: Extent::Short,
    },
    with_crc_and_siw_strict => Mode {
        name: "CRC, siw strict",
        ours: &[],
        theirs: &[("mpa_crc_required", 1), ("mpa_crc_strict", 1)],
        we_call: Some((["2 1", "2 1"], WRITE)),
        siw_connects: Some((["2 1", "2 1"], SEND)),
        extent: Extent::Short,
    },
    // When the initiator does not request CRC, siw does not use it.
    with_crc_as_siw_asks => Mode {
        name: "CRC requested by siw",
        ours: &[("URNIC_MPA_CRC", "false")],
        theirs: &[("mpa_crc_required", 1)],
        we_call: None,
        siw_connects: Some((["2 1", "2 1"], SEND)),
        extent: Extent::Short,
    },
    completions_mean_delivery => Mode {
        name: "completion=delivered",
        ours: &[("URNIC_COMPLETION", "delivered")],
        theirs: &[],
        we_call: Some((["2 1", "2 1"], WRITE)),
        siw_connects: Some((["2 0", "2 1"], SEND)),
        extent: Extent::Short,
    },
    revision_1 => Mode {
        name: "revision 1",
        ours: &[("URNIC_MPA_REVISION", "1")],
        theirs: &[("mpa_version", 1)],
        we_call: Some((["1 1", "1 1"], SEND)),
        siw_connects: Some((["1 0", "1 1"], SEND)),
        extent: Extent::Short,
    },
    revision_1_of_siw => Mode {
        name: "revision 1 of siw, 2 of ours",
        ours: &[],
        theirs: &[("mpa_version", 1)],
        we_call: None,
        siw_connects: Some((["1 0", "1 1"], SEND)),
        extent: Extent::Short,
    },
    revision_1_of_ours => Mode {
        name: "revision 1 of ours, 2 of siw",
        ours: &[("URNIC_MPA_REVISION", "1")],
        theirs: &[],
        we_call: Some((["1 1", "1 1"], SEND)),
        siw_connects: None,
        extent: Extent::Short,
    },
    not_peer_to_peer => Mode {
        name: "not peer-to-peer",
        ours: &[("URNIC_MPA_PEER_TO_PEER", "false")],
        theirs: &[],
        we_call: Some((["2 1", "2 1"], SEND)),
        siw_connects: Some((["2 0", "2 1"], SEND)),
        extent: Extent::Short,
    },
    // siw offers Read and Write; our setting alone decides.
    ready_to_receive_by_write => Mode {
        name: "RTR by Write",
        ours: &[("URNIC_MPA_RTR_TYPES", "write")],
        theirs: &[("peer_to_peer", 1)],
        we_call: Some((["2 1", "2 1"], WRITE)),
        siw_connects: Some((["2 0", "2 1"], WRITE)),
        extent: Extent::Short,
    },
    ready_to_receive_by_read => Mode {
        name: "RTR by Read",
        ours: &[("URNIC_MPA_RTR_TYPES", "read")],
        theirs: &[("peer_to_peer", 1)],
        we_call: Some((["2 1", "2 1"], READ)),
        siw_connects: Some((["2 0", "2 1"], READ)),
        extent: Extent::Short,
    },
    ready_to_receive_by_either => Mode {
        name: "RTR by either",
        ours: &[],
        theirs: &[("peer_to_peer", 1)],
        we_call: Some((["2 1", "2 1"], WRITE)),
        siw_connects: Some((["2 0", "2 1"], READ)),
        extent: Extent::Short,
    },
}

/// Our program, when its peer is killed during a transfer, gets an event and ends by itself. (Its
/// status is not checked: rping reports success after a disconnection.)
#[track_caller]
fn ends_when_killed(guest: Guest, here: Running) {
    let pinged = until(LIMIT, || {
        (here.output().matches("rdma-ping-").count() >= 10).then_some(())
    });
    assert!(pinged.is_some(), "no pings:\n{}", here.output());
    drop(guest);
    let ended = here.wait_for(LIMIT).to_string();
    assert!(ended.contains("DISCONNECT EVENT"), "{ended}");
}

/// QEMU's user network handles TCP for the guest: this side sees the end of the QEMU process.
#[test]
#[ignore = "make interop"]
fn a_guest_that_is_killed_in_mid_transfer() {
    or_skip!(installed("rping"));
    const PINGS: &str = "-v -V -C 1000000 -S 60000";
    let guest = or_skip!(Guest::boot(1, 512, Packets::Passing));
    let port = guest.port;
    let _there = guest.listener(&format!("rping -s -p {port} {PINGS}"));
    let here = program(&format!("rping -c -a 127.0.0.1 -p {port} {PINGS}"), &[]).spawn();
    ends_when_killed(guest, here);

    let guest = or_skip!(Guest::boot(1, 512, Packets::Passing));
    let port = free_port();
    let mut here = program(&format!("rping -s -p {port} {PINGS}"), &[]).spawn();
    here.wait_until_listening(port);
    let _there = guest.start(&format!("rping -c -a {HOST} -p {port} {PINGS}"));
    ends_when_killed(guest, here);
}
