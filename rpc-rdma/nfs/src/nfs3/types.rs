//! Constants of NFSv3, and the types of which arguments and results consist (RFC 1813 §2).

use crate::xdr::{BadXdr, Reader, Xdr, record, words};

/// RPC program of NFS.
pub const PROGRAM: u32 = 100_003;
/// RPC version of NFSv3.
pub const VERSION: u32 = 3;
/// Bytes of a file handle, at most.
pub const MAX_HANDLE: usize = 64;
/// Bytes of a name, at most: the limit of Linux's file systems.
pub const MAX_NAME: usize = 255;
/// Bytes of the text of a symbolic link, at most: the limit of Linux.
pub const MAX_PATH: usize = 4095;
/// Bytes that one READ or WRITE moves, at most.
pub const MAX_TRANSFER: u32 = 1 << 20;

/// A write verifier or a create verifier.
pub type Verifier = [u8; 8];

words! {
    /// Procedures (§3.3).
    #[allow(missing_docs)]
    pub enum Procedure {
        Null = 0, Getattr = 1, Setattr = 2, Lookup = 3, Access = 4, Readlink = 5, Read = 6, Write = 7, Create = 8, Mkdir = 9, Symlink = 10,
        Mknod = 11, Remove = 12, Rmdir = 13, Rename = 14, Link = 15, Readdir = 16, Readdirplus = 17, Fsstat = 18, Fsinfo = 19, Pathconf = 20,
        Commit = 21,
    }

    /// nfsstat3 (§2.6) without NFS3_OK.
    #[derive(thiserror::Error)]
    pub enum Status {
        /// NFS3ERR_PERM
        #[error("not owner")]
        Perm = 1,
        /// NFS3ERR_NOENT
        #[error("no such file or directory")]
        NoEnt = 2,
        /// NFS3ERR_IO
        #[error("I/O error")]
        Io = 5,
        /// NFS3ERR_NXIO
        #[error("no such device or address")]
        NxIo = 6,
        /// NFS3ERR_ACCES
        #[error("permission denied")]
        Access = 13,
        /// NFS3ERR_EXIST
        #[error("file exists")]
        Exist = 17,
        /// NFS3ERR_XDEV
        #[error("cross-device link")]
        XDev = 18,
        /// NFS3ERR_NODEV
        #[error("no such device")]
        NoDev = 19,
        /// NFS3ERR_NOTDIR
        #[error("not a directory")]
        NotDir = 20,
        /// NFS3ERR_ISDIR
        #[error("is a directory")]
        IsDir = 21,
        /// NFS3ERR_INVAL
        #[error("invalid argument")]
        Invalid = 22,
        /// NFS3ERR_FBIG
        #[error("file too large")]
        FileTooBig = 27,
        /// NFS3ERR_NOSPC
        #[error("no space left")]
        NoSpace = 28,
        /// NFS3ERR_ROFS
        #[error("read-only file system")]
        ReadOnly = 30,
        /// NFS3ERR_MLINK
        #[error("too many links")]
        TooManyLinks = 31,
        /// NFS3ERR_NAMETOOLONG
        #[error("name too long")]
        NameTooLong = 63,
        /// NFS3ERR_NOTEMPTY
        #[error("directory not empty")]
        NotEmpty = 66,
        /// NFS3ERR_DQUOT
        #[error("quota exceeded")]
        Quota = 69,
        /// NFS3ERR_STALE
        #[error("stale file handle")]
        Stale = 70,
        /// NFS3ERR_REMOTE
        #[error("too many levels of remote")]
        Remote = 71,
        /// NFS3ERR_BADHANDLE
        #[error("bad file handle")]
        BadHandle = 10001,
        /// NFS3ERR_NOT_SYNC
        #[error("the file changed meanwhile")]
        NotSync = 10002,
        /// NFS3ERR_BAD_COOKIE
        #[error("bad directory cookie")]
        BadCookie = 10003,
        /// NFS3ERR_NOTSUPP
        #[error("not supported")]
        NotSupported = 10004,
        /// NFS3ERR_TOOSMALL
        #[error("too small")]
        TooSmall = 10005,
        /// NFS3ERR_SERVERFAULT
        #[error("server fault")]
        ServerFault = 10006,
        /// NFS3ERR_BADTYPE
        #[error("type not supported")]
        BadType = 10007,
        /// NFS3ERR_JUKEBOX
        #[error("try again later")]
        Jukebox = 10008,
    }

    /// ftype3 (§2.5).
    pub enum Kind {
        /// Regular file.
        File = 1,
        /// Directory.
        Directory = 2,
        /// Block device.
        Block = 3,
        /// Character device.
        Character = 4,
        /// Symbolic link.
        Symlink = 5,
        /// Socket.
        Socket = 6,
        /// Named pipe.
        Fifo = 7,
    }

    /// stable_how (§3.3.7), weakest first.
    #[derive(PartialOrd, Ord)]
    pub enum Stable {
        /// The server may lose the data until COMMIT.
        Unstable = 0,
        /// The data, and the metadata to find it, is on stable storage.
        DataSync = 1,
        /// The data and all metadata of the file are on stable storage.
        FileSync = 2,
    }
}

