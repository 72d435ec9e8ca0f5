//! Programs under sanitizers and valgrind: they report no fault in our code, and they do report the
//! faults of the program.

use std::path::{Path, PathBuf};
use std::time::Duration;

use urnic_tests::build::{compiled, compiled_with, plugin, scratch, tree, urnic};
use urnic_tests::program::{Ended, Program};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, or_skip};

use crate::rdma_cm::{at_port, but_for_lost_races};

/// The instrumented programs are slow, and machines crowded.
const LIMIT: Duration = Duration::from_secs(240);

/// Options of the compiler for each sanitizer.
/// UndefinedBehaviorSanitizer's check of object sizes would be the first to see an overflow.
const ADDRESS: &[&str] = &[
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=object-size",
    "-fno-sanitize-recover=undefined",
];
const THREAD: &[&str] = &["-O1", "-fsanitize=thread"];
const LEAK: &[&str] = &["-O1", "-fsanitize=leak"];

/// Checks that programs with these options can be built here, and run without the plug-in: a
/// runtime may be missing or may not work with the kernel.
fn works(name: &str, options: &[&str]) -> Result<(), String> {
    installed("cc")?;
    let (source, program) = (
        scratch().join(format!("{name}-trial.c")),
        scratch().join(format!("{name}-trial")),
    );
    std::fs::write(&source, "int main(void) { return 0; }\n").map_err(|error| error.to_string())?;
    let mut cc = Program::plain("cc");
    cc = cc.args(options).arg("-o").arg(&program).arg(&source);
    if !cc.run().ok() {
        return Err(format!("cc does not take {}", options.join(" ")));
    }
    match Program::plain(&program).run().ok() {
        true => Ok(()),
        false => Err(format!(
            "a program made with {} does not run here",
            options.join(" ")
        )),
    }
}

/// `threads.c` with these options.
fn threads(name: &str, options: &[&str]) -> Result<PathBuf, String> {
    works(name, options)?;
    compiled_with("threads", &format!("threads-{name}"), options)
}

/// A command line under `urnic run`.
fn under_run(program: &Path) -> Program {
    Program::plain(urnic())
        .args(["run", "--"])
        .arg(program)
        .env("URNIC_LIB", plugin())
}

#[track_caller]
fn clean(program: &Program) {
    let output = program.run_for(LIMIT).success();
    assert_eq!(output, "200 messages between two threads\n");
}

#[track_caller]
fn reported(program: Program, mistake: &str, says: &str) {
    let ended: Ended = program.arg(mistake).run_for(LIMIT);
    assert!(!ended.ok() && ended.output.contains(says), "{ended}");
}

#[test]
fn address_sanitizer_reports_only_the_programs_errors() {
    let program = or_skip!(threads("address", ADDRESS));
    clean(&under_run(&program));
    reported(under_run(&program), "overflow", "heap-buffer-overflow");
    reported(
        under_run(&program),
        "leak",
        "LeakSanitizer: detected memory leaks",
    );
}

#[test]
fn address_sanitizer_works_in_a_shell_and_its_children() {
    let program = or_skip!(threads("address-child", ADDRESS));
    let child = format!("sh -c '\"{}\"; exit $?'", program.display());
    clean(
        &Program::plain(urnic())
            .args(["run", "--", "sh", "-c", &child])
            .env("URNIC_LIB", plugin()),
    );
    // Without the ASAN_OPTIONS of `urnic run`, the plug-in reports them.
    let forgetful = format!("unset ASAN_OPTIONS; {child}");
    clean(
        &Program::plain(urnic())
            .args(["run", "--", "sh", "-c", &forgetful])
            .env("URNIC_LIB", plugin()),
    );
    let script = format!("eval \"$('{}' env)\"; {child}", urnic().display());
    clean(
        &Program::plain("sh")
            .args(["-c", &script])
            .env("URNIC_LIB", plugin()),
    );
}

#[test]
fn a_program_with_its_own_asan_options_starts() {
    let own = [ADDRESS, &["-DOWN_OPTIONS"]].concat();
    let program = or_skip!(threads("address-own", &own));
    clean(&under_run(&program));
    reported(
        under_run(&program).env("ASAN_OPTIONS", "exitcode=9"),
        "overflow",
        "heap-buffer-overflow",
    );
}

