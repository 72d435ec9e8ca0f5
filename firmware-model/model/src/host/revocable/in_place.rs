//! Accesses to memory that another process has mapped as well as this one, by plain loads and
//! stores and by the processor's atomic instructions; the owner of the memory can revoke them.

use super::{Condition, NotCopied};
use crate::host::{Mapping, Piece, PieceMut};
use rustix::io::Errno;

/// Most bytes of one critical section: an interrupted one begins again.
const SECTION: usize = 32 << 10;

/// An atomic operation on a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Adds a number.
    Add(u64),
    /// Stores a word where another one is.
    Swap {
        /// The word that must be there.
        expected: u64,
        /// The word that replaces it.
        new: u64,
    },
}

/// The argument of the two functions in assembly (fault/x86_64.s), which knows the offsets.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
struct CopyIf {
    first: *const std::sync::atomic::AtomicU64,
    first_value: u64,
    second: *const std::sync::atomic::AtomicU64,
    second_value: u64,
    to: *mut u8,
    from: *const u8,
    len: usize,
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn urnic_guarded_copy_if(call: *const CopyIf, rseq_cs: *mut u64) -> u32;
    fn urnic_guarded_atomic_if(call: *const CopyIf, rseq_cs: *mut u64) -> u32;
}

/// Copies a piece to the front of shared memory, which is as long or longer, if the conditions are
/// met. The last byte is stored last, and once.
///
/// # Errors
/// See [`NotCopied`]. Some of the bytes may have been copied, but not the last one.
#[inline]
pub(crate) fn write_if(
    conditions: [Condition<'_>; 2],
    to: &Mapping,
    from: Piece<'_>,
) -> Result<usize, NotCopied> {
    let len = from.len().min(to.len());
    // SAFETY: no reference points to shared memory, and it has the bytes by the line above; so has
    // the piece, which is only read.
    unsafe { copy_if(conditions, to.as_ptr(), from.as_ptr(), len) }
}

/// Fills a piece from the front of shared memory, which is as long or longer, if the conditions are
/// met.
///
/// # Errors
/// See [`NotCopied`]. Part of the piece may have been filled.
#[inline]
pub(crate) fn read_if(
    conditions: [Condition<'_>; 2],
    from: &Mapping,
    mut into: PieceMut<'_>,
) -> Result<usize, NotCopied> {
    let len = into.len().min(from.len());
    // SAFETY: as above; the piece is exclusive, or memory of the host, to which no reference
    // points.
    unsafe { copy_if(conditions, into.as_mut_ptr(), from.as_ptr(), len) }
}

/// Executes an operation on the word at the beginning of shared memory, if the conditions are met;
/// returns the word before the operation. `None`: the word is not aligned.
///
/// # Errors
/// See [`NotCopied`]. The word is as it was.
pub(crate) fn operate_if(
    conditions: [Condition<'_>; 2],
    word: &Mapping,
    operation: Operation,
) -> Option<Result<u64, NotCopied>> {
    let is_word = word.len() >= 8 && word.as_ptr().cast::<u64>().is_aligned();
    let (swaps, operands) = match operation {
        Operation::Add(number) => (0, [number, 0, 0]),
        Operation::Swap { expected, new } => (1, [expected, new, 0]),
    };
    is_word.then(|| operate(conditions, word.as_ptr(), operands, swaps))
}

/// # Safety
/// No reference of this program points into the `len` bytes at `to` and at `from`, with two
/// exceptions: the caller may hold `to` exclusively, and may hold `from` shared. Either may be
/// inaccessible.
#[inline]
unsafe fn copy_if(
    conditions: [Condition<'_>; 2],
    to: *mut u8,
    from: *const u8,
    len: usize,
) -> Result<usize, NotCopied> {
    let mut done = 0;
    while done < len {
        let n = SECTION.min(len - done);
        let (to, from) = (to.wrapping_add(done), from.wrapping_add(done));
        // SAFETY: a part of what the caller promises.
        unsafe { perform(conditions, to, from, n) }?;
        done += n;
    }
    Ok(done)
}

/// # Safety
/// Like [`copy_if`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn perform(
    conditions: [Condition<'_>; 2],
    to: *mut u8,
    from: *const u8,
    len: usize,
) -> Result<(), NotCopied> {
    let (call, rseq_cs) = prepare(conditions, to, from, len)?;
    // SAFETY: the words live until the call returns; the caller promises the bytes, and a fault at
    // one of them ends the call with 1. `rseq_cs` is this thread's to write; nobody else in the
    // process uses it across a call, and it is cleared before the return.
    outcome(unsafe { urnic_guarded_copy_if(&raw const call, rseq_cs) })
}

/// `word` is aligned.
#[cfg(target_arch = "x86_64")]
fn operate(
    conditions: [Condition<'_>; 2],
    word: *mut u8,
    mut operands: [u64; 3],
    swaps: usize,
) -> Result<u64, NotCopied> {
    let (call, rseq_cs) = prepare(conditions, word, (&raw mut operands).cast(), swaps)?;
    // SAFETY: as above; the operands are this function's, and writable. No reference points to the
    // word, but to atomics.
    outcome(unsafe { urnic_guarded_atomic_if(&raw const call, rseq_cs) })?;
    // SAFETY: a local, which the call has written.
    Ok(unsafe { (&raw const operands[2]).read() })
}

/// The common arguments of both calls.
#[cfg(target_arch = "x86_64")]
#[inline]
fn prepare(
    [first, second]: [Condition<'_>; 2],
    to: *mut u8,
    from: *const u8,
    len: usize,
) -> Result<(CopyIf, *mut u64), NotCopied> {
    let area = super::area().ok_or(NotCopied::Refused)?;
    let call = CopyIf {
        first: first.word,
        first_value: first.value,
        second: second.word,
        second_value: second.value,
        to,
        from,
        len,
    };
    Ok((call, area.wrapping_add(super::RSEQ_CS).cast()))
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn outcome(result: u32) -> Result<(), NotCopied> {
    match result {
        0 => Ok(()),
        2 => Err(NotCopied::Refused),
        3 => Err(NotCopied::Interrupted),
        _ => Err(NotCopied::Failed(Errno::FAULT)),
    }
}

/// # Safety
/// Like [`copy_if`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn perform(_: [Condition<'_>; 2], _: *mut u8, _: *const u8, _: usize) -> Result<(), NotCopied> {
    Err(NotCopied::Failed(Errno::NOSYS))
}

#[cfg(not(target_arch = "x86_64"))]
fn operate(_: [Condition<'_>; 2], _: *mut u8, _: [u64; 3], _: usize) -> Result<u64, NotCopied> {
    Err(NotCopied::Failed(Errno::NOSYS))
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::super::tests::uninterrupted;
    use super::*;
    use crate::host::SharedMemory;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    const LEN: usize = 100_000;

    fn conditions(words: &[AtomicU64; 2]) -> [Condition<'_>; 2] {
        [0, 1].map(|n| Condition {
            word: &words[n],
            value: 7,
        })
    }

    fn both(values: [u64; 2]) -> [AtomicU64; 2] {
        values.map(AtomicU64::new)
    }

    #[test]
    fn shm_19_bytes_are_copied_if_both_conditions_are_met() {
        assert!(super::super::is_available(), "needs restartable sequences");
        let memory = SharedMemory::create("in place", LEN).unwrap().0;
        for len in [0, 1, 7, 8, 9, 16, 4096, SECTION, SECTION + 1, LEN] {
            let from: Vec<u8> = (0..len).map(|n| (n + len) as u8 | 1).collect();
            for refused in [[7, 8], [8, 7]] {
                let refused = both(refused);
                let end = uninterrupted(|| write_if(conditions(&refused), &memory, Piece::of(&from)));
                // Nothing needs no permission.
                assert_eq!(end, if len == 0 { Ok(0) } else { Err(NotCopied::Refused) });
            }
            let met = both([7, 7]);
            let written = uninterrupted(|| write_if(conditions(&met), &memory, Piece::of(&from)));
            assert_eq!(written, Ok(len));
            let mut into = vec![0; len];
            let read = uninterrupted(|| read_if(conditions(&met), &memory, PieceMut::of(&mut into)));
            assert_eq!(read, Ok(len));
            assert!(into == from, "{len} bytes");
        }
    }

    #[test]
    fn shm_19_a_word_is_changed_if_both_conditions_are_met() {
        let memory = SharedMemory::create("words", 4096).unwrap().0;
        let (met, refused) = (both([7, 7]), both([7, 8]));
        let word = memory.part(8, 8);
        word.word64(0).store(u64::MAX, Ordering::Relaxed);
        let operate = |words, operation| {
            uninterrupted(|| operate_if(conditions(words), &word, operation).expect("an aligned word"))
        };
        let add = |number| operate(&met, Operation::Add(number));
        let swap = |expected, new| operate(&met, Operation::Swap { expected, new });
        assert_eq!(add(3), Ok(u64::MAX));
        assert_eq!(swap(1, 9), Ok(2));
        assert_eq!(swap(2, 9), Ok(2));
        assert_eq!(operate(&refused, Operation::Add(1)), Err(NotCopied::Refused));
        assert_eq!(word.word64(0).load(Ordering::Relaxed), 9);
        for part in [memory.part(4, 8), memory.part(8, 7)] {
            assert_eq!(operate_if(conditions(&met), &part, Operation::Add(1)), None);
        }
    }

    /// A file that was truncated under the mapping: the program continues.
    #[test]
    fn shm_19_a_fault_ends_the_copy_only() {
        crate::host::fault::install();
        let file = rustix::fs::memfd_create("truncated", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, LEN as u64).unwrap();
        let rights = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let memory =
            super::super::super::shared_memory::map(std::os::fd::AsFd::as_fd(&file), 0, LEN, rights).unwrap();
        let met = both([7, 7]);
        let written = uninterrupted(|| write_if(conditions(&met), &memory, Piece::of(&[1; 8])));
        assert_eq!(written, Ok(8));
        rustix::fs::ftruncate(&file, 0).unwrap();
        for len in [8, LEN] {
            let mut bytes = vec![1; len];
            let fault = Err(NotCopied::Failed(Errno::FAULT));
            let written = uninterrupted(|| write_if(conditions(&met), &memory, Piece::of(&bytes)));
            assert_eq!(written, fault);
            let read = uninterrupted(|| read_if(conditions(&met), &memory, PieceMut::of(&mut bytes)));
            assert_eq!(read, fault);
        }
        // SAFETY: the mapping that this test made, to which nothing refers any more.
        unsafe { rustix::mm::munmap(memory.as_ptr().cast(), LEN) }.unwrap();
    }

    /// A thread that is interrupted all the time: revoked memory does not change any more, and a
    /// word is not stored twice.
    #[test]
    fn shm_19_an_interrupted_copy_begins_with_the_conditions() {
        let memory = SharedMemory::create("interrupted", 4096).unwrap().0;
        let (words, end) = (both([7, 7]), AtomicBool::new(false));
        let (mut interrupted, mut stored) = (0u64, 0u64);
        std::thread::scope(|scope| {
            // More threads than processors, so that each is preempted.
            let busy = std::thread::available_parallelism().map_or(4, |n| n.get() * 2);
            for _ in 0..busy {
                scope.spawn(|| {
                    while !end.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            for n in 1..2_000_000u64 {
                let bytes = n.to_ne_bytes();
                match write_if(conditions(&words), &memory, Piece::of(&bytes)) {
                    Ok(8) => {
                        stored += 1;
                        // A program that saw the word may change it at once.
                        assert_eq!(memory.word64(0).swap(0, Ordering::Relaxed), n);
                    }
                    Err(NotCopied::Interrupted) => {
                        interrupted += 1;
                        assert_eq!(memory.word64(0).load(Ordering::Relaxed), 0);
                    }
                    other => panic!("{other:?}"),
                }
            }
            end.store(true, Ordering::Relaxed);
        });
        assert_eq!(stored + interrupted, 1_999_999);
    }
}
