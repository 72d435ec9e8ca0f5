//! Program memory that disappears while it is registered is an error of a request; the program
//! handles its own faults.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use rustix::process::Signal;
use urnic_tests::build::example;
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::{Served, in_process};
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip};

/// A connection per case.
const LIMIT: Duration = Duration::from_secs(240);
/// The log line about memory that is no longer accessible.
const LINE: &str = "was unmapped, protected or truncated before";

/// The program `unmapped`, with and without CRCs.
fn unmapped(what: &str) -> Result<[Program; 2], String> {
    let program = Program::new(compiled("unmapped")?).arg(what);
    Ok(["true", "false"].map(|crc| program.clone().env("URNIC_MPA_CRC", crc)))
}

#[test]
fn unmapped_memory_at_either_end_fails_one_request() {
    for program in or_skip!(unmapped("near")) {
        let text = program.run_for(LIMIT).success();
        assert!(text.contains("near: "), "{text}");
    }
}

#[test]
fn a_target_with_unmapped_memory_continues() {
    for program in or_skip!(unmapped("far")) {
        let text = program.run_for(LIMIT).success();
        assert!(text.contains("far: "), "{text}");
    }
}

#[test]
fn a_served_device_fails_requests_for_unmapped_memory() {
    let served = Served::start();
    for program in or_skip!(unmapped("near")) {
        let program = program.env("URNIC_DEVICE", served.device());
        let text = program.run_for(LIMIT).success();
        assert!(text.contains("near: "), "{text}");
    }
}

#[test]
fn an_unmapped_region_is_logged_once() {
    or_skip!(in_process("the log is the other process's"));
    for program in or_skip!(unmapped("twice")) {
        let text = program.run_for(LIMIT).success();
        let of_it = text.lines().find_map(|line| line.strip_prefix("twice: "));
        let (key, pid) = of_it
            .and_then(|words| words.split_once(" in "))
            .unwrap_or_else(|| panic!("{text}"));
        let lines: Vec<_> = text.lines().filter(|line| line.contains(LINE)).collect();
        assert_eq!(lines.len(), 1, "{text}");
        for word in [key, pid, "0x200000000000"] {
            assert!(lines[0].contains(word), "{text}");
        }
    }
}

fn faults(what: &str) -> Result<Program, String> {
    in_process("no handler of ours otherwise")?;
    Ok(Program::new(compiled("faults")?).arg(what))
}

#[test]
fn own_faults_reach_a_handler_installed_before() {
    let text = or_skip!(faults("before")).run().success();
    assert!(text.contains("a handler from before: reported"), "{text}");
}

#[test]
fn own_faults_reach_handlers_installed_later() {
    let text = or_skip!(faults("after")).run().success();
    for what in [
        "a handler from after",
        "without SA_SIGINFO",
        "SA_NODEFER",
        "SA_RESETHAND",
        "signal",
        "sysv_signal",
        "raise",
        "ignored",
    ] {
        assert!(text.contains(&format!("{what}: reported")), "{what}:\n{text}");
    }
}

#[test]
fn children_have_fault_handlers_of_their_own() {
    let text = or_skip!(faults("children")).run().success();
    for what in ["after vfork", "in a child of fork", "after fork"] {
        assert!(text.contains(&format!("{what}: reported")), "{what}:\n{text}");
    }
}

/// Checks that the program printed `text` and was then ended by `signal`.
#[track_caller]
fn ended_by(ended: &Ended, text: &str, signal: Signal) {
    assert!(ended.output.contains(text), "{ended}");
    assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{ended}");
}

#[test]
fn a_program_ends_by_its_own_fault() {
    for (what, signal) in [
        ("die", Signal::SEGV),
        ("bus", Signal::BUS),
        ("sent", Signal::SEGV),
        ("ignored", Signal::SEGV),
    ] {
        ended_by(&or_skip!(faults(what)).run(), "recovered", signal);
    }
    let program = or_skip!(compiled("faults"));
    let script = format!("'{}' die; echo status $?", program.display());
    let text = Program::new("sh").args(["-c", &script]).run().success();
    assert!(text.contains("status 139"), "{text}");
}

const PYTHON: &str = "
import ctypes, faulthandler, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.argv[1] == 'before':
    faulthandler.enable()
verbs = ctypes.CDLL('libibverbs.so.1')
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_name.argtypes = verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
verbs.ibv_open_device.restype = ctypes.c_void_p
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
ours = [devices[n] for n in range(count.value) if verbs.ibv_get_device_name(devices[n]) == b'urnic0']
assert verbs.ibv_open_device(ours[0])
if sys.argv[1] == 'after':
    faulthandler.enable()
print('open', flush=True)
ctypes.string_at(16)
";

#[test]
fn pythons_faulthandler_reports_a_fault() {
    or_skip!(installed("python3"));
    for when in ["before", "after"] {
        let ended = Program::new("python3").args(["-c", PYTHON, when]).run();
        ended_by(&ended, "open", Signal::SEGV);
        for line in ["Fatal Python error: Segmentation fault", "in <module>"] {
            assert!(ended.output.contains(line), "{ended}");
        }
    }
}

#[test]
fn a_rust_program_reports_its_stack_overflow() {
    let ended = Program::new(example("tests", "overflow")).run();
    ended_by(&ended, "open", Signal::ABORT);
    assert!(ended.output.contains("has overflowed its stack"), "{ended}");
}
