//! Access control lists in the extended attributes of Linux file systems. An attribute has 4 bytes,
//! and 8 bytes for each entry, little-endian (acl(5)).

use crate::acl::{Acl, Entry, Tag};
use crate::nfs3::Status;
use crate::tree::Outcome;
use crate::xdr::{Reader, Xdr};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

/// The attribute of the access list.
pub(super) const ACCESS: &str = "system.posix_acl_access";
/// The attribute of the default list of a directory.
pub(super) const DEFAULT: &str = "system.posix_acl_default";

const VERSION: u32 = 2;
/// The id of entries without an id.
const NO_ID: u32 = u32::MAX;
/// Maximum bytes of an extended attribute (XATTR_SIZE_MAX).
const MAX: usize = 64 << 10;

/// A file's list in an extended attribute. `None` if the file has none.
pub(super) fn of(path: &str, name: &str) -> Outcome<Option<Acl>> {
    let mut bytes = vec![0; MAX];
    match getxattr(path, name, &mut bytes[..]) {
        Ok(len) => parsed(&bytes[..len]).ok_or(Status::ServerFault).map(Some),
        Err(Errno::NODATA) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Sets or removes a list, with the permissions of the thread.
pub(super) fn set(path: &str, name: &str, list: Option<&Acl>) -> Outcome<()> {
    match list {
        Some(list) => setxattr(path, name, &bytes(list), XattrFlags::empty())?,
        None => match removexattr(path, name) {
            Err(Errno::NODATA) => {}
            removed => removed?,
        },
    }
    Ok(())
}

fn parsed(bytes: &[u8]) -> Option<Acl> {
    let (version, rest) = bytes.split_first_chunk()?;
    let (entries, []) = rest.as_chunks::<8>() else {
        return None;
    };
    let entries = entries.iter().map(|&[t, u, r, s, id @ ..]| {
        let tag = u32::from(u16::from_le_bytes([t, u]));
        Some(Entry {
            tag: Tag::take(&mut Reader(&tag.to_be_bytes())).ok()?,
            id: u32::from_le_bytes(id),
            rights: u16::from_le_bytes([r, s]).into(),
        })
    });
    (u32::from_le_bytes(*version) == VERSION)
        .then(|| Acl::new(&entries.collect::<Option<Vec<_>>>()?))
        .flatten()
}

fn bytes(list: &Acl) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for Entry { tag, id, rights } in list.entries(NO_ID) {
        bytes.extend((tag as u16).to_le_bytes());
        bytes.extend((rights as u16).to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}
