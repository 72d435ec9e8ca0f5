//! `urnic run --require`.

use urnic_tests::build::urnic;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

fn required(command: &[&str]) -> Program {
    Program::plain(urnic()).line("run --require --").args(command)
}

#[test]
fn a_program_that_must_use_the_device_fails_if_it_does_not() {
    let ended = required(&["true"]).run();
    assert_eq!(ended.status.code(), Some(87));
    assert!(
        ended
            .failure()
            .contains("true ended and did not search for RDMA devices")
    );
    or_skip!(installed("ibv_devinfo"));
    let ended = required(&["sh", "-c", "ibv_devinfo; true"]).run();
    assert_eq!(ended.status.code(), Some(87));
    assert!(
        ended
            .failure()
            .contains("opened the device, but connected no queue pair")
    );
    // The status of a program that fails stays.
    assert_eq!(required(&["sh", "-c", "exit 3"]).run().status.code(), Some(3));
    assert_eq!(
        required(&["sh", "-c", "kill -TERM $$"]).run().status.code(),
        Some(143)
    );
    assert_eq!(
        required(&["no-such-program-anywhere"]).run().status.code(),
        Some(127)
    );
}

#[test]
fn a_program_that_uses_the_device_keeps_its_status() {
    or_skip!(installed("ibv_rc_pingpong"));
    let both = "ibv_rc_pingpong -d urnic0 -g 0 -p $0 & ibv_rc_pingpong -d urnic0 -g 0 -p $0 127.0.0.1 || \
                { sleep 1; ibv_rc_pingpong -d urnic0 -g 0 -p $0 127.0.0.1; }; wait; exit 4";
    let port = free_port().to_string();
    let ended = required(&["sh", "-c", both, &port]).run();
    assert_eq!(ended.status.code(), Some(4));
    assert!(!ended.failure().contains("ended and"));
}

#[test]
fn ucx_that_passes_over_an_rnic_gets_the_reason() {
    let info = or_skip!(installed("ucx_info"));
    let info = info.to_str().expect("a path");
    let ended = required(&[info, "-d"]).env("URNIC_IDENTITY", "iwarp").run();
    assert_eq!(ended.status.code(), Some(87));
    assert!(ended.failure().contains("--identity roce"));
}
