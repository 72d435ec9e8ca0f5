//! The answers of commands.

use urnic_device::command::{Completion, Count, Handle, Nothing, Status};
use zerocopy::{Immutable, IntoBytes};

/// The result of a command: a completion that lacks only tag and phase, or the reason why there is
/// none.
pub(super) type Answer = Result<Completion, Refused>;

/// Why a command is refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: Status,
    /// [`Completion::argument`].
    pub(super) argument: u32,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Refused {
        Refused { status, argument: 0 }
    }
}

/// The position of a field of a command's arguments, as [`Completion::argument`] has it.
macro_rules! argument {
    ($arguments:ident.$field:ident) => {
        1 + std::mem::offset_of!($arguments, $field) as u32
    };
}
pub(super) use argument;

/// A check of an argument.
pub(super) trait Check<T> {
    /// Names the [argument] of the check.
    fn of(self, argument: u32) -> Result<T, Refused>;
}

impl<T> Check<T> for Result<T, Status> {
    fn of(self, argument: u32) -> Result<T, Refused> {
        self.map_err(|status| Refused { status, argument })
    }
}

/// The object that an argument names, if there is one.
impl<T> Check<T> for Option<T> {
    fn of(self, argument: u32) -> Result<T, Refused> {
        self.ok_or(Status::InvalidHandle).of(argument)
    }
}

/// Whether an argument is valid.
impl Check<()> for bool {
    fn of(self, argument: u32) -> Result<(), Refused> {
        self.then_some(()).ok_or(Status::InvalidArgument).of(argument)
    }
}

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
