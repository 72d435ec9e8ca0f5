//! The distribution's perftest, and two small programs of this project, over urnic. Each reports
//! why it could not measure.

use std::time::Duration;

use urnic_tests::skip::installed;
use urnic_tests::{Pair, Program, compiled};

use crate::place::Place;
use crate::raw::Latency;
use crate::table::Measured;

const LIMIT: Duration = Duration::from_secs(180);

/// The result of `ours::connections`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connections {
    /// Memory that each idle connected QP uses in its process, in KiB.
    pub(crate) kibibytes: f64,
    /// Connections established per second, from INIT to the first message received.
    pub(crate) per_second: f64,
}

/// The numbers of the last line that consists of numbers only. perftest ends its line of bandwidths
/// late, so a line of the log may follow the last number at once.
fn figures(text: &str) -> Option<Vec<f64>> {
    let row = |line: &str| {
        without_log(line)
            .split_whitespace()
            .map(|word| word.parse().ok())
            .collect::<Option<Vec<f64>>>()
    };
    text.lines().rev().filter_map(row).find(|row| row.len() >= 2)
}

/// What is before the line of a log, which begins with `2000-01-01T`.
fn without_log(line: &str) -> &str {
    let is_date = |text: &[u8]| {
        let shape = text
            .iter()
            .map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte });
        shape.eq(*b"0000-00-00T")
    };
    let start = line.as_bytes().windows(11).position(is_date);
    start.map_or(line, |start| &line[..start])
}

/// A program with this device; `None` is the device in the program's process. Its requests complete
/// when the connection has taken them.
fn program(name: impl AsRef<std::ffi::OsStr>, device: Option<&str>) -> Program {
    Program::new(name)
        .env("URNIC_DEVICE", device.unwrap_or("inproc"))
        .env("URNIC_COMPLETION", "taken")
}

/// The figure in this column of a program's last row.
fn column(row: &[f64], index: usize) -> Measured<f64> {
    row.get(index)
        .copied()
        .ok_or_else(|| format!("a row of {} figures has none at {index}", row.len()))
}

/// The figure in a column of a perftest's row, with this device.
pub(crate) fn taken(name: &str, options: &str, device: Option<&str>, index: usize) -> Measured<f64> {
    installed(name)?;
    let pair = Pair::new(&program(name, device).line("-d urnic0 -F").line(options)).within(LIMIT);
    let row = figures(&pair.succeeds().client.output).ok_or_else(|| format!("{name} printed no figures"))?;
    column(&row, index)
}

/// The last row of a perftest with the options that programs have by default: requests on native
/// connections complete when they are delivered.
fn perftest(place: &Place, name: &str, options: &str) -> Measured<Vec<f64>> {
    installed(name)?;
    let program = Program::new(name).line("-d urnic0 -F").line(options);
    let text = place.pair(&program).within(LIMIT).succeeds().client.output;
    figures(&text).ok_or_else(|| format!("{name} printed no figures"))
}

/// Latency of half a round trip, or of a Read, in microseconds.
pub(crate) fn latency(place: &Place, name: &str, options: &str) -> Measured<Latency> {
    latency_of(&perftest(place, name, options)?)
}

/// Bandwidth in MiB/s.
pub(crate) fn bandwidth(place: &Place, name: &str, options: &str) -> Measured<f64> {
    // bytes, iterations, peak, average, messages
    column(&perftest(place, name, options)?, 3)
}

/// Millions of requests per second.
pub(crate) fn rate(place: &Place, name: &str, options: &str) -> Measured<f64> {
    column(&perftest(place, name, options)?, 4)
}

/// Latency of half a round trip of 8 bytes with the identity of a RoCE NIC and these options.
pub(crate) fn roce_latency(name: &str, options: &str) -> Measured<Latency> {
    installed(name)?;
    let options = format!("-d urnic0 -F -x 3 -s 8 -n 50000 {options}");
    let program = Program::new(name).env("URNIC_IDENTITY", "roce").line(&options);
    let text = Pair::new(&program).within(LIMIT).succeeds().client.output;
    latency_of(&figures(&text).ok_or_else(|| format!("{name} printed no figures"))?)
}

