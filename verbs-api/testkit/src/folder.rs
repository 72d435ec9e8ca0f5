//! Folders of tests.

use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

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

    /// A new folder in the folder `parent`. Its name begins with `name`, and is otherwise random:
    /// other users may write to `parent`.
    pub fn inside(parent: &Path, name: &str) -> Self {
        loop {
            let path = parent.join(format!("{name}-{:08x}", RandomState::new().hash_one(0) as u32));
            match std::fs::create_dir(&path) {
                Ok(()) => return Self { path, kept: false },
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
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
