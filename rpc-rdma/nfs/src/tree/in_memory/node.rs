//! A file of a tree in memory: its kind, contents, owner and permissions.

use crate::acl::{Acl, EXECUTE, Rights, WRITE};
use crate::nfs3::{Device, Kind, SetAttributes, SetTime, Status, Time, Verifier};
use crate::tree::extents::Extents;
use crate::tree::{Caller, Outcome, SetAcls};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes that are counted for a file in addition to its contents, and for a name in addition to its
/// bytes.
pub(super) const OVERHEAD: u64 = 256;

#[derive(Debug)]
pub(super) struct Node {
    pub(super) is: Is,
    /// The set-id bits and the sticky bit of the mode.
    pub(super) bits: u32,
    /// The access list, which contains the rest of the mode.
    pub(super) acl: Acl,
    /// The default list of a directory.
    pub(super) default: Option<Box<Acl>>,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) links: u32,
    pub(super) atime: Time,
    pub(super) mtime: Time,
    pub(super) ctime: Time,
}

#[derive(Debug)]
pub(super) enum Is {
    File(Extents, Option<Verifier>),
    Directory {
        names: BTreeMap<Box<[u8]>, u64>,
        parent: u64,
        version: u64,
    },
    Symlink(Box<[u8]>),
    Special(Kind, Device),
}

pub(super) fn now() -> Time {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time {
        seconds: now.as_secs() as u32,
        nanos: now.subsec_nanos(),
    }
}

impl Node {
    pub(super) fn new(is: Is, mode: u32, owner: &Caller) -> Self {
        let now = now();
        Self {
            is,
            bits: mode & 0o7000,
            acl: Acl::of_mode(mode),
            default: None,
            uid: owner.uid,
            gid: owner.gid,
            links: 1,
            atime: now,
            mtime: now,
            ctime: now,
        }
    }

    pub(super) const fn kind(&self) -> Kind {
        match self.is {
            Is::File(..) => Kind::File,
            Is::Directory { .. } => Kind::Directory,
            Is::Symlink(_) => Kind::Symlink,
            Is::Special(kind, _) => kind,
        }
    }

    pub(super) fn mode(&self) -> u32 {
        self.bits | self.acl.mode()
    }

    /// Sets the set-id bits and the sticky bit. Only members of the group may set the set-group-id
    /// bit.
    fn set_bits(&mut self, caller: &Caller, mode: u32) {
        let member = caller.uid == 0 || caller.belongs_to(self.gid);
        self.bits = mode & if member { 0o7000 } else { 0o5000 };
    }

    /// Whether the caller has all these permissions. Root has all permissions, but executes only
    /// files that some user may execute.
    pub(super) fn may(&self, caller: &Caller, wanted: Rights) -> bool {
        if caller.uid == 0 {
            return wanted & EXECUTE == 0 || self.kind() == Kind::Directory || self.mode() & 0o111 != 0;
        }
        self.acl.lets(caller, self.uid, self.gid, wanted)
    }

    pub(super) fn owned_by(&self, caller: &Caller) -> bool {
        caller.uid == 0 || caller.uid == self.uid
    }

    pub(super) fn touch(&mut self) {
        self.mtime = now();
        self.ctime = self.mtime;
    }

    /// Bytes that are counted for the file.
    pub(super) fn weight(&self) -> u64 {
        let bytes = match &self.is {
            Is::File(bytes, _) => bytes.used(),
            Is::Symlink(text) => text.len() as u64,
            Is::Directory { .. } | Is::Special(..) => 0,
        };
        OVERHEAD + bytes + lists_weight(&self.acl, self.default.as_deref())
    }

    /// Sets owner, mode and times, if the caller has permission. The tree sets the size.
    pub(super) fn set(&mut self, caller: &Caller, what: &SetAttributes) -> Outcome<()> {
        let own = self.owned_by(caller);
        let gives_away = what.uid.is_some_and(|uid| uid != self.uid);
        let regroups = what
            .gid
            .is_some_and(|gid| gid != self.gid && !caller.belongs_to(gid));
        if (what.mode.is_some() || what.gid.is_some() || what.uid.is_some()) && !own {
            return Err(Status::Perm);
        }
        if (gives_away || regroups) && caller.uid != 0 {
            return Err(Status::Perm);
        }
        let exact = matches!(what.atime, SetTime::To(_)) || matches!(what.mtime, SetTime::To(_));
        let times = what.atime != SetTime::Keep || what.mtime != SetTime::Keep;
        if exact && !own {
            return Err(Status::Perm);
        }
        if times && !own && !self.may(caller, WRITE) {
            return Err(Status::Access);
        }
        self.uid = what.uid.unwrap_or(self.uid);
        self.gid = what.gid.unwrap_or(self.gid);
        if let Some(mode) = what.mode {
            self.set_bits(caller, mode);
            self.acl.set_mode(mode);
        }
        for (time, set) in [(&mut self.atime, what.atime), (&mut self.mtime, what.mtime)] {
            match set {
                SetTime::Keep => {}
                SetTime::Now => *time = now(),
                SetTime::To(to) => *time = to,
            }
        }
        self.ctime = now();
        Ok(())
    }

    /// Sets lists, if the caller has permission and there is room for them.
    pub(super) fn set_acls(&mut self, caller: &Caller, what: &SetAcls, room: u64) -> Outcome<()> {
        match self.kind() {
            _ if !self.owned_by(caller) => return Err(Status::Perm),
            Kind::Symlink => return Err(Status::NotSupported),
            Kind::Directory => {}
            _ if what.default.iter().flatten().next().is_some() => return Err(Status::Access),
            _ => {}
        }
        let access = match &what.access {
            None => self.acl.clone(),
            Some(None) => Acl::of_mode(self.acl.mode()),
            Some(Some(list)) => list.clone(),
        };
        let had = self.default.as_deref();
        let default = what.default.as_ref().map_or(had, Option::as_ref);
        if lists_weight(&access, default) > room + lists_weight(&self.acl, had) {
            return Err(Status::NoSpace);
        }
        (self.default, self.acl) = (default.cloned().map(Box::new), access);
        self.set_bits(caller, self.bits);
        self.ctime = now();
        Ok(())
    }

    /// Inherits the default list of the directory, limited by the mode of the new file.
    pub(super) fn inherit(&mut self, above: &Self) {
        match (&above.default, self.kind()) {
            (None, _) | (_, Kind::Symlink) => {}
            (Some(list), kind) => {
                self.acl = list.inherited(self.mode());
                self.default = (kind == Kind::Directory).then(|| list.clone());
            }
        }
    }
}

fn lists_weight(access: &Acl, default: Option<&Acl>) -> u64 {
    access.weight() + default.map_or(0, |list| size_of::<Acl>() as u64 + list.weight())
}
