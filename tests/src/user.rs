//! Programs as another, ordinary user.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use urnic_testkit::Folder;

use crate::program::Program;

/// Debian's user `nobody`, which owns no files.
pub const NOBODY: u32 = 65534;

/// A second ordinary user; needs no entry in passwd.
pub const OTHER_USER: u32 = 61234;

/// A folder that every user can read, with the plug-in in it: the build's own folder may be in a
/// user's home. Removed when dropped.
#[derive(Debug)]
pub struct Staged {
    folder: Folder,
}

impl Staged {
    /// Copies the plug-in to a folder from which every user can load it.
    pub fn new() -> Self {
        let folder = Folder::new("tests");
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("our own folder");
        let staged = Self { folder };
        staged.add(crate::build::plugin());
        staged
    }

    /// Copies another file and returns its new path.
    pub fn add(&self, file: &Path) -> PathBuf {
        let copy = self.folder.path().join(file.file_name().expect("a file"));
        // By another process: a descriptor of ours could be open in a child that another test has
        // just forked, and the program could then not be executed (ETXTBSY).
        let copied = std::process::Command::new("cp").args([file, &copy]).status();
        assert!(copied.is_ok_and(|status| status.success()), "no copy of {file:?}");
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).expect("our own file");
        copy
    }

    /// The program, run by that user with a folder of its own for files. Needs root.
    pub fn program(&self, user: u32, program: Program) -> Program {
        let runtime = self.folder.file(&format!("runtime-{user}"));
        if std::fs::create_dir(&runtime).is_ok() {
            std::os::unix::fs::chown(&runtime, Some(user), Some(user)).expect("we are root");
            std::fs::set_permissions(&runtime, PermissionsExt::from_mode(0o700)).expect("our own folder");
        }
        let program = program.env("XDG_RUNTIME_DIR", runtime);
        as_user(user, program.plugin_at(self.folder.file("liburnic.so")))
    }
}

/// The program, run by that user, which must be able to read the program and the plug-in. Needs
/// root.
pub fn as_user(user: u32, program: Program) -> Program {
    let (uid, gid) = (format!("--reuid={user}"), format!("--regid={user}"));
    // The user has no access to root's folders.
    let leave = ["env", "-u", "XDG_RUNTIME_DIR", "-C", "/", "HOME=/nonexistent"];
    let words = ["setpriv", &uid, &gid, "--clear-groups", "--"];
    program.through(leave).through(words)
}

impl Default for Staged {
    fn default() -> Self {
        Self::new()
    }
}
