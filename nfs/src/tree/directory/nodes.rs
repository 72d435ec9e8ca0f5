//! From handles to files, also over a restart of the server.
//!
//! A handle has a file's number and the time of its birth, which tells it from a later file with the same number. Where a file is, is remembered
//! when its handle is given away. A number that is not known, after a restart or because somebody else moved the file, is looked for in the whole
//! tree, once for all that are asked for.

use super::recent::Recent;
use crate::nfs3::{Handle, Status};
use crate::tree::Outcome;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2, statx};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A file's number and birth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) number: u64,
    pub(super) birth: u64,
}

/// An open file, for its place alone (O_PATH), and what it is.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) stat: Statx,
    pub(super) key: Key,
}

/// Where a file was last.
#[derive(Clone, Debug)]
struct Place {
    dir: u64,
    name: Box<[u8]>,
}

#[derive(Debug)]
pub(super) struct Nodes {
    root: Arc<OwnedFd>,
    root_key: Key,
    open: Mutex<Recent<u64, Arc<OwnedFd>>>,
    places: Mutex<HashMap<u64, Place>>,
    /// When the tree was last searched, and how long that took.
    searched: Mutex<Option<(Instant, Duration)>>,
}

/// Places remembered. More, and they are forgotten, to be searched again.
const PLACES: usize = 1 << 20;

/// Directories above a file, at most.
const DEPTH: usize = 4096;

/// Time between searches for handles of no file: that of a search, ten times, and at least this.
const PAUSE: Duration = Duration::from_secs(1);

const TAG: u8 = 1;
const PLACE_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Nothing leads out of the tree: no link, no `..`, no mount.
pub(super) const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What an O_PATH descriptor is of.
pub(super) fn stat(fd: impl AsFd) -> Outcome<Statx> {
    Ok(statx(
        fd,
        "",
        AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW,
        WANTED,
    )?)
}

pub(super) const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

impl Key {
    pub(super) fn of(stat: &Statx) -> Self {
        let born = (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(stat.stx_btime);
        let birth = born.map_or(0, |at| {
            (at.tv_sec as u64).wrapping_mul(1 << 30) ^ u64::from(at.tv_nsec)
        });
        Self {
            number: stat.stx_ino,
            birth,
        }
    }
}

impl Nodes {
    /// The tree below `root`; `limit` descriptors may be held open.
    pub(super) fn new(root: OwnedFd, limit: usize) -> Outcome<Self> {
        let root_key = Key::of(&stat(&root)?);
        Ok(Self {
            root: Arc::new(root),
            root_key,
            open: Mutex::new(Recent::new(limit)),
            places: Mutex::default(),
            searched: Mutex::default(),
        })
    }

    pub(super) const fn root(&self) -> Key {
        self.root_key
    }

    pub(super) fn handle(&self, key: Key) -> Handle {
        let mut octets = [0; 25];
        octets[0] = TAG;
        octets[1..9]
            .copy_from_slice(&(self.root_key.number ^ self.root_key.birth.rotate_left(17)).to_be_bytes());
        octets[9..17].copy_from_slice(&key.number.to_be_bytes());
        octets[17..].copy_from_slice(&key.birth.to_be_bytes());
        Handle::new(&octets)
    }

    fn key(&self, handle: &Handle) -> Outcome<Key> {
        let octets: &[u8; 25] = handle.octets().try_into().map_err(|_| Status::BadHandle)?;
        let word = |at: usize| {
            octets[at..at + 8]
                .iter()
                .fold(0, |word, octet| word << 8 | u64::from(*octet))
        };
        let key = Key {
            number: word(9),
            birth: word(17),
        };
        // Another tree's, or one of ours with another root.
        (self.handle(key) == *handle).then_some(key).ok_or(Status::Stale)
    }

    /// The file with this handle.
    pub(super) fn find(&self, handle: &Handle) -> Outcome<Node> {
        let key = self.key(handle)?;
        if let Ok(node) = self.reach(key) {
            return Ok(node);
        }
        self.search()?;
        self.reach(key).map_err(|_| Status::Stale)
    }

