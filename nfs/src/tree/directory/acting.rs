//! Whose rights a thread has at the file system.

use crate::nfs3::Status;
use crate::tree::{Caller, Outcome};
use rustix::process::{Gid, Uid};
use rustix::thread::set_thread_groups;

/// The server's own ids, if it may act for others.
#[derive(Debug)]
pub(super) struct Actor(Option<Own>);

#[derive(Debug)]
struct Own {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
}

/// Until dropped, this thread has a caller's rights. It must be dropped on the same thread.
#[derive(Debug)]
pub(super) struct Acting<'a>(Option<&'a Own>, std::marker::PhantomData<*const ()>);

impl Actor {
    /// Root may act for others, others only for themselves.
    pub(super) fn new() -> Self {
        let root = rustix::process::geteuid().is_root();
        Self(root.then(|| Own {
            uid: 0,
            gid: rustix::process::getegid().as_raw(),
            groups: rustix::process::getgroups().unwrap_or_default(),
        }))
    }

    /// Do callers get rights of their own?
    pub(super) const fn acts(&self) -> bool {
        self.0.is_some()
    }

    /// Takes on the caller's ids. The kernel drops root's capabilities at file systems along with fsuid 0.
    ///
    /// # Errors
    /// `Access` if the kernel refuses them: ids that are none (2³² − 1), or not of the server's user namespace.
    pub(super) fn act(&self, caller: &Caller) -> Outcome<Acting<'_>> {
        let Some(own) = &self.0 else {
            return Ok(Acting(None, std::marker::PhantomData));
        };
        let groups: Vec<_> = caller.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        let acting = Acting(Some(own), std::marker::PhantomData);
        // Groups that are none are left out all together: fewer rights.
        let grouped = set_thread_groups(&groups).or_else(|_| set_thread_groups(&[]));
        let taken = grouped.is_ok() && set_ids(caller.uid, caller.gid);
        // Otherwise the thread still has root's rights; they end here, and with them the call.
        taken.then_some(acting).ok_or(Status::Access)
    }
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.0 {
            set_ids(own.uid, own.gid);
            let _ = set_thread_groups(&own.groups);
        }
    }
}

/// Sets this thread's ids at file systems, first that of the group, because that of the user removes the capability.
/// Returns whether both are set.
fn set_ids(uid: u32, gid: u32) -> bool {
    use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
    let _previous = setfsuid(Uid::from_raw(0));
    let _previous = setfsgid(Gid::from_raw(gid));
    let _previous = setfsuid(Uid::from_raw(uid));
    // The calls report no failure. A call with an invalid id returns the present one (setfsuid(2)).
    let has_gid = setfsgid(Gid::from_raw(u32::MAX)).as_raw();
    let has_uid = setfsuid(Uid::from_raw(u32::MAX)).as_raw();
    has_uid == uid && has_gid == gid && uid != u32::MAX && gid != u32::MAX
}

/// The user of an ordinary server.
pub(super) fn own_uid() -> Uid {
    rustix::process::geteuid()
}
