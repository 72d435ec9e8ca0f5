//! Arguments of NFSv3's procedures (RFC 1813 §3.3).

use super::types::{Device, Handle, Kind, SetAttributes, Stable, Time, Verifier};
use crate::xdr::{BadXdr, Reader, Xdr, record};

/// createhow3 (§3.3.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateHow {
    /// An existing file is no error.
    Unchecked(SetAttributes),
    /// The file must not exist.
    Guarded(SetAttributes),
    /// The file must not exist, unless an earlier copy of this call made it.
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
    /// A kind that MKNOD does not make.
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
    /// diropargs3: a name in a directory.
    pub struct Entry<'a> {
        /// The directory.
        pub dir: Handle,
        /// The name.
        pub name: &'a [u8],
    }

    /// SETATTR3args.
    pub struct SetattrArgs {
        /// The file.
        pub file: Handle,
        /// The attributes to set.
        pub attributes: SetAttributes,
        /// If present, the attributes are set only if the ctime is this.
        pub guard: Option<Time>,
    }

    /// ACCESS3args; READ, LOOKUP, MODIFY, EXTEND, DELETE, EXECUTE are bits 0 to 5.
    pub struct AccessArgs {
        /// The file.
        pub file: Handle,
        /// The requested bits.
        pub access: u32,
    }

    /// READ3args.
    pub struct ReadArgs {
        /// The file.
        pub file: Handle,
        /// Offset of the first byte.
        pub offset: u64,
        /// Bytes, at most.
        pub count: u32,
    }

    /// WRITE3args, without the data.
    pub struct WriteArgs {
        /// The file.
        pub file: Handle,
        /// Offset of the first byte.
        pub offset: u64,
        /// Bytes to write.
        pub count: u32,
        /// The requested stability.
        pub stable: Stable,
        /// Bytes of the data that follows.
        pub len: u32,
    }

    /// CREATE3args.
    pub struct CreateArgs<'a> {
        /// Directory and name.
        pub place: Entry<'a>,
        /// Treatment of an existing file, and attributes.
        pub how: CreateHow,
    }

    /// MKDIR3args.
    pub struct MkdirArgs<'a> {
        /// Directory and name.
        pub place: Entry<'a>,
        /// Attributes of the new entry.
        pub attributes: SetAttributes,
    }

    /// SYMLINK3args, without the text.
    pub struct SymlinkArgs<'a> {
        /// Directory and name.
        pub place: Entry<'a>,
        /// Attributes of the new entry.
        pub attributes: SetAttributes,
        /// Bytes of the text that follows.
        pub len: u32,
    }

    /// MKNOD3args.
    pub struct MknodArgs<'a> {
        /// Directory and name.
        pub place: Entry<'a>,
        /// The kind of file.
        pub what: Special,
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
        /// The file.
        pub file: Handle,
        /// The further name.
        pub place: Entry<'a>,
    }

    /// READDIR3args.
    pub struct ReaddirArgs {
        /// The directory.
        pub dir: Handle,
        /// Cookie of the last entry seen, or 0.
        pub cookie: u64,
        /// Verifier of the answer that had the cookie.
        pub verifier: Verifier,
        /// Bytes of the answer, at most.
        pub count: u32,
    }

    /// READDIRPLUS3args.
    pub struct ReaddirplusArgs {
        /// The directory.
        pub dir: Handle,
        /// Cookie of the last entry seen, or 0.
        pub cookie: u64,
        /// Verifier of the answer that had the cookie.
        pub verifier: Verifier,
        /// Bytes of names, numbers and cookies, at most.
        pub names: u32,
        /// Bytes of the answer, at most.
        pub count: u32,
    }

    /// COMMIT3args.
    pub struct CommitArgs {
        /// The file.
        pub file: Handle,
        /// Offset of the first byte.
        pub offset: u64,
        /// Bytes; 0 is all that follow.
        pub count: u32,
    }
}
