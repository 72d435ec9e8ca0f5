//! The limits of the verbs, and every kind of registration: our own programs, which check
//! themselves.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::served::{Served, in_process};
use urnic_tests::{compiled, or_skip};

/// A connection per request.
const LIMIT: Duration = Duration::from_secs(180);
/// GiBs, of which the first touch of each page is the machine's own work.
const SLOW: Duration = Duration::from_secs(300);

/// The output of `tests/programs/states.c`.
fn states() -> Result<String, String> {
    // The warnings would be between the lines of the program.
    let program = Program::new(compiled("states")?).env("URNIC_REFUSALS", "false");
    Ok(program.run_for(LIMIT).success())
}

#[test]
fn vrb_q_02_each_state_takes_or_refuses_requests() {
    let text = or_skip!(states());
    // 22 is EINVAL; a completion is ID=STATUS, and status 5 is a flush.
    let expected = "RESET: send 22, built 22, receive 0\n\
                    INIT: send 22, built 22, receive 0\n\
                    INIT completes:\n\
                    RTR: send 0, built 0, receive 0\n\
                    RTR completes:\n\
                    RTS: send 0, built 0, receive 0\n\
                    RTS completes: 1=0 2=0 1=0 2=0\n\
                    the peer completes: 10=0 11=0 12=0 13=0\n\
                    ERR: send 0, built 0, receive 0\n\
                    ERR completes: 3=5 3=5 1=5 2=5 3=5\n\
                    SQD: send 22, built 22\n";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn vrb_m_06_inline_data_is_copied_when_it_is_posted() {
    let text = or_skip!(states());
    assert!(text.ends_with("inline: 1, one byte more: 22\nkept\n"), "{text}");
}

#[test]
fn memory_is_registered_in_every_way() {
    or_skip!(in_process("the next test is the other device's"));
    let text = Program::new(or_skip!(compiled("regions")))
        .run_for(LIMIT)
        .success();
    for shown in ["zero-based", "named", "relaxed", "on demand", "implicit"] {
        assert!(text.contains(&format!("{shown}: there and back")), "{text}");
    }
    if text.contains("huge pages: none") {
        urnic_tests::skip::report("the part with huge pages: the machine has none");
    }
}

#[test]
fn a_served_device_registers_present_memory_only() {
    let served = Served::start();
    let program = Program::new(or_skip!(compiled("regions"))).env("URNIC_DEVICE", served.device());
    let text = program.run_for(LIMIT).success();
    for shown in ["zero-based: there and back", "on demand: not on this device"] {
        assert!(text.contains(shown), "{text}");
    }
}

#[test]
fn regions_of_files_that_can_be_mapped() {
    or_skip!(in_process("the device needs the program's descriptor"));
    let ended = Program::new(or_skip!(compiled("dmabuf"))).run_for(LIMIT);
    assert!(ended.ok(), "{ended}");
}

#[test]
fn a_served_device_has_no_regions_of_files() {
    let program = Program::new(or_skip!(compiled("dmabuf"))).arg("-u");
    let served = Served::start();
    let ended = program.env("URNIC_DEVICE", served.device()).run_for(LIMIT);
    assert!(ended.ok() && ended.output.contains("not supported"), "{ended}");
}

#[test]
fn the_limits_of_verbs_hold_in_one_program() {
    let text = Program::new(or_skip!(compiled("extents")))
        .run_for(SLOW)
        .success();
    for shown in [
        "a GiB: sent, written and read",
        "16 elements: gathered and scattered",
        "vectors: an event on each",
        "drain: the last request is flushed last",
        "moderation: events for four, or for the time",
        "one poll: more completions than the queue has entries",
    ] {
        assert!(text.contains(shown), "{text}");
    }
}

#[test]
fn contexts_of_one_file_share_its_objects_only() {
    let text = Program::new(or_skip!(compiled("imported")))
        .run_for(LIMIT)
        .success();
    for shown in [
        "shared: the same domain and region, whichever way the fd was dup'd",
        "events: to the context of their object",
        "endings: destroyed once, by either side; kept while an fd is open",
        "device memory: seen by both",
        "wrong: other files and invalid handles are refused",
        "elsewhere: refused to other processes",
        "repeated: no descriptor is leaked",
        "abandoned: destroyed with the file",
    ] {
        assert!(text.contains(shown), "{text}");
    }
}
