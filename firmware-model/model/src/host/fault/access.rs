//! Accesses to memory that may become inaccessible at any time.
//!
//! They are written in assembly, so that the handler can identify their instructions by address,
//! and can end them: none of them moves the stack pointer.

/// Memory that was given to the device is not accessible any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("host memory is unreachable")]
pub struct Unreachable;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(include_str!("x86_64.s"));
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(include_str!("aarch64.s"));

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" {
    safe static urnic_guarded_begin: u8;
    safe static urnic_guarded_end: u8;
    safe static urnic_guarded_failed: u8;
    fn urnic_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> u32;
    fn urnic_guarded_probe(first: *const u8, last: *const u8) -> u32;
    fn urnic_guarded_load(word: *const u64, result: *mut u64) -> u32;
    fn urnic_guarded_compare_exchange(word: *mut u64, expected: u64, new: u64, found: *mut u64) -> u32;
}

/// Where a thread continues that faulted at `pc`, if it did so in an access of this module.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline]
pub(super) fn landing(pc: usize) -> Option<usize> {
    let begin = (&raw const urnic_guarded_begin).addr();
    let end = (&raw const urnic_guarded_end).addr();
    (begin..end)
        .contains(&pc)
        .then(|| (&raw const urnic_guarded_failed).addr())
}

fn outcome(failed: u32) -> Result<(), Unreachable> {
    match failed {
        0 => Ok(()),
        _ => Err(Unreachable),
    }
}

/// Copies bytes.
///
/// # Errors
/// A byte could not be read or written; those before it may have been copied.
///
/// # Safety
/// No reference of this program points into either range, with two exceptions: the caller may hold
/// `to` exclusively, and may hold `from` shared. The ranges do not overlap. Either range may be
/// inaccessible.
#[inline]
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), Unreachable> {
    // SAFETY: the caller guarantees the ranges; an access to inaccessible memory ends with 1.
    outcome(unsafe { urnic_guarded_copy(to, from, len) })
}

/// Reads a byte of each page of a range that is not empty.
///
/// # Errors
/// A page cannot be read at present.
#[inline]
pub(crate) fn probe(from: *const u8, len: usize) -> Result<(), Unreachable> {
    let last = from.wrapping_add(len.saturating_sub(1));
    // SAFETY: reading changes nothing, whatever is mapped; an access to inaccessible memory ends
    // with 1.
    outcome(unsafe { urnic_guarded_probe(from, last) })
}

/// Replaces the word by the result of `update` in one atomic step; returns the old word. `update`
/// may run more than once.
///
/// # Errors
/// The word cannot be read and written.
///
/// # Safety
/// `word` is aligned. References of this program to it, if any, are to atomics only. The word may
/// be inaccessible.
pub(crate) unsafe fn update(word: *mut u64, update: impl Fn(u64) -> u64) -> Result<u64, Unreachable> {
    let mut old = 0;
    // SAFETY: the caller guarantees that `word` is aligned, and it may be inaccessible; `old` is a
    // local.
    outcome(unsafe { urnic_guarded_load(word, &raw mut old) })?;
    loop {
        let mut found = 0;
        // SAFETY: the caller guarantees that `word` is aligned, and it may be inaccessible; `found`
        // is a local.
        outcome(unsafe { urnic_guarded_compare_exchange(word, old, update(old), &raw mut found) })?;
        if found == old {
            return Ok(old);
        }
        old = found;
    }
}

/// Plain accesses, for processors without guarded ones in assembly: a fault there is not recovered.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod plain {
    use std::sync::atomic::{AtomicU64, Ordering};

    pub(super) unsafe fn urnic_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        0
    }

    pub(super) unsafe fn urnic_guarded_probe(_first: *const u8, _last: *const u8) -> u32 {
        0
    }

    pub(super) unsafe fn urnic_guarded_load(word: *const u64, result: *mut u64) -> u32 {
        // SAFETY: as promised by the caller.
        unsafe { *result = AtomicU64::from_ptr(word.cast_mut()).load(Ordering::Acquire) };
        0
    }

    pub(super) unsafe fn urnic_guarded_compare_exchange(
        word: *mut u64,
        old: u64,
        new: u64,
        found: *mut u64,
    ) -> u32 {
        // SAFETY: as promised by the caller.
        let word = unsafe { AtomicU64::from_ptr(word) };
        let was = word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: as promised by the caller.
        unsafe { *found = was.unwrap_or_else(|was| was) };
        0
    }

    pub(in crate::host::fault) fn landing(_pc: usize) -> Option<usize> {
        None
    }
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use plain::landing;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use plain::{urnic_guarded_compare_exchange, urnic_guarded_copy, urnic_guarded_load, urnic_guarded_probe};
