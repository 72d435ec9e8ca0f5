//! Whose rights a thread has at the file system.

use crate::tree::Caller;
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
    pub(super) fn act(&self, caller: &Caller) -> Acting<'_> {
        let Some(own) = &self.0 else {
            return Acting(None, std::marker::PhantomData);
        };
        let groups: Vec<_> = caller.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
        let acting = Acting(Some(own), std::marker::PhantomData);
        // Root may always do that. Should it ever fail, then without the groups: fewer rights.
        let _ = set_thread_groups(&groups).or_else(|_| set_thread_groups(&[]));
        set_ids(caller.uid, caller.gid);
        acting
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

/// This thread's ids at file systems, the group's first: the user's takes the capability away.
fn set_ids(uid: u32, gid: u32) {
    // SAFETY: the call touches no memory.
    unsafe { libc::setfsuid(0) };
    // SAFETY: as above.
    unsafe { libc::setfsgid(gid) };
    // SAFETY: as above.
    unsafe { libc::setfsuid(uid) };
}

/// The user of an ordinary server.
pub(super) fn own_uid() -> Uid {
    rustix::process::geteuid()
}
