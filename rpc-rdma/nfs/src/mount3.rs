//! MOUNT version 3 (RFC 1813 appendix I), which returns the file handle of a path.

use crate::nfs3::Handle;
use crate::xdr::{BadXdr, Reader, Xdr, words};

/// RPC program of MOUNT.
pub const PROGRAM: u32 = 100_005;
/// RPC version of MOUNT.
pub const VERSION: u32 = 3;
/// Maximum bytes of a path.
pub const MAX_PATH: usize = 1024;

words! {
    /// Procedures.
    #[allow(missing_docs)]
    pub enum Procedure { Null = 0, Mnt = 1, Dump = 2, Umnt = 3, Umntall = 4, Export = 5, }

    /// mountstat3 without MNT3_OK.
    #[derive(thiserror::Error)]
    pub enum Status {
        /// MNT3ERR_PERM
        #[error("not owner")]
        Perm = 1,
        /// MNT3ERR_NOENT
        #[error("no such file or directory")]
        NoEnt = 2,
        /// MNT3ERR_IO
        #[error("I/O error")]
        Io = 5,
        /// MNT3ERR_ACCES
        #[error("permission denied")]
        Access = 13,
        /// MNT3ERR_NOTDIR
        #[error("not a directory")]
        NotDir = 20,
        /// MNT3ERR_INVAL
        #[error("invalid argument")]
        Invalid = 22,
        /// MNT3ERR_NAMETOOLONG
        #[error("name too long")]
        NameTooLong = 63,
        /// MNT3ERR_NOTSUPP
        #[error("not supported")]
        NotSupported = 10004,
        /// MNT3ERR_SERVERFAULT
        #[error("server fault")]
        ServerFault = 10006,
    }
}

/// mountres3: the handle of the directory. The authentication flavors are always AUTH_SYS and
/// AUTH_NONE.
pub type MntReply = Result<Handle, Status>;

/// Appends a mountres3.
pub fn put_mnt(reply: &MntReply, out: &mut Vec<u8>) {
    match reply {
        Ok(handle) => {
            (0_u32, *handle).put(out);
            for word in [2_u32, 1, 0] {
                word.put(out);
            }
        }
        Err(status) => status.put(out),
    }
}

/// Parses a mountres3, without the flavors.
///
/// # Errors
/// The bytes are no mountres3.
pub fn take_mnt(reader: &mut Reader) -> Result<MntReply, BadXdr> {
    let ahead = &mut reader.clone();
    if u32::take(ahead)? == 0 {
        return Handle::take(ahead).map(Ok);
    }
    Status::take(reader).map(Err)
}
