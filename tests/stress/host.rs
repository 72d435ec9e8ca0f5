//! A side in the model: its memory, how that memory is registered, and which parts are in use.

use urnic_rdma_core::*;

use crate::layout::{REGION, REGIONS};
use crate::rng::SeededRng;

/// Part of a side's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// The address of a region's first byte in work requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    Address,
    Zero,
    Given(u64),
}

/// How a region is registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region {
    pub(crate) access: u32,
    pub(crate) naming: Naming,
    /// On demand, where the device supports that.
    pub(crate) on_demand: bool,
}

/// How the registration of a region changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Deregistered and registered again.
    Anew,
    /// `ibv_rereg_mr` with the same memory and rights.
    Again,
    /// `ibv_rereg_mr` with new rights only.
    Rights,
}

/// The model's state of a side.
pub(crate) struct Host {
    pub(crate) memory: Vec<u8>,
    pub(crate) regions: Vec<Region>,
    /// By region: what is in use up to there in this round.
    pub(crate) used: Vec<usize>,
    pub(crate) windows: Vec<ibv_mw_type>,
}

impl Host {
    /// Part of a region with these rights that is not used in this round.
    pub(crate) fn span(&mut self, rng: &mut SeededRng, len: usize, access: u32) -> Option<Span> {
        for _ in 0..12 {
            let i = rng.below(REGIONS);
            let at =
                (self.used[i] + rng.below(40)).next_multiple_of(8) + [0, rng.below(8)][usize::from(len != 8)];
            if self.regions[i].access & access == access && at + len < REGION {
                self.used[i] = at + len;
                return Some(Span {
                    at: i * REGION + at,
                    len,
                });
            }
        }
        None
    }

    /// `len` bytes in up to `most` pieces.
    pub(crate) fn spans(
        &mut self,
        rng: &mut SeededRng,
        len: usize,
        most: usize,
        access: u32,
    ) -> Option<Vec<Span>> {
        let mut left = len;
        let mut count = 1 + rng.below(most) * usize::from(rng.chance(40));
        if len == 0 && rng.chance(50) {
            return Some(Vec::new());
        }
        let mut spans = Vec::new();
        while count > 0 {
            let piece = if count == 1 { left } else { rng.below(left + 1) };
            spans.push(self.span(rng, piece, access)?);
            (left, count) = (left - piece, count - 1);
        }
        Some(spans)
    }

    pub(crate) fn gather(&self, spans: &[Span]) -> Vec<u8> {
        let pieces = spans.iter().map(|span| &self.memory[span.at..span.at + span.len]);
        pieces.collect::<Vec<_>>().concat()
    }

    pub(crate) fn scatter(&mut self, spans: &[Span], mut data: &[u8]) {
        for span in spans {
            let (now, later) = data.split_at(span.len.min(data.len()));
            self.memory[span.at..span.at + now.len()].copy_from_slice(now);
            data = later;
        }
    }

    pub(crate) fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.memory[at..at + 8].try_into().expect("eight bytes"))
    }

    pub(crate) fn set_word(&mut self, at: usize, word: u64) {
        self.memory[at..at + 8].copy_from_slice(&word.to_ne_bytes());
    }
}
