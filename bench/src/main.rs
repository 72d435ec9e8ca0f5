//! Compares urnic with raw TCP and UCX over the same loopback, in the same run, as ratios. Each
//! round measures urnic and the other, one directly after the other. The table has the median over
//! the rounds, and for the ratio the median of the rounds' ratios, so that a machine that slows
//! down halfway slows both.

#![forbid(unsafe_code)]
// Both panic when the write fails: see `urnic_console`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod cacheline;
mod crc;
mod instructions;
mod nfs;
mod ours;
mod raw;
mod roce;
mod same_host;
mod served;
mod table;
mod ucx;

use std::process::ExitCode;

use table::{Aim, Measured, Row, tried};
use urnic_console::{READER_GONE, Unwritten, complain, print};

/// Rounds without an argument; each takes some 30 s.
const ROUNDS: usize = 5;

/// Sizes at which streams are compared.
const STREAMS: [(usize, &str, u64); 2] = [(65_536, "64 KiB", 20_000), (1_048_576, "1 MiB", 2_000)];

/// Ways to post small requests, and the usual way with which each is compared. perftest posts by
/// `ibv_wr_*` by default. The requests of a shared queue fit it: perftest sends no credits for one.
struct Way {
    what: &'static str,
    against: &'static str,
    ours: (&'static str, &'static str),
    theirs: (&'static str, &'static str),
}

