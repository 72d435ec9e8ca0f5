//! UCX's own benchmark over its TCP transport, with Debian's binaries.

use std::time::Duration;

use urnic_tests::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use crate::table::Measured;

/// Tagged messages per second, in millions.
pub(crate) fn messages(size: usize, count: u64) -> Measured<f64> {
    installed("ucx_perftest")?;
    let port = free_port();
    // The loopback device, as urnic and raw TCP use it; by default UCX would choose another.
    let ucx = Program::plain("ucx_perftest")
        .env("UCX_TLS", "tcp")
        .env("UCX_NET_DEVICES", "lo");
    let mut server = ucx.clone().line(&format!("-p {port}")).spawn();
    server.wait_until_listening(port);
    let test = format!("127.0.0.1 -p {port} -t tag_bw -s {size} -n {count} -f");
    let text = ucx.line(&test).run_for(Duration::from_secs(120)).success();
    server.wait().success();
    // …, message rate average, message rate overall.
    let rate: f64 = text
        .lines()
        .rev()
        .find_map(|line| line.split_whitespace().last()?.parse().ok())
        .ok_or("ucx_perftest printed no rate")?;
    Ok(rate / 1e6)
}
