//! Commands and completions with their typed arguments and results.

use super::{Command, Completion, Opcode, PAYLOAD_LEN, RESULT_LEN, Status};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

impl Command {
    /// A command with these arguments, without buffers and with tag 0.
    pub fn new<T: IntoBytes + Immutable>(opcode: Opcode, arguments: &T) -> Command {
        const { assert!(size_of::<T>() <= PAYLOAD_LEN) };
        let mut command = Command::new_zeroed();
        command.opcode = (opcode as u16).into();
        command.payload[..size_of::<T>()].copy_from_slice(arguments.as_bytes());
        command
    }

    /// The arguments as a `T`.
    pub fn arguments<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= PAYLOAD_LEN) };
        T::read_from_prefix(&self.payload).map_or_else(|_| T::new_zeroed(), |(t, _)| t)
    }
}

impl Completion {
    /// A completion with this result.
    pub fn new<T: IntoBytes + Immutable>(tag: u16, status: Status, result: &T) -> Completion {
        const { assert!(size_of::<T>() <= RESULT_LEN) };
        let mut completion = Completion::new_zeroed();
        completion.tag = tag.into();
        completion.status = (status as u16).into();
        completion.payload[..size_of::<T>()].copy_from_slice(result.as_bytes());
        completion
    }

    /// The results as a `T`.
    pub fn result<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= RESULT_LEN) };
        T::read_from_prefix(&self.payload).map_or_else(|_| T::new_zeroed(), |(t, _)| t)
    }
}
