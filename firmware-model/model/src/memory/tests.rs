use super::permutation::Permutation;
use super::*;
use crate::host::HostMemory;
use crate::host::Mapping;
use crate::testing::mock::Arena;
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use urnic_device::vocabulary::Access;
use urnic_device::wqe::BindOperands;

const QID: u32 = 5;

struct Bench {
    table: MemoryTable,
    arena: Arc<Arena>,
    /// The memory of all contiguous regions.
    home: u64,
    pd: u32,
}

impl Bench {
    fn new() -> Bench {
        let table = MemoryTable::new(100_000, 1000, 100, [1, 2, 3, 4, 5]);
        let pd = table.domains().allocate().unwrap();
        let arena = Arena::new(1 << 20);
        Bench {
            table,
            home: arena.alloc(8192),
            arena,
            pd,
        }
    }

    fn registration(&self, base: u64, len: u64, access: Access) -> Registration {
        let mapping = Mapping::new(&*self.arena, self.home, len as usize, 1).unwrap();
        Registration {
            pd: self.pd,
            base,
            len,
            access,
            backing: Arc::new(Backing::Contiguous {
                mapping,
                iova: self.home,
            }),
        }
    }

    fn register(&self, base: u64, len: u64, access: Access) -> u32 {
        self.table.register(self.registration(base, len, access)).unwrap()
    }

    fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.pd,
            qid: QID,
        }
    }

    fn check(&self, stag: u32, offset: u64, len: u64, need: Need) -> Result<Window<'_>, Violation> {
        self.table.check(
            self.accessor(),
            MemoryAccess {
                stag,
                offset,
                len,
                need,
            },
        )
    }

    fn bind(&self, window: u32, region: u32, offset: u64, len: u64, access: Access) -> BindOperands {
        let mut operands = BindOperands::default();
        operands.offset = offset.into();
        operands.len = len.into();
        operands.mr_stag = region.into();
        operands.access = access.bits().into();
        operands.new_stag = window.into();
        operands
    }
}

const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::MW_BIND);

#[test]
fn no_stag_has_index_0() {
    let is_soon = |a: &u64| Permutation::new([*a; 4]).backward(0) < 100;
    let seed = (0..1 << 24)
        .find(is_soon)
        .expect("a permutation in which it is among the first");
    let bench = Bench::new();
    let table = MemoryTable::new(1000, 10, 10, [seed, seed, seed, seed, 5]);
    table.domains().allocate().unwrap();
    let stags = (0..100).map(|_| table.register(bench.registration(0, 8, ALL)).unwrap());
    let indices: HashSet<u32> = stags.map(|stag| stag >> 8).collect();
    assert_eq!((indices.len(), indices.contains(&0)), (100, false));
}

#[test]
fn sec_04_stags_are_sparse_hard_to_predict_and_come_back_late() {
    let bench = Bench::new();
    let stags: Vec<u32> = (0..10_000).map(|_| bench.register(0, 8, ALL)).collect();
    assert_eq!(stags.iter().collect::<HashSet<_>>().len(), stags.len());
    // Indices and keys are no sequence: about half of the steps go up, and few steps repeat.
    let steps: Vec<i64> = stags
        .windows(2)
        .map(|w| i64::from(w[1] >> 8) - i64::from(w[0] >> 8))
        .collect();
    let up = steps.iter().filter(|s| **s > 0).count();
    assert!((4500..5500).contains(&up), "{up}");
    assert!(steps.iter().collect::<HashSet<_>>().len() > 9900);
    let keys: HashSet<u32> = stags.iter().map(|s| s & 0xff).collect();
    assert_eq!(keys.len(), 256);
    // The indices spread over the whole range.
    let sixteenths: HashSet<u32> = stags.iter().map(|s| s >> 28).collect();
    assert_eq!(sixteenths.len(), 16);
    // Another device has other STags.
    let other = MemoryTable::new(100_000, 1000, 100, [9, 2, 3, 4, 5]);
    other.domains().allocate().unwrap();
    let first = other.register(bench.registration(0, 8, ALL)).unwrap();
    assert_ne!(first >> 8, stags[0] >> 8);
    // A freed STag is not allocated again for thousands of registrations.
    bench.table.deregister(stags[17]).unwrap();
    for _ in 0..4096 {
        let stag = bench.register(0, 8, ALL);
        assert_ne!(stag >> 8, stags[17] >> 8);
        bench.table.deregister(stag).unwrap();
    }
}

