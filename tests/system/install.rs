//! `make install`, and the use of the installed files.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use urnic_testkit::Folder;
use urnic_tests::build::{plugin, tree, urnic};
use urnic_tests::program::Program;
use urnic_tests::skip::{self, installed};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::{Pair, or_skip};

/// A folder that every user can read, with the files under test installed below it. Removed when
/// dropped.
struct Destination(Folder);

impl Destination {
    fn new() -> Self {
        let folder = Folder::new("install");
        // The place where `make` finds the built files.
        let built = folder.file("target/release");
        std::fs::create_dir_all(&built).expect("a folder in the temporary folder");
        for folder in [folder.path(), &folder.file("target"), &built] {
            std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).expect("our own folder");
        }
        for file in [plugin(), &urnic()] {
            std::fs::copy(file, built.join(file.file_name().expect("a file"))).expect("room for a copy");
        }
        Self(folder)
    }

    fn make(&self, goal: &str) {
        let destination = format!("DESTDIR={}", self.0.file("root").display());
        Program::plain("make")
            .arg("-C")
            .arg(tree())
            .args([goal, &destination, "PREFIX=/usr"])
            .env("CARGO_TARGET_DIR", self.0.file("target"))
            .run()
            .success();
    }

    /// A command line of the installed `urnic`.
    fn urnic(&self, line: &str) -> Program {
        Program::plain(self.0.file("root/usr/bin/urnic")).line(line)
    }
}

/// The files and links below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| match path.is_dir() && !path.is_symlink() {
            true => files(&path),
            false => vec![path],
        })
        .collect()
}

#[test]
fn an_installation_is_complete_and_can_be_removed() {
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("make"));
    if std::env::var_os("URNIC_LIB").is_some() {
        return skip::report("URNIC_LIB names the plug-in");
    }
    let destination = Destination::new();
    destination.make("install");
    for file in ["valgrind.supp", "tsan.supp", "faults/rail-down.faults"] {
        let installed = destination.0.file("root/usr/share/urnic").join(file);
        assert!(installed.is_file(), "{}", installed.display());
    }
    let pages = destination.0.file("root/usr/share/doc/urnic");
    let page = std::fs::read_to_string(pages.join("README.md")).expect("the front page");
    for link in page
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
    {
        let local = !link.contains(':') && !link.is_empty();
        assert!(!local || pages.join(link).is_file(), "README.md links to {link}");
    }
    is_enough(&destination, |program| program);
    if skip::root().is_ok() {
        let staged = Staged::new();
        is_enough(&destination, |program| staged.program(NOBODY, program));
    }
    destination.make("uninstall");
    assert_eq!(files(&destination.0.file("root")), Vec::<PathBuf>::new());
}

fn is_enough(destination: &Destination, as_user: impl Fn(Program) -> Program) {
    let text = as_user(destination.urnic("doctor")).run().success();
    let shown = format!(
        "{}/root/usr/lib/urnic/liburnic.so",
        destination.0.path().display()
    );
    for shown in [&shown, "there for every provider ABI", "exchanged 1000 messages"] {
        assert!(text.contains(shown), "no {shown:?} in:\n{text}");
    }
    let text = as_user(destination.urnic("run -- ibv_devinfo")).run().success();
    assert!(text.contains("urnic0"), "{text}");
    let script = format!(
        "eval \"$('{}/root/usr/bin/urnic' env)\" && ibv_devices",
        destination.0.path().display()
    );
    let text = as_user(Program::plain("sh").args(["-c", &script]))
        .run()
        .success();
    assert!(text.contains("urnic0"), "{text}");
    Pair::new(&as_user(destination.urnic("run -- ibv_rc_pingpong -g 0"))).succeeds();
}

#[test]
fn the_manual_page_has_no_mistakes() {
    let page = tree().join("docs/urnic.1");
    let groff = or_skip!(installed("groff"));
    let text = Program::plain(groff)
        .line("-man -Tutf8 -ww -z")
        .arg(page)
        .run()
        .success();
    assert_eq!(text, "");
}

#[test]
fn each_command_has_a_manual_page() {
    let groff = or_skip!(installed("groff"));
    let folder = Folder::new("man");
    let urnic = |line: &str| Program::plain(urnic()).line(line);
    urnic("man --into").arg(folder.path()).run().success();
    let pages = files(folder.path());
    for page in &pages {
        // Long words, as STATUS|VENDOR_ERR|ERRNO, do not fill a line.
        let text = Program::plain(&groff)
            .line("-man -Kutf8 -Tutf8 -ww -Wbreak -z")
            .arg(page)
            .run()
            .success();
        assert_eq!(text, "", "{}", page.display());
    }
    let names: Vec<_> = pages.iter().filter_map(|page| page.file_stem()).collect();
    for command in ["run", "hosts", "top", "trace", "trace-join"] {
        let name = format!("urnic-{command}");
        assert!(names.iter().any(|page| *page == name.as_str()), "{names:?}");
        let page = urnic(&format!("man {command}")).run().success();
        assert!(page.contains(&name.replace('-', "\\-")), "{page}");
    }
    let wrong = urnic("man nothing").run().failure();
    assert!(
        wrong.contains("nothing is no command; there are run, "),
        "{wrong}"
    );
}
