//! `urnic` itself.

use urnic_testkit::Folder;
use urnic_tests::build::urnic;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;

fn command(line: &str) -> Program {
    let program = Program::plain(urnic()).line(line);
    match std::env::var_os("URNIC_LIB") {
        Some(path) => program.env("URNIC_LIB", path),
        None => program,
    }
}

#[test]
fn run_makes_the_device_present() {
    or_skip!(installed("ibv_devices"));
    let text = command("run -- ibv_devices").run().success();
    assert!(text.contains("urnic0"), "{text}");
}

#[test]
fn run_gives_the_programs_own_status() {
    let status = command("run -- sh -c").arg("exit 7").run().status;
    assert_eq!(status.code(), Some(7));
    assert_eq!(command("run -- no-such-program").run().status.code(), Some(127));
}

#[test]
fn env_does_the_same_for_a_shell() {
    or_skip!(installed("ibv_devices"));
    let script = format!("eval \"$('{}' env --log off)\" && ibv_devices", urnic().display());
    let text = Program::plain("sh").args(["-c", &script]).run().success();
    assert!(text.contains("urnic0"), "{text}");
}

#[test]
fn options_reach_the_program() {
    let run = command("run --log debug --set mpa.crc=false -- sh -c").arg("echo $URNIC_LOG $URNIC_MPA_CRC");
    let text = run.run().success();
    assert!(text.contains("debug false"), "{text}");
}

#[test]
fn a_mistake_in_an_option_is_one_line_and_starts_nothing() {
    for (line, says) in [
        ("run --set mpa.crcs=1 -- echo started", "did you mean mpa.crc?"),
        ("run --set mpa.crc=perhaps -- echo started", "true or false"),
        ("run --config /no/such/file -- echo started", "/no/such/file"),
        ("run --device nonsense -- echo started", "vfio:DDDD:BB:DD.F"),
        (
            "run --pcap /no/such/folder/file -- echo started",
            "/no/such/folder/file",
        ),
        ("run --pcap /dev/null -- echo started", "no regular file"),
        (
            "run --pcap /no/such/folder/file -- echo started",
            "there is no folder /no/such/folder",
        ),
        (
            "run --report /no/such/folder/%p -- echo started",
            "--report /no/such/folder/%p: there is no folder /no/such/folder",
        ),
        (
            "run --trace /no/such/folder/file -- echo started",
            "there is no folder /no/such/folder",
        ),
        ("run --trace /dev/null -- echo started", "no regular file"),
        (
            "run --set trace=/no/such/folder/file -- echo started",
            "there is no folder /no/such/folder",
        ),
        (
            "hosts --report /no/such/folder/file 2 -- echo started",
            "there is no folder /no/such/folder",
        ),
        (
            "run --strict --suppressions /no/such/file -- echo started",
            "--suppressions /no/such/file: there is no such file",
        ),
        (
            "run --faults /no/such/file -- echo started",
            "--faults /no/such/file: no such file",
        ),
        (
            "run --pcap file --device vfio-user:/none -- echo started",
            "urnic serve",
        ),
    ] {
        let end = command(line).run();
        assert_eq!(end.status.code(), Some(2), "{end}");
        assert!(
            end.output.contains(says) && end.output.trim_end().lines().count() == 1,
            "{end}"
        );
    }
}

#[test]
fn a_static_program_is_warned_about() {
    or_skip!(installed("cc"));
    let folder = urnic_tests::build::scratch();
    let (source, program) = (folder.join("static.c"), folder.join("static"));
    std::fs::write(&source, "int main(void) { return 0; }\n").expect("our folder");
    Program::plain("cc")
        .arg("-static")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .run()
        .success();
    let text = command("run --").arg(&program).run().success();
    assert!(text.contains("statically linked"), "{text}");
}

