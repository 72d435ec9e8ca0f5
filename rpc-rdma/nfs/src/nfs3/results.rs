//! Results of NFSv3's procedures (RFC 1813 §3.3).

use super::types::{Attributes, Handle, Stable, Status, Time, Verifier, Wcc};
use crate::xdr::{BadXdr, Reader, Xdr, record};

/// The result of a procedure: NFS3_OK and results, or a status and the attributes of a failure.
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
        /// The file that was found.
        pub file: Handle,
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Attributes of the directory.
        pub dir: Option<Attributes>,
    }

    /// ACCESS3resok.
    pub struct AccessOk {
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// The permitted bits.
        pub access: u32,
    }

    /// READLINK3resok, without the text.
    pub struct ReadlinkOk {
        /// Attributes of the link.
        pub attributes: Option<Attributes>,
        /// Bytes of the text that follows.
        pub len: u32,
    }

    /// READ3resok, without the data.
    pub struct ReadOk {
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Bytes read.
        pub count: u32,
        /// The data ends at the end of the file.
        pub eof: bool,
        /// Bytes of the data that follows.
        pub len: u32,
    }

    /// WRITE3resok.
    pub struct WriteOk {
        /// Attributes of the file.
        pub wcc: Wcc,
        /// Bytes written.
        pub count: u32,
        /// Stability of the data.
        pub committed: Stable,
        /// Changes when the server may have lost uncommitted data.
        pub verifier: Verifier,
    }

    /// Results of CREATE, MKDIR, SYMLINK and MKNOD.
    pub struct Created {
        /// The new file.
        pub file: Option<Handle>,
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Attributes of the directory.
        pub wcc: Wcc,
    }

    /// READDIR3resok and READDIRPLUS3resok, without the entries: each an optional item, and then
    /// the end of the directory or not.
    pub struct ReaddirOk {
        /// Attributes of the directory.
        pub dir: Option<Attributes>,
        /// Verifier of the cookies that follow.
        pub verifier: Verifier,
    }

    /// entry3.
    pub struct Listed<'a> {
        /// File number.
        pub fileid: u64,
        /// Name.
        pub name: &'a [u8],
        /// Cookie to continue after this entry.
        pub cookie: u64,
    }

    /// entryplus3.
    pub struct ListedPlus<'a> {
        /// The entry.
        pub entry: Listed<'a>,
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// The file.
        pub file: Option<Handle>,
    }

    /// Space and files of a file system.
    #[derive(Default)]
    pub struct Statistics {
        /// Bytes in all.
        pub total_bytes: u64,
        /// Free bytes.
        pub free_bytes: u64,
        /// Bytes that the caller may use.
        pub available_bytes: u64,
        /// Files in all.
        pub total_files: u64,
        /// Free files.
        pub free_files: u64,
        /// Files that the caller may create.
        pub available_files: u64,
        /// Seconds for which these numbers stay valid.
        pub unchanged: u32,
    }

    /// FSSTAT3resok.
    pub struct FsstatOk {
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Statistics of the file system.
        pub statistics: Statistics,
    }

    /// FSINFO3resok.
    pub struct FsinfoOk {
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Limits of READ: maximum, preferred count, and preferred multiple.
        pub read_max: u32,
        #[allow(missing_docs)]
        pub read_best: u32,
        #[allow(missing_docs)]
        pub read_multiple: u32,
        /// Limits of WRITE: maximum, preferred count, and preferred multiple.
        pub write_max: u32,
        #[allow(missing_docs)]
        pub write_best: u32,
        #[allow(missing_docs)]
        pub write_multiple: u32,
        /// Preferred count of READDIR.
        pub readdir_best: u32,
        /// Bytes of a file, at most.
        pub max_size: u64,
        /// Resolution of times.
        pub time_delta: Time,
        /// LINK 1, SYMLINK 2, HOMOGENEOUS 8, CANSETTIME 16.
        pub properties: u32,
    }

    /// PATHCONF3resok.
    pub struct PathconfOk {
        /// Attributes of the file.
        pub attributes: Option<Attributes>,
        /// Hard links, at most.
        pub max_links: u32,
        /// Bytes of a name, at most.
        pub max_name: u32,
        /// Longer names are an error.
        pub no_trunc: bool,
        /// Only root may change owners.
        pub chown_restricted: bool,
        /// Names do not differ by case.
        pub case_insensitive: bool,
        /// Names keep their case.
        pub case_preserving: bool,
    }

    /// COMMIT3resok.
    pub struct CommitOk {
        /// Attributes of the file.
        pub wcc: Wcc,
        /// Write verifier, as in [`WriteOk`].
        pub verifier: Verifier,
    }
}
