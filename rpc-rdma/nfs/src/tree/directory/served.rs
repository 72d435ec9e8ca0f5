//! The state of a served directory, and the common parts of its operations.

use super::impersonation::{Impersonation, Impersonator, own_uid};
use super::nodes::{Key, Node, Nodes, PLACES, stat};
use super::recent::Descriptors;
use crate::memory::Pool;
use crate::nfs3::{Attributes, Handle, Kind, SetAttributes, SetTime, Stable, Status};
use crate::tree::{Caller, File, Outcome};
use rustix::fd::OwnedFd;
use rustix::fs::{self, Access, AtFlags, CWD, Mode, OFlags, Statx, Timestamps};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::metadata::{attributes, kind, path, timespec};

/// A tree of a directory and all below it.
#[derive(Debug)]
pub struct Directory {
    pub(super) nodes: Nodes,
    pub(super) impersonator: Impersonator,
    /// Descriptors for reading or writing, by file and caller.
    pub(super) open: Descriptors<(Key, Caller, bool)>,
    pub(super) fsid: u64,
    pub(super) pool: Pool,
}

impl Directory {
    /// The tree below `root`, which keeps at most three quarters of `descriptors` open. New files
    /// have the modes that clients choose if the umask of the process is 0.
    ///
    /// # Errors
    /// * The errno of open(2) if the root cannot be opened: ENOENT if it does not exist, ENOTDIR if
    ///   it is no directory, EACCES without permission, and others.
    /// * EIO if the attributes of the root cannot be read.
    /// * EAGAIN if no thread can be started.
    pub fn new(root: &Path, pool: Pool, descriptors: usize) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = fs::open(root, flags, Mode::empty())?;
        // Half of the descriptors is for places, a quarter for data, and the rest for connections
        // and for files that are open for one call.
        let nodes = Nodes::new(root, descriptors / 2, PLACES).map_err(|_| Errno::IO)?;
        let Key { number, birth_time } = nodes.root();
        let open = Descriptors::new(descriptors / 4);
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
            fsid: number ^ birth_time.rotate_left(17),
            nodes,
            impersonator: Impersonator::new(),
            open,
            pool,
        })
    }

    pub(super) fn impersonate(&self, caller: &Caller) -> Outcome<Impersonation<'_>> {
        self.impersonator.impersonate(caller)
    }

    pub(super) fn described(&self, stat: &Statx) -> Attributes {
        attributes(stat, self.fsid)
    }

    pub(super) fn file(&self, node: &Node) -> File {
        (self.nodes.handle(node.key), self.described(&node.stat))
    }

    pub(super) fn directory(&self, handle: &Handle) -> Outcome<Node> {
        let node = self.nodes.find(handle)?;
        (kind(&node.stat) == Kind::Directory)
            .then_some(node)
            .ok_or(Status::NotDir)
    }

    /// A descriptor for the data of a regular file. The owner may read and write regardless of the
    /// mode, because programs write to files that they created as read-only and still have open
    /// (RFC 1813 §4.4).
    pub(super) fn data(&self, caller: &Caller, handle: &Handle, write: bool) -> Outcome<Arc<OwnedFd>> {
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
        let impersonation = self.impersonate(caller)?;
        let opened = open();
        let executes = || fs::accessat(CWD, &*path, Access::EXEC_OK, AtFlags::EACCESS).is_ok();
        let runs = matches!(opened, Err(Errno::ACCESS)) && !write && executes();
        drop(impersonation);
        let own = if self.impersonator.can_impersonate() {
            caller.uid
        } else {
            own_uid().as_raw()
        };
        let fd = match opened {
            Err(Errno::ACCESS) if node.stat.stx_uid != own && !runs => return Err(Status::Access),
            Err(Errno::ACCESS) if self.impersonator.can_impersonate() => open()?,
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

    /// Closes the descriptors of a file, after its permissions changed or its last name was
    /// removed.
    pub(super) fn close(&self, key: Key) {
        self.open.forget(|(known, ..)| *known == key);
    }

    /// Sets attributes with the permissions of the thread; `resize` sets the size.
    pub(super) fn set(
        &self,
        node: &Node,
        what: &SetAttributes,
        resize: impl FnOnce(u64) -> Outcome<()>,
    ) -> Outcome<()> {
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
        // The mode is set after the owner, because a change of the owner clears set-id bits. Links
        // have no mode.
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

    /// A new file, after the attributes are set that were not set at its creation.
    pub(super) fn made(&self, caller: &Caller, mut node: Node, what: &SetAttributes) -> Outcome<Node> {
        let same_uid = |uid: &u32| *uid != node.stat.stx_uid;
        let same_gid = |gid: &u32| *gid != node.stat.stx_gid;
        let what = SetAttributes {
            size: what.size.filter(|&size| size != node.stat.stx_size),
            // A server without root's permissions cannot change the owner. The request is ignored,
            // because clients send ids with every new file.
            uid: what
                .uid
                .filter(same_uid)
                .filter(|_| self.impersonator.can_impersonate()),
            gid: what
                .gid
                .filter(same_gid)
                .filter(|_| self.impersonator.can_impersonate()),
            // The kernel has set the permissions, limited by the default list of the directory.
            mode: (what.mode)
                .map(|mode| mode & 0o7000 | u32::from(node.stat.stx_mode) & 0o777)
                .filter(|mode| (mode ^ u32::from(node.stat.stx_mode)) & 0o7000 != 0),
            ..*what
        };
        if what != SetAttributes::default() {
            let _impersonation = self.impersonate(caller)?;
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

    /// Handles the removal of a name of a file. If other names remain, the handle must still find
    /// the file, by the descriptor.
    pub(super) fn lost_a_name(&self, node: &Node) {
        let has_names = stat(&node.fd).is_ok_and(|is| is.stx_nlink > 0);
        match kind(&node.stat) {
            _ if !has_names => self.nodes.end(node.key),
            Kind::Directory => self.nodes.forget(node.key.number),
            _ => return self.nodes.forget_place(node.key.number),
        }
        self.close(node.key);
    }

    pub(super) fn sync(fd: &OwnedFd, stable: Stable) -> Result<(), Errno> {
        match stable {
            Stable::Unstable => Ok(()),
            Stable::DataSync => fs::fdatasync(fd),
            Stable::FileSync => fs::fsync(fd),
        }
    }
}
