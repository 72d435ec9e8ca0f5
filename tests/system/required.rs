//! `urnic run --require`.

use std::os::unix::process::ExitStatusExt;

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
    let ended = required(&["sh", "-c", "kill -TERM $$"]).run();
    assert_eq!(ended.status.signal(), Some(libc::SIGTERM));
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
    let urnic = urnic();
    let inner = [urnic.to_str().expect("a path"), "run", "--require", "--"];
    let command = ["sh", "-c", both, &port];
    let ended = required(&[&inner[..], &command].concat()).run();
    assert_eq!(ended.status.code(), Some(4));
    assert!(!ended.failure().contains("ended and"));
}

/// A command that sends SIGHUP to `urnic`, and ends with 5 when it gets it back. Where the tests
/// run, the signal may be ignored, as under nohup(1).
fn passed_on() -> Program {
    let loops = "trap 'exit 5' HUP; kill -HUP $PPID; for second in $(seq 60); do sleep 1; done";
    Program::plain("env")
        .arg("--default-signal=HUP")
        .arg(urnic())
        .line("run --require -- sh -c")
        .arg(loops)
}

#[test]
fn a_session_and_a_group_led_from_outside_the_namespace_do_no_harm() {
    let namespaces = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
    ];
    or_skip!(installed("unshare"));
    let possible = Program::plain("true").through(namespaces).run().ok();
    or_skip!(possible.then_some(()).ok_or("no user namespaces here"));
    let ended = passed_on().through(namespaces).run();
    assert_eq!(ended.status.code(), Some(5), "{ended}");
}

#[test]
fn the_command_gets_the_signals_and_its_parent_waits() {
    let ended = passed_on().run();
    assert_eq!(ended.status.code(), Some(5), "{ended}");
    // The parent of urnic ignores SIGCHLD, and so does the command.
    let ended = Program::plain("env")
        .arg("--ignore-signal=CHLD")
        .arg(urnic())
        .line("run --require -- grep SigIgn: /proc/self/status")
        .run();
    assert_eq!(ended.status.code(), Some(87));
    let ignored = ended.to_string();
    let (_, mask) = ignored.split_once("SigIgn:\t").expect("a mask");
    let mask = mask.split_whitespace().next().expect("a mask");
    let mask = u64::from_str_radix(mask, 16).expect("a number");
    assert_ne!(mask & 1 << (libc::SIGCHLD - 1), 0, "{ignored}");
}

#[test]
fn ucx_that_passes_over_an_rnic_gets_the_reason() {
    let info = or_skip!(installed("ucx_info"));
    let info = info.to_str().expect("a path");
    let ended = required(&[info, "-d"]).env("URNIC_IDENTITY", "iwarp").run();
    assert_eq!(ended.status.code(), Some(87));
    assert!(ended.failure().contains("--identity roce"));
}

/// As UCX does from 1.18 on.
const SEARCHES_WITH_UCX: &str = r#"
import ctypes
ctypes.CDLL("libuct.so.0")
count = ctypes.c_int()
ctypes.CDLL("libibverbs.so.1").ibv_get_device_list(ctypes.byref(count))
assert count.value == 1
"#;

#[test]
fn ucx_that_opens_no_rnic_gets_the_reason() {
    or_skip!(installed("ucx_info"));
    or_skip!(installed("python3"));
    for (identity, reason) in [("iwarp", "--identity roce"), ("roce", "check UCX_TLS")] {
        let ended = required(&["python3", "-c", SEARCHES_WITH_UCX])
            .env("URNIC_IDENTITY", identity)
            .run();
        assert_eq!(ended.status.code(), Some(87), "{ended}");
        let said = ended.failure();
        assert!(said.contains("opened none of urnic's: UCX"), "{said}");
        assert!(said.contains(reason), "{said}");
    }
}
