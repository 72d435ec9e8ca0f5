//! Host memory: the one module that turns addresses into loads and stores.
//!
//! Memory that a program or guest owns changes at any time under the device, as it does under real DMA. So nothing
//! here makes a lasting reference to it: it is copied, or named by a raw [`Piece`] that only the kernel reads. Registered memory may
//! even vanish; an access to it fails then ([`fault`](crate::host::fault)). Rings and records stay until they are destroyed.

pub mod fault;
pub mod process_memory;

pub use crate::host::fault::Unreachable;
use crate::host::fault::access;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use rustix::process::{Pid, getpid};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32};
use urnic_device::record::{CqRecord, QueueRecord};
use zerocopy::{FromBytes, Immutable, IntoBytes};

const PAGE: usize = 4096;
/// How the device reaches host memory.
///
/// # Safety
///
/// A pointer that [`reach`](HostMemory::reach) returns must be readable and writable for the `len` bytes asked for until
/// every object of the device that was created over that range is destroyed. A region alone may lie over memory that its program unmaps,
/// protects or truncates, if [`fault::install`](crate::host::fault::install) was called. Whoever serves a guest that may
/// take memory away at will puts other pages in its place instead of leaving a hole.
pub unsafe trait HostMemory: Send + Sync {
    /// Where the `len` bytes at `iova` are; `None` if one of them cannot be reached, or they are not in one stretch here.
    fn reach(&self, iova: u64, len: usize) -> Option<NonNull<u8>>;

    /// Memory without a place here, if there is such.
    fn remote(&self) -> Option<&dyn RemoteMemory> {
        None
    }

    /// Set while memory that the device uses is not what it should be. Nothing is sent, received or executed then: what holds this memory stops the device soon.
    fn stopped(&self) -> &'static AtomicBool {
        static NEVER: AtomicBool = AtomicBool::new(false);
        &NEVER
    }

    /// Whether remote memory may be named before it is there, and come and go later: regions on demand.
    fn on_demand(&self) -> bool {
        false
    }
}

/// Host memory that is reached by copies only: that of another process, or pages of this one that come and go. Regions may lie there; rings, records and command buffers may not.
pub trait RemoteMemory: Send + Sync {
    /// Whether all the `len` bytes at `iova` are there.
    fn covers(&self, iova: u64, len: u64) -> bool;

    /// Copies bytes out.
    ///
    /// # Errors
    /// The bytes are gone, or their owner is; `into` holds anything then.
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Unreachable>;

    /// Copies bytes in.
    ///
    /// # Errors
    /// The bytes are gone, or their owner is; some may have been written.
    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Unreachable>;

    /// How atomic operations reach the 64-bit word at `iova`, a multiple of 8.
    ///
    /// # Errors
    /// The word is gone, or cannot be written.
    fn word(&self, iova: u64) -> Result<RemoteWord<'_>, Unreachable>;
}

/// How atomic operations reach a word of remote memory.
#[derive(Debug)]
pub enum RemoteWord<'a> {
    /// In place, in one step.
    InPlace(Word64),
    /// By two copies. The lock is the same for all memory of the host, so that operations through different regions over the same
    /// word exclude each other, too (RFC 7306 §5.3).
    Copied(&'a Mutex<()>),
}

/// The process's own memory, for regions on demand: copied by the kernel, which brings pages in, and says what is not there instead of a fault.
#[derive(Debug)]
pub struct OwnProcess(Pid);

impl OwnProcess {
    /// `None` if the kernel does not let a process copy so (seccomp), or cannot bring in pages (Linux 5.14 was the first to).
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
        let page = word.map_addr(|address| address & !(PAGE - 1)).cast();
        let there = loop {
            // SAFETY: populating changes no byte: it does early what touching the page would do.
            match unsafe { madvise(page, PAGE, Advice::LinuxPopulateWrite) } {
                // A signal, whose handler runs before the next try.
                Err(Errno::INTR) => {}
                there => break there,
            }
        };
        let word = there.ok().and_then(|()| Word64::new(word));
        word.map(RemoteWord::InPlace).ok_or(Unreachable)
    }
}

/// An aligned 64-bit word of registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Word64(*mut u64);

impl Word64 {
    /// `None` if it is not aligned.
    fn new(word: *mut u64) -> Option<Word64> {
        word.is_aligned().then_some(Word64(word))
    }

    /// Replaces it by `update` of it in one atomic step and returns the old value. `update` may run more than once.
    ///
    /// # Errors
    /// The word is gone, or cannot be written.
    #[inline]
    pub fn update(self, update: impl Fn(u64) -> u64) -> Result<u64, Unreachable> {
        // SAFETY: aligned by `new`; registered memory is the program's.
        unsafe { access::update(self.0, update) }
    }
}

/// A stretch of bytes to be sent: raw, so that making one claims nothing about who else writes there.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Piece {
    ptr: *const u8,
    len: usize,
}

/// A stretch of bytes to be received into.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PieceMut {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a piece is a plain address; whoever reads or writes through it answers for it.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Send for PieceMut {}

