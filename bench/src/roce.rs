//! Datagrams, and UCX over urnic: the identity of a RoCE NIC.

use crate::place::Place;
use crate::table::{Aim, Row, tried};
use crate::{ours, raw, ucx};

/// Microseconds that UCX itself needs for a tagged message.
const UCX_ITSELF: f64 = 0.3;

/// The rows, in the order of [`measure`].
pub(crate) fn rows() -> Vec<Row> {
    vec![
        Row::new(
            "roce: ib_send_lat -c UD 8 B",
            "us",
            "raw UDP, spinning",
            Aim::AtMost(1.3),
        ),
        Row::new(
            "roce: UCX tag_lat 8 B",
            "us",
            "ib_send_lat + 0.3 us",
            Aim::AtMost(1.2),
        ),
        Row::new("roce: UCX tag_lat 8 B", "us", "UCX over TCP", Aim::AtMost(1.0)),
        Row::new(
            "roce: UCX tag_bw 64 B, messages",
            "M/s",
            "UCX over TCP",
            Aim::AtLeast(1.0),
        ),
    ]
}

/// Measures one round.
pub(crate) fn measure(rows: &mut [Row]) {
    let mut rows = rows.iter_mut();
    let mut add = |ours, theirs| {
        if let Some(row) = rows.next() {
            row.add(ours, Some(theirs));
        }
    };
    let here = &Place::here();
    let plain = tried(|| Ok(raw::ping_pong(here, "udp", 8)));
    let datagrams = tried(|| ours::roce_latency("ib_send_lat", "-c UD"));
    add(datagrams.map(|lat| lat.median), plain.map(|raw| raw.median));

    let connected = tried(|| ours::roce_latency("ib_send_lat", ""));
    let by_ucx = tried(|| ucx::latency(here, &ucx::over_urnic(), 8));
    let over_tcp = tried(|| ucx::latency(here, &ucx::over_tcp(here), 8));
    add(by_ucx.clone(), connected.map(|lat| lat.median + UCX_ITSELF));
    add(by_ucx, over_tcp);

    let rate = |program| tried(move || ucx::messages(here, &program, 64, 1_000_000));
    add(rate(ucx::over_urnic()), rate(ucx::over_tcp(here)));
}
