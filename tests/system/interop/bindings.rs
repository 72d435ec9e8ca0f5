//! The integration tests of bindings of libibverbs for other languages.

use std::time::Duration;

use urnic_tests::debian::script;
use urnic_tests::or_skip;
use urnic_tests::program::Program;

use super::table::Table;

const LIMIT: Duration = Duration::from_secs(300);

/// Tests of the crate `ibverbs` that need a RoCE NIC, and the reason.
const ROCE_ONLY: [(&str, &str); 6] = [
    (
        "gid_and_device_introspection",
        "requires the transport of InfiniBand and RoCE",
    ),
    ("manual_bringup_via_modify", "requires UD"),
    ("raw_handles", "requires UD"),
    (
        "roce_route_failure_diagnostic",
        "on iWARP, RTR resolves no address",
    ),
    ("unreliable_connection", "requires UC"),
    ("unreliable_datagram", "requires UD"),
];

/// The reason why a test cannot pass with this identity.
fn reason(identity: &str, test: &str) -> Option<&'static str> {
    let known = ROCE_ONLY
        .iter()
        .find(|(name, _)| identity == "iwarp" && *name == test);
    known.map(|(_, reason)| *reason)
}

/// Names and results in the output of libtest with one thread.
fn results(printed: &str) -> Vec<(&str, &str)> {
    let tests = printed.lines().filter_map(|line| line.strip_prefix("test "));
    tests.filter_map(|test| test.split_once(" ... ")).collect()
}

#[test]
#[ignore = "make interop"]
fn the_ibverbs_crates_tests_pass_but_for_those_that_need_roce() {
    let folder = or_skip!(script("rust-ibverbs", &[]));
    let mut table = Table::new(
        "rust-ibverbs",
        "The integration tests of the Rust crate ibverbs",
        &["identity", "test", "result", ""],
    );
    let mut wrong = Vec::new();
    // On iWARP the tests of rdma_cm would wait for CONNECT_RESPONSE, an event that is InfiniBand's.
    for (identity, program, tests) in [
        ("roce", "loopback", 33),
        ("roce", "rdmacm", 3),
        ("iwarp", "loopback", 33),
    ] {
        let ran = Program::new(format!("{folder}/{program}"))
            .env("URNIC_IDENTITY", identity)
            .line("--ignored --test-threads=1")
            .run_for(LIMIT);
        let found = results(&ran.output);
        assert_eq!(found.len(), tests, "{identity}: {}", ran.output);
        for (test, result) in found {
            let reason = reason(identity, test);
            if (result == "ok") == reason.is_some() {
                wrong.push(format!("{identity}: {test}: {result}"));
            }
            table.row(&[identity, test, result, reason.unwrap_or_default()]);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
