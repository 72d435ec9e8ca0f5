//! What is served: files and directories, named by handles.

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

/// What an operation gives.
pub type Outcome<T> = Result<T, Status>;

/// Data to be written.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// In a message.
    Inline(&'a [u8]),
    /// In memory that the tree may keep.
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

/// What READ finds.
#[derive(Clone, Debug)]
pub struct Found {
    /// The bytes, in few pieces.
    pub pieces: Vec<Slice>,
    /// Nothing follows them.
    pub eof: bool,
}

/// A file's number, and its name in a directory.
pub type Numbered = (u64, Box<[u8]>);

/// A file and what is known of it.
pub type File = (Handle, Attributes);

/// A file's access control lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acls {
    /// Who may do what; its [`mode`](Acl::mode) is the file's.
    pub access: Acl,
    /// What new files in it get, if it is a directory.
    pub default: Option<Acl>,
}

/// What of a file's access control lists is to be changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAcls {
    /// Who may do what; `Some(None)`: what its mode says.
    pub access: Option<Option<Acl>>,
    /// What new files in it get; `Some(None)`: what their modes say.
    pub default: Option<Option<Acl>>,
}

/// What is to be made in a directory.
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
    /// What MKNOD asks for.
    ///
    /// # Errors
    /// It asks for a file, a directory, or a link.
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

/// A tree of files. Operations check the caller's rights, names are as [`check_name`] allows; times out of step and handles of no file are errors
/// as RFC 1813 names them.
pub trait Tree: Send + Sync {
    /// The handle of its root.
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
    /// GETACL. `NotSupported`: what is served keeps no lists.
    fn acls(&self, file: &Handle) -> Outcome<Acls>;
    /// SETACL.
    fn set_acls(&self, caller: &Caller, file: &Handle, what: &SetAcls) -> Outcome<()>;
    /// LOOKUP; `.` and `..` too.
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File>;
    /// ACCESS: which of the bits hold.
    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32>;
    /// READLINK.
    fn read_link(&self, file: &Handle) -> Outcome<Vec<u8>>;
    /// READ.
    fn read(&self, caller: &Caller, file: &Handle, offset: u64, count: u32) -> Outcome<Found>;
    /// WRITE: bytes written, and how safely.
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
    /// Every entry of a directory but `.` and `..`, by file number and name, in any order; and a number that is another one whenever the entries are, if
    /// the tree has such.
    fn list(&self, dir: &Handle) -> Outcome<(Vec<Numbered>, Option<u64>)>;
    /// That number alone.
    fn version(&self, dir: &Handle) -> Option<u64>;
    /// May the caller list the directory?
    fn may_list(&self, caller: &Caller, dir: &Handle) -> Outcome<()>;
    /// The directory above; the root's is the root.
    fn parent(&self, dir: &Handle) -> Outcome<Handle>;
    /// FSSTAT.
    fn statistics(&self) -> Outcome<Statistics>;
    /// Memory for data.
    fn pool(&self) -> &Pool;
}

/// Can a file have this name?
///
/// # Errors
/// It is too long, or not a name but a path, or nothing, or one of the two that every directory has.
pub fn check_name(name: &[u8]) -> Outcome<()> {
    match name {
        [] | b"." | b".." => Err(Status::Invalid),
        _ if name.len() > MAX_NAME => Err(Status::NameTooLong),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Status::Invalid),
        _ => Ok(()),
    }
}

/// The bits of ACCESS that rights to read, write and execute give.
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
