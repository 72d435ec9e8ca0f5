//! NFS version 3 (RFC 1813): what calls and results are made of.
//!
//! The data of READ and WRITE and the texts of READLINK and SYMLINK are not in these types: they end where the item begins, behind its
//! count, because it travels apart where the transport can.

use crate::xdr::{BadXdr, Reader, Xdr, record, words};

/// The RPC program.
pub const PROGRAM: u32 = 100_003;
/// Its version.
pub const VERSION: u32 = 3;
/// Bytes of a file handle, at most.
pub const MAX_HANDLE: usize = 64;
/// Bytes of a name, at most: what Linux' file systems take.
pub const MAX_NAME: usize = 255;
/// Bytes of a symbolic link's text, at most: what Linux takes.
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

    /// nfsstat3 (§2.6), but NFS3_OK, which is a [`Reply`]'s `Ok`.
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
        /// The data, and what is needed to find it, is on stable storage.
        DataSync = 1,
        /// And everything else of the file.
        FileSync = 2,
    }
}

/// What a procedure answers: NFS3_OK and its results, or a status and what comes with failures.
pub type Reply<T, F> = Result<T, (Status, F)>;

impl<'a, T: Xdr<'a>, F: Xdr<'a>> Xdr<'a> for Reply<T, F> {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        let ahead = &mut reader.clone();
        if u32::take(ahead)? == 0 {
            *reader = *ahead;
            return T::take(reader).map(Ok);
        }
        <(Status, F)>::take(reader).map(Err)
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Ok(results) => {
                0_u32.put(out);
                results.put(out);
            }
            Err(failure) => failure.put(out),
        }
    }
}

/// nfs_fh3 (§2.3.3): a server's name for a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    octets: [u8; MAX_HANDLE],
    len: u8,
}

impl Handle {
    /// A handle of these bytes, of which only [`MAX_HANDLE`] are taken.
    pub fn new(octets: &[u8]) -> Self {
        let len = octets.len().min(MAX_HANDLE);
        let mut handle = Self {
            octets: [0; MAX_HANDLE],
            len: len as u8,
        };
        handle.octets[..len].copy_from_slice(&octets[..len]);
        handle
    }

    /// Its bytes.
    pub fn octets(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.octets()
            .iter()
            .try_for_each(|octet| write!(f, "{octet:02x}"))
    }
}

impl Xdr<'_> for Handle {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let octets = <&[u8]>::take(reader)?;
        if octets.len() > MAX_HANDLE {
            return Err(BadXdr::Length(octets.len() as u32));
        }
        Ok(Self::new(octets))
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.octets().put(out);
    }
}

/// How a time is to be set (§2.5, set_atime and set_mtime).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetTime {
    /// Not at all.
    #[default]
    Keep,
    /// To the server's.
    Now,
    /// To this.
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

/// createhow3 (§3.3.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateHow {
    /// A file that is there already is as good.
    Unchecked(SetAttributes),
    /// It must not be there.
    Guarded(SetAttributes),
    /// It must not be there, unless this very call made it.
    Exclusive(Verifier),
}

impl Xdr<'_> for CreateHow {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        match u32::take(reader)? {
            0 => SetAttributes::take(reader).map(Self::Unchecked),
            1 => SetAttributes::take(reader).map(Self::Guarded),
            2 => Verifier::take(reader).map(Self::Exclusive),
            other => Err(BadXdr::Value(other)),
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Unchecked(attributes) => {
                0_u32.put(out);
                attributes.put(out);
            }
            Self::Guarded(attributes) => {
                1_u32.put(out);
                attributes.put(out);
            }
            Self::Exclusive(verifier) => {
                2_u32.put(out);
                verifier.put(out);
            }
        }
    }
}

/// mknoddata3 (§3.3.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// A device: block or character.
    Device(Kind, SetAttributes, Device),
    /// A socket or named pipe.
    Pipe(Kind, SetAttributes),
    /// What MKNOD does not make.
    Other(Kind),
}

impl Xdr<'_> for Special {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let kind = Kind::take(reader)?;
        Ok(match kind {
            Kind::Block | Kind::Character => {
                Self::Device(kind, SetAttributes::take(reader)?, Device::take(reader)?)
            }
            Kind::Socket | Kind::Fifo => Self::Pipe(kind, SetAttributes::take(reader)?),
            Kind::File | Kind::Directory | Kind::Symlink => Self::Other(kind),
        })
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Device(kind, attributes, device) => (*kind, (*attributes, *device)).put(out),
            Self::Pipe(kind, attributes) => (*kind, *attributes).put(out),
            Self::Other(kind) => kind.put(out),
        }
    }
}

