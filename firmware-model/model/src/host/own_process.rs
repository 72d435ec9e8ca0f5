//! Regions on demand in the device's own process.

use super::fault::Unreachable;
use super::host_memory::Word64;
use super::host_memory::{PAGE, RemoteMemory, RemoteWord};
use super::process_memory;
use rustix::process::{Pid, getpid};
use urnic_sys::resident;

/// The process's own memory, for regions on demand. The kernel copies it, brings pages in, and
/// reports inaccessible memory instead of a fault.
#[derive(Debug)]
pub struct OwnProcess(Pid);

impl OwnProcess {
    /// `None` if the kernel does not let a process copy so (seccomp), or cannot bring in pages
    /// (Linux 5.14 was the first to).
    pub fn new() -> Option<OwnProcess> {
        let own = OwnProcess(getpid());
        let (mut from, mut into) = (1u64, [0u8; 8]);
        let iova = (&raw mut from).expose_provenance() as u64;
        let copies = process_memory::read(own.0, iova, &mut into) == Ok(into.len());
        (copies && own.word(iova).is_ok()).then_some(own)
    }
}

impl RemoteMemory for OwnProcess {
    fn covers(&self, iova: u64, len: u64) -> bool {
        iova.checked_add(len).is_some()
    }

    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        let copied = process_memory::read(self.0, iova, into);
        (copied == Ok(into.len())).then_some(()).ok_or(Unreachable)
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Unreachable> {
        let copied = process_memory::write(self.0, iova, from);
        (copied == Ok(from.len())).then_some(()).ok_or(Unreachable)
    }

    fn word(&self, iova: u64) -> Result<RemoteWord<'_>, Unreachable> {
        let word: *mut u64 = std::ptr::with_exposed_provenance_mut(iova as usize);
        let there = resident::populate(word.addr() & !(PAGE - 1), PAGE, true);
        let word = there.ok().and_then(|()| Word64::new(word));
        word.map(RemoteWord::InPlace).ok_or(Unreachable)
    }
}
