//! Compares urnic with raw TCP, UCX and others in the same run, as ratios: between the processes of
//! one host, and between two hosts. Each round measures urnic and the other, one directly after the
//! other. The table has the median over the rounds, and for the ratio the median of the rounds'
//! ratios, so that a machine that slows down halfway slows both.

#![forbid(unsafe_code)]
// Both panic when the write fails: see `urnic_console`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cacheline;
mod calls;
mod crc;
mod hosts;
mod instructions;
mod libfabric;
mod nfs;
mod ours;
mod place;
mod raw;
mod roce;
mod same_host;
mod served;
mod table;
mod ucx;

use std::process::ExitCode;

use hosts::Hosts;
use instructions::Way;
use place::Place;
use table::{Aim, Measured, Row, tried};
use urnic_console::{READER_GONE, Unwritten, complain, print};

/// Rounds without an argument; each takes some 30 s.
const ROUNDS: usize = 5;

/// The parts that can be measured alone.
const PARTS: [&str; 6] = ["host", "hosts", "served", "roce", "nfs", "instructions"];

/// Ways to post small requests, and the usual way with which each is compared. perftest posts by
/// `ibv_wr_*` by default. The requests of a shared queue fit it: perftest sends no credits for one.
struct Posting {
    what: &'static str,
    against: &'static str,
    ours: (&'static str, &'static str),
    theirs: (&'static str, &'static str),
}

const POSTINGS: [Posting; 5] = [
    Posting {
        what: "64 B Sends, ibv_wr_*",
        against: "ibv_post_send",
        ours: ("ib_send_bw", "-s 64 -n 1000000"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000 --use_old_post_send"),
    },
    Posting {
        what: "64 B Sends, lists of 32",
        against: "ibv_post_send",
        ours: ("ib_send_bw", "-s 64 -n 1000000 -l 32 --use_old_post_send"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000 --use_old_post_send"),
    },
    Posting {
        what: "64 B Sends, inline",
        against: "from registered memory",
        ours: ("ib_send_bw", "-s 64 -n 1000000 -I 64"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000"),
    },
    Posting {
        what: "64 B Sends, shared receives",
        against: "a queue of its own",
        ours: ("ib_send_bw", "-s 64 -n 16000 -r 16384 --use-srq"),
        theirs: ("ib_send_bw", "-s 64 -n 16000 -r 16384"),
    },
    Posting {
        what: "fetch-and-adds",
        against: "Reads of 8 B",
        ours: ("ib_atomic_bw", "-A FETCH_AND_ADD -n 200000"),
        theirs: ("ib_read_bw", "-s 8 -n 200000"),
    },
];

/// The cost of a completion that means delivery.
struct Delivered {
    what: &'static str,
    unit: &'static str,
    tool: (&'static str, &'static str),
    /// The column of the figure in the tool's row.
    column: usize,
    aim: Aim,
}

const DELIVERED: [Delivered; 3] = [
    Delivered {
        what: "ib_write_bw 64 KiB, delivered",
        unit: "MiB/s",
        tool: ("ib_write_bw", "-s 65536 -n 20000"),
        column: 3,
        aim: Aim::AtLeast(0.95),
    },
    Delivered {
        what: "ib_send_bw 64 B, delivered",
        unit: "M/s",
        tool: ("ib_send_bw", "-s 64 -n 1000000"),
        column: 4,
        aim: Aim::Report,
    },
    Delivered {
        what: "ib_send_lat 8 B, delivered",
        unit: "us",
        tool: ("ib_send_lat", "-s 8 -n 50000"),
        column: 4,
        aim: Aim::Report,
    },
];

/// What the command line requests.
struct Request<'a> {
    /// The part of the table; `None` is all.
    part: Option<&'a str>,
    rounds: usize,
    /// Rows between hosts have this text in their names.
    rows: &'a str,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    if let ["raw", rest @ ..] = words.as_slice() {
        return raw::main(rest);
    }
    match request(&words) {
        Some(request) => bench(&request),
        None => {
            let parts = PARTS.join(" | ");
            let usage = format!("usage: urnic-bench [{parts}] [ROUNDS] [--rows TEXT (of hosts)]");
            complain("urnic-bench", &usage);
            ExitCode::from(2)
        }
    }
}

fn request<'a>(words: &[&'a str]) -> Option<Request<'a>> {
    let (part, words) = match words {
        [part, rest @ ..] if PARTS.contains(part) => (Some(*part), rest),
        words => (None, words),
    };
    let (rows, words) = match words {
        [rest @ .., "--rows", text] if part == Some("hosts") => (*text, rest),
        words => ("", words),
    };
    let rounds = match words {
        [] => ROUNDS,
        [rounds] => rounds.parse().ok().filter(|count| (1..=100).contains(count))?,
        _ => return None,
    };
    Some(Request { part, rounds, rows })
}

