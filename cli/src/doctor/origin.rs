//! The origin of an installed file.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The installer of this file, by its path or by the package manager.
pub(super) fn of(file: &Path) -> &'static str {
    of_with(file, is_of_debian)
}

/// Whether a Debian package has this file.
fn is_of_debian(file: &Path) -> bool {
    let mut query = Command::new("dpkg-query");
    query.arg("--search").arg(file);
    let status = query.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn of_with(file: &Path, is_of_debian: impl Fn(&Path) -> bool) -> &'static str {
    let real = file.canonicalize().unwrap_or_else(|_| PathBuf::from(file));
    if is_of_debian(&real) {
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

    #[test]
    fn the_path_of_a_file_shows_its_installer() {
        let is_of_debian = |file: &Path| file == Path::new("/usr/lib/urnic/liburnic.so");
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
            assert_eq!(of_with(Path::new(file), is_of_debian), origin, "{file}");
        }
    }
}
