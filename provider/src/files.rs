//! Names of the files of the options `report` and `trace`, and the file of `report`, which
//! processes may share.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, FileType, Mode, OFlags, access, fstat, open};
use rustix::io::Errno;
use urnic_model::capture;
use urnic_process::file_length;

/// `path`, with the number of this process in the place of `%p`.
pub(crate) fn of_process(path: &Path) -> PathBuf {
    capture::numbered(path).unwrap_or_else(|| path.to_owned())
}

/// Appends `text` to the file, which is made if it does not exist. One write(2) appends all,
/// unless the disk is full, so that lines of several processes do not mix.
///
/// # Errors
/// Those of the file; `ENOTSUP` for one that is not regular, whose reader could make the program
/// wait.
pub(crate) fn append(path: &Path, text: &[u8]) -> Result<(), Errno> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = open(path, flags, Mode::from_raw_mode(0o666))?;
    let attributes = fstat(&file)?;
    if FileType::from_raw_mode(attributes.st_mode) != FileType::RegularFile {
        return Err(Errno::NOTSUP);
    }
    file_length::permits(attributes.st_size.cast_unsigned() + text.len() as u64)?;
    let mut rest = text;
    while !rest.is_empty() {
        match rustix::io::write(&file, rest) {
            Ok(written) => rest = rest.get(written..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Checks that this file may be created, or exists and may be written.
///
/// # Errors
/// Those of access(2), and `ENOENT` if there is no such folder.
pub(crate) fn check(path: &Path) -> Result<(), Errno> {
    match access(path, Access::WRITE_OK) {
        Err(Errno::NOENT) => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            access(
                folder.unwrap_or(Path::new(".")),
                Access::WRITE_OK | Access::EXEC_OK,
            )
        }
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_have_the_number_of_the_process() {
        assert_eq!(of_process(Path::new("/a/b")), Path::new("/a/b"));
        let name = of_process(Path::new("/a/%p.json"));
        assert_eq!(name, PathBuf::from(format!("/a/{}.json", std::process::id())));
    }

    #[test]
    fn a_missing_folder_is_found_before_the_file_is_written() {
        let folder = urnic_testkit::Folder::new("report-folder");
        assert_eq!(check(&folder.file("new")), Ok(()));
        assert!(!folder.file("new").exists());
        assert_eq!(check(Path::new("no-such-file-yet")), Ok(()));
        assert_eq!(check(&folder.file("none/new")), Err(Errno::NOENT));
    }

    #[test]
    fn only_a_regular_file_is_written() {
        assert_eq!(append(Path::new("/dev/null"), b"text"), Err(Errno::NOTSUP));
        assert_eq!(
            append(Path::new("/no/such/folder/file"), b"text"),
            Err(Errno::NOENT)
        );
    }
}
