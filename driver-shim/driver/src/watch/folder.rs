//! Folders with the sockets of processes.

use std::path::{Path, PathBuf};

use urnic_presence::Presence;

/// The folder with the sockets of this user's processes that see this presence.
pub(crate) fn folder(presence: &Presence) -> Option<&Path> {
    presence.root().parent()
}

/// The folder with the sockets of this user's processes below `home`, for any mount namespace.
pub(super) fn of_home(home: &Path) -> PathBuf {
    home.join(format!("urnic-{}", rustix::process::geteuid().as_raw()))
}
