//! A tree in memory, of a limited size. The tree and its handles end with the process.

mod node;
mod nodes;

use super::access::access_bits;
use super::extents::{Extents, Full};
use super::{Acls, Caller, Data, File, Found, New, Numbered, Outcome, SetAcls, Tree};
use crate::acl::{EXECUTE, READ, WRITE};
use crate::memory::{PAGE, Pool, Slice};
use crate::nfs3::{
    Attributes, CreateHow, Device, Handle, Kind, MAX_TRANSFER, SetAttributes, Stable, Statistics, Status,
    Time,
};
use node::{Is, Node, OVERHEAD, now};
use nodes::{MAX_SIZE, Nodes, ROOT};
use std::collections::{BTreeMap, HashMap};
use urnic_sync::{Mutex, MutexGuard};

/// A tree in memory.
#[derive(Debug)]
pub struct InMemory {
    nodes: Mutex<Nodes>,
    pool: Pool,
    /// Zero bytes, for the holes of files.
    zeroes: Slice,
    /// A random number in handles, which differs for each process.
    instance: u64,
}

impl InMemory {
    /// An empty tree of at most `limit` bytes in total. The root belongs to `owner`. `None` if
    /// there is no memory.
    pub fn new(limit: u64, pool: Pool, owner: &Caller) -> Option<Self> {
        let mut instance = [0; 8];
        rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty()).ok()?;
        let mut zeroes = pool.take(MAX_TRANSFER as usize)?;
        zeroes.fill(0);
        let root = Is::Directory {
            names: BTreeMap::new(),
            parent: ROOT,
            version: 0,
        };
        let mut nodes = Nodes {
            all: HashMap::new(),
            last: ROOT,
            used: OVERHEAD,
            limit,
            changes: 0,
        };
        let mut root = Node::new(root, 0o755, owner);
        root.links = 2;
        nodes.all.insert(ROOT, root);
        Some(Self {
            nodes: Mutex::new(nodes),
            zeroes: zeroes.share(),
            pool,
            instance: u64::from_ne_bytes(instance),
        })
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock()
    }

    fn handle(&self, id: u64) -> Handle {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.instance.to_be_bytes());
        bytes[8..].copy_from_slice(&id.to_be_bytes());
        Handle::new(&bytes)
    }

    fn id(&self, handle: &Handle) -> Outcome<u64> {
        let bytes: &[u8; 16] = handle.bytes().try_into().map_err(|_| Status::BadHandle)?;
        let whole = u128::from_be_bytes(*bytes);
        ((whole >> 64) as u64 == self.instance)
            .then_some(whole as u64)
            .ok_or(Status::Stale)
    }

    fn file(&self, nodes: &Nodes, id: u64) -> Outcome<File> {
        Ok((self.handle(id), self.described(nodes.node(id)?, id)))
    }

    fn described(&self, node: &Node, id: u64) -> Attributes {
        let (size, used) = match &node.is {
            Is::File(bytes, _) => (bytes.size(), bytes.used()),
            Is::Directory { names, .. } => (names.len() as u64 * 32, PAGE as u64),
            Is::Symlink(text) => (text.len() as u64, 0),
            Is::Special(..) => (0, 0),
        };
        let device = match node.is {
            Is::Special(_, device) => device,
            _ => Device::default(),
        };
        Attributes {
            kind: node.kind(),
            mode: node.mode(),
            links: node.links,
            uid: node.uid,
            gid: node.gid,
            size,
            used,
            device,
            fsid: self.instance,
            fileid: id,
            atime: node.atime,
            mtime: node.mtime,
            ctime: node.ctime,
        }
    }
}

impl Tree for InMemory {
    fn root(&self) -> Handle {
        self.handle(ROOT)
    }

    fn attributes(&self, file: &Handle) -> Outcome<Attributes> {
        let id = self.id(file)?;
        Ok(self.described(self.nodes().node(id)?, id))
    }

