//! Numbers that depend on the seed alone (splitmix64), the same for both sides.

pub(crate) struct SeededRng(u64);

impl SeededRng {
    pub(crate) fn new(seed: u64) -> SeededRng {
        SeededRng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// One of 0 … n - 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// True in this percentage of the cases.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next()).take(len.div_ceil(8));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(len);
        bytes
    }

    /// A length: mostly short, sometimes zero, rarely many segments.
    pub(crate) fn len(&mut self) -> usize {
        match self.below(100) {
            0..8 => 0,
            8..58 => 1 + self.below(64),
            58..83 => 1 + self.below(2048),
            83..97 => 1 + self.below(16 << 10),
            _ => 1 + self.below(100_000),
        }
    }
}
