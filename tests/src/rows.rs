//! The rows of the protocols' rules, and the tests that show each row: the source of
//! `docs/reference/conformance.md`.
//!
//! A test shows the rows whose ids its name begins with: `mpa_c_04_…`, and with several,
//! `rdm_o_03_and_o_04_…`. `tests/fixtures/conformance.toml` has the rows, the names of other tests
//! that show a row, and the reasons for the rows that no test shows.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use toml::{Table, Value};

use crate::build::tree;

/// The file with rows, further tests and reasons.
const ROWS: &str = "tests/fixtures/conformance.toml";
/// The crates with tests.
const CRATES: [&str; 7] = [
    "wire",
    "verbs-api",
    "firmware-model",
    "driver-shim",
    "provider",
    "rpc-rdma",
    "tests",
];
/// The parts of the table, by how the ids of their rows begin.
const PARTS: [(&str, &str); 18] = [
    ("MPA", "MPA (RFC 5044)"),
    ("EMPA", "Enhanced MPA (RFC 6581)"),
    (
        "S001",
        "The RTR frame proposed in 2007 (`mpa.rtr_frame`, off unless set)",
    ),
    ("DDP", "DDP (RFC 5041)"),
    ("RDM", "RDMAP (RFC 5040)"),
    ("X73", "RDMAP extensions (RFC 7306)"),
    ("SEC", "Security (RFC 5042)"),
    ("VRB", "Verbs"),
    (
        "UD",
        "Datagrams (InfiniBand Architecture Specification vol. 1: IBTA)",
    ),
    (
        "UC",
        "Unreliable connections (InfiniBand Architecture Specification vol. 1: IBTA)",
    ),
    (
        "ROCE",
        "Connections of RoCE v2 (InfiniBand Architecture Specification vol. 1: IBTA)",
    ),
    (
        "CMU",
        "rdma_cm for datagrams (InfiniBand Architecture Specification vol. 1: IBTA)",
    ),
    (
        "CMC",
        "The communication manager's connections (InfiniBand Architecture Specification vol. 1: IBTA)",
    ),
    ("CMP", "Ports of rdma_cm connections"),
    ("SHM", "Peers on the same host"),
    ("RPC", "RPC-over-RDMA version one (RFC 8166, 8167, 8797)"),
    ("SCTP", "SCTP as the lower layer (RFC 5043)"),
    ("PEER", "What other implementations do"),
];

/// A test.
#[derive(Debug)]
struct Test {
    name: String,
    /// The file of the test, from the root of the tree.
    file: String,
    /// The test runs in `make soak` or `make interop` only.
    long: bool,
}

/// A row: its level, its source, and its requirement.
#[derive(Debug)]
struct Row {
    id: String,
    words: [String; 3],
}

/// The ids that a test's name begins with.
fn ids(name: &str) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    let mut words = name.split('_').filter(|word| *word != "and").peekable();
    let (mut group, mut letter) = (String::new(), String::new());
    let mut previous: u8 = 0;
    while let Some(word) = words.peek().copied() {
        if PARTS.iter().any(|(part, _)| part.eq_ignore_ascii_case(word)) {
            group = word.to_uppercase();
            letter.clear();
            words.next();
            if matches!(&group[..], "MPA" | "DDP" | "RDM" | "VRB" | "RPC") {
                letter = words.next().unwrap_or_default().to_uppercase();
            }
        } else if !letter.is_empty() && word.len() == 1 && word.bytes().all(|b| b.is_ascii_lowercase()) {
            // `…_o_03_and_o_04_…`; or the name continues with a word of one letter.
            let mut ahead = words.clone();
            ahead.next();
            if !ahead.next().is_some_and(is_number) {
                break;
            }
            letter = word.to_uppercase();
            words.next();
        }
        // `…_11_to_14_…`
        let through = word == "to" && !ids.is_empty();
        if through {
            words.next();
        }
        let Some(number) = words
            .next()
            .filter(|number| !group.is_empty() && is_number(number))
        else {
            break;
        };
        let last: u8 = number.parse().unwrap_or_default();
        let first = if through { previous + 1 } else { last };
        for number in first..=last {
            let parts = [group.clone(), letter.clone(), format!("{number:02}")];
            let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            ids.push(parts.join("-"));
        }
        previous = last;
    }
    ids
}

fn is_number(word: &str) -> bool {
    word.len() == 2 && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// All tests in the files of a folder.
fn tests(folder: &Path, found: &mut Vec<Test>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder of the tree")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            tests(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let file = path
                .strip_prefix(tree())
                .expect("in the tree")
                .display()
                .to_string();
            let text = std::fs::read_to_string(&path).expect("a source file");
            tests_in(&text, &file, found);
        }
    }
}