#[test]
fn a_guessed_key_or_index_is_an_invalid_stag() {
    let bench = Bench::new();
    let stag = bench.register(0x1000, 64, ALL);
    for guess in [stag ^ 1, stag ^ 0x80, stag ^ 0x100, 0, u32::MAX] {
        let refused = bench.check(guess, 0x1000, 1, Need::RemoteRead);
        assert_eq!(refused.err(), Some(Violation::InvalidStag), "{guess:#x}");
    }
    assert!(bench.check(stag, 0x1000, 1, Need::RemoteRead).is_ok());
}

#[test]
fn each_violation_has_its_own_answer_and_the_first_wins() {
    let bench = Bench::new();
    let base = u64::MAX - 0xfff;
    let stag = bench.register(base, 0x1000, Access::LOCAL_WRITE);
    let refused = |pd, offset, len, need| {
        let window = bench.table.check(
            Accessor { pd, qid: QID },
            MemoryAccess {
                stag,
                offset,
                len,
                need,
            },
        );
        window.err()
    };
    let pd = bench.pd;
    assert_eq!(refused(pd, base, 0x1000, Need::LocalWrite), None);
    assert_eq!(refused(pd, u64::MAX, 1, Need::LocalRead), None);
    assert_eq!(
        refused(pd + 1, u64::MAX, 2, Need::RemoteRead),
        Some(Violation::NotAssociated)
    );
    assert_eq!(refused(pd, u64::MAX, 2, Need::RemoteRead), Some(Violation::Wrap));
    assert_eq!(
        refused(pd, base - 1, 1, Need::RemoteRead),
        Some(Violation::Bounds)
    );
    assert_eq!(
        refused(pd, base, 0x1001, Need::LocalRead),
        Some(Violation::Wrap),
        "one byte past the last address"
    );
    for need in [Need::RemoteRead, Need::RemoteWrite, Need::RemoteAtomic] {
        assert_eq!(refused(pd, base, 1, need), Some(Violation::AccessRights));
    }
    let read_only = bench.register(0, 16, Access::empty());
    let window = bench.check(read_only, 0, 16, Need::LocalWrite);
    assert_eq!(window.err(), Some(Violation::AccessRights));
    assert!(bench.check(read_only, 0, 16, Need::LocalRead).is_ok());
    let past = bench.check(read_only, 15, 2, Need::LocalRead);
    assert_eq!(past.err(), Some(Violation::Bounds));
}

#[test]
fn a_region_that_wraps_is_refused() {
    let bench = Bench::new();
    let mut registration = bench.registration(u64::MAX, 2, ALL);
    assert_eq!(bench.table.register(registration.clone()), Err(TableError::Wrap));
    registration.base = u64::MAX - 1;
    assert!(bench.table.register(registration).is_ok());
}

