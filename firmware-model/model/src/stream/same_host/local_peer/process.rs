//! The processes whose memory this one may access.

use crate::host::{lives, may_be_accessed, number_of, process_memory, proof_of_access};
use crate::memory::{ForeignTable, Permitted};
use crate::stream::descriptor::Descriptor;
use crate::stream::same_host::messages::TableMessage;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::Pid;

/// A process on this host that lets us access its memory, for one of its devices.
#[derive(Debug)]
pub(in crate::stream) struct PeerProcess {
    pub(in crate::stream::same_host) number: Pid,
    /// Readable when it has ended.
    life: Descriptor,
    pub(super) table: ForeignTable,
    /// The address of the table in the process.
    address: u64,
    /// The process of the device's host, if its memory is in reach, too.
    host: Option<Host>,
}

/// A process that has memory of another device.
#[derive(Debug)]
struct Host {
    number: Pid,
    life: Descriptor,
}

impl Host {
    /// The process whose pidfd the peer passed, if the peer has shown that it may reach it, too:
    /// otherwise it could have this process access memory for it.
    fn open(life: Descriptor, proof: u64, challenge: &[u8]) -> Result<Host, Errno> {
        let number = number_of(life.as_fd()).ok_or(Errno::SRCH)?;
        may_be_accessed(number)?;
        let proven = proof_of_access(number, challenge) == Some(proof);
        proven.then_some(Host { number, life }).ok_or(Errno::PERM)
    }
}

/// The parts of a disclosure: what a peer passed to let us access its memory.
#[derive(Debug)]
pub(in crate::stream::same_host) struct PassedTable<'a> {
    pub(in crate::stream::same_host) message: TableMessage,
    /// The table, which is known to be sealed memory.
    pub(in crate::stream::same_host) file: &'a Descriptor,
    /// The pidfd of the process of its host.
    pub(in crate::stream::same_host) host: Option<Descriptor>,
    /// The value by which the peer proves that it may access that process.
    pub(in crate::stream::same_host) challenge: &'a [u8],
}

impl PeerProcess {
    /// The process has this number, and `life` is its pidfd.
    ///
    /// # Errors
    /// The process's memory cannot be accessed: it is in another pid namespace, or the system does
    /// not permit it (ptrace(2), "Ptrace access mode checking"; seccomp(2)).
    pub(in crate::stream::same_host) fn open(
        number: Pid,
        life: Descriptor,
        passed: PassedTable<'_>,
    ) -> Result<PeerProcess, Errno> {
        let PassedTable {
            message,
            file,
            host,
            challenge,
        } = passed;
        let host = host.zip(message.host_proof).and_then(|(life, proof)| {
            Host::open(life, proof, challenge)
                .inspect_err(|errno| tracing::debug!(%errno, "the memory of the peer's host is out of reach"))
                .ok()
        });
        let process = PeerProcess {
            number,
            life,
            table: ForeignTable::open(file.as_fd(), message.slots)?,
            address: message.address,
            host,
        };
        process.prove()?;
        Ok(process)
    }

    /// Checks that the process with this number has the table: it is the peer's process, and runs
    /// the program that made the table (the table does not survive execve(2)).
    fn prove(&self) -> Result<(), Errno> {
        let (expected, address) = self.proof();
        let mut found = [0u8; 8];
        let read = process_memory::read(self.number, address, &mut found)?;
        let proven = read == found.len() && u64::from_ne_bytes(found) == expected;
        proven.then_some(()).ok_or(Errno::SRCH)
    }

    /// A number that only the program has that made the table, and its address there.
    #[inline]
    pub(in crate::stream::same_host) fn proof(&self) -> (u64, u64) {
        let (number, at) = self.table.proof();
        (number, self.address.wrapping_add(at as u64))
    }

    /// Whether the process has not ended, nor run another program since; and that of its host has
    /// not ended.
    pub(in crate::stream::same_host) fn is_there(&self) -> bool {
        let host_lives = self.host.as_ref().is_none_or(|host| lives(host.life.as_fd()));
        lives(self.life.as_fd()) && host_lives && self.prove().is_ok()
    }

    /// The process that has the bytes of an access, if it is in reach.
    #[inline]
    pub(super) fn of(&self, permitted: &Permitted<'_>) -> Option<Pid> {
        match permitted.is_at_host {
            false => Some(self.number),
            true => self.host.as_ref().map(|host| host.number),
        }
    }
}
