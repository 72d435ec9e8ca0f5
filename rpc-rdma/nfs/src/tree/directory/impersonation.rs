//! The identity of a thread for access to the file system.

use crate::nfs3::Status;
use crate::tree::{Caller, Outcome};
use rustix::process::{Gid, Uid};
use rustix::thread::set_thread_groups;

/// The server's own ids, if it may act with the permissions of its callers.
#[derive(Debug)]
pub(super) struct Impersonator(Option<OwnIds>);

#[derive(Debug)]
struct OwnIds {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
}

/// A guard: its thread has the permissions of a caller until the guard is dropped, which must
/// happen on the same thread.
#[derive(Debug)]
pub(super) struct Impersonation<'a>(Option<&'a OwnIds>, std::marker::PhantomData<*const ()>);

impl Impersonator {
    /// Only root may take the permissions of its callers.
    pub(super) fn new() -> Self {
        let root = rustix::process::geteuid().is_root();
        Self(root.then(|| OwnIds {
            uid: 0,
            gid: rustix::process::getegid().as_raw(),
            groups: rustix::process::getgroups().unwrap_or_default(),
        }))
    }

    /// Whether the server acts with the permissions of its callers.
    pub(super) const fn can_impersonate(&self) -> bool {
        self.0.is_some()
    }

    /// Sets the thread's ids to those of the caller. With fsuid 0, the kernel also removes root's
    /// capabilities at file systems.
    ///
    /// # Errors
    /// `Access` if the kernel refuses the ids: 2³² − 1 is no id, and others may not exist in the
    /// user namespace of the server.
    pub(super) fn impersonate(&self, caller: &Caller) -> Outcome<Impersonation<'_>> {
        let Some(own) = &self.0 else {
            return Ok(Impersonation(None, std::marker::PhantomData));
        };
        let groups: Vec<_> = caller.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        let impersonation = Impersonation(Some(own), std::marker::PhantomData);
        // If one group is invalid, all groups are left out, which gives fewer permissions.
        let grouped = set_thread_groups(&groups).or_else(|_| set_thread_groups(&[]));
        let taken = grouped.is_ok() && set_ids(caller.uid, caller.gid);
        // Otherwise the thread still has root's permissions, so the call fails.
        taken.then_some(impersonation).ok_or(Status::Access)
    }
}

impl Drop for Impersonation<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.0 {
            set_ids(own.uid, own.gid);
            let _ = set_thread_groups(&own.groups);
        }
    }
}

/// Sets this thread's ids for access to file systems. The group comes first, because setting the
/// user removes the capability. Returns whether both are set.
fn set_ids(uid: u32, gid: u32) -> bool {
    use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
    let _previous = setfsuid(Uid::from_raw(0));
    let _previous = setfsgid(Gid::from_raw(gid));
    let _previous = setfsuid(Uid::from_raw(uid));
    // The calls report no failure. A call with an invalid id returns the current id (setfsuid(2)).
    let has_gid = setfsgid(Gid::from_raw(u32::MAX)).as_raw();
    let has_uid = setfsuid(Uid::from_raw(u32::MAX)).as_raw();
    has_uid == uid && has_gid == gid && uid != u32::MAX && gid != u32::MAX
}

/// The user of a server without root's permissions.
pub(super) fn own_uid() -> Uid {
    rustix::process::geteuid()
}