/// nfs_fh3 (§2.3.3): the server's name of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    bytes: [u8; MAX_HANDLE],
    len: u8,
}

impl Handle {
    /// A handle of at most [`MAX_HANDLE`] of these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        let len = bytes.len().min(MAX_HANDLE);
        let mut handle = Self {
            bytes: [0; MAX_HANDLE],
            len: len as u8,
        };
        handle.bytes[..len].copy_from_slice(&bytes[..len]);
        handle
    }

    /// The bytes of the handle.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Xdr<'_> for Handle {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let bytes = <&[u8]>::take(reader)?;
        if bytes.len() > MAX_HANDLE {
            return Err(BadXdr::Length(bytes.len() as u32));
        }
        Ok(Self::new(bytes))
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.bytes().put(out);
    }
}

/// The change of a time (§2.5, set_atime and set_mtime).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetTime {
    /// Keep the time.
    #[default]
    Keep,
    /// Set the time of the server.
    Now,
    /// Set this time.
    To(Time),
}

impl Xdr<'_> for SetTime {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        match u32::take(reader)? {
            0 => Ok(Self::Keep),
            1 => Ok(Self::Now),
            2 => Time::take(reader).map(Self::To),
            other => Err(BadXdr::Value(other)),
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Keep => 0_u32.put(out),
            Self::Now => 1_u32.put(out),
            Self::To(time) => {
                2_u32.put(out);
                time.put(out);
            }
        }
    }
}

record! {
    /// nfstime3.
    #[derive(Default, PartialOrd, Ord, Hash)]
    pub struct Time {
        /// Seconds since 1970.
        pub seconds: u32,
        /// Nanoseconds.
        pub nanos: u32,
    }

    /// specdata3.
    #[derive(Default)]
    pub struct Device {
        /// Major number.
        pub major: u32,
        /// Minor number.
        pub minor: u32,
    }

    /// fattr3.
    pub struct Attributes {
        /// Kind of file.
        pub kind: Kind,
        /// Permissions, set-id bits, sticky bit.
        pub mode: u32,
        /// Hard links.
        pub links: u32,
        /// Owner.
        pub uid: u32,
        /// Group.
        pub gid: u32,
        /// Bytes.
        pub size: u64,
        /// Bytes of storage.
        pub used: u64,
        /// Device numbers, if the file is a device.
        pub device: Device,
        /// File system.
        pub fsid: u64,
        /// File number in the file system.
        pub fileid: u64,
        /// Time of the last read.
        pub atime: Time,
        /// Time of the last write.
        pub mtime: Time,
        /// Time of the last change of attributes.
        pub ctime: Time,
    }

    /// wcc_attr: the attributes by which a client checks its cache.
    pub struct Before {
        /// Bytes.
        pub size: u64,
        /// Time of the last write.
        pub mtime: Time,
        /// Time of the last change of attributes.
        pub ctime: Time,
    }

    /// wcc_data: attributes before and after an operation.
    #[derive(Default)]
    pub struct Wcc {
        /// Attributes before the operation.
        pub before: Option<Before>,
        /// Attributes after the operation.
        pub after: Option<Attributes>,
    }

    /// sattr3: attributes to be changed.
    #[derive(Default)]
    pub struct SetAttributes {
        /// Mode.
        pub mode: Option<u32>,
        /// Owner.
        pub uid: Option<u32>,
        /// Group.
        pub gid: Option<u32>,
        /// Bytes.
        pub size: Option<u64>,
        /// Time of the last read.
        pub atime: SetTime,
        /// Time of the last write.
        pub mtime: SetTime,
    }
}

impl Attributes {
    /// The part of the attributes by which a client checks its cache.
    pub const fn before(&self) -> Before {
        Before {
            size: self.size,
            mtime: self.mtime,
            ctime: self.ctime,
        }
    }
}
