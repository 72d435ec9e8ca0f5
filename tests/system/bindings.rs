//! Bindings of other languages, by their own examples.

use std::ffi::OsStr;

use urnic_tests::build::tree;
use urnic_tests::debian::script;
use urnic_tests::program::Program;
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

const IDENTITIES: [&str; 2] = ["iwarp", "roce"];

/// The Python that sees Debian's packages; another one may come first in the path.
const DEBIANS_PYTHON: &str = "/usr/bin/python3";

/// A program that sees a NIC of this identity.
fn with(identity: &str, name: impl AsRef<OsStr>) -> Program {
    Program::new(name).env("URNIC_IDENTITY", identity)
}

#[test]
fn the_ibverbs_crates_loopback_example_runs() {
    let example = or_skip!(script("ibverbs-loopback", &[]));
    for identity in IDENTITIES {
        let text = with(identity, &example).run().success();
        assert!(
            text.contains("sent") && text.contains("received"),
            "{identity}: {text}"
        );
    }
}

#[test]
#[ignore = "builds some 130 crates first"]
fn the_sideway_crates_tests_pass() {
    let folder = or_skip!(script("sideway", &[]));
    for identity in IDENTITIES {
        for test in [
            "test_atomic",
            "test_cq",
            "test_mr_and_cq",
            "test_post_send",
            "test_qp",
        ] {
            let text = with(identity, format!("{folder}/{test}")).run().success();
            assert!(
                text.contains("test result: ok") && !text.contains(" 0 passed"),
                "{identity}: {text}"
            );
        }
    }
}

#[test]
#[ignore = "builds some 130 crates first"]
fn the_sideway_crates_examples_run() {
    let folder = or_skip!(script("sideway", &[]));
    for identity in IDENTITIES {
        let example = |name: &str| with(identity, format!("{folder}/{name}"));
        for (name, shown) in [("ibv_devinfo", "urnic0"), ("show_gids", "urnic0")] {
            let text = example(name).run().success();
            assert!(text.contains(shown), "{identity}: {text}");
        }
        for name in ["rc_pingpong", "rc_pingpong_split"] {
            Pair::new(&example(name).line("-d urnic0 -g 0")).succeeds();
        }
        // With the connection manager; with -q, the program itself moves its queue pairs to the
        // next states.
        for how in ["-c 20", "-c 20 -q"] {
            let port = free_port();
            let cmtime = example("cmtime").line(&format!("-p {port} {how}"));
            let mut server = cmtime.clone().line("-b 127.0.0.1").spawn();
            server.wait_until_listening(port);
            let text = cmtime.line("-s 127.0.0.1").run().success();
            assert!(text.contains("Disconnect"), "{identity}: {text}");
            server.wait().success();
        }
    }
}

#[test]
fn a_datagram_of_pyverbs_arrives() {
    or_skip!(pyverbs());
    let script = tree().join("tests/programs/ud.py");
    let text = with("roce", DEBIANS_PYTHON).arg(script).run().success();
    assert!(text.contains("received datagram of pyverbs"), "{text}");
}

/// Checks that pyverbs is installed.
fn pyverbs() -> Result<(), String> {
    let found = Program::plain(DEBIANS_PYTHON)
        .line("-c")
        .arg("import pyverbs")
        .run();
    match found.ok() {
        true => Ok(()),
        false => Err("python3-pyverbs is not installed".to_owned()),
    }
}
