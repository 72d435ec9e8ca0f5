//! Ordinary users, and two of them on one machine.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, OTHER_USER, Staged};
use urnic_tests::{Pair, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn an_ordinary_user_needs_no_permissions() {
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let staged = Staged::new();
    let info = staged.program(NOBODY, Program::new("ibv_devinfo"));
    let text = info.run().success();
    assert!(text.contains("urnic0"), "{text}");
    for line in ["ibv_rc_pingpong", "ibv_rc_pingpong -e -g 0"] {
        Pair::new(&staged.program(
            NOBODY,
            Program::new("ibv_rc_pingpong").line(&line["ibv_rc_pingpong".len()..]),
        ))
        .succeeds();
    }
}

#[test]
fn two_users_on_one_machine_reach_each_other() {
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let staged = Staged::new();
    for (server, client) in [
        (NOBODY, OTHER_USER),
        (OTHER_USER, NOBODY),
        (0, NOBODY),
        (NOBODY, 0),
    ] {
        let mut pair = Pair::new(&Program::new("ibv_rc_pingpong").line("-g 0"));
        pair.server = staged.program(server, pair.server);
        pair.client = staged.program(client, pair.client);
        pair.succeeds();
    }
}

#[test]
fn an_ordinary_user_has_datagrams() {
    or_skip!(root());
    or_skip!(installed("ibv_ud_pingpong"));
    or_skip!(installed("ib_send_bw"));
    let staged = Staged::new();
    // Few enough datagrams that none is dropped: perftest would wait for it.
    for (devices, line) in [
        ("1", "ibv_ud_pingpong -g 3 -n 200"),
        ("1", "ib_send_lat -F -c UD -x 3 -n 200"),
        ("1", "ib_send_bw -F -c UD -x 3 -n 100"),
        ("2", "ibv_ud_pingpong -d urnic1 -g 3 -n 200"),
    ] {
        let (name, options) = line.split_once(' ').expect("a program and its options");
        let program = Program::new(name)
            .env("URNIC_IDENTITY", "roce")
            .env("URNIC_DEVICES", devices)
            .line(options);
        Pair::new(&staged.program(NOBODY, program))
            .within(LIMIT)
            .succeeds();
    }
}
