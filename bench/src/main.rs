//! urnic against raw TCP and UCX over the same loopback, in the same run, as ratios. Each round measures ours and the other, one right
//! after the other; what is printed is the median over the rounds, and of the ratio the median of the rounds' ratios, so that a
//! machine that slows down halfway slows both.

mod cacheline;
mod crc;
mod nfs;
mod ours;
mod raw;
mod served;
mod table;
mod ucx;

use std::process::ExitCode;

use table::{Aim, Row};

/// Rounds without an argument; each takes some 30 s.
const ROUNDS: usize = 5;

/// Sizes at which streams are compared.
const STREAMS: [(usize, &str, u64); 2] = [(65_536, "64 KiB", 20_000), (1_048_576, "1 MiB", 2_000)];

/// Ways to have small requests done, and the usual one that each is held against. perftest posts by `ibv_wr_*` unless told otherwise. The requests of a
/// shared queue fit it: perftest sends no credits for one.
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

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["raw", rest @ ..] => raw::main(rest),
        [] => bench(ROUNDS, None),
        [part @ ("served" | "nfs")] => bench(ROUNDS, Some(part)),
        [rounds] => rounds_of(rounds, None),
        [part @ ("served" | "nfs"), rounds] => rounds_of(rounds, Some(part)),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: urnic-bench [served | nfs] [ROUNDS]");
    ExitCode::from(2)
}

fn rounds_of(rounds: &str, part: Option<&str>) -> ExitCode {
    match rounds.parse() {
        Ok(count @ 1..=100) => bench(count, part),
        _ => usage(),
    }
}

/// All rows, or only those of the device in another process, or of NFS.
fn bench(rounds: usize, part: Option<&str>) -> ExitCode {
    let wanted = |name: &str| part.is_none_or(|part| part == name);
    let all = part.is_none();
    println!("urnic over loopback, {rounds} rounds, {}", machine());
    let crowd = crowd();
    let mut rows = if all { rows() } else { Vec::new() };
    let mut served = if wanted("served") {
        served_rows()
    } else {
        Vec::new()
    };
    let mut by_nfs = nfs_rows(wanted("nfs"));
    for round in 1..=rounds {
        eprint!("\rround {round} of {rounds} ");
        if all {
            measure(&mut rows);
        }
        measure_served(&mut served);
        measure_nfs(&mut by_nfs);
    }
    eprintln!();
    rows.append(&mut served);
    rows.append(&mut by_nfs);
    table::print(&rows);
    if let Some(load) = crowd {
        println!("The machine was busy before this began (load {load}): these figures say little.");
    }
    ExitCode::SUCCESS
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
    rows.push(Row::new(
        "CRC32C, FPDU of 1448 B",
        "GB/s",
        "crc-fast itself",
        Aim::NoSlower,
    ));
    rows.push(Row::new(
        "CRC32C, FPDU of 64774 B",
        "GB/s",
        "crc-fast itself",
        Aim::NoSlower,
    ));
    rows.push(Row::new(
        "doorbell to CQE, no wire",
        "us",
        "cache line, there and back",
        Aim::Report,
    ));
    rows.push(Row::new("memory per idle connected QP", "KiB", "", Aim::Report));
    rows.push(Row::new("connections", "1/s", "raw TCP connect", Aim::Report));
    rows.push(Row::new(
        "rdma_connect, median",
        "us",
        "raw TCP connect + RTT",
        Aim::AtMost(2.0),
    ));
    rows.push(Row::new(
        "rdma_cm connections",
        "1/s",
        "raw TCP connect + RTT",
        Aim::AtLeast(0.5),
    ));
    rows.push(Row::new("memory per idle rdma_cm conn.", "KiB", "", Aim::Report));
    rows.push(Row::new(
        "rstream 64 B, one transfer",
        "us",
        "rstream over TCP",
        Aim::Report,
    ));
    rows.push(Row::new(
        "rstream 64 KiB",
        "Gbit/s",
        "rstream over TCP",
        Aim::Report,
    ));
    rows
}

/// `urnic serve` against the device in the process.
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