fn tests_in(text: &str, file: &str, found: &mut Vec<Test>) {
    let (mut is_test, mut long) = (false, false);
    for line in text.lines().map(str::trim) {
        is_test |= line == "#[test]";
        long |= line.starts_with("#[ignore");
        // Another test may call it.
        let line = line.strip_prefix("pub(super) ").unwrap_or(line);
        let Some((name, rest)) = line.strip_prefix("fn ").and_then(|line| line.split_once('(')) else {
            continue;
        };
        // The checks of `urnic conformance` are tests as well.
        if is_test || rest.contains("-> Outcome") && file.contains("/checks/") {
            found.push(Test {
                name: name.to_owned(),
                file: file.to_owned(),
                long,
            });
        }
        (is_test, long) = (false, false);
    }
}

/// The content of the table, and its faults.
#[derive(Debug, Default)]
struct Made {
    text: String,
    complaints: Vec<String>,
}

fn strings(value: &Value) -> Vec<String> {
    let array = value.as_array().into_iter().flatten();
    array
        .filter_map(|value| value.as_str().map(str::to_owned))
        .collect()
}

fn table<'t>(of: &'t Table, name: &str) -> &'t Table {
    of[name].as_table().expect("a table")
}

/// The document, of rows and tests.
fn document(source: &str, tests: &[Test]) -> Made {
    let source: Table = source.parse().expect("TOML");
    let mut made = Made::default();
    let rows: Vec<Row> = table(&source, "rows")
        .iter()
        .map(|(id, words)| Row {
            id: id.clone(),
            words: strings(words).try_into().expect("level, source and rule"),
        })
        .collect();
    let mut shown: BTreeMap<String, Vec<&Test>> = BTreeMap::new();
    for test in tests {
        for id in ids(&test.name) {
            if !rows.iter().any(|row| row.id == id) {
                made.complaints
                    .push(format!("{}: there is no row {id}", test.name));
            }
            shown.entry(id).or_default().push(test);
        }
    }
    for (id, names) in table(&source, "shown") {
        for name in strings(names) {
            // A name that ends in _ matches all names that begin with it.
            let fits =
                |test: &&Test| test.name == name || name.ends_with('_') && test.name.starts_with(&name);
            let before = shown.entry(id.clone()).or_default();
            let more: Vec<&Test> = tests.iter().filter(fits).collect();
            if more.is_empty() {
                made.complaints.push(format!("{id}: there is no test {name}"));
            }
            before.extend(more);
        }
    }
    let reasons = table(&source, "reasons");
    for id in reasons.keys().chain(table(&source, "shown").keys()) {
        if !rows.iter().any(|row| row.id == *id) {
            made.complaints.push(format!("{ROWS}: there is no row {id}"));
        }
    }
    for row in &rows {
        let part = row.id.split('-').next();
        if !PARTS.iter().any(|(name, _)| part == Some(*name)) {
            made.complaints
                .push(format!("{}: in no part of the table", row.id));
        }
    }
    let mut counts = [0; 3];
    let mut body = String::new();
    for (part, title) in PARTS {
        let _ = write!(
            body,
            "\n## {title}\n\n| Row | Level | Source | Rule | Tests |\n|---|---|---|---|---|\n"
        );
        for row in rows.iter().filter(|row| row.id.split('-').next() == Some(part)) {
            let [level, from, rule] = &row.words;
            let by = match (shown.get(&row.id), reasons.get(&row.id).and_then(Value::as_str)) {
                (Some(tests), None) => {
                    counts[0] += 1;
                    links(tests)
                }
                (None, Some(reason)) => {
                    counts[1] += 1;
                    format!("*{reason}*")
                }
                (Some(_), Some(_)) => {
                    made.complaints
                        .push(format!("{}: has tests and a reason to have none", row.id));
                    continue;
                }
                (None, None) => {
                    counts[2] += 1;
                    if level.starts_with("MUST") {
                        made.complaints
                            .push(format!("{}: neither a test nor a reason", row.id));
                    }
                    "no test".to_owned()
                }
            };
            let _ = writeln!(body, "| {} | {level} | {from} | {rule} | {by} |", row.id);
        }
    }
    let [by_tests, by_reasons, open] = counts;
    let _ = write!(
        made.text,
        "# Conformance\n\n\
         Each rule of the protocols that the device follows, with the tests that show it. All tests run in `make test-all`, except those marked †, which run\n\
         in `make soak` or `make interop` only. A rule that does not apply has the reason. {} rows: {by_tests} with tests, {by_reasons} that do not apply,\n\
         {open} open.\n\n\
         Generated from `{ROWS}` and the names of the tests by `URNIC_REGENERATE=1 cargo test -p urnic-tests --lib rows`. The same test fails when\n\
         this file differs from them, or when a MUST has neither a test nor a reason.\n",
        rows.len()
    );
    made.text.push_str(&body);
    made
}

