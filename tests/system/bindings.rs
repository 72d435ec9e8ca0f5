//! Bindings of other languages, by their own examples.

use urnic_tests::debian::script;
use urnic_tests::program::Program;
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

#[test]
fn the_ibverbs_crates_loopback_example_runs() {
    let example = or_skip!(script("ibverbs-loopback", &[]));
    let text = Program::new(example).run().success();
    assert!(text.contains("sent") && text.contains("received"), "{text}");
}

#[test]
#[ignore = "builds some 130 crates first"]
fn the_sideway_crates_tests_pass() {
    let folder = or_skip!(script("sideway", &[]));
    for test in [
        "test_atomic",
        "test_cq",
        "test_mr_and_cq",
        "test_post_send",
        "test_qp",
    ] {
        let text = Program::new(format!("{folder}/{test}")).run().success();
        assert!(
            text.contains("test result: ok") && !text.contains(" 0 passed"),
            "{text}"
        );
    }
}

#[test]
#[ignore = "builds some 130 crates first"]
fn the_sideway_crates_examples_run() {
    let folder = or_skip!(script("sideway", &[]));
    for (example, shown) in [("ibv_devinfo", "urnic0"), ("show_gids", "urnic0")] {
        let text = Program::new(format!("{folder}/{example}")).run().success();
        assert!(text.contains(shown), "{text}");
    }
    for example in ["rc_pingpong", "rc_pingpong_split"] {
        let program = Program::new(format!("{folder}/{example}")).line("-d urnic0 -g 0");
        Pair::new(&program).succeeds();
    }
    // With the connection manager; with -q, the program itself moves its queue pairs to the next
    // states.
    for how in ["-c 20", "-c 20 -q"] {
        let port = free_port();
        let cmtime = Program::new(format!("{folder}/cmtime")).line(&format!("-p {port} {how}"));
        let mut server = cmtime.clone().line("-b 127.0.0.1").spawn();
        server.wait_until_listening(port);
        let text = cmtime.line("-s 127.0.0.1").run().success();
        assert!(text.contains("Disconnect"), "{text}");
        server.wait().success();
    }
}
