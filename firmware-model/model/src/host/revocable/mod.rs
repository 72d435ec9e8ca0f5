//! Copies to and from another process's memory that can be revoked from there.
//!
//! A check of permission and the copy that it permits are two steps. A thread that is stopped
//! between them would copy when it continues, however long ago the permission was revoked. Here the
//! kernel makes the two steps one: with restartable sequences (rseq(2), Linux 4.18, which glibc
//! registers from 2.35 on) a thread that is preempted, signalled or stopped after the check does
//! not get to the copy. So a thread has either entered the system call with a permission that was
//! valid then, or copies nothing.

use super::piece::{Piece, PieceMut};
use super::process_memory::extents;
use crate::sys;
use rustix::io::Errno;
use rustix::process::Pid;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(include_str!("x86_64.s"));

/// A word that must have a certain value for a copy to be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Condition<'a> {
    pub(crate) word: &'a AtomicU64,
    pub(crate) value: u64,
}

/// Why nothing, or not everything, was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotCopied {
    /// A condition is not met.
    Refused,
    /// The thread was interrupted before the copy, possibly for a long time.
    Interrupted,
    /// The kernel does not copy.
    Failed(Errno),
}

/// The argument of `urnic_revocable_call`, which knows the offsets.
#[repr(C)]
struct Call {
    first: *const AtomicU64,
    first_value: u64,
    second: *const AtomicU64,
    second_value: u64,
    number: u64,
    process: u64,
    local: *const libc::iovec,
    remote: *const libc::iovec,
    /// Extents in each of the two lists.
    extents: u64,
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    fn urnic_revocable_call(call: *const Call, rseq_cs: *mut u64) -> i64;
}

/// The results of `urnic_revocable_call` that are no results of a system call.
const REFUSED: i64 = i64::MIN;
const INTERRUPTED: i64 = i64::MIN + 1;

/// Offsets of `cpu_id` and `rseq_cs` in `struct rseq`.
#[cfg(target_arch = "x86_64")]
const CPU_ID: usize = 4;
#[cfg(target_arch = "x86_64")]
const RSEQ_CS: usize = 8;

/// The offset of a thread's `struct rseq` from its thread pointer, which libc publishes.
#[cfg(target_arch = "x86_64")]
fn offset() -> Option<isize> {
    static OFFSET: OnceLock<Option<isize>> = OnceLock::new();
    *OFFSET.get_or_init(|| {
        // SAFETY: the names end with a zero byte, and looking a symbol up changes nothing.
        let [offset, size] = [c"__rseq_offset", c"__rseq_size"]
            .map(|name| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) });
        if offset.is_null() || size.is_null() {
            return None;
        }
        // SAFETY: libc has these two constants, of these types, under these names (<sys/rseq.h>).
        let (offset, size) = unsafe { (*offset.cast::<isize>(), *size.cast::<u32>()) };
        // Zero: registration failed, or was turned off.
        (size != 0).then_some(offset)
    })
}

/// The calling thread's `struct rseq`, if it is registered with the kernel.
#[cfg(target_arch = "x86_64")]
fn area() -> Option<*mut u8> {
    let offset = offset()?;
    let thread: usize;
    // SAFETY: the first word at the thread pointer is the thread pointer (x86-64 psABI, TLS).
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, readonly, preserves_flags)) };
    let area: *mut u8 = std::ptr::with_exposed_provenance_mut(thread.wrapping_add_signed(offset));
    // SAFETY: libc has the thread's `struct rseq` there, for as long as the thread lives; the
    // kernel writes this word while other code reads it.
    let cpu = unsafe { &*area.add(CPU_ID).cast::<AtomicU32>() }.load(Ordering::Relaxed);
    (cpu.cast_signed() >= 0).then_some(area)
}

