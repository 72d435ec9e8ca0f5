//! Receive buffers. A stream has one only while a partial FPDU is in it, so idle queue pairs have
//! none.

use crate::shard::{SHARDS, home_shard};
use crossbeam_utils::atomic::AtomicCell;
use std::fmt;
use urnic_sync::Mutex;

/// Bytes of a receive buffer. An FPDU of 64 KiB that starts anywhere in the first half of it need
/// not be moved.
pub const BUFFER_LEN: usize = 256 << 10;

/// A receive buffer.
pub type Buffer = Box<[u8; BUFFER_LEN]>;

/// The buffers that a shard keeps besides the one in `last`.
const KEPT_PER_SHARD: usize = 3;

#[repr(align(64))]
#[derive(Default)]
struct Shard {
    /// The buffer that was given back last. Taking it or giving it back is one atomic instruction.
    last: AtomicCell<Option<Buffer>>,
    others: Mutex<Vec<Buffer>>,
}

const _: () = assert!(AtomicCell::<Option<Buffer>>::is_lock_free());

impl Shard {
    fn take(&self) -> Option<Buffer> {
        let other = || self.others.try_lock()?.pop();
        self.last.take().or_else(other)
    }
}

/// The pool of receive buffers. Threads find their own shard first and never
/// wait for one another.
#[derive(Default)]
pub struct BufferPool {
    shards: [Shard; SHARDS],
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool").finish_non_exhaustive()
    }
}

impl BufferPool {
    /// A buffer of [`BUFFER_LEN`] bytes with arbitrary contents.
    pub fn take(&self) -> Buffer {
        let home = home_shard();
        (0..SHARDS)
            .find_map(|i| self.shards[(home + i) % SHARDS].take())
            .unwrap_or_else(new)
    }

    /// Gives a buffer back.
    pub fn give(&self, buffer: Buffer) {
        let shard = &self.shards[home_shard()];
        if let Some(other) = shard.last.swap(Some(buffer))
            && let Some(mut others) = shard.others.try_lock()
            && others.len() < KEPT_PER_SHARD
        {
            others.push(other);
        }
    }
}

/// A zeroed buffer. The system allocates its pages when they are used.
#[cold]
fn new() -> Buffer {
    let Ok(buffer) = vec![0; BUFFER_LEN].try_into() else {
        unreachable!("it has this length")
    };
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_given_back_is_taken_again() {
        let pool = BufferPool::default();
        let mut buffer = pool.take();
        assert_eq!(buffer.len(), BUFFER_LEN);
        buffer[7] = 42;
        pool.give(buffer);
        assert_eq!(pool.take()[7], 42);
        assert_eq!(pool.take()[7], 0);
    }
}