#[test]
fn limits_hold_and_domains_are_busy_while_used() {
    let table = MemoryTable::new(2, 1, 1, [0; 5]);
    let pd = table.domains().allocate().unwrap();
    assert_eq!(table.domains().allocate(), None);
    let bench = Bench::new();
    let registration = Registration {
        pd,
        ..bench.registration(0, 8, ALL)
    };
    let stag = table.register(registration.clone()).unwrap();
    table.register(registration.clone()).unwrap();
    assert_eq!(table.register(registration.clone()), Err(TableError::Full));
    let window = table.create_window(pd, true).unwrap();
    assert_eq!(table.create_window(pd, true), Err(TableError::Full));
    let foreign = Registration {
        pd: pd + 1,
        ..registration.clone()
    };
    table.deregister(stag).unwrap();
    assert_eq!(table.register(foreign), Err(TableError::UnknownDomain));
    assert_eq!(table.domains().free(pd), Some(false));
    assert_eq!(table.deregister(window), Err(TableError::UnknownStag));
    table.destroy_window(window).unwrap();
    // Released pages can be used again, and no others.
    let window = table.create_window(pd, false).unwrap();
    assert_eq!(table.create_window(pd, false), Err(TableError::Full));
    table.destroy_window(window).unwrap();
    table.register(registration.clone()).unwrap();
    assert_eq!(table.register(registration), Err(TableError::Full));
    assert_eq!(table.domains().free(pd), Some(false));
    table.clear();
    assert_eq!(table.domains().free(pd), None);
}

#[test]
fn a_changed_region_keeps_its_stag_and_has_its_new_rights() {
    let bench = Bench::new();
    let stag = bench.register(0, 64, Access::empty());
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_err());
    let changed = bench.table.reregister(stag, |r| r.access = Access::REMOTE_READ);
    assert_eq!(changed, Ok(()));
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_ok());
    let moved = bench.table.reregister(stag, |r| r.pd = 99);
    assert_eq!(moved, Err(TableError::UnknownDomain));
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_ok());
    let dropped = bench.table.reregister(stag, |r| r.access = Access::empty());
    assert_eq!(dropped, Ok(()));
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_err());
}

#[test]
fn a_region_without_memory_comes_back_with_other_memory_only() {
    let bench = Bench::new();
    let stag = bench.register(0, 64, Access::empty());
    bench.table.revoke_over(bench.home + 63, 1);
    let is_invalid = |need| bench.check(stag, 0, 1, need).err() == Some(Violation::InvalidStag);
    let widened = bench.table.reregister(stag, |r| r.access = Access::REMOTE_READ);
    assert_eq!(widened, Ok(()));
    assert!(is_invalid(Need::RemoteRead) && is_invalid(Need::LocalRead));
    let other = bench.registration(0, 64, Access::empty()).backing;
    assert_eq!(bench.table.reregister(stag, |r| r.backing = other), Ok(()));
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_ok());
}

/// Sets a flag when dropped, also by a panic.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// DDP-T-08, SEC-02: after a revocation has returned, no access through the STag reads or writes
/// memory.
#[test]
fn ddp_t_08_revocation_is_final_under_concurrency() {
    let bench = Bench::new();
    let stop = AtomicBool::new(false);
    // The generation whose accesses are allowed, or 0 while none are.
    let current = AtomicU64::new(0);
    let stag = AtomicU64::new(0);
    let late = AtomicU64::new(0);
    let accesses = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let target = stag.load(Ordering::Acquire);
                    let (generation, target) = (target >> 32, target as u32);
                    let Ok(window) = bench.check(target, 0, 64, Need::RemoteWrite) else {
                        std::hint::spin_loop();
                        continue;
                    };
                    window.copy_in(0, &[generation as u8; 64]).unwrap();
                    // The access has not ended, so the revocation cannot have returned.
                    if current.load(Ordering::SeqCst) != generation {
                        late.fetch_add(1, Ordering::SeqCst);
                    }
                    drop(window);
                    accesses.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _stops_them = Stop(&stop);
        for generation in 1..400u64 {
            current.store(generation, Ordering::SeqCst);
            let new = bench.register(0, 64, ALL);
            stag.store(generation << 32 | u64::from(new), Ordering::Release);
            let before = accesses.load(Ordering::Relaxed);
            crate::testing::mock::wait_for("an access", || {
                (accesses.load(Ordering::Relaxed) > before + 2).then_some(())
            });
            bench.table.deregister(new).unwrap();
            current.store(0, Ordering::SeqCst);
        }
    });
    assert_eq!(late.load(Ordering::SeqCst), 0);
}