/// Measures, prints the table, and fails if a row is not complete.
fn bench(request: &Request) -> ExitCode {
    let (part, rounds) = (request.part, request.rounds);
    let is_wanted = |names: &[&str]| part.is_none_or(|part| names.contains(&part));
    let (hosts, reason) = match is_wanted(&["hosts", "instructions"]) {
        true => Place::two_hosts(),
        false => (Place::here(), None),
    };
    let between = reason.map_or_else(
        || format!("hosts: {hosts}"),
        |reason| format!("hosts: {hosts}, because {reason}"),
    );
    let outcome = print(&format!("urnic, {rounds} rounds, {}\n{between}\n", machine())).and_then(|()| {
        // Counts of instructions are the same on a busy machine.
        let load_average = load_average().filter(|_| part != Some("instructions"));
        let rows = measured(request, &hosts);
        print(&table::text(&rows))?;
        if let Some(load) = load_average {
            print(&format!(
                "The machine was busy before the measurement (load {load}): these figures are unreliable.\n"
            ))?;
        }
        Ok(table::is_complete(&rows))
    });
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Unwritten::ReaderGone) => ExitCode::from(READER_GONE),
        Err(unwritten) => {
            complain("urnic-bench", &unwritten.to_string());
            ExitCode::FAILURE
        }
    }
}

/// All rows, or only those of a part: of peers on the same host, between hosts, of the device in
/// another process, of the RoCE identity, of NFS, or of instructions. Instructions are counted
/// once: see [`instructions`].
fn measured(request: &Request, hosts: &Place) -> Vec<Row> {
    let part = request.part;
    let wanted = |name: &str| part.is_none_or(|part| part == name);
    let all = part.is_none();
    let rows_if = |wanted: bool, rows: fn() -> Vec<Row>| if wanted { rows() } else { Vec::new() };
    let mut rows = rows_if(all, rows);
    let mut host = rows_if(wanted("host"), same_host::rows);
    let is_wanted = |what: &str| wanted("hosts") && what.contains(request.rows);
    let mut between = Hosts::new(hosts, is_wanted);
    let mut served = rows_if(wanted("served"), served_rows);
    let mut roce = rows_if(wanted("roce"), roce::rows);
    let mut by_nfs = rows_if(wanted("nfs"), nfs::rows);
    let mut counts = counted(request, hosts);
    let rounds = if part == Some("instructions") {
        0
    } else {
        request.rounds
    };
    for round in 1..=rounds {
        complain("urnic-bench", &format!("round {round} of {rounds}"));
        if all {
            measure(&mut rows);
        }
        if !host.is_empty() {
            same_host::measure(&mut host);
        }
        between.measure(round);
        measure_served(&mut served);
        if !roce.is_empty() {
            roce::measure(&mut roce);
        }
        measure_nfs(&mut by_nfs);
    }
    rows.append(&mut host);
    rows.append(&mut between.into_rows());
    rows.append(&mut served);
    rows.append(&mut roce);
    rows.append(&mut by_nfs);
    rows.append(&mut counts);
    rows
}

/// The rows of instructions: of peers on the same host, and between hosts.
fn counted(request: &Request, hosts: &Place) -> Vec<Row> {
    let mut counts = Vec::new();
    for (way, place, parts) in [
        (Way::Host, &Place::here(), &["instructions"][..]),
        (Way::Tcp, hosts, &["instructions", "hosts"][..]),
    ] {
        let mut rows = instructions::rows(way);
        let is_in_part = request.part.is_none_or(|part| parts.contains(&part));
        if is_in_part && rows.iter().any(|row| row.what().contains(request.rows)) {
            instructions::measure(&mut rows, way, place);
            counts.append(&mut rows);
        }
    }
    counts
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for posting in POSTINGS {
        rows.push(Row::new(posting.what, "M/s", posting.against, Aim::Report));
    }
    for row in DELIVERED {
        rows.push(Row::new(row.what, row.unit, "completion=taken", row.aim));
    }
    rows.extend(crc_rows());
    rows.extend(connection_rows());
    rows
}

fn crc_rows() -> Vec<Row> {
    vec![
        Row::new("CRC32C, FPDU of 1448 B", "GB/s", "crc-fast itself", Aim::NoSlower),
        Row::new(
            "CRC32C, FPDU of 64774 B",
            "GB/s",
            "crc-fast itself",
            Aim::NoSlower,
        ),
    ]
}

/// The rows of [`measure_connections`].
fn connection_rows() -> Vec<Row> {
    vec![
        Row::new(
            "doorbell to CQE, no wire",
            "us",
            "cache line, there and back",
            Aim::Report,
        ),
        Row::new("memory per idle connected QP", "KiB", "", Aim::Report),
        Row::new("connections", "1/s", "raw TCP connect", Aim::Report),
        Row::new(
            "rdma_connect, median",
            "us",
            "raw TCP connect + RTT",
            Aim::AtMost(2.5),
        ),
        Row::new(
            "rdma_cm connections",
            "1/s",
            "raw TCP connect + RTT",
            Aim::AtLeast(0.4),
        ),
        Row::new("memory per idle rdma_cm conn.", "KiB", "", Aim::Report),
        Row::new(
            "rstream 64 B, one transfer",
            "us",
            "rstream over TCP",
            Aim::Report,
        ),
        Row::new("rstream 64 KiB", "Gbit/s", "rstream over TCP", Aim::Report),
    ]
}

