//! Folders of tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A private folder of a test, removed with its content when dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    kept: bool,
}

impl Folder {
    /// A new folder in the folder for temporary files. Its path is short enough for sockets.
    pub fn new(name: &str) -> Self {
        Self::inside(&std::env::temp_dir(), &format!("urnic-{name}"))
    }

    /// A new folder in the folder `parent`. Its name begins with `name`.
    pub fn inside(parent: &Path, name: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::at(parent.join(format!("{name}-{}-{number}", std::process::id())))
    }

    /// The folder `path`, which must belong to no other test.
    pub fn at(path: PathBuf) -> Self {
        std::fs::create_dir_all(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, kept: false }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in the folder. The file need not exist.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The names of all files in the folder, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.path).expect("the test's own folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name())
            .map(|name| name.into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    /// Keeps the folder when this is dropped.
    pub fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
