//! The served files and directories, which handles name.

mod directory;
mod extents;
mod in_memory;
mod listing;

pub use crate::acl::Caller;
pub use directory::Directory;
pub use in_memory::InMemory;
pub use listing::{Listing, Listings, Name, PARENT, SELF};

use crate::acl::Acl;
use crate::memory::{Pool, Slice};
use crate::nfs3::{
    Attributes, CreateHow, Device, Handle, Kind, MAX_NAME, SetAttributes, Special, Stable, Statistics,
    Status, Time,
};

/// The result of an operation.
pub type Outcome<T> = Result<T, Status>;

/// The data of a WRITE or the text of a SYMLINK.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// A part of the message.
    Inline(&'a [u8]),
    /// Memory that the tree may keep.
    Apart(&'a Slice),
}

impl Data<'_> {
    /// The bytes.
    pub fn octets(&self) -> &[u8] {
        match self {
            Self::Inline(octets) => octets,
            Self::Apart(slice) => slice,
        }
    }
}

/// The result of a READ.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bytes, in few pieces.
    pub pieces: Vec<Slice>,
    /// The bytes end at the end of the file.
    pub eof: bool,
}

/// A file's number, and its name in a directory.
pub type Numbered = (u64, Box<[u8]>);

/// A file and its attributes.
pub type File = (Handle, Attributes);

/// A file's access control lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acls {
    /// The access list; its [`mode`](Acl::mode) is that of the file.
    pub access: Acl,
    /// The default list of a directory, which new files in it inherit.
    pub default: Option<Acl>,
}

/// A change of a file's access control lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAcls {
    /// The new access list; `Some(None)` removes it, so that the mode decides.
    pub access: Option<Option<Acl>>,
    /// The new default list; `Some(None)` removes it.
    pub default: Option<Option<Acl>>,
}

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

/// A tree of files. Operations check the permissions of the caller. Names must pass [`check_name`].
/// Errors are those of RFC 1813.
pub trait Tree: Send + Sync {
    /// The handle of the root.
    fn root(&self) -> Handle;
    /// GETATTR.
    fn attributes(&self, file: &Handle) -> Outcome<Attributes>;
    /// SETATTR.
    fn set_attributes(
        &self,
        caller: &Caller,
        file: &Handle,
        what: &SetAttributes,
        guard: Option<Time>,
    ) -> Outcome<()>;
    /// GETACL. Fails with `NotSupported` if the files have no lists.
    fn acls(&self, file: &Handle) -> Outcome<Acls>;
    /// SETACL.
    fn set_acls(&self, caller: &Caller, file: &Handle, what: &SetAcls) -> Outcome<()>;
    /// LOOKUP; `.` and `..` too.
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File>;
    /// ACCESS: the permitted ones of the bits.
    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32>;
    /// READLINK.
    fn read_link(&self, file: &Handle) -> Outcome<Vec<u8>>;
    /// READ.
    fn read(&self, caller: &Caller, file: &Handle, offset: u64, count: u32) -> Outcome<Found>;
    /// WRITE: the number of bytes written, and their stability.
    fn write(
        &self,
        caller: &Caller,
        file: &Handle,
        offset: u64,
        data: Data,
        stable: Stable,
    ) -> Outcome<(u32, Stable)>;
    /// COMMIT.
    fn commit(&self, caller: &Caller, file: &Handle) -> Outcome<()>;
    /// CREATE.
    fn create(&self, caller: &Caller, dir: &Handle, name: &[u8], how: &CreateHow) -> Outcome<File>;
    /// MKDIR, SYMLINK, MKNOD.
    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: New) -> Outcome<File>;
    /// REMOVE, or RMDIR.
    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Outcome<()>;
    /// RENAME.
    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Outcome<()>;
    /// LINK.
    fn link(&self, caller: &Caller, file: &Handle, dir: &Handle, name: &[u8]) -> Outcome<()>;
    /// Every entry of a directory but `.` and `..`, in any order, and the
    /// [`version`](Self::version) of the directory.
    fn list(&self, dir: &Handle) -> Outcome<(Vec<Numbered>, Option<u64>)>;
    /// A number that changes whenever the entries of a directory change; `None` if the tree cannot
    /// tell.
    fn version(&self, dir: &Handle) -> Option<u64>;
    /// Checks that the caller may list the directory.
    fn may_list(&self, caller: &Caller, dir: &Handle) -> Outcome<()>;
    /// The parent of a directory; that of the root is the root.
    fn parent(&self, dir: &Handle) -> Outcome<Handle>;
    /// FSSTAT.
    fn statistics(&self) -> Outcome<Statistics>;
    /// Memory for data.
    fn pool(&self) -> &Pool;
}

/// Checks that a file can have this name.
///
/// # Errors
/// The name is too long, empty, a path, `.` or `..`.
pub fn check_name(name: &[u8]) -> Outcome<()> {
    match name {
        [] | b"." | b".." => Err(Status::Invalid),
        _ if name.len() > MAX_NAME => Err(Status::NameTooLong),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Status::Invalid),
        _ => Ok(()),
    }
}

/// The bits of ACCESS that the permissions to read, write and execute give.
fn access_bits(kind: Kind, read: bool, write: bool, execute: bool) -> u32 {
    const READ: u32 = 1;
    const LOOKUP: u32 = 2;
    const MODIFY: u32 = 4;
    const EXTEND: u32 = 8;
    const DELETE: u32 = 16;
    const EXECUTE: u32 = 32;
    let directory = kind == Kind::Directory;
    let bits = [
        (read, READ),
        (write, MODIFY | EXTEND),
        (write && directory, DELETE),
        (execute, if directory { LOOKUP } else { EXECUTE }),
    ];
    bits.iter().filter(|(has, _)| *has).map(|(_, bits)| bits).sum()
}
