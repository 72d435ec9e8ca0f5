//! perftest without `-R`: Debian's own binaries, here and in the other Debian.

use std::fs;
use std::path::Path;
use std::time::Duration;

use urnic_testkit::Folder;
use urnic_tests::build::tree;
use urnic_tests::debian::Debian;
use urnic_tests::leftovers::XrcDomains;
use urnic_tests::program::Program;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, Staged, as_user};
use urnic_tests::{Pair, or_skip, skip};

const ALL: [&str; 6] = [
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
];
const BANDWIDTH: [&str; 3] = ["ib_send_bw", "ib_write_bw", "ib_read_bw"];
const LATENCY: [&str; 3] = ["ib_send_lat", "ib_write_lat", "ib_read_lat"];

/// Two polling processes and a background thread each, on as little as two cores that other tests
/// use too.
const LIMIT: Duration = Duration::from_secs(180);

fn program(name: &str, options: &str) -> Program {
    // -F: no complaint about CPU frequencies.
    Program::new(name).line("-d urnic0 -F").line(options)
}

/// Runs a pair and checks that the client printed at least this many lines of results.
#[track_caller]
fn measures(pair: &Pair, rows: usize) {
    let both = pair.succeeds();
    let number = |word: &str| word.parse::<f64>().is_ok();
    let results = both.client.output.lines().filter(|line| {
        // perftest may append a warning about the clock of a busy machine: "Correlation coefficient
        // r^2: 0.89 < 0.9".
        let row = line.split("Correlation").next().unwrap_or_default();
        let words: Vec<&str> = row.split_whitespace().collect();
        words.len() >= 4 && words.iter().all(|word| number(word))
    });
    let count = results.count();
    assert!(
        count >= rows,
        "{count} rows of results, not {rows}:\n{}",
        both.client
    );
}

#[track_caller]
fn runs(name: &str, options: &str, rows: usize) {
    measures(&Pair::new(&program(name, options)).within(LIMIT), rows);
}

#[test]
fn bandwidth_over_all_sizes() {
    or_skip!(installed("ib_send_bw"));
    BANDWIDTH.iter().for_each(|name| runs(name, "-a -n 50", 23));
}

#[test]
fn latency_over_all_sizes() {
    or_skip!(installed("ib_send_lat"));
    LATENCY.iter().for_each(|name| runs(name, "-a -n 50", 22));
}

#[test]
fn default_options() {
    or_skip!(installed("ib_send_bw"));
    ALL.iter().for_each(|name| runs(name, "", 1));
}

#[test]
fn for_five_seconds() {
    or_skip!(installed("ib_send_bw"));
    for_a_time("-D 5", |program| program);
}

/// The server of Writes and Reads stays at RTR. The client's Request is held until RTS, but not for
/// longer than that needs: no other timer is due before the test's limit.
#[test]
fn a_server_that_stays_at_rtr_is_not_waited_for() {
    or_skip!(installed("ib_write_bw"));
    let timers = "native.call_grace_ms=600000,mpa.startup_timeout_initiator_s=600,\
                  mpa.startup_timeout_responder_s=600";
    for _ in 0..8 {
        let program = program("ib_write_bw", "-n 5").env("URNIC_SET", timers);
        measures(&Pair::new(&program).within(LIMIT), 1);
    }
}

#[test]
fn every_path_mtu() {
    or_skip!(installed("ib_send_bw"));
    for mtu in [256, 512, 1024] {
        ALL.iter()
            .for_each(|name| runs(name, &format!("-m {mtu} -n 100 -s 5000"), 1));
    }
}

#[test]
fn both_ways() {
    or_skip!(installed("ib_send_bw"));
    BANDWIDTH.iter().for_each(|name| runs(name, "-b -n 500", 1));
}

#[test]
fn sixteen_queue_pairs() {
    or_skip!(installed("ib_send_bw"));
    BANDWIDTH.iter().for_each(|name| runs(name, "-q 16 -n 200", 1));
    runs("ib_write_bw", "-q 16 -b -n 100", 1);
}

#[test]
fn sleeping_on_events() {
    or_skip!(installed("ib_send_bw"));
    for name in ["ib_send_lat", "ib_read_bw", "ib_read_lat"] {
        runs(name, "-e -n 500", 1);
    }
}

