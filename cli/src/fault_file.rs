//! The specification of faults in an argument: its own text, or the text of a file.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use urnic_faults::Plan;

/// The suffix of scenario files.
const SUFFIX: &str = "faults";

/// The faults of an argument, on one line without comments: those of the file for `@FILE`, also
/// without `@`; those of the scenario for `@NAME`; or else the argument itself.
///
/// # Errors
/// A message that does not name the argument: there is no such file, or no such fault.
pub(crate) fn specification(given: &str) -> Result<String, String> {
    let text = match named(given)? {
        Some(path) => fs::read_to_string(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => "no such file".to_owned(),
            ErrorKind::IsADirectory => "it is a folder".to_owned(),
            _ => error.to_string(),
        })?,
        None => given.to_owned(),
    };
    Plan::check(&text)?;
    let lines = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or("").trim());
    let faults: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    Ok(faults.join("; "))
}

/// The file that an argument names; `None`: it is a specification.
fn named(given: &str) -> Result<Option<PathBuf>, String> {
    if let Some(name) = given.strip_prefix('@') {
        return named_after_sign(name).map(Some);
    }
    let path = Path::new(given);
    let is_meant = || Plan::check(given).is_err() && (path.is_dir() || is_path(given));
    let is_file = path.exists() && !path.is_dir();
    Ok((is_file || is_meant()).then(|| path.into()))
}

/// Whether a text that is no specification was meant as the path of a file: no kind of fault has a
/// slash or a dot.
fn is_path(given: &str) -> bool {
    let kind = given.split_whitespace().next().unwrap_or_default();
    kind.contains(['/', '.']) && !kind.contains([';', '='])
}

/// The file of this name, or of the scenario of this name.
fn named_after_sign(name: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(name);
    if path.is_file() || name.contains('/') {
        return Ok(path);
    }
    let scenarios = scenarios();
    let found = scenarios.iter().find(|(known, _)| known == name);
    if let Some((_, path)) = found {
        return Ok(path.clone());
    }
    let names: Vec<&str> = scenarios.iter().map(|(name, _)| name.as_str()).collect();
    Err(match names.is_empty() {
        true => format!(
            "no such file, and no scenario is installed in {}",
            installed().display()
        ),
        false => format!("no such file or scenario; there are {}", names.join(", ")),
    })
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
    fn each_scenario_is_a_specification_with_a_description() {
        let scenarios = shipped();
        assert!(scenarios.len() >= 4, "{scenarios:?}");
        for path in scenarios {
            assert_eq!(path.extension(), Some(SUFFIX.as_ref()), "{path:?}");
            let text = fs::read_to_string(&path).expect("a scenario");
            assert!(text.starts_with("# "), "{path:?}");
            Plan::check(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        }
    }

    #[test]
    fn a_specification_is_text_or_the_content_of_a_file() {
        let folder = urnic_testkit::Folder::new("fault-files");
        let file = folder.file("faults");
        fs::write(&file, "# of a test\ndrop p=0.5 # half\n\nseed=3\n").expect("our folder");
        let name = file.to_str().expect("our name");
        for (given, expected) in [
            (name, "drop p=0.5; seed=3"),
            (&format!("@{name}"), "drop p=0.5; seed=3"),
            ("drop; refuse", "drop; refuse"),
            ("", ""),
        ] {
            assert_eq!(specification(given).as_deref(), Ok(expected), "{given}");
        }
        fs::write(&file, "# nothing\n").expect("our folder");
        assert_eq!(specification(name).as_deref(), Ok(""));
        fs::write(&file, "rest\n").expect("our folder");
        let error = specification(name).expect_err("no fault");
        assert!(error.starts_with("\"rest\" is no fault"), "{error}");
    }

    #[test]
    fn an_argument_that_is_no_file_and_no_fault_is_an_error() {
        let folder = urnic_testkit::Folder::new("fault-files-missing");
        let name = |path: &Path| path.display().to_string();
        let missing = name(&folder.file("missing"));
        for (given, says) in [
            (name(folder.path()), "it is a folder"),
            (format!("@{missing}"), "no such file"),
            (missing, "no such file"),
            ("missing.txt".to_owned(), "no such file"),
            ("@nothing-of-that-name".to_owned(), "no such file"),
            ("rest".to_owned(), "\"rest\" is no fault"),
            ("drop p=0.x".to_owned(), "p=0.x: not a value of p"),
            ("drop;x.y".to_owned(), "\"x.y\" is no fault"),
        ] {
            let error = specification(&given).expect_err(&given);
            assert!(error.starts_with(says), "{given}: {error}");
        }
    }
}
