//! The messages when the device cannot be opened, and whether their advice helps.

use urnic_tests::build::{plugin, scratch, urnic};
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip};

/// Errors and warnings of urnic in the output of a program.
fn complaints(ended: &Ended) -> Vec<&str> {
    let is_ours = |line: &&str| line.contains("ERROR urnic") || line.contains(" WARN urnic");
    ended.output.lines().filter(is_ours).collect()
}

/// `urnic doctor` with the plug-in under test, with this command in front.
pub(super) fn doctor(words: &[&str]) -> Program {
    let program = Program::plain(words[0]).args(&words[1..]);
    program.env("URNIC_LIB", plugin())
}

/// The fault that `urnic doctor` reports for a subject, and its fix.
pub(super) fn wrong(ended: &Ended, subject: &str) -> (String, String) {
    reported(ended, &format!("WRONG {subject}"))
}

/// The line of `urnic doctor` that starts with these words, and its fix.
pub(super) fn reported(ended: &Ended, start: &str) -> (String, String) {
    let mut lines = ended.output.lines().skip_while(|line| !line.starts_with(start));
    let what = lines.next().unwrap_or_else(|| panic!("no {start}: {ended}"));
    let fix = lines.next().and_then(|line| line.split_once("fix: "));
    let fix = fix.unwrap_or_else(|| panic!("no fix: {ended}")).1;
    (what.to_owned(), fix.to_owned())
}

