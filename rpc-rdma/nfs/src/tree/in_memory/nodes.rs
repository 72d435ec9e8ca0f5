//! The files of a tree in memory by their numbers, and the names in its directories.

use super::node::{Is, Node, OVERHEAD, now};
use crate::acl::{EXECUTE, WRITE};
use crate::memory::Pool;
use crate::nfs3::{Kind, SetAttributes, Status};
use crate::tree::extents::Full;
use crate::tree::{Caller, Outcome};
use std::collections::{BTreeMap, HashMap};

/// The number of the root.
pub(super) const ROOT: u64 = 1;

/// Maximum bytes of a file.
pub(super) const MAX_SIZE: u64 = 1 << 46;

#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) all: HashMap<u64, Node>,
    pub(super) last: u64,
    pub(super) used: u64,
    pub(super) limit: u64,
    pub(super) changes: u64,
}

impl From<Full> for Status {
    fn from(_: Full) -> Self {
        Self::NoSpace
    }
}

impl Nodes {
    pub(super) fn node(&self, id: u64) -> Outcome<&Node> {
        self.all.get(&id).ok_or(Status::Stale)
    }

    pub(super) fn node_mut(&mut self, id: u64) -> Outcome<&mut Node> {
        self.all.get_mut(&id).ok_or(Status::Stale)
    }

    pub(super) const fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    pub(super) fn names(&self, dir: u64) -> Outcome<&BTreeMap<Box<[u8]>, u64>> {
        match &self.node(dir)?.is {
            Is::Directory { names, .. } => Ok(names),
            _ => Err(Status::NotDir),
        }
    }

    pub(super) fn find(&self, caller: &Caller, dir: u64, name: &[u8]) -> Outcome<u64> {
        let names = self.names(dir)?;
        if !self.node(dir)?.may(caller, EXECUTE) {
            return Err(Status::Access);
        }
        names.get(name).copied().ok_or(Status::NoEnt)
    }

    pub(super) fn may_change(&self, caller: &Caller, dir: u64) -> Outcome<()> {
        self.names(dir)?;
        let may = self.node(dir)?.may(caller, WRITE | EXECUTE);
        may.then_some(()).ok_or(Status::Access)
    }

    /// Checks that the caller may remove a file of a directory. In a sticky directory, only the
    /// owner of the file or of the directory may.
    pub(super) fn may_take_out(&self, caller: &Caller, dir: u64, file: u64) -> Outcome<()> {
        self.may_change(caller, dir)?;
        let dir = self.node(dir)?;
        let sticky = dir.bits & 0o1000 != 0;
        let may = !sticky || dir.owned_by(caller) || self.node(file)?.owned_by(caller);
        may.then_some(()).ok_or(Status::Access)
    }

    pub(super) fn set_name(&mut self, dir: u64, name: &[u8], file: Option<u64>) -> Outcome<()> {
        self.changes += 1;
        let changes = self.changes;
        let weight = OVERHEAD + name.len() as u64;
        let fits = self.room() >= weight;
        let node = self.node_mut(dir)?;
        let Is::Directory { names, version, .. } = &mut node.is else {
            return Err(Status::NotDir);
        };
        let before = names.contains_key(name);
        match file {
            Some(file) if fits || before => drop(names.insert(name.into(), file)),
            Some(_) => return Err(Status::NoSpace),
            None => drop(names.remove(name)),
        }
        *version = changes;
        node.touch();
        match (before, file) {
            (false, Some(_)) => self.used += weight,
            (true, None) => self.used -= weight,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn add(
        &mut self,
        caller: &Caller,
        dir: u64,
        name: &[u8],
        mut node: Node,
        what: &SetAttributes,
    ) -> Outcome<u64> {
        self.may_change(caller, dir)?;
        let above = self.node(dir)?;
        let grouped = above.bits & 0o2000 != 0;
        if grouped {
            node.gid = above.gid;
        }
        node.set(caller, what)?;
        node.inherit(above);
        // Clients may not remove this bit.
        if grouped && node.kind() == Kind::Directory {
            node.bits |= 0o2000;
        }
        let (weight, directory) = (node.weight(), node.kind() == Kind::Directory);
        if self.room() < weight + OVERHEAD + name.len() as u64 {
            return Err(Status::NoSpace);
        }
        let id = self.last + 1;
        self.set_name(dir, name, Some(id))?;
        self.last = id;
        self.used += weight;
        self.all.insert(id, node);
        if directory {
            self.node_mut(dir)?.links += 1;
        }
        Ok(id)
    }

    /// Removes a name of a file. The file is removed with its last name.
    pub(super) fn unlink(&mut self, id: u64) -> Outcome<()> {
        let node = self.node_mut(id)?;
        node.links -= 1;
        node.ctime = now();
        if node.links == 0 || node.kind() == Kind::Directory {
            let weight = node.weight();
            self.used -= weight;
            self.all.remove(&id);
        }
        Ok(())
    }

    pub(super) fn resize(&mut self, id: u64, size: u64, pool: &Pool) -> Outcome<()> {
        if size > MAX_SIZE {
            return Err(Status::FileTooBig);
        }
        let node = self.node_mut(id)?;
        let Is::File(bytes, _) = &mut node.is else {
            return Err(if node.kind() == Kind::Directory {
                Status::IsDir
            } else {
                Status::Invalid
            });
        };
        let before = bytes.used();
        bytes.resize(size, pool)?;
        let after = bytes.used();
        node.touch();
        self.used = self.used - before + after;
        Ok(())
    }

    /// Whether `dir` is `top` or below it.
    pub(super) fn below(&self, mut dir: u64, top: u64) -> Outcome<bool> {
        while dir != top && dir != ROOT {
            match self.node(dir)?.is {
                Is::Directory { parent, .. } => dir = parent,
                _ => return Err(Status::NotDir),
            }
        }
        Ok(dir == top)
    }
}