#[test]
fn sec_01_a_type_2_window_serves_its_queue_pair_only() {
    let bench = Bench::new();
    let region = bench.register(0x4000, 4096, ALL);
    let window = bench.table.create_window(bench.pd, true).unwrap();
    let unbound = bench.check(window, 0x4100, 1, Need::RemoteWrite);
    assert_eq!(unbound.err(), Some(Violation::InvalidStag));
    // The key may change with each bind.
    let window = window ^ 0x55;
    let bind = bench.bind(window, region, 0x4100, 16, Access::REMOTE_WRITE);
    bench.table.bind(&bind, bench.pd, QID).unwrap();
    assert!(bench.check(window, 0x4100, 16, Need::RemoteWrite).is_ok());
    assert_eq!(
        bench.check(window, 0x40ff, 1, Need::RemoteWrite).err(),
        Some(Violation::Bounds)
    );
    assert_eq!(
        bench.check(window, 0x4100, 1, Need::RemoteRead).err(),
        Some(Violation::AccessRights)
    );
    assert_eq!(
        bench.check(window, 0x4100, 1, Need::LocalRead).err(),
        Some(Violation::AccessRights),
        "a window is no lkey"
    );
    let other = bench.table.check(
        Accessor {
            pd: bench.pd,
            qid: QID + 1,
        },
        MemoryAccess {
            stag: window,
            offset: 0x4100,
            len: 1,
            need: Need::RemoteWrite,
        },
    );
    assert_eq!(other.err(), Some(Violation::NotAssociated));
    assert_eq!(
        bench.table.bind(&bind, bench.pd, QID),
        Err(BindError::AlreadyBound)
    );
}

/// VRB-M-03: a region with a window bound to it stays.
#[test]
fn vrb_m_03_a_region_is_busy_while_windows_are_bound() {
    let bench = Bench::new();
    let region = bench.register(0, 4096, ALL);
    let window = bench.table.create_window(bench.pd, true).unwrap();
    let bind = bench.bind(window, region, 0, 16, Access::REMOTE_READ);
    bench.table.bind(&bind, bench.pd, QID).unwrap();
    let table = &bench.table;
    assert_eq!(table.deregister(region), Err(TableError::Bound));
    assert_eq!(table.reregister(region, |_| {}), Err(TableError::Bound));
    for by in [InvalidateBy::Local, InvalidateBy::Peer] {
        let refused = table.invalidate(region, bench.accessor(), by, Invalidable::All);
        assert_eq!(refused, Err(InvalidateError::Bound));
    }
    table
        .invalidate(window, bench.accessor(), InvalidateBy::Peer, Invalidable::All)
        .unwrap();
    assert!(bench.check(window, 0, 1, Need::RemoteRead).is_err());
    table.deregister(region).unwrap();
    // Unbound by the end of its queue pair, too.
    let region = bench.register(0, 4096, ALL);
    let bind = bench.bind(window, region, 0, 16, Access::REMOTE_READ);
    table.bind(&bind, bench.pd, QID).unwrap();
    table.unbind_all_of(QID);
    assert!(bench.check(window, 0, 1, Need::RemoteRead).is_err());
    table.deregister(region).unwrap();
}