fn latency_of(row: &[f64]) -> Measured<Latency> {
    // bytes, iterations, min, max, typical (the median), average, deviation, 99 %, 99.9 %
    Ok(Latency {
        median: column(row, 4)?,
        p99: column(row, 7)?,
        mean: column(row, 5)?,
    })
}

/// Median microseconds of the kernel's copies of 8 bytes between processes: by `"write"`, of half a
/// round trip; by `"read"`, of one.
pub(crate) fn kernel_copy(what: &str) -> Measured<f64> {
    let program = Program::plain(compiled("vm_spin")?).line("-n 100000").arg(what);
    let row = figures(&program.run_for(LIMIT).success()).ok_or("vm_spin printed no figures")?;
    column(&row, 4)
}

/// Microseconds of a round trip of ibv_rc_pingpong with 64 bytes, with this value of the option
/// `same_host`.
pub(crate) fn pingpong(same_host: &str) -> Measured<f64> {
    installed("ibv_rc_pingpong")?;
    let program = Program::new("ibv_rc_pingpong").line("-s 64 -n 100000");
    let pair = Pair::new(&program.env("URNIC_SAME_HOST", same_host)).within(LIMIT);
    let text = pair.succeeds().client.output;
    text.lines()
        .find_map(|line| {
            line.split_once(" seconds = ")?
                .1
                .split_once(" usec/iter")?
                .0
                .parse()
                .ok()
        })
        .ok_or_else(|| "ibv_rc_pingpong printed no figure".to_owned())
}

/// The figure in a column of a perftest's row, with this value of the option `completion`.
pub(crate) fn with_completion(completion: &str, name: &str, options: &str, index: usize) -> Measured<f64> {
    installed(name)?;
    let program = program(name, None).env("URNIC_COMPLETION", completion);
    let pair = Pair::new(&program.line("-d urnic0 -F").line(options)).within(LIMIT);
    let row = figures(&pair.succeeds().client.output).ok_or_else(|| format!("{name} printed no figures"))?;
    column(&row, index)
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's
/// completion.
pub(crate) fn doorbell_to_cqe(device: Option<&str>) -> Measured<f64> {
    let program = program(compiled("selfpost")?, device);
    let row = figures(&program.run_for(LIMIT).success()).ok_or("selfpost printed no figures")?;
    column(&row, 0)
}

/// Connects a thousand queue pairs to those of another process.
pub(crate) fn connections(place: &Place) -> Measured<Connections> {
    let pair = place.pair(&Program::new(compiled("connections")?)).within(LIMIT);
    match figures(&pair.succeeds().client.output).as_deref() {
        Some([kibibytes, per_second]) => Ok(Connections {
            kibibytes: *kibibytes,
            per_second: *per_second,
        }),
        other => Err(format!("connections printed {other:?}")),
    }
}

/// The result of `ours::among`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Among {
    /// Times of a Send in microseconds.
    pub(crate) median: f64,
    pub(crate) p99: f64,
    /// Memory of a connection at the initiator's end, in KiB; what both map counts by half.
    pub(crate) kibibytes: f64,
}

/// Sends of 8 bytes on one of so many connections after the other, chosen at random.
pub(crate) fn among(connections: u32) -> Measured<Among> {
    let program = Program::new(compiled("among")?).line(&format!("-n 500000 -q {connections}"));
    match figures(&Pair::new(&program).within(LIMIT).succeeds().client.output).as_deref() {
        Some([median, p99, kibibytes]) => Ok(Among {
            median: *median,
            p99: *p99,
            kibibytes: *kibibytes,
        }),
        other => Err(format!("among printed {other:?}")),
    }
}