/// NFS over RDMA, if it is wanted and can be had; else the reason is said.
fn nfs_rows(wanted: bool) -> Vec<Row> {
    match wanted.then(nfs::rows) {
        None => Vec::new(),
        Some(Ok(rows)) => rows,
        Some(Err(reason)) => {
            eprintln!("{reason}");
            Vec::new()
        }
    }
}

/// A measurement that fails says why and leaves its place empty; the others are worth having.
fn tried<T>(measurement: impl FnOnce() -> Option<T> + std::panic::UnwindSafe) -> Option<T> {
    std::panic::catch_unwind(measurement).ok().flatten()
}

/// One round, in the order of the rows.
fn measure(rows: &mut [Row]) {
    let mut rows = rows.iter_mut();
    let mut add_runs = |runs: &[(Option<f64>, Option<f64>)]| {
        if let Some(row) = rows.next() {
            runs.iter().for_each(|(ours, theirs)| row.add(*ours, *theirs));
        }
    };
    let spinning = raw::ping_pong("spin");
    let send = tried(|| ours::latency("ib_send_lat"));
    add_runs(&[(send.map(|lat| lat.median), Some(spinning.median))]);

    let blocking = raw::ping_pong("block");
    let write = tried(|| ours::latency("ib_write_lat"));
    add_runs(&[(write.map(|lat| lat.median), Some(blocking.median))]);
    add_runs(&[(write.map(|lat| lat.p99), Some(blocking.p99))]);

    for (size, _, count) in STREAMS {
        for tool in ["ib_write_bw", "ib_send_bw"] {
            let stream = raw::stream(size, count);
            let ours = tried(|| ours::bandwidth(tool, size, count, None));
            add_runs(&[(ours, Some(stream))]);
        }
    }

    let ours = tried(|| ours::messages("ib_send_bw", 64, 2_000_000, None));
    add_runs(&[(ours, tried(|| ucx::messages(64, 2_000_000)))]);
    for way in WAYS {
        let rate = |(name, options)| tried(move || ours::rate(name, options));
        add_runs(&[(rate(way.ours), rate(way.theirs))]);
    }
    for len in [1448, 64_774] {
        add_runs(&crc::rates(len).map(|(ours, library)| (Some(ours), Some(library))));
    }
    let doorbell = tried(|| ours::doorbell_to_cqe(None));
    add_runs(&[(doorbell, Some(cacheline::round_trip()))]);
    let connections = tried(ours::connections);
    add_runs(&[(connections.map(|c| c.kibibytes), None)]);
    let plain = raw::connects();
    add_runs(&[(connections.map(|c| c.per_second), Some(plain.per_second))]);

    let plain = raw::connects();
    let managed = tried(ours::cm_connections);
    add_runs(&[(managed.map(|c| c.median), Some(plain.median))]);
    add_runs(&[(managed.map(|c| c.per_second), Some(plain.per_second))]);
    add_runs(&[(managed.map(|c| c.kibibytes), None)]);
    for (size, batch, times, bandwidth) in [(64, 1, 20_000, false), (65_536, 100, 100, true)] {
        let figure = |rsockets| {
            tried(move || ours::rstream(rsockets, size, batch, times)).map(|run| match bandwidth {
                true => run.gigabits_per_second,
                false => run.microseconds,
            })
        };
        add_runs(&[(figure(true), figure(false))]);
    }
}

/// One round of [`served_rows`].
fn measure_served(rows: &mut [Row]) {
    let measurements = [
        served::doorbell_to_cqe,
        served::bandwidth,
        served::messages,
        served::ringing,
    ];
    for (row, measurement) in rows.iter_mut().zip(measurements) {
        let (ours, theirs) = std::panic::catch_unwind(measurement).unwrap_or_default();
        row.add(ours, theirs);
    }
}

/// One round of [`nfs_rows`].
fn measure_nfs(rows: &mut [Row]) {
    if rows.is_empty() {
        return;
    }
    for (row, (ours, theirs)) in rows.iter_mut().zip(tried(nfs::measure).unwrap_or_default()) {
        row.add(Some(ours), Some(theirs));
    }
}

/// The load average, when other programs want a processor too.
fn crowd() -> Option<f64> {
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