#[test]
fn vrb_m_03_a_bind_is_checked_against_its_region() {
    let bench = Bench::new();
    let table = &bench.table;
    let region = bench.register(0x1000, 0x1000, ALL);
    let unbindable = bench.register(0x1000, 0x1000, Access::LOCAL_WRITE);
    let read_only = bench.register(0x1000, 0x1000, Access::MW_BIND);
    let window = table.create_window(bench.pd, false).unwrap();
    let bind = |region, offset, len, access| {
        table.bind(&bench.bind(window, region, offset, len, access), bench.pd, QID)
    };
    let read = Access::REMOTE_READ;
    assert_eq!(bind(window, 0, 1, read), Err(BindError::UnknownRegion));
    assert_eq!(bind(region, 0xfff, 1, read), Err(BindError::Bounds));
    assert_eq!(bind(region, 0x1fff, 2, read), Err(BindError::Bounds));
    assert_eq!(bind(region, 0x1000, u64::MAX, read), Err(BindError::Bounds));
    assert_eq!(bind(unbindable, 0x1000, 1, read), Err(BindError::AccessRights));
    assert_eq!(
        bind(read_only, 0x1000, 1, Access::REMOTE_WRITE),
        Err(BindError::AccessRights)
    );
    let not_a_window = bench.bind(region, region, 0x1000, 1, read);
    assert_eq!(
        table.bind(&not_a_window, bench.pd, QID),
        Err(BindError::UnknownWindow)
    );
    // Type 1 is of the domain, may be bound anew, zero-based if requested, and unbound by length 0.
    bind(region, 0x1010, 8, read).unwrap();
    bind(region, 0x1020, 8, read | Access::ZERO_BASED).unwrap();
    assert!(
        table
            .check(
                Accessor {
                    pd: bench.pd,
                    qid: 99
                },
                MemoryAccess {
                    stag: window,
                    offset: 7,
                    len: 1,
                    need: Need::RemoteRead
                }
            )
            .is_ok()
    );
    assert_eq!(table.deregister(region), Err(TableError::Bound));
    bind(region, 0, 0, read).unwrap();
    assert!(
        table
            .check(
                Accessor {
                    pd: bench.pd,
                    qid: 99
                },
                MemoryAccess {
                    stag: window,
                    offset: 7,
                    len: 1,
                    need: Need::RemoteRead
                }
            )
            .is_err()
    );
    table.deregister(region).unwrap();
}

/// One atomic operation comes between the read of a word and its update by another: with memory of
/// this process the update starts again.
#[test]
fn x73_08_an_update_that_comes_in_between_is_not_lost() {
    let bench = Bench::new();
    let stags = [bench.register(0, 8, ALL), bench.register(0, 8, ALL)];
    let [one, two] = stags.map(|stag| bench.check(stag, 0, 8, Need::RemoteRead).unwrap());
    let interfered = AtomicBool::new(false);
    let before = one.update_word(0, |old| {
        if !interfered.swap(true, Ordering::Relaxed) {
            assert_eq!(two.update_word(0, |old| old + 10), Ok(0));
        }
        old + 1
    });
    assert_eq!(before, Ok(10));
    assert_eq!(bench.arena.read(bench.home, 8), 11u64.to_ne_bytes());
}

/// With memory that is reached by copies the second operation waits, also one through another
/// region over the same word.
#[test]
fn x73_08_operations_by_copies_wait_for_each_other() {
    let bench = Bench::new();
    let host: Arc<dyn HostMemory> = bench.arena.clone();
    let register = || {
        let remote = Remote::new(&host, crate::testing::mock::REMOTE + bench.home, 8).unwrap();
        let registration = Registration {
            backing: Arc::new(Backing::Remote(remote)),
            ..bench.registration(0, 8, ALL)
        };
        bench.table.register(registration).unwrap()
    };
    let stags = [register(), register()];
    let [one, two] = stags.map(|stag| bench.check(stag, 0, 8, Need::RemoteRead).unwrap());
    let (second_begins, second_ended) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let first = one.update_word(0, |old| {
            scope.spawn(|| {
                second_begins.store(true, Ordering::SeqCst);
                two.update_word(0, |old| old + 10).unwrap();
                second_ended.store(true, Ordering::SeqCst);
            });
            crate::testing::mock::wait_for("the second", || {
                second_begins.load(Ordering::SeqCst).then_some(())
            });
            // A test cannot observe that a thread waits for a lock, so it gives the thread time to
            // pass it.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            assert!(!second_ended.load(Ordering::SeqCst), "the second came in between");
            old + 1
        });
        assert_eq!(first, Ok(0));
    });
    assert_eq!(bench.arena.read(bench.home, 8), 11u64.to_ne_bytes());
}

