//! NFSACL version 3, the access control lists that Solaris and Linux have beside NFSv3: nothing to place, so that long lists make long calls and replies.

use super::Binding;
use super::nfs3::octets::{POST_OP, STATUS};
use crate::NFS_PORT;

const PROGRAM: u32 = 100_227;
const VERSION: u32 = 3;

/// Entries of a list, at most: what Linux takes.
const MAX_ENTRIES: usize = 1024;
const ENTRY: usize = 12;

/// The binding. It is served where NFS is.
#[derive(Clone, Copy, Debug)]
pub struct NfsAcl3;

impl Binding for NfsAcl3 {
    fn program(&self) -> (u32, u32) {
        (PROGRAM, VERSION)
    }

    fn port(&self) -> Option<u16> {
        Some(NFS_PORT)
    }

    fn max_results(&self, procedure: u32, _arguments: &[u8]) -> Option<usize> {
        const NULL: u32 = 0;
        const GETACL: u32 = 1;
        const SETACL: u32 = 2;
        const MASK: usize = 4;
        // A number, and a counted array.
        const LIST: usize = 4 + 4 + MAX_ENTRIES * ENTRY;
        match procedure {
            NULL => Some(0),
            GETACL => Some(STATUS + POST_OP + MASK + 2 * LIST),
            SETACL => Some(STATUS + POST_OP),
            _ => None,
        }
    }
}
