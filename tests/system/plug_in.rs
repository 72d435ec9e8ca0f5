//! Programs handle their file descriptors, threads and processes freely; the plug-in neither
//! disturbs them nor breaks.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip, plugin};

/// Runs one trial of `tests/programs/plug_in.c`.
fn trial(name: &str) {
    let program = Program::new(or_skip!(compiled("plug_in"))).arg(name);
    let text = program.run().success();
    assert_eq!(text, "ok\n");
}

#[test]
fn a_thread_blocked_in_open_or_write_can_be_cancelled() {
    trial("cancel");
}

#[test]
fn a_loop_that_closes_every_fd_spares_the_device() {
    trial("close-loop");
}

#[test]
fn close_range_spares_the_device() {
    trial("close-range");
}

#[test]
fn closefrom_spares_the_device() {
    trial("closefrom");
}

#[test]
fn the_devices_fds_are_closed_to_the_program() {
    trial("device-fds");
}

#[test]
fn dup2_over_a_channel_ends_the_channel() {
    trial("dup2");
}

#[test]
fn a_forked_child_opens_a_device_of_its_own() {
    trial("fork");
}

#[test]
fn forks_during_opens_of_other_threads_do_not_hang() {
    trial("fork-threads");
}

#[test]
fn no_call_hangs_in_a_child_of_a_process_with_threads() {
    let program = Program::new(or_skip!(compiled("forked")));
    let ended = program.run_for(Duration::from_secs(300));
    assert!(ended.ok() && ended.output.ends_with("answered\n"), "{ended}");
}

#[test]
fn children_that_share_memory_until_exec_change_nothing() {
    trial("spawn");
}

#[test]
fn a_thousand_rounds_leave_no_fd() {
    trial("rounds");
}

#[test]
fn many_threads_open_and_close_at_once() {
    trial("threads");
}

#[test]
fn signal_handlers_may_use_files() {
    trial("signals");
}

#[test]
fn the_files_are_found_by_every_path() {
    trial("files");
}

#[test]
fn the_device_file_takes_the_commands_of_libibverbs_only() {
    trial("device-file");
}

#[test]
fn a_second_copy_of_the_plug_in_stands_aside() {
    or_skip!(installed("ibv_devices"));
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "second-copy");
    let copy = folder.file("liburnic.so");
    std::fs::copy(plugin(), &copy).unwrap();
    let both = format!("{} {}", plugin().display(), copy.display());
    // The copy twice: preloaded after the first, and as the driver that libibverbs would load.
    for pabi in [34, 57, 59, 64, 65] {
        let _ = std::os::unix::fs::symlink(&copy, folder.file(&format!("liburnic-rdmav{pabi}.so")));
    }
    let drivers = folder.file("liburnic");
    let text = Program::new("ibv_devices")
        .plugin_at(&both)
        .env("IBV_DRIVERS", &drivers)
        .run()
        .success();
    assert_eq!(text.matches("urnic0").count(), 1, "{text}");
}

/// libfabric overwrites the code of munmap(2) after it opened the device: a new thread must not be
/// in it.
#[test]
fn threads_have_started_when_a_device_is_open() {
    let printed = Program::new(or_skip!(compiled("arenas"))).run().success();
    assert!(printed.contains("all there"), "{printed}");
}
