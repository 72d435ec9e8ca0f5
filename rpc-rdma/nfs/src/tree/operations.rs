//! The operations on the served files, which each kind of tree implements.

use super::acls::{Acls, SetAcls};
use super::data::{Data, Found};
use super::entry::{New, Numbered};
use super::outcome::{File, Outcome};
use crate::acl::Caller;
use crate::memory::Pool;
use crate::nfs3::{Attributes, CreateHow, Handle, SetAttributes, Stable, Statistics, Time};

/// A tree of files. Operations check the permissions of the caller. Names must pass
/// [`check_name`](super::check_name). Errors are those of RFC 1813.
pub trait Tree: Send + Sync {
    /// Returns the handle of the root.
    fn root(&self) -> Handle;
    /// GETATTR: the attributes of a file.
    fn attributes(&self, file: &Handle) -> Outcome<Attributes>;
    /// SETATTR: sets attributes of a file.
    fn set_attributes(
        &self,
        caller: &Caller,
        file: &Handle,
        what: &SetAttributes,
        guard: Option<Time>,
    ) -> Outcome<()>;
    /// GETACL: the access control lists of a file. Fails with `NotSupported` if the files have no
    /// lists.
    fn acls(&self, file: &Handle) -> Outcome<Acls>;
    /// SETACL: sets access control lists of a file.
    fn set_acls(&self, caller: &Caller, file: &Handle, what: &SetAcls) -> Outcome<()>;
    /// LOOKUP: the file with a name in a directory, which may be `.` or `..`.
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File>;
    /// ACCESS: the permitted bits of `wanted`.
    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32>;
    /// READLINK: the text of a symbolic link.
    fn read_link(&self, file: &Handle) -> Outcome<Vec<u8>>;
    /// READ: data of a file.
    fn read(&self, caller: &Caller, file: &Handle, offset: u64, count: u32) -> Outcome<Found>;
    /// WRITE: writes data of a file. Returns the number of bytes written, and their stability.
    fn write(
        &self,
        caller: &Caller,
        file: &Handle,
        offset: u64,
        data: Data,
        stable: Stable,
    ) -> Outcome<(u32, Stable)>;
    /// COMMIT: writes the data of a file to stable storage.
    fn commit(&self, caller: &Caller, file: &Handle) -> Outcome<()>;
    /// CREATE: makes or finds a regular file.
    fn create(&self, caller: &Caller, dir: &Handle, name: &[u8], how: &CreateHow) -> Outcome<File>;
    /// MKDIR, SYMLINK, MKNOD: makes another kind of file.
    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: New) -> Outcome<File>;
    /// REMOVE: removes a name, or RMDIR if `directory` is set.
    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Outcome<()>;
    /// RENAME: changes the name of a file, and its directory.
    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Outcome<()>;
    /// LINK: gives a file a further name.
    fn link(&self, caller: &Caller, file: &Handle, dir: &Handle, name: &[u8]) -> Outcome<()>;
    /// Returns all entries of a directory except `.` and `..`, in any order, and the
    /// [`version`](Self::version) of the directory.
    fn list(&self, dir: &Handle) -> Outcome<(Vec<Numbered>, Option<u64>)>;
    /// Returns a number that changes whenever the entries of a directory change. `None`: the tree
    /// does not detect such changes.
    fn version(&self, dir: &Handle) -> Option<u64>;
    /// Checks that the caller may list the directory.
    fn may_list(&self, caller: &Caller, dir: &Handle) -> Outcome<()>;
    /// Returns the parent of a directory. The parent of the root is the root.
    fn parent(&self, dir: &Handle) -> Outcome<Handle>;
    /// FSSTAT: the space and the number of files of the file system.
    fn statistics(&self) -> Outcome<Statistics>;
    /// Returns the pool of memory for data.
    fn pool(&self) -> &Pool;
}
