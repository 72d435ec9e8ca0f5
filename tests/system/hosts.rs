//! `urnic hosts`: several hosts in one machine.

use std::path::Path;
use std::time::Duration;

use urnic_tests::build::{plugin, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::{Ended, Program};
use urnic_tests::skip::{self, installed};
use urnic_tests::user::{NOBODY, Staged};

const LIMIT: Duration = Duration::from_secs(60);

fn hosts(count: u32, script: &str) -> Program {
    hosts_of(&urnic(), plugin(), count, script)
}

/// `urnic hosts` with this program and this plug-in.
fn hosts_of(urnic: &Path, plugin: &Path, count: u32, script: &str) -> Program {
    Program::plain(urnic).env("URNIC_LIB", plugin).args([
        "hosts",
        &count.to_string(),
        "--",
        "sh",
        "-c",
        script,
    ])
}

/// Whether this user may make user namespaces.
fn namespaces() -> Result<(), String> {
    installed("ip")?;
    let made = Program::plain("unshare")
        .line("--user --map-root-user --net true")
        .run_for(LIMIT);
    match made.ok() {
        true => Ok(()),
        false => Err("user namespaces are denied here".to_owned()),
    }
}

/// Each host has its own GID, and reaches the other.
const PINGPONG: &str = "case $HOST in
    0) ibv_rc_pingpong -d urnic0 -g 0 -n 100 ;;
    1) tries=0
       until ibv_rc_pingpong -d urnic0 -g 0 -n 100 ${HOSTS%% *}; do
           tries=$((tries + 1))
           [ $tries -lt 100 ] || exit 1
           sleep 0.1
       done ;;
esac";

#[track_caller]
fn pingponged(ended: &Ended) {
    assert!(ended.ok(), "{ended}");
    for gid in ["GID ::ffff:192.0.2.1", "GID ::ffff:192.0.2.2"] {
        assert!(ended.output.contains(gid), "no {gid} in {ended}");
    }
    assert_eq!(ended.output.matches("100 iters in").count(), 2, "{ended}");
}

#[test]
fn two_hosts_reach_each_other() {
    or_skip!(namespaces());
    or_skip!(installed("ibv_rc_pingpong"));
    pingponged(&hosts(2, PINGPONG).run_for(LIMIT));
}

#[test]
fn an_ordinary_user_may_have_hosts() {
    or_skip!(namespaces());
    or_skip!(skip::root());
    or_skip!(installed("ibv_rc_pingpong"));
    // The build may be in a folder that only root can enter.
    let staged = Staged::new();
    let [urnic, plugin] = [urnic().as_path(), plugin()].map(|file| staged.add(file));
    let program = hosts_of(&urnic, &plugin, 2, PINGPONG);
    pingponged(&staged.program(NOBODY, program).run_for(LIMIT));
}

#[test]
fn each_host_knows_its_place_and_the_status_is_of_all() {
    or_skip!(namespaces());
    let well = hosts(3, "echo $HOST $HOST_ADDRESS of $HOSTS")
        .run_for(LIMIT)
        .success();
    let mut lines: Vec<&str> = well.lines().collect();
    lines.sort_unstable();
    let all = "192.0.2.1 192.0.2.2 192.0.2.3";
    let expected = [1, 2, 3].map(|host| format!("{} 192.0.2.{host} of {all}", host - 1));
    assert_eq!(lines, expected);
    let failed = hosts(2, "exit $((HOST * 7))").run_for(LIMIT);
    assert_eq!(failed.status.code(), Some(7), "{failed}");
    let none = hosts(0, "true").run_for(LIMIT);
    assert_eq!(none.status.code(), Some(2), "{none}");
}
