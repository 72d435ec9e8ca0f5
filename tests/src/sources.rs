//! The Rust sources of the product, parsed: the module tree of each crate with what its files
//! define and name.
//!
//! Tests are left out: modules and items under `#[cfg(test)]`, the folders `tests` of the crates,
//! and the crate of the system tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Block, ImplItem, Item, ItemMod, ItemUse, Macro, Signature, UseTree};
use toml::Table;

use crate::build::tree;

/// A path of names, such as `crate::memory::Table`.
pub(crate) type Names = Vec<String>;

/// A function with a body.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Lines from the signature to the closing brace.
    pub(crate) lines: usize,
}

/// A source file of a crate.
#[derive(Debug)]
pub(crate) struct File {
    /// The path from the root of the tree.
    pub(crate) path: PathBuf,
    pub(crate) functions: Vec<Function>,
}

/// A module, in a file of its own or inside another module's file.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// The index of the file in [`Crate::files`].
    pub(crate) file: usize,
    pub(crate) parent: Option<usize>,
    /// Modules in this one, by name.
    pub(crate) children: BTreeMap<String, usize>,
    /// Names that `use` brings in, with their paths.
    pub(crate) imports: BTreeMap<String, Vec<Names>>,
    /// Paths that end in `::*`.
    pub(crate) globs: Vec<Names>,
    /// Names that the module itself defines.
    pub(crate) items: BTreeSet<String>,
    /// All paths in the module, those of `use` among them.
    pub(crate) paths: BTreeSet<Names>,
}

/// A crate: the files and modules below one root file. Module 0 is the root.
#[derive(Debug, Default)]
pub(crate) struct Crate {
    pub(crate) files: Vec<File>,
    pub(crate) modules: Vec<Module>,
}

impl Crate {
    /// Parses the crate whose root is this file.
    pub(crate) fn read(root: &Path) -> Crate {
        let folder = root.parent().expect("a file is in a folder").to_owned();
        let mut made = Crate::default();
        made.enter(root, &folder, None);
        made
    }

    /// A crate of these files, each with its text; the first is the root.
    pub(crate) fn of(name: &str, files: &[(&str, &str)]) -> Crate {
        let folder = urnic_testkit::Folder::new(&format!("crate-{name}"));
        for (path, text) in files {
            let path = folder.file(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder is made");
            std::fs::write(path, text).expect("a file is written");
        }
        Crate::read(&folder.file(files[0].0))
    }

    /// Adds the module in `path`; its modules' files are in `folder`.
    fn enter(&mut self, path: &Path, folder: &Path, parent: Option<usize>) -> usize {
        let text =
            std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        self.files.push(File {
            path: path.strip_prefix(tree()).unwrap_or(path).to_owned(),
            functions: Vec::new(),
        });
        self.add(self.files.len() - 1, parent, folder, &parsed.items)
    }

    fn add(&mut self, file: usize, parent: Option<usize>, folder: &Path, items: &[Item]) -> usize {
        let module = self.modules.len();
        self.modules.push(Module {
            file,
            parent,
            ..Module::default()
        });
        let mut visitor = Visitor {
            made: self,
            module,
            folder,
        };
        for item in items {
            visitor.visit_item(item);
        }
        module
    }
}

/// The workspaces, by their folders in the tree: the RNIC's, and that of RPC-over-RDMA.
pub(crate) const WORKSPACES: [&str; 2] = ["", "rpc-rdma"];

/// The manifest in this folder of the tree.
pub(crate) fn manifest(folder: impl AsRef<Path>) -> Table {
    let path = tree().join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse()
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The members of the workspaces, by their folders in the tree.
pub(crate) fn members() -> Vec<PathBuf> {
    let of = |workspace: &str| {
        let manifest = manifest(workspace);
        let members = manifest["workspace"]["members"]
            .as_array()
            .expect("an array")
            .clone();
        let folder = PathBuf::from(workspace);
        let names = members
            .into_iter()
            .filter_map(|member| Some(folder.join(member.as_str()?)));
        names.collect::<Vec<_>>()
    };
    WORKSPACES.into_iter().flat_map(of).collect()
}

/// All crates of the product, by their root files: libraries and programs of the workspaces'
/// members.
pub(crate) fn crates() -> &'static [Crate] {
    static CRATES: OnceLock<Vec<Crate>> = OnceLock::new();
    CRATES.get_or_init(|| read_crates(|member| member != Path::new("tests")))
}

/// The crate of the tests: its library and its programs.
pub(crate) fn crates_of_tests() -> Vec<Crate> {
    read_crates(|member| member == Path::new("tests"))
}

/// Reads the workspaces' members that `select` takes.
fn read_crates(select: impl Fn(&Path) -> bool) -> Vec<Crate> {
    let mut roots = BTreeSet::new();
    for member in members().iter().filter(|member| select(member)) {
        let folder = tree().join(member);
        let manifest = manifest(member);
        let bins = manifest.get("bin").and_then(|bins| bins.as_array());
        let targets = bins.into_iter().flatten().chain(manifest.get("lib"));
        let named = targets.filter_map(|target| target.get("path")?.as_str());
        let usual = ["src/lib.rs", "src/main.rs"];
        roots.extend(usual.into_iter().chain(named).map(|path| folder.join(path)));
    }
    roots.retain(|root| root.exists());
    roots.iter().map(|root| Crate::read(root)).collect()
}

/// Takes what one module names and defines, and enters its modules.
struct Visitor<'c> {
    made: &'c mut Crate,
    module: usize,
    /// Where files of this module's modules are.
    folder: &'c Path,
}