/// SEC-03, RDM-S-04: the conditions for an invalidation.
#[test]
fn sec_03_a_peer_cannot_invalidate_what_streams_share() {
    let bench = Bench::new();
    let table = &bench.table;
    let stag = bench.register(0, 16, ALL);
    let by_peer = |stag, pd| {
        table.invalidate(
            stag,
            Accessor { pd, qid: QID },
            InvalidateBy::Peer,
            Invalidable::All,
        )
    };
    assert!(table.domains().enter(bench.pd, DomainUse::QueuePair));
    assert!(table.domains().enter(bench.pd, DomainUse::QueuePair));
    assert_eq!(by_peer(stag, bench.pd), Err(InvalidateError::Shared));
    assert!(bench.check(stag, 0, 1, Need::RemoteRead).is_ok());
    table.domains().leave(bench.pd, DomainUse::QueuePair);
    assert_eq!(by_peer(stag, bench.pd + 1), Err(InvalidateError::NotAssociated));
    assert_eq!(by_peer(stag ^ 1, bench.pd), Err(InvalidateError::InvalidStag));
    by_peer(stag, bench.pd).unwrap();
    assert!(bench.check(stag, 0, 1, Need::LocalRead).is_err());
    assert_eq!(by_peer(stag, bench.pd), Err(InvalidateError::InvalidStag));
    // The program may invalidate what is invalid (VRB-M-04), and still has to deregister.
    table
        .invalidate(stag, bench.accessor(), InvalidateBy::Local, Invalidable::All)
        .unwrap();
    table.deregister(stag).unwrap();
    assert_eq!(table.deregister(stag), Err(TableError::UnknownStag));
}

/// InfiniBand Architecture Specification vol. 1, o10-37.2.26.
#[test]
fn only_own_windows_of_type_2_can_be_invalidated_with_that_rule() {
    let bench = Bench::new();
    let table = &bench.table;
    let region = bench.register(0, 4096, ALL);
    let [one, two] = [false, true].map(|exclusive| table.create_window(bench.pd, exclusive).unwrap());
    for window in [one, two] {
        let bind = bench.bind(window, region, 0, 16, Access::REMOTE_READ);
        table.bind(&bind, bench.pd, QID).unwrap();
    }
    for by in [InvalidateBy::Local, InvalidateBy::Peer] {
        let invalidate = |stag, qid| {
            let through = Accessor { pd: bench.pd, qid };
            table.invalidate(stag, through, by, Invalidable::OwnWindows)
        };
        assert_eq!(invalidate(region, QID), Err(InvalidateError::NotInvalidable));
        assert_eq!(invalidate(one, QID), Err(InvalidateError::NotInvalidable));
        assert_eq!(invalidate(two, QID + 1), Err(InvalidateError::NotAssociated));
        assert_eq!(invalidate(two, QID), Ok(()));
        assert!(bench.check(two, 0, 1, Need::RemoteRead).is_err());
        assert!(bench.check(one, 0, 1, Need::RemoteRead).is_ok());
        assert!(bench.check(region, 0, 1, Need::RemoteRead).is_ok());
        let bind = bench.bind(two, region, 0, 16, Access::REMOTE_READ);
        table.bind(&bind, bench.pd, QID).unwrap();
    }
}

