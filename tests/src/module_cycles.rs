//! The files of a crate use each other in one direction only: no file uses, even indirectly, a file
//! that uses it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use crate::sources::{Crate, crates, crates_of_tests};
use crate::uses::{Uses, uses};

/// The shortest way from a file back to itself.
fn circle(uses: &Uses, start: usize) -> Option<Vec<usize>> {
    let mut before: BTreeMap<usize, usize> = BTreeMap::new();
    let mut waiting = VecDeque::from([start]);
    while let Some(file) = waiting.pop_front() {
        for next in uses.get(&file).into_iter().flat_map(BTreeMap::keys) {
            if *next == start {
                let mut way = vec![start, file];
                while way.last() != Some(&start) {
                    way.push(before[&way[way.len() - 1]]);
                }
                way.reverse();
                return Some(way);
            }
            if *next != start && !before.contains_key(next) {
                before.insert(*next, file);
                waiting.push_back(*next);
            }
        }
    }
    None
}

/// The circles, each with the paths that close it; what has one of these `names` is in one of them
/// at most.
pub(crate) fn circles_in(uses: &Uses, names: &[String]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for start in 0..names.len() {
        if seen.contains(&start) {
            continue;
        }
        let Some(way) = circle(uses, start) else { continue };
        let mut text = String::new();
        for pair in way.windows(2) {
            let path = &uses[&pair[0]][&pair[1]];
            let _ = writeln!(text, "  {} uses {path} of {}", names[pair[0]], names[pair[1]]);
        }
        found.push(text);
        seen.extend(way);
    }
    found
}

/// The circles of a crate's files.
fn circles(of: &Crate) -> Vec<String> {
    let names: Vec<String> = of
        .files
        .iter()
        .map(|file| file.path.display().to_string())
        .collect();
    circles_in(&uses(of), &names)
}

#[test]
fn crates_have_no_module_cycles() {
    let of_tests = crates_of_tests();
    let found: Vec<String> = crates().iter().chain(&of_tests).flat_map(circles).collect();
    assert!(found.is_empty(), "{} circles:\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_child_that_uses_its_user_is_a_cycle() {
    let of = Crate::of(
        "child",
        &[
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod b; pub struct A; fn f() { b::g() }"),
            ("a/b.rs", "use super::A; pub fn g() -> A { A }"),
        ],
    );
    assert_eq!(circles(&of).len(), 1);
}

#[test]
fn a_path_leads_through_re_exports_to_its_item() {
    let of = Crate::of(
        "re_export",
        &[
            (
                "lib.rs",
                "mod a; mod b; pub use a::A; use b as c; fn f() { c::f() }",
            ),
            ("a.rs", "pub struct A;"),
            ("b.rs", "use crate::A; pub fn f() { let _ = A; }"),
        ],
    );
    assert_eq!(circles(&of), Vec::<String>::new());
}

#[test]
fn tests_and_macros_are_distinguished() {
    let of = Crate::of(
        "macros",
        &[
            ("lib.rs", "mod a; mod b;"),
            (
                "a.rs",
                "pub fn f() { println!(\"{}\", crate::b::g()) }\n#[cfg(test)] mod tests { use crate::b::X; }",
            ),
            (
                "b.rs",
                "pub fn g() -> u8 { 1 }\n#[cfg(test)] fn t() { crate::a::f() }",
            ),
        ],
    );
    assert_eq!(circles(&of), Vec::<String>::new());
    assert_eq!(uses(&of)[&1][&2], "crate::b::g");
}
