//! The files of a crate use each other in one direction only: no file uses, even indirectly, a file
//! that uses it.
//!
//! `mod.rs` is one file apart from its children. A path leads to the file that defines its item: a
//! re-export on the way is not used, and neither are the modules on the way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use crate::sources::{Crate, Module, crates, crates_of_tests};

/// The end of a path.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Module(usize),
    /// Something that this file defines.
    Item(usize),
    /// Something of another crate.
    Elsewhere,
}

/// Names whose resolution is in progress, so that imports in a circle end.
type Pending = BTreeSet<(usize, String)>;

/// For each file the files that it uses, with one path that does.
type Uses = BTreeMap<usize, BTreeMap<usize, String>>;

/// Resolves paths.
struct Resolver<'c>(&'c [Module]);

impl Resolver<'_> {
    /// The end of a path in module `from`.
    fn resolve(&self, from: usize, names: &[String], pending: &mut Pending) -> End {
        let mut at = from;
        for (index, name) in names.iter().enumerate() {
            let end = match &name[..] {
                "crate" => End::Module(0),
                "self" => End::Module(at),
                "super" => End::Module(self.0[at].parent.unwrap_or(0)),
                _ => {
                    let last = index + 1 == names.len();
                    match self.find(at, name, last, pending) {
                        Some(end) => end,
                        None if index == 0 => End::Elsewhere,
                        // An item that a macro makes.
                        None => End::Item(self.0[at].file),
                    }
                }
            };
            match end {
                End::Module(module) => at = module,
                _ => return end,
            }
        }
        End::Module(at)
    }

    /// The definition of a name in a module.
    fn find(&self, at: usize, name: &str, last: bool, pending: &mut Pending) -> Option<End> {
        let module = &self.0[at];
        let item = module.items.contains(name).then_some(End::Item(module.file));
        let child = module.children.get(name).map(|child| End::Module(*child));
        let here = if last { item.or(child) } else { child.or(item) };
        if here.is_some() || !pending.insert((at, name.to_owned())) {
            return here;
        }
        let imports = module.imports.get(name).into_iter().flatten();
        let imported = imports.map(|names| self.resolve(at, names, pending)).next();
        let found = imported.or_else(|| {
            module.globs.iter().find_map(|names| {
                let End::Module(from) = self.resolve(at, names, pending) else {
                    return None;
                };
                self.find(from, name, last, pending)
            })
        });
        pending.remove(&(at, name.to_owned()));
        found
    }
}

/// The files that each file of a crate uses.
fn uses(of: &Crate) -> Uses {
    let resolver = Resolver(&of.modules);
    let mut uses = Uses::new();
    for (at, module) in of.modules.iter().enumerate() {
        let paths = module.paths.iter();
        let ends = paths.map(|names| (names, resolver.resolve(at, names, &mut Pending::new())));
        let globs = module.globs.iter().map(|names| {
            let end = match resolver.resolve(at, names, &mut Pending::new()) {
                End::Module(module) => End::Item(of.modules[module].file),
                end => end,
            };
            (names, end)
        });
        for (names, end) in ends.chain(globs) {
            if let End::Item(file) = end
                && file != module.file
            {
                let into = uses.entry(module.file).or_default();
                into.entry(file).or_insert_with(|| names.join("::"));
            }
        }
    }
    uses
}

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

/// The circles of a crate, each with the paths that close it; a file is in one of them at most.
fn circles(of: &Crate) -> Vec<String> {
    let uses = uses(of);
    let name = |file: usize| of.files[file].path.display().to_string();
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for file in 0..of.files.len() {
        if seen.contains(&file) {
            continue;
        }
        let Some(way) = circle(&uses, file) else { continue };
        let mut text = String::new();
        for pair in way.windows(2) {
            let path = &uses[&pair[0]][&pair[1]];
            let _ = writeln!(text, "  {} uses {path} of {}", name(pair[0]), name(pair[1]));
        }
        found.push(text);
        seen.extend(way);
    }
    found
}

#[test]
fn crates_have_no_module_cycles() {
    let of_tests = crates_of_tests();
    let found: Vec<String> = crates().iter().chain(&of_tests).flat_map(circles).collect();
    assert!(found.is_empty(), "{} circles:\n{}", found.len(), found.join("\n"));
}

/// A crate of these files, each with its text; the first is the root.
fn of(name: &str, files: &[(&str, &str)]) -> Crate {
    let folder = urnic_testkit::Folder::new(&format!("circles-{name}"));
    for (path, text) in files {
        let path = folder.file(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder is made");
        std::fs::write(path, text).expect("a file is written");
    }
    Crate::read(&folder.file(files[0].0))
}

#[test]
fn a_child_that_uses_its_user_is_a_cycle() {
    let of = of(
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
    let of = of(
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
    let of = of(
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
