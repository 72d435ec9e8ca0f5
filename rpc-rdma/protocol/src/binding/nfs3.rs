//! NFS version 3 (RFC 1813, RFC 8267 §4).

use super::{Binding, skip};
use crate::NFS_PORT;
use crate::rpc::opaque;
use crate::xdr::{Reader, UNIT};

const PROGRAM: u32 = 100_003;
const VERSION: u32 = 3;

/// Bytes of a file handle, at most (RFC 1813 §2.4, NFS3_FHSIZE).
const MAX_HANDLE: usize = 64;

/// Bytes of a symbolic link's text that we make room for. The protocol has no limit; this is Linux' PATH_MAX, which its own client takes.
const MAX_PATH: u32 = 4096;

/// Procedures (RFC 1813 §3.3).
mod procedure {
    pub(super) const NULL: u32 = 0;
    pub(super) const GETATTR: u32 = 1;
    pub(super) const SETATTR: u32 = 2;
    pub(super) const LOOKUP: u32 = 3;
    pub(super) const ACCESS: u32 = 4;
    pub(super) const READLINK: u32 = 5;
    pub(super) const READ: u32 = 6;
    pub(super) const WRITE: u32 = 7;
    pub(super) const CREATE: u32 = 8;
    pub(super) const MKDIR: u32 = 9;
    pub(super) const SYMLINK: u32 = 10;
    pub(super) const MKNOD: u32 = 11;
    pub(super) const REMOVE: u32 = 12;
    pub(super) const RMDIR: u32 = 13;
    pub(super) const RENAME: u32 = 14;
    pub(super) const LINK: u32 = 15;
    pub(super) const READDIR: u32 = 16;
    pub(super) const READDIRPLUS: u32 = 17;
    pub(super) const FSSTAT: u32 = 18;
    pub(super) const FSINFO: u32 = 19;
    pub(super) const PATHCONF: u32 = 20;
    pub(super) const COMMIT: u32 = 21;
}

/// Bytes of what results are made of (RFC 1813 §2.5, §2.6).
pub(super) mod octets {
    pub(in crate::binding) const STATUS: usize = 4;
    pub(super) const ATTRIBUTES: usize = 84;
    pub(in crate::binding) const POST_OP: usize = 4 + ATTRIBUTES;
    pub(super) const WCC: usize = 4 + 24 + POST_OP;
    pub(super) const HANDLE: usize = 4 + super::MAX_HANDLE;
    pub(super) const POST_OP_HANDLE: usize = 4 + HANDLE;
    pub(super) const COUNT: usize = 4;
    pub(super) const VERIFIER: usize = 8;
}

/// The binding. Data of READ and WRITE, and texts of READLINK and SYMLINK, may go by chunk.
#[derive(Clone, Copy, Debug)]
pub struct Nfs3;

impl Binding for Nfs3 {
    fn program(&self) -> (u32, u32) {
        (PROGRAM, VERSION)
    }

    fn port(&self) -> Option<u16> {
        Some(NFS_PORT)
    }

    fn argument(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        let mut reader = Reader(arguments);
        match procedure {
            procedure::WRITE => {
                handle(&mut reader)?;
                // offset, count, stable
                skip(&mut reader, 8 + 2 * UNIT)?;
            }
            procedure::SYMLINK => {
                handle(&mut reader)?;
                opaque(&mut reader, usize::MAX / 2).ok()?;
                attributes_to_set(&mut reader)?;
            }
            _ => return None,
        }
        let _count = reader.word().ok()?;
        Some(arguments.len() - reader.0.len())
    }

    fn result(&self, procedure: u32, arguments: &[u8]) -> Option<u32> {
        match procedure {
            procedure::READ => word_after_handle(arguments, 8),
            procedure::READLINK => Some(MAX_PATH),
            _ => None,
        }
    }

    fn max_results(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        use octets::{ATTRIBUTES, COUNT, HANDLE, POST_OP, POST_OP_HANDLE, STATUS, VERIFIER, WCC};
        // A directory's entries: all of resok fits into so many bytes, and a failure brings attributes.
        let listing = |limit: u32| STATUS + POST_OP.max(limit as usize);
        Some(match procedure {
            procedure::NULL => 0,
            procedure::GETATTR => STATUS + ATTRIBUTES,
            procedure::SETATTR | procedure::REMOVE | procedure::RMDIR => STATUS + WCC,
            procedure::LOOKUP => STATUS + HANDLE + 2 * POST_OP,
            procedure::ACCESS => STATUS + POST_OP + 4,
            procedure::READLINK => STATUS + POST_OP + COUNT,
            // count, eof, and the data's own count
            procedure::READ => STATUS + POST_OP + COUNT + 4 + COUNT,
            // count, committed
            procedure::WRITE => STATUS + WCC + COUNT + 4 + VERIFIER,
            procedure::CREATE | procedure::MKDIR | procedure::SYMLINK | procedure::MKNOD => {
                STATUS + POST_OP_HANDLE + POST_OP + WCC
            }
            procedure::RENAME => STATUS + 2 * WCC,
            procedure::LINK => STATUS + POST_OP + WCC,
            // cookie and cookieverf before count; dircount, too, before maxcount
            procedure::READDIR => listing(word_after_handle(arguments, 16)?),
            procedure::READDIRPLUS => listing(word_after_handle(arguments, 16 + UNIT)?),
            procedure::FSSTAT => STATUS + POST_OP + 6 * 8 + 4,
            procedure::FSINFO => STATUS + POST_OP + 7 * 4 + 8 + 8 + 4,
            procedure::PATHCONF => STATUS + POST_OP + 6 * 4,
            procedure::COMMIT => STATUS + WCC + VERIFIER,
            _ => return None,
        })
    }
}

fn handle(reader: &mut Reader) -> Option<()> {
    opaque(reader, MAX_HANDLE).ok().map(drop)
}

/// A word that stands `skipped` bytes behind the file handle with which the arguments begin.
fn word_after_handle(arguments: &[u8], skipped: usize) -> Option<u32> {
    let mut reader = Reader(arguments);
    handle(&mut reader)?;
    skip(&mut reader, skipped)?;
    reader.word().ok()
}

/// sattr3 (RFC 1813 §2.5): mode, uid, gid, size, each there or not; two times, of which SET_TO_CLIENT_TIME brings one.
fn attributes_to_set(reader: &mut Reader) -> Option<()> {
    for len in [4, 4, 4, 8] {
        if reader.follows().ok()? {
            skip(reader, len)?;
        }
    }
    const SET_TO_CLIENT_TIME: u32 = 2;
    for _ in ["atime", "mtime"] {
        match reader.word().ok()? {
            SET_TO_CLIENT_TIME => skip(reader, 8)?,
            0 | 1 => {}
            _ => return None,
        }
    }
    Some(())
}