#[test]
fn a_denied_system_call_is_named_in_one_line() {
    or_skip!(installed("ibv_devinfo"));
    or_skip!(in_process("a served device needs other system calls"));
    let denied = or_skip!(compiled("denied"));
    for call in ["epoll_create1", "eventfd2", "socketpair", "epoll_ctl"] {
        // EPERM, as by Docker's profile, and ENOSYS, as by gVisor and older kernels.
        for errno in ["1", "38"] {
            let ended = Program::new(&denied)
                .args([call, errno, "ibv_devinfo", "-d", "urnic0"])
                .run();
            assert!(!ended.status.success(), "{ended}");
            let printed = complaints(&ended);
            let [line] = printed[..] else {
                panic!("{call}: {ended}")
            };
            let parts = ["cannot open urnic0", " pid ", call, "failed: ", "seccomp"];
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
    }
}

#[test]
fn doctor_prints_why_the_device_does_not_open() {
    or_skip!(installed("ibv_rc_pingpong"));
    let denied = or_skip!(compiled("denied"));
    let denied = denied.to_str().expect("our path");
    let urnic = urnic();
    let urnic = urnic.to_str().expect("our path");
    let ended = doctor(&[denied, "eventfd2", "1", urnic, "doctor"]).run();
    let (what, fix) = wrong(&ended, "self-test");
    assert!(what.contains("eventfd2 failed: "), "{ended}");
    assert!(fix.contains("seccomp"), "{ended}");
}

#[test]
fn too_few_descriptors_are_one_line() {
    or_skip!(installed("ibv_devinfo"));
    // The first three are the program's own descriptors; further inherited descriptors must make no
    // difference.
    for (inherited, words) in [
        (0, ""),
        (1, "3</dev/null"),
        (3, "3</dev/null 4</dev/null 5</dev/null"),
    ] {
        for limit in 6 + inherited..=14 + inherited {
            let closed: String = (3..10).skip(inherited).map(|fd| format!("{fd}<&- ")).collect();
            let script = format!("exec {words} {closed}; ulimit -n {limit}; exec ibv_devinfo -d urnic0");
            let ended = Program::new("sh").args(["-c", &script]).run();
            if ended.status.success() {
                continue;
            }
            let printed = complaints(&ended);
            let hints = printed.iter().filter(|line| line.contains("ulimit -n")).count();
            let errors = printed.iter().filter(|line| line.contains("ERROR")).count();
            assert!(hints == 1 && errors == 1, "limit {limit} {words}: {ended}");
        }
    }
}

#[test]
fn doctor_reports_too_few_descriptors() {
    or_skip!(installed("ibv_rc_pingpong"));
    let closed: String = (3..10).map(|fd| format!("{fd}<&- ")).collect();
    let urnic = urnic();
    let urnic = urnic.display();
    let mut fixes = Vec::new();
    for limit in 8..=24 {
        let script = format!("exec {closed}; ulimit -n {limit}; exec '{urnic}' doctor");
        let ended = doctor(&["sh", "-c", &script]).run();
        // The program's own accept(2) fails with one descriptor less than suffices.
        if !ended.status.success() && !ended.output.contains("accept() failed") {
            fixes.push(wrong(&ended, "self-test").1);
            assert!(
                fixes.iter().all(|fix| fix.starts_with("ulimit -n ")),
                "limit {limit}: {ended}"
            );
        }
    }
    let fix = fixes.first().expect("eight descriptors are too few");
    let script = format!("exec {closed}; ulimit -S -n 10; {fix}; exec '{urnic}' doctor");
    doctor(&["sh", "-c", &script]).run().success();
}

/// Runs a script in new namespaces, as root there; returns an error when that is impossible.
pub(super) fn apart(flags: &str, script: &str) -> Result<Ended, String> {
    installed("unshare")?;
    if !Program::plain("unshare")
        .args([flags, "true"])
        .run()
        .status
        .success()
    {
        return Err("no user namespaces here".to_owned());
    }
    Ok(doctor(&["unshare", flags, "sh", "-c", script])
        .env("XDG_RUNTIME_DIR", "")
        .env("HOME", scratch())
        .run())
}

#[test]
fn the_fix_for_a_read_only_tmp_helps() {
    let urnic = urnic();
    let urnic = urnic.display();
    // The content of the folders stays visible: the build may be there.
    let closed = "for folder in /tmp /var/tmp /dev/shm; do \
                  mount --rbind $folder $folder && mount -o remount,bind,ro,nosuid,nodev $folder || exit 1; done";
    let ended = or_skip!(apart("-rm", &format!("{closed}\n'{urnic}' doctor")));
    let (_, fix) = wrong(&ended, "presence folder");
    let ended = or_skip!(apart("-rm", &format!("{closed}\n{fix}\n'{urnic}' doctor")));
    assert!(!ended.output.contains("WRONG presence folder"), "{ended}");
}

#[test]
fn the_fix_for_a_loopback_that_is_down_helps() {
    or_skip!(installed("ip"));
    let urnic = urnic();
    let urnic = urnic.display();
    let ended = or_skip!(apart("-rn", &format!("'{urnic}' doctor")));
    let (what, fix) = wrong(&ended, "sockets");
    assert!(what.contains("lo is down"), "{ended}");
    let ended = or_skip!(apart("-rn", &format!("{fix}\n'{urnic}' doctor")));
    assert!(!ended.output.contains("WRONG sockets"), "{ended}");
}

#[test]
fn an_invalid_log_level_is_an_error_in_every_setting() {
    or_skip!(installed("ibv_devices"));
    let file = scratch().join(format!("verbose-{}.toml", std::process::id()));
    std::fs::write(&file, "log = \"verbose\"\n").expect("our folder");
    let file = file.to_str().expect("our path");
    let urnic = || Program::plain(urnic()).env("URNIC_LIB", plugin());
    let runs = [
        urnic().line("run --log verbose -- echo started"),
        urnic().line("run --set log=verbose -- echo started"),
        urnic().line("run -- echo started").env("URNIC_LOG", "verbose"),
        urnic()
            .line("run -- echo started")
            .env("URNIC_SET", "log=verbose"),
        urnic().line("run --config").arg(file).line("-- echo started"),
        urnic()
            .line("serve --addr 127.0.0.1 --log verbose --socket")
            .arg(scratch().join("none")),
    ];
    for run in runs {
        let ended = run.run();
        assert_eq!(ended.status.code(), Some(2), "{ended}");
        assert!(
            ended.output.contains("log cannot be verbose: it takes "),
            "{ended}"
        );
        assert!(!ended.output.contains("started"), "{ended}");
    }
    // A program that is started with the plug-in alone prints it, too.
    let bare = Program::new("ibv_devices").env("URNIC_LOG", "verbose").run();
    assert!(bare.output.contains("URNIC_LOG: log cannot be verbose"), "{bare}");
    std::fs::remove_file(file).expect("our file");
}

#[test]
fn lines_of_the_log_have_the_process_id() {
    or_skip!(installed("ibv_devinfo"));
    let running = Program::new("ibv_devinfo").env("URNIC_LOG", "debug").spawn();
    let pid = format!(" pid {} ", running.pid());
    let ended = running.wait_for(urnic_tests::wait::TIME_LIMIT);
    let lines: Vec<&str> = ended
        .output
        .lines()
        .filter(|line| line.contains("DEBUG urnic"))
        .collect();
    assert!(
        !lines.is_empty() && lines.iter().all(|line| line.contains(&pid)),
        "{ended}"
    );
}