/// The rows of `urnic serve` compared with the device in the process.
fn served_rows() -> Vec<Row> {
    let in_process = "device in the process";
    let row = |name, unit, aim| Row::new(name, unit, in_process, aim);
    vec![
        row("served: doorbell to CQE", "us", Aim::Report),
        row("served: ib_write_bw 1 MiB", "MiB/s", Aim::AtLeast(0.7)),
        row("served: ib_send_bw 64 B, messages", "M/s", Aim::Report),
        Row::new(
            "served: shadow doorbells, Writes of 64 B",
            "M/s",
            "a kick for each",
            Aim::Report,
        ),
    ]
}

/// One round, in the order of the rows.
fn measure(rows: &mut [Row]) {
    let mut rows = rows.iter_mut();
    let mut add_runs = |runs: Vec<(Measured<f64>, Option<Measured<f64>>)>| {
        if let Some(row) = rows.next() {
            runs.into_iter().for_each(|(ours, theirs)| row.add(ours, theirs));
        }
    };
    let mut add = |ours, theirs| add_runs(vec![(ours, theirs)]);

    for posting in POSTINGS {
        let rate = |(name, options)| tried(move || ours::taken(name, options, None, 4));
        add(rate(posting.ours), Some(rate(posting.theirs)));
    }
    for row in DELIVERED {
        let (name, options) = row.tool;
        let figure = |completion| tried(move || ours::with_completion(completion, name, options, row.column));
        add(figure("delivered"), Some(figure("taken")));
    }
    for len in [1448, 64_774] {
        let runs = crc::rates(len).into_iter();
        add_runs(
            runs.map(|(ours, library)| (Ok(ours), Some(Ok(library))))
                .collect(),
        );
    }
    measure_connections(&mut add_runs);
}

/// Measures the rows from the doorbell on.
fn measure_connections(add_runs: &mut impl FnMut(Vec<(Measured<f64>, Option<Measured<f64>>)>)) {
    let mut add = |ours, theirs| add_runs(vec![(ours, theirs)]);
    let doorbell = tried(|| ours::doorbell_to_cqe(None));
    add(doorbell, Some(Ok(cacheline::round_trip())));
    let here = &Place::here();
    let native = tried(|| ours::connections(here));
    let plain = tried(|| Ok(raw::connects(here)));
    let plain_rate = plain.map(|plain| plain.per_second);
    add(native.clone().map(|native| native.kibibytes), None);
    add(native.map(|native| native.per_second), Some(plain_rate));

    let plain = tried(|| Ok(raw::connects(here)));
    let managed = tried(|| ours::cm_connections(here));
    let median = plain.clone().map(|plain| plain.median);
    add(managed.clone().map(|managed| managed.median), Some(median));
    let per_second = plain.map(|plain| plain.per_second);
    add(
        managed.clone().map(|managed| managed.per_second),
        Some(per_second),
    );
    add(managed.map(|managed| managed.kibibytes), None);
    for (size, batch, times, bandwidth) in [(64, 1, 20_000, false), (65_536, 100, 100, true)] {
        let figure = |rsockets| {
            tried(move || ours::rstream(rsockets, size, batch, times)).map(|run| match bandwidth {
                true => run.gigabits_per_second,
                false => run.microseconds,
            })
        };
        add(figure(true), Some(figure(false)));
    }
}

/// Measures one round of [`served_rows`].
fn measure_served(rows: &mut [Row]) {
    let measurements = [
        served::doorbell_to_cqe,
        served::bandwidth,
        served::messages,
        served::ringing,
    ];
    for (row, measurement) in rows.iter_mut().zip(measurements) {
        let (ours, theirs) = measurement();
        row.add(ours, Some(theirs));
    }
}

/// Measures one round of [`nfs::rows`].
fn measure_nfs(rows: &mut [Row]) {
    if rows.is_empty() {
        return;
    }
    match tried(nfs::measure) {
        Ok(figures) => {
            for (row, (ours, theirs)) in rows.iter_mut().zip(figures) {
                row.add(Ok(ours), Some(Ok(theirs)));
            }
        }
        Err(reason) => {
            for row in rows {
                row.add(Err(reason.clone()), Some(Err(reason.clone())));
            }
        }
    }
}

/// The load average, if other programs also use the processors.
fn load_average() -> Option<f64> {
    let average = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = average.split_whitespace().next()?.parse().ok()?;
    (load > 1.0).then_some(load)
}

fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or(": unknown processor");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{cores} cores of {}, Linux {}",
        model.trim_start_matches([' ', '\t', ':']),
        read("/proc/sys/kernel/osrelease").trim()
    )
}
