//! What `urnic doctor` finds around a program, and whether its fix helps; and programs that
//! `urnic run` cannot give the device.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use urnic_testkit::Folder;
use urnic_tests::build::{plugin, scratch, urnic};
use urnic_tests::program::{Ended, Program};
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::{compiled, or_skip};

use super::openings::{apart, doctor, reported, wrong};

fn permit(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("our own file");
}

/// `urnic doctor`, after the lines of a script.
fn then_doctor(script: &str) -> String {
    format!("{script}\n'{}' doctor", urnic().display())
}

fn in_shell(script: &str) -> Program {
    doctor(&["sh", "-c", &then_doctor(script)])
}

/// Nothing is said about the subject any more.
#[track_caller]
fn is_well(ended: &Ended, subject: &str) {
    let found = ["WRONG", "note "].iter().any(|verdict| {
        let start = format!("{verdict} {subject}");
        ended.output.lines().any(|line| line.starts_with(&start))
    });
    assert!(!found, "{subject}: {ended}");
}

#[test]
fn doctor_reports_denied_system_calls() {
    or_skip!(installed("ibv_rc_pingpong"));
    let denied = or_skip!(compiled("denied"));
    let denied = denied.to_str().expect("our path");
    let urnic = urnic();
    let urnic = urnic.to_str().expect("our path");
    let ended = doctor(&[urnic, "doctor"]).run();
    is_well(&ended, "system calls");
    ended.success();
    for (call, verdict, lost) in [
        (
            "memfd_create",
            "WRONG",
            "`urnic stat` and device memory do not work",
        ),
        ("netlink", "WRONG", "no addresses (GIDs)"),
        ("pidfd_open", "note ", "copied twice"),
        ("process_vm_readv", "note ", "copied twice"),
        ("process_vm_writev", "note ", "copied twice"),
    ] {
        for errno in ["1", "38"] {
            let ended = doctor(&[denied, call, errno, urnic, "doctor"]).run();
            let (what, fix) = reported(&ended, &format!("{verdict} system calls"));
            let name = call.replace("netlink", "AF_NETLINK");
            assert!(what.contains(&format!("{name} fails: ")), "{call}: {ended}");
            assert!(what.contains(lost), "{call}: {ended}");
            assert!(fix.contains("seccomp"), "{call}: {ended}");
            assert_eq!(ended.status.success(), verdict == "note ", "{call}: {ended}");
        }
    }
}

/// As when the kernel gives the port to another process in between; and each time.
#[test]
fn a_port_that_was_taken_is_replaced_by_another() {
    let real = or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::inside(&scratch(), "doctor-port");
    let (first, program) = (folder.file("first"), folder.file("ibv_rc_pingpong"));
    let path = std::env::var("PATH").expect("a search path");
    let path = format!("{}:{path}", folder.path().display());
    let refused = "echo \"Couldn't listen to port $2\" >&2; exit 1";
    let once = format!(
        "mkdir '{}' 2>/dev/null || exec '{}' \"$@\"",
        first.display(),
        real.display()
    );
    for (script, well) in [(format!("{once}; {refused}"), true), (refused.to_owned(), false)] {
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("our folder");
        permit(&program, 0o755);
        let urnic = urnic();
        let ended = doctor(&[urnic.to_str().expect("our path"), "doctor"])
            .env("PATH", &path)
            .run();
        assert_eq!(ended.status.success(), well, "{ended}");
    }
    assert!(first.is_dir(), "our program was not run");
}

#[test]
fn the_fix_for_a_missing_proc_helps() {
    or_skip!(installed("ibv_rc_pingpong"));
    let flags = "-rmpf";
    // A container whose own /proc is covered in parts may mount no other.
    if !or_skip!(apart(flags, "mount -t proc proc /proc"))
        .status
        .success()
    {
        return urnic_tests::skip::report("/proc cannot be mounted here");
    }
    let closed = "mount -t tmpfs tmpfs /proc || exit 125";
    let ended = or_skip!(apart(flags, &then_doctor(closed)));
    let (what, fix) = wrong(&ended, "proc");
    assert!(what.contains("/proc is not mounted"), "{ended}");
    is_well(&ended, "plug-in  ");
    let ended = or_skip!(apart(flags, &then_doctor(&format!("{closed}\n{fix}"))));
    ended.success();
}

#[test]
fn the_fix_for_a_user_without_a_number_helps() {
    let ended = or_skip!(apart("-U", &then_doctor("")));
    let (what, fix) = wrong(&ended, "user namespace");
    assert!(what.contains("no number"), "{ended}");
    let (command, _) = fix.split_once(" COMMAND").expect("a command");
    let words: Vec<&str> = command.split(' ').collect();
    let urnic = urnic();
    let fixed = [&words[..], &[urnic.to_str().expect("our path"), "doctor"]].concat();
    is_well(&doctor(&fixed).run(), "user namespace");
}

#[test]
fn the_fixes_for_low_limits_help() {
    or_skip!(installed("ibv_rc_pingpong"));
    for (limit, subject) in [
        ("ulimit -S -f 0", "file size"),
        ("ulimit -S -f 2048", "file size"),
        ("ulimit -S -d 4096", "self-test"),
    ] {
        let ended = in_shell(limit).run();
        let (_, fix) = wrong(&ended, subject);
        assert!(fix.contains("limit"), "{ended}");
        in_shell(&format!("{limit}\n{fix}")).run().success();
    }
}

