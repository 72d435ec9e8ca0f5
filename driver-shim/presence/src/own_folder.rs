//! The folder of this user in a home that users share, such as `/tmp`.
//!
//! It is called `urnic-UID`. Any user can take that name first. So a folder is used only if it
//! belongs to this user, no other user may enter it, and it is on the home's file system, not on
//! one that a user mounted there. If the name is taken, the folder is called `urnic-UID-RANDOM`;
//! this user's other processes find it among the names of the home.
//!
//! In a private folder the other users cannot open, lock, or connect to anything.

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags, makedev, mkdirat, openat, statat, statx,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

/// The user to whom files seem to belong in a user namespace that does not have their owner, root
/// included.
const UNMAPPED: u32 = 65534;
const ROOT: u32 = 0;

/// Why a folder is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It cannot be made or opened.
    Failed(Errno),
    /// The folder belongs to the user with this number.
    OfUser(u32),
    /// Other users may enter it, by these permissions.
    Open(u32),
    /// Other users may rename files in it, by these permissions.
    Shared(u32),
    /// It is a file or a symbolic link.
    NoFolder,
    /// Another file system is mounted on it.
    Mounted,
}

impl Refusal {
    /// The errno for a program that finds no other folder.
    pub(super) fn errno(self) -> Errno {
        match self {
            Refusal::Failed(errno) => errno,
            _ => Errno::PERM,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Failed(errno) => errno.fmt(f),
            Refusal::OfUser(uid) => write!(f, "it belongs to user {uid}"),
            Refusal::Open(mode) => write!(f, "other users may enter it (mode {mode:o})"),
            Refusal::Shared(mode) => {
                write!(
                    f,
                    "other users may rename the files in it (mode {mode:o}, without the sticky bit)"
                )
            }
            Refusal::NoFolder => f.write_str("it is no folder"),
            Refusal::Mounted => f.write_str("a file system is mounted on it"),
        }
    }
}

/// A folder that only this user can use.
#[derive(Debug)]
pub struct OwnFolder {
    path: PathBuf,
    opened: OwnedFd,
    taken: Option<Refusal>,
}

impl OwnFolder {
    /// The folder of this user in `home`, which is made if it does not exist.
    ///
    /// # Errors
    /// The reason why there is none: the home is not safe, or a folder cannot be made.
    pub fn provide(home: &Path) -> Result<OwnFolder, Refusal> {
        let at = opened_home(home)?;
        match made(at.as_fd(), &usual_name()) {
            Ok(opened) => Ok(OwnFolder {
                path: home.join(usual_name()),
                opened,
                taken: None,
            }),
            Err(Refusal::Failed(errno)) => Err(Refusal::Failed(errno)),
            Err(taken) => Ok(OwnFolder {
                taken: Some(taken),
                ..other(home, at.as_fd())?
            }),
        }
    }

    /// The folders of this user in `home`. None of them has files of another user.
    pub fn all(home: &Path) -> Vec<OwnFolder> {
        let Ok(at) = opened_home(home) else {
            return Vec::new();
        };
        let others = other_names(at.as_fd()).unwrap_or_default();
        let opened = |name: String| {
            let opened = opened(at.as_fd(), &name).ok()?;
            Some(OwnFolder {
                path: home.join(name),
                opened,
                taken: None,
            })
        };
        std::iter::once(usual_name())
            .chain(others)
            .filter_map(opened)
            .collect()
    }

    /// The folder with this path, which [`OwnFolder::provide`] has returned.
    ///
    /// # Errors
    /// The folder does not belong to this user alone any more.
    pub fn open(path: &Path) -> Result<OwnFolder, Refusal> {
        let invalid = Refusal::Failed(Errno::INVAL);
        let home = path.parent().ok_or(invalid)?;
        let name = path.file_name().and_then(|name| name.to_str()).ok_or(invalid)?;
        let opened = opened(opened_home(home)?.as_fd(), name)?;
        Ok(OwnFolder {
            path: path.to_owned(),
            opened,
            taken: None,
        })
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The reason why the folder has a random name: the refusal of the folder with the usual name.
    pub fn taken(&self) -> Option<Refusal> {
        self.taken
    }

    /// The descriptor of the folder.
    pub fn into_fd(self) -> OwnedFd {
        self.opened
    }
}

impl AsFd for OwnFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.opened.as_fd()
    }
}

/// Checks that no other user can rename files in this home.
///
/// # Errors
/// [`Refusal`] names the user who can.
pub fn safe_home(home: &Path) -> Result<(), Refusal> {
    opened_home(home).map(drop)
}

/// The usual name of the folder, used unless it is taken.
pub fn usual_name() -> String {
    format!("urnic-{}", geteuid().as_raw())
}

