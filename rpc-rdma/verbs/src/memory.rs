//! Memory for file data on its way and in a tree in memory. It consists of page-aligned buffers out
//! of a few large *arenas*, so that an RDMA transport registers the arenas and not the memory of
//! each READ and WRITE.
//!
//! Buffers are powers of two of pages. Free halves merge again (a buddy allocator), so memory of
//! one size can later serve for another. A pool never returns arenas to the system while it exists.

use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use urnic_sync::{Mutex, MutexGuard};
use urnic_sys::Pages;

/// Bytes of the smallest buffer. The address of every buffer is a multiple of it.
pub const PAGE: usize = 4096;

/// Bytes of the largest buffer and of an arena. The address of an arena is a multiple of it.
pub const MAX_BUFFER: usize = 4 << 20;

const ORDERS: usize = (MAX_BUFFER / PAGE).trailing_zeros() as usize + 1;

/// The source of buffers. Clones are the same pool.
#[derive(Clone, Debug, Default)]
pub struct Pool(Arc<Mutex<Arenas>>);

#[derive(Debug, Default)]
struct Arenas {
    /// The arenas, by number. Each buffer in them holds the pool.
    mapped: Vec<Pages>,
    /// Addresses of free memory: index n has the free pieces of `PAGE << n` bytes.
    free: [BTreeSet<usize>; ORDERS],
    /// Maximum number of arenas; `None` means no limit.
    most: Option<usize>,
}

/// [`MAX_BUFFER`] bytes, which keep their address while the pool or a buffer of it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Number of the arena in its pool, from 0.
    pub number: usize,
    /// Address of the arena.
    pub base: usize,
}

impl Pool {
    /// A pool without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A pool with at most this number of bytes, in whole arenas ([`MAX_BUFFER`]).
    pub fn limited(bytes: u64) -> Self {
        let pool = Self::new();
        pool.arenas().most = usize::try_from(bytes / MAX_BUFFER as u64).ok();
        pool
    }

    /// A buffer of `len` bytes with arbitrary content. `None` if the pool has no memory left
    /// ([`limited`](Self::limited)), or if the length exceeds [`MAX_BUFFER`].
    pub fn take(&self, len: usize) -> Option<Buffer> {
        let pages = len.div_ceil(PAGE).max(1).next_power_of_two();
        let order = pages.trailing_zeros() as usize;
        if len > MAX_BUFFER {
            return None;
        }
        let (at, arena) = self.arenas().take(order)?;
        let pool = self.clone();
        Some(Buffer {
            at,
            len,
            order,
            arena,
            pool,
        })
    }

    /// The arenas numbered `from` and above.
    pub fn arenas_from(&self, from: usize) -> Vec<Arena> {
        let arenas = self.arenas();
        let numbered = arenas.bases().enumerate().skip(from);
        numbered.map(|(number, base)| Arena { number, base }).collect()
    }

    fn arenas(&self) -> MutexGuard<'_, Arenas> {
        self.0.lock()
    }
}

impl Arenas {
    fn take(&mut self, order: usize) -> Option<(NonNull<u8>, usize)> {
        let mut found = match (order..ORDERS).find(|&order| !self.free[order].is_empty()) {
            Some(order) => order,
            None if self.most.is_some_and(|most| self.mapped.len() >= most) => return None,
            None => {
                let rights = ProtFlags::READ | ProtFlags::WRITE;
                let room = Pages::anonymous(2 * MAX_BUFFER, rights, MapFlags::PRIVATE).ok()?;
                let arena = room.aligned_part(MAX_BUFFER, MAX_BUFFER);
                let base = arena.start().as_ptr().expose_provenance();
                self.mapped.push(arena);
                self.free[ORDERS - 1].insert(base);
                ORDERS - 1
            }
        };
        let at = self.free[found].pop_first()?;
        while found > order {
            found -= 1;
            self.free[found].insert(at + (PAGE << found));
        }
        let base = at & !(MAX_BUFFER - 1);
        let arena = self.bases().rposition(|known| known == base)?;
        Some((NonNull::new(std::ptr::with_exposed_provenance_mut(at))?, arena))
    }

    /// Addresses of the arenas, by number.
    fn bases(&self) -> impl ExactSizeIterator<Item = usize> + DoubleEndedIterator {
        self.mapped.iter().map(|arena| arena.start().addr().get())
    }

    fn give(&mut self, mut at: usize, mut order: usize) {
        while order < ORDERS - 1 {
            let other = at ^ (PAGE << order);
            if !self.free[order].remove(&other) {
                break;
            }
            at = at.min(other);
            order += 1;
        }
        self.free[order].insert(at);
    }
}

/// Exclusively owned memory of a pool.
#[derive(Debug)]
pub struct Buffer {
    at: NonNull<u8>,
    len: usize,
    order: usize,
    arena: usize,
    pool: Pool,
}

