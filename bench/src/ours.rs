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

fn perftest(name: &str, options: &str) -> Option<Vec<f64>> {
    installed(name).ok()?;
    let pair = Pair::new(&Program::new(name).line("-d urnic0 -F").line(options)).within(LIMIT);
    figures(&pair.succeeds().client.output)
}

/// Half round trips of 8 bytes.
pub(crate) fn latency(name: &str) -> Option<Latency> {
    // bytes, iterations, min, max, typical (the median), average, deviation, 99 %, 99.9 %
    let row = perftest(name, "-s 8 -n 50000")?;
    Some(Latency {
        median: *row.get(4)?,
        p99: *row.get(7)?,
    })
}

/// MiB/s.
pub(crate) fn bandwidth(name: &str, size: usize, count: u64) -> Option<f64> {
    // bytes, iterations, peak, average, messages
    perftest(name, &format!("-s {size} -n {count}"))?.get(3).copied()
}

/// Millions of messages per second.
pub(crate) fn messages(name: &str, size: usize, count: u64) -> Option<f64> {
    perftest(name, &format!("-s {size} -n {count}"))?.get(4).copied()
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's completion.
pub(crate) fn doorbell_to_cqe() -> Option<f64> {
    let program = Program::new(compiled("selfpost").ok()?);
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
}
