//! Names of files of which each process may have its own.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// `path` with the number of this process in the place of `%p`.
pub fn numbered(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    let number = std::process::id().to_string();
    match bytes.windows(2).position(|two| two == b"%p") {
        Some(at) => {
            let name = [&bytes[..at], number.as_bytes(), &bytes[at + 2..]].concat();
            PathBuf::from(OsString::from_vec(name))
        }
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_have_the_number_of_the_process() {
        assert_eq!(numbered(Path::new("/a/b")), Path::new("/a/b"));
        let name = numbered(Path::new("/a/%p.json"));
        assert_eq!(name, PathBuf::from(format!("/a/{}.json", std::process::id())));
    }
}
