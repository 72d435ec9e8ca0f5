//! The identity of a RoCE NIC: the distribution's programs, with ends of both identities.

use std::net::Ipv6Addr;
use std::time::Duration;

use urnic_tests::netns::Netns;
use urnic_tests::program::{Ended, Program};
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, compiled, or_skip};

use crate::devices::gids;
use crate::rdma_cm::{at_port, but_for_lost_races};

pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// A program that sees a RoCE NIC.
pub(crate) fn roce(name: &str) -> Program {
    Program::new(name).env("URNIC_IDENTITY", "roce")
}

#[test]
fn ibv_devinfo_shows_a_roce_nic() {
    or_skip!(installed("ibv_devinfo"));
    let text = roce("ibv_devinfo").arg("-v").run().success();
    for shown in [
        "hca_id:\turnic0",
        "transport:\t\t\tInfiniBand (0)",
        "link_layer:\t\tEthernet",
        "port_lid:\t\t0",
        "RoCE v2",
    ] {
        assert!(text.contains(shown), "no {shown:?} in:\n{text}");
    }
    let listed = gids(&roce("ibv_devinfo").arg("-v"));
    assert_eq!(listed[0], listed[1]);
    assert!(listed[1].is_unicast_link_local(), "{listed:?}");
    assert!(listed[3].to_ipv4_mapped().is_some(), "{listed:?}");
}

/// Mooncake, for example, takes the first GID of an IPv4 address that it likes.
#[test]
fn loopback_has_gids_only_in_place_of_other_addresses() {
    or_skip!(installed("ibv_devinfo"));
    let [host, _peer] = or_skip!(Netns::pair());
    let alone = or_skip!(Netns::new());
    let gids_of = |netns: &Netns| gids(&netns.program(roce("ibv_devinfo").arg("-v")));
    let both_types = |gids: &[&str]| -> Vec<Ipv6Addr> {
        let gids = gids.iter().map(|gid| gid.parse().expect("a GID"));
        gids.flat_map(|gid| [gid; 2]).collect()
    };
    let listed = gids_of(&host);
    let first = ["fe80::5efe:a4d:1", "::ffff:10.77.0.1", "fd77::1"];
    assert_eq!(listed[..6], both_types(&first));
    // The last address is veth0's own link-local one.
    assert!(
        listed.len() == 8 && listed[7].is_unicast_link_local(),
        "{listed:?}"
    );
    let sysfs = "cat /sys/class/infiniband/urnic0/ports/1/gids/*";
    let shown = host.program(roce("sh").args(["-c", sysfs])).run().success();
    assert_eq!(shown.lines().count(), 8, "{shown}");
    let loopback = ["fe80::5efe:7f00:1", "::ffff:127.0.0.1", "::1"];
    assert_eq!(gids_of(&alone), both_types(&loopback));
    for netns in [&host, &alone] {
        for (name, options) in [
            ("ibv_rc_pingpong", "-g 0 -n 200"),
            ("ibv_ud_pingpong", "-g 0 -n 200"),
            ("ib_send_lat", "-F -R -n 300"),
            ("ib_send_lat", "-F -c UD -R -n 300"),
        ] {
            or_skip!(installed(name));
            let mut pair = Pair::new(&roce(name).line(options)).at("127.0.0.1").within(LIMIT);
            (pair.server, pair.client) = (netns.program(pair.server), netns.program(pair.client));
            pair.succeeds();
        }
    }
}

#[test]
fn ping_pong_with_the_gid_that_programs_hard_code() {
    or_skip!(installed("ibv_rc_pingpong"));
    let gids = gids(&roce("ibv_devinfo").arg("-v")).len();
    for index in 0..gids {
        let pair = Pair::new(&roce("ibv_rc_pingpong").line(&format!("-c -g {index} -n 200")));
        for end in [pair.succeeds().server, pair.succeeds().client] {
            assert!(end.output.contains("200 iters in"), "{end}");
        }
    }
}

/// Runs a server and a client of these identities on a free port.
pub(crate) fn both(program: &str, identities: [&str; 2], server: &str, client: &str) -> (Ended, Ended) {
    let port = free_port();
    let with = |identity: &str, options: &str| {
        Program::new(program)
            .env("URNIC_IDENTITY", identity)
            .line(&format!("{options} -p {port}"))
    };
    let (server, client) = (with(identities[0], server), with(identities[1], client));
    at_port(port, &server, &client, LIMIT)
}

const ROCE: [&str; 2] = ["roce", "roce"];
const MIXED: [[&str; 2]; 3] = [ROCE, ["roce", "iwarp"], ["iwarp", "roce"]];

#[track_caller]
fn succeed(program: &str, identities: [&str; 2], server: &str, client: &str) {
    let (server, client) = but_for_lost_races(|| both(program, identities, server, client));
    client.success();
    server.success();
}

#[test]
fn rping_between_ends_of_both_identities() {
    or_skip!(installed("rping"));
    for identities in MIXED {
        for options in ["-C 10", "-C 200 -S 65535 -V"] {
            let client = format!("-c -a 127.0.0.1 {options}");
            succeed("rping", identities, &format!("-s {options}"), &client);
        }
    }
    succeed("rping", ROCE, "-s -a ::1 -C 10", "-c -a ::1 -C 10");
}

#[test]
fn a_hundred_connections_between_ends_of_both_identities() {
    or_skip!(installed("ucmatose"));
    for identities in MIXED {
        succeed("ucmatose", identities, "-c 100", "-c 100 -s 127.0.0.1");
    }
}

/// Both ends have the same identity: rsockets send Writes with immediate data on InfiniBand, and
/// Sends on iWARP.
#[test]
fn rsockets() {
    or_skip!(installed("rstream"));
    let options = "-S 4096 -I 200 -C 4";
    succeed("rstream", ROCE, options, &format!("{options} -s 127.0.0.1"));
}

#[test]
fn perftest_with_exchanged_numbers_and_by_connection_manager() {
    or_skip!(installed("ib_send_bw"));
    for name in ["ib_send_lat", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"] {
        for options in ["", "-R", "-x 3"] {
            Pair::new(&roce(name).line(&format!("-F -n 200 {options}")))
                .within(LIMIT)
                .succeeds();
        }
    }
}

#[test]
fn a_completed_write_is_in_the_peers_memory() {
    let program = or_skip!(compiled("delivered"));
    let delivered = Program::new(program)
        .env("URNIC_IDENTITY", "roce")
        .line("-s 4096 -n 3000");
    let server = Pair::new(&delivered).within(LIMIT).succeeds().server;
    assert!(server.output.contains("3000 rounds, 0 stale"), "{server}");
}

/// UCX polls, requests an event, and sleeps.
#[test]
fn completions_before_the_request_cause_one_event() {
    let program = or_skip!(compiled("missed_events"));
    let program = Program::new(program);
    program
        .clone()
        .env("URNIC_IDENTITY", "roce")
        .arg("reported")
        .run()
        .success();
    program.arg("unreported").run().success();
}
