//! Files by handle. Handles stay valid when the server restarts.
//!
//! A handle has the inode number of a file and its birth time, which differs from that of a later
//! file with the same number. The server remembers the place of a file when it returns the handle:
//! always for directories, because the paths of all files lead through them, and for the other
//! files that were used most recently. The server searches the whole tree for an unknown number,
//! after a restart or when another program moved the file. One search serves all calls; a call that
//! arrives meanwhile fails with `Jukebox`, and the client retries it.

use super::recent::{Descriptors, Recent};
use crate::nfs3::{Handle, Status};
use crate::tree::Outcome;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2, statx};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use urnic_sync::{Mutex, MutexGuard};

/// The inode number and the birth time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) number: u64,
    pub(super) birth_time: u64,
}

/// A file that is open with O_PATH, and its attributes.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) fd: Arc<OwnedFd>,
    pub(super) stat: Statx,
    pub(super) key: Key,
}

/// The last known place of a file.
#[derive(Clone, Debug)]
struct Place {
    dir: u64,
    name: Box<[u8]>,
}

#[derive(Debug)]
pub(super) struct Nodes {
    root: Arc<OwnedFd>,
    root_key: Key,
    pub(super) open: Descriptors<u64>,
    places: Mutex<Places>,
    /// Files that no longer exist.
    removed: Mutex<Recent<Key, ()>>,
    /// No search begins before this time.
    searched: Mutex<Instant>,
}

#[derive(Debug)]
struct Places {
    directories: HashMap<u64, Place>,
    others: Recent<u64, Place>,
}

impl Places {
    fn find(&mut self, number: u64) -> Option<Place> {
        let directory = self.directories.get(&number).cloned();
        directory.or_else(|| self.others.find(&number))
    }

    fn insert(&mut self, number: u64, directory: bool, place: Place) {
        if directory {
            self.directories.insert(number, place);
        } else {
            self.directories.remove(&number);
            self.others.insert(number, place);
        }
    }

    fn remove(&mut self, number: u64) {
        self.directories.remove(&number);
        self.others.remove(&number);
    }
}

/// Number of remembered places of files that are no directories.
pub(super) const PLACES: usize = 1 << 20;

/// Number of remembered files that no longer exist.
const REMOVED: usize = 1 << 12;

/// Maximum directories above a file.
const DEPTH: usize = 4096;

/// Searches may take one part of the time in this number.
const SEARCH_SHARE: u32 = 10;
/// Time that searches may take in advance, which is enough for small trees.
const SEARCH_ADVANCE: Duration = Duration::from_secs(1);

/// Time to wait for the search of another call.
const SEARCH_WAIT: Duration = Duration::from_millis(200);
/// Interval of the checks during a wait.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

const TAG: u8 = 1;
const PLACE_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Lookups cannot leave the tree by links, `..` or mounts.
pub(super) const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// A path to an open file, even if the file is a link or has no name.
pub(super) fn descriptor_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Attributes of the file of an O_PATH descriptor.
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
        let btime = (stat.stx_mask & StatxFlags::BTIME.bits() != 0).then_some(stat.stx_btime);
        let birth_time = btime.map_or(0, |at| {
            (at.tv_sec as u64).wrapping_mul(1 << 30) ^ u64::from(at.tv_nsec)
        });
        Self {
            number: stat.stx_ino,
            birth_time,
        }
    }
}

impl Nodes {
    /// The tree below `root`, with at most `limit` open descriptors and `places` remembered files.
    pub(super) fn new(root: OwnedFd, limit: usize, places: usize) -> Outcome<Self> {
        let root_key = Key::of(&stat(&root)?);
        Ok(Self {
            root: Arc::new(root),
            root_key,
            open: Descriptors::new(limit),
            places: Mutex::new(Places {
                directories: HashMap::new(),
                others: Recent::new(places),
            }),
            removed: Mutex::new(Recent::new(REMOVED)),
            searched: Mutex::new(Instant::now()),
        })
    }

    pub(super) const fn root(&self) -> Key {
        self.root_key
    }

    pub(super) fn handle(&self, key: Key) -> Handle {
        let mut bytes = [0; 25];
        bytes[0] = TAG;
        bytes[1..9].copy_from_slice(
            &(self.root_key.number ^ self.root_key.birth_time.rotate_left(17)).to_be_bytes(),
        );
        bytes[9..17].copy_from_slice(&key.number.to_be_bytes());
        bytes[17..].copy_from_slice(&key.birth_time.to_be_bytes());
        Handle::new(&bytes)
    }