record! {
    /// nfstime3.
    #[derive(Default, PartialOrd, Ord, Hash)]
    pub struct Time {
        /// Since 1970.
        pub seconds: u32,
        /// And nanoseconds.
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
        /// What it is.
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
        /// Bytes of storage that it takes up.
        pub used: u64,
        /// Which device, if it is one.
        pub device: Device,
        /// File system.
        pub fsid: u64,
        /// File number in it.
        pub fileid: u64,
        /// Last read.
        pub atime: Time,
        /// Last written.
        pub mtime: Time,
        /// Attributes last changed.
        pub ctime: Time,
    }

    /// wcc_attr: what tells a client whether its cache is still right.
    pub struct Before {
        /// Bytes.
        pub size: u64,
        /// Last written.
        pub mtime: Time,
        /// Attributes last changed.
        pub ctime: Time,
    }

    /// wcc_data: around an operation.
    #[derive(Default)]
    pub struct Wcc {
        /// Before it.
        pub before: Option<Before>,
        /// After it.
        pub after: Option<Attributes>,
    }

    /// sattr3: what is to be changed.
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
        /// Last read.
        pub atime: SetTime,
        /// Last written.
        pub mtime: SetTime,
    }

    /// diropargs3: a name in a directory.
    pub struct Entry<'a> {
        /// The directory.
        pub dir: Handle,
        /// The name.
        pub name: &'a [u8],
    }

    /// SETATTR3args.
    pub struct SetattrArgs {
        /// Which file.
        pub file: Handle,
        /// What to set.
        pub attributes: SetAttributes,
        /// Only if its ctime is this.
        pub guard: Option<Time>,
    }

    /// LOOKUP3resok.
    pub struct LookupOk {
        /// What was found.
        pub file: Handle,
        /// Of it.
        pub attributes: Option<Attributes>,
        /// Of the directory.
        pub dir: Option<Attributes>,
    }

    /// ACCESS3args; READ, LOOKUP, MODIFY, EXTEND, DELETE, EXECUTE are bits 0 to 5.
    pub struct AccessArgs {
        /// Which file.
        pub file: Handle,
        /// What is asked.
        pub access: u32,
    }

    /// ACCESS3resok.
    pub struct AccessOk {
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// What is allowed.
        pub access: u32,
    }

    /// READLINK3resok, without the text.
    pub struct ReadlinkOk {
        /// Of the link.
        pub attributes: Option<Attributes>,
        /// Bytes of the text that follows.
        pub len: u32,
    }

    /// READ3args.
    pub struct ReadArgs {
        /// Which file.
        pub file: Handle,
        /// From where.
        pub offset: u64,
        /// Bytes, at most.
        pub count: u32,
    }

    /// READ3resok, without the data.
    pub struct ReadOk {
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// Bytes read.
        pub count: u32,
        /// They are the file's last.
        pub eof: bool,
        /// Bytes of the data that follows.
        pub len: u32,
    }

    /// WRITE3args, without the data.
    pub struct WriteArgs {
        /// Which file.
        pub file: Handle,
        /// To where.
        pub offset: u64,
        /// Bytes to write.
        pub count: u32,
        /// How safely.
        pub stable: Stable,
        /// Bytes of the data that follows.
        pub len: u32,
    }

    /// WRITE3resok.
    pub struct WriteOk {
        /// Of the file.
        pub wcc: Wcc,
        /// Bytes written.
        pub count: u32,
        /// How safe they are.
        pub committed: Stable,
        /// Changes when the server may have lost what was not committed.
        pub verifier: Verifier,
    }

    /// CREATE3args.
    pub struct CreateArgs<'a> {
        /// Where.
        pub place: Entry<'a>,
        /// How.
        pub how: CreateHow,
    }

    /// MKDIR3args.
    pub struct MkdirArgs<'a> {
        /// Where.
        pub place: Entry<'a>,
        /// With what attributes.
        pub attributes: SetAttributes,
    }

    /// SYMLINK3args, without the text.
    pub struct SymlinkArgs<'a> {
        /// Where.
        pub place: Entry<'a>,
        /// With what attributes.
        pub attributes: SetAttributes,
        /// Bytes of the text that follows.
        pub len: u32,
    }

    /// MKNOD3args.
    pub struct MknodArgs<'a> {
        /// Where.
        pub place: Entry<'a>,
        /// What.
        pub what: Special,
    }

    /// What CREATE, MKDIR, SYMLINK and MKNOD answer.
    pub struct Created {
        /// The new file.
        pub file: Option<Handle>,
        /// Of it.
        pub attributes: Option<Attributes>,
        /// Of the directory.
        pub wcc: Wcc,
    }

    /// RENAME3args.
    pub struct RenameArgs<'a> {
        /// Old name.
        pub from: Entry<'a>,
        /// New name.
        pub to: Entry<'a>,
    }

    /// LINK3args.
    pub struct LinkArgs<'a> {
        /// Which file.
        pub file: Handle,
        /// Its further name.
        pub place: Entry<'a>,
    }

    /// READDIR3args.
    pub struct ReaddirArgs {
        /// Which directory.
        pub dir: Handle,
        /// Of the last entry seen, or 0.
        pub cookie: u64,
        /// Of the answer that the cookie is from.
        pub verifier: Verifier,
        /// Bytes of the answer, at most.
        pub count: u32,
    }

    /// READDIRPLUS3args.
    pub struct ReaddirplusArgs {
        /// Which directory.
        pub dir: Handle,
        /// Of the last entry seen, or 0.
        pub cookie: u64,
        /// Of the answer that the cookie is from.
        pub verifier: Verifier,
        /// Bytes of names, numbers and cookies, at most.
        pub names: u32,
        /// Bytes of the answer, at most.
        pub count: u32,
    }

    /// READDIR3resok and READDIRPLUS3resok, without the entries: each an optional item, and then the end of the directory or not.
    pub struct ReaddirOk {
        /// Of the directory.
        pub dir: Option<Attributes>,
        /// For the cookies that follow.
        pub verifier: Verifier,
    }

    /// entry3.
    pub struct Listed<'a> {
        /// File number.
        pub fileid: u64,
        /// Name.
        pub name: &'a [u8],
        /// To go on behind it.
        pub cookie: u64,
    }

    /// entryplus3.
    pub struct ListedPlus<'a> {
        /// The entry.
        pub entry: Listed<'a>,
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// The file.
        pub file: Option<Handle>,
    }

    /// Space and files of a file system.
    #[derive(Default)]
    pub struct Statistics {
        /// Bytes there are.
        pub total_octets: u64,
        /// Bytes that are free.
        pub free_octets: u64,
        /// Bytes that the caller may use.
        pub available_octets: u64,
        /// Files there can be.
        pub total_files: u64,
        /// Files that are free.
        pub free_files: u64,
        /// Files that the caller may make.
        pub available_files: u64,
        /// Seconds during which that will not change.
        pub unchanged: u32,
    }

    /// FSSTAT3resok.
    pub struct FsstatOk {
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// Of its file system.
        pub statistics: Statistics,
    }

    /// FSINFO3resok.
    pub struct FsinfoOk {
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// READ: most, best, and what a count should be a multiple of.
        pub read_max: u32,
        #[allow(missing_docs)]
        pub read_best: u32,
        #[allow(missing_docs)]
        pub read_multiple: u32,
        /// WRITE: the same.
        pub write_max: u32,
        #[allow(missing_docs)]
        pub write_best: u32,
        #[allow(missing_docs)]
        pub write_multiple: u32,
        /// READDIR: best.
        pub readdir_best: u32,
        /// Bytes of a file, at most.
        pub max_size: u64,
        /// How exact times are.
        pub time_delta: Time,
        /// LINK 1, SYMLINK 2, HOMOGENEOUS 8, CANSETTIME 16.
        pub properties: u32,
    }

    /// PATHCONF3resok.
    pub struct PathconfOk {
        /// Of the file.
        pub attributes: Option<Attributes>,
        /// Hard links, at most.
        pub max_links: u32,
        /// Bytes of a name, at most.
        pub max_name: u32,
        /// Longer names are an error.
        pub no_trunc: bool,
        /// Only root may give files away.
        pub chown_restricted: bool,
        /// Upper and lower case are the same.
        pub case_insensitive: bool,
        /// But they are kept.
        pub case_preserving: bool,
    }

    /// COMMIT3args.
    pub struct CommitArgs {
        /// Which file.
        pub file: Handle,
        /// From where.
        pub offset: u64,
        /// Bytes; 0 is all that follow.
        pub count: u32,
    }

    /// COMMIT3resok.
    pub struct CommitOk {
        /// Of the file.
        pub wcc: Wcc,
        /// As WRITE's.
        pub verifier: Verifier,
    }
}

impl Attributes {
    /// What of them tells whether a cache is right.
    pub const fn before(&self) -> Before {
        Before {
            size: self.size,
            mtime: self.mtime,
            ctime: self.ctime,
        }
    }
}