/// The folder with a random name, where the usual name is taken.
fn other(home: &Path, at: BorrowedFd<'_>) -> Result<OwnFolder, Refusal> {
    let existing = |names: Vec<String>| {
        let mut folders = names.into_iter();
        folders.find_map(|name| Some((opened(at, &name).ok()?, name)))
    };
    // Without the list of names, each process would make a folder that no other process finds.
    let names = other_names(at).map_err(Refusal::Failed)?;
    let (opened, name) = match existing(names) {
        Some(found) => found,
        None => {
            let mut random = [0; 8];
            getrandom(&mut random, GetRandomFlags::empty()).map_err(Refusal::Failed)?;
            let name = format!("{}-{:016x}", usual_name(), u64::from_ne_bytes(random));
            made(at, &name)?;
            // Another process may have made one at the same time: both take the first.
            existing(other_names(at).map_err(Refusal::Failed)?).ok_or(Refusal::Failed(Errno::NOENT))?
        }
    };
    Ok(OwnFolder {
        path: home.join(name),
        opened,
        taken: None,
    })
}

/// The names in a home that a folder of this user may have where the usual one is taken, sorted.
fn other_names(at: BorrowedFd<'_>) -> Result<Vec<String>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let home = openat(at, ".", flags, Mode::empty())?;
    let prefix = usual_name() + "-";
    let is_random = |name: &String| {
        name.strip_prefix(&prefix)
            .is_some_and(|random| random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let mut names: Vec<String> = names(home).into_iter().filter(is_random).collect();
    names.sort_unstable();
    Ok(names)
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

/// Opens a home if no other user than root can rename what is in it.
fn opened_home(home: &Path) -> Result<OwnedFd, Refusal> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, home, flags, Mode::empty()).map_err(Refusal::Failed)?;
    let Attributes { uid, mode, .. } = attributes(opened.as_fd(), "").map_err(Refusal::Failed)?;
    let permissions = Mode::from_raw_mode(mode);
    let is_sticky = permissions.contains(Mode::SVTX);
    let is_own = uid == geteuid().as_raw();
    // With umask 002, files of a user are writable for the user's own group.
    let others = if is_own {
        Mode::WOTH
    } else {
        Mode::WGRP | Mode::WOTH
    };
    let may_rename = permissions.intersects(others) && !is_sticky;
    let is_trusted = is_own || uid == ROOT || (uid == UNMAPPED && is_sticky);
    match (is_trusted, may_rename) {
        (false, _) => Err(Refusal::OfUser(uid)),
        (true, true) => Err(Refusal::Shared(mode & 0o7777)),
        (true, false) => Ok(opened),
    }
}

/// Makes the folder, or opens it if it is this user's alone.
fn made(at: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Refusal> {
    match mkdirat(at, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => opened(at, name),
        Err(errno) => Err(Refusal::Failed(errno)),
    }
}

/// Opens a folder in a home if it is this user's alone.
fn opened(at: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Refusal> {
    let found = attributes(at, name).map_err(Refusal::Failed)?;
    if found.uid != geteuid().as_raw() {
        return Err(Refusal::OfUser(found.uid));
    }
    // Nothing is requested from a server of the file system until the checks have passed.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = openat(at, name, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOTDIR | Errno::LOOP => Refusal::NoFolder,
        errno => Refusal::Failed(errno),
    })?;
    let home = attributes(at, "").map_err(Refusal::Failed)?;
    let found = attributes(folder.as_fd(), "").map_err(Refusal::Failed)?;
    let others = Mode::RWXG | Mode::RWXO;
    match found {
        Attributes { device, .. } if device != home.device => Err(Refusal::Mounted),
        Attributes { uid, .. } if uid != geteuid().as_raw() => Err(Refusal::OfUser(uid)),
        Attributes { mode, .. } if Mode::from_raw_mode(mode).intersects(others) => {
            Err(Refusal::Open(mode & 0o7777))
        }
        Attributes { mode, .. } if FileType::from_raw_mode(mode) != FileType::Directory => {
            Err(Refusal::NoFolder)
        }
        _ => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(&folder, ".", flags, Mode::empty()).map_err(Refusal::Failed)
        }
    }
}

struct Attributes {
    uid: u32,
    mode: u32,
    device: u64,
}

/// The attributes of a file; `name` is empty for those of `at`. A symbolic link is not followed,
/// and no request goes to a server of the file system, which may be a program of another user.
fn attributes(at: BorrowedFd<'_>, name: &str) -> Result<Attributes, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    match statx(
        at,
        name,
        flags | AtFlags::STATX_DONT_SYNC,
        StatxFlags::BASIC_STATS,
    ) {
        Ok(stat) => Ok(Attributes {
            uid: stat.stx_uid,
            mode: stat.stx_mode.into(),
            device: makedev(stat.stx_dev_major, stat.stx_dev_minor),
        }),
        // An old kernel, or a sandbox that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => statat(at, name, flags).map(|stat| Attributes {
            uid: stat.st_uid,
            mode: stat.st_mode,
            device: stat.st_dev,
        }),
        Err(errno) => Err(errno),
    }
}
