//! Which files of a crate use which others.
//!
//! `mod.rs` is one file apart from its children. A path leads to the file that defines its item: a
//! re-export on the way is not used, and neither are the modules on the way.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::{Crate, Module};

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
pub(crate) type Uses = BTreeMap<usize, BTreeMap<usize, String>>;

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
pub(crate) fn uses(of: &Crate) -> Uses {
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
