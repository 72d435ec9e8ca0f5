//! Several devices as rails that fail: the example `examples/rail-failover`, and the fixtures of
//! the pytest plug-in that its tests use.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use urnic_testkit::Folder;
use urnic_tests::build::{compiled_with, scratch, tree, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::served::in_process;

/// The Python that sees Debian's packages; another one may come first in the path.
const DEBIANS_PYTHON: &str = "/usr/bin/python3";

/// The rails of the example are down for some seconds each.
const LIMIT: Duration = Duration::from_secs(240);

/// Checks that pytest is installed.
fn pytest() -> Result<(), String> {
    let found = Program::plain(DEBIANS_PYTHON).line("-m pytest --version").run();
    match found.ok() {
        true => Ok(()),
        false => Err("python3-pytest is not installed".to_owned()),
    }
}

/// The package `urnic` of Python with this build of the program, as the wheel has it.
fn package(folder: &Folder) {
    let package = folder.file("urnic");
    fs::create_dir_all(package.join("files/bin")).expect("our folder");
    for file in fs::read_dir(tree().join("python/urnic")).expect("the package") {
        let file = file.expect("a file");
        if file.path().extension().is_some_and(|extension| extension == "py") {
            fs::copy(file.path(), package.join(file.file_name())).expect("our folder");
        }
    }
    symlink(urnic(), package.join("files/bin/urnic")).expect("our folder");
}

/// pytest with the plug-in, for the tests of this file of the tree.
fn tests(folder: &Folder, file: impl AsRef<Path>) -> Program {
    Program::plain(DEBIANS_PYTHON)
        .line("-m pytest -q -p no:cacheprovider -p urnic.pytest_plugin")
        .arg(tree().join(file))
        .env("PYTHONPATH", folder.path())
        // Where pytest makes its temporary folders, instead of one in /tmp named for the user.
        .env("PYTEST_DEBUG_TEMPROOT", folder.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
}

#[test]
fn the_plug_in_of_pytest_has_its_fixtures() {
    or_skip!(in_process("the tests look at the devices of processes"));
    or_skip!(pytest());
    let folder = Folder::inside(&scratch(), "rails-pytest");
    package(&folder);
    let said = tests(&folder, "python/tests/test_good.py")
        .run_for(LIMIT)
        .success();
    assert!(said.contains(" passed") && !said.contains("skipped"), "{said}");
}

#[test]
fn the_example_moves_its_traffic_between_rails() {
    or_skip!(in_process(
        "the connections are those of the device in the process"
    ));
    or_skip!(pytest());
    let source = "../../examples/rail-failover/rail_failover";
    let program = or_skip!(compiled_with(source, "rail_failover", &["-O2"]));
    let folder = Folder::inside(&scratch(), "rails-example");
    package(&folder);
    let tests = tests(&folder, "examples/rail-failover").env("RAIL_FAILOVER", program);
    let said = tests.run_for(LIMIT).success();
    assert!(said.contains(" passed") && !said.contains("skipped"), "{said}");
}
