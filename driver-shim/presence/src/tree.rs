//! The tree of real files that stands for `/sys/class/infiniband*` and `/dev/infiniband`.
//!
//! The tree is built once for each user, network namespace, set of addresses and configuration,
//! beside its final place, and then renamed: every reader sees the whole tree, and its content does
//! not change afterwards. libibverbs compares the modification time of the device's folder; that
//! time is derived from the content, so that a tree that was built again is the same device.
//!
//! Each process that uses a tree holds a shared lock on its folder. Trees that no process has
//! locked are removed if they were not built recently.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, flock, fstat, mkdir,
    open, openat, rename, stat, statat, symlink, unlinkat, utimensat,
};
use rustix::io::Errno;

use urnic_process::fds::InternalFd;

/// An unused tree younger than this is not removed: its user may run another short program soon.
const YOUNG: Duration = Duration::from_secs(60);

/// An entry of a tree, by its path from the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Item {
    /// A file with this content.
    File(String, Vec<u8>),
    /// A symbolic link to this target.
    Link(String, String),
    /// A folder, also if it is empty.
    Folder(String),
}

impl Item {
    pub(super) fn path(&self) -> &str {
        match self {
            Item::File(path, _) | Item::Link(path, _) | Item::Folder(path) => path,
        }
    }
}

/// The content of a tree to be built.
#[derive(Debug)]
pub(super) struct Plan {
    /// The folder's name: a digest of all that the tree depends on, in 16 hexadecimal digits.
    pub(super) name: String,
    /// The entries. The folders that lead to an entry need no entry of their own.
    pub(super) items: Vec<Item>,
    /// The folders whose modification times libibverbs compares.
    pub(super) dated: Vec<String>,
    /// That time, in seconds.
    pub(super) time: i64,
}

/// A tree in use. Dropping the value releases the lock.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) root: PathBuf,
    _lock: InternalFd,
}

/// Finds or builds the planned tree in the first of `homes` in which that succeeds.
///
/// # Errors
/// The error of the last home: `EACCES`, `EROFS`, `ENOSPC`, …; `EPERM` for a folder with our name
/// that another user made.
pub(super) fn provide(plan: &Plan, homes: &[PathBuf]) -> Result<Tree, Errno> {
    let uid = rustix::process::geteuid().as_raw();
    let mut last = Errno::NOENT;
    for home in homes {
        let ours = home.join(format!("urnic-{uid}"));
        match own_folder(&ours, uid).and_then(|()| provide_in(plan, &ours)) {
            Ok(tree) => {
                reap(&ours, &plan.name);
                return Ok(tree);
            }
            Err(errno) => {
                tracing::debug!("no presence tree in {}: {errno}", ours.display());
                last = errno;
            }
        }
    }
    Err(last)
}

/// Makes our folder, or verifies that this user owns it: others can write to `/tmp`.
fn own_folder(path: &Path, uid: u32) -> Result<(), Errno> {
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    let stat = fstat(folder(CWD, path)?)?;
    let private = Mode::from_raw_mode(stat.st_mode) & (Mode::RWXG | Mode::RWXO) == Mode::empty();
    if stat.st_uid == uid && private {
        Ok(())
    } else {
        Err(Errno::PERM)
    }
}

fn provide_in(plan: &Plan, ours: &Path) -> Result<Tree, Errno> {
    let root = ours.join(&plan.name);
    // Each round takes a tree or builds one; another round is needed only while a reaper is active.
    for _ in 0..16 {
        match take(&root) {
            Err(Errno::NOENT) => build(plan, ours, &root)?,
            Err(Errno::AGAIN) => std::thread::yield_now(),
            taken => return taken,
        }
    }
    Err(Errno::BUSY)
}

/// Takes a tree into use. `ENOENT`: the tree does not exist; `EAGAIN`: a reaper is removing it.
fn take(root: &Path) -> Result<Tree, Errno> {
    let fd = folder(CWD, root)?;
    flock(&fd, FlockOperation::NonBlockingLockShared)?;
    let (held, named) = (fstat(&fd)?, stat(root)?);
    if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino) {
        return Err(Errno::AGAIN);
    }
    Ok(Tree {
        root: root.to_owned(),
        _lock: InternalFd::kept(fd)?,
    })
}