    fn set_attributes(
        &self,
        caller: &Caller,
        file: &Handle,
        what: &SetAttributes,
        guard: Option<Time>,
    ) -> Outcome<()> {
        let id = self.id(file)?;
        let mut nodes = self.nodes();
        let node = nodes.node_mut(id)?;
        if guard.is_some_and(|guard| guard != node.ctime) {
            return Err(Status::NotSync);
        }
        if what.size.is_some() && !node.owned_by(caller) && !node.may(caller, WRITE) {
            return Err(Status::Access);
        }
        if let Some(size) = what.size {
            nodes.resize(id, size, &self.pool)?;
        }
        nodes.node_mut(id)?.set(caller, what)
    }

    fn acls(&self, file: &Handle) -> Outcome<Acls> {
        let id = self.id(file)?;
        let nodes = self.nodes();
        let node = nodes.node(id)?;
        Ok(Acls {
            access: node.acl.clone(),
            default: node.default.as_deref().cloned(),
        })
    }

    fn set_acls(&self, caller: &Caller, file: &Handle, what: &SetAcls) -> Outcome<()> {
        let id = self.id(file)?;
        let mut nodes = self.nodes();
        let room = nodes.room();
        let node = nodes.node_mut(id)?;
        let before = node.weight();
        node.set_acls(caller, what, room)?;
        let after = node.weight();
        nodes.used = nodes.used - before + after;
        Ok(())
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Outcome<File> {
        let dir = self.id(dir)?;
        let nodes = self.nodes();
        nodes.names(dir)?;
        let id = match (name, &nodes.node(dir)?.is) {
            (b".", _) => dir,
            (b"..", Is::Directory { parent, .. }) => *parent,
            _ => nodes.find(caller, dir, name)?,
        };
        self.file(&nodes, id)
    }

    fn access(&self, caller: &Caller, file: &Handle, wanted: u32) -> Outcome<u32> {
        let id = self.id(file)?;
        let nodes = self.nodes();
        let node = nodes.node(id)?;
        let [read, write, execute] = [READ, WRITE, EXECUTE].map(|right| node.may(caller, right));
        Ok(wanted & access_bits(node.kind(), read, write, execute))
    }

    fn read_link(&self, file: &Handle) -> Outcome<Vec<u8>> {
        let id = self.id(file)?;
        match &self.nodes().node(id)?.is {
            Is::Symlink(text) => Ok(text.to_vec()),
            _ => Err(Status::Invalid),
        }
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, count: u32) -> Outcome<Found> {
        let id = self.id(file)?;
        let mut nodes = self.nodes();
        let node = nodes.node_mut(id)?;
        // A caller that may execute the file may also read it (RFC 1813 §4.4).
        if !node.may(caller, READ) && !node.may(caller, EXECUTE) && !node.owned_by(caller) {
            return Err(Status::Access);
        }
        node.atime = now();
        let kind = node.kind();
        let Is::File(bytes, _) = &node.is else {
            return Err(if kind == Kind::Directory {
                Status::IsDir
            } else {
                Status::Invalid
            });
        };
        let pieces = bytes.read(offset, count as usize, &self.zeroes, &self.pool);
        let pieces = pieces.map_err(|Full| Status::Jukebox)?;
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        let eof = offset.saturating_add(len as u64) >= bytes.size();
        Ok(Found { pieces, eof })
    }

    fn write(
        &self,
        caller: &Caller,
        file: &Handle,
        offset: u64,
        data: Data,
        _stable: Stable,
    ) -> Outcome<(u32, Stable)> {
        let id = self.id(file)?;
        let len = data.bytes().len() as u64;
        if offset.saturating_add(len) > MAX_SIZE {
            return Err(Status::FileTooBig);
        }
        let mut nodes = self.nodes();
        let room = nodes.room();
        let node = nodes.node_mut(id)?;
        if !node.may(caller, WRITE) && !node.owned_by(caller) {
            return Err(Status::Access);
        }
        let kind = node.kind();
        let Is::File(bytes, verifier) = &mut node.is else {
            return Err(if kind == Kind::Directory {
                Status::IsDir
            } else {
                Status::Invalid
            });
        };
        let before = bytes.used();
        let written = bytes.write(offset, data, room, &self.pool);
        let after = bytes.used();
        *verifier = None;
        node.touch();
        if caller.uid != 0 {
            node.bits &= !0o6000;
        }
        nodes.used = nodes.used - before + after;
        written?;
        // The data is as stable as possible: if the process ends, the handles are lost, too.
        Ok((len as u32, Stable::FileSync))
    }

    fn commit(&self, _caller: &Caller, file: &Handle) -> Outcome<()> {
        let id = self.id(file)?;
        match self.nodes().node(id)?.is {
            Is::File(..) => Ok(()),
            _ => Err(Status::Invalid),
        }
    }

    fn create(&self, caller: &Caller, dir: &Handle, name: &[u8], how: &CreateHow) -> Outcome<File> {
        let dir = self.id(dir)?;
        let mut nodes = self.nodes();
        let found = nodes.find(caller, dir, name);
        let (attributes, made_by) = match how {
            CreateHow::Unchecked(attributes) | CreateHow::Guarded(attributes) => (*attributes, None),
            CreateHow::Exclusive(verifier) => (SetAttributes::default(), Some(*verifier)),
        };
        let id = match (found, how) {
            (Ok(id), CreateHow::Exclusive(verifier)) => match nodes.node(id)?.is {
                Is::File(_, Some(made_by)) if made_by == *verifier => id,
                _ => return Err(Status::Exist),
            },
            (Ok(id), CreateHow::Unchecked(_)) if nodes.node(id)?.kind() == Kind::File => {
                if let Some(size) = attributes.size {
                    if !nodes.node(id)?.may(caller, WRITE) {
                        return Err(Status::Access);
                    }
                    nodes.resize(id, size, &self.pool)?;
                }
                id
            }
            (Ok(_), _) => return Err(Status::Exist),
            (Err(Status::NoEnt), _) => {
                let mode = attributes.mode.unwrap_or(0o644) & 0o7777;
                let node = Node::new(Is::File(Extents::default(), made_by), mode, caller);
                let id = nodes.add(caller, dir, name, node, &attributes)?;
                if let Some(size) = attributes.size {
                    nodes.resize(id, size, &self.pool)?;
                }
                id
            }
            (Err(status), _) => return Err(status),
        };
        self.file(&nodes, id)
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: New) -> Outcome<File> {
        let dir = self.id(dir)?;
        let mut nodes = self.nodes();
        match nodes.find(caller, dir, name) {
            Err(Status::NoEnt) => {}
            Ok(_) => return Err(Status::Exist),
            Err(status) => return Err(status),
        }
        let (is, mode, attributes) = match what {
            New::Directory(attributes) => {
                let is = Is::Directory {
                    names: BTreeMap::new(),
                    parent: dir,
                    version: 0,
                };
                (is, attributes.mode.unwrap_or(0o755), *attributes)
            }
            New::Symlink(text, attributes) => {
                let attributes = SetAttributes {
                    mode: None,
                    ..*attributes
                };
                (Is::Symlink(text.into()), 0o777, attributes)
            }
            New::Special(Kind::Block | Kind::Character, ..) if caller.uid != 0 => return Err(Status::Perm),
            New::Special(kind, device, attributes) => (
                Is::Special(kind, device),
                attributes.mode.unwrap_or(0o644),
                *attributes,
            ),
        };
        let directory = matches!(is, Is::Directory { .. });
        let attributes = SetAttributes {
            size: None,
            ..attributes
        };
        let mut node = Node::new(is, mode & 0o7777, caller);
        node.links = if directory { 2 } else { 1 };
        let id = nodes.add(caller, dir, name, node, &attributes)?;
        self.file(&nodes, id)
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8], directory: bool) -> Outcome<()> {
        let dir = self.id(dir)?;
        let mut nodes = self.nodes();
        let id = nodes.find(caller, dir, name)?;
        nodes.may_take_out(caller, dir, id)?;
        match (&nodes.node(id)?.is, directory) {
            (Is::Directory { .. }, false) => return Err(Status::IsDir),
            (Is::Directory { names, .. }, true) if !names.is_empty() => return Err(Status::NotEmpty),
            (Is::Directory { .. }, true) => nodes.node_mut(dir)?.links -= 1,
            (_, true) => return Err(Status::NotDir),
            (_, false) => {}
        }
        nodes.set_name(dir, name, None)?;
        nodes.unlink(id)
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Outcome<()> {
        let (from, from_name, to, to_name) = (self.id(from.0)?, from.1, self.id(to.0)?, to.1);
        let mut nodes = self.nodes();
        nodes.names(to)?;
        let id = nodes.find(caller, from, from_name)?;
        nodes.may_take_out(caller, from, id)?;
        nodes.may_change(caller, to)?;
        let directory = nodes.node(id)?.kind() == Kind::Directory;
        if directory && nodes.below(to, id)? {
            return Err(Status::Invalid);
        }
        match nodes.find(caller, to, to_name) {
            Ok(other) if other == id => return Ok(()),
            Ok(other) => {
                nodes.may_take_out(caller, to, other)?;
                match (&nodes.node(other)?.is, directory) {
                    (Is::Directory { names, .. }, true) if !names.is_empty() => return Err(Status::NotEmpty),
                    (Is::Directory { .. }, true) => nodes.node_mut(to)?.links -= 1,
                    (Is::Directory { .. }, false) => return Err(Status::IsDir),
                    (_, true) => return Err(Status::NotDir),
                    (_, false) => {}
                }
                nodes.set_name(to, to_name, Some(id))?;
                nodes.unlink(other)?;
            }
            Err(Status::NoEnt) => nodes.set_name(to, to_name, Some(id))?,
            Err(status) => return Err(status),
        }
        nodes.set_name(from, from_name, None)?;
        let node = nodes.node_mut(id)?;
        node.ctime = now();
        if let Is::Directory { parent, .. } = &mut node.is {
            *parent = to;
            nodes.node_mut(from)?.links -= 1;
            nodes.node_mut(to)?.links += 1;
        }
        Ok(())
    }

    fn link(&self, caller: &Caller, file: &Handle, dir: &Handle, name: &[u8]) -> Outcome<()> {
        let (id, dir) = (self.id(file)?, self.id(dir)?);
        let mut nodes = self.nodes();
        if nodes.node(id)?.kind() == Kind::Directory {
            return Err(Status::IsDir);
        }
        match nodes.find(caller, dir, name) {
            Err(Status::NoEnt) => {}
            Ok(_) => return Err(Status::Exist),
            Err(status) => return Err(status),
        }
        nodes.may_change(caller, dir)?;
        nodes.set_name(dir, name, Some(id))?;
        let node = nodes.node_mut(id)?;
        node.links += 1;
        node.ctime = now();
        Ok(())
    }

    fn list(&self, dir: &Handle) -> Outcome<(Vec<Numbered>, Option<u64>)> {
        let id = self.id(dir)?;
        let nodes = self.nodes();
        match &nodes.node(id)?.is {
            Is::Directory { names, version, .. } => Ok((
                names.iter().map(|(name, id)| (*id, name.clone())).collect(),
                Some(*version),
            )),
            _ => Err(Status::NotDir),
        }
    }

    fn version(&self, dir: &Handle) -> Option<u64> {
        let id = self.id(dir).ok()?;
        match self.nodes().node(id).ok()?.is {
            Is::Directory { version, .. } => Some(version),
            _ => None,
        }
    }

    fn may_list(&self, caller: &Caller, dir: &Handle) -> Outcome<()> {
        let id = self.id(dir)?;
        let nodes = self.nodes();
        nodes.names(id)?;
        let may = nodes.node(id)?.may(caller, READ);
        may.then_some(()).ok_or(Status::Access)
    }

    fn parent(&self, dir: &Handle) -> Outcome<Handle> {
        let id = self.id(dir)?;
        match self.nodes().node(id)?.is {
            Is::Directory { parent, .. } => Ok(self.handle(parent)),
            _ => Err(Status::NotDir),
        }
    }

    fn statistics(&self) -> Outcome<Statistics> {
        let nodes = self.nodes();
        let files = nodes.limit / (2 * OVERHEAD);
        let free = nodes.room() / (2 * OVERHEAD);
        Ok(Statistics {
            total_bytes: nodes.limit,
            free_bytes: nodes.room(),
            available_bytes: nodes.room(),
            total_files: files,
            free_files: free,
            available_files: free,
            unchanged: 0,
        })
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
