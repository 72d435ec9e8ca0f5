//! The remote-access table: the table of STags as local peers read it, before they place Writes and
//! fetch Reads themselves; and the hazard flags by which a revocation waits for these accesses.
//!
//! The owner of the table publishes each change of an entry. A peer that accesses memory
//!
//! 1. sets its hazard flag;
//! 2. checks the entry and its permit, and makes the access only if neither has changed since
//!    ([`revocable`](crate::host::revocable));
//! 3. clears its hazard flag.
//!
//! A revocation changes the entry (or the permit) and then waits for the hazard flags that are set.
//! A peer that sets its flag later finds the change. The revocation does not wait for a peer that
//! was stopped or killed: if it had not entered the system call, it will not do so with the old
//! permission, and inside the call it cannot be stopped. Peers are processes of the same user that
//! may trace this one: a peer that never clears its flag delays one revocation, by [`PATIENCE`].

use super::backing::Place;
use super::entry::{Entry, MemoryAccess, Need};
use super::permutation::{DOMAIN, Permutation};
use crate::host::revocable::Condition;
use crate::host::{HostProcess, SharedMemory, process_memory};
use crate::{handshakes, sys};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};
use urnic_device::vocabulary::Access;
use urnic_sync::{Mutex, MutexGuard};

/// The longest wait for an access that a running thread seems to make. An access copies 1 MiB at
/// most, so a flag that is set for longer does not belong to an access.
const PATIENCE: Duration = Duration::from_secs(5);
/// Reads of a hazard flag between two checks of the thread that set it.
const LOOKS: u32 = 64;

/// The owner's side of the table.
#[derive(Debug)]
pub(crate) struct RemoteAccessTable {
    memory: SharedMemory,
    slots: u32,
    /// The host's process, if regions there are in the table.
    host: Option<Arc<HostProcess>>,
    flags: Mutex<HazardFlags>,
}

#[derive(Debug, Default)]
struct HazardFlags {
    last: u64,
    set: HashMap<u64, HazardFlag>,
}

/// A peer's hazard flag.
#[derive(Debug, Clone)]
struct HazardFlag {
    memory: Arc<SharedMemory>,
    at: usize,
    process: Pid,
    /// The flag was set for too long, and is ignored from now on.
    is_void: Arc<AtomicBool>,
}

impl HazardFlag {
    /// The word at `at` of `memory`, which `process` sets.
    fn new(memory: &Arc<SharedMemory>, at: usize, process: Pid) -> HazardFlag {
        let memory = memory.clone();
        HazardFlag {
            memory,
            at,
            process,
            is_void: Arc::default(),
        }
    }

    fn value(&self) -> u64 {
        self.memory.word64(self.at).load(Ordering::SeqCst)
    }

    /// Waits until the peer is not in an access that it had begun, or until a time.
    fn wait(&self, until: Instant) {
        let value = handshakes::hazard_after_revocation(self.memory.word64(self.at));
        if value == 0 || self.is_void.load(Ordering::Relaxed) {
            return;
        }
        let mut looks = 0u32;
        while self.value() == value {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                if is_halted(self.process, value as u32) {
                    return;
                }
                if Instant::now() > until {
                    let process = self.process;
                    tracing::warn!(
                        ?process,
                        "a peer does not clear its hazard flag, which is ignored from now on"
                    );
                    self.is_void.store(true, Ordering::Relaxed);
                    return;
                }
            }
            rustix::thread::sched_yield();
        }
    }
}

