//! Functions have at most 80 lines, also in the library and the programs of the tests. Comments
//! wrap at 100 columns, in all files.

use std::path::Path;

use crate::build::tree;
use crate::links::{entries, is_searched};
use crate::sources::{crates, crates_of_tests};

const FUNCTION: usize = 80;
/// Columns of a comment.
const COMMENT: usize = 100;

#[test]
fn functions_are_short() {
    let mut found = Vec::new();
    let of_tests = crates_of_tests();
    for file in crates().iter().chain(&of_tests).flat_map(|of| &of.files) {
        let path = file.path.display();
        for function in &file.functions {
            if function.lines > FUNCTION {
                let (name, lines) = (&function.name, function.lines);
                found.push(format!("{path} {name}: {lines} lines, more than {FUNCTION}"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The text of a line that is a comment, without the characters that begin it: of Rust and C, or of
/// scripts, the Makefile and TOML.
fn comment(line: &str, is_code: bool) -> Option<&str> {
    let line = line.trim_start();
    let starts: &[&str] = if is_code {
        &["///", "//!", "//", "/*", "* "]
    } else {
        &["# "]
    };
    starts
        .iter()
        .find_map(|start| line.strip_prefix(start))
        .map(str::trim)
}

/// Whether a comment cannot wrap: a row of a table, a line of a diagram, or a link.
fn cannot_wrap(comment: &str) -> bool {
    let is_of_a_diagram = |c: char| ('\u{2500}'..='\u{25ff}').contains(&c);
    comment.starts_with('|') || comment.contains(is_of_a_diagram) || !comment.contains(' ')
}

/// Collects the comments of a file that are too long, as `path:line`.
fn long_comments(path: &Path, found: &mut Vec<String>) {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    let is_code = ["rs", "c", "h"].contains(&&*extension);
    if !is_code && !["", "toml", "supp", "allowed"].contains(&&*extension) {
        return;
    }
    // A binary file has no comments.
    let Ok(text) = std::fs::read_to_string(path) else {
        return;
    };
    for (index, line) in text.lines().enumerate() {
        let is_long = line.chars().count() > COMMENT;
        if is_long && comment(line, is_code).is_some_and(|text| !cannot_wrap(text)) {
            let path = path.strip_prefix(tree()).expect("in the tree");
            found.push(format!("{}:{}", path.display(), index + 1));
        }
    }
}

fn search(folder: &Path, found: &mut Vec<String>) {
    for path in entries(folder) {
        if is_searched(&path) {
            search(&path, found);
        } else if path.is_file() {
            long_comments(&path, found);
        }
    }
}

#[test]
fn comments_wrap_at_100_columns() {
    let mut found = Vec::new();
    search(tree(), &mut found);
    assert!(
        found.is_empty(),
        "longer than {COMMENT} columns:\n{}",
        found.join("\n")
    );
}

#[test]
fn only_comments_that_can_wrap_are_reported() {
    assert_eq!(comment("    /// A text.", true), Some("A text."));
    assert_eq!(comment("\t * A text.", true), Some("A text."));
    assert_eq!(comment("let a = 1; // A text.", true), None);
    assert_eq!(comment("# A text.", false), Some("A text."));
    assert_eq!(comment("#!/bin/sh -e", false), None);
    assert_eq!(comment("#[test]", true), None);
    assert!(cannot_wrap("| a | b |") && cannot_wrap("A \u{2500}\u{2500}\u{25b6} B"));
    assert!(cannot_wrap("https://example.org/") && !cannot_wrap("A text."));
}