const WAYS: [Way; 5] = [
    Way {
        what: "64 B Sends, ibv_wr_*",
        against: "ibv_post_send",
        ours: ("ib_send_bw", "-s 64 -n 1000000"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000 --use_old_post_send"),
    },
    Way {
        what: "64 B Sends, lists of 32",
        against: "ibv_post_send",
        ours: ("ib_send_bw", "-s 64 -n 1000000 -l 32 --use_old_post_send"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000 --use_old_post_send"),
    },
    Way {
        what: "64 B Sends, inline",
        against: "from registered memory",
        ours: ("ib_send_bw", "-s 64 -n 1000000 -I 64"),
        theirs: ("ib_send_bw", "-s 64 -n 1000000"),
    },
    Way {
        what: "64 B Sends, shared receives",
        against: "a queue of its own",
        ours: ("ib_send_bw", "-s 64 -n 16000 -r 16384 --use-srq"),
        theirs: ("ib_send_bw", "-s 64 -n 16000 -r 16384"),
    },
    Way {
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

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["raw", rest @ ..] => raw::main(rest),
        [] => bench(ROUNDS, None),
        [part @ ("host" | "served" | "roce" | "nfs" | "instructions")] => bench(ROUNDS, Some(part)),
        [rounds] => rounds_of(rounds, None),
        [
            part @ ("host" | "served" | "roce" | "nfs" | "instructions"),
            rounds,
        ] => rounds_of(rounds, Some(part)),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    complain(
        "urnic-bench",
        "usage: urnic-bench [host | served | roce | nfs | instructions] [ROUNDS]",
    );
    ExitCode::from(2)
}

fn rounds_of(rounds: &str, part: Option<&str>) -> ExitCode {
    match rounds.parse() {
        Ok(count @ 1..=100) => bench(count, part),
        _ => usage(),
    }
}

/// Measures, prints the table, and fails if a row is not complete.
fn bench(rounds: usize, part: Option<&str>) -> ExitCode {
    let outcome = print(&format!(
        "urnic on one host ({}), {rounds} rounds, {}\n",
        way(),
        machine()
    ))
    .and_then(|()| {
        // Counts of instructions are the same on a busy machine.
        let load_average = load_average().filter(|_| part != Some("instructions"));
        let rows = measured(rounds, part);
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

/// All rows, or only the rows of peers on the same host, of the device in another process, of the
/// RoCE identity, of NFS, or of instructions. Instructions are counted once: see
/// [`instructions`].
fn measured(rounds: usize, part: Option<&str>) -> Vec<Row> {
    let wanted = |name: &str| part.is_none_or(|part| part == name);
    let all = part.is_none();
    let rows_if = |wanted: bool, rows: fn() -> Vec<Row>| if wanted { rows() } else { Vec::new() };
    let mut rows = rows_if(all, rows);
    let mut host = rows_if(wanted("host"), same_host::rows);
    let mut served = rows_if(wanted("served"), served_rows);
    let mut roce = rows_if(wanted("roce"), roce::rows);
    let mut by_nfs = rows_if(wanted("nfs"), nfs::rows);
    let mut counts = rows_if(wanted("instructions"), instructions::rows);
    instructions::measure(&mut counts);
    let rounds = if part == Some("instructions") { 0 } else { rounds };
    for round in 1..=rounds {
        complain("urnic-bench", &format!("round {round} of {rounds}"));
        if all {
            measure(&mut rows);
        }
        if !host.is_empty() {
            same_host::measure(&mut host);
        }
        measure_served(&mut served);
        if !roce.is_empty() {
            roce::measure(&mut roce);
        }
        measure_nfs(&mut by_nfs);
    }
    rows.append(&mut host);
    rows.append(&mut served);
    rows.append(&mut roce);
    rows.append(&mut by_nfs);
    rows.append(&mut counts);
    rows
}

fn rows() -> Vec<Row> {
    let mut rows = vec![
        Row::new(
            "ib_send_lat 8 B, median",
            "us",
            "raw TCP, spinning",
            Aim::AtMost(1.25),
        ),
        Row::new(
            "ib_write_lat 8 B, median",
            "us",
            "raw TCP, blocking",
            Aim::AtMost(1.0),
        ),
        Row::new(
            "ib_write_lat 8 B, p99",
            "us",
            "raw TCP, blocking, p99",
            Aim::AtMost(1.0),
        ),
    ];
    for (_, size, _) in STREAMS {
        rows.push(Row::new(
            &format!("ib_write_bw {size}"),
            "MiB/s",
            "raw TCP stream",
            Aim::AtLeast(0.9),
        ));
        rows.push(Row::new(
            &format!("ib_send_bw {size}"),
            "MiB/s",
            "raw TCP stream",
            Aim::AtLeast(0.9),
        ));
    }
    rows.push(Row::new(
        "ib_send_bw 64 B, messages",
        "M/s",
        "UCX over TCP, tag_bw",
        Aim::AtLeast(5.0),
    ));
    for way in WAYS {
        rows.push(Row::new(way.what, "M/s", way.against, Aim::Report));
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
            Aim::AtMost(2.0),
        ),
        Row::new(
            "rdma_cm connections",
            "1/s",
            "raw TCP connect + RTT",
            Aim::AtLeast(0.5),
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

    let spinning = tried(|| Ok(raw::ping_pong("spin")));
    let send = tried(|| ours::latency("ib_send_lat"));
    add(send.map(|lat| lat.median), Some(spinning.map(|raw| raw.median)));

    let blocking = tried(|| Ok(raw::ping_pong("block")));
    let write = tried(|| ours::latency("ib_write_lat"));
    let of = |latency: &Measured<raw::Latency>, figure: fn(&raw::Latency) -> f64| {
        latency.as_ref().map(figure).map_err(Clone::clone)
    };
    for figure in [|lat: &raw::Latency| lat.median, |lat: &raw::Latency| lat.p99] {
        add(of(&write, figure), Some(of(&blocking, figure)));
    }

    for (size, _, count) in STREAMS {
        for tool in ["ib_write_bw", "ib_send_bw"] {
            let stream = tried(|| Ok(raw::stream(size, count)));
            add(tried(|| ours::bandwidth(tool, size, count, None)), Some(stream));
        }
    }

    let ours = tried(|| ours::messages("ib_send_bw", 64, 2_000_000, None));
    add(
        ours,
        Some(tried(|| ucx::messages(&ucx::over_tcp(), 64, 2_000_000))),
    );
    for way in WAYS {
        let rate = |(name, options)| tried(move || ours::rate(name, options));
        add(rate(way.ours), Some(rate(way.theirs)));
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
    let native = tried(ours::connections);
    let plain = tried(|| Ok(raw::connects()));
    let plain_rate = plain.map(|plain| plain.per_second);
    add(native.clone().map(|native| native.kibibytes), None);
    add(native.map(|native| native.per_second), Some(plain_rate));

    let plain = tried(|| Ok(raw::connects()));
    let managed = tried(ours::cm_connections);
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

/// The way of urnic's bytes, as its option `same_host` says.
fn way() -> &'static str {
    match std::env::var("URNIC_SAME_HOST").as_deref() {
        Ok("off") => "TCP over loopback",
        _ => "through memory",
    }
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