    fn key(&self, handle: &Handle) -> Outcome<Key> {
        let bytes: &[u8; 25] = handle.bytes().try_into().map_err(|_| Status::BadHandle)?;
        let word = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .fold(0, |word, byte| word << 8 | u64::from(*byte))
        };
        let key = Key {
            number: word(9),
            birth_time: word(17),
        };
        // The handle is of another tree, or of this directory with another root.
        (self.handle(key) == *handle).then_some(key).ok_or(Status::Stale)
    }

    /// The file with this handle. Fails with `Jukebox` if the file may exist, but there was no
    /// search for it.
    pub(super) fn find(&self, handle: &Handle) -> Outcome<Node> {
        let key = self.key(handle)?;
        if let Ok(node) = self.reach(key) {
            return Ok(node);
        }
        if self.removed.lock().find(&key).is_some() {
            return Err(Status::Stale);
        }
        let mut searched = self.turn_to_search()?;
        // The search of another call may have found the file.
        if let Ok(node) = self.reach(key) {
            return Ok(node);
        }
        let begun = Instant::now();
        if *searched > begun + SEARCH_ADVANCE {
            return Err(Status::Jukebox);
        }
        self.search(key.number)?;
        let found = self.reach(key);
        if found.is_err() {
            self.removed.lock().insert(key, ());
        }
        *searched = begun.max(*searched) + SEARCH_SHARE * begun.elapsed();
        found.map_err(|_| Status::Stale)
    }

    /// Waits for the turn to search. Threads are few and a search may take long, so most calls fail
    /// with `Jukebox` and their clients retry them.
    fn turn_to_search(&self) -> Outcome<MutexGuard<'_, Instant>> {
        let mut left = SEARCH_WAIT;
        loop {
            if let Some(turn) = self.searched.try_lock() {
                return Ok(turn);
            }
            left = left.checked_sub(RETRY_INTERVAL).ok_or(Status::Jukebox)?;
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// The file at its last known place.
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
            if let Some(fd) = self.open.find(&at) {
                break fd;
            }
            let place = self.places.lock().find(at).ok_or(Status::Stale)?;
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
                self.places.lock().remove(number);
                return Err(Status::Stale);
            }
            fd = Arc::new(below);
            self.open.insert(number, fd.clone());
        }
        Ok(fd)
    }

    /// The file with this name in a directory, with the permissions of the thread. Its place is
    /// remembered.
    pub(super) fn enter(&self, dir: &Node, name: &[u8]) -> Outcome<Node> {
        let fd = openat2(&dir.fd, name, PLACE_ONLY, Mode::empty(), BENEATH)?;
        self.entered(fd, dir, name)
    }

    /// A new file by its descriptor, because the name may already belong to another file.
    pub(super) fn adopt(&self, file: &OwnedFd, dir: &Node, name: &[u8]) -> Outcome<Node> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let fd = rustix::fs::open(descriptor_path(file), flags, Mode::empty())?;
        self.entered(fd, dir, name)
    }

    fn entered(&self, fd: OwnedFd, dir: &Node, name: &[u8]) -> Outcome<Node> {
        let stat = stat(&fd)?;
        let key = Key::of(&stat);
        let fd = Arc::new(fd);
        self.remember(&stat, dir.key.number, name);
        self.open.insert(key.number, fd.clone());
        Ok(Node { fd, stat, key })
    }

    /// Remembers a place of a file.
    pub(super) fn remember(&self, file: &Statx, dir: u64, name: &[u8]) {
        let directory = FileType::from_raw_mode(file.stx_mode.into()) == FileType::Directory;
        let name = name.into();
        self.places
            .lock()
            .insert(file.stx_ino, directory, Place { dir, name });
    }

    /// Forgets the place of a file that may be elsewhere.
    pub(super) fn forget_place(&self, number: u64) {
        self.places.lock().remove(number);
    }

    /// Remembers that a file no longer exists.
    pub(super) fn end(&self, key: Key) {
        self.forget(key.number);
        self.removed.lock().insert(key, ());
    }

    /// Forgets a file that is not at its place.
    pub(super) fn forget(&self, number: u64) {
        self.forget_place(number);
        self.open.remove(&number);
    }

    /// The parent of a directory.
    pub(super) fn parent(&self, dir: Key) -> Outcome<Node> {
        let above = match self.places.lock().find(dir.number) {
            _ if dir == self.root_key => self.root_key.number,
            Some(place) => place.dir,
            None => return Err(Status::Stale),
        };
        let fd = self.open(above)?;
        let stat = stat(&fd)?;
        let key = Key::of(&stat);
        Ok(Node { fd, stat, key })
    }

    /// Searches the whole tree. Remembers all directories, the wanted file, and other files while
    /// there is room.
    fn search(&self, wanted: u64) -> Outcome<()> {
        let mut left = vec![self.root_key.number];
        while let Some(above) = left.pop() {
            let Ok(fd) = self.open(above) else { continue };
            let Ok(dir) = openat2(&fd, ".", LIST, Mode::empty(), BENEATH) else {
                continue;
            };
            for entry in Dir::new(dir)?.flatten() {
                let (number, name) = (entry.ino(), entry.file_name().to_bytes());
                if name == b"." || name == b".." {
                    continue;
                }
                let directory = match entry.file_type() {
                    // Some file systems do not have the kind in their directories.
                    FileType::Unknown => openat2(&fd, name, PLACE_ONLY, Mode::empty(), BENEATH)
                        .ok()
                        .and_then(|below| stat(below).ok())
                        .is_some_and(|stat| {
                            FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory
                        }),
                    kind => kind == FileType::Directory,
                };
                let mut places = self.places.lock();
                if directory || number == wanted || places.others.has_room() {
                    let name = name.into();
                    places.insert(number, directory, Place { dir: above, name });
                }
                // A mount may lead to the root again. The root must not be searched twice.
                if directory && number != self.root_key.number {
                    left.push(number);
                }
            }
        }
        Ok(())
    }
}

