//! NFS over RDMA against NFS over TCP: the same server, a tree in memory, and the same client.

use std::path::PathBuf;

use urnic_tests::Program;
use urnic_tests::build::target;

use crate::ours;
use crate::place::Place;
use crate::table::{Aim, Measured, Row};

/// The figures of `urnic-nfs bench`: its name for each, and the name in the table.
const FIGURES: [(&str, &str, &str, Aim); 5] = [
    ("write", "NFS WRITEs of 1 MiB", "MiB/s", Aim::AtLeast(1.5)),
    ("read", "NFS READs of 1 MiB", "MiB/s", Aim::AtLeast(1.5)),
    ("write_4k", "NFS WRITEs of 4 KiB", "1/s", Aim::Report),
    ("read_4k", "NFS READs of 4 KiB", "1/s", Aim::Report),
    ("null", "NFS NULL calls, 8 at a time", "1/s", Aim::Report),
];
/// GiB transferred in each direction for the measurement of processor time.
const MOVED: f64 = 1.0;

/// The program, if it was built.
///
/// # Errors
/// The command to run first.
fn program() -> Measured<PathBuf> {
    let program = target().join("urnic-nfs");
    let missing = || "urnic-nfs is not built: run 'make nfs' first".to_owned();
    program.exists().then_some(program).ok_or_else(missing)
}

/// The rows that [`measure`] fills.
pub(crate) fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = (FIGURES.into_iter())
        .map(|(_, what, unit, aim)| Row::new(what, unit, "the same over TCP", aim))
        .collect();
    let processor = "NFS, processor time, both ends";
    rows.push(Row::new(processor, "s/GiB", "the same over TCP", Aim::Report));
    let null = "NFS NULL calls, one at a time";
    rows.push(Row::new(null, "1/s", "ib_send_lat's rate", Aim::Report));
    rows
}

/// Processor time, in seconds, from these fields of a process' `stat` (`proc(5)`, counted from 1).
fn seconds(process: &str, fields: [usize; 2]) -> Option<f64> {
    /// USER_HZ, which is the same on all machines.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The fields after the name, which is the second field.
    let (_, rest) = stat.rsplit_once(") ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    let ticks = fields.map(|field| words.get(field - 3)?.parse::<f64>().ok());
    Some((ticks[0]? + ticks[1]?) / TICKS)
}

/// Measures one round of each of [`rows`]: the figure of urnic, and the compared figure.
pub(crate) fn measure() -> Measured<Vec<(f64, f64)>> {
    let program = program()?;
    let mut server = Program::new(&program)
        .line("serve --no-root-squash --memory 1G --listen 127.0.0.1 --tcp-port 0 --rdma-port 0")
        .spawn();
    let mut port = |way: &str| {
        server.wait_for_output(way, |output| {
            let line = output.lines().find(|line| line.contains(way))?;
            output
                .ends_with('\n')
                .then(|| line.rsplit(':').next().unwrap_or_default().to_owned())
        })
    };
    let (tcp, rdma) = (port("over TCP at"), port("over RDMA at"));
    let by_tcp = format!("bench --json --mount-port {tcp} --port {tcp} 127.0.0.1:/");
    let by_rdma = format!("bench --json --mount-port {tcp} --rdma --port {rdma} 127.0.0.1:/");
    let figure = |output: &str, name: &str| {
        let (_, value) = output.split_once(&format!("\"{name}\": "))?;
        value.split([',', '}']).next()?.parse::<f64>().ok()
    };
    let unclear = || "urnic-nfs bench did not print what was expected".to_owned();
    let bench = |way: &str, more: &str| Program::new(&program).line(way).line(more).run().success();
    let figures = |way: &str| {
        let output = bench(way, "--size 256M");
        let figures = FIGURES.iter().map(|(name, ..)| figure(&output, name));
        figures.collect::<Option<Vec<_>>>().ok_or_else(unclear)
    };
    let both = |way: &str| {
        // The children's time of this process is the time of clients that have ended.
        let spent = || Some(seconds(&server.pid().to_string(), [14, 15])? + seconds("self", [16, 17])?);
        let unread = || "the processor time in /proc cannot be read".to_owned();
        let before = spent().ok_or_else(unread)?;
        bench(way, "--size 512M --operations 1");
        Ok::<_, String>((spent().ok_or_else(unread)? - before) / MOVED)
    };
    // The server's memory is touched for the first time by neither.
    bench(&by_tcp, "--size 256M");
    let mut rows: Vec<_> = figures(&by_rdma)?.into_iter().zip(figures(&by_tcp)?).collect();
    rows.push((both(&by_rdma)?, both(&by_tcp)?));
    let one =
        figure(&bench(&by_rdma, "--size 4K --depth 1 --operations 5000"), "null").ok_or_else(unclear)?;
    // Microseconds of half a round trip.
    let send = ours::latency(&Place::here(), "ib_send_lat", "-R -s 8 -n 50000")?;
    let sends = 1e6 / (2.0 * send.median);
    rows.push((one, sends));
    Ok(rows)
}