/// Whether a thread of a process is not in a copy, and will not start one with a permission that it
/// checked before: it is dead or stopped, or sleeps in another system call. In a copy a thread
/// runs, or sleeps uninterruptibly; or interruptibly, if its own memory is on demand
/// (userfaultfd(2)). `false` if its state is not certain.
fn is_halted(process: Pid, thread: u32) -> bool {
    if !sys::has_thread(process, thread) {
        return true;
    }
    let read = |file| {
        let path = format!("/proc/{}/task/{thread}/{file}", process.as_raw_nonzero());
        std::fs::read_to_string(path).unwrap_or_default()
    };
    // proc_pid_stat(5), field 3.
    let stat = read("stat");
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    match state {
        Some('T' | 't' | 'Z' | 'X') => true,
        Some('S') => {
            let call = read("syscall");
            let number = call.split_whitespace().next().and_then(|n| n.parse().ok());
            number.is_some_and(|number| !process_memory::is_copy(number))
        }
        _ => false,
    }
}

impl RemoteAccessTable {
    /// A table without entries, and the descriptor by which peers read it.
    pub(super) fn new(
        slots: u32,
        permutation: &Permutation,
        proof: u64,
        host: Option<Arc<HostProcess>>,
    ) -> Result<(RemoteAccessTable, OwnedFd), Errno> {
        let slots = slots.min(DOMAIN);
        let (memory, file) = SharedMemory::create_for_readers("urnic-stags", table_len(slots))?;
        memory.word64(PROOF).store(proof, Ordering::Relaxed);
        for (n, key) in permutation.keys().into_iter().enumerate() {
            memory.word64(KEYS + 8 * n).store(key, Ordering::Relaxed);
        }
        let flags = Mutex::default();
        Ok((
            RemoteAccessTable {
                memory,
                slots,
                host,
                flags,
            },
            file,
        ))
    }

    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// The host's process, in which some regions may be.
    pub(crate) fn host(&self) -> Option<&HostProcess> {
        self.host.as_deref()
    }

    /// The address of the table in this process.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address() as u64
    }

    /// Publishes the entry of a slot. The caller holds a lock against other changes.
    pub(super) fn publish(&self, slot: u32, entry: Option<&Entry>) {
        if slot >= self.slots {
            return;
        }
        let at = HEADER + slot as usize * ENTRY;
        let word = |offset| self.memory.word64(at + offset);
        let state = word(STATE).load(Ordering::Relaxed);
        // Odd states are valid; no state is used twice.
        let invalid = (state + 1) & !1;
        if state != invalid {
            word(STATE).store(invalid, Ordering::SeqCst);
        }
        // A reader that sees any of the following stores finds the state changed.
        fence(Ordering::Release);
        let Some((entry, place)) = entry.and_then(|e| Some((e, e.backing.place(e.start, e.len)?))) else {
            return;
        };
        let (process, address) = match place {
            Place::Here(address) => (OF_DEVICE, address),
            Place::AtHost(address) => (OF_HOST, address),
        };
        // Receives are not placed through windows.
        let local = match entry.is_window {
            true => Access::LOCAL_WRITE,
            false => Access::empty(),
        };
        let access = (entry.access - local).bits();
        let qid = entry.qid.unwrap_or(0);
        word(STAG_PD).store(pair(entry.stag, entry.pd), Ordering::Relaxed);
        word(QID_ACCESS).store(pair(qid, access), Ordering::Relaxed);
        word(BASE).store(entry.base, Ordering::Relaxed);
        word(LEN).store(entry.len, Ordering::Relaxed);
        word(ADDRESS).store(address, Ordering::Relaxed);
        word(PROCESS).store(process, Ordering::Relaxed);
        word(STATE).store(invalid + 1, Ordering::Release);
    }

    fn flags(&self) -> MutexGuard<'_, HazardFlags> {
        self.flags.lock()
    }

    /// Waits until the accesses that peers began before a revocation have ended.
    pub(super) fn wait(&self) {
        let is_set =
            |flag: &&HazardFlag| handshakes::hazard_after_revocation(flag.memory.word64(flag.at)) != 0;
        let set: Vec<HazardFlag> = (self.flags().set.values()).filter(is_set).cloned().collect();
        let until = Instant::now() + PATIENCE;
        set.iter().for_each(|flag| flag.wait(until));
    }

    /// Permits a peer's accesses from now on: `process`, whose hazard flag is the word at `flag`
    /// of `memory` and whose permit is the word at `permit`.
    pub(crate) fn admit(
        self: &Arc<Self>,
        process: Pid,
        memory: &Arc<SharedMemory>,
        flag: usize,
        permit: usize,
    ) -> Admission {
        let mut flags = self.flags();
        flags.last += 1;
        let number = flags.last;
        let memory = memory.clone();
        flags.set.insert(number, HazardFlag::new(&memory, flag, process));
        drop(flags);
        Admission {
            table: self.clone(),
            number,
            memory,
            permit,
            owner: getpid(),
        }
    }
}