// SAFETY: a buffer is the only owner of its memory, as a Box is.
unsafe impl Send for Buffer {}
// SAFETY: a buffer is the only owner of its memory, and a shared reference only permits reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Number of the arena that contains the buffer.
    pub const fn arena(&self) -> usize {
        self.arena
    }

    /// Maximum length of the buffer in bytes.
    pub const fn capacity(&self) -> usize {
        PAGE << self.order
    }

    /// Sets the length of the buffer to `len` bytes, limited by its capacity.
    pub fn resize(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    /// Converts the buffer into a slice, which several owners can share and read.
    pub fn share(self) -> Slice {
        let range = 0..self.len;
        Slice {
            buffer: Arc::new(self),
            range,
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `at` begins `capacity()` bytes of a mapped arena, and `len` is no more. The bytes
        // are initialized (mapped as zeroes), and only this buffer refers to them until `drop`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `at` begins `capacity()` initialized bytes of a mapped arena, `len` is no more,
        // and `&mut self` is the only access to them.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.arenas().give(self.at.addr().get(), self.order);
    }
}

/// A part of a buffer that several owners may read. Its content does not change while it is shared.
#[derive(Clone, Debug)]
pub struct Slice {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl Slice {
    /// Number of the arena that contains the slice.
    pub fn arena(&self) -> usize {
        self.buffer.arena
    }

    /// A part of this slice. `part` is limited to the length of the slice.
    #[must_use]
    pub fn part(&self, part: Range<usize>) -> Self {
        let len = self.range.len();
        let (start, end) = (part.start.min(len), part.end.min(len));
        Self {
            buffer: self.buffer.clone(),
            range: self.range.start + start..self.range.start + end.max(start),
        }
    }

    /// Converts the slice into its buffer, with a length up to the end of this slice, if no other
    /// slice shares the buffer.
    ///
    /// # Errors
    /// The slice, if another slice shares the buffer.
    pub fn unshare(self) -> Result<Buffer, Self> {
        let range = self.range;
        match Arc::try_unwrap(self.buffer) {
            Ok(mut buffer) => {
                buffer.resize(range.end);
                Ok(buffer)
            }
            Err(buffer) => Err(Self { buffer, range }),
        }
    }

    /// Bytes of pool memory that the whole buffer occupies.
    pub fn footprint(&self) -> usize {
        self.buffer.capacity()
    }

    /// The bytes of the slice for writing, if no other slice shares the buffer.
    pub fn exclusive(&mut self) -> Option<&mut [u8]> {
        let range = self.range.clone();
        Arc::get_mut(&mut self.buffer)?.get_mut(range)
    }

    /// Extends the slice by up to `more` bytes of arbitrary content, into unused memory after it
    /// in the buffer. It does so only if no other slice shares the buffer. Returns the number of
    /// added bytes.
    pub fn grow(&mut self, more: usize) -> usize {
        let Some(buffer) = Arc::get_mut(&mut self.buffer) else {
            return 0;
        };
        let more = more.min(buffer.capacity() - self.range.end);
        buffer.resize(buffer.len().max(self.range.end + more));
        self.range.end += more;
        more
    }
}

impl Deref for Slice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(self.range.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_do_not_overlap_and_lie_in_their_arenas() {
        let pool = Pool::new();
        let lens = [
            0,
            1,
            PAGE,
            PAGE + 1,
            100_000,
            MAX_BUFFER,
            MAX_BUFFER - 1,
            5,
            3 * PAGE,
        ];
        let mut buffers: Vec<_> = lens.iter().map(|len| pool.take(*len).expect("memory")).collect();
        for (mark, buffer) in (1..).zip(&mut buffers) {
            buffer.resize(usize::MAX);
            buffer.fill(mark);
        }
        let arenas = pool.arenas_from(0);
        for ((mark, buffer), len) in (1..).zip(&buffers).zip(lens) {
            assert!(buffer.len() >= len && buffer.len() == buffer.capacity());
            assert!(buffer.iter().all(|byte| *byte == mark));
            let (base, start) = (arenas[buffer.arena()].base, buffer.as_ptr() as usize);
            assert!(start.is_multiple_of(PAGE) && start >= base && start + buffer.len() <= base + MAX_BUFFER);
        }
        assert_eq!(pool.arenas_from(1), arenas[1..]);
    }

    #[test]
    fn returned_memory_is_reused_for_any_size() {
        let pool = Pool::new();
        let pages: Vec<_> = (0..MAX_BUFFER / PAGE).map(|_| pool.take(PAGE)).collect();
        assert!(pages.iter().all(Option::is_some));
        drop(pages);
        assert!(pool.take(MAX_BUFFER).is_some());
        assert_eq!(pool.arenas_from(0).len(), 1);
        assert!(pool.take(MAX_BUFFER + 1).is_none());
    }

    #[test]
    fn a_limited_pool_reuses_returned_memory() {
        let pool = Pool::limited(2 * MAX_BUFFER as u64 + 1);
        let first = pool.take(MAX_BUFFER).expect("memory");
        let _second = pool.take(PAGE).expect("memory");
        assert!(pool.take(MAX_BUFFER).is_none());
        assert!(pool.take(MAX_BUFFER / 2).is_some());
        drop(first);
        assert!(pool.take(MAX_BUFFER).is_some());
        assert!(Pool::limited(0).take(0).is_none());
    }

    #[test]
    fn a_slice_keeps_its_buffer_and_the_last_can_unshare_it() {
        let pool = Pool::new();
        let mut buffer = pool.take(10).expect("memory");
        buffer.copy_from_slice(b"0123456789");
        let all = buffer.share();
        let mut part = all.part(2..8).part(1..3);
        drop(pool);
        assert_eq!(&*part, b"34");
        assert!(part.exclusive().is_none() && part.grow(1) == 0);
        let all = all.unshare().expect_err("there is a part");
        drop(part);
        assert_eq!(&*all.unshare().expect("the only one"), b"0123456789");
    }

    #[test]
    fn an_unshared_slice_can_be_written_and_can_grow() {
        let pool = Pool::new();
        let mut slice = pool.take(10).expect("memory").share().part(0..3);
        slice.exclusive().expect("alone").copy_from_slice(b"abc");
        assert_eq!(slice.grow(usize::MAX), PAGE - 3);
        assert_eq!(
            (slice.len(), slice.footprint(), &slice[..3]),
            (PAGE, PAGE, &b"abc"[..])
        );
    }
}