#[test]
fn atomics_need_an_aligned_word_of_memory() {
    let bench = Bench::new();
    let access = Access::REMOTE_ATOMIC | Access::LOCAL_WRITE;
    // An odd base: the alignment of the address in memory counts (RFC 7306 §5.1).
    let stag = bench.register(3, 64, access);
    let word = |at| {
        let window = bench.check(stag, at, 8, Need::RemoteAtomic).unwrap();
        window.update_word(0, |old| old + 5)
    };
    assert_eq!(word(3 + 8), Ok(0));
    assert_eq!(word(3 + 8), Ok(5));
    assert_eq!(word(3 + 9), Err(WordError::Misaligned));
    let window = bench.check(stag, 3 + 8, 8, Need::LocalRead).unwrap();
    let mut bytes = [0; 8];
    window.copy_out(0, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 10);
}

proptest! {
    /// A region of scattered pages reads and writes like a contiguous region.
    #[test]
    fn pages_behave_like_one_extent(
        skip in 0u64..4096,
        len in 1u64..20_000,
        cut in any::<(prop::sample::Index, prop::sample::Index)>(),
    ) {
        let bench = Bench::new();
        let count = (skip + len).div_ceil(4096);
        let mut iovas: Vec<u64> = (0..count).map(|_| bench.arena.alloc(4096)).collect();
        iovas.reverse();
        let page = |iova: &u64| Mapping::new(&*bench.arena, *iova, 4096, 1).unwrap();
        let backing = Backing::Pages { log_page: 12, skip, pages: iovas.iter().map(page).collect(), iovas: iovas.clone().into(), room: PageRoom::new(0).take(0).unwrap() };
        let registration = Registration {
            pd: bench.pd, base: 0x9000, len, access: ALL, backing: Arc::new(backing),
        };
        let stag = bench.table.register(registration).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31) as u8).collect();
        bench.check(stag, 0x9000, len, Need::RemoteWrite).unwrap().copy_in(0, &bytes).unwrap();
        // In its pages ...
        let mut seen = Vec::new();
        for iova in &iovas {
            seen.extend(bench.arena.read(*iova, 4096));
        }
        prop_assert_eq!(&seen[skip as usize..(skip + len) as usize], &bytes[..]);
        // ... and through any window of it, by all ways.
        let (a, b) = (cut.0.index(len as usize + 1), cut.1.index(len as usize + 1));
        let (from, to) = (a.min(b), a.max(b));
        let window = bench.check(stag, 0x9000, len, Need::RemoteRead).unwrap();
        let mut copied = vec![0; to - from];
        window.copy_out(from as u64, &mut copied).unwrap();
        prop_assert_eq!(&copied, &bytes[from..to]);
        let pieces: Vec<_> = window.extents(from as u64, (to - from) as u64).collect();
        prop_assert_eq!(pieces.iter().map(|p| p.len()).sum::<usize>(), to - from);
        let starts_mid = (skip as usize + from) % 4096;
        let expected = if to == from { 0 } else { (starts_mid + to - from).div_ceil(4096) };
        prop_assert_eq!(pieces.len(), expected);
        prop_assert!(bench.arena.reach(iovas[0], 1).is_some());
    }
}

/// Records which entries it must release.
#[derive(Default)]
struct Recorded(urnic_sync::Mutex<Vec<EntryId>>);

impl BorrowHolder for Recorded {
    fn release(&self, entry: EntryId) {
        self.0.lock().push(entry);
    }
}

#[test]
fn ddp_t_08_every_holder_releases_what_is_revoked() {
    let bench = Bench::new();
    let holders: Vec<_> = (0..3).map(|_| Arc::new(Recorded::default())).collect();
    let mut borrows: Vec<_> = holders
        .iter()
        .map(|holder| bench.table.register_borrow(holder.clone()))
        .collect();
    let revoke = || {
        let stag = bench.register(0, 16, ALL);
        let entry = bench.check(stag, 0, 1, Need::LocalRead).unwrap().entry();
        bench.table.deregister(stag).unwrap();
        entry.unwrap()
    };
    let recorded = || -> Vec<Vec<EntryId>> {
        let take = |b: &Arc<Recorded>| std::mem::take(&mut *b.0.lock());
        holders.iter().map(take).collect()
    };
    let first = revoke();
    assert_eq!(recorded(), [[first], [first], [first]]);
    // One entry has sent all of its pieces.
    drop(borrows.remove(1));
    let second = revoke();
    assert_ne!(second, first);
    assert_eq!(recorded(), [vec![second], vec![], vec![second]]);
    drop(borrows);
    revoke();
    assert_eq!(recorded(), [[]; 3] as [[EntryId; 0]; 3]);
}

