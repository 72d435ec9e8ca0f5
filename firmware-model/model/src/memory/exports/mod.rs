//! The table of STags as peers on this host read it, who then place Writes and fetch Reads by
//! themselves; and the guards by which a revocation waits for them.
//!
//! The owner of the table publishes each change of an entry. A peer that accesses memory
//!
//! 1. sets its guard: it is about to access;
//! 2. checks the entry and its permit, and makes the access only if neither has changed since
//!    ([`revocable`](crate::host::revocable));
//! 3. clears its guard.
//!
//! A revocation changes the entry (or the permit) and then waits for the guards that are set. A
//! peer that sets its guard later finds the change. A peer that does not continue (it was stopped,
//! or killed) is not waited for: if it had not entered the system call, it will not do so with the
//! old permission, and inside the call it cannot be stopped; nor does a plain copy, of memory that
//! both have mapped, go on with the old permission. Peers are processes of the same user that may
//! trace this one: one that says for ever that it is in an access holds a revocation up for
//! [`PATIENCE`], once.

mod foreign;
mod layout;

use super::backing::Place;
use super::entry::Entry;
use super::permutation::{DOMAIN, Permutation};
use crate::handshakes;
use crate::host::{HostProcess, SharedMemory, process_memory};
use crate::sys;
pub(crate) use foreign::{ForeignTable, LastEntry, OwnGuard, Permitted};
use layout::{
    ADDRESS, BASE, ENTRY, HEADER, KEYS, LEN, OF_DEVICE, OF_HOST, PROCESS, PROOF, QID_ACCESS, STAG_PD, STATE,
    pair, table_len,
};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use urnic_device::vocabulary::Access;

/// The longest wait for an access that a running thread seems to be in. An access copies 1 MiB at
/// most, so a guard that is set for so long is none of an access.
const PATIENCE: Duration = Duration::from_secs(5);
/// Looks at a guard between two looks at the state of the thread that set it.
const LOOKS: u32 = 64;

/// The owner's side of the table.
#[derive(Debug)]
pub(crate) struct Exports {
    memory: SharedMemory,
    slots: u32,
    /// The host's process, if regions there are in the table.
    host: Option<Arc<HostProcess>>,
    guards: Mutex<Guards>,
}

#[derive(Debug, Default)]
struct Guards {
    last: u64,
    set: HashMap<u64, Guard>,
}

/// Where a peer says that it accesses memory.
#[derive(Debug, Clone)]
struct Guard {
    memory: Arc<SharedMemory>,
    at: usize,
    process: Pid,
    /// It was set for too long: what it says means nothing any more.
    is_void: Arc<AtomicBool>,
}

impl Guard {
    /// The word at `at` of `memory`, which a process sets.
    fn new(memory: &Arc<SharedMemory>, at: usize, process: Pid) -> Guard {
        let memory = memory.clone();
        Guard {
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
        let value = handshakes::guard_after_revocation(self.memory.word64(self.at));
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
                    tracing::warn!(?process, "a peer says without end that it accesses memory");
                    self.is_void.store(true, Ordering::Relaxed);
                    return;
                }
            }
            rustix::thread::sched_yield();
        }
    }
}

/// Whether a thread of a process is not inside of a copy, and will not get there with a permission
/// that it checked before: it is dead or stopped, or sleeps in another system call. In a copy a
/// thread runs, or sleeps uninterruptibly; or interruptibly, where its own memory is on demand
/// (userfaultfd(2)). What is not known for certain is not assumed.
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