pub(super) const LIST: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests {
    use super::super::recent::AGE;
    use super::*;
    use std::fs;
    use std::path::Path;

    fn nodes(at: &Path, descriptors: usize, places: usize) -> Nodes {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(at, flags, Mode::empty()).expect("a directory");
        Nodes::new(root, descriptors, places).expect("a tree")
    }

    /// `one/two/0` to `one/two/N`: the handles of the directories, and of the files.
    fn tree(at: &Path, nodes: &Nodes, files: usize) -> (Vec<Handle>, Vec<Handle>) {
        fs::create_dir_all(at.join("one/two")).expect("directories");
        let root = nodes.find(&nodes.handle(nodes.root())).expect("the root");
        let one = nodes.enter(&root, b"one").expect("a directory");
        let two = nodes.enter(&one, b"two").expect("a directory");
        let files = (0..files).map(|n| {
            let name = n.to_string();
            fs::write(at.join("one/two").join(&name), "").expect("a file");
            nodes.handle(nodes.enter(&two, name.as_bytes()).expect("a file").key)
        });
        let files = files.collect();
        ([&one, &two].map(|dir| nodes.handle(dir.key)).to_vec(), files)
    }

    /// Finds a file as clients do: retries after `Jukebox`.
    fn find(nodes: &Nodes, handle: &Handle) -> Outcome<Node> {
        loop {
            match nodes.find(handle) {
                Err(Status::Jukebox) => std::thread::sleep(RETRY_INTERVAL),
                other => return other,
            }
        }
    }

    #[test]
    fn directories_stay_known_with_any_number_of_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let nodes = nodes(folder.path(), 2, 8);
        let (directories, files) = tree(folder.path(), &nodes, 100);
        // No search is allowed.
        *nodes.searched.lock() += Duration::from_secs(3600);
        for handle in directories.iter().chain(&files[97..]) {
            assert!(nodes.find(handle).is_ok());
        }
        assert_eq!(
            nodes.find(&files[0]).err(),
            Some(Status::Jukebox),
            "not known, but not removed"
        );
    }

    #[test]
    fn forgotten_files_are_found_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let nodes = nodes(folder.path(), 2, 8);
        let (_, files) = tree(folder.path(), &nodes, 100);
        for handle in &files {
            assert!(find(&nodes, handle).is_ok());
        }
    }

    #[test]
    fn calls_during_a_search_fail_with_jukebox() {
        let folder = tempfile::tempdir().expect("a folder");
        let nodes = nodes(folder.path(), 2, 8);
        let (_, files) = tree(folder.path(), &nodes, 1);
        nodes.forget(nodes.key(&files[0]).expect("a key").number);
        let turn = nodes.searched.lock();
        assert_eq!(nodes.find(&files[0]).err(), Some(Status::Jukebox));
        drop(turn);
        assert!(find(&nodes, &files[0]).is_ok());
    }

    #[test]
    fn nodes_moved_out_are_stale_when_descriptors_age() {
        let (folder, outside) = (
            tempfile::tempdir().expect("a folder"),
            tempfile::tempdir().expect("a folder"),
        );
        let nodes = nodes(folder.path(), 100, 8);
        let (directories, files) = tree(folder.path(), &nodes, 1);
        fs::rename(folder.path().join("one"), outside.path().join("one")).expect("it is moved");
        assert!(nodes.open.aging()(Instant::now() + AGE));
        for handle in directories.iter().chain(&files) {
            assert_eq!(find(&nodes, handle).err(), Some(Status::Stale));
        }
    }

    #[test]
    fn new_files_are_known_by_descriptor_not_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let nodes = nodes(folder.path(), 100, 8);
        let root = nodes.find(&nodes.handle(nodes.root())).expect("the root");
        let made = OwnedFd::from(fs::File::create(folder.path().join("made")).expect("a file"));
        fs::write(folder.path().join("other"), "other").expect("a file");
        fs::rename(folder.path().join("other"), folder.path().join("made")).expect("it is moved");
        let node = nodes.adopt(&made, &root, b"made").expect("a file");
        assert_eq!(node.stat.stx_size, 0);
        assert_ne!(node.key, nodes.enter(&root, b"made").expect("a file").key);
    }

    #[test]
    fn removed_files_are_stale_without_a_search() {
        let folder = tempfile::tempdir().expect("a folder");
        let nodes = nodes(folder.path(), 2, 8);
        let (_, files) = tree(folder.path(), &nodes, 1);
        *nodes.searched.lock() += Duration::from_secs(3600);
        fs::remove_file(folder.path().join("one/two/0")).expect("a file");
        nodes.end(nodes.key(&files[0]).expect("a key"));
        assert_eq!(nodes.find(&files[0]).err(), Some(Status::Stale));
    }
}
