//! Numbers by which a process proves that it may access the memory of another.
//!
//! One process has a number in private memory and sends its address to the other. The other process
//! fetches the number by process_vm_readv(2), which the kernel permits only to processes that may
//! trace this one (ptrace(2), "Ptrace access mode checking"), and sends it back.

use crate::host::process_memory;
use rustix::process::Pid;
use rustix::rand::{GetRandomFlags, getrandom};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The number, or (all zeroes) none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct NonceValue([u64; 2]);

impl NonceValue {
    /// Fetches the number of another process; zeroes if the kernel does not permit it.
    pub(super) fn fetch(process: Pid, address: u64) -> NonceValue {
        let mut value = NonceValue::default();
        match process_memory::read(process, address, value.as_mut_bytes()) {
            Ok(read) if read == size_of::<NonceValue>() => value,
            _ => NonceValue::default(),
        }
    }

    /// The number that this process has.
    pub(super) fn of(nonce: &Nonce) -> NonceValue {
        *nonce.0
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// A number that this process has for one conversation.
#[derive(Debug)]
pub(super) struct Nonce(Box<NonceValue>);

impl Nonce {
    /// A new number; `None`: the system has no random bytes.
    pub(super) fn new() -> Option<Nonce> {
        let mut value = Box::<NonceValue>::default();
        let bytes = value.as_mut_bytes();
        let len = bytes.len();
        let filled = getrandom(bytes, GetRandomFlags::NONBLOCK).ok()?;
        (filled == len && *value != NonceValue::default()).then_some(Nonce(value))
    }

    /// The address of the number in this process.
    pub(super) fn address(&self) -> u64 {
        (&raw const *self.0).expose_provenance() as u64
    }

    /// Whether another process, which said `value`, may reach our memory.
    pub(super) fn is_proved_by(&self, value: NonceValue) -> bool {
        *self.0 == value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;

    #[test]
    fn shm_24_only_the_number_itself_is_a_proof() {
        let (nonce, other) = (Nonce::new().unwrap(), Nonce::new().unwrap());
        let fetch = |nonce: &Nonce| NonceValue::fetch(getpid(), nonce.address());
        assert!(nonce.is_proved_by(fetch(&nonce)));
        assert!(!nonce.is_proved_by(fetch(&other)));
        assert!(!nonce.is_proved_by(NonceValue::default()));
        assert_eq!(NonceValue::fetch(getpid(), 8), NonceValue::default());
    }

    /// The number of a process that may not be traced cannot be fetched.
    #[test]
    fn shm_24_no_number_of_a_process_out_of_reach_is_fetched() {
        let init = Pid::from_raw(i32::MAX).unwrap();
        let nonce = Nonce::new().unwrap();
        assert_eq!(NonceValue::fetch(init, nonce.address()), NonceValue::default());
    }
}
