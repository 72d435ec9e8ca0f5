//! Receive buffers. A stream holds one only while it has a partial FPDU, so idle queue pairs hold
//! none.

use crate::sched::shard::{SHARDS, home_shard};
use std::sync::Mutex;

/// Bytes of a receive buffer: an FPDU of 64 KiB that starts anywhere in the first half need not be
/// moved.
pub const BUFFER_LEN: usize = 256 << 10;

/// A receive buffer.
pub type Buffer = Box<[u8]>;

const KEPT_PER_SHARD: usize = 4;

#[repr(align(64))]
#[derive(Debug, Default)]
struct Shard(Mutex<Vec<Buffer>>);

/// The pool of receive buffers. Threads find their own shard first and never
/// wait for one another.
#[derive(Debug, Default)]
pub struct BufferPool {
    shards: [Shard; SHARDS],
}

impl BufferPool {
    /// A buffer of [`BUFFER_LEN`] bytes with arbitrary contents.
    pub fn take(&self) -> Buffer {
        let home = home_shard();
        (0..SHARDS)
            .find_map(|i| self.shards[(home + i) % SHARDS].0.try_lock().ok()?.pop())
            .unwrap_or_else(|| vec![0; BUFFER_LEN].into_boxed_slice())
    }

    /// Gives a buffer back.
    pub fn give(&self, buffer: Buffer) {
        debug_assert_eq!(buffer.len(), BUFFER_LEN);
        if let Ok(mut kept) = self.shards[home_shard()].0.try_lock()
            && kept.len() < KEPT_PER_SHARD
        {
            kept.push(buffer);
        }
    }
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
