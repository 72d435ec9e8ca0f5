//! What a presence depends on, besides the host.

use std::path::PathBuf;

use urnic_config::Config;

/// Name of the device.
pub const DEVICE_NAME: &str = "urnic0";

/// What the presence of a process depends on, besides the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Folder for the tree; None: `$XDG_RUNTIME_DIR`, else `/tmp`, else `/dev/shm`, the first that
    /// will have it.
    pub dir: Option<PathBuf>,
    /// Names the device that is shown: one that is not in this process has addresses of its own.
    pub config: Config,
    /// Digest of the configuration: processes with another one get another tree.
    pub digest: u64,
}

/// Where a tree may live, best first; the first that will have it gets it.
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
