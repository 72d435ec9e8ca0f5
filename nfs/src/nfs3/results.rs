//! Results of NFSv3's procedures (RFC 1813 §3.3).

use super::types::{Attributes, Handle, Stable, Status, Time, Verifier, Wcc};
use crate::xdr::{BadXdr, Reader, Xdr, record};

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

record! {
    /// LOOKUP3resok.
    pub struct LookupOk {
        /// What was found.
        pub file: Handle,
        /// Of it.
        pub attributes: Option<Attributes>,
        /// Of the directory.
        pub dir: Option<Attributes>,
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

    /// What CREATE, MKDIR, SYMLINK and MKNOD answer.
    pub struct Created {
        /// The new file.
        pub file: Option<Handle>,
        /// Of it.
        pub attributes: Option<Attributes>,
        /// Of the directory.
        pub wcc: Wcc,
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

    /// COMMIT3resok.
    pub struct CommitOk {
        /// Of the file.
        pub wcc: Wcc,
        /// As WRITE's.
        pub verifier: Verifier,
    }
}