    /// The file, if it is where it was.
    fn reach(&self, key: Key) -> Outcome<Node> {
        let fd = self.open(key.number)?;
        let stat = stat(&fd)?;
        if Key::of(&stat) != key || stat.stx_nlink == 0 {
            self.forget(key.number);
            return Err(Status::Stale);
        }
        Ok(Node { fd, stat, key })
    }

    fn open(&self, number: u64) -> Outcome<Arc<OwnedFd>> {
        let mut down = Vec::new();
        let mut at = number;
        let mut fd = loop {
            if at == self.root_key.number {
                break self.root.clone();
            }
            if let Some(fd) = lock(&self.open).find(&at) {
                break fd;
            }
            let place = lock(&self.places).get(&at).cloned().ok_or(Status::Stale)?;
            let dir = place.dir;
            down.push((at, place.name));
            if down.len() > DEPTH {
                return Err(Status::Stale);
            }
            at = dir;
        };
        while let Some((number, name)) = down.pop() {
            let below = openat2(&fd, &*name, PLACE_ONLY, Mode::empty(), BENEATH)?;
            if stat(&below)?.stx_ino != number {
                lock(&self.places).remove(&number);
                return Err(Status::Stale);
            }
            fd = Arc::new(below);
            lock(&self.open).insert(number, fd.clone());
        }
        Ok(fd)
    }

    /// The file with this name in a directory, remembered. The thread's rights count.
    pub(super) fn enter(&self, dir: &Node, name: &[u8]) -> Outcome<Node> {
        let fd = openat2(&dir.fd, name, PLACE_ONLY, Mode::empty(), BENEATH)?;
        let stat = stat(&fd)?;
        let key = Key::of(&stat);
        let fd = Arc::new(fd);
        self.remember(key.number, dir.key.number, name);
        lock(&self.open).insert(key.number, fd.clone());
        Ok(Node { fd, stat, key })
    }

    /// A file has, perhaps among others, this place.
    pub(super) fn remember(&self, number: u64, dir: u64, name: &[u8]) {
        let mut places = lock(&self.places);
        if places.len() >= PLACES {
            places.clear();
        }
        let name = name.into();
        places.insert(number, Place { dir, name });
    }

    /// A file is not where it was, but perhaps elsewhere.
    pub(super) fn forget_place(&self, number: u64) {
        lock(&self.places).remove(&number);
    }

    /// A file is not where it was.
    pub(super) fn forget(&self, number: u64) {
        self.forget_place(number);
        lock(&self.open).forget(|known| *known == number);
    }

    /// The directory above.
    pub(super) fn parent(&self, dir: Key) -> Outcome<Node> {
        let above = match lock(&self.places).get(&dir.number) {
            _ if dir == self.root_key => self.root_key.number,
            Some(place) => place.dir,
            None => return Err(Status::Stale),
        };
        let fd = self.open(above)?;
        let stat = stat(&fd)?;
        let key = Key::of(&stat);
        Ok(Node { fd, stat, key })
    }

    /// Goes through the whole tree.
    fn search(&self) -> Outcome<()> {
        let mut searched = lock(&self.searched);
        if let Some((at, took)) = *searched
            && at.elapsed() < PAUSE.max(10 * took)
        {
            return Ok(());
        }
        let begun = Instant::now();
        let mut left = vec![self.root_key.number];
        while let Some(number) = left.pop() {
            let Ok(fd) = self.open(number) else { continue };
            let Ok(dir) = openat2(&fd, ".", LIST, Mode::empty(), BENEATH) else {
                continue;
            };
            for entry in Dir::new(dir)?.flatten() {
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                self.remember(entry.ino(), number, name);
                // The root may be met again where a mount leads to it, and must not be gone through twice.
                if entry.file_type() == FileType::Directory && entry.ino() != self.root_key.number {
                    left.push(entry.ino());
                }
            }
        }
        *searched = Some((Instant::now(), begun.elapsed()));
        Ok(())
    }
}

pub(super) const LIST: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
