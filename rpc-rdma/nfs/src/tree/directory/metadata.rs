//! Conversion of attributes, times and errors of Linux to those of NFS.

use super::nodes::{Node, descriptor_path};
use crate::nfs3::{Attributes, Device, Kind, SetTime, Status, Time, Verifier};
use rustix::fs::{self, FileType, Statx, Timespec};
use rustix::io::Errno;

impl From<Errno> for Status {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PERM => Self::Perm,
            Errno::NOENT => Self::NoEnt,
            Errno::NXIO => Self::NxIo,
            // EXDEV is a mount, which the server does not enter.
            Errno::ACCESS | Errno::XDEV => Self::Access,
            Errno::EXIST => Self::Exist,
            Errno::NODEV => Self::NoDev,
            Errno::NOTDIR => Self::NotDir,
            Errno::ISDIR => Self::IsDir,
            Errno::INVAL | Errno::LOOP => Self::Invalid,
            Errno::FBIG | Errno::OVERFLOW => Self::FileTooBig,
            // TOOBIG: the file system has no room for the list.
            Errno::NOSPC | Errno::TOOBIG => Self::NoSpace,
            Errno::ROFS => Self::ReadOnly,
            Errno::MLINK => Self::TooManyLinks,
            Errno::NAMETOOLONG => Self::NameTooLong,
            Errno::NOTEMPTY => Self::NotEmpty,
            Errno::DQUOT => Self::Quota,
            Errno::STALE => Self::Stale,
            Errno::OPNOTSUPP | Errno::NOSYS => Self::NotSupported,
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN => Self::Jukebox,
            _ => Self::Io,
        }
    }
}

/// Attributes of a file of file system `fsid`.
pub(super) fn attributes(stat: &Statx, fsid: u64) -> Attributes {
    let time = |at: fs::StatxTimestamp| Time {
        seconds: at.tv_sec as u32,
        nanos: at.tv_nsec,
    };
    let device = Device {
        major: stat.stx_rdev_major,
        minor: stat.stx_rdev_minor,
    };
    Attributes {
        kind: kind(stat),
        mode: u32::from(stat.stx_mode) & 0o7777,
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        size: stat.stx_size,
        used: stat.stx_blocks * 512,
        device,
        fsid,
        fileid: stat.stx_ino,
        atime: time(stat.stx_atime),
        mtime: time(stat.stx_mtime),
        ctime: time(stat.stx_ctime),
    }
}

pub(super) fn path(node: &Node) -> String {
    descriptor_path(&node.fd)
}

pub(super) fn kind(stat: &Statx) -> Kind {
    match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::BlockDevice => Kind::Block,
        FileType::CharacterDevice => Kind::Character,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        _ => Kind::File,
    }
}

pub(super) fn timespec(time: SetTime) -> Timespec {
    let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    match time {
        SetTime::Keep => special(fs::UTIME_OMIT),
        SetTime::Now => special(fs::UTIME_NOW),
        SetTime::To(time) => Timespec {
            tv_sec: time.seconds as i64,
            tv_nsec: time.nanos as _,
        },
    }
}

/// The two times in which the verifier of CREATE is stored. They are small numbers, which any file
/// system stores exactly.
pub(super) fn times_of(verifier: Verifier) -> (Time, Time) {
    let words = u64::from_be_bytes(verifier);
    let time = |word: u64| Time {
        seconds: word as u32 & 0x7fff_ffff,
        nanos: 0,
    };
    (time(words >> 32), time(words))
}
