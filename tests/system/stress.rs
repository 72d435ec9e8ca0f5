//! Random programs of legal verbs over many queue pairs, against a model of memory and completions
//! (`tests/stress`). A failure prints the seed; `URNIC_STRESS_SEED` sets another: each run of the
//! ten minutes has a new one.

use std::time::{Duration, SystemTime};

use urnic_tests::program::Program;
use urnic_tests::served::{Served, in_process};
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip};

/// The seed from the environment, else `usual`.
fn seed(usual: u32) -> String {
    std::env::var("URNIC_STRESS_SEED").unwrap_or_else(|_| usual.to_string())
}

/// A new seed each time.
fn any() -> u32 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.subsec_nanos() ^ now.as_secs() as u32)
}

#[track_caller]
fn plays(program: Program, seed: &str, options: &str, limit: Duration) {
    or_skip!(installed("ibv_devices"));
    println!("seed {seed}");
    ends_well(program.args(["--seed", seed]).line(options), limit);
}

#[track_caller]
fn ends_well(program: Program, limit: Duration) {
    let ended = program.run_for(limit);
    assert!(ended.ok(), "{ended}");
    print!("{}", ended.output);
}

fn stress() -> Program {
    Program::new(env!("CARGO_BIN_EXE_stress"))
}

/// This many rounds take seconds; the rest is for busy machines.
const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn random_programs_between_two_processes() {
    plays(stress(), &seed(1), "--rounds 700 --processes 2", LIMIT);
}

#[test]
fn random_programs_between_queue_pairs_of_one_process() {
    plays(stress(), &seed(2), "--rounds 700 --processes 1", LIMIT);
}

#[test]
fn random_programs_of_two_functions_of_a_served_device() {
    let served = Served::start();
    let program = stress().env("URNIC_DEVICE", served.device());
    plays(program, &seed(3), "--rounds 200 --processes 2", LIMIT);
}

#[test]
#[ignore = "ten minutes"]
fn random_programs_for_ten_minutes() {
    let limit = Duration::from_secs(700);
    plays(stress(), &seed(any()), "--seconds 300 --processes 2", limit);
    plays(
        stress(),
        &seed(any()),
        "--seconds 300 --processes 1 --links 24",
        limit,
    );
}

/// Children that are killed at random moments, some of them stopped before, and replaced, while
/// both ends of their connections access each other's memory.
fn kills() -> Result<Program, String> {
    let program = Program::new(compiled("kills")?);
    // Requests to a peer that is gone wait for its return no longer.
    Ok(program.env("URNIC_SET", "native.fin_grace_ms=5"))
}

#[test]
fn shm_18_killed_children_harm_no_process() {
    let kills = or_skip!(kills());
    ends_well(kills.args(["-s", &seed(any())]).line("-n 200000"), LIMIT);
}

#[test]
fn killed_children_harm_no_process_over_tcp() {
    let kills = or_skip!(kills()).env("URNIC_SAME_HOST", "off");
    ends_well(kills.args(["-s", &seed(any())]).line("-n 20000"), LIMIT);
}

#[test]
fn children_that_are_killed_harm_no_function_of_their_server() {
    let served = Served::start();
    let kills = or_skip!(kills()).env("URNIC_DEVICE", served.device());
    ends_well(kills.args(["-s", &seed(any())]).line("-n 20000"), LIMIT);
}

/// A peer that is killed while a message of its own waits for a receive.
fn held() -> Result<Program, String> {
    in_process("the peer's device is to stop with its program")?;
    let program = Program::new(compiled("held")?);
    Ok(program.env("URNIC_SET", "native.fin_grace_ms=50"))
}

#[test]
fn no_request_waits_for_a_dead_peer_without_a_receive() {
    let held = or_skip!(held());
    ends_well(held.env("URNIC_SAME_HOST", "auto"), LIMIT);
}

#[test]
fn no_request_waits_for_a_dead_peer_without_a_receive_tcp() {
    let held = or_skip!(held()).env("URNIC_SAME_HOST", "off");
    ends_well(held.arg("-r"), LIMIT);
}

#[test]
#[ignore = "long: make soak"]
fn shm_18_ten_million_operations_with_children_that_are_killed() {
    let kills = or_skip!(kills());
    ends_well(
        kills.args(["-s", &seed(any())]).line("-n 10000000"),
        Duration::from_secs(1800),
    );
}
