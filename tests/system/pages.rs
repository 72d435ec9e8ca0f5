//! The pages of the guide, as a reader follows them: each command block runs, in order, in a folder
//! of the page and in a shell that continues from block to block; what a page shows as output has
//! the shape of what the commands print. See [`urnic_tests::page`] for the comments by which a page
//! says what cannot run here.
//!
//! A page has a network of its own, with `eth0` at 192.0.2.2, a `/tmp` of its own, and urnic as
//! `make install` installs it. All its processes end with it. `URNIC_TEST_PAGES=faults,trace`
//! selects pages.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use urnic_tests::build::{nfs, scratch, stripped, target, tree, urnic};
use urnic_tests::page::Block;
use urnic_tests::program::Program;
use urnic_tests::shape::compare;
use urnic_tests::{Folder, or_skip, plugin, skip};

/// The time for all blocks of a page, beyond that of [`PLACE`].
const LIMIT: Duration = Duration::from_secs(500);

/// Functions of the reader's shell. `record` notes a fault of block `$block`.
const SHELL: &str = r#"
record() { printf '%s\n' "$*" >>"$pages/failed.$block"; }
sockets() {
    awk '$4 == "0A" { print $2 }' /proc/net/tcp /proc/net/tcp6
    awk '$4 == "00010000" && $8 ~ /^\// { print $8 }' /proc/net/unix
}
# Before the next line, a reader looks at what was started: it listens, or has ended.
look_at() {
    local n same=0 now last=
    for ((n = 0; n < 100; n++)); do
        kill -0 "$1" 2>/dev/null || return 0
        now=$(sockets)
        [[ $now == "$last" ]] || same=0
        ((same++ > 4)) && [[ $now != "$2" ]] && return 0
        last=$now
        sleep 0.1
    done
}
# At the end of a block, programs that answer one client have ended; servers go on.
finish() {
    local pid n
    for pid in "$@"; do
        for ((n = 0; n < 30; n++)); do
            if ! kill -0 "$pid" 2>/dev/null; then
                wait "$pid" || record "a program in the background ended with status $?"
                break
            fi
            sleep 0.1
        done
    done
}
"#;

/// A part of a block: the commands of `sh`, or one command of a session.
struct Part {
    /// Its number in the page.
    number: usize,
    /// The line of its block.
    line: usize,
    commands: String,
    /// The output that the page shows.
    output: Option<String>,
    /// Whether a command that fails is a fault of the page. The output of a session shows what
    /// fails.
    must_succeed: bool,
}

/// What became of the blocks of a page.
#[derive(Default)]
struct Report {
    run: usize,
    compared: usize,
    not_run: Vec<String>,
    faults: Vec<String>,
}

/// The parts of a page that run, in order; the report gets the others.
fn parts(page: &str, blocks: &[Block], report: &mut Report) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    // Whether the block before this one is of commands, whose output this one may be.
    let mut after_commands = false;
    for block in blocks {
        let place = format!("{page}:{}", block.line);
        let follows = std::mem::take(&mut after_commands);
        if let Some(reason) = block.not_run() {
            report.not_run.push(format!("{place}: {reason}"));
            continue;
        }
        let mut commands = block.first().join("\n");
        if let Some(file) = block.file() {
            let _ = write!(
                commands,
                "\ncat >{file} <<'END_OF_THE_BLOCK'\n{}\nEND_OF_THE_BLOCK\n",
                block.text
            );
        }
        let mut add = |commands: String, output: Option<String>, must_succeed: bool| {
            parts.push(Part {
                number: parts.len(),
                line: block.line,
                commands,
                output,
                must_succeed,
            });
        };
        if !commands.is_empty() {
            add(commands, None, true);
        }
        let session = block.session();
        if block.is_commands() {
            report.run += 1;
            after_commands = true;
            add(block.text.clone(), None, true);
        } else if !session.is_empty() {
            report.run += 1;
            for step in session {
                let output = (!step.output.trim().is_empty()).then_some(step.output);
                let must_succeed = output.is_none();
                add(step.command, output, must_succeed);
            }
        } else if block.file().is_some() {
            report.run += 1;
        } else if block.is_text() && follows {
            if let Some(last) = parts.last_mut() {
                last.output = Some(block.text.clone());
            }
        } else if block.is_text() {
            report.faults.push(format!(
                "{place}: output of no commands: it needs a comment <!-- not run: REASON -->"
            ));
        }
    }
    parts
}

