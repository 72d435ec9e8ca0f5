//! The tree of real files that stands for `/sys/class/infiniband*` and `/dev/infiniband`.
//!
//! The tree is built once for each user, network namespace, set of addresses and configuration,
//! next to its final place, and then renamed: every reader sees the whole tree, and its content
//! does not change afterwards. libibverbs compares the modification time of the device's folder;
//! that time is derived from the content, so that a tree that was built again is the same device.
//!
//! Each process that uses a tree holds a shared lock on its folder. Trees that no process has
//! locked are removed if they were not built recently: renamed, then emptied. No process waits for
//! a lock. Other users cannot take a lock, because they cannot enter the folder (`own_folder.rs`).

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Timespec, Timestamps, flock, fstat, mkdir, open,
    openat, rename, renameat, stat, statat, symlink, unlinkat, utimensat,
};
use rustix::io::Errno;

use urnic_process::fds::InternalFd;
use urnic_process::file_length;

use super::own_folder::{self, OwnFolder, Refusal, names};

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

/// Why no home has a tree.
#[derive(Debug)]
pub(super) struct NoTree {
    /// The error of the last home: `EACCES`, `EROFS`, `ENOSPC`, …; `EPERM` if another user could
    /// change the tree.
    pub(super) errno: Errno,
    /// The homes, each with the reason.
    pub(super) reasons: String,
}

/// Finds or builds the planned tree in the first of `homes` in which that succeeds.
///
/// # Errors
/// The reasons, if there is no such home.
pub(super) fn provide(plan: &Plan, homes: &[PathBuf]) -> Result<Tree, NoTree> {
    let mut errno = Errno::NOENT;
    let mut reasons = Vec::new();
    for home in homes {
        let provided = OwnFolder::provide(home).and_then(|ours| {
            if let Some(taken) = ours.taken() {
                let usual = home.join(own_folder::usual_name());
                tracing::debug!("{}: {taken}: using {}", usual.display(), ours.path().display());
            }
            let tree = provide_in(plan, ours.path()).map_err(Refusal::Failed)?;
            reap(ours.as_fd(), &plan.name);
            Ok(tree)
        });
        match provided {
            Ok(tree) => return Ok(tree),
            Err(refusal) => {
                errno = refusal.errno();
                reasons.push(format!("{}: {refusal}", home.display()));
            }
        }
    }
    Err(NoTree {
        errno,
        reasons: reasons.join("; "),
    })
}

/// Takes the planned tree, or builds it. Never waits: if another process has the tree locked, to
/// remove it, this process uses the tree that it has built under another name.
fn provide_in(plan: &Plan, ours: &Path) -> Result<Tree, Errno> {
    let root = ours.join(&plan.name);
    match take(&root) {
        Err(Errno::NOENT | Errno::AGAIN) => {}
        taken => return taken,
    }
    let built = build(plan, ours)?;
    match rename(&built.root, &root) {
        Ok(()) => Ok(Tree { root, ..built }),
        Err(Errno::EXIST | Errno::NOTEMPTY) => match take(&root) {
            // Another process finished the same tree first.
            Ok(tree) => {
                discard(&built);
                Ok(tree)
            }
            Err(_) => Ok(built),
        },
        Err(errno) => {
            discard(&built);
            Err(errno)
        }
    }
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

/// Builds a tree under a name of this process.
fn build(plan: &Plan, ours: &Path) -> Result<Tree, Errno> {
    let site = ours.join(private_name(&plan.name));
    mkdir(&site, Mode::RWXU)?;
    // The lock keeps reapers from the unfinished tree.
    let locked = folder(CWD, &site).and_then(|fd| {
        flock(&fd, FlockOperation::NonBlockingLockShared)?;
        InternalFd::kept(fd)
    });
    let lock = locked.inspect_err(|_| {
        let _ = unlinkat(CWD, &site, AtFlags::REMOVEDIR);
    })?;
    let tree = Tree {
        root: site,
        _lock: lock,
    };
    match fill(plan, &tree.root) {
        Ok(()) => Ok(tree),
        Err(errno) => {
            discard(&tree);
            Err(errno)
        }
    }
}

/// A name that no other tree has, finished or not.
fn private_name(name: &str) -> String {
    format!(".{name}-{}-{:x}", rustix::process::getpid().as_raw_pid(), nonce())
}

fn fill(plan: &Plan, site: &Path) -> Result<(), Errno> {
    let lengths = plan.items.iter().map(|item| match item {
        Item::File(_, content) => content.len(),
        Item::Link(..) | Item::Folder(_) => 0,
    });
    file_length::permits(lengths.max().unwrap_or(0) as u64)?;
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
fn reap(ours: BorrowedFd<'_>, except: &str) {
    reap_older_than(ours, except, YOUNG);
}

pub(super) fn reap_older_than(ours: BorrowedFd<'_>, except: &str, age: Duration) {
    for name in names(ours) {
        if name == except {
            continue;
        }
        let Ok(tree) = folder(ours, Path::new(&name)) else {
            continue;
        };
        let young = fstat(&tree).is_ok_and(|stat| {
            let built = SystemTime::UNIX_EPOCH + Duration::from_secs(stat.st_ctime.unsigned_abs());
            // A time in the future: the clock was set back.
            built.elapsed().map_or(true, |elapsed| elapsed < age)
        });
        if young || flock(&tree, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        // The removal takes longer than the renaming, after which a process builds a new tree.
        let doomed = private_name(&name);
        if is_named(&tree, ours, &name) && renameat(ours, &name, ours, &doomed).is_ok() {
            remove(&tree, 0);
            let _ = unlinkat(ours, &doomed, AtFlags::REMOVEDIR);
        }
    }
}

/// Whether the tree still has this name. While its lock is held, no other process renames it.
fn is_named(tree: &OwnedFd, ours: BorrowedFd<'_>, name: &str) -> bool {
    let named = statat(ours, name, AtFlags::SYMLINK_NOFOLLOW);
    let held = fstat(tree);
    matches!((held, named), (Ok(held), Ok(named)) if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino))
}

/// Removes a tree that only this process uses.
fn discard(tree: &Tree) {
    if let Ok(fd) = folder(CWD, &tree.root) {
        remove(&fd, 0);
    }
    let _ = unlinkat(CWD, &tree.root, AtFlags::REMOVEDIR);
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