/// A script runs programs that `urnic run` does not see.
#[test]
fn a_static_verbs_program_in_a_shell_gets_a_warning() {
    or_skip!(installed("cc"));
    let folder = Folder::inside(&urnic_tests::build::scratch(), "static-programs");
    let made = |name: &str, says: &str| {
        let (source, program) = (folder.file(&format!("{name}.c")), folder.file(name));
        let text = format!("#include <stdio.h>\nint main(void) {{ return puts(\"{says}\") < 0; }}\n");
        std::fs::write(&source, text).expect("our folder");
        let cc = Program::plain("cc")
            .arg("-static")
            .arg("-o")
            .arg(&program)
            .arg(&source);
        cc.run().success();
        program.display().to_string()
    };
    let (verbs, other) = (
        made("verbs", "libibverbs is in this program"),
        made("other", "nothing"),
    );
    let makefile = folder.file("Makefile");
    std::fs::write(&makefile, format!("all:\n\t@{verbs}\n")).expect("our folder");
    let python = format!("import subprocess; subprocess.run(['{verbs}'], check=True)");
    for (line, warned) in [
        (vec!["bash", "-c", &format!("{verbs}; {other}; true")], true),
        (vec!["sh", "-c", &format!("exec {verbs}")], true),
        (vec!["env", &verbs], true),
        (vec!["python3", "-c", &python], true),
        (vec!["make", "-s", "-f", makefile.to_str().expect("a name")], true),
        (vec!["bash", "-c", &format!("{other}; true")], false),
        (vec!["bash", "-c", &format!("LD_PRELOAD= {verbs}")], false),
    ] {
        let text = command("run --").args(&line).run().success();
        let warnings = text.matches("urnic: warning: ").count();
        assert_eq!(warnings, usize::from(warned), "{line:?}: {text}");
        assert_eq!(text.contains("statically linked"), warned, "{line:?}: {text}");
    }
}

#[test]
fn info_describes_the_device() {
    let text = command("info").run().success();
    for shown in ["urnic0", "port 1", "active", "gid 0"] {
        assert!(text.contains(shown), "no {shown:?} in:\n{text}");
    }
}

#[test]
fn doctor_finds_no_error_on_this_machine() {
    or_skip!(installed("ibv_rc_pingpong"));
    let text = command("doctor").run().success();
    assert!(text.contains("exchanged 1000 messages"), "{text}");
}

#[test]
fn doctor_names_each_fault_and_the_command_that_fixes_it() {
    let broken = command("doctor")
        .env("URNIC_NATIVE_LISTEN", "203.0.113.1")
        .env("URNIC_PRESENT_DIR", "/no/such");
    let text = broken.run().failure();
    for shown in [
        "WRONG sockets",
        "WRONG presence folder",
        "fix: ",
        "native.listen=any",
    ] {
        assert!(text.contains(shown), "no {shown:?} in:\n{text}");
    }
    let text = command("doctor")
        .env("URNIC_LIB", "/no/such/liburnic.so")
        .run()
        .failure();
    assert!(
        text.contains("WRONG plug-in") && text.contains("fix: make build"),
        "{text}"
    );
}

fn json(line: &str) -> serde_json::Value {
    let text = command(line).run().success();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{line}: {error}: {text}"))
}

#[test]
fn info_and_doctor_have_json_for_programs() {
    or_skip!(installed("ibv_rc_pingpong"));
    let info = json("info --json");
    assert_eq!(info[0]["name"], "urnic0", "{info}");
    assert_eq!(info[0]["ports"][0]["port"], 1, "{info}");
    assert!(info[0]["max_qp"].as_u64() > Some(0), "{info}");
    let doctor = json("doctor --json");
    assert_eq!(doctor["well"], true, "{doctor}");
    let checks = doctor["checks"].as_array().expect("checks");
    assert!(
        checks
            .iter()
            .any(|check| check["check"] == "self-test" && check["verdict"] == "ok"),
        "{doctor}"
    );
}

#[test]
fn env_has_formats_for_ci_and_containers() {
    let github = command("env --log off --format github").run().success();
    assert!(github.lines().any(|line| line == "URNIC_LOG=off"), "{github}");
    let docker = command("env --log off --format docker").run().success();
    assert!(
        docker.lines().any(|line| line == "ENV URNIC_LOG=\"off\""),
        "{docker}"
    );
    assert_eq!(json("env --log off --format json")["URNIC_LOG"], "off");
}

#[test]
fn completions_are_scripts_that_shells_take() {
    or_skip!(installed("bash"));
    let script = command("completions bash").run().success();
    let checked = Program::plain("bash").args(["-n", "-c", &script]).run();
    assert!(checked.ok(), "{checked}");
    assert!(script.contains("conformance"), "{script}");
    for shell in ["zsh", "fish"] {
        let script = command(&format!("completions {shell}")).run().success();
        assert!(script.contains("conformance"), "{shell}: {script}");
    }
}

#[test]
fn help_has_no_colours_where_no_color_forbids_them() {
    let colourless = command("--help")
        .env("NO_COLOR", "1")
        .env("CLICOLOR_FORCE", "1")
        .run()
        .success();
    assert!(!colourless.contains('\x1b'), "{colourless:?}");
}