/// The permission of a peer to access memory through a connection. When it is dropped, the peer
/// does not access memory any more.
#[derive(Debug)]
pub(crate) struct Admission {
    table: Arc<RemoteAccessTable>,
    number: u64,
    memory: Arc<SharedMemory>,
    permit: usize,
    /// A forked child has a copy, which is not its own.
    owner: Pid,
}

impl Admission {
    /// Sets the peer's permit: accesses with these rights, to memory of domain `pd`. The local
    /// right permits filling receives.
    pub(crate) fn permit(&self, pd: u32, rights: Access) {
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let rights = rights & (remote | Access::LOCAL_WRITE);
        let permit = self.memory.word64(self.permit);
        let value = match rights.is_empty() {
            true => 0,
            false => pair(pd, rights.bits()),
        };
        if permit.swap(value, Ordering::SeqCst) != value {
            self.wait();
        }
    }

    fn wait(&self) {
        let flag = self.table.flags().set.get(&self.number).cloned();
        if let Some(flag) = flag {
            flag.wait(Instant::now() + PATIENCE);
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if getpid() != self.owner {
            return;
        }
        self.memory.word64(self.permit).store(0, Ordering::SeqCst);
        self.wait();
        self.table.flags().set.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, kill_process};
    use rustix::thread::gettid;
    use std::process::{Child, Command};

    /// A time that no test reaches.
    fn later() -> Instant {
        Instant::now() + Duration::from_secs(1000)
    }

    /// Memory with a hazard flag: this thread of this process is in an access.
    fn flag(process: Pid, thread: u32) -> HazardFlag {
        let memory = Arc::new(SharedMemory::create("flag", 4096).unwrap().0);
        memory.word64(0).store(pair(1, thread), Ordering::Relaxed);
        HazardFlag::new(&memory, 0, process)
    }

    fn flag_of(child: &Child) -> HazardFlag {
        let process = Pid::from_child(child);
        flag(process, child.id())
    }

    fn state(child: &Child) -> char {
        let path = format!("/proc/{0}/task/{0}/stat", child.id());
        let stat = std::fs::read_to_string(path).unwrap_or_default();
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        rest.chars().next().unwrap_or('-')
    }

    #[test]
    fn shm_11_a_thread_that_runs_is_waited_for() {
        let flag = flag(getpid(), gettid().as_raw_nonzero().get().cast_unsigned());
        let accessed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                flag.wait(later());
                assert!(accessed.load(Ordering::SeqCst), "the access had not ended");
            });
            // Runs, without a system call, for longer than many checks.
            for n in 0..20_000_000u64 {
                std::hint::black_box(n);
            }
            accessed.store(true, Ordering::SeqCst);
            flag.memory.word64(0).store(0, Ordering::Release);
            waiter.join().unwrap();
        });
    }

    #[test]
    fn shm_11_a_thread_that_was_stopped_or_killed_is_not_waited_for() {
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let process = Pid::from_child(&child);
        let flag = flag_of(&child);
        crate::testing::mock::wait_for("a loop", || (state(&child) == 'R').then_some(()));
        kill_process(process, Signal::STOP).unwrap();
        crate::testing::mock::wait_for("its stop", || (state(&child) == 'T').then_some(()));
        flag.wait(later());
        assert_ne!(flag.value(), 0);
        child.kill().unwrap();
        flag.wait(later());
        child.wait().unwrap();
        flag.wait(later());
    }

    #[test]
    fn shm_11_no_wait_for_a_thread_in_another_system_call() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let flag = flag_of(&child);
        crate::testing::mock::wait_for("its sleep", || (state(&child) == 'S').then_some(()));
        flag.wait(later());
        assert_ne!(flag.value(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn shm_11_a_thread_that_never_was_is_not_waited_for() {
        let own = gettid().as_raw_nonzero().get().cast_unsigned();
        for thread in [0, u32::MAX, i32::MAX.cast_unsigned(), 1 << 31, own | 1 << 31] {
            let flag = flag(getpid(), thread);
            flag.wait(later());
            assert_ne!(flag.value(), 0, "{thread}");
            assert!(!flag.is_void.load(Ordering::Relaxed), "{thread}");
        }
    }

    /// It is waited for once only.
    #[test]
    fn shm_11_a_wait_for_an_access_without_end_ends() {
        let own = gettid().as_raw_nonzero().get().cast_unsigned();
        let flag = flag(getpid(), own);
        // The flag names this thread, which runs.
        flag.wait(Instant::now());
        assert!(flag.is_void.load(Ordering::Relaxed));
        flag.clone().wait(later());
    }

    #[test]
    fn shm_11_a_later_access_is_not_waited_for() {
        let flag = flag(getpid(), gettid().as_raw_nonzero().get().cast_unsigned());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| flag.wait(later()));
            let mut turn = 1;
            crate::testing::mock::wait_for("the end of the wait", || {
                turn += 1;
                flag.memory.word64(0).store(pair(turn, 1), Ordering::SeqCst);
                waiter.is_finished().then_some(())
            });
        });
    }
}

