//! The inputs of a presence, besides the host.

use std::path::PathBuf;

use urnic_config::Config;

/// The inputs of a process's presence, besides the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Folder for the tree; None: the first of `$XDG_RUNTIME_DIR`, `/tmp` and `/dev/shm` in which a
    /// tree can be made.
    pub dir: Option<PathBuf>,
    /// Names the devices that are shown (a device that is not in this process has addresses of its
    /// own), and their kind.
    pub config: Config,
    /// Digest of the configuration: processes with another configuration get another tree.
    pub digest: u64,
}

/// The folders in which a tree may be made, best first; the first one that permits it, and that is
/// safe from other users ([`OwnFolder`](super::OwnFolder)), is used.
pub fn homes(settings: &Settings) -> Vec<PathBuf> {
    if let Some(dir) = &settings.dir {
        return vec![dir.clone()];
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute());
    runtime
        .into_iter()
        .chain(["/tmp".into(), "/dev/shm".into()])
        .collect()
}
