//! Pseudo-random numbers that depend only on their seeds.

/// A number for each combination of these three (the finaliser of SplitMix64).
pub(crate) fn number(seed: u64, fault: u64, occasion: u64) -> u64 {
    let mut z = seed
        .wrapping_add(fault.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(occasion.wrapping_mul(0xd1b5_4a32_d192_ed03));
    for _ in 0..2 {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
    }
    z
}

/// A number as a fraction, from 0 to less than 1.
pub(crate) fn fraction(number: u64) -> f64 {
    (number >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_spread_evenly() {
        for seed in 0..4 {
            let below = |limit: f64| {
                let all = (0..10_000).filter(|occasion| fraction(number(seed, 1, *occasion)) < limit);
                all.count()
            };
            assert!((400..600).contains(&below(0.05)), "{}", below(0.05));
            assert!((4_800..5_200).contains(&below(0.5)), "{}", below(0.5));
        }
    }
}