/// The result of `ours::cm_connections`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CmConnections {
    /// Connections established per second, one after the other, from rdma_create_id on.
    pub(crate) per_second: f64,
    /// Median time from rdma_connect to ESTABLISHED, in microseconds.
    pub(crate) median: f64,
    /// Memory that each idle connection uses in the initiator's process, in KiB.
    pub(crate) kibibytes: f64,
}

/// Establishes a thousand connections by rdma_cm.
pub(crate) fn cm_connections(place: &Place) -> Measured<CmConnections> {
    let pair = place
        .pair(&Program::new(compiled("cm_connections")?))
        .within(LIMIT);
    match figures(&pair.succeeds().client.output).as_deref() {
        Some([per_second, median, kibibytes]) => Ok(CmConnections {
            per_second: *per_second,
            median: *median,
            kibibytes: *kibibytes,
        }),
        other => Err(format!("cm_connections printed {other:?}")),
    }
}

/// Milliseconds of the start-up of eight ranks, of which each connects to each other: by queue
/// pairs, or by TCP.
pub(crate) fn all_to_all(place: &Place, queue_pairs: bool) -> Measured<f64> {
    let program = compiled("all_to_all")?;
    let program = match queue_pairs {
        true => Program::new(program),
        false => Program::plain(program).arg("-t"),
    };
    let text = place.pair(&program).within(LIMIT).succeeds().server.output;
    column(&figures(&text).ok_or("all_to_all printed no figures")?, 1)
}

/// The result of rstream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rstream {
    /// The time of one transfer, in microseconds.
    pub(crate) microseconds: f64,
    /// Bandwidth in Gb/s, of both directions in turn.
    pub(crate) gigabits_per_second: f64,
}

/// rstream over rsockets, or over the kernel's sockets: `batch` transfers of `size` bytes in one
/// direction, then as many in the other, repeated `times` times.
pub(crate) fn rstream(rsockets: bool, size: usize, batch: u64, times: u64) -> Measured<Rstream> {
    installed("rstream")?;
    let port = urnic_tests::wait::free_port();
    let options = format!("-p {port} -S {size} -C {batch} -I {times}");
    let end = |more: &str| match rsockets {
        true => Program::new("rstream").line(&options).line(more),
        false => Program::plain("rstream").line(&options).line(more).line("-T s"),
    };
    let mut server = end("").spawn();
    server.wait_until_listening(port);
    let client = end("-s 127.0.0.1").run_for(LIMIT);
    let output = client.success();
    server.wait();
    transfer(&output).ok_or_else(|| format!("rstream printed {output}"))
}

/// The last two columns of rstream's last line: Gb/s and microseconds.
fn transfer(text: &str) -> Option<Rstream> {
    let words: Vec<&str> = text.lines().last()?.split_whitespace().collect();
    let [.., gigabits, microseconds] = words.as_slice() else {
        return None;
    };
    Some(Rstream {
        microseconds: microseconds.parse().ok()?,
        gigabits_per_second: gigabits.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perftests_last_row_is_found() {
        let text = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                    65536      5000             4444.61            4444.11		   0.071106\n---\n";
        assert_eq!(
            figures(text).as_deref(),
            Some(&[65536.0, 5000.0, 4444.61, 4444.11, 0.071106][..])
        );
        let text = " 64         1000000          0.00               157.42 		   2.579129\
                    2026-11-30T03:02:23.036436Z pid 22189 DEBUG urnic_cm::rdma_cm::ids: id 1\n---\n";
        assert_eq!(
            figures(text).as_deref(),
            Some(&[64.0, 1e6, 0.0, 157.42, 2.579129][..])
        );
        assert_eq!(figures("nothing\n1\n"), None);
    }

    #[test]
    fn rstreams_last_columns_are_found() {
        let text = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\n\
                    custom    64      1       10k     1.2m        0.12s      0.08       6.01\n";
        let found = transfer(text).expect("a line");
        assert_eq!((found.gigabits_per_second, found.microseconds), (0.08, 6.01));
        assert!(transfer("rdma_resolve_addr: no").is_none());
    }
}
