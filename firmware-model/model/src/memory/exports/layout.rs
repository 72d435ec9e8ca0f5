//! Where things are in a table.

/// Offsets in the header, and the header's length.
pub(super) const PROOF: usize = 0;
pub(super) const KEYS: usize = 8;
pub(super) const HEADER: usize = 64;
/// Offsets in an entry, and an entry's length.
pub(super) const STATE: usize = 0;
pub(super) const STAG_PD: usize = 8;
pub(super) const QID_ACCESS: usize = 16;
pub(super) const BASE: usize = 24;
pub(super) const LEN: usize = 32;
pub(super) const ADDRESS: usize = 40;
pub(super) const PROCESS: usize = 48;
pub(super) const ENTRY: usize = 64;

/// The process that an entry's address is of: the device's, or that of its host.
pub(super) const OF_DEVICE: u64 = 0;
pub(super) const OF_HOST: u64 = 1;

/// A word of two numbers.
pub(super) fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Bytes of a table with this number of entries.
pub(super) fn table_len(slots: u32) -> usize {
    HEADER + slots as usize * ENTRY
}
