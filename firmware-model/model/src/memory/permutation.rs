//! A keyed permutation of 24-bit numbers: dense slots inside, sparse and unpredictable STag indices
//! outside (row SEC-04).

const HALF: u32 = 12;
const HALF_MASK: u32 = (1 << HALF) - 1;
const ROUNDS: usize = 4;

/// Values of a permuted number.
pub(super) const DOMAIN: u32 = 1 << (2 * HALF);

/// A balanced Feistel network over two halves of 12 bits; four rounds make a strong pseudo-random
/// permutation out of pseudo-random round functions (Luby and Rackoff).
#[derive(Debug)]
pub(super) struct Permutation {
    keys: [u64; ROUNDS],
}

impl Permutation {
    pub(super) fn new(seed: [u64; ROUNDS]) -> Permutation {
        // SplitMix64's finisher: keys of few bits would not reach the bits that a round takes.
        let mixed = seed.map(|key| {
            let x = (key ^ key >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ x >> 31
        });
        Permutation { keys: mixed }
    }

    /// The permutation that has these [`keys`](Self::keys).
    pub(super) fn of_keys(keys: [u64; ROUNDS]) -> Permutation {
        Permutation { keys }
    }

    /// Its round keys, which a peer needs to find entries.
    pub(super) fn keys(&self) -> [u64; ROUNDS] {
        self.keys
    }

    #[inline]
    fn round(key: u64, half: u32) -> u32 {
        // One multiplication by a secret: it precedes every access to memory.
        ((key ^ u64::from(half)).wrapping_mul(key | 1) >> (64 - HALF)) as u32
    }

    /// The outside number of an inside one.
    #[inline]
    pub(super) fn forward(&self, n: u32) -> u32 {
        let (mut left, mut right) = (n >> HALF & HALF_MASK, n & HALF_MASK);
        for &key in &self.keys {
            (left, right) = (right, left ^ Self::round(key, right));
        }
        left << HALF | right
    }

    /// The inside number of an outside one.
    #[inline]
    pub(super) fn backward(&self, n: u32) -> u32 {
        let (mut left, mut right) = (n >> HALF & HALF_MASK, n & HALF_MASK);
        for &key in self.keys.iter().rev() {
            (left, right) = (right ^ Self::round(key, left), left);
        }
        left << HALF | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn backward_undoes_forward(seed: [u64; ROUNDS], n in 0..DOMAIN) {
            let p = Permutation::new(seed);
            let out = p.forward(n);
            prop_assert!(out < DOMAIN);
            prop_assert_eq!(p.backward(out), n);
        }
    }
}
