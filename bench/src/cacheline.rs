//! A cache line sent to another core and back: the least that two threads can take to talk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const TRIPS: u64 = 1_000_000;

/// Microseconds for a round trip.
pub(crate) fn round_trip() -> f64 {
    let line = AtomicU64::new(0);
    // This thread answers even numbers, the other thread odd numbers.
    let answer = |parity: u64| {
        for turn in 0..TRIPS {
            let mine = 2 * turn + parity;
            while line.load(Ordering::Acquire) != mine {
                std::hint::spin_loop();
            }
            line.store(mine + 1, Ordering::Release);
        }
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| answer(1));
        answer(0);
    });
    start.elapsed().as_secs_f64() * 1e6 / TRIPS as f64
}