// The table of another process on this host.

/// Another process's table, as a peer reads it.
#[derive(Debug)]
pub(crate) struct ForeignTable {
    memory: SharedMemory,
    slots: u32,
    permutation: Permutation,
}

/// An access that the other process's table permits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permitted<'a> {
    /// The entry has not changed since.
    pub(crate) condition: Condition<'a>,
    /// The address of the bytes in the other process.
    pub(crate) address: u64,
    /// The address is in the process of the device's host, not of the device.
    pub(crate) is_at_host: bool,
}

/// A copy of the entry that was accessed last. It is valid as long as the entry has the same state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastEntry {
    /// The accessor, STag and right that the copy permits.
    key: (u32, (u64, u32), Need),
    state: u64,
    base: u64,
    len: u64,
    address: u64,
    is_at_host: bool,
    slot: u32,
}

impl LastEntry {
    /// The place of an access in the process that has the memory.
    #[inline]
    fn place(&self, access: &MemoryAccess) -> Option<u64> {
        let from_base = access.inside(self.base, self.len).ok()?;
        Some(self.address.wrapping_add(from_base))
    }
}

impl ForeignTable {
    /// # Errors
    /// It is not a table with this number of entries.
    pub(crate) fn open(file: BorrowedFd<'_>, slots: u32) -> Result<ForeignTable, Errno> {
        if slots > DOMAIN {
            return Err(Errno::INVAL);
        }
        let memory = SharedMemory::open_to_read(file, table_len(slots))?;
        let keys = [0, 1, 2, 3].map(|n| memory.word64(KEYS + 8 * n).load(Ordering::Relaxed));
        Ok(ForeignTable {
            memory,
            slots,
            permutation: Permutation::of_keys(keys),
        })
    }

    /// The number that only readers of the table know, and its place in the table.
    pub(crate) fn proof(&self) -> (u64, usize) {
        (self.memory.word64(PROOF).load(Ordering::Relaxed), PROOF)
    }

