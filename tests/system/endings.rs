//! What requests become when a connection ends, and programs that end right after their last
//! message.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{Pair, compiled, or_skip};

const IDENTITIES: [&str; 2] = ["iwarp", "roce"];
const SAME_HOST: [&str; 2] = ["auto", "off"];

#[track_caller]
fn ends_well(program: &Program) {
    for identity in IDENTITIES {
        for same_host in SAME_HOST {
            let program = program.clone().env("URNIC_IDENTITY", identity);
            let program = program.env("URNIC_SAME_HOST", same_host);
            let ended = program.run_for(Duration::from_secs(300));
            assert!(ended.ok(), "{identity}, same_host={same_host}: {ended}");
        }
    }
}

#[test]
fn vrb_c_13_no_send_succeeds_that_the_peer_did_not_receive() {
    ends_well(&Program::new(or_skip!(compiled("ends"))));
}

/// Runs the program `runs` times, over memory and over TCP; both ends succeed each time.
#[track_caller]
fn end_well_each_time(command: &str, identities: &[&str], runs: u32) {
    let (name, options) = command.split_once(' ').unwrap_or((command, ""));
    for identity in identities {
        for same_host in SAME_HOST {
            let program = Program::new(name).line(options).env("URNIC_IDENTITY", identity);
            let program = program.env("URNIC_SAME_HOST", same_host);
            for _ in 0..runs {
                Pair::new(&program).succeeds();
            }
        }
    }
}

/// Programs without a last barrier: an end leaves when it has counted its messages.
#[track_caller]
fn pingpongs(runs: u32) {
    for options in ["-n 60", "-n 60 -e"] {
        end_well_each_time(&format!("ibv_rc_pingpong {options}"), &IDENTITIES, runs);
        end_well_each_time(&format!("ibv_srq_pingpong -q 16 {options}"), &IDENTITIES, runs);
        end_well_each_time(&format!("ibv_uc_pingpong -g 0 {options}"), &["roce"], runs);
    }
}

#[test]
fn programs_may_end_after_their_last_message() {
    or_skip!(installed("ibv_srq_pingpong"));
    or_skip!(installed("ibv_uc_pingpong"));
    pingpongs(5);
}

#[test]
#[ignore = "long: make soak"]
fn programs_may_end_after_their_last_message_two_hundred_times() {
    or_skip!(installed("ibv_srq_pingpong"));
    or_skip!(installed("ib_send_bw"));
    pingpongs(200);
    for test in [
        "ib_send_lat",
        "ib_send_bw",
        "ib_write_lat",
        "ib_write_bw",
        "ib_read_lat",
        "ib_read_bw",
    ] {
        end_well_each_time(&format!("{test} -F -n 100"), &IDENTITIES, 50);
    }
}