/// Growing a file beyond the limit raises a signal, which ends a program.
#[test]
fn a_low_limit_on_files_ends_no_program() {
    or_skip!(installed("ibv_devinfo"));
    let home = Folder::inside(&scratch(), "doctor-limited");
    let limited = |limit: &str| {
        let script = format!("ulimit -f {limit}; exec ibv_devinfo -d urnic0");
        let program = Program::new("sh").args(["-c", &script]);
        program.env("URNIC_PRESENT_DIR", home.path()).run()
    };
    let ended = limited("0");
    assert!(ended.status.code().is_some(), "{ended}");
    assert!(ended.output.contains("`ulimit -f unlimited`"), "{ended}");
    // The files of the device fit, what processes share does not.
    let text = limited("2048").success();
    assert!(text.contains("urnic0"), "{text}");
}

#[test]
fn the_fix_for_a_plug_in_that_cannot_be_run_helps() {
    or_skip!(installed("ibv_rc_pingpong"));
    let (noexec, home) = (
        Folder::inside(&scratch(), "doctor-noexec"),
        Folder::inside(&scratch(), "doctor-home"),
    );
    let (folder, home) = (noexec.path().display(), home.path().display());
    let mounted = format!(
        "mount -t tmpfs -o noexec tmpfs '{folder}' && cp '{}' '{folder}/liburnic.so' || exit 125\n\
         export HOME='{home}' URNIC_LIB='{folder}/liburnic.so'",
        plugin().display()
    );
    let ended = or_skip!(apart("-rm", &then_doctor(&mounted)));
    let (what, fix) = wrong(&ended, "plug-in");
    assert!(what.contains("the loader does not load it: "), "{ended}");
    let ended = or_skip!(apart("-rm", &then_doctor(&format!("{mounted}\n{fix}"))));
    is_well(&ended, "plug-in  ");
    is_well(&ended, "self-test");
}

#[test]
fn the_fixes_for_folders_of_others_help() {
    or_skip!(root());
    let homes = Folder::inside(&std::env::temp_dir(), "urnic-doctor-homes");
    let made = |name: &str, mode: u32, owner: u32| {
        let folder = homes.file(name);
        std::fs::create_dir(&folder).expect("our own folder");
        permit(&folder, mode);
        chown(&folder, Some(owner), None).expect("we are root");
        folder
    };
    let me = rustix::process::geteuid().as_raw();
    let runtime = made("runtime", 0o755, NOBODY);
    let shared = made("shared", 0o777, me);
    let taken = made("taken", 0o1777, me);
    made(&format!("taken/urnic-{me}"), 0o700, NOBODY);
    for (variable, folder, why) in [
        ("XDG_RUNTIME_DIR", runtime, "it belongs to user 65534"),
        ("XDG_RUNTIME_DIR", shared, "without the sticky bit"),
        ("XDG_RUNTIME_DIR", taken, "it belongs to user 65534"),
    ] {
        let set = format!("export {variable}='{}'", folder.display());
        let ended = in_shell(&set).run();
        let (what, fix) = reported(&ended, "note  presence folder");
        assert!(what.contains(why), "{ended}");
        let ended = in_shell(&format!("{set}\n{fix}")).run();
        let text = ended.output.clone();
        let named = folder.display().to_string();
        let still = |line: &str| line.starts_with("note  presence folder") && line.contains(&named);
        assert!(!text.lines().any(still), "{fix}: {ended}");
    }
}

/// The command that a warning recommends.
fn instead(ended: &Ended) -> String {
    let line = ended
        .output
        .lines()
        .find(|line| line.starts_with("urnic: warning: "));
    let line = line.unwrap_or_else(|| panic!("no warning: {ended}"));
    let (_, command) = line.split_once("; run instead: ").expect("a command");
    command.to_owned()
}

#[test]
fn sudo_goes_before_urnic_run() {
    or_skip!(root());
    or_skip!(installed("sudo"));
    or_skip!(installed("ibv_devices"));
    let home = Folder::inside(&scratch(), "doctor-sudo");
    let run = format!("run --set present.dir={} --", home.path().display());
    let sudo = Program::plain(urnic())
        .line(&run)
        .line("sudo -n -u root ibv_devices");
    let ended = sudo.run();
    assert!(!ended.output.contains("urnic0"), "{ended}");
    let command = instead(&ended);
    assert!(command.starts_with("sudo -n -u root "), "{ended}");
    let text = Program::plain("sh").args(["-c", &command]).run().success();
    assert!(text.contains("urnic0"), "{text}");
    // By a script, which may run other programs by sudo.
    let script = ["-c", "sudo -n true; sudo -n ibv_devices"];
    let ended = Program::plain(urnic()).line(&run).arg("sh").args(script).run();
    assert_eq!(instead(&ended), "sudo urnic run -- COMMAND", "{ended}");
    let warnings = ended.output.lines().filter(|line| line.contains("warning: "));
    assert_eq!(warnings.count(), 1, "{ended}");
}

#[test]
fn a_program_that_gains_privileges_is_run_by_root() {
    or_skip!(root());
    let devices = or_skip!(installed("ibv_devices"));
    let staged = Staged::new();
    let (devices, own) = (staged.add(&devices), staged.add(&urnic()));
    permit(&devices, 0o4755);
    let run = Program::plain(&own).line("run --").arg(&devices);
    let ended = staged.program(NOBODY, run).run();
    let warning = format!("urnic: warning: {} has the set-user-id bit", devices.display());
    let (_, rest) = ended
        .output
        .split_once(&warning)
        .unwrap_or_else(|| panic!("{ended}"));
    let (_, command) = rest
        .split_once(", or: sudo ")
        .unwrap_or_else(|| panic!("{ended}"));
    let command = command.lines().next().expect("a line");
    let text = Program::plain("sh").args(["-c", command]).run().success();
    assert!(text.contains("urnic0"), "{text}");
}
