//! What can be wrong with a configuration: one line each, with the offender, its place, and what to
//! do.

use std::fmt;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::settings::Device;

/// Where a setting came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The configuration file, and the line if it is known.
    File(PathBuf, Option<usize>),
    /// An environment variable, by name.
    Env(String),
    /// An argument of the command line, by the flag's name.
    Flag(&'static str),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, None) => write!(f, "{}", path.display()),
            Self::File(path, Some(line)) => write!(f, "{}, line {line}", path.display()),
            Self::Env(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// Why a configuration was refused. (`at`, not `source`: thiserror would take a field of that name
/// for a cause.)
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No such option.
    #[error("{at}: there is no option {key}; {}", suggestion(hint.as_deref()))]
    Unknown {
        /// What was written.
        key: String,
        /// The option with the nearest name, if one is near.
        hint: Option<String>,
        /// Where.
        at: Source,
    },
    /// The option does not take that value.
    #[error("{at}: {key} cannot be {}: it takes {expected}", shown(value))]
    Value {
        /// The option.
        key: &'static str,
        /// What was written.
        value: String,
        /// What it takes, in words.
        expected: String,
        /// Where.
        at: Source,
    },
    /// A `[[peer]]` that cannot be.
    #[error("{at}: a [[peer]] {message}")]
    Peer {
        /// What is wrong with it.
        message: String,
        /// Where.
        at: Source,
    },
    /// A list of settings with a piece that sets nothing.
    #[error("{at}: {text} is not KEY=VALUE")]
    NotAPair {
        /// The piece.
        text: String,
        /// Where.
        at: Source,
    },
    /// A variable that is not UTF-8.
    #[error("{at}: its value is not UTF-8")]
    NotText {
        /// Which.
        at: Source,
    },
    /// The file cannot be read.
    #[error("{}: cannot read it: {errno}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// The file is no TOML.
    #[error("{}: not TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser says, in one line.
        message: String,
    },
    /// The wire is not in this process.
    #[error("pcap={}: the wire of {device} is where that device is: give --pcap to its `urnic serve` instead", path.display())]
    Elsewhere {
        /// Where to capture.
        path: PathBuf,
        /// What.
        device: Device,
    },
}

impl Error {
    /// An [`Error::Unknown`] that suggests whichever of `known` is nearest to `key`.
    pub(super) fn unknown(key: &str, known: impl Iterator<Item = String>, at: Source) -> Self {
        let near = known.map(|name| (distance(key, &name), name)).min();
        let hint = near
            .filter(|(distance, _)| *distance <= 3 && *distance * 2 < key.len())
            .map(|(_, name)| name);
        Self::Unknown {
            key: key.escape_debug().to_string(),
            hint,
            at,
        }
    }
}

/// A value that can be seen in a line.
fn shown(value: &str) -> &str {
    if value.is_empty() { "empty" } else { value }
}

fn suggestion(hint: Option<&str>) -> String {
    hint.map_or_else(
        || "`urnic run --help` lists them".to_owned(),
        |near| format!("did you mean {near}?"),
    )
}

/// Levenshtein's distance, by bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut left = i + 1;
        let mut diagonal = i;
        for (cell, y) in row.iter_mut().skip(1).zip(b.bytes()) {
            let best = (diagonal + usize::from(x != y)).min(left + 1).min(*cell + 1);
            diagonal = std::mem::replace(cell, best);
            left = best;
        }
    }
    row.last().copied().unwrap_or_default()
}
