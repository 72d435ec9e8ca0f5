//! The links of the project's pages: each leads somewhere, and the book lists every page of
//! `docs/`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::build::tree;

/// The list of the book's pages.
const SUMMARY: &str = "docs/SUMMARY.md";

/// What other pages and the reader can find in a page.
#[derive(Debug, Default)]
struct Page {
    /// Targets of links and images, as they are written.
    links: Vec<String>,
    /// Names after `#`: one for each heading.
    anchors: BTreeSet<String>,
}

impl Page {
    fn parse(text: &str) -> Page {
        let mut page = Page::default();
        let mut heading: Option<String> = None;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    page.add_anchor(&anchor(&heading.take().unwrap_or_default()));
                }
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                _ => {}
            }
        }
        page
    }

    /// The second heading with the same text gets `-1`, the third `-2`.
    fn add_anchor(&mut self, name: &str) {
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.to_owned()).chain(numbered);
        let free = names.find(|name| !self.anchors.contains(name));
        self.anchors.extend(free);
    }
}

/// The anchor of a heading, as mdBook and GitHub make it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then_some(c),
    });
    kept.collect::<String>().to_lowercase()
}

/// A path without `.` and `..`; `None` if it leads out of the tree.
fn within_the_tree(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => plain.push(part),
            Component::ParentDir if plain.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(plain)
}

/// The faults of the pages, by their paths from the root of the tree. `exists` returns whether a
/// path exists.
fn complaints(texts: &BTreeMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let pages: BTreeMap<&PathBuf, Page> = texts
        .iter()
        .map(|(path, text)| (path, Page::parse(text)))
        .collect();
    let mut complaints = Vec::new();
    let mut listed = BTreeSet::new();
    for (path, page) in &pages {
        for link in page.links.iter().filter(|link| !is_absolute(link)) {
            let complain = |why: &str| format!("{}: {link}: {why}", path.display());
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let folder = path.parent().unwrap_or(Path::new(""));
            let target = match file {
                "" => Some(path.to_path_buf()),
                file => within_the_tree(&folder.join(file)),
            };
            let Some(target) = target else {
                complaints.push(complain("leads out of the tree"));
                continue;
            };
            if !exists(&target) {
                complaints.push(complain("no such file"));
            }
            let found = pages.get(&target).is_some_and(|to| to.anchors.contains(anchor));
            if !anchor.is_empty() && !found {
                complaints.push(complain("no such heading"));
            }
            if *path == Path::new(SUMMARY) {
                listed.insert(target);
            }
        }
    }
    let book = pages.keys().filter(|path| path.starts_with("docs"));
    for page in book.filter(|path| **path != Path::new(SUMMARY) && !listed.contains(**path)) {
        complaints.push(format!("{}: {SUMMARY} does not list it", page.display()));
    }
    complaints
}

/// A link to another site is not checked: the tests need no network.
fn is_absolute(link: &str) -> bool {
    ["https:", "http:", "mailto:"]
        .iter()
        .any(|scheme| link.starts_with(scheme))
}

/// The entries of a folder of the tree, sorted by name, without hidden ones.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of the tree");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| {
        let name = path.file_name().unwrap_or_default();
        !name.to_string_lossy().starts_with('.')
    });
    paths.sort();
    paths
}

/// Whether the path is a folder of the tree in which cargo does not build. Cargo marks its folder
/// only if it created it, and `make test` puts its caches there first.
pub(crate) fn is_searched(path: &Path) -> bool {
    let is_built_in = path.ends_with("target") || path.join("CACHEDIR.TAG").exists();
    path.is_dir() && !path.is_symlink() && !is_built_in
}

/// All pages, by their paths from the root of the tree.
pub(crate) fn pages() -> BTreeMap<PathBuf, String> {
    let mut texts = BTreeMap::new();
    read(tree(), &mut texts);
    texts
}

fn read(folder: &Path, texts: &mut BTreeMap<PathBuf, String>) {
    for path in entries(folder) {
        if is_searched(&path) {
            read(&path, texts);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = std::fs::read_to_string(&path).expect("a page");
            texts.insert(path.strip_prefix(tree()).expect("in the tree").to_owned(), text);
        }
    }
}

#[test]
fn links_of_all_pages_lead_somewhere() {
    let texts = pages();
    for page in ["README.md", SUMMARY, "docs/reference/device.md"] {
        assert!(texts.contains_key(Path::new(page)), "{page} is not read");
    }
    let complaints = complaints(&texts, |path| tree().join(path).exists());
    assert!(complaints.is_empty(), "{complaints:#?}");
}

/// Complaints about a book whose page `docs/a.md` has this text; `src/x.rs` is the only other file.
fn about(text: &str) -> String {
    let texts = [
        (SUMMARY, "[A](a.md) [B](b.md)"),
        ("docs/a.md", text),
        ("docs/b.md", "# B `b` 2.\n\n# Twice\n\n# Twice\n"),
    ];
    let texts = texts.map(|(path, text)| (PathBuf::from(path), text.to_owned()));
    let texts = BTreeMap::from(texts);
    let exists = |path: &Path| texts.contains_key(path) || path == Path::new("src/x.rs");
    complaints(&texts, exists).join("; ")
}

#[test]
fn valid_links_are_accepted() {
    let text = "# Here\n\n[1](b.md) [2](b.md#b-b-2) [3](b.md#twice-1) [4](#here) [5](../src/x.rs) [6](https://example.org/#x)";
    assert_eq!(about(text), "");
    assert_eq!(about("`[not a link](nowhere.md)`"), "");
}

#[test]
fn links_to_missing_files_and_headings_are_reported() {
    for (text, complaint) in [
        ("[x](c.md)", "docs/a.md: c.md: no such file"),
        ("![x](c.png)", "docs/a.md: c.png: no such file"),
        (
            "| x |\n|---|\n| [x](../src/y.rs) |",
            "docs/a.md: ../src/y.rs: no such file",
        ),
        ("[x](b.md#c)", "docs/a.md: b.md#c: no such heading"),
        ("[x](b.md#twice-2)", "docs/a.md: b.md#twice-2: no such heading"),
        ("[x](#there)", "docs/a.md: #there: no such heading"),
        ("[x](../../y)", "docs/a.md: ../../y: leads out of the tree"),
        ("[x](/src/x.rs)", "docs/a.md: /src/x.rs: leads out of the tree"),
    ] {
        assert_eq!(about(text), complaint, "{text}");
    }
}

#[test]
fn a_page_that_the_book_does_not_list_is_reported() {
    let pages = [
        (SUMMARY, "[A](guide/a.md)"),
        ("docs/guide/a.md", ""),
        ("docs/guide/b.md", ""),
        ("README.md", ""),
    ];
    let texts = BTreeMap::from(pages.map(|(path, text)| (PathBuf::from(path), text.to_owned())));
    let reported = complaints(&texts, |path| texts.contains_key(path));
    assert_eq!(reported, [format!("docs/guide/b.md: {SUMMARY} does not list it")]);
}
