//! Permissions in the form of the bits of ACCESS.

use crate::nfs3::Kind;

/// The bits of ACCESS that are equivalent to the permissions to read, write and execute.
pub(super) fn access_bits(kind: Kind, read: bool, write: bool, execute: bool) -> u32 {
    const READ: u32 = 1;
    const LOOKUP: u32 = 2;
    const MODIFY: u32 = 4;
    const EXTEND: u32 = 8;
    const DELETE: u32 = 16;
    const EXECUTE: u32 = 32;
    let directory = kind == Kind::Directory;
    let bits = [
        (read, READ),
        (write, MODIFY | EXTEND),
        (write && directory, DELETE),
        (execute, if directory { LOOKUP } else { EXECUTE }),
    ];
    bits.iter().filter(|(has, _)| *has).map(|(_, bits)| bits).sum()
}
