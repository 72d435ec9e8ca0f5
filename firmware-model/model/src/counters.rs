//! Counters. Each queue pair has its own set, which only the holder of the queue pair's lock
//! writes: counting costs a load and a store.

use std::sync::atomic::{AtomicU64, Ordering};

pub use urnic_device::counter::Counter;

/// One set of counters.
#[derive(Debug)]
pub struct Counters([AtomicU64; Counter::ALL.len()]);

impl Default for Counters {
    fn default() -> Counters {
        Counters(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counters {
    /// Adds `n`. One writer at a time: simultaneous additions of two threads may be lost.
    #[inline]
    pub fn add(&self, counter: Counter, n: u64) {
        let c = &self.0[counter as usize];
        c.store(c.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Adds `n` from any thread.
    pub(crate) fn add_shared(&self, counter: Counter, n: u64) {
        self.0[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// The present value.
    pub fn value(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    /// Adds all values of `other` to `sums`.
    pub(crate) fn sum_into(&self, sums: &mut [u64; Counter::ALL.len()]) {
        for (sum, c) in sums.iter_mut().zip(&self.0) {
            *sum = sum.wrapping_add(c.load(Ordering::Relaxed));
        }
    }
}