fn build(plan: &Plan, ours: &Path, root: &Path) -> Result<(), Errno> {
    let site = ours.join(format!(
        ".{}-{}-{:x}",
        plan.name,
        rustix::process::getpid().as_raw_pid(),
        nonce()
    ));
    mkdir(&site, Mode::RWXU)?;
    let fd = folder(CWD, &site)?;
    // The lock keeps reapers from the unfinished tree.
    let built = flock(&fd, FlockOperation::NonBlockingLockShared)
        .and_then(|()| fill(plan, &site))
        .and_then(|()| rename(&site, root));
    match built {
        Ok(()) => Ok(()),
        Err(errno) => {
            remove(&fd, 0);
            let _ = unlinkat(CWD, &site, AtFlags::REMOVEDIR);
            // Another process finished the same tree first.
            if matches!(errno, Errno::EXIST | Errno::NOTEMPTY) {
                Ok(())
            } else {
                Err(errno)
            }
        }
    }
}

fn fill(plan: &Plan, site: &Path) -> Result<(), Errno> {
    let readable = Mode::RUSR | Mode::RGRP | Mode::ROTH;
    for item in &plan.items {
        let path = site.join(item.path());
        folders(site, item)?;
        match item {
            Item::Folder(_) => {}
            Item::Link(_, target) => symlink(target, &path)?,
            Item::File(_, content) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = open(&path, flags, readable)?;
                let mut rest = content.as_slice();
                while !rest.is_empty() {
                    let n = rustix::io::write(&file, rest)?;
                    rest = rest.get(n..).unwrap_or(&[]);
                }
            }
        }
    }
    let time = Timespec {
        tv_sec: plan.time,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    plan.dated
        .iter()
        .try_for_each(|dated| utimensat(CWD, site.join(dated), &times, AtFlags::empty()))
}

/// Makes the folders that lead to an item, and the item itself if it is a folder.
fn folders(site: &Path, item: &Item) -> Result<(), Errno> {
    let above = match item {
        Item::Folder(path) => Some(Path::new(path)),
        Item::File(path, _) | Item::Link(path, _) => Path::new(path).parent(),
    };
    let mut path = site.to_owned();
    for part in above.into_iter().flatten() {
        path.push(part);
        match mkdir(
            &path,
            Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH,
        ) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Removes unused and unfinished trees. Best effort.
fn reap(ours: &Path, except: &str) {
    reap_older_than(ours, except, YOUNG);
}

pub(super) fn reap_older_than(ours: &Path, except: &str, age: Duration) {
    let Ok(home) = folder(CWD, ours) else { return };
    for name in names(&home) {
        if name == except {
            continue;
        }
        let Ok(tree) = folder(&home, Path::new(&name)) else {
            continue;
        };
        let young = fstat(&tree).is_ok_and(|stat| {
            let built = SystemTime::UNIX_EPOCH + Duration::from_secs(stat.st_ctime.unsigned_abs());
            built.elapsed().is_ok_and(|elapsed| elapsed < age)
        });
        if young || flock(&tree, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        // From here on no process can take the tree: take() fails with EAGAIN or ENOENT.
        remove(&tree, 0);
        let _ = unlinkat(&home, &name, AtFlags::REMOVEDIR);
    }
}

/// Removes the content of a folder; does not follow links.
fn remove(folder_fd: &OwnedFd, depth: u32) {
    for name in names(folder_fd) {
        let Ok(stat) = statat(folder_fd, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            if let Ok(inner) = folder(folder_fd, Path::new(&name))
                && depth < 16
            {
                remove(&inner, depth + 1);
            }
            let _ = unlinkat(folder_fd, &name, AtFlags::REMOVEDIR);
        } else {
            let _ = unlinkat(folder_fd, &name, AtFlags::empty());
        }
    }
}

/// The names in a folder, unsorted; empty if the folder cannot be read.
pub(super) fn names(folder: impl AsFd) -> Vec<String> {
    let Ok(entries) = Dir::read_from(folder) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| String::from_utf8(entry.ok()?.file_name().to_bytes().to_vec()).ok())
        .filter(|name| name != "." && name != "..")
        .collect()
}

/// Opens a folder; fails for any other file, also for a link to a folder.
pub(super) fn folder(at: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, path, flags, Mode::empty())
}

/// A number that distinguishes two builders in one process.
fn nonce() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