/// Whether the calling thread can make such copies.
pub(crate) fn is_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return area().is_some();
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Copies a piece to `address` of a process if the conditions are met; returns how many bytes.
///
/// # Errors
/// See [`NotCopied`].
pub(crate) fn write_if(
    conditions: [Condition<'_>; 2],
    process: Pid,
    address: u64,
    from: Piece<'_>,
) -> Result<usize, NotCopied> {
    let call = libc::SYS_process_vm_writev;
    // The kernel only reads there.
    copy_if(
        conditions,
        call,
        process,
        address,
        from.as_ptr().cast_mut(),
        from.len(),
    )
}

/// Copies from `address` of a process into a piece if the conditions are met; returns how many
/// bytes.
///
/// # Errors
/// See [`NotCopied`].
pub(crate) fn read_if(
    conditions: [Condition<'_>; 2],
    process: Pid,
    address: u64,
    mut into: PieceMut<'_>,
) -> Result<usize, NotCopied> {
    let call = libc::SYS_process_vm_readv;
    let len = into.len();
    copy_if(conditions, call, process, address, into.as_mut_ptr(), len)
}

fn copy_if(
    conditions: [Condition<'_>; 2],
    number: libc::c_long,
    process: Pid,
    there: u64,
    here: *mut u8,
    len: usize,
) -> Result<usize, NotCopied> {
    let [local, remote] = extents(there, here, len);
    copy_extents_if(conditions, number, process, [&[local], &[remote]])
}

/// Copies between the extents of two lists of one length: here, and there.
fn copy_extents_if(
    [first, second]: [Condition<'_>; 2],
    number: libc::c_long,
    process: Pid,
    [local, remote]: [&[libc::iovec]; 2],
) -> Result<usize, NotCopied> {
    debug_assert_eq!(local.len(), remote.len());
    let call = Call {
        first: first.word,
        first_value: first.value,
        second: second.word,
        second_value: second.value,
        number: number as u64,
        process: process.as_raw_nonzero().get() as u64,
        local: local.as_ptr(),
        remote: remote.as_ptr(),
        extents: local.len() as u64,
    };
    match perform(&call) {
        REFUSED => Err(NotCopied::Refused),
        INTERRUPTED => Err(NotCopied::Interrupted),
        done @ 0.. => Ok(done as usize),
        failed => Err(NotCopied::Failed(sys::errno_of(failed))),
    }
}

#[cfg(target_arch = "x86_64")]
fn perform(call: &Call) -> i64 {
    let Some(area) = area() else { return REFUSED };
    // SAFETY: the words, which are read only, and the lists live until the call returns. The kernel
    // checks what the lists name: it reads or writes a piece here, and what is there may be
    // anything. `rseq_cs` is this thread's to write; nobody else in the process uses it across a
    // call, and it is cleared before the return.
    unsafe { urnic_revocable_call(call, area.add(RSEQ_CS).cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
fn perform(_: &Call) -> i64 {
    REFUSED
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::*;
    use rustix::process::getpid;

    /// The end of a call that is repeated when it was interrupted: a thread may be interrupted at
    /// any instruction, and then has done nothing.
    fn uninterrupted<T>(call: impl FnMut() -> Result<T, NotCopied>) -> Result<T, NotCopied> {
        let mut ends = std::iter::repeat_with(call).take(1_000_000);
        ends.find(|end| !matches!(end, Err(NotCopied::Interrupted)))
            .expect("a call that is not interrupted")
    }

    fn condition(word: &AtomicU64, value: u64) -> Condition<'_> {
        Condition { word, value }
    }

    #[test]
    fn a_copy_is_made_if_both_conditions_are_met() {
        let words = [AtomicU64::new(7), AtomicU64::new(9)];
        let target = [0u8; 8];
        let address = (&raw const target).expose_provenance() as u64;
        let write = |values: [u64; 2], bytes: &[u8]| {
            let conditions = [condition(&words[0], values[0]), condition(&words[1], values[1])];
            uninterrupted(|| write_if(conditions, getpid(), address, Piece::of(bytes)))
        };
        let read = || {
            let mut bytes = [0u8; 8];
            let conditions = [condition(&words[0], 7), condition(&words[1], 9)];
            let copied = uninterrupted(|| read_if(conditions, getpid(), address, PieceMut::of(&mut bytes)));
            copied.map(|n| (n, bytes))
        };
        if !is_available() {
            assert_eq!(write([7, 9], b"anything"), Err(NotCopied::Refused));
            return;
        }
        assert_eq!(write([7, 9], b"the good"), Ok(8));
        assert_eq!(read(), Ok((8, *b"the good")));
        assert_eq!(write([8, 9], b"one more"), Err(NotCopied::Refused));
        assert_eq!(write([7, 8], b"one more"), Err(NotCopied::Refused));
        assert_eq!(read(), Ok((8, *b"the good")));
        let conditions = [condition(&words[0], 7), condition(&words[1], 9)];
        let nowhere = uninterrupted(|| write_if(conditions, getpid(), 8, Piece::of(b"x")));
        assert_eq!(nowhere, Err(NotCopied::Failed(Errno::FAULT)));
    }
}

// Several copies by one call.

/// Most copies of a batch.
pub(crate) const MOST: usize = 32;

/// Copies between pieces of this process, of type `P`, and places in another process.
#[derive(Debug)]
pub(crate) struct Batch<P> {
    local: [libc::iovec; MOST],
    remote: [libc::iovec; MOST],
    number: usize,
    len: usize,
    pieces: PhantomData<P>,
}

impl<P> Batch<P> {
    pub(crate) fn new() -> Self {
        let none = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        Batch {
            local: [none; MOST],
            remote: [none; MOST],
            number: 0,
            len: 0,
            pieces: PhantomData,
        }
    }

    /// Bytes of all pieces.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no room for another piece.
    pub(crate) fn is_full(&self) -> bool {
        self.number == MOST
    }

    /// The lengths of the pieces, and where their places in the other process are noted.
    pub(crate) fn places(&mut self) -> impl Iterator<Item = (usize, impl FnMut(u64))> {
        self.remote[..self.number].iter_mut().map(|place| {
            let set = |address: u64| place.iov_base = std::ptr::without_provenance_mut(address as usize);
            (place.iov_len, set)
        })
    }

    fn add(&mut self, here: *mut u8, len: usize) {
        assert!(!self.is_full(), "a batch has a limit");
        [self.local[self.number], self.remote[self.number]] = extents(0, here, len);
        self.number += 1;
        self.len += len;
    }

    fn copy_if(
        &self,
        conditions: [Condition<'_>; 2],
        call: libc::c_long,
        process: Pid,
    ) -> Result<usize, NotCopied> {
        let lists = [&self.local[..self.number], &self.remote[..self.number]];
        copy_extents_if(conditions, call, process, lists)
    }
}

impl<'a> Batch<Piece<'a>> {
    pub(crate) fn push(&mut self, from: Piece<'a>) {
        // The kernel only reads there.
        self.add(from.as_ptr().cast_mut(), from.len());
    }

    /// Copies to the other process if the conditions are met; returns how many bytes.
    ///
    /// # Errors
    /// See [`NotCopied`].
    pub(crate) fn write_if(&self, conditions: [Condition<'_>; 2], process: Pid) -> Result<usize, NotCopied> {
        self.copy_if(conditions, libc::SYS_process_vm_writev, process)
    }
}

impl<'a> Batch<PieceMut<'a>> {
    pub(crate) fn push(&mut self, mut into: PieceMut<'a>) {
        self.add(into.as_mut_ptr(), into.len());
    }

    /// Copies from the other process if the conditions are met; returns how many bytes.
    ///
    /// # Errors
    /// See [`NotCopied`].
    pub(crate) fn read_if(
        &mut self,
        conditions: [Condition<'_>; 2],
        process: Pid,
    ) -> Result<usize, NotCopied> {
        self.copy_if(conditions, libc::SYS_process_vm_readv, process)
    }
}
