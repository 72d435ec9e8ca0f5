//! Where an installed file comes from.

use std::path::{Path, PathBuf};

/// Who installed this file, as far as its place tells, or the package manager's list of files.
pub(super) fn of(file: &Path) -> &'static str {
    of_with(file, Path::new("/var/lib/dpkg/info/urnic.list"))
}

fn of_with(file: &Path, debian_list: &Path) -> &'static str {
    let real = file.canonicalize().unwrap_or_else(|_| PathBuf::from(file));
    let listed = std::fs::read_to_string(debian_list).unwrap_or_default();
    if listed.lines().any(|line| Path::new(line) == real) {
        return "the Debian package";
    }
    let folders: Vec<_> = real.iter().filter_map(|part| part.to_str()).collect();
    if folders.windows(2).any(|two| two == ["urnic", "files"]) {
        return "the Python package";
    }
    let is_build = |two: &[&str]| matches!(two, [_, "release" | "debug"]);
    if let Some(parent) = folders
        .len()
        .checked_sub(3)
        .and_then(|at| folders.get(at..at + 2))
        && is_build(parent)
    {
        return "a build";
    }
    match real.starts_with("/usr") && !real.starts_with("/usr/local") {
        true => "a package of the system",
        false => "the tarball, or make install",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_testkit::Folder;

    #[test]
    fn a_place_tells_who_installed_it() {
        let folder = Folder::new("origin");
        let list = folder.file("urnic.list");
        std::fs::write(&list, "/.\n/usr/lib/urnic/liburnic.so\n").unwrap();
        for (file, origin) in [
            ("/usr/lib/urnic/liburnic.so", "the Debian package"),
            ("/usr/lib64/urnic/liburnic.so", "a package of the system"),
            (
                "/home/u/venv/lib/python3.11/site-packages/urnic/files/lib/urnic/liburnic.so",
                "the Python package",
            ),
            ("/src/urnic/target/release/liburnic.so", "a build"),
            ("/usr/local/lib/urnic/liburnic.so", "the tarball, or make install"),
            ("/opt/urnic/lib/urnic/liburnic.so", "the tarball, or make install"),
        ] {
            assert_eq!(of_with(Path::new(file), &list), origin, "{file}");
        }
    }
}
