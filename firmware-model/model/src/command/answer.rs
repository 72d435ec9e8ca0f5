//! The answers of commands.

use urnic_device::command::{Completion, Count, Handle, Nothing, Status};
use zerocopy::{Immutable, IntoBytes};

/// The result of a command: a completion that lacks only tag and phase, or the reason why there is
/// none.
pub(super) type Answer = Result<Completion, Status>;

pub(super) fn ok<T: IntoBytes + Immutable>(result: &T) -> Answer {
    Ok(Completion::new(0, Status::Ok, result))
}

pub(super) fn handle(id: u32) -> Answer {
    ok(&Handle { id: id.into() })
}

pub(super) fn count(n: usize) -> Answer {
    let count = u32::try_from(n).unwrap_or(u32::MAX);
    ok(&Count { count: count.into() })
}

pub(super) fn done() -> Answer {
    ok(&Nothing {})
}
