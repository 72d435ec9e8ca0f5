//! rdma-core's own Python tests, all of them, of the version whose libraries run them.
//! `tests/fixtures/rdma-core-*.outcomes` has the required outcome of each, for both identities of
//! the device.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::time::Duration;

use urnic_tests::build::tree;
use urnic_tests::debian::{Debian, script, suites_turn};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::served::wanted;

/// Some three hundred tests, most of which end at once. They take a minute alone, and minutes on a
/// crowded machine.
const LIMIT: Duration = Duration::from_secs(1800);

/// One process reads the data that the other wrote as soon as that other's Write completed, which
/// does not prove its arrival; `rdma_cm.rs` tries it several times.
const LOOKS_TOO_EARLY: &str = "test_rdmacm.CMTestCase.test_rdmacm_async_write";

/// Messages of the tests about features that only a device in their process has: page faults of a
/// program's own, queues in a program's own memory.
const IN_PROCESS_ONLY: [&str; 2] = [
    "ODP is not supported - No ODP caps",
    "Parent Domain is not supported on this device",
];

/// The outcome of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// Skipped, for this reason.
    Skipped(String),
    /// The test has begun; its outcome is open.
    Unknown,
}

impl Outcome {
    /// Parses the last word of a test.
    fn parse(result: &str) -> Option<Outcome> {
        let reason = |quoted: &str| quoted.trim_matches(['\'', '"']).to_owned();
        match result {
            "ok" => Some(Outcome::Passed),
            "ERROR" | "FAIL" => Some(Outcome::Failed),
            _ => Some(Outcome::Skipped(reason(result.strip_prefix("skipped ")?))),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed => f.write_str("passed"),
            Outcome::Failed => f.write_str("failed"),
            Outcome::Skipped(reason) => write!(f, "skipped: {reason}"),
            Outcome::Unknown => f.write_str("no result"),
        }
    }
}

/// The outcomes in the output of the tests at `-v`: `module.Class.test`, and its outcome.
fn outcomes(output: &str) -> BTreeMap<String, Outcome> {
    let mut found = BTreeMap::new();
    let mut current = None;
    for line in output.lines() {
        if let Some((name, place)) = begun(line) {
            let place = place
                .strip_suffix(name)
                .map_or(place, |p| p.trim_end_matches('.'));
            let name = format!("{}.{name}", place.trim_start_matches("tests."));
            found.insert(name.clone(), Outcome::Unknown);
            current = Some(name);
        }
        // After the name, after the first line of its description, or after what the test itself
        // prints.
        let result = line.rsplit_once("... ").map_or(line, |(_, result)| result);
        if let Some(outcome) = Outcome::parse(result)
            && let Some(name) = current.take()
        {
            found.insert(name, outcome);
        }
        // The tracebacks have names and such words, too.
        if line.starts_with("=====") {
            break;
        }
    }
    found
}

/// The test that a line begins, and its place: `test_one (tests.module.Class.test_one)`, or without
/// the last name.
fn begun(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.split_once(" (")?;
    let (place, _) = rest.split_once(')')?;
    (name.starts_with("test_") && !name.contains(' ') && place.starts_with("tests.")).then_some((name, place))
}

/// The identity that the device shows to the tests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Identity {
    Iwarp,
    Roce,
}

/// The expected outcomes of the tests of one version.
struct Expected {
    version: u32,
    identity: Identity,
    /// Names, or beginnings of names with a `*` after; whether the test passes, fails or is
    /// skipped; the permitted reasons for a skip.
    lines: Vec<(String, String, Vec<String>)>,
}

impl Expected {
    fn read(version: u32, identity: Identity) -> Expected {
        let suffix = match identity {
            Identity::Iwarp => "",
            Identity::Roce => "-roce",
        };
        let path = tree().join(format!("tests/fixtures/rdma-core-{version}{suffix}.outcomes"));
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let parse = |line: &str| {
            let mut parts = line.splitn(3, ": ").map(str::to_owned);
            let reasons = |text: String| text.split(" | ").map(str::to_owned).collect();
            Some((
                parts.next()?,
                parts.next()?,
                parts.next().map(reasons).unwrap_or_default(),
            ))
        };
        Expected {
            version,
            identity,
            lines: lines.filter_map(parse).collect(),
        }
    }

    /// Whether the outcome is the required one; `None` if there is no entry for the test.
    fn allows(&self, name: &str, outcome: &Outcome) -> Option<bool> {
        let exact = self.lines.iter().find(|(test, ..)| test == name);
        let family = || {
            let mut families = self
                .lines
                .iter()
                .filter_map(|line| Some((line.0.strip_suffix('*')?, line)));
            families
                .find(|(family, _)| name.starts_with(family))
                .map(|(_, line)| line)
        };
        let (test, word, reasons) = exact.or_else(family)?;
        Some(match outcome {
            Outcome::Skipped(reason) if wanted() && IN_PROCESS_ONLY.contains(&reason.as_str()) => true,
            // A passing test may be skipped where the machine lacks a requirement.
            Outcome::Skipped(reason) => word != "failed" && (test.ends_with('*') || reasons.contains(reason)),
            _ => outcome.to_string() == *word,
        })
    }

