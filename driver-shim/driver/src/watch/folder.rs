//! Folders with the sockets of processes.

use std::path::{Path, PathBuf};

use urnic_presence::Presence;

/// Where processes of this user that see this presence are found.
pub(crate) fn folder(presence: &Presence) -> Option<&Path> {
    presence.root().parent()
}

/// All folders in which they may be, in any mount namespace.
pub(super) fn of_home(home: &Path) -> PathBuf {
    home.join(format!("urnic-{}", rustix::process::geteuid().as_raw()))
}
