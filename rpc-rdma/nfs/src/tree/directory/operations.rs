//! The operations of a tree on a directory.

use super::nodes::{BENEATH, LIST, stat};
use crate::acl::Acl;
use crate::memory::Pool;
use crate::nfs3::{
    Attributes, CreateHow, Handle, Kind, SetAttributes, SetTime, Stable, Statistics, Status, Time,
};
use crate::tree::access::access_bits;
use crate::tree::{Acls, Caller, Data, File, Found, New, Numbered, Outcome, SetAcls, Tree};
use rustix::fs::{self, Access, AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::lists;
use super::metadata::{kind, path, times_of};
use super::served::Directory;

/// Age from which the time of a directory's change differs from that of the next change: ticks of
/// the kernel's clock are up to 10 ms.
const TICKS: Duration = Duration::from_millis(50);

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
        let impersonation = self.impersonate(caller)?;
        let set = self.set(&node, what, |size| {
            data.map_or(Ok(()), |fd| Ok(fs::ftruncate(&*fd, size)?))
        });
        drop(impersonation);
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
        // This check precedes any change.
        if what.default.iter().flatten().next().is_some() && kind(&node.stat) != Kind::Directory {
            return Err(Status::Access);
        }
        let impersonation = self.impersonate(caller)?;
        let access = what.access.as_ref();
        let set = access.map_or(Ok(()), |list| lists::set(&path, lists::ACCESS, list.as_ref()));
        let default = what
            .default
            .as_ref()
            .filter(|_| kind(&node.stat) == Kind::Directory);
        let set = set
            .and_then(|()| default.map_or(Ok(()), |list| lists::set(&path, lists::DEFAULT, list.as_ref())));
        drop(impersonation);
        self.close(node.key);
        set
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File> {
        let dir = self.directory(dir)?;
        match name {
            b"." => Ok(self.file(&dir)),
            b".." => Ok(self.file(&self.nodes.parent(dir.key)?)),
            _ => {
                let _impersonation = self.impersonate(caller)?;
                Ok(self.file(&self.nodes.enter(&dir, name)?))
            }
        }
    }

    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32> {
        let node = self.nodes.find(file)?;
        let path = path(&node);
        let _impersonation = self.impersonate(caller)?;
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
                Ok(bytes) => filled += bytes,
                Err(Errno::INTR) => {}
                // The offset is beyond the maximum size of a file.
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
        let bytes = data.bytes();
        if i64::try_from(offset.saturating_add(bytes.len() as u64)).is_err() {
            return Err(Status::FileTooBig);
        }
        // With the caller's permissions, the kernel clears set-id bits and applies quotas.
        let impersonation = self.impersonate(caller)?;
        let mut written = 0;
        while written < bytes.len() {
            match rustix::io::pwrite(&*fd, &bytes[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(more) => written += more,
                Err(Errno::INTR) => {}
                Err(errno) if written == 0 => return Err(errno.into()),
                Err(_) => break,
            }
        }
        drop(impersonation);
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
        let impersonation = self.impersonate(caller)?;
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
                drop(impersonation);
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
                            let _impersonation = self.impersonate(caller)?;
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
        let _impersonation = self.impersonate(caller)?;
        let mode = |what: &SetAttributes, usual| Mode::from_raw_mode(what.mode.unwrap_or(usual) & 0o7777);
        let attributes = match what {
            New::Directory(what) => {
                fs::mkdirat(&dir.fd, name, mode(what, 0o755))?;
                // The directory above determines set-group-id, and the client may not clear it.
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
        let impersonation = self.impersonate(caller)?;
        let node = self.nodes.enter(&dir, name)?;
        let flags = if directory {
            AtFlags::REMOVEDIR
        } else {
            AtFlags::empty()
        };
        let removed = fs::unlinkat(&dir.fd, name, flags);
        drop(impersonation);
        match removed {
            // For the unlink of a directory, Linux returns EISDIR and POSIX specifies EPERM.
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
        let impersonation = self.impersonate(caller)?;
        let node = self.nodes.enter(&from, from_name)?;
        let over = self.nodes.enter(&to, to_name).ok();
        match fs::renameat(&from.fd, from_name, &to.fd, to_name) {
            Err(Errno::XDEV) => return Err(Status::XDev),
            Err(Errno::EXIST) => return Err(Status::NotEmpty),
            renamed => renamed?,
        }
        drop(impersonation);
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
        let impersonation = self.impersonate(caller)?;
        fs::linkat(CWD, &*path(&node), &dir.fd, name, AtFlags::SYMLINK_FOLLOW).map_err(
            |errno| match errno {
                Errno::XDEV => Status::XDev,
                errno => errno.into(),
            },
        )?;
        drop(impersonation);
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
        let _impersonation = self.impersonate(caller)?;
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
            total_bytes: of.f_blocks * of.f_frsize,
            free_bytes: of.f_bfree * of.f_frsize,
            available_bytes: of.f_bavail * of.f_frsize,
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
