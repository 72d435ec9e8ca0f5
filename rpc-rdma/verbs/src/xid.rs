//! Transaction ids.

use std::hash::{BuildHasher, RandomState};

/// The first transaction id of an end. It differs for each run, because the other end may remember
/// transaction ids of an earlier run.
pub(crate) fn first() -> u32 {
    RandomState::new().hash_one(0) as u32
}
