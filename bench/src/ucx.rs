//! UCX's own benchmark with Debian's binaries, over its TCP transport and over urnic.

use std::time::Duration;

use urnic_tests::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use crate::place::Place;
use crate::table::Measured;

/// A program of UCX with UCX's own TCP, on the interface of this place, as urnic and raw TCP use
/// it; by default UCX would choose another.
pub(crate) fn with_tcp(place: &Place, program: Program) -> Program {
    let program = program
        .env("UCX_TLS", "tcp")
        .env("UCX_NET_DEVICES", place.interface);
    if !place.is_two_hosts() {
        return program;
    }
    // UCX finds network interfaces in /sys, which shows those of the namespace where it was
    // mounted.
    let mount = "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"";
    program.through(["unshare", "--mount", "sh", "-c", mount])
}

/// A program of UCX with shared memory and the kernel's copies between processes.
pub(crate) fn with_memory(program: Program) -> Program {
    program.env("UCX_TLS", "self,sm")
}

/// UCX over TCP.
pub(crate) fn over_tcp(place: &Place) -> Program {
    with_tcp(place, Program::plain("ucx_perftest"))
}

/// UCX over urnic's RC queue pairs.
pub(crate) fn over_urnic() -> Program {
    Program::new("ucx_perftest")
        .env("URNIC_IDENTITY", "roce")
        .env("UCX_TLS", "rc,ud,self")
}

/// UCX over shared memory.
pub(crate) fn over_memory() -> Program {
    with_memory(Program::plain("ucx_perftest"))
}

/// The numbers of the result of a test: iterations, median, average and overall latency, bandwidths
/// and message rates.
fn result(place: &Place, ucx: &Program, test: &str) -> Measured<Vec<f64>> {
    installed("ucx_perftest")?;
    let port = free_port();
    let server = ucx.clone().line(&format!("-p {port}"));
    let mut server = place.server(&server).spawn();
    server.wait_until_listening(port);
    let test = format!("{} -p {port} -f {test}", place.address);
    let client = ucx.clone().line(&test);
    let text = place.client(&client).run_for(Duration::from_secs(120)).success();
    server.wait().success();
    let numbers = |line: &str| {
        let words = line.split_whitespace();
        words.filter_map(|word| word.parse().ok()).collect::<Vec<f64>>()
    };
    text.lines()
        .rev()
        .map(numbers)
        .find(|row| row.len() >= 8)
        .ok_or_else(|| "ucx_perftest printed no result".to_owned())
}

/// Tagged messages per second, in millions.
pub(crate) fn messages(place: &Place, ucx: &Program, size: usize, count: u64) -> Measured<f64> {
    let row = result(place, ucx, &format!("-t tag_bw -s {size} -n {count}"))?;
    row.last()
        .map(|rate| rate / 1e6)
        .ok_or_else(|| "no rate".to_owned())
}

/// Median of half a round trip of a tagged message, in microseconds.
pub(crate) fn latency(place: &Place, ucx: &Program, size: usize) -> Measured<f64> {
    let row = result(place, ucx, &format!("-t tag_lat -s {size} -n 50000"))?;
    row.get(1).copied().ok_or_else(|| "no latency".to_owned())
}

/// Bandwidth of tagged messages in MiB/s.
pub(crate) fn bandwidth(place: &Place, ucx: &Program, size: usize, count: u64) -> Measured<f64> {
    // iterations, median, average and overall latency, average and overall bandwidth, rates
    let row = result(place, ucx, &format!("-t tag_bw -s {size} -n {count}"))?;
    row.get(5).copied().ok_or_else(|| "no bandwidth".to_owned())
}
