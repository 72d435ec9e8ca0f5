//! The processes whose memory this one reaches.

use crate::host::process_memory;
use crate::memory::ForeignTable;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A process on this host that lets us reach its memory, for one device of it.
#[derive(Debug)]
pub(in crate::stream) struct PeerProcess {
    pub(super) number: Pid,
    /// Readable when it has ended.
    life: Descriptor,
    pub(super) table: ForeignTable,
}

/// What a peer says about its table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::stream) struct TableMessage {
    /// Its process.
    pub(in crate::stream) process: u32,
    /// Entries of its table.
    pub(in crate::stream) slots: u32,
    /// Where the table is in its process.
    pub(in crate::stream) address: u64,
}

impl PeerProcess {
    /// # Errors
    /// The process's memory is out of reach: it is in another pid namespace, or the system does not
    /// let us (ptrace(2), "Ptrace access mode checking"; seccomp(2)).
    fn open(
        number: Pid,
        file: &Descriptor,
        message: TableMessage,
        descriptors: &Arc<Descriptors>,
    ) -> Result<PeerProcess, Errno> {
        let life = descriptors.adopt(pidfd_open(number, PidfdFlags::empty())?)?;
        let table = ForeignTable::open(file.as_fd(), message.slots)?;
        // The process with this number here is the one that has the table.
        let (expected, at) = table.proof();
        let mut found = [0u8; 8];
        let address = message.address.wrapping_add(at as u64);
        if process_memory::read(number, address, &mut found)? != found.len()
            || u64::from_ne_bytes(found) != expected
        {
            return Err(Errno::SRCH);
        }
        Ok(PeerProcess { number, life, table })
    }

    /// Whether the process has not ended.
    pub(super) fn is_alive(&self) -> bool {
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.life, PollFlags::IN)];
        poll(&mut fds, Some(&at_once)) == Ok(0)
    }
}

/// The processes that the device's connections reach, by the files of their tables.
#[derive(Debug, Default)]
pub(in crate::stream) struct PeerProcesses {
    by_file: Mutex<HashMap<(u64, u64), Weak<PeerProcess>>>,
}

impl PeerProcesses {
    pub(in crate::stream) fn open(
        &self,
        number: Pid,
        file: &Descriptor,
        message: TableMessage,
        descriptors: &Arc<Descriptors>,
    ) -> Result<Arc<PeerProcess>, Errno> {
        let stat = fstat(file)?;
        let mut by_file = self.by_file.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (stat.st_dev, stat.st_ino);
        if let Some(known) = by_file.get(&key).and_then(Weak::upgrade)
            && known.number == number
        {
            return Ok(known);
        }
        by_file.retain(|_, process| process.strong_count() > 0);
        let process = Arc::new(PeerProcess::open(number, file, message, descriptors)?);
        by_file.insert(key, Arc::downgrade(&process));
        Ok(process)
    }
}
