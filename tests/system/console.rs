//! Output of the command-line programs: readers that leave, disks that are full, arguments that are
//! wrong.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use urnic_tests::build::{nfs, scratch, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, until};

/// The status in a shell of a program that SIGPIPE ended.
const READER_GONE: i32 = 141;

/// Commands of `urnic` that print something and end by themselves.
const PRINTING: [&str; 13] = [
    "--help",
    "--version",
    "help",
    "help run",
    "run --help",
    "serve --help",
    "stat --help",
    "env",
    "info",
    "doctor",
    "stat",
    "stat --json",
    "conformance --list",
];

fn command(line: &str) -> Command {
    let mut command = Command::new(urnic());
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// A pipe without a reader.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

fn full() -> File {
    File::options()
        .write(true)
        .open("/dev/full")
        .expect("the full device")
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the command into a pipe whose reader has left, then onto a full disk.
fn ends_well_without_a_reader_or_room(command: impl Fn() -> Command, what: &str) {
    let gone = command().stdout(unread()).output().expect("it runs");
    assert_eq!(
        (gone.status.code(), stderr_of(&gone)),
        (Some(READER_GONE), String::new()),
        "{what}"
    );
    let full = command().stdout(full()).output().expect("it runs");
    let line = stderr_of(&full);
    assert_eq!(
        (full.status.code(), line.lines().count()),
        (Some(1), 1),
        "{what}: {line}"
    );
    assert!(line.contains("No space left on device"), "{what}: {line}");
}

#[test]
fn urnic_ends_quietly_when_its_reader_leaves() {
    for line in PRINTING {
        ends_well_without_a_reader_or_room(|| command(line), line);
    }
}

#[test]
fn conformance_stops_when_its_reader_leaves() {
    ends_well_without_a_reader_or_room(|| command("conformance registers"), "conformance");
}

#[test]
fn serve_without_a_reader_leaves_no_socket() {
    let socket = scratch().join(format!("unread-{}.sock", std::process::id()));
    let line = format!("serve --socket {}", socket.display());
    ends_well_without_a_reader_or_room(|| command(&line), "serve");
    assert!(!socket.exists());
}

#[test]
fn stat_ends_with_its_reader_not_at_the_next_poll() {
    let mut stat = command("stat --interval 3600")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut line = String::new();
    let mut out = BufReader::new(stat.stdout.take().expect("a pipe"));
    out.read_line(&mut line).expect("a first look");
    assert_eq!(stat.try_wait().expect("our child"), None, "{line}");
    drop(out);
    let status = until(TIME_LIMIT, || stat.try_wait().expect("our child"));
    let _ = stat.kill();
    let _ = stat.wait();
    assert_eq!(status.and_then(|status| status.code()), Some(READER_GONE));
}

#[test]
fn a_full_standard_error_changes_no_status() {
    for (line, status) in [
        ("run -- no-such-program", 127),
        ("run --bogus", 2),
        ("nonsense", 2),
        ("", 2),
        ("stat 2147483647", 1),
    ] {
        let ended = command(line).stderr(full()).output().expect("it runs");
        assert_eq!(ended.status.code(), Some(status), "{line}");
    }
}

#[test]
fn urnic_nfs_ends_quietly_when_its_reader_leaves() {
    or_skip!(installed("cmake"));
    let program = nfs();
    let of = |line: &str| {
        let mut command = Command::new(&program);
        command.args(line.split_whitespace()).stdin(Stdio::null());
        command
    };
    for line in ["--help", "--version", "serve --help"] {
        ends_well_without_a_reader_or_room(|| of(line), line);
    }
    let serve = "serve --no-root-squash --memory 1M --listen 127.0.0.1 --tcp-port 0";
    ends_well_without_a_reader_or_room(|| of(serve), serve);
    let mut server = Program::plain(&program).line(serve).spawn();
    let port = server.wait_for_output("its address", |stderr_of| {
        let line = stderr_of.lines().find(|line| line.contains("over TCP at"))?;
        line.rsplit(':').next().map(str::to_owned)
    });
    let file = file("listed", "x");
    let put = format!("put --port {port} {} 127.0.0.1:/", file.display());
    let put = of(&put).output().expect("it runs");
    assert!(put.status.success(), "{}", stderr_of(&put));
    std::fs::remove_file(&file).expect("our file");
    let small = "--size 64K --operations 10";
    for tool in [
        "ls".to_owned(),
        "ls -l".to_owned(),
        "acl".to_owned(),
        format!("bench {small}"),
        format!("bench --json {small}"),
    ] {
        ends_well_without_a_reader_or_room(|| of(&format!("{tool} --port {port} 127.0.0.1:/")), &tool);
    }
}

/// A file of this test process's own.
fn file(name: &str, text: &str) -> PathBuf {
    let path = scratch().join(format!("{name}-{}", std::process::id()));
    std::fs::write(&path, text).expect("our folder");
    path
}

#[test]
fn a_wrong_argument_is_one_line_that_names_it() {
    let folder = scratch();
    let toml = file("console.toml", "[mpa]\n\ncrc = \"maybe\"\n");
    let broken = file("broken.toml", "\n\nmpa = = 1\n");
    let unknown = file("unknown.toml", "log = \"off\"\nnative.lisen = 1\n");
    let peer = file("peer.toml", "[[peer]]\naddress = \"::1\"\nmpa.crc = 7\n");
    let long = format!("/{}", "a".repeat(200));
    let run = |options: String| format!("run {options} -- true");
    let config = |path: &PathBuf| run(format!("--config {}", path.display()));
    for (line, says) in [
        ("nosuch".to_owned(), "'nosuch'"),
        ("run".to_owned(), "<COMMAND>"),
        ("run --".to_owned(), "<COMMAND>"),
        (run("--bogus".into()), "'--bogus'"),
        (run("--set".into()), "--set"),
        (run("--set mpa.crc".into()), "--set mpa.crc: not KEY=VALUE"),
        (run("--set =1".into()), "--set =1: not KEY=VALUE"),
        (
            run("--set mpa.crc=".into()),
            "mpa.crc cannot be empty: it takes true or false",
        ),
        (run("--set mpa.crv=1".into()), "did you mean mpa.crc?"),
        (
            run("--config /no/such".into()),
            "/no/such: cannot read it: No such file",
        ),
        (run(format!("--config {}", folder.display())), "Is a directory"),
        (config(&toml), "line 3: mpa.crc cannot be maybe"),
        (config(&broken), "line 3"),
        (
            config(&unknown),
            "line 2: there is no option native.lisen; did you mean native.listen?",
        ),
        (config(&peer), "line 3: mpa.crc cannot be 7"),
        (run("--device foo".into()), "--device: device cannot be foo"),
        (run(format!("--device vfio-user:{long}")), "at most 107 bytes"),
        (run("--pcap /no/such/file".into()), "--pcap /no/such/file"),
        ("info --set a=1".into(), "there is no option a"),
        ("doctor extra".into(), "'extra'"),
        ("conformance no-such-check".into(), "no-such-check"),
        ("stat abc".into(), "'abc'"),
        ("stat 0".into(), "not a process id"),
        ("stat -1".into(), "'-1'"),
        ("stat 99999999999".into(), "not a process id"),
        ("stat --interval 0".into(), "'--interval <SECONDS>'"),
        ("stat --count 0".into(), "'--count <N>'"),
        ("serve".into(), "--socket <PATH>"),
        (format!("serve --socket {long}"), "at most 107 bytes"),
        (
            "serve --socket /no/such/folder/s".into(),
            "there is no folder /no/such/folder",
        ),
        (format!("serve --socket {}", toml.display()), "not a socket"),
        ("serve --socket s --addr foo".into(), "foo is no IP address"),
        (
            "serve --socket s --addr 203.0.113.1".into(),
            "203.0.113.1 is no address of this host",
        ),
        ("serve --socket s --mode 9".into(), "'--mode <OCTAL>'"),
        ("serve --socket s --clients 0".into(), "'--clients <N>'"),
        (
            "serve --socket s --dma x".into(),
            "[possible values: auto, messages]",
        ),
        ("help nosuch".into(), "'nosuch'"),
    ] {
        let ended = command(&line).output().expect("it runs");
        let error = stderr_of(&ended);
        assert_eq!(ended.status.code(), Some(2), "urnic {line}: {error}");
        assert!(
            error.starts_with("urnic: ") && error.lines().count() == 1 && error.contains(says),
            "urnic {line}: {error}"
        );
        assert!(ended.stdout.is_empty(), "urnic {line}");
    }
    for path in [toml, broken, unknown, peer] {
        std::fs::remove_file(path).expect("our file");
    }
}

#[test]
fn a_line_end_in_an_argument_makes_no_second_line() {
    let ended = Command::new(urnic())
        .args(["run", "--", "no\nsuch"])
        .output()
        .expect("it runs");
    assert_eq!(ended.status.code(), Some(127));
    assert_eq!(stderr_of(&ended).lines().count(), 1, "{}", stderr_of(&ended));
}

#[test]
fn a_program_that_cannot_run_has_the_shells_status() {
    let plain = file("plain", "x");
    let script = file("script", "#!/no/such/interpreter\n");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, executable).expect("our file");
    for (name, status, says) in [
        ("no-such-program".to_owned(), 127, "no such command in PATH"),
        ("/no/such/program".to_owned(), 127, "no such file"),
        (
            script.display().to_string(),
            127,
            "/no/such/interpreter does not exist",
        ),
        (plain.display().to_string(), 126, "chmod +x"),
        (scratch().display().to_string(), 126, "it is a directory"),
    ] {
        let ended = command(&format!("run -- {name}")).output().expect("it runs");
        let error = stderr_of(&ended);
        assert_eq!(ended.status.code(), Some(status), "{error}");
        assert!(error.contains(&name) && error.contains(says), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    for path in [plain, script] {
        std::fs::remove_file(path).expect("our file");
    }
}

/// The set of ignored signals, then of blocked ones, of a program that a shell started.
fn signals(shell: &str) -> String {
    let script = format!("{shell} grep -E 'Sig(Ign|Blk):' /proc/self/status");
    let out = Command::new("sh")
        .args(["-c", &script])
        .output()
        .expect("sh runs");
    assert!(out.status.success(), "{}", stderr_of(&out));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn run_does_not_change_the_programs_signals() {
    let run = format!("'{}' run --", urnic().display());
    assert_eq!(signals(&run), signals(""));
    assert_eq!(
        signals(&format!("trap '' PIPE HUP; {run}")),
        signals("trap '' PIPE HUP;")
    );
}

#[test]
fn a_program_that_a_signal_ends_is_seen_to_end_so() {
    let mut program = command("run -- sh -c");
    let status = program.arg("kill -TERM $$").status().expect("it runs");
    assert_eq!(status.signal(), Some(15), "{status}");
}

#[test]
fn a_program_in_a_pipe_ends_by_sigpipe() {
    let mut program = command("run -- yes")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut out = program.stdout.take().expect("a pipe");
    out.read_exact(&mut [0; 2]).expect("a line");
    drop(out);
    assert_eq!(program.wait().expect("our child").signal(), Some(13));
}
