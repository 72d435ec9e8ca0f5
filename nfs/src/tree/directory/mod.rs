//! A directory of this machine. Root acts with its callers' rights, others give their own to everybody. No name leads out of it.

mod acting;
mod lists;
mod nodes;
mod recent;

use super::{Acls, Caller, Data, File, Found, New, Numbered, Outcome, SetAcls, Tree, access_bits};
use crate::acl::Acl;
use crate::memory::Pool;
use crate::nfs3::{
    Attributes, CreateHow, Device, Handle, Kind, SetAttributes, SetTime, Stable, Statistics, Status, Time,
    Verifier,
};
use acting::{Acting, Actor};
use nodes::{BENEATH, Key, LIST, Node, Nodes, PLACES, itself, stat};
use recent::Descriptors;
use rustix::fd::OwnedFd;
use rustix::fs::{self, Access, AtFlags, CWD, FileType, Mode, OFlags, Statx, Timespec, Timestamps};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The tree.
#[derive(Debug)]
pub struct Directory {
    nodes: Nodes,
    actor: Actor,
    /// Open for reading or writing, by whom it was opened for.
    open: Descriptors<(Key, Caller, bool)>,
    fsid: u64,
    pool: Pool,
}

/// How old a directory's change must be for its time to tell it from the next one's: ticks of the kernel's clock are up to 10 ms.
const TICKS: Duration = Duration::from_millis(50);

impl From<Errno> for Status {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PERM => Self::Perm,
            Errno::NOENT => Self::NoEnt,
            Errno::NXIO => Self::NxIo,
            // EXDEV is a mount, into which nobody goes from here.
            Errno::ACCESS | Errno::XDEV => Self::Access,
            Errno::EXIST => Self::Exist,
            Errno::NODEV => Self::NoDev,
            Errno::NOTDIR => Self::NotDir,
            Errno::ISDIR => Self::IsDir,
            Errno::INVAL | Errno::LOOP => Self::Invalid,
            Errno::FBIG | Errno::OVERFLOW => Self::FileTooBig,
            // The latter of a list that the file system has no room for.
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

impl Directory {
    /// The tree below `root`. The process' umask is set to 0, as modes are the clients' to choose.
    ///
    /// # Errors
    /// It cannot be opened, or is no directory.
    pub fn new(root: &Path, pool: Pool) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = fs::open(root, flags, Mode::empty())?;
        rustix::process::umask(Mode::empty());
        // Descriptors: a half for places, a quarter for data, the rest for connections and what is open for a moment.
        let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        limit.current = limit
            .maximum
            .map_or(Some(1 << 16), |most| Some(most.min(1 << 16)));
        let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let limit = limit.map_or(1 << 16, |limit| limit.min(1 << 16)) as usize;
        let nodes = Nodes::new(root, limit / 2, PLACES).map_err(|_| Errno::IO)?;
        let Key { number, birth } = nodes.root();
        let open = Descriptors::new(limit / 4);
        let (places, data) = (nodes.open.aging(), open.aging());
        std::thread::Builder::new()
            .name("nfs-aging".to_owned())
            .spawn(move || {
                while places(Instant::now()) && data(Instant::now()) {
                    std::thread::sleep(Duration::from_secs(1));
                }
            })
            .map_err(|_| Errno::AGAIN)?;
        Ok(Self {
            fsid: number ^ birth.rotate_left(17),
            nodes,
            actor: Actor::new(),
            open,
            pool,
        })
    }