    /// Checks an access by a connection with this permit, by the rules of [`MemoryTable::check`].
    /// If it is not permitted, the request goes to the owner of the table, which has the reason.
    /// `last` belongs to the connection.
    ///
    /// [`MemoryTable::check`]: crate::memory::MemoryTable::check
    #[inline(always)]
    pub(crate) fn check(
        &self,
        last: &mut Option<LastEntry>,
        by: (u64, u32),
        access: &MemoryAccess,
    ) -> Option<Permitted<'_>> {
        let MemoryAccess { stag, need, .. } = *access;
        let key = (stag, by, need);
        let is_last = |last: &&LastEntry| last.key == key && self.state(last.slot) == last.state;
        let entry = match last.as_ref().filter(is_last) {
            Some(entry) => *entry,
            None => *last.insert(self.find(stag, by, need)?),
        };
        let address = entry.place(access)?;
        Some(Permitted {
            // The values that were read belong together if the state is still the same at the
            // access.
            condition: Condition {
                word: self.word(entry.slot, STATE),
                value: entry.state,
            },
            address,
            is_at_host: entry.is_at_host,
        })
    }

    /// The entry of an STag, if a connection with this permit may access it.
    #[inline(never)]
    fn find(&self, stag: u32, (permit, qid): (u64, u32), need: Need) -> Option<LastEntry> {
        if need == Need::LocalRead {
            return None;
        }
        let slot = self.slot(stag);
        if slot >= self.slots {
            return None;
        }
        let state = self.state(slot);
        let read = |offset| self.word(slot, offset).load(Ordering::Relaxed);
        let (stag_pd, qid_access) = (read(STAG_PD), read(QID_ACCESS));
        let (only, access) = ((qid_access >> 32) as u32, qid_access as u32);
        let rights = Access::from_bits_truncate(access & permit as u32);
        let permitted = state & 1 == 1
            && stag_pd == pair(stag, (permit >> 32) as u32)
            && (only == 0 || only == qid)
            && rights.contains(need.right().0);
        permitted.then(|| LastEntry {
            key: (stag, (permit, qid), need),
            state,
            base: read(BASE),
            len: read(LEN),
            address: read(ADDRESS),
            is_at_host: read(PROCESS) != OF_DEVICE,
            slot,
        })
    }

    /// The number of an STag's entry.
    #[inline]
    fn slot(&self, stag: u32) -> u32 {
        self.permutation.backward(stag >> 8)
    }

    #[inline]
    fn word(&self, slot: u32, offset: usize) -> &AtomicU64 {
        self.memory.word64(HEADER + slot as usize * ENTRY + offset)
    }

    /// The state of an entry.
    #[inline]
    fn state(&self, slot: u32) -> u64 {
        self.word(slot, STATE).load(Ordering::Acquire)
    }
}

/// The hazard flag of this process: set while one of its threads accesses memory of a peer.
#[derive(Debug)]
pub(crate) struct OwnHazardFlag<'a>(&'a AtomicU64);

impl<'a> OwnHazardFlag<'a> {
    /// `turn` differs from the one before.
    #[inline]
    pub(crate) fn set(word: &'a AtomicU64, turn: u32, thread: u32) -> OwnHazardFlag<'a> {
        handshakes::set_hazard(word, pair(turn, thread));
        OwnHazardFlag(word)
    }
}

impl Drop for OwnHazardFlag<'_> {
    #[inline]
    fn drop(&mut self) {
        handshakes::clear_hazard(self.0);
    }
}

// Offsets in a table.

/// Offsets in the header, and the header's length.
const PROOF: usize = 0;
const KEYS: usize = 8;
const HEADER: usize = 64;
/// Offsets in an entry, and an entry's length.
const STATE: usize = 0;
const STAG_PD: usize = 8;
const QID_ACCESS: usize = 16;
const BASE: usize = 24;
const LEN: usize = 32;
const ADDRESS: usize = 40;
const PROCESS: usize = 48;
const ENTRY: usize = 64;

/// The process that an entry's address is of: the device's, or that of its host.
const OF_DEVICE: u64 = 0;
const OF_HOST: u64 = 1;

/// A word of two numbers.
fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Bytes of a table with this number of entries.
fn table_len(slots: u32) -> usize {
    HEADER + slots as usize * ENTRY
}
