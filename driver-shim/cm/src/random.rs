//! Random numbers of the connection managers.

use std::hash::{DefaultHasher, Hasher};

/// Numbers that nobody can predict who does not know the seed, even from others of them: peers get
/// many.
#[derive(Debug)]
pub(crate) struct Random {
    seed: u64,
    taken: u64,
}

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random { seed, taken: 0 }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.taken = self.taken.wrapping_add(1);
        // SipHash of the secret and a counter.
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(self.seed);
        hasher.write_u64(self.taken);
        hasher.write_u64(self.seed.rotate_left(32));
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_depend_on_the_seed_and_differ() {
        let mut numbers: Vec<u64> = Vec::new();
        for seed in [0, 1, 2] {
            let mut random = Random::new(seed);
            numbers.extend((0..1000).map(|_| random.next()));
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 3000);
    }
}
