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