impl Exports {
    /// A table without entries, and the descriptor by which peers read it.
    pub(super) fn new(
        slots: u32,
        permutation: &Permutation,
        proof: u64,
        host: Option<Arc<HostProcess>>,
    ) -> Result<(Exports, OwnedFd), Errno> {
        let slots = slots.min(DOMAIN);
        let (memory, file) = SharedMemory::create_for_readers("urnic-stags", table_len(slots))?;
        memory.word64(PROOF).store(proof, Ordering::Relaxed);
        for (n, key) in permutation.keys().into_iter().enumerate() {
            memory.word64(KEYS + 8 * n).store(key, Ordering::Relaxed);
        }
        let guards = Mutex::default();
        Ok((
            Exports {
                memory,
                slots,
                host,
                guards,
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

    /// Where the table is in this process.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address() as u64
    }

    /// Publishes what a slot refers to. The caller has a lock against other changes.
    pub(super) fn publish(&self, slot: u32, entry: Option<&Entry>) {
        if slot >= self.slots {
            return;
        }
        let at = HEADER + slot as usize * ENTRY;
        let word = |offset| self.memory.word64(at + offset);
        let state = word(STATE).load(Ordering::Relaxed);
        // Odd states are valid; none comes twice.
        let invalid = (state + 1) & !1;
        if state != invalid {
            word(STATE).store(invalid, Ordering::SeqCst);
        }
        // Who reads any of what follows finds the entry changed.
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

    fn guards(&self) -> MutexGuard<'_, Guards> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no peer is in an access that it began before something was revoked.
    pub(super) fn wait(&self) {
        let is_set = |guard: &&Guard| handshakes::guard_after_revocation(guard.memory.word64(guard.at)) != 0;
        let set: Vec<Guard> = (self.guards().set.values()).filter(is_set).cloned().collect();
        let until = Instant::now() + PATIENCE;
        set.iter().for_each(|guard| guard.wait(until));
    }

    /// Lets a peer access memory from now on: `process`, whose guard is the word at `guard` of
    /// `memory` and whose permit is the one at `permit`.
    pub(crate) fn admit(
        self: &Arc<Self>,
        process: Pid,
        memory: &Arc<SharedMemory>,
        guard: usize,
        permit: usize,
    ) -> Admission {
        let mut guards = self.guards();
        guards.last += 1;
        let number = guards.last;
        let memory = memory.clone();
        guards.set.insert(number, Guard::new(&memory, guard, process));
        drop(guards);
        Admission {
            exports: self.clone(),
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
    exports: Arc<Exports>,
    number: u64,
    memory: Arc<SharedMemory>,
    permit: usize,
    /// A forked child has a copy, which is not its own.
    owner: Pid,
}

impl Admission {
    /// Sets what the peer may do: accesses of these rights, to memory of domain `pd`. The local
    /// right is that of filling receives.
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
        let guard = self.exports.guards().set.get(&self.number).cloned();
        if let Some(guard) = guard {
            guard.wait(Instant::now() + PATIENCE);
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
        self.exports.guards().set.remove(&self.number);
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

    /// Memory with a guard that says: this thread of this process is in an access.
    fn guard(process: Pid, thread: u32) -> Guard {
        let memory = Arc::new(SharedMemory::create("guard", 4096).unwrap().0);
        memory.word64(0).store(pair(1, thread), Ordering::Relaxed);
        Guard::new(&memory, 0, process)
    }

    fn guard_of(child: &Child) -> Guard {
        let process = Pid::from_child(child);
        guard(process, child.id())
    }

    fn state(child: &Child) -> char {
        let path = format!("/proc/{0}/task/{0}/stat", child.id());
        let stat = std::fs::read_to_string(path).unwrap_or_default();
        let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        rest.chars().next().unwrap_or('-')
    }

    #[test]
    fn shm_11_a_thread_that_runs_is_waited_for() {
        let guard = guard(getpid(), gettid().as_raw_nonzero().get().cast_unsigned());
        let accessed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                guard.wait(later());
                assert!(accessed.load(Ordering::SeqCst), "the access had not ended");
            });
            // Runs, without a system call, for longer than many looks.
            for n in 0..20_000_000u64 {
                std::hint::black_box(n);
            }
            accessed.store(true, Ordering::SeqCst);
            guard.memory.word64(0).store(0, Ordering::Release);
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
        let guard = guard_of(&child);
        crate::testing::mock::wait_for("a loop", || (state(&child) == 'R').then_some(()));
        kill_process(process, Signal::STOP).unwrap();
        crate::testing::mock::wait_for("its stop", || (state(&child) == 'T').then_some(()));
        guard.wait(later());
        assert_ne!(guard.value(), 0);
        child.kill().unwrap();
        guard.wait(later());
        child.wait().unwrap();
        guard.wait(later());
    }

    #[test]
    fn shm_11_a_thread_that_sleeps_elsewhere_is_not_waited_for() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let guard = guard_of(&child);
        crate::testing::mock::wait_for("its sleep", || (state(&child) == 'S').then_some(()));
        guard.wait(later());
        assert_ne!(guard.value(), 0);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn shm_11_a_thread_that_never_was_is_not_waited_for() {
        let own = gettid().as_raw_nonzero().get().cast_unsigned();
        for thread in [0, u32::MAX, i32::MAX.cast_unsigned(), 1 << 31, own | 1 << 31] {
            let guard = guard(getpid(), thread);
            guard.wait(later());
            assert_ne!(guard.value(), 0, "{thread}");
            assert!(!guard.is_void.load(Ordering::Relaxed), "{thread}");
        }
    }

    /// It is waited for once only.
    #[test]
    fn shm_11_a_wait_for_an_access_without_end_ends() {
        let own = gettid().as_raw_nonzero().get().cast_unsigned();
        let guard = guard(getpid(), own);
        // The thread that the guard names is this one: it runs.
        guard.wait(Instant::now());
        assert!(guard.is_void.load(Ordering::Relaxed));
        guard.clone().wait(later());
    }

    #[test]
    fn shm_11_a_later_access_is_not_waited_for() {
        let guard = guard(getpid(), gettid().as_raw_nonzero().get().cast_unsigned());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| guard.wait(later()));
            let mut turn = 1;
            crate::testing::mock::wait_for("the end of the wait", || {
                turn += 1;
                guard.memory.word64(0).store(pair(turn, 1), Ordering::SeqCst);
                waiter.is_finished().then_some(())
            });
        });
    }
}