/// The commands, where each that ends with `&` is looked at, and writes to a file of its own, as in
/// another terminal.
fn in_a_terminal(commands: &str) -> String {
    let mut text = String::from("started=()\n");
    for line in commands.lines() {
        // A comment may follow.
        let bare = line.split(" # ").next().unwrap_or(line).trim_end();
        match bare.strip_suffix(" &") {
            Some(command) if !command.ends_with('&') => {
                let _ = write!(
                    text,
                    "before=$(sockets)\n{{ {command}\n}} >>\"$pages/background.$block\" 2>&1 &\n\
                     started+=($!); look_at $! \"$before\"\n"
                );
            }
            _ => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text + "finish \"${started[@]}\"\n"
}

/// The script of a page.
fn script(parts: &[Part], folder: &Path) -> String {
    let pages = folder.join("pages");
    let mut text = format!("pages={}\n{SHELL}", pages.display());
    for part in parts {
        let file = pages.join(format!("block.{}", part.number));
        std::fs::write(&file, in_a_terminal(&part.commands)).expect("a file");
        let trap = match part.must_succeed {
            true => r#"trap 'record "status $?: $BASH_COMMAND"' ERR"#,
            false => "trap - ERR",
        };
        let _ = write!(
            text,
            "block={0}\n{trap}\n. \"$pages/block.{0}\" >\"$pages/output.{0}\" 2>&1 </dev/null\n\
             trap - ERR; touch \"$pages/done.{0}\"\n",
            part.number
        );
    }
    text
}

/// A page's own network, `/tmp` and processes; `$1` is the folder with what is installed, `$2` the
/// script, `$3` the folder where the reader begins.
const PLACE: &str = r#"set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 192.0.2.2/24 dev eth0
ip link set eth0 up
ip link set eth1 up
case $3 in /tmp/*) ;; *) mount -t tmpfs tmpfs /tmp ;; esac
mount -t tmpfs tmpfs /mnt
printf '127.0.0.1 localhost\n192.0.2.2 SERVER\n' >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts
mount -t overlay overlay -o "lowerdir=$1:/usr/local" /usr/local
cd "$3"
exec timeout --kill-after 5 400 bash "$2""#;

/// Runs a program that ends with all that it started, in a place of its own.
fn apart(program: Program) -> Program {
    let mut words = vec![
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ];
    if skip::root().is_err() {
        words.extend(["--user", "--map-root-user"]);
    }
    program.through(words)
}

/// Checks that [`PLACE`] can be made here.
fn can_be_apart(installed: &Path) -> Result<(), String> {
    let empty = scratch().join("empty.sh");
    std::fs::write(&empty, "").map_err(|error| error.to_string())?;
    let made = apart(Program::plain("bash").args(["-c", PLACE, "place"]))
        .args([installed, &empty, &scratch()])
        .run();
    match made.ok() {
        true => Ok(()),
        false => Err(format!(
            "no namespaces with an overlay: {}",
            made.to_string().trim()
        )),
    }
}

/// Follows a page; `installed` has what `make install` made.
fn follow(page: &Path, installed: &Path) -> Report {
    let name = page.strip_prefix(tree()).unwrap_or(page).display().to_string();
    let mut report = Report::default();
    let parts = parts(&name, &Block::of(page), &mut report);
    let mut folder = Folder::inside(&scratch(), "page");
    let made = ["pages", "run", "home"].map(|part| std::fs::create_dir(folder.file(part)));
    assert!(made.iter().all(Result::is_ok), "{made:?}");
    std::fs::write(folder.file("pages/script"), script(&parts, folder.path())).expect("a file");
    let program = Program::plain("bash")
        .args(["-c", PLACE, "place"])
        .arg(installed)
        .args([folder.file("pages/script"), folder.file("home")])
        .env("XDG_RUNTIME_DIR", folder.file("run"))
        .env("CARGO_TARGET_DIR", target().parent().expect("a folder"))
        .env("TREE", tree());
    let ended = apart(program).spawn().wait_for(LIMIT);
    let text = |kind: &str, part: &Part| {
        std::fs::read_to_string(folder.file(&format!("pages/{kind}.{}", part.number))).unwrap_or_default()
    };
    for part in &parts {
        let place = format!("{name}:{}", part.line);
        let output = text("output", part);
        let mut faults = text("failed", part);
        if !folder.file(&format!("pages/done.{}", part.number)).exists() {
            faults += "did not end";
        } else if let Some(expected) = &part.output {
            report.compared += 1;
            faults += &compare(expected, &output).err().unwrap_or_default();
        }
        if !faults.is_empty() {
            report.faults.push(format!(
                "{place}: {}\n--- commands:\n{}\n--- printed:\n{output}--- in the background:\n{}",
                faults.trim_end(),
                part.commands,
                text("background", part)
            ));
        }
    }
    if !report.faults.is_empty() {
        report.faults.push(format!("the shell of {name}: {ended}"));
        if std::env::var_os("URNIC_TEST_PAGES").is_some() {
            folder.keep();
        }
    }
    report
}

/// The pages of the guide, and README.md.
fn pages() -> Vec<PathBuf> {
    let guide = std::fs::read_dir(tree().join("docs/guide")).expect("the guide");
    let mut pages: Vec<PathBuf> = guide.map(|entry| entry.expect("a page").path()).collect();
    pages.retain(|page| page.extension().is_some_and(|it| it == "md"));
    pages.push(tree().join("README.md"));
    pages.sort();
    if let Ok(selected) = std::env::var("URNIC_TEST_PAGES") {
        let is_selected = |page: &PathBuf| {
            let stem = page.file_stem().unwrap_or_default();
            selected.split(',').any(|name| stem == name)
        };
        pages.retain(is_selected);
    }
    pages
}

/// What `make install` installs, from the build of these tests, without debug information, as in
/// packages: valgrind reads it at each start.
fn installed() -> Result<Folder, String> {
    let folder = Folder::inside(&scratch(), "installed");
    let target = target();
    let profile = target.file_name().unwrap_or_default().to_string_lossy();
    // Builds what is installed.
    let _ = (plugin(), urnic(), nfs());
    Program::plain("make")
        .args(["-s", "-C"])
        .arg(tree())
        .args(["install", &format!("PROFILE={profile}")])
        .arg(format!("PREFIX={}", folder.path().display()))
        .env("CARGO_TARGET_DIR", target.parent().expect("a folder"))
        .run()
        .success();
    for (file, name) in [(plugin(), "lib/urnic/liburnic.so"), (&urnic(), "bin/urnic")] {
        stripped(file, &folder.file(name))?;
    }
    Ok(folder)
}

#[test]
#[ignore = "make test-all"]
fn every_command_of_the_guide_runs() {
    or_skip!(skip::installed("unshare"));
    or_skip!(skip::installed("make"));
    let installed = or_skip!(installed());
    or_skip!(can_be_apart(installed.path()));
    let waiting = Mutex::new(VecDeque::from(pages()));
    let total = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let next = || waiting.lock().expect("no panic").pop_front();
                while let Some(page) = next() {
                    let one = follow(&page, installed.path());
                    let mut total = total.lock().expect("no panic");
                    total.run += one.run;
                    total.compared += one.compared;
                    total.not_run.extend(one.not_run);
                    total.faults.extend(one.faults);
                }
            });
        }
    });
    let mut total = total.into_inner().expect("no panic");
    total.not_run.sort();
    let mut summary = format!(
        "pages: {} blocks run, {} outputs compared, {} blocks not run:\n",
        total.run,
        total.compared,
        total.not_run.len()
    );
    for line in &total.not_run {
        let _ = writeln!(summary, "  {line}");
    }
    // Past the capture of the test runner: nothing is left out silently.
    let _ = std::io::stderr().write_all(summary.as_bytes());
    assert!(total.run > 0, "no page has commands");
    assert!(total.faults.is_empty(), "{}", total.faults.join("\n\n"));
}
