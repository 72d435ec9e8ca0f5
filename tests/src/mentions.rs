//! Source files and functions that the pages name: each of them exists, so that a reader can find
//! it.
//!
//! A page names a file by code such as `rdmap/requester/mod.rs`: the end of its path, in which
//! `src` may be left out. Code right after that, such as `step`, must be a word of the file.

use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Parser};

use crate::build::tree;
use crate::links;

/// All Rust files of the tree, by their paths from its root.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for path in links::entries(folder) {
        if links::is_searched(&path) {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A path without its folders named `src`.
fn without_src(path: &Path) -> PathBuf {
    path.components()
        .filter(|part| part.as_os_str() != "src")
        .collect()
}

fn is_word(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn contains_word(text: &str, word: &str) -> bool {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .any(|found| found == word)
}

/// The names in `page` that do not exist. `read` returns the text of a file.
fn missing(page: &str, files: &[PathBuf], read: impl Fn(&Path) -> String) -> Vec<String> {
    let mut missing = Vec::new();
    let mut named: Option<(String, Vec<&PathBuf>)> = None;
    for event in Parser::new(page) {
        match event {
            Event::Code(code) if code.ends_with(".rs") && !code.contains([' ', '*', '…']) => {
                let end = without_src(Path::new(&*code));
                let fits: Vec<_> = files
                    .iter()
                    .filter(|file| without_src(file).ends_with(&end))
                    .collect();
                if fits.is_empty() {
                    missing.push(code.to_string());
                }
                named = Some((code.to_string(), fits));
            }
            Event::Code(code) => {
                if let Some((name, fits)) = named.take()
                    && is_word(&code)
                    && !fits.is_empty()
                    && !fits.iter().any(|file| contains_word(&read(file), &code))
                {
                    missing.push(format!("{name} {code}"));
                }
            }
            Event::Text(text) if &*text == " " => {}
            Event::SoftBreak => {}
            _ => named = None,
        }
    }
    missing
}

#[test]
fn files_and_functions_that_pages_name_exist() {
    let mut files = Vec::new();
    sources(tree(), &mut files);
    assert!(files.len() > 100, "only {} source files are found", files.len());
    let read = |path: &Path| std::fs::read_to_string(path).expect("a source file");
    let mut complaints = Vec::new();
    let mut named = 0;
    for (page, text) in links::pages() {
        // The history names files that no longer exist.
        if page == Path::new("CHANGELOG.md") {
            continue;
        }
        named += text.matches(".rs`").count();
        for what in missing(&text, &files, read) {
            complaints.push(format!("{}: {what}", page.display()));
        }
    }
    assert!(named > 50, "only {named} files are named");
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn missing_files_and_functions_are_reported() {
    let files = ["a/src/x/y.rs", "b/y.rs", "b/src/z.rs"].map(PathBuf::from);
    let read = |path: &Path| match path.starts_with("a") {
        true => "fn step() {}".to_owned(),
        false => "fn stepped() {}".to_owned(),
    };
    let reported = |page: &str| missing(page, &files, read).join("; ");
    assert_eq!(
        reported("`x/y.rs` `step`, `b/y.rs` `stepped`, `y.rs`\n`stepped`, `z.rs` or `step`"),
        ""
    );
    assert_eq!(reported("`a/x/y.rs`, `a/src/x/y.rs`, `b/z.rs`"), "");
    assert_eq!(reported("`x/z.rs`"), "x/z.rs");
    assert_eq!(reported("`ay.rs`"), "ay.rs");
    assert_eq!(reported("`x/y.rs` `stepped`"), "x/y.rs stepped");
    assert_eq!(reported("(`z.rs`\n`step`)"), "z.rs step");
}
