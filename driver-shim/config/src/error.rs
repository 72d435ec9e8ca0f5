//! Errors of a configuration: one line each, with the wrong text, its place, and the correction.

use std::fmt;
use std::path::PathBuf;

use rustix::io::Errno;

/// The origin of a setting.
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

/// Why a configuration was refused. (The field is called `at`, not `source`: thiserror would take a
/// field `source` for a cause.)
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The option does not exist.
    #[error("{at}: there is no option {key}; {}", suggestion(hint.as_deref()))]
    Unknown {
        /// The key as it was written.
        key: String,
        /// The option with the nearest name, if one is near.
        hint: Option<String>,
        /// The origin of the setting.
        at: Source,
    },
    /// The option does not accept the value.
    #[error("{at}: {key} cannot be {}: it takes {expected}", shown(value))]
    Value {
        /// The key of the option.
        key: &'static str,
        /// The value as it was written.
        value: String,
        /// The accepted values, in words.
        expected: String,
        /// The origin of the setting.
        at: Source,
    },
    /// A `[[peer]]` section is not valid.
    #[error("{at}: a [[peer]] {message}")]
    Peer {
        /// The error in the section.
        message: String,
        /// The origin of the section.
        at: Source,
    },
    /// A `[[device]]` section is not valid.
    #[error("{at}: a [[device]] {message}")]
    Section {
        /// The error in the section.
        message: String,
        /// The origin of the section.
        at: Source,
    },
    /// The devices exclude each other.
    #[error("{0}")]
    Devices(String),
    /// A list of settings has a piece that sets no option.
    #[error("{at}: {text} is not KEY=VALUE")]
    NotAPair {
        /// The piece.
        text: String,
        /// The origin of the list.
        at: Source,
    },
    /// A variable is not UTF-8.
    #[error("{at}: its value is not UTF-8")]
    NotText {
        /// The variable.
        at: Source,
    },
    /// The file cannot be read.
    #[error("{}: cannot read it: {errno}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// The file is not TOML.
    #[error("{}: not TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's message, in one line.
        message: String,
    },
    /// A capture is configured for a device whose wire is not in this process.
    #[error("pcap={}: the packets of {device} can be captured only in its server: give --pcap to its `urnic serve` instead", path.display())]
    RemoteCapture {
        /// The configured capture file.
        path: PathBuf,
        /// The configured device.
        device: String,
    },
}

impl Error {
    /// An [`Error::Unknown`] that suggests the name in `known` that is nearest to `key`.
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

/// The value, or a word for an empty value.
fn shown(value: &str) -> &str {
    if value.is_empty() { "empty" } else { value }
}

fn suggestion(hint: Option<&str>) -> String {
    hint.map_or_else(
        || "`urnic run --help` lists them".to_owned(),
        |near| format!("did you mean {near}?"),
    )
}

/// The Levenshtein distance, by bytes.
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
