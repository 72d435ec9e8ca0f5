//! The clock of plans.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The time since the first call in this process.
pub(crate) fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}