    fn act(&self, caller: &Caller) -> Outcome<Acting<'_>> {
        self.actor.act(caller)
    }

    fn described(&self, stat: &Statx) -> Attributes {
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
            fsid: self.fsid,
            fileid: stat.stx_ino,
            atime: time(stat.stx_atime),
            mtime: time(stat.stx_mtime),
            ctime: time(stat.stx_ctime),
        }
    }

    fn file(&self, node: &Node) -> File {
        (self.nodes.handle(node.key), self.described(&node.stat))
    }

    fn directory(&self, handle: &Handle) -> Outcome<Node> {
        let node = self.nodes.find(handle)?;
        (kind(&node.stat) == Kind::Directory)
            .then_some(node)
            .ok_or(Status::NotDir)
    }

    /// A regular file's bytes, to read or to write. Its owner may whatever its mode says: programs write what they made for reading only, and have
    /// opened before (RFC 1813 §4.4).
    fn data(&self, caller: &Caller, handle: &Handle, write: bool) -> Outcome<Arc<OwnedFd>> {
        let node = self.nodes.find(handle)?;
        match kind(&node.stat) {
            Kind::File => {}
            Kind::Directory => return Err(Status::IsDir),
            _ => return Err(Status::Invalid),
        }
        let key = (node.key, caller.clone(), write);
        if let Some(fd) = self.open.find(&key) {
            return Ok(fd);
        }
        let path = path(&node);
        let access = if write { OFlags::WRONLY } else { OFlags::RDONLY };
        let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let open = || fs::open(&*path, flags, Mode::empty());
        let acting = self.act(caller)?;
        let opened = open();
        let executes = || fs::accessat(CWD, &*path, Access::EXEC_OK, AtFlags::EACCESS).is_ok();
        let runs = matches!(opened, Err(Errno::ACCESS)) && !write && executes();
        drop(acting);
        let own = if self.actor.acts() {
            caller.uid
        } else {
            acting::own_uid().as_raw()
        };
        let fd = match opened {
            Err(Errno::ACCESS) if node.stat.stx_uid != own && !runs => return Err(Status::Access),
            Err(Errno::ACCESS) if self.actor.acts() => open()?,
            Err(Errno::ACCESS) => {
                let mode = Mode::from_raw_mode(u32::from(node.stat.stx_mode) & 0o7777);
                fs::chmodat(CWD, &*path, mode | Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
                let opened = open();
                fs::chmodat(CWD, &*path, mode, AtFlags::empty())?;
                opened?
            }
            other => other?,
        };
        let fd = Arc::new(fd);
        self.open.insert(key, fd.clone());
        Ok(fd)
    }

    /// Nobody has the file open any more for what they were once allowed, or for longer than it has a name.
    fn close(&self, key: Key) {
        self.open.forget(|(known, ..)| *known == key);
    }

    /// Sets attributes, with the thread's rights; the size by `truncate`.
    fn set(&self, node: &Node, what: &SetAttributes, resize: impl FnOnce(u64) -> Outcome<()>) -> Outcome<()> {
        let path = path(node);
        if let Some(size) = what.size {
            match kind(&node.stat) {
                Kind::File => resize(size)?,
                Kind::Directory => return Err(Status::IsDir),
                _ => return Err(Status::Invalid),
            }
        }
        if what.uid.is_some() || what.gid.is_some() {
            let uid = what.uid.map(rustix::process::Uid::from_raw);
            let gid = what.gid.map(rustix::process::Gid::from_raw);
            fs::chownat(
                &node.fd,
                "",
                uid,
                gid,
                AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW,
            )?;
        }
        // Behind the owner, which takes set-id bits away. Links have no mode.
        if let Some(mode) = what.mode
            && kind(&node.stat) != Kind::Symlink
        {
            fs::chmodat(CWD, &*path, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())?;
        }
        if what.atime != SetTime::Keep || what.mtime != SetTime::Keep {
            let times = Timestamps {
                last_access: timespec(what.atime),
                last_modification: timespec(what.mtime),
            };
            fs::utimensat(&node.fd, "", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// A file that was just made: given its attributes, but for those that making it gave.
    fn made(&self, caller: &Caller, mut node: Node, what: &SetAttributes) -> Outcome<Node> {
        let same_uid = |uid: &u32| *uid != node.stat.stx_uid;
        let same_gid = |gid: &u32| *gid != node.stat.stx_gid;
        let what = SetAttributes {
            size: what.size.filter(|&size| size != node.stat.stx_size),
            // What an ordinary server cannot give away stays its own: clients set their ids whenever they make something.
            uid: what.uid.filter(same_uid).filter(|_| self.actor.acts()),
            gid: what.gid.filter(same_gid).filter(|_| self.actor.acts()),
            // The kernel has given the permissions, less what a default list of the directory does not let.
            mode: (what.mode)
                .map(|mode| mode & 0o7000 | u32::from(node.stat.stx_mode) & 0o777)
                .filter(|mode| (mode ^ u32::from(node.stat.stx_mode)) & 0o7000 != 0),
            ..*what
        };
        if what != SetAttributes::default() {
            let _acting = self.act(caller)?;
            let truncate = |size| {
                Ok(rustix::fs::ftruncate(
                    fs::open(&*path(&node), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?,
                    size,
                )?)
            };
            self.set(&node, &what, truncate)?;
            node.stat = stat(&node.fd)?;
        }
        Ok(node)
    }

    /// A name of it is gone. With others left its handle must still find it, by the descriptor.
    fn lost_a_name(&self, node: &Node) {
        let has_names = stat(&node.fd).is_ok_and(|is| is.stx_nlink > 0);
        match kind(&node.stat) {
            _ if !has_names => self.nodes.end(node.key),
            Kind::Directory => self.nodes.forget(node.key.number),
            _ => return self.nodes.forget_place(node.key.number),
        }
        self.close(node.key);
    }

    fn sync(fd: &OwnedFd, stable: Stable) -> Result<(), Errno> {
        match stable {
            Stable::Unstable => Ok(()),
            Stable::DataSync => fs::fdatasync(fd),
            Stable::FileSync => fs::fsync(fd),
        }
    }
}

fn path(node: &Node) -> String {
    itself(&node.fd)
}

fn kind(stat: &Statx) -> Kind {
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

fn timespec(time: SetTime) -> Timespec {
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

/// Where CREATE's verifier is kept: in two times, as small numbers that any file system stores.
fn times_of(verifier: Verifier) -> (Time, Time) {
    let words = u64::from_be_bytes(verifier);
    let time = |word: u64| Time {
        seconds: word as u32 & 0x7fff_ffff,
        nanos: 0,
    };
    (time(words >> 32), time(words))
}

impl Tree for Directory {
    fn root(&self) -> Handle {
        self.nodes.handle(self.nodes.root())
    }

    fn attributes(&self, file: &Handle) -> Outcome<Attributes> {
        Ok(self.described(&self.nodes.find(file)?.stat))
    }

    fn set_attributes(
        &self,
        caller: &Caller,
        file: &Handle,
        what: &SetAttributes,
        guard: Option<Time>,
    ) -> Outcome<()> {
        let node = self.nodes.find(file)?;
        if guard.is_some_and(|guard| guard != self.described(&node.stat).ctime) {
            return Err(Status::NotSync);
        }
        let data = match what.size {
            Some(_) if kind(&node.stat) == Kind::File => Some(self.data(caller, file, true)?),
            _ => None,
        };
        let acting = self.act(caller)?;
        let set = self.set(&node, what, |size| {
            data.map_or(Ok(()), |fd| Ok(fs::ftruncate(&*fd, size)?))
        });
        drop(acting);
        if what.mode.is_some() || what.uid.is_some() || what.gid.is_some() {
            self.close(node.key);
        }
        set
    }

    fn acls(&self, file: &Handle) -> Outcome<Acls> {
        let node = self.nodes.find(file)?;
        let path = path(&node);
        let of_mode = || Acl::of_mode(node.stat.stx_mode.into());
        let default = match kind(&node.stat) {
            Kind::Directory => lists::of(&path, lists::DEFAULT)?,
            _ => None,
        };
        Ok(Acls {
            access: lists::of(&path, lists::ACCESS)?.unwrap_or_else(of_mode),
            default,
        })
    }

    fn set_acls(&self, caller: &Caller, file: &Handle, what: &SetAcls) -> Outcome<()> {
        let node = self.nodes.find(file)?;
        let path = path(&node);
        // Before anything is set.
        if what.default.iter().flatten().next().is_some() && kind(&node.stat) != Kind::Directory {
            return Err(Status::Access);
        }
        let acting = self.act(caller)?;
        let access = what.access.as_ref();
        let set = access.map_or(Ok(()), |list| lists::set(&path, lists::ACCESS, list.as_ref()));
        let default = what
            .default
            .as_ref()
            .filter(|_| kind(&node.stat) == Kind::Directory);
        let set = set
            .and_then(|()| default.map_or(Ok(()), |list| lists::set(&path, lists::DEFAULT, list.as_ref())));
        drop(acting);
        self.close(node.key);
        set
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File> {
        let dir = self.directory(dir)?;
        match name {
            b"." => Ok(self.file(&dir)),
            b".." => Ok(self.file(&self.nodes.parent(dir.key)?)),
            _ => {
                let _acting = self.act(caller)?;
                Ok(self.file(&self.nodes.enter(&dir, name)?))
            }
        }
    }

    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32> {
        let node = self.nodes.find(file)?;
        let path = path(&node);
        let _acting = self.act(caller)?;
        let may = |access| match fs::accessat(CWD, &*path, access, AtFlags::EACCESS) {
            Ok(()) => Ok(true),
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY) => Ok(false),
            Err(errno) => Err(Status::from(errno)),
        };
        let (read, write) = (may(Access::READ_OK)?, may(Access::WRITE_OK)?);
        let bits = access_bits(kind(&node.stat), read, write, may(Access::EXEC_OK)?);
        Ok(wanted & bits)
    }

    fn read_link(&self, file: &Handle) -> Outcome<Vec<u8>> {
        let node = self.nodes.find(file)?;
        if kind(&node.stat) != Kind::Symlink {
            return Err(Status::Invalid);
        }
        Ok(fs::readlinkat(&node.fd, "", Vec::new())?.into_bytes())
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, count: u32) -> Outcome<Found> {
        let fd = self.data(caller, file, false)?;
        let mut buffer = self.pool.take(count as usize).ok_or(Status::Jukebox)?;
        let mut filled = 0;
        let mut end = false;
        while filled < buffer.len() && !end {
            match rustix::io::pread(&*fd, &mut buffer[filled..], offset.saturating_add(filled as u64)) {
                Ok(0) => end = true,
                Ok(octets) => filled += octets,
                Err(Errno::INTR) => {}
                // Beyond what any file can have.
                Err(Errno::INVAL | Errno::OVERFLOW) if filled == 0 => end = true,
                Err(errno) => return Err(errno.into()),
            }
        }
        buffer.resize(filled);
        let eof = end || offset + filled as u64 >= stat(&*fd)?.stx_size;
        let pieces = if filled > 0 {
            vec![buffer.share()]
        } else {
            Vec::new()
        };
        Ok(Found { pieces, eof })
    }

    fn write(
        &self,
        caller: &Caller,
        file: &Handle,
        offset: u64,
        data: Data,
        stable: Stable,
    ) -> Outcome<(u32, Stable)> {
        let fd = self.data(caller, file, true)?;
        let octets = data.octets();
        if i64::try_from(offset.saturating_add(octets.len() as u64)).is_err() {
            return Err(Status::FileTooBig);
        }
        // With the caller's rights the kernel takes set-id bits away, and minds quotas.
        let acting = self.act(caller)?;
        let mut written = 0;
        while written < octets.len() {
            match rustix::io::pwrite(&*fd, &octets[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(more) => written += more,
                Err(Errno::INTR) => {}
                Err(errno) if written == 0 => return Err(errno.into()),
                Err(_) => break,
            }
        }
        drop(acting);
        Self::sync(&fd, stable)?;
        Ok((written as u32, stable))
    }

    fn commit(&self, caller: &Caller, file: &Handle) -> Outcome<()> {
        Ok(fs::fsync(&*self.data(caller, file, true)?)?)
    }

    fn create(&self, caller: &Caller, dir: &Handle, name: &[u8], how: &CreateHow) -> Outcome<File> {
        let dir = self.directory(dir)?;
        let what = match how {
            CreateHow::Unchecked(attributes) | CreateHow::Guarded(attributes) => *attributes,
            CreateHow::Exclusive(verifier) => {
                let (atime, mtime) = times_of(*verifier);
                SetAttributes {
                    atime: SetTime::To(atime),
                    mtime: SetTime::To(mtime),
                    ..SetAttributes::default()
                }
            }
        };
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(what.mode.unwrap_or(0o644) & 0o7777);
        let acting = self.act(caller)?;
        let made = fs::openat2(&dir.fd, name, flags, mode, BENEATH);
        let node = match made {
            Ok(fd) => {
                if let Some(size) = what.size {
                    fs::ftruncate(&fd, size)?;
                }
                let node = self.nodes.adopt(&fd, &dir, name)?;
                let node = self.made(caller, node, &SetAttributes { size: None, ..what })?;
                self.open.insert((node.key, caller.clone(), true), Arc::new(fd));
                node
            }
            Err(Errno::EXIST) => {
                let mut node = self.nodes.enter(&dir, name)?;
                drop(acting);
                if kind(&node.stat) != Kind::File {
                    return Err(Status::Exist);
                }
                match how {
                    CreateHow::Guarded(_) => return Err(Status::Exist),
                    CreateHow::Exclusive(verifier) => {
                        let is = self.described(&node.stat);
                        if (is.atime, is.mtime) != times_of(*verifier) || is.size != 0 {
                            return Err(Status::Exist);
                        }
                    }
                    CreateHow::Unchecked(what) => {
                        if let Some(size) = what.size {
                            let fd = self.data(caller, &self.nodes.handle(node.key), true)?;
                            let _acting = self.act(caller)?;
                            fs::ftruncate(&*fd, size)?;
                            node.stat = stat(&node.fd)?;
                        }
                    }
                }
                node
            }
            Err(errno) => return Err(errno.into()),
        };
        Ok(self.file(&node))
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: New) -> Outcome<File> {
        let dir = self.directory(dir)?;
        let _acting = self.act(caller)?;
        let mode = |what: &SetAttributes, usual| Mode::from_raw_mode(what.mode.unwrap_or(usual) & 0o7777);
        let attributes = match what {
            New::Directory(what) => {
                fs::mkdirat(&dir.fd, name, mode(what, 0o755))?;
                // Set-group-id comes from the directory above and is not the client's to take away.
                let keep = u32::from(dir.stat.stx_mode) & 0o2000;
                SetAttributes {
                    mode: what.mode.map(|mode| mode | keep),
                    ..*what
                }
            }
            New::Symlink(text, what) => {
                fs::symlinkat(text, &dir.fd, name)?;
                SetAttributes { mode: None, ..*what }
            }
            New::Special(kind, device, what) => {
                let kind = match kind {
                    Kind::Block => FileType::BlockDevice,
                    Kind::Character => FileType::CharacterDevice,
                    Kind::Socket => FileType::Socket,
                    _ => FileType::Fifo,
                };
                fs::mknodat(
                    &dir.fd,
                    name,
                    kind,
                    mode(what, 0o644),
                    fs::makedev(device.major, device.minor),
                )?;
                *what
            }
        };
        let attributes = SetAttributes {
            size: None,
            ..attributes
        };
        Ok(self.file(&self.made(caller, self.nodes.enter(&dir, name)?, &attributes)?))
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Outcome<()> {
        let dir = self.directory(dir)?;
        let acting = self.act(caller)?;
        let node = self.nodes.enter(&dir, name)?;
        let flags = if directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        let removed = fs::unlinkat(&dir.fd, name, flags);
        drop(acting);
        match removed {
            // Linux' word for unlinking a directory; POSIX' is the other one.
            Err(Errno::ISDIR | Errno::PERM) if !directory && kind(&node.stat) == Kind::Directory => {
                Err(Status::IsDir)
            }
            Err(Errno::EXIST) => Err(Status::NotEmpty),
            Err(errno) => Err(errno.into()),
            Ok(()) => {
                self.lost_a_name(&node);
                Ok(())
            }
        }
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Outcome<()> {
        let (from, from_name, to, to_name) = (self.directory(from.0)?, from.1, self.directory(to.0)?, to.1);
        let acting = self.act(caller)?;
        let node = self.nodes.enter(&from, from_name)?;
        let over = self.nodes.enter(&to, to_name).ok();
        match fs::renameat(&from.fd, from_name, &to.fd, to_name) {
            Err(Errno::XDEV) => return Err(Status::XDev),
            Err(Errno::EXIST) => return Err(Status::NotEmpty),
            renamed => renamed?,
        }
        drop(acting);
        if let Some(over) = over.filter(|over| over.key != node.key) {
            self.lost_a_name(&over);
        }
        self.nodes.remember(&node.stat, to.key.number, to_name);
        Ok(())
    }

    fn link(&self, caller: &Caller, file: &Handle, dir: &Handle, name: &[u8]) -> Outcome<()> {
        let (node, dir) = (self.nodes.find(file)?, self.directory(dir)?);
        if kind(&node.stat) == Kind::Directory {
            return Err(Status::IsDir);
        }
        let acting = self.act(caller)?;
        fs::linkat(CWD, &*path(&node), &dir.fd, name, AtFlags::SYMLINK_FOLLOW).map_err(
            |errno| match errno {
                Errno::XDEV => Status::XDev,
                errno => errno.into(),
            },
        )?;
        drop(acting);
        self.nodes.remember(&node.stat, dir.key.number, name);
        Ok(())
    }

    fn list(&self, dir: &Handle) -> Outcome<(Vec<Numbered>, Option<u64>)> {
        let node = self.directory(dir)?;
        let version = self.version(dir);
        let mut entries = Vec::new();
        for entry in fs::Dir::new(fs::openat2(&node.fd, ".", LIST, Mode::empty(), BENEATH)?)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                entries.push((entry.ino(), name.into()));
            }
        }
        Ok((entries, version))
    }

    fn version(&self, dir: &Handle) -> Option<u64> {
        let stat = self.nodes.find(dir).ok()?.stat;
        let changed = Duration::new(u64::try_from(stat.stx_ctime.tv_sec).ok()?, stat.stx_ctime.tv_nsec);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        (now > changed + TICKS).then_some(changed.as_nanos() as u64)
    }

    fn may_list(&self, caller: &Caller, dir: &Handle) -> Outcome<()> {
        let node = self.directory(dir)?;
        let _acting = self.act(caller)?;
        Ok(fs::accessat(
            CWD,
            &*path(&node),
            Access::READ_OK,
            AtFlags::EACCESS,
        )?)
    }

    fn parent(&self, dir: &Handle) -> Outcome<Handle> {
        let node = self.directory(dir)?;
        Ok(self.nodes.handle(self.nodes.parent(node.key)?.key))
    }

    fn statistics(&self) -> Outcome<Statistics> {
        let node = self.nodes.find(&self.root())?;
        let of = fs::fstatvfs(&*node.fd)?;
        Ok(Statistics {
            total_octets: of.f_blocks * of.f_frsize,
            free_octets: of.f_bfree * of.f_frsize,
            available_octets: of.f_bavail * of.f_frsize,
            total_files: of.f_files,
            free_files: of.f_ffree,
            available_files: of.f_favail,
            unchanged: 0,
        })
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