impl Piece {
    /// The bytes of `slice`, which must stay in place for as long as the piece is in use.
    #[inline]
    pub fn of(slice: &[u8]) -> Piece {
        Piece {
            ptr: slice.as_ptr(),
            len: slice.len(),
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left behind the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> Piece {
        let n = n.min(self.len);
        Piece {
            ptr: self.ptr.wrapping_add(n),
            len: self.len - n,
        }
    }

    /// The first `n` bytes, or all.
    #[inline]
    pub fn first(self, n: usize) -> Piece {
        Piece {
            len: n.min(self.len),
            ..self
        }
    }

    /// The address of the first byte that cannot be read at this moment, as far as pages go.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        let (start, end) = (self.ptr.addr(), self.ptr.addr() + self.len);
        let pages = (start & !(PAGE - 1)..end).step_by(PAGE);
        pages
            .map(|page| page.max(start))
            .find(|byte| access::probe(std::ptr::with_exposed_provenance(*byte), 1).is_err())
    }

    /// Copies the bytes out, as far as `into` is long; returns how many. For simulated streams and tests.
    ///
    /// # Safety
    ///
    /// The bytes must still be there.
    pub unsafe fn copy_out(&self, into: &mut [u8]) -> usize {
        let n = self.len.min(into.len());
        // SAFETY: the caller answers for the source; `into` is a live slice of at least `n` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr, into.as_mut_ptr(), n) };
        n
    }

    /// Adds the bytes to `copies`, which stays as it is if they are gone.
    pub(crate) fn append_to(&self, copies: &mut Vec<u8>) -> Result<(), Unreachable> {
        let before = copies.len();
        copies.resize(before + self.len, 0);
        let into = &mut copies[before..];
        // SAFETY: `into` is ours alone and as long as the piece; the piece is registered memory, which may be gone.
        let copied = unsafe { access::copy(into.as_mut_ptr(), self.ptr, into.len()) };
        if copied.is_err() {
            copies.truncate(before);
        }
        copied
    }

    /// The same as the iovec that the kernel takes.
    pub(crate) fn as_io_slices(pieces: &[Piece]) -> &[std::io::IoSlice<'_>] {
        // SAFETY: `IoSlice` is promised to be ABI-compatible with `iovec`, which is { pointer, length } like
        // `Piece` (asserted below). Only the kernel reads through it, and answers EFAULT for what is gone.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }
}

impl PieceMut {
    /// The bytes of `slice`, which must stay in place for as long as the piece is in use.
    #[inline]
    pub fn of(slice: &mut [u8]) -> PieceMut {
        PieceMut {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
        }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What is left behind the first `n` bytes.
    #[inline]
    pub fn skip(self, n: usize) -> PieceMut {
        let n = n.min(self.len);
        PieceMut {
            ptr: self.ptr.wrapping_add(n),
            len: self.len - n,
        }
    }

    /// The first `n` bytes, or all.
    #[inline]
    pub fn first(self, n: usize) -> PieceMut {
        PieceMut {
            len: n.min(self.len),
            ..self
        }
    }

    /// The first `n` bytes, or all, now that they were filled.
    #[inline]
    pub(crate) fn filled(&self, n: usize) -> Piece {
        Piece {
            ptr: self.ptr,
            len: n.min(self.len),
        }
    }

    /// Copies `from` in, as far as there is room; returns how many bytes. For simulated streams and tests.
    ///
    /// # Safety
    ///
    /// The memory must still be there, and nobody else may hold a reference into it.
    pub unsafe fn copy_in(&self, from: &[u8]) -> usize {
        let n = self.len.min(from.len());
        // SAFETY: the caller answers for the target; `from` is a live slice of at least `n` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr, n) };
        n
    }

    pub(crate) fn as_io_slices(pieces: &mut [PieceMut]) -> &mut [std::io::IoSliceMut<'_>] {
        // SAFETY: as in `Piece::as_io_slices`; the kernel writes through it, nobody makes a reference of it.
        unsafe { std::slice::from_raw_parts_mut(pieces.as_mut_ptr().cast(), pieces.len()) }
    }
}

const _: () = {
    use std::io::{IoSlice, IoSliceMut};
    use std::mem::{align_of, offset_of, size_of};
    assert!(
        size_of::<Piece>() == size_of::<IoSlice<'_>>() && align_of::<Piece>() == align_of::<IoSlice<'_>>()
    );
    assert!(size_of::<PieceMut>() == size_of::<IoSliceMut<'_>>());
    assert!(offset_of!(Piece, ptr) == 0 && offset_of!(PieceMut, ptr) == 0);
};

/// A stretch of host memory that belongs to an object of the device for as long as that object lives.
#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory outlives the mapping (contract of `HostMemory`), and every access is a raw copy or atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The `len` bytes at `iova`; `None` if they cannot be reached or do not start at a multiple of `align` in the
    /// device's own address space.
    pub fn new(host: &dyn HostMemory, iova: u64, len: usize, align: usize) -> Option<Mapping> {
        let ptr = host.reach(iova, len)?;
        (ptr.as_ptr().addr() % align == 0).then_some(Mapping { ptr, len })
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins in this process.
    pub(crate) fn address(&self) -> usize {
        self.ptr.as_ptr().addr()
    }

    /// The part of `len` bytes at `offset`; both must lie inside.
    #[inline]
    pub(crate) fn part(&self, offset: usize, len: usize) -> Mapping {
        assert!(offset <= self.len && len <= self.len - offset);
        Mapping {
            // SAFETY: inside the mapping, by the check above.
            ptr: unsafe { self.ptr.add(offset) },
            len,
        }
    }

    /// Copies bytes out from `offset` on; they must lie inside.
    #[inline]
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let from = self.part(offset, into.len());
        // SAFETY: `part` checked the range, and a live mapping is readable. Others may write meanwhile, as under DMA.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr.as_ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in from `offset` on; they must lie inside.
    #[inline]
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let into = self.part(offset, from.len());
        // SAFETY: `part` checked the range, and a live mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.ptr.as_ptr(), from.len()) }
    }

    /// Copies a value out.
    #[inline]
    pub fn read<T: FromBytes>(&self, offset: usize) -> T {
        let from = self.part(offset, size_of::<T>());
        // SAFETY: `part` checked the range; any bytes are a `T`.
        unsafe { from.ptr.as_ptr().cast::<T>().read_unaligned() }
    }

    /// Copies a value in.
    #[inline]
    pub fn write<T: IntoBytes + Immutable>(&self, offset: usize, value: &T) {
        self.copy_in(offset, value.as_bytes());
    }

    /// The 32-bit word at `offset`, a multiple of 4.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        let word = self.part(offset, 4).ptr.cast::<AtomicU32>();
        assert!(word.is_aligned());
        // SAFETY: in range and aligned; an atomic may be shared with anybody.
        unsafe { word.as_ref() }
    }

    /// Copies bytes of registered memory out from `offset` on; they must lie inside.
    ///
    /// # Errors
    /// They are not all there.
    #[inline]
    pub(crate) fn try_copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), Unreachable> {
        let from = self.part(offset, into.len());
        // SAFETY: `part` checked the range, which is the program's. Others may write meanwhile, as under DMA.
        unsafe { access::copy(into.as_mut_ptr(), from.ptr.as_ptr(), into.len()) }
    }

    /// Copies bytes into registered memory from `offset` on; they must lie inside.
    ///
    /// # Errors
    /// Not all of it can be written.
    #[inline]
    pub(crate) fn try_copy_in(&self, offset: usize, from: &[u8]) -> Result<(), Unreachable> {
        let into = self.part(offset, from.len());
        // SAFETY: as above.
        unsafe { access::copy(into.ptr.as_ptr(), from.as_ptr(), from.len()) }
    }

    /// Looks whether registered memory, which is not empty, can be read at this moment.
    ///
    /// # Errors
    /// It is not all there.
    #[inline]
    pub(crate) fn try_probe(&self) -> Result<(), Unreachable> {
        access::probe(self.ptr.as_ptr(), self.len)
    }

    /// The address of the first byte that cannot be read at this moment, as far as pages go.
    #[cold]
    pub(crate) fn first_missing(&self) -> Option<usize> {
        self.piece().first_missing()
    }

    /// The bytes as a piece to send.
    #[inline]
    pub(crate) fn piece(&self) -> Piece {
        Piece {
            ptr: self.ptr.as_ptr(),
            len: self.len,
        }
    }

    /// The bytes as a piece to receive into.
    #[inline]
    pub(crate) fn piece_mut(&self) -> PieceMut {
        PieceMut {
            ptr: self.ptr.as_ptr(),
            len: self.len,
        }
    }

    /// The 64-bit word of registered memory at `offset` if it is 64-bit aligned there and inside.
    #[inline]
    pub(crate) fn aligned_word64(&self, offset: usize) -> Option<Word64> {
        if offset > self.len || self.len - offset < 8 {
            return None;
        }
        Word64::new(self.part(offset, 8).ptr.as_ptr().cast())
    }
}

/// A record in host memory.
#[derive(Debug)]
pub struct Record<T>(NonNull<T>, PhantomData<T>);

// SAFETY: it points to atomics in memory that outlives it (contract of `HostMemory`).
unsafe impl<T: Sync> Send for Record<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Record<T> {}

/// Structures that consist of atomics, and padding that nobody looks at.
pub trait SharedRecord: Sync {}
impl SharedRecord for QueueRecord {}
impl SharedRecord for CqRecord {}

impl<T: SharedRecord> Record<T> {
    /// The record at `iova`; `None` if it cannot be reached or is not aligned.
    pub fn new(host: &dyn HostMemory, iova: u64) -> Option<Record<T>> {
        let mapping = Mapping::new(host, iova, size_of::<T>(), align_of::<T>())?;
        Some(Record(mapping.ptr.cast(), PhantomData))
    }
}

impl<T: SharedRecord> std::ops::Deref for Record<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: aligned and in range by `new`, alive by the contract of `HostMemory`, and all atomics.
        unsafe { self.0.as_ref() }
    }
}
