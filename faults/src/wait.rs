//! The waiting of faults.

use std::time::{Duration, Instant};

/// A shorter wait is spent on the processor: the kernel's timers are late by about as much.
const SHORTEST_SLEEP: Duration = Duration::from_micros(200);

/// Waits for this time on the calling thread.
pub fn wait(time: Duration) {
    let until = Instant::now() + time;
    if time >= SHORTEST_SLEEP {
        std::thread::sleep(time);
    }
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}