/// Tests as links to their files.
fn links(tests: &[&Test]) -> String {
    let mut links: Vec<String> = Vec::new();
    for test in tests {
        let mark = if test.long { " †" } else { "" };
        let link = format!("[{}](../../{}){mark}", test.name, test.file);
        if !links.contains(&link) {
            links.push(link);
        }
    }
    links.join("<br>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_conformance_md_matches_the_tests() {
        let mut found = Vec::new();
        for part in CRATES {
            tests(&tree().join(part), &mut found);
        }
        let source = std::fs::read_to_string(tree().join(ROWS)).expect("the rows");
        let made = document(&source, &found);
        assert!(made.complaints.is_empty(), "{:#?}", made.complaints);
        let path = tree().join("docs/reference/conformance.md");
        if std::env::var_os("URNIC_REGENERATE").is_some() {
            std::fs::write(&path, &made.text).expect("the document is written");
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == made.text,
            "docs/reference/conformance.md differs from {ROWS} and the tests: URNIC_REGENERATE=1 cargo test -p urnic-tests --lib rows"
        );
    }

    #[test]
    fn test_names_contain_row_ids() {
        for (name, expected) in [
            ("mpa_c_04_a_bad_crc_terminates", &["MPA-C-04"][..]),
            ("empa_17_empa_18_the_rtr", &["EMPA-17", "EMPA-18"]),
            ("empa_18_and_19_the_rtr_takes", &["EMPA-18", "EMPA-19"]),
            ("rdm_o_03_and_o_04_a_read", &["RDM-O-03", "RDM-O-04"]),
            ("rdm_r_05_and_vrb_r_01_outstanding", &["RDM-R-05", "VRB-R-01"]),
            (
                "mpa_s_09_s_10_empa_08_malformed",
                &["MPA-S-09", "MPA-S-10", "EMPA-08"],
            ),
            ("ddp_s_04_a_zero_length_write", &["DDP-S-04"]),
            ("empa_11_to_13_the_rtr", &["EMPA-11", "EMPA-12", "EMPA-13"]),
            ("s001_04_both", &["S001-04"]),
            ("rpc_bd_07_and_h_01_a_call", &["RPC-BD-07", "RPC-H-01"]),
            ("mpa_frames_are_found", &[]),
            ("a_loop_goes_on", &[]),
        ] {
            assert_eq!(ids(name), expected, "{name}");
        }
    }

    const SOURCE: &str = r#"
        [rows]
        MPA-C-01 = ["MUST", "x", "one"]
        MPA-C-02 = ["MUST", "x", "two"]
        MPA-C-03 = ["MAY", "x", "three"]
        [shown]
        MPA-C-02 = ["other_"]
        [reasons]
    "#;

    fn test(name: &str) -> Test {
        Test {
            name: name.to_owned(),
            file: "f.rs".to_owned(),
            long: false,
        }
    }

    #[test]
    fn missing_tests_and_wrong_ids_and_names_are_reported() {
        let made = document(SOURCE, &[test("mpa_c_01_x"), test("other_y")]);
        assert_eq!(made.complaints, [] as [&str; 0]);
        assert!(
            made.text
                .contains("3 rows: 2 with tests, 0 that do not apply,\n1 open"),
            "{}",
            made.text
        );
        let complaints = document(SOURCE, &[test("mpa_c_07_x")]).complaints.join("; ");
        for part in ["no row MPA-C-07", "no test other_", "MPA-C-01: neither"] {
            assert!(complaints.contains(part), "{complaints}");
        }
    }

    #[test]
    fn tests_are_found_with_their_attributes() {
        let mut found = Vec::new();
        let text = "#[test]\n#[ignore = \"long\"]\nfn a() {\nfn help() {}\n}\n#[test]\npub(super) fn b() {\n";
        tests_in(text, "f.rs", &mut found);
        let found: Vec<_> = found.iter().map(|test| (&test.name[..], test.long)).collect();
        assert_eq!(found, [("a", true), ("b", false)]);
    }
}
