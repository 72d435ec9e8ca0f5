//! Inputs to start from, made by the code's own emitters, so that none goes stale.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Writes inputs into the first folder of the command line, the corpus, before libFuzzer reads it.
/// Without such a folder there is none to keep inputs in.
pub fn plant(inputs: impl IntoIterator<Item = Vec<u8>>) {
    let Some(corpus) = corpus(std::env::args_os()) else {
        return;
    };
    for (number, input) in inputs.into_iter().enumerate() {
        let file = corpus.join(format!("seed-{number:02}"));
        std::fs::write(&file, input).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

fn corpus(words: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    words.skip(1).map(PathBuf::from).find(|word| Path::is_dir(word))
}
