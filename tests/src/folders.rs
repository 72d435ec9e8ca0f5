//! The folders of a crate use each other in one direction only, and those of the model in the order
//! of [`MODEL`].
//!
//! A file in the root folder of a crate counts as a folder. The root file may use all of them.

use std::collections::BTreeMap;
use std::path::Path;

use crate::build::tree;
use crate::module_cycles::circles_in;
use crate::sources::{Crate, crates};
use crate::uses::{Uses, uses};

/// The folders of the model, bottom first. A folder uses folders above it in this list only.
/// ARCHITECTURE.md has the same list, top first.
const MODEL: [&str; 29] = [
    "table",
    "shard",
    "tuning",
    "time",
    "counters",
    "probes",
    "log_limit",
    "handshakes",
    "sys",
    "host",
    "memory",
    "events",
    "queues",
    "stream",
    "frames",
    "capture",
    "faulty",
    "timed",
    "config",
    "llp",
    "transport",
    "rdmap",
    "datagram",
    "roce",
    "qp",
    "schedule",
    "runtime",
    "command",
    "device",
];

/// The folders of a crate, and for each those that it uses.
struct Folders {
    names: Vec<String>,
    uses: Uses,
}

impl Folders {
    fn read(of: &Crate) -> Folders {
        let root = of.files[0].path.parent().unwrap_or(Path::new(""));
        let mut names: Vec<String> = Vec::new();
        let mut folders: BTreeMap<usize, usize> = BTreeMap::new();
        for (file, source) in of.files.iter().enumerate().skip(1) {
            let path = source.path.strip_prefix(root).unwrap_or(&source.path);
            let path = path.with_extension("");
            let first = path.components().next().expect("a file has a name");
            let name = first.as_os_str().to_string_lossy();
            let known = names.iter().position(|known| *known == name);
            folders.insert(file, known.unwrap_or(names.len()));
            if known.is_none() {
                names.push(name.into_owned());
            }
        }
        let mut between = Uses::new();
        for (user, used) in uses(of) {
            for (used, path) in used {
                if let (Some(from), Some(to)) = (folders.get(&user), folders.get(&used))
                    && from != to
                {
                    let path = format!("{path} (in {})", of.files[user].path.display());
                    between.entry(*from).or_default().entry(*to).or_insert(path);
                }
            }
        }
        Folders { names, uses: between }
    }

    /// What is wrong with the folders if this is their order, bottom first.
    fn complaints(&self, order: &[&str]) -> Vec<String> {
        let floor = |folder: usize| order.iter().position(|name| *name == self.names[folder]);
        let mut complaints = Vec::new();
        for (folder, name) in self.names.iter().enumerate() {
            if floor(folder).is_none() {
                complaints.push(format!("{name} has no place in the order"));
            }
            for (used, path) in self.uses.get(&folder).into_iter().flatten() {
                if floor(*used) >= floor(folder) {
                    complaints.push(format!(
                        "{name} uses {path} of {}, not below it",
                        self.names[*used]
                    ));
                }
            }
        }
        let is_known = |name: &&&str| self.names.iter().any(|known| known == **name);
        let missing = order.iter().filter(|name| !is_known(name));
        complaints.extend(missing.map(|name| format!("{name} does not exist")));
        complaints
    }
}

fn model() -> &'static Crate {
    let root = Path::new("firmware-model/model/src/lib.rs");
    let model = crates().iter().find(|of| of.files[0].path == root);
    model.expect("the model is a member of a workspace")
}

#[test]
fn folders_of_the_model_use_folders_below_them() {
    let complaints = Folders::read(model()).complaints(&MODEL);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn transports_of_the_model_do_not_use_each_other() {
    let folders = Folders::read(model());
    let number = |name: &str| folders.names.iter().position(|known| known == name);
    // Their order in the list keeps each from using those after it.
    let transports = ["rdmap", "datagram", "roce"];
    let numbers = transports.map(|name| number(name).expect("a transport"));
    for (at, user) in numbers.iter().enumerate() {
        for (used, name) in numbers.iter().zip(transports).take(at) {
            let path = folders.uses.get(user).and_then(|all| all.get(used));
            assert_eq!(path, None, "{} uses {name}", transports[at]);
        }
    }
}

#[test]
fn folders_of_a_crate_are_not_in_a_circle() {
    let mut found = Vec::new();
    for of in crates() {
        let folders = Folders::read(of);
        found.extend(circles_in(&folders.uses, &folders.names));
    }
    assert!(found.is_empty(), "{} circles:\n{}", found.len(), found.join("\n"));
}

#[test]
fn the_architecture_lists_the_models_folders() {
    let path = tree().join("ARCHITECTURE.md");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let after = text
        .split_once("### The folders of the model")
        .map(|(_, after)| after);
    let section = after.expect("the section").split("\n#").next().unwrap_or("");
    // The first cell of a row has names of folders, each in backticks.
    let cells = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    let listed = cells.flat_map(|cell| cell.split(", "));
    let mut listed: Vec<&str> = listed.map(|name| name.trim().trim_matches('`')).collect();
    listed.reverse();
    assert_eq!(listed, MODEL);
}

/// What is wrong with a crate of three folders in the order `low`, `middle`, `high`, in which `low`
/// and `high` have these texts.
fn about(name: &str, low: &str, high: &str) -> String {
    let of = Crate::of(
        name,
        &[
            ("lib.rs", "mod low; mod middle; mod high; pub use high::High;"),
            ("low.rs", low),
            ("middle.rs", "pub struct Middle;"),
            ("high/mod.rs", "mod part; pub use part::High;"),
            ("high/part.rs", high),
        ],
    );
    Folders::read(&of)
        .complaints(&["low", "middle", "high"])
        .join("; ")
}

#[test]
fn an_upward_use_between_folders_is_reported() {
    let high = "use crate::middle::Middle; pub struct High(Middle);";
    assert_eq!(about("down", "pub struct Low;", high), "");
    for (name, low) in [
        ("up", "use crate::high::High;"),
        ("up-through-the-root", "fn f(_: crate::High) {}"),
        ("up-by-super", "use super::high::High;"),
    ] {
        let complaints = about(name, low, high);
        assert!(complaints.starts_with("low uses "), "{low}: {complaints}");
        assert!(
            complaints.ends_with(" of high, not below it"),
            "{low}: {complaints}"
        );
    }
    assert_eq!(
        about("in-a-test", "#[cfg(test)] mod tests { use crate::High; }", high),
        ""
    );
}

#[test]
fn the_order_has_exactly_the_folders_that_exist() {
    let of = Crate::of(
        "order",
        &[("lib.rs", "mod a; mod b;"), ("a.rs", ""), ("b.rs", "")],
    );
    let complaints = Folders::read(&of).complaints(&["a", "c"]);
    assert_eq!(complaints, ["b has no place in the order", "c does not exist"]);
}
