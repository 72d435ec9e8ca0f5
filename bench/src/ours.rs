//! The distribution's perftest, and two little programs of our own, over urnic. `None` where a program is not there.

use std::time::Duration;

use urnic_tests::skip::installed;
use urnic_tests::{Pair, Program, compiled};

use crate::raw::Latency;

const LIMIT: Duration = Duration::from_secs(180);

/// What `ours::connections` finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Connections {
    /// Memory that each idle connected QP takes in its process.
    pub(crate) kibibytes: f64,
    /// Connections made per second, from INIT to the first message through.
    pub(crate) per_second: f64,
}

/// The numbers of the last line that consists of numbers only.
fn figures(text: &str) -> Option<Vec<f64>> {
    let row = |line: &str| {
        line.split_whitespace()
            .map(|word| word.parse().ok())
            .collect::<Option<Vec<f64>>>()
    };
    text.lines().rev().filter_map(row).find(|row| row.len() >= 2)
}

/// A program with that device; `None` is the one in its process.
fn program(name: impl AsRef<std::ffi::OsStr>, device: Option<&str>) -> Program {
    Program::new(name).env("URNIC_DEVICE", device.unwrap_or("inproc"))
}

fn perftest(name: &str, options: &str, device: Option<&str>) -> Option<Vec<f64>> {
    installed(name).ok()?;
    let pair = Pair::new(&program(name, device).line("-d urnic0 -F").line(options)).within(LIMIT);
    figures(&pair.succeeds().client.output)
}

/// Half round trips of 8 bytes.
pub(crate) fn latency(name: &str) -> Option<Latency> {
    // bytes, iterations, min, max, typical (the median), average, deviation, 99 %, 99.9 %
    let row = perftest(name, "-s 8 -n 50000", None)?;
    Some(Latency {
        median: *row.get(4)?,
        p99: *row.get(7)?,
    })
}

/// MiB/s.
pub(crate) fn bandwidth(name: &str, size: usize, count: u64, device: Option<&str>) -> Option<f64> {
    // bytes, iterations, peak, average, messages
    perftest(name, &format!("-s {size} -n {count}"), device)?
        .get(3)
        .copied()
}

/// Millions of messages per second.
pub(crate) fn messages(name: &str, size: usize, count: u64, device: Option<&str>) -> Option<f64> {
    perftest(name, &format!("-s {size} -n {count}"), device)?
        .get(4)
        .copied()
}

/// Millions of requests per second, by a line of options.
pub(crate) fn rate(name: &str, options: &str) -> Option<f64> {
    perftest(name, options, None)?.get(4).copied()
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's completion.
pub(crate) fn doorbell_to_cqe(device: Option<&str>) -> Option<f64> {
    let program = program(compiled("selfpost").ok()?, device);
    figures(&program.run_for(LIMIT).success())?.first().copied()
}

/// A thousand queue pairs, connected to those of another process.
pub(crate) fn connections() -> Option<Connections> {
    let pair = Pair::new(&Program::new(compiled("connections").ok()?)).within(LIMIT);
    match figures(&pair.succeeds().client.output)?.as_slice() {
        [kibibytes, per_second] => Some(Connections {
            kibibytes: *kibibytes,
            per_second: *per_second,
        }),
        _ => None,
    }
}

/// What `ours::cm_connections` finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CmConnections {
    /// Made per second, one after the other, from rdma_create_id on.
    pub(crate) per_second: f64,
    /// Median time from rdma_connect to ESTABLISHED, in microseconds.
    pub(crate) median: f64,
    /// Memory that each takes in the caller's process while idle.
    pub(crate) kibibytes: f64,
}

/// A thousand connections by rdma_cm.
pub(crate) fn cm_connections() -> Option<CmConnections> {
    let pair = Pair::new(&Program::new(compiled("cm_connections").ok()?)).within(LIMIT);
    match figures(&pair.succeeds().client.output)?.as_slice() {
        [per_second, median, kibibytes] => Some(CmConnections {
            per_second: *per_second,
            median: *median,
            kibibytes: *kibibytes,
        }),
        _ => None,
    }
}

/// What rstream finds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rstream {
    /// Of one transfer.
    pub(crate) microseconds: f64,
    /// Both directions, in turn.
    pub(crate) gigabits_per_second: f64,
}

/// rstream over rsockets, or over the kernel's: `batch` transfers of `size` bytes there, as many back, so many `times`.
pub(crate) fn rstream(rsockets: bool, size: usize, batch: u64, times: u64) -> Option<Rstream> {
    installed("rstream").ok()?;
    let port = urnic_tests::wait::free_port();
    let options = format!("-p {port} -S {size} -C {batch} -I {times}");
    let end = |more: &str| match rsockets {
        true => Program::new("rstream").line(&options).line(more),
        false => Program::plain("rstream").line(&options).line(more).line("-T s"),
    };
    let mut server = end("").spawn();
    server.listens(port);
    let client = end("-s 127.0.0.1").run_for(LIMIT);
    let said = client.success();
    server.wait();
    transfer(&said)
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