#[test]
fn a_statically_linked_sanitizer_works() {
    // The default link mode of clang.
    let program = or_skip!(threads(
        "address-static",
        &["-O1", "-fsanitize=address", "-static-libasan"]
    ));
    clean(&under_run(&program));
    reported(under_run(&program), "overflow", "heap-buffer-overflow");
}

#[test]
fn a_preloaded_sanitizer_stays_in_front() {
    or_skip!(works("address-preload", ADDRESS));
    let program = or_skip!(compiled("threads"));
    let found = Program::plain("cc")
        .arg("-print-file-name=libasan.so")
        .run()
        .success();
    let runtime = found.trim_end();
    // `urnic run` does not choose which runtime: it keeps the list it finds.
    let script = format!(
        "LD_PRELOAD='{runtime}' exec '{}' run -- '{}' \"$@\"",
        urnic().display(),
        program.display()
    );
    let run = Program::plain("sh")
        .args(["-c", &script, "sh"])
        .env("URNIC_LIB", plugin());
    clean(
        &run.clone()
            .env("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=1"),
    );
    reported(run, "leak", "LeakSanitizer: detected memory leaks");
}

#[test]
fn leak_sanitizer_reports_only_the_programs_leaks() {
    let program = or_skip!(threads("leak", LEAK));
    clean(&under_run(&program));
    reported(
        under_run(&program),
        "leak",
        "LeakSanitizer: detected memory leaks",
    );
}

#[test]
fn thread_sanitizer_reports_only_the_programs_races() {
    let program = or_skip!(threads("thread", THREAD));
    clean(&under_run(&program));
    reported(under_run(&program), "race", "WARNING: ThreadSanitizer: data race");
}

/// A transfer between two processes with this sanitizer.
fn transfer(name: &str, options: &[&str]) -> Result<Pair, String> {
    works(name, options)?;
    let program = compiled_with("transfer", &format!("transfer-{name}"), options)?;
    Ok(Pair::new(&Program::new(program).line("-b 2000000 -c 50000")).within(LIMIT))
}

#[test]
fn sanitizers_have_no_complaint_about_a_transfer() {
    for (name, options) in [("address", ADDRESS), ("thread", THREAD)] {
        or_skip!(transfer(name, options)).succeeds();
    }
}

fn valgrind(tool: &[&str]) -> Program {
    let suppressions = format!("--suppressions={}", tree().join("share/valgrind.supp").display());
    Program::new("valgrind")
        .args(["--quiet", "--error-exitcode=99"])
        .arg(suppressions)
        .args(tool)
}

const MEMCHECK: &[&str] = &["--leak-check=full", "--track-origins=no"];
const HELGRIND: &[&str] = &["--tool=helgrind"];

#[test]
fn memcheck_reports_only_the_programs_errors() {
    or_skip!(installed("valgrind"));
    let program = or_skip!(compiled("threads"));
    clean(&valgrind(MEMCHECK).arg(&program));
    reported(
        valgrind(MEMCHECK).arg(&program),
        "overflow",
        "Invalid write of size 1",
    );
    reported(
        valgrind(MEMCHECK).arg(&program),
        "leak",
        "blocks are definitely lost",
    );
}

#[test]
fn helgrind_reports_only_the_programs_races() {
    or_skip!(installed("valgrind"));
    let program = or_skip!(compiled("threads"));
    clean(&valgrind(HELGRIND).arg(&program));
    reported(valgrind(HELGRIND).arg(&program), "race", "Possible data race");
}

#[test]
fn valgrind_has_no_complaint_about_a_transfer() {
    or_skip!(installed("valgrind"));
    let program = or_skip!(compiled("transfer"));
    for tool in [MEMCHECK, HELGRIND] {
        let watched = valgrind(tool).arg(&program).line("-b 200000 -c 10000");
        Pair::new(&watched).within(LIMIT).succeeds();
    }
}

#[test]
fn valgrind_has_no_complaint_about_rping() {
    or_skip!(installed("valgrind"));
    or_skip!(installed("rping"));
    or_skip!(in_process("memcheck does not see what another process writes"));
    // rping ends with its second thread in librdmacm, and so with memory of these two that is
    // "possibly lost".
    let checks = [MEMCHECK, &["--errors-for-leak-kinds=definite"]].concat();
    let (server, client) = but_for_lost_races(|| {
        let port = free_port();
        let rping = valgrind(&checks).line(&format!("rping -a 127.0.0.1 -p {port} -C 5"));
        at_port(port, &rping.clone().arg("-s"), &rping.arg("-c"), LIMIT)
    });
    client.success();
    server.success();
}