impl Visitor<'_> {
    fn module(&mut self) -> &mut Module {
        &mut self.made.modules[self.module]
    }

    fn function(&mut self, signature: &Signature, block: &Block) {
        let lines = block.span().end().line + 1 - signature.span().start().line;
        let file = self.module().file;
        self.made.files[file].functions.push(Function {
            name: signature.ident.to_string(),
            lines,
        });
    }

    /// Takes the paths of a `use`.
    fn imports(&mut self, tree: &UseTree, before: &[String]) {
        let with = |name: &syn::Ident| {
            let mut names = before.to_vec();
            names.push(name.unraw().to_string());
            names
        };
        let (name, names) = match tree {
            UseTree::Path(path) => return self.imports(&path.tree, &with(&path.ident)),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.imports(tree, before);
                }
                return;
            }
            UseTree::Glob(_) => return self.module().globs.push(before.to_vec()),
            UseTree::Name(name) if name.ident == "self" => {
                (before.last().cloned().unwrap_or_default(), before.to_vec())
            }
            UseTree::Name(name) => (name.ident.unraw().to_string(), with(&name.ident)),
            UseTree::Rename(rename) if rename.ident == "self" => (rename.rename.to_string(), before.to_vec()),
            UseTree::Rename(rename) => (rename.rename.to_string(), with(&rename.ident)),
        };
        let module = self.module();
        module.imports.entry(name).or_default().push(names.clone());
        module.paths.insert(names);
    }

    /// Takes the paths in a macro's tokens, which are not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut names: Names = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.path(std::mem::take(&mut names));
                    }
                    names.push(ident.unraw().to_string());
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.path(std::mem::take(&mut names));
                    self.tokens(group.stream());
                }
                _ => self.path(std::mem::take(&mut names)),
            }
            colons = 0;
        }
        self.path(names);
    }

    /// Records a path; a single name is resolved by its `use`.
    fn path(&mut self, names: Names) {
        if names.len() > 1 {
            self.module().paths.insert(names);
        }
    }

    fn item_mod(&mut self, item: &ItemMod) {
        let name = item.ident.unraw().to_string();
        let (parent, folder) = (self.module, self.folder);
        let inner = folder.join(&name);
        let child = if let Some((_, items)) = &item.content {
            let file = self.module().file;
            self.made.add(file, Some(parent), &inner, items)
        } else {
            let beside = folder.join(format!("{name}.rs"));
            let path = if beside.exists() {
                beside
            } else {
                inner.join("mod.rs")
            };
            self.made.enter(&path, &inner, Some(parent))
        };
        self.module().children.insert(name, child);
    }
}

impl<'ast> Visit<'ast> for Visitor<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = head(item);
        if is_test(attributes) {
            return;
        }
        if let Item::Mod(item) = item {
            return self.item_mod(item);
        }
        if let Some(name) = name {
            self.module().items.insert(name.unraw().to_string());
        }
        if let Item::Fn(item) = item {
            self.function(&item.sig, &item.block);
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if let ImplItem::Fn(method) = item {
            if is_test(&method.attrs) {
                return;
            }
            self.function(&method.sig, &method.block);
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.imports(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|part| part.ident.unraw().to_string());
        self.path(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast Macro) {
        self.tokens(item.tokens.clone());
        self.visit_path(&item.path);
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

/// The attributes of an item, and the name that it defines.
fn head(item: &Item) -> (&[Attribute], Option<&syn::Ident>) {
    match item {
        Item::Const(item) => (&item.attrs, Some(&item.ident)),
        Item::Enum(item) => (&item.attrs, Some(&item.ident)),
        Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
        Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
        Item::Static(item) => (&item.attrs, Some(&item.ident)),
        Item::Struct(item) => (&item.attrs, Some(&item.ident)),
        Item::Trait(item) => (&item.attrs, Some(&item.ident)),
        Item::Type(item) => (&item.attrs, Some(&item.ident)),
        Item::Union(item) => (&item.attrs, Some(&item.ident)),
        Item::Impl(item) => (&item.attrs, None),
        Item::Mod(item) => (&item.attrs, None),
        Item::Use(item) => (&item.attrs, None),
        _ => (&[], None),
    }
}

/// Whether the attributes have `#[test]`, or a `#[cfg]` that names `test`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute
            .meta
            .require_list()
            .map(|list| list.tokens.to_string())
            .unwrap_or_default();
        let words = text.split(|c: char| !c.is_alphanumeric());
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && !text.contains("not")
                && words.into_iter().any(|word| word == "test")
    })
}
