//! libfabric's own ping-pong with Debian's binary, over its TCP provider.

use std::time::Duration;

use urnic_tests::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use crate::place::Place;
use crate::table::Measured;

/// Mean of half a round trip of 64 bytes, in microseconds. The provider is used directly, as the
/// least that a program of libfabric can take; tagged messages take longer.
pub(crate) fn mean_latency(place: &Place) -> Measured<f64> {
    installed("fi_pingpong")?;
    let port = free_port();
    let end = |options: &str| {
        Program::plain("fi_pingpong")
            .line("-p tcp -e msg -S 64 -I 20000")
            .line(options)
    };
    let mut server = place.server(&end(&format!("-B {port}"))).spawn();
    server.wait_until_listening(port);
    let client = end(&format!("-P {port} {}", place.address));
    let text = place.client(&client).run_for(Duration::from_secs(60)).success();
    server.wait().success();
    microseconds(&text).ok_or_else(|| format!("fi_pingpong printed {text}"))
}

/// The column before the last of the last line: bytes, sent, acknowledged, total, time, MB/s,
/// microseconds, millions of transfers per second.
fn microseconds(text: &str) -> Option<f64> {
    let words: Vec<&str> = text.lines().last()?.split_whitespace().collect();
    let [.., microseconds, _rate] = words.as_slice() else {
        return None;
    };
    microseconds.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_is_found() {
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec\n\
                    64      20k     =20k     2.4m        0.28s      9.12       7.02       0.14\n";
        assert_eq!(microseconds(text), Some(7.02));
        assert_eq!(microseconds("fi_getinfo: -61\n"), None);
    }
}
