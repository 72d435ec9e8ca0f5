//! The files of options, which are checked before the program starts: it would report a mistake
//! late, at its end or not at all.

use std::path::Path;

use rustix::fs::{Access, access};
use rustix::io::Errno;
use urnic_config::{Config, read_file};
use urnic_model::capture::CaptureFile;

use crate::answer::Failure;

/// Truncates the capture file, or reports immediately why it cannot be written.
pub(crate) fn prepare_capture(path: &Path) -> Result<(), Failure> {
    CaptureFile::prepare(path).map_err(|errno| {
        let reason = match errno {
            Errno::NOTSUP => NOT_REGULAR.to_owned(),
            Errno::NOENT => missing(path),
            errno => said(errno),
        };
        failure("pcap", path, &reason)
    })
}

/// Checks that the files which processes append to can be written, and the list of suppressions
/// read.
pub(crate) fn check(config: &Config) -> Result<(), Failure> {
    for (key, path) in [("report", &config.report), ("trace", &config.trace)] {
        if let Some(path) = path {
            writable(path).map_err(|reason| failure(key, path, &reason))?;
        }
    }
    if let Some(path) = &config.suppressions {
        read_file(path).map_err(|errno| failure("suppressions", path, &said(errno)))?;
    }
    Ok(())
}

const NOT_REGULAR: &str = "it is no regular file; name another";

fn failure(key: &str, path: &Path, reason: &str) -> Failure {
    Failure::usage(format!("--{key} {}: {reason}", path.display()))
}

fn said(errno: Errno) -> String {
    match errno {
        Errno::NOENT => "there is no such file".to_owned(),
        errno => std::io::Error::from(errno).to_string(),
    }
}

fn missing(path: &Path) -> String {
    match folder(path) {
        folder if folder.is_dir() => said(Errno::NOENT),
        folder => format!("there is no folder {}", folder.display()),
    }
}

fn folder(path: &Path) -> &Path {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

/// Whether a process may write the file, or make it. `%p` stands for its number.
fn writable(path: &Path) -> Result<(), String> {
    let is_numbered = |path: &Path| path.to_string_lossy().contains("%p");
    let folder = folder(path);
    if is_numbered(folder) {
        return Ok(());
    }
    match path.metadata() {
        Ok(file) if file.is_file() => access(path, Access::WRITE_OK).map_err(said),
        Ok(_) => Err(NOT_REGULAR.to_owned()),
        Err(_) if !folder.is_dir() => Err(missing(path)),
        Err(_) => access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_testkit::Folder;

    #[test]
    fn a_file_that_no_process_could_write_is_named() {
        let folder = Folder::new("output-files");
        std::fs::write(folder.file("there"), "").unwrap();
        for well in ["new", "there", "%p.json", "no/such/%p/t.json"] {
            assert_eq!(writable(&folder.file(well)), Ok(()), "{well}");
        }
        assert!(!folder.file("new").exists());
        let none = folder.file("none");
        let says = format!("there is no folder {}", none.display());
        assert_eq!(writable(&none.join("new")), Err(says.clone()));
        assert_eq!(writable(&none.join("%p.json")), Err(says));
        assert_eq!(writable(folder.path()), Err(NOT_REGULAR.to_owned()));
        let in_file = folder.file("there/new");
        assert!(writable(&in_file).unwrap_err().starts_with("there is no folder "));
    }
}