#[test]
fn ib_send_bw_sleeping_on_events() {
    or_skip!(installed("ib_send_bw"));
    // On iWARP the sender may be no further ahead than the receives that the other end has posted,
    // and gets their number from writes of that end into its memory. A sleeping sender does not see
    // the write: when it is that far ahead, with all its Sends completed or none of the rest
    // signaled, both ends wait for ever, on any device. perftest posts as many receives as there
    // are Sends, rounded up to an even number: with an odd number of Sends its sender never gets
    // that far, and nothing excuses a hang.
    for _ in 0..3 {
        runs("ib_send_bw", "-e -n 501", 1);
    }
}

#[test]
fn inline() {
    or_skip!(installed("ib_send_bw"));
    for name in ["ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat"] {
        runs(name, "-I 64 -s 64 -n 500", 1);
    }
}

#[test]
fn queue_depths() {
    or_skip!(installed("ib_send_bw"));
    BANDWIDTH.iter().for_each(|name| runs(name, "-t 4 -n 500", 1));
    runs("ib_send_bw", "-r 16 -n 500", 1);
    runs("ib_send_lat", "-r 1 -n 500", 1);
    runs("ib_read_bw", "-t 300 -n 500", 1);
}

#[test]
fn eight_pairs_side_by_side() {
    or_skip!(installed("ib_send_bw"));
    let pairs: Vec<Pair> = (0..8)
        .map(|n| Pair::new(&program(BANDWIDTH[n % 3], "-n 300")))
        .collect();
    std::thread::scope(|scope| {
        for pair in pairs {
            scope.spawn(move || measures(&pair.within(LIMIT), 1));
        }
    });
}

/// Every option, with every program that takes it; the rest refuse it by themselves ("Events
/// feature not available on WRITE verb", …).
fn every_option(place: impl Fn(Program) -> Program) {
    const EVENTS: [&str; 4] = ["ib_send_bw", "ib_send_lat", "ib_read_bw", "ib_read_lat"];
    const INLINE: [&str; 4] = ["ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat"];
    let table: [(&str, &[&str]); 8] = [
        ("-m 256 -n 100 -s 5000", &ALL),
        ("-b -n 300", &BANDWIDTH),
        ("-q 16 -n 100", &BANDWIDTH),
        ("-q 16 -b -n 100", &BANDWIDTH),
        // An odd number: see `ib_send_bw_sleeping_on_events`.
        ("-e -n 501", &EVENTS),
        ("-I 64 -s 64 -n 500", &INLINE),
        ("-t 16 -n 500", &ALL),
        ("-r 16 -n 500", &["ib_send_bw", "ib_send_lat"]),
    ];
    for (options, names) in table {
        for name in names {
            measures(&Pair::new(&place(program(name, options))).within(LIMIT), 1);
        }
    }
}

/// Runs for a time, two pairs at once.
fn for_a_time(options: &str, place: impl Fn(Program) -> Program) {
    let pairs = ALL.map(|name| Pair::new(&place(program(name, options))).within(LIMIT));
    // Each pair polls on two cores.
    for two in pairs.chunks(2) {
        std::thread::scope(|scope| {
            two.iter()
                .for_each(|pair| drop(scope.spawn(|| measures(pair, 1))))
        });
    }
}

#[test]
fn as_an_ordinary_user() {
    or_skip!(root());
    or_skip!(installed("ib_send_bw"));
    let staged = Staged::new();
    let place = |program| staged.program(NOBODY, program);
    every_option(place);
    for_a_time("-D 2", place);
}

#[test]
fn in_the_other_debian() {
    let debian = or_skip!(Debian::other());
    let place = |program| debian.program(program);
    every_option(place);
    for_a_time("-D 2", place);
}

#[test]
fn over_all_sizes_in_the_other_debian() {
    let debian = or_skip!(Debian::other());
    for name in ALL {
        measures(
            &Pair::new(&debian.program(program(name, "-a -n 20"))).within(LIMIT),
            22,
        );
    }
}

#[test]
fn in_the_other_debian_as_an_ordinary_user() {
    let debian = or_skip!(Debian::other());
    let place = |program| debian.program(as_user(NOBODY, program));
    every_option(place);
    for_a_time("-D 2", place);
}

/// A row of docs/reference/perftest.md: the command, and `works` or the message of perftest.
struct Row {
    program: String,
    options: String,
    result: String,
}

