//! Entries of directories: their names, and new ones.

use super::outcome::Outcome;
use crate::nfs3::{Device, Kind, MAX_NAME, SetAttributes, Special, Status};

/// The number of a file, and its name in a directory.
pub type Numbered = (u64, Box<[u8]>);

/// A new entry of a directory.
#[derive(Clone, Copy, Debug)]
pub enum New<'a> {
    /// A directory.
    Directory(&'a SetAttributes),
    /// A symbolic link with this text.
    Symlink(&'a [u8], &'a SetAttributes),
    /// A device, socket or pipe.
    Special(Kind, Device, &'a SetAttributes),
}

impl<'a> New<'a> {
    /// The entry that a MKNOD requests.
    ///
    /// # Errors
    /// MKNOD does not make files, directories and links.
    pub const fn special(what: &'a Special) -> Outcome<Self> {
        match what {
            Special::Device(kind, attributes, device) => Ok(Self::Special(*kind, *device, attributes)),
            Special::Pipe(kind, attributes) => {
                Ok(Self::Special(*kind, Device { major: 0, minor: 0 }, attributes))
            }
            Special::Other(_) => Err(Status::BadType),
        }
    }
}

/// Checks that a name is valid for a file.
///
/// # Errors
/// `NameTooLong`, or `Invalid` if the name is empty, is `.` or `..`, or contains a slash or a zero
/// byte.
pub fn check_name(name: &[u8]) -> Outcome<()> {
    match name {
        [] | b"." | b".." => Err(Status::Invalid),
        _ if name.len() > MAX_NAME => Err(Status::NameTooLong),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Status::Invalid),
        _ => Ok(()),
    }
}
