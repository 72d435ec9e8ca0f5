//! `ibv_rc_pingpong`, as the distribution ships it, both ends on this machine.

use std::time::Duration;

use urnic_tests::debian::Debian;
use urnic_tests::leftovers::XrcDomains;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, or_skip, skip};

use crate::devices::gids;

fn pingpong(options: &str) -> Pair {
    Pair::new(&Program::new("ibv_rc_pingpong").line(options))
}

/// Runs it and checks that both ends counted as many exchanges as they should.
#[track_caller]
fn exchanges(pair: &Pair, iterations: u64) {
    let both = pair.succeeds();
    for end in [both.server, both.client] {
        assert!(end.output.contains(&format!("{iterations} iters in")), "{end}");
    }
}

#[test]
fn default() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(&pingpong(""), 1000);
}

#[test]
fn with_an_ipv4_gid() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(&pingpong("-g 0"), 1000);
}

#[test]
fn with_an_ipv6_gid() {
    or_skip!(installed("ibv_rc_pingpong"));
    let gids = gids(&Program::new("ibv_devinfo").arg("-v"));
    let index = gids.iter().position(|gid| gid.to_ipv4_mapped().is_none());
    let index = or_skip!(index.ok_or("this machine has no IPv6 address"));
    exchanges(&pingpong(&format!("-g {index}")), 1000);
}

#[test]
fn with_every_gid() {
    or_skip!(installed("ibv_rc_pingpong"));
    let count = gids(&Program::new("ibv_devinfo").arg("-v")).len();
    for index in 0..count {
        exchanges(&pingpong(&format!("-g {index} -n 100")), 100);
    }
}

#[test]
fn sleeping_on_events() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(&pingpong("-e"), 1000);
    exchanges(&pingpong("-e -g 0 -n 5000"), 5000);
}

#[test]
fn one_receive_posted_at_a_time() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(&pingpong("-r 1"), 1000);
    exchanges(&pingpong("-r 1 -e"), 1000);
}

#[test]
fn with_its_data_checked() {
    or_skip!(installed("ibv_rc_pingpong"));
    for size in [1, 4096, 100_000] {
        let both = pingpong(&format!("-c -s {size} -n 500")).succeeds();
        for end in [both.server, both.client] {
            assert!(!end.output.contains("invalid data"), "{end}");
        }
    }
}

#[test]
fn from_one_byte_to_eight_mebibytes() {
    or_skip!(installed("ibv_rc_pingpong"));
    for size in [1, 2, 3, 64, 1000, 4096, 65_536, 1_048_577, 8_388_608] {
        let iterations = if size > 100_000 { 20 } else { 200 };
        exchanges(&pingpong(&format!("-c -s {size} -n {iterations}")), iterations);
    }
}

#[test]
fn two_hundred_thousand_exchanges() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(&pingpong("-n 200000").within(Duration::from_secs(240)), 200_000);
}

#[test]
fn fifty_runs_in_a_row() {
    or_skip!(installed("ibv_rc_pingpong"));
    (0..50).for_each(|_| exchanges(&pingpong("-n 50"), 50));
}

#[test]
#[ignore = "long: make soak"]
fn five_hundred_runs_in_a_row() {
    or_skip!(installed("ibv_rc_pingpong"));
    (0..500).for_each(|_| exchanges(&pingpong(""), 1000));
}

#[test]
fn a_server_whose_client_never_comes_can_be_ended() {
    or_skip!(installed("ibv_rc_pingpong"));
    let port = urnic_tests::wait::free_port();
    let mut server = Program::new("ibv_rc_pingpong")
        .args(["-p", &port.to_string()])
        .spawn();
    server.wait_until_listening(port);
    server.signal(rustix::process::Signal::TERM);
    assert!(!server.wait().ok());
}

#[test]
fn in_the_other_debian() {
    let debian = or_skip!(Debian::other());
    for options in ["", "-g 0 -e", "-c -s 100000"] {
        exchanges(
            &Pair::new(&debian.program(Program::new("ibv_rc_pingpong").line(options))),
            1000,
        );
    }
}

#[test]
fn between_two_debians() {
    let debian = or_skip!(Debian::other());
    or_skip!(installed("ibv_rc_pingpong"));
    let mut pair = pingpong("-g 0");
    pair.server = debian.program(pair.server);
    exchanges(&pair, 1000);
}

#[test]
fn with_crc_off_and_with_markers() {
    or_skip!(installed("ibv_rc_pingpong"));
    exchanges(
        &pingpong("-c -s 5000")
            .env("URNIC_MPA_CRC", "false")
            .env("URNIC_LOG", "off"),
        1000,
    );
    exchanges(&pingpong("-c -s 5000").env("URNIC_MPA_MARKERS", "true"), 1000);
}

#[test]
fn one_side_only_may_request_markers() {
    or_skip!(installed("ibv_rc_pingpong"));
    for wants in [true, false] {
        let mut pair = pingpong("-c -s 5000");
        pair.server = pair.server.env("URNIC_MPA_MARKERS", wants.to_string());
        pair.client = pair.client.env("URNIC_MPA_MARKERS", (!wants).to_string());
        exchanges(&pair, 1000);
    }
}

#[test]
fn sixteen_queue_pairs_at_a_shared_receive_queue() {
    or_skip!(installed("ibv_srq_pingpong"));
    exchanges(&Pair::new(&Program::new("ibv_srq_pingpong")), 1000);
}

#[test]
fn unsupported_transports_are_refused_with_a_message() {
    or_skip!(installed("ibv_ud_pingpong"));
    let domains = XrcDomains::of_pingpong();
    for (name, words) in [
        ("ibv_xsrq_pingpong", "Couldn't Open the XRC Domain 95"),
        ("ibv_ud_pingpong", "Couldn't create QP"),
        ("ibv_uc_pingpong", "Couldn't create QP"),
    ] {
        if let ("ibv_xsrq_pingpong", Err(reason)) = (name, &domains) {
            skip::report(&format!("{name}: {reason}"));
            continue;
        }
        let ended = Program::new(name).run();
        assert!(!ended.ok() && ended.output.contains(words), "{ended}");
    }
}
