//! Directories by cookies that never change. The cookie of a name is a hash of it, and entries are
//! in the order of their cookies. A client can therefore continue a listing after files were made
//! or removed, or after the server restarted.

use super::{Numbered, Outcome, Tree};
use crate::nfs3::Handle;
use std::collections::VecDeque;
use std::sync::Arc;
use urnic_sync::Mutex;

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The cookie, which is the place of the name in the listing.
    pub cookie: u64,
    /// The number of the file.
    pub fileid: u64,
    /// The bytes of the name.
    pub name: Box<[u8]>,
}

/// The entries of a directory except `.` and `..`, by ascending cookies, which all differ.
#[derive(Debug)]
pub struct Listing(Vec<Name>);

/// The cookie of `.`. Other names have larger cookies than `.` and `..`.
pub const SELF: u64 = 1;
/// The cookie of `..`. Other names have larger cookies than `.` and `..`.
pub const PARENT: u64 = 2;

impl Listing {
    pub(super) fn new(entries: Vec<Numbered>) -> Self {
        let named = entries.into_iter().map(|(fileid, name)| Name {
            cookie: cookie(&name),
            fileid,
            name,
        });
        let mut names: Vec<_> = named.collect();
        names.sort_unstable_by(|a, b| (a.cookie, &a.name).cmp(&(b.cookie, &b.name)));
        for at in 1..names.len() {
            names[at].cookie = names[at].cookie.max(names[at - 1].cookie + 1);
        }
        Self(names)
    }

    /// The entries after `cookie`.
    pub fn after(&self, cookie: u64) -> &[Name] {
        &self.0[self.0.partition_point(|name| name.cookie <= cookie)..]
    }
}

/// The cookie of a name: FNV-1a, with its bits mixed once more, in 62 bits and above [`PARENT`].
/// The function must not change, because clients keep cookies across restarts of the server.
fn cookie(name: &[u8]) -> u64 {
    let hash = name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed ^ (mixed >> 29)) >> 2) + PARENT + 1
}

/// The most recently listed directories. They are kept, because a client lists a large directory in
/// many parts.
#[derive(Debug, Default)]
pub struct Listings(Mutex<VecDeque<(Handle, u64, Arc<Listing>)>>);

impl Listings {
    const KEPT: usize = 16;

    /// The entries of a directory, from the kept listings if the directory has not changed.
    ///
    /// # Errors
    /// An error of the tree.
    pub fn of(&self, tree: &dyn Tree, dir: &Handle) -> Outcome<Arc<Listing>> {
        let kept = || self.0.lock();
        if let Some(version) = tree.version(dir)
            && let Some((_, _, listing)) = kept().iter().find(|(of, at, _)| of == dir && *at == version)
        {
            return Ok(listing.clone());
        }
        let (entries, version) = tree.list(dir)?;
        let listing = Arc::new(Listing::new(entries));
        if let Some(version) = version {
            let mut kept = kept();
            kept.retain(|(of, ..)| of != dir);
            kept.truncate(Self::KEPT - 1);
            kept.push_front((*dir, version, listing.clone()));
        }
        Ok(listing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_depend_on_the_name_only() {
        let all: Vec<Numbered> = (0..50_000)
            .map(|n| (n, format!("file-{n}").into_bytes().into()))
            .collect();
        let half = all.iter().filter(|(n, _)| n % 2 == 0).cloned().collect();
        let (all, half) = (Listing::new(all), Listing::new(half));
        assert!(all.0.windows(2).all(|pair| pair[0].cookie < pair[1].cookie));
        let known = |name: &Name| all.after(name.cookie - 1).first() == Some(name);
        assert!(half.0.iter().all(known), "with any other names");
        assert_eq!(all.after(0).len(), 50_000);
        let middle = all.0[24_999].cookie;
        assert_eq!(all.after(middle)[0], all.0[25_000]);
        assert!(all.0[0].cookie > PARENT);
    }

    /// Clients keep cookies while a server of a later version starts.
    #[test]
    fn cookies_are_the_same_in_every_version() {
        assert_eq!(cookie(b"a"), 0x20ac_6766_1669_84cb);
    }
}
