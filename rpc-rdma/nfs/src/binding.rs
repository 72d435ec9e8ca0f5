//! Upper Layer Bindings of NFSv3, NFSACL and MOUNT (RFC 8267): which arguments and results are
//! DDP-eligible, and how long replies can get.

use crate::acl::MAX_ENTRIES;
use crate::nfs3::{self, Handle, MAX_HANDLE, Procedure, SetAttributes};
use crate::xdr::{Reader, Xdr};
use crate::{mount3, nfsacl};
use urnic_rpc_rdma::binding::Binding;

/// TCP port of NFS over RDMA on iWARP (RFC 8166 §5, RFC 8267 §6).
pub const NFS_PORT: u16 = 20049;

/// The bindings of all programs that the server serves.
pub const BINDINGS: [&(dyn Binding + Sync); 3] = [&Nfs3, &NfsAcl3, &Mount3];

/// Bytes that a client provides for the text of a symbolic link. The protocol has no limit. The
/// value is PATH_MAX of Linux, which is the limit of Linux's client.
const MAX_LINK_TEXT: u32 = 4096;

/// Lengths of the parts of results, in bytes (RFC 1813 §2.5, §2.6).
mod len {
    pub(super) const STATUS: usize = 4;
    pub(super) const ATTRIBUTES: usize = 84;
    pub(super) const POST_OP: usize = 4 + ATTRIBUTES;
    pub(super) const WCC: usize = 4 + 24 + POST_OP;
    pub(super) const HANDLE: usize = 4 + super::MAX_HANDLE;
    pub(super) const POST_OP_HANDLE: usize = 4 + HANDLE;
    pub(super) const COUNT: usize = 4;
    pub(super) const VERIFIER: usize = 8;
}

/// NFS version 3 (RFC 1813, RFC 8267 §4). The data of READ and WRITE and the texts of READLINK and
/// SYMLINK are DDP-eligible.
#[derive(Clone, Copy, Debug)]
pub struct Nfs3;

impl Binding for Nfs3 {
    fn program(&self) -> (u32, u32) {
        (nfs3::PROGRAM, nfs3::VERSION)
    }

    fn port(&self) -> Option<u16> {
        Some(NFS_PORT)
    }

    fn argument(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        let mut reader = Reader(arguments);
        let _file_or_directory = Handle::take(&mut reader).ok()?;
        match Procedure::of(procedure)? {
            Procedure::Write => {
                let (_offset, (_count, _stable)) = <(u64, (u32, u32))>::take(&mut reader).ok()?;
            }
            Procedure::Symlink => {
                let _name = <&[u8]>::take(&mut reader).ok()?;
                let _attributes = SetAttributes::take(&mut reader).ok()?;
            }
            _ => return None,
        }
        let _length = u32::take(&mut reader).ok()?;
        Some(arguments.len() - reader.0.len())
    }

    fn result(&self, procedure: u32, arguments: &[u8]) -> Option<u32> {
        match Procedure::of(procedure)? {
            Procedure::Read => word_after_handle(arguments, 8),
            Procedure::Readlink => Some(MAX_LINK_TEXT),
            _ => None,
        }
    }

    fn max_results(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        use len::{ATTRIBUTES, COUNT, HANDLE, POST_OP, POST_OP_HANDLE, STATUS, VERIFIER, WCC};
        // All results of a directory's listing fit into the limit. A failure has attributes.
        let listing = |limit: u32| STATUS + POST_OP.max(limit as usize);
        Some(match Procedure::of(procedure)? {
            Procedure::Null => 0,
            Procedure::Getattr => STATUS + ATTRIBUTES,
            Procedure::Setattr | Procedure::Remove | Procedure::Rmdir => STATUS + WCC,
            Procedure::Lookup => STATUS + HANDLE + 2 * POST_OP,
            Procedure::Access => STATUS + POST_OP + 4,
            Procedure::Readlink => STATUS + POST_OP + COUNT,
            // count, eof, and the length of the data
            Procedure::Read => STATUS + POST_OP + COUNT + 4 + COUNT,
            // count, committed
            Procedure::Write => STATUS + WCC + COUNT + 4 + VERIFIER,
            Procedure::Create | Procedure::Mkdir | Procedure::Symlink | Procedure::Mknod => {
                STATUS + POST_OP_HANDLE + POST_OP + WCC
            }
            Procedure::Rename => STATUS + 2 * WCC,
            Procedure::Link => STATUS + POST_OP + WCC,
            // cookie and cookieverf precede count; dircount precedes maxcount, too
            Procedure::Readdir => listing(word_after_handle(arguments, 16)?),
            Procedure::Readdirplus => listing(word_after_handle(arguments, 20)?),
            Procedure::Fsstat => STATUS + POST_OP + 6 * 8 + 4,
            Procedure::Fsinfo => STATUS + POST_OP + 7 * 4 + 8 + 8 + 4,
            Procedure::Pathconf => STATUS + POST_OP + 6 * 4,
            Procedure::Commit => STATUS + WCC + VERIFIER,
        })
    }
}

/// The word that is `skipped` bytes after the file handle with which the arguments begin.
fn word_after_handle(arguments: &[u8], skipped: usize) -> Option<u32> {
    let mut reader = Reader(arguments);
    Handle::take(&mut reader).ok()?;
    reader.0 = reader.0.get(skipped..)?;
    u32::take(&mut reader).ok()
}

/// NFSACL version 3. Nothing is DDP-eligible, so long lists make long calls and replies.
#[derive(Clone, Copy, Debug)]
pub struct NfsAcl3;

impl Binding for NfsAcl3 {
    fn program(&self) -> (u32, u32) {
        (nfsacl::PROGRAM, nfsacl::VERSION)
    }

    fn port(&self) -> Option<u16> {
        Some(NFS_PORT)
    }

    fn max_results(&self, procedure: u32, _arguments: &[u8]) -> Option<usize> {
        use len::{POST_OP, STATUS};
        use nfsacl::Procedure;
        const MASK: usize = 4;
        const ENTRY: usize = 12;
        // A number of entries, and a counted array.
        const LIST: usize = 4 + 4 + MAX_ENTRIES * ENTRY;
        Some(match Procedure::of(procedure)? {
            Procedure::Null => 0,
            Procedure::Getacl => STATUS + POST_OP + MASK + 2 * LIST,
            Procedure::Setacl => STATUS + POST_OP,
        })
    }
}

/// MOUNT version 3 (RFC 1813 appendix I, RFC 8267 §5.1). Nothing is DDP-eligible. Servers offer
/// MOUNT over TCP, too.
#[derive(Clone, Copy, Debug)]
pub struct Mount3;

impl Binding for Mount3 {
    fn program(&self) -> (u32, u32) {
        (mount3::PROGRAM, mount3::VERSION)
    }

    fn max_results(&self, procedure: u32, _arguments: &[u8]) -> Option<usize> {
        use mount3::Procedure;
        match Procedure::of(procedure)? {
            Procedure::Null | Procedure::Umnt | Procedure::Umntall => Some(0),
            // These lists may have any length.
            Procedure::Mnt | Procedure::Dump | Procedure::Export => None,
        }
    }
}
