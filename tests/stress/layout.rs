//! The layout of a side's memory.

/// Bytes of a region.
pub(crate) const REGION: usize = 1 << 18;
/// Regions of a side.
pub(crate) const REGIONS: usize = 6;
/// After the regions: counters that all queue pairs add to.
pub(crate) const COUNTERS: usize = REGIONS * REGION;
pub(crate) const COUNTER_COUNT: usize = 8;
/// The end of the memory that the model tracks.
pub(crate) const KNOWN: usize = COUNTERS + 8 * COUNTER_COUNT;
/// After the tracked memory: the results of fetches from the counters.
pub(crate) const RESULTS: usize = COUNTERS + 4096;
pub(crate) const RESULT_COUNT: usize = 1024;
/// After the results: the slots of the shared receive queue.
pub(crate) const SLOTS: usize = RESULTS + 8 * RESULT_COUNT;
pub(crate) const SLOT: usize = 4096;
pub(crate) const SLOT_COUNT: usize = 96;
/// The last part: memory that unawaited requests write and read.
pub(crate) const SCRATCH: usize = SLOTS + SLOT * SLOT_COUNT;
pub(crate) const SCRATCH_PIECE: usize = 1 << 15;
pub(crate) const SCRATCH_PIECES: usize = 8;
pub(crate) const ARENA: usize = SCRATCH + SCRATCH_PIECE * SCRATCH_PIECES;