    /// The row about them in the page of programs: how many of those that are no vendor's pass,
    /// fail and are skipped.
    fn row(&self) -> String {
        let own = || self.lines.iter().filter(|(test, ..)| !test.ends_with('*'));
        let count = |word| own().filter(|line| line.1 == word).count();
        let debian = if self.version == 44 { 12 } else { 13 };
        let (passed, failed, skipped) = (count("passed"), count("failed"), count("skipped"));
        let shown = match self.identity {
            Identity::Iwarp => "",
            Identity::Roce => ", `--identity roce`",
        };
        format!(
            "| {} (Debian {debian}){shown} | {passed} | {failed} | {skipped} |",
            self.version
        )
    }
}

fn suite(folder: &str, identity: Identity) -> Program {
    // The distribution's Python, even if PATH has another first: pyverbs belongs to it.
    let runner = format!("{folder}/run_tests.py");
    // Python 3.13 warns, amid the results, of forks in programs with threads.
    let flags = ["-B", "-W", "ignore", &runner, "--dev", "urnic0", "-v"];
    let suite = Program::new("/usr/bin/python3").args(flags);
    match identity {
        Identity::Iwarp => suite,
        Identity::Roce => suite.env("URNIC_IDENTITY", "roce"),
    }
}

/// Runs the tests and checks the outcome of each: only expected failures and skips happen, and all
/// expected failures do.
#[track_caller]
fn are_as_expected(program: &Program, expected: &Expected) {
    let version = expected.version;
    // All but test_rdmacm, which has to wait for its turn.
    let others = ["-k", "tests.test_[!r]*", "-k", "tests.test_r[!d]*"];
    let ended = program.clone().args(others).run_for(LIMIT);
    let turn = suites_turn();
    let of_rdmacm = program.clone().arg("test_rdmacm").run_for(LIMIT);
    drop(turn);
    let mut found = outcomes(&ended.output);
    found.extend(outcomes(&of_rdmacm.output));
    let mut wrong: Vec<String> = found
        .iter()
        .filter(|(name, outcome)| expected.allows(name, outcome) != Some(true))
        .filter(|(name, outcome)| {
            let too_early = *name == LOOKS_TOO_EARLY && **outcome == Outcome::Failed;
            !too_early || expected.identity == Identity::Roce
        })
        .map(|(name, outcome)| format!("{name}: {outcome}"))
        .collect();
    let missing =
        (expected.lines.iter()).filter(|(test, ..)| !test.ends_with('*') && !found.contains_key(test));
    wrong.extend(missing.map(|(test, ..)| format!("{test}: did not run")));
    assert!(
        wrong.is_empty(),
        "not as rdma-core-{version}.outcomes has it:\n{}\n{ended}\n{of_rdmacm}",
        wrong.join("\n")
    );
}

/// The release's version of rdma-core.
fn version_in(debian: &str) -> u32 {
    if debian == "bookworm" { 44 } else { 56 }
}

/// The tests of this machine's version.
#[track_caller]
fn are_as_expected_here(identity: Identity) {
    let folder = or_skip!(script("rdma-core-tests", &[]));
    let other = or_skip!(script("other-debian", &[]));
    let here = if other == "bookworm" { "trixie" } else { "bookworm" };
    let expected = Expected::read(version_in(here), identity);
    are_as_expected(&suite(&folder, identity), &expected);
}

/// The tests of the version that the other Debian has.
#[track_caller]
fn are_as_expected_there(identity: Identity) {
    let debian = or_skip!(Debian::other());
    let suite = or_skip!(debian.program_with_tests(suite("/tmp/urnic/tests", identity)));
    are_as_expected(&suite, &Expected::read(version_in(&debian.suite), identity));
}

#[test]
fn rdma_cores_tests_come_out_as_expected() {
    are_as_expected_here(Identity::Iwarp);
}

#[test]
fn rdma_cores_tests_of_a_roce_nic_come_out_as_expected() {
    are_as_expected_here(Identity::Roce);
}

#[test]
fn the_other_debians_come_out_as_expected() {
    are_as_expected_there(Identity::Iwarp);
}

#[test]
fn the_other_debians_tests_of_a_roce_nic_come_out_as_expected() {
    are_as_expected_there(Identity::Roce);
}

#[test]
fn the_page_of_programs_counts_them() {
    let page = "docs/reference/programs.md";
    let text = fs::read_to_string(tree().join(page)).unwrap();
    for version in [44, 56] {
        for identity in [Identity::Iwarp, Identity::Roce] {
            let row = Expected::read(version, identity).row();
            assert!(text.contains(&row), "{page} lacks this row:\n{row}");
        }
    }
}

#[test]
fn results_are_found_on_every_line() {
    let output = "\
test_a (tests.test_x.C.test_a) ... ok
test_b (tests.test_x.C.test_b)
What it does ... FAIL
test_c (tests.test_x.C) ... something printed
ERROR
test_d (tests.test_x.C.test_d) ... skipped 'XRC is not supported'
test_e (tests.test_x.C.test_e) ...
======
FAIL: test_b (tests.test_x.C.test_b)
ok
";
    let found = outcomes(output);
    let of = |name: &str| found[&format!("test_x.C.{name}")].to_string();
    assert_eq!(
        ["test_a", "test_b", "test_c", "test_d", "test_e"].map(of),
        [
            "passed",
            "failed",
            "failed",
            "skipped: XRC is not supported",
            "no result"
        ]
    );
    assert_eq!(found.len(), 5);
}