/// The rows of the table whose heading begins with these words.
fn table(heading: &str) -> Vec<Row> {
    let text =
        fs::read_to_string(tree().join("docs/reference/perftest.md")).expect("docs/reference/perftest.md");
    let part = text.split("\n## ").find(|part| part.starts_with(heading));
    let lines = part.expect("the heading").lines();
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let (program, options) = cells.get(1)?.trim_matches('`').split_once(' ')?;
        Some(Row {
            program: program.to_owned(),
            options: options.to_owned(),
            result: cells.get(2)?.to_string(),
        })
    };
    lines
        .filter(|line| line.starts_with("| `ib_"))
        .filter_map(row)
        .collect()
}

/// A file that the other Debian's programs see, too: words of a payload, as many as fill a buffer.
struct Scratch {
    folder: Folder,
}

impl Scratch {
    fn new() -> Scratch {
        let folder = Folder::inside(Path::new("/dev/shm"), "urnic-perftest");
        fs::write(folder.file("payload"), "0x01020304,\n".repeat(1 << 15)).expect("shared memory");
        Scratch { folder }
    }

    fn path(&self) -> String {
        self.folder.file("payload").display().to_string()
    }
}

/// The fault of a row, if any.
fn tried(row: &Row, place: &impl Fn(Program) -> Program) -> Result<(), String> {
    let file = row.options.contains("FILE").then(Scratch::new);
    let path = file.as_ref().map(Scratch::path).unwrap_or_default();
    let options = row.options.replace("FILE", &path);
    let pair = Pair::new(&place(program(&row.program, &options))).within(LIMIT);
    let pair = if options.contains("--ipv6-addr") {
        pair.at("::1")
    } else {
        pair
    };
    let outcome = pair.tries();
    let printed = match &outcome {
        Ok(both) => format!("{}{}", both.server, both.client),
        Err(printed) => printed.clone(),
    };
    let works = outcome.is_ok_and(|both| both.server.ok() && both.client.ok());
    let expected = if row.result == "works" {
        works
    } else {
        !works && printed.contains(&row.result)
    };
    expected.then_some(()).ok_or(format!(
        "{} {}: not \"{}\"\n{printed}",
        row.program, row.options, row.result
    ))
}

/// Runs the rows for a release, here or in the other Debian: each `step`th, so that a few can
/// represent all.
fn every_switch(heading: &str, release: &str, rows: usize, step: usize) {
    or_skip!(installed("ib_send_bw"));
    let here = Program::plain("ib_send_bw").arg("--version").run().output;
    let other = (!here.contains(release)).then(Debian::other);
    let other = or_skip!(other.transpose());
    let place = |program| match &other {
        Some(debian) => debian.program(program),
        None => program,
    };
    let table = table(heading);
    assert!(table.len() >= rows, "{heading}: {} rows", table.len());
    let pages = fs::read_to_string("/proc/sys/vm/nr_hugepages");
    let no_huge_pages = pages.is_ok_and(|number| number.trim() == "0");
    let domains = XrcDomains::of_perftest();
    let as_in_the_table = |row: &&Row| {
        if let Err(reason) = &domains
            && row.options.contains("XRC")
        {
            skip::report(&format!("{} {}: {reason}", row.program, row.options));
            return false;
        }
        let depends = row.options.contains("--use_hugepages");
        if depends && !no_huge_pages {
            skip::report(&format!(
                "{} {}: the machine has huge pages",
                row.program, row.options
            ));
        }
        !depends || no_huge_pages
    };
    let wrong: Vec<String> = table
        .iter()
        .step_by(step)
        .filter(as_in_the_table)
        .filter_map(|row| tried(row, &place).err())
        .collect();
    assert!(wrong.is_empty(), "{} rows:\n{}", wrong.len(), wrong.join("\n\n"));
}

#[test]
fn every_third_switch_of_the_table() {
    every_switch("Debian 12's", "6.06", 70, 3);
    every_switch("Debian 13's", "6.24", 15, 3);
}

#[test]
#[ignore = "minutes"]
fn every_switch_of_debian_12s() {
    every_switch("Debian 12's", "6.06", 70, 1);
}

#[test]
#[ignore = "minutes"]
fn every_switch_of_debian_13s() {
    every_switch("Debian 13's", "6.24", 15, 1);
}