#[test]
fn unmapped_bytes_are_found_to_the_byte() {
    let bench = Bench::new();
    let home = bench.home;
    let whole = Backing::Contiguous {
        mapping: Mapping::new(&*bench.arena, home, 100, 1).unwrap(),
        iova: home,
    };
    for (iova, unmapped, touched) in [
        (home - 8, 8, false),
        (home - 8, 9, true),
        (home + 50, 1, true),
        (home + 99, 1, true),
        (home + 99, 0, false),
        (home + 50, 0, false),
        (home + 100, 50, false),
        (0, u64::MAX, true),
    ] {
        let (at, found) = (iova.wrapping_sub(home) as i64, whole.touches(100, iova, unmapped));
        assert_eq!(found, touched, "{unmapped} bytes at {at}");
    }
    assert!(!whole.touches(0, home, 8), "a region of nothing");
    let address = Mapping::new(&*bench.arena, home, 100, 1).unwrap().address();
    for (at, len, place) in [
        (0, 100, Some(0)),
        (99, 100, Some(99)),
        (100, 200, None),
        (50, 50, None),
        (49, 50, Some(49)),
    ] {
        assert_eq!(whole.place_of(address + at, len), place, "byte {at} of {len}");
    }
    assert_eq!(whole.place_of(address - 1, 100), None);
}

#[test]
fn a_refusal_is_explained_in_words() {
    let bench = Bench::new();
    let read = bench.register(0x1000, 0x100, Access::REMOTE_READ);
    let written = bench.register(0x8000, 0x800, Access::REMOTE_WRITE | Access::LOCAL_WRITE);
    let other = bench.table.domains().allocate().unwrap();
    let explain = |stag, pd, offset, len| {
        let access = MemoryAccess {
            stag,
            offset,
            len,
            need: Need::RemoteWrite,
        };
        bench.table.explain(Accessor { pd, qid: QID }, access)
    };
    let pd = bench.pd;
    let nearest = format!("; nearest valid {written:#010x} covers 0x8000+2048 with REMOTE_WRITE");
    // There are two numbers in use.
    let unused = (1u32..)
        .map(|n| n << 8)
        .find(|stag| [read, written].iter().all(|used| used >> 8 != stag >> 8));
    assert_eq!(
        explain(unused.unwrap(), pd, 0x8010, 4),
        format!("no such STag{nearest}")
    );
    let keys = [read ^ 1, read].map(|stag| stag & 0xff);
    assert_eq!(
        explain(read ^ 1, pd, 0x1010, 4),
        format!(
            "wrong key {:#04x}, this memory has {:#04x}; nearest valid {read:#010x} covers 0x1000+256 without \
             REMOTE_WRITE",
            keys[0], keys[1]
        )
    );
    assert_eq!(
        explain(read, pd, 0x8000, 4),
        format!(
            "outside of the registered range: {read:#010x} covers 0x1000+256 without REMOTE_WRITE{nearest}"
        )
    );
    assert_eq!(
        explain(read, pd, 0x1000, 4),
        format!("access right missing: {read:#010x} covers 0x1000+256 without REMOTE_WRITE{nearest}")
    );
    assert_eq!(
        explain(read, other, 0x1000, 4),
        "the STag is of another protection domain"
    );
    assert_eq!(
        explain(written, pd, u64::MAX, 4),
        "tagged offset wraps; nearest valid ".to_owned()
            + &format!("{read:#010x} covers 0x1000+256 without REMOTE_WRITE")
    );
}
