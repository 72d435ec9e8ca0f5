//! The specification of faults that an argument stands for: its own text, or that of a file.

use std::fs;
use std::path::{Path, PathBuf};

use crate::answer::Failure;

/// The suffix of scenario files.
const SUFFIX: &str = "faults";

/// The specification, on one line: that of the file for `@FILE`, also without `@` if there is one;
/// that of the scenario for `@NAME`; or else the argument itself.
pub(crate) fn specification(given: &str) -> Result<String, Failure> {
    let path = match given.strip_prefix('@') {
        Some(named) => named_file(named)?,
        None if Path::new(given).is_file() => given.into(),
        None => return Ok(given.to_owned()),
    };
    let text =
        fs::read_to_string(&path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    Ok(one_line(&text))
}

/// The faults of a file without its comments.
fn one_line(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or("").trim());
    let faults: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    match faults.is_empty() {
        true => "none".to_owned(),
        false => faults.join("; "),
    }
}

fn named_file(named: &str) -> Result<PathBuf, Failure> {
    let path = PathBuf::from(named);
    if path.is_file() || named.contains('/') {
        return Ok(path);
    }
    let scenarios = scenarios();
    let found = scenarios.iter().find(|(name, _)| name == named);
    if let Some((_, path)) = found {
        return Ok(path.clone());
    }
    let names: Vec<&str> = scenarios.iter().map(|(name, _)| name.as_str()).collect();
    Err(Failure::usage(match names.is_empty() {
        true => format!(
            "{named}: no such file, and no scenario is installed in {}",
            installed().display()
        ),
        false => format!(
            "{named}: no such file or scenario; there are {}",
            names.join(", ")
        ),
    }))
}

/// The folder in which the scenarios of this program are: installed with it, or in its source.
fn installed() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let above = program.ancestors().nth(2).unwrap_or(Path::new("/"));
    let installed = above.join("share/urnic/faults");
    let of_source = above.join("../share/faults");
    match !installed.is_dir() && of_source.is_dir() {
        true => of_source,
        false => installed,
    }
}

/// The scenarios: their names and files, by name.
pub(crate) fn scenarios() -> Vec<(String, PathBuf)> {
    let files = fs::read_dir(installed()).into_iter().flatten().flatten();
    let paths = files.map(|file| file.path());
    let mut all: Vec<(String, PathBuf)> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == SUFFIX))
        .filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path)))
        .collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scenarios in the source.
    fn shipped() -> Vec<PathBuf> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../share/faults");
        let files = fs::read_dir(folder).expect("the scenarios");
        files.map(|file| file.expect("a file").path()).collect()
    }

    #[test]
    fn each_scenario_is_a_specification_and_says_what_it_does() {
        let scenarios = shipped();
        assert!(scenarios.len() >= 4, "{scenarios:?}");
        for path in scenarios {
            assert_eq!(path.extension(), Some(SUFFIX.as_ref()), "{path:?}");
            let text = fs::read_to_string(&path).expect("a scenario");
            assert!(text.starts_with("# "), "{path:?}");
            urnic_faults::Plan::check(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        }
    }

    #[test]
    fn a_specification_is_text_or_the_content_of_a_file() {
        assert_eq!(specification("drop p=0.5").expect("text"), "drop p=0.5");
        let path = shipped().remove(0);
        let text = one_line(&fs::read_to_string(&path).expect("a scenario"));
        let path = path.to_str().expect("our name");
        assert_eq!(specification(path).expect("a file"), text);
        assert_eq!(specification(&format!("@{path}")).expect("a file"), text);
    }

    #[test]
    fn a_file_becomes_one_line() {
        assert_eq!(
            one_line("# of a test\ndrop p=0.5 # half\n\nseed=3\n"),
            "drop p=0.5; seed=3"
        );
        assert_eq!(one_line("# nothing\n"), "none");
    }

    #[test]
    fn a_file_that_is_missing_is_named() {
        for given in ["@/nowhere/x.faults", "@nothing-of-that-name"] {
            let failure = specification(given).expect_err("missing");
            assert_eq!(failure.status, 2);
            let says = failure.message;
            assert!(says.to_lowercase().contains("no such file"), "{given}: {says}");
            assert!(says.starts_with(&given[1..]), "{given}: {says}");
        }
    }
}
