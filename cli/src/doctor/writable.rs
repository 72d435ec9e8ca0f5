//! Checks whether this user can make a folder.

use std::path::Path;

pub(super) fn can_have_folder(place: &Path) -> std::io::Result<()> {
    let trial = place.join(format!(".urnic-doctor-{}", std::process::id()));
    std::fs::create_dir(&trial).and_then(|()| std::fs::remove_dir(&trial))
}
