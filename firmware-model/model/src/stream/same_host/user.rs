//! The users between whose processes memory is shared: a process and its peer have one.

use crate::sys;

/// A user as this process sees it; that of another user namespace is no user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct User(u32);

/// The kernel's number for a user that this user namespace does not have (the default of
/// /proc/sys/kernel/overflowuid).
const OVERFLOW: u32 = 65534;

impl User {
    /// A user by number.
    pub(super) fn of_number(uid: u32) -> Option<User> {
        (uid != OVERFLOW && uid != u32::MAX).then_some(User(uid))
    }

    /// The user of this process; `None` while it acts for another one, or can do so again
    /// (setresuid(2)).
    pub(super) fn of_this_process() -> Option<User> {
        let [real, effective, saved] = sys::users();
        let is_one = real == effective && effective == saved;
        is_one.then(|| User::of_number(effective)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shm_06_users_of_other_namespaces_are_no_users() {
        for nobody in [65534, u32::MAX] {
            assert_eq!(User::of_number(nobody), None);
        }
        assert_eq!(User::of_number(1000), Some(User(1000)));
        assert!(User::of_this_process().is_some());
    }
}
