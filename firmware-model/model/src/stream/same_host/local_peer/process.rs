//! The processes whose memory this one may access.

use crate::host::{
    ForeignMapping, Mapping, Origin, fault, lives, may_be_accessed, number_of, process_memory,
    proof_of_access,
};
use crate::memory::{ForeignTable, Permitted};
use crate::stream::descriptor::Descriptor;
use crate::stream::same_host::messages::TableMessage;
use crate::tuning::MAP_AFTER_ACCESSES;
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::Pid;
use std::collections::HashMap;
use std::sync::Arc;
use urnic_sync::Mutex;

/// A process on this host that lets us access its memory, for one of its devices.
#[derive(Debug)]
pub(in crate::stream) struct PeerProcess {
    pub(in crate::stream::same_host) number: Pid,
    /// Readable when it has ended.
    life: Descriptor,
    pub(super) table: ForeignTable,
    /// The address of the table in the process.
    address: u64,
    /// Memory of the process that is mapped here.
    pub(super) mappings: RegionMappings,
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
            mappings: RegionMappings::default(),
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
    pub(super) fn is_there(&self) -> bool {
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

// Memory of a peer's process that this one has mapped as well: if the peer registered memory that
// other processes can map, a Write or a Read is a plain copy.
//
// The search takes longer than many system calls, so it is made only for entries of the peer's
// table that are used repeatedly.

/// Most entries of a peer's table that are known.
const KNOWN: usize = 1024;

/// The memory of an entry, as it is mapped here.
#[derive(Debug, Clone)]
pub(super) struct RegionMapping {
    mapping: Arc<ForeignMapping>,
    /// The address of the entry's memory in the peer's process; its offset in the mapping follows
    /// from this.
    there: u64,
    at: u64,
    len: u64,
}

impl RegionMapping {
    /// The `len` bytes that are at `address` in the peer's process.
    #[inline]
    pub(super) fn part(&self, address: u64, len: usize) -> Option<Mapping> {
        let from = address.checked_sub(self.there)?;
        let fits = from <= self.len && len as u64 <= self.len - from;
        fits.then(|| self.mapping.part((self.at + from) as usize, len))
    }
}

/// The peer's process.
pub(super) struct Peer<'a> {
    pub(super) number: Pid,
    pub(super) table: &'a ForeignTable,
    /// Whether the process has neither ended nor executed another program.
    pub(super) is_there: &'a dyn Fn() -> bool,
}

/// The knowledge about an entry.
#[derive(Debug, Clone)]
enum Known {
    /// The entry was accessed this number of times, and its mapping was not searched.
    Used(u32),
    /// Its memory can, or cannot, be mapped here.
    Searched(Option<RegionMapping>),
}

/// The knowledge about the entries of a peer's table, with the states that the entries had.
#[derive(Debug, Default)]
pub(super) struct RegionMappings(Mutex<HashMap<u32, (u64, Known)>>);

impl RegionMappings {
    /// Notes an access to an entry; `None`: it is not known yet whether its memory can be mapped
    /// here.
    #[cold]
    fn note(&self, peer: &Peer<'_>, permitted: &Permitted<'_>) -> Option<Option<RegionMapping>> {
        let Peer {
            number,
            table,
            is_there,
        } = peer;
        let (slot, state) = (permitted.slot, permitted.condition.value);
        let mut known = self.0.lock();
        let used = match known.get_mut(&slot) {
            Some((of, Known::Searched(mapped))) if *of == state => return Some(mapped.clone()),
            Some((of, Known::Used(used))) if *of == state => {
                *used += 1;
                *used
            }
            _ => 1,
        };
        let new = if used < MAP_AFTER_ACCESSES {
            if known.len() >= KNOWN {
                known.clear();
            }
            Known::Used(used)
        } else {
            // Memory that was deregistered must not stay mapped here.
            known.retain(|slot, (state, _)| table.state(*slot) == *state);
            let mapped = find(*number, table.extent(slot), &known);
            // A number may be used again, and a process may run another program.
            Known::Searched(mapped.filter(|_| is_there()))
        };
        let looked = match &new {
            // The result belongs to this entry only if the entry has not changed since.
            Known::Searched(mapped) if table.state(slot) == state => Some(mapped.clone()),
            _ => None,
        };
        known.insert(slot, (state, new));
        looked
    }
}

/// Maps the `len` bytes at `there` of a process, unless that was done for another entry.
fn find(process: Pid, (there, len): (u64, u64), known: &HashMap<u32, (u64, Known)>) -> Option<RegionMapping> {
    // The peer may truncate a file.
    if !fault::is_in_place(libc::SIGBUS) {
        return None;
    }
    let origin = Origin::find(process, there, len)?;
    let skip = there - origin.start();
    let has_it = |(_, known): &(u64, Known)| match known {
        Known::Searched(Some(mapped)) if mapped.mapping.contains(&origin) => Some(mapped.mapping.clone()),
        _ => None,
    };
    let mapping = known.values().find_map(has_it);
    let mapping = match mapping {
        Some(mapping) => mapping,
        None => Arc::new(ForeignMapping::open(process, origin.clone())?),
    };
    let at = mapping.place_of(&origin) + skip;
    tracing::debug!("{len} bytes at {there:#x} of process {process} are mapped here");
    Some(RegionMapping {
        mapping,
        there,
        at,
        len,
    })
}

/// The entry that a connection accessed last, in the state that it had then.
#[derive(Debug, Default)]
pub(super) struct LastMapping {
    key: (u32, u64),
    mapped: Option<RegionMapping>,
}

impl LastMapping {
    #[inline]
    pub(super) fn is_mapped(&self, slot: u32) -> bool {
        self.mapped.is_some() && self.key.0 == slot
    }

    /// The memory of an entry, if it is mapped here.
    #[inline]
    pub(super) fn of(
        &mut self,
        mappings: &RegionMappings,
        peer: &Peer<'_>,
        permitted: &Permitted<'_>,
    ) -> Option<&RegionMapping> {
        // No entry has state 0.
        let key = (permitted.slot, permitted.condition.value);
        if self.key != key {
            let mapped = mappings.note(peer, permitted)?;
            *self = LastMapping { key, mapped };
        }
        self.mapped.as_ref()
    }
}
