//! The completions and the content of the memory, compared with the plan.

use std::collections::HashMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use urnic_rdma_core::*;

use super::{Link, SLOT_ID, Side};
use crate::arena::Arena;
use crate::layout::{KNOWN, SLOT, SLOTS};
use crate::plan::{Part, World};
use crate::verbs::Completion;

/// The time limit for a round on a busy machine. A round normally takes milliseconds.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Panics with a description when two values differ.
#[track_caller]
fn same<T: PartialEq + Debug>(what: impl Fn() -> String, got: T, want: T) {
    assert!(got == want, "{}: {got:?}, not {want:?}", what());
}

impl Side {
    pub(super) fn poll(&mut self) {
        let mut found = Vec::new();
        self.cqs.iter().for_each(|cq| cq.take(&mut found));
        let numbers: HashMap<u32, usize> = self
            .links
            .iter()
            .enumerate()
            .map(|(i, link)| (link.qp.number(), i))
            .collect();
        for completion in found {
            let Some(&i) = numbers.get(&completion.qp) else {
                panic!("side {}: of no queue pair: {completion:?}", self.number);
            };
            self.completions += 1;
            self.completed(i, completion);
        }
    }

    fn completed(&mut self, i: usize, completion: Completion) {
        let what = || format!("side {}, connection {i}: {completion:?}", self.number);
        let link = &mut self.links[i];
        if completion.opcode & IBV_WC_RECV == 0 {
            let want = link
                .sends
                .pop_front()
                .unwrap_or_else(|| panic!("{}: one too many", what()));
            same(
                what,
                (completion.id, completion.opcode, completion.status),
                (want.0, want.1, 0),
            );
            return;
        }
        let id = match completion.id & SLOT_ID {
            0 => link
                .receives
                .pop_front()
                .unwrap_or_else(|| panic!("{}: no receive was posted", what())),
            _ => completion.id,
        };
        if link.farewell > 0 {
            link.farewell -= 1;
            same(
                what,
                (completion.id, completion.status),
                (id, IBV_WC_WR_FLUSH_ERR),
            );
            return;
        }
        let arrival = link
            .arrivals
            .pop_front()
            .unwrap_or_else(|| panic!("{}: nothing was sent", what()));
        same(
            what,
            (completion.id, completion.status, completion.opcode),
            (id, 0, arrival.opcode),
        );
        same(
            what,
            (completion.len as usize, completion.vendor),
            (arrival.len, 0),
        );
        let (flags, extra) = match (arrival.imm, arrival.invalidated) {
            (Some(imm), _) => (IBV_WC_WITH_IMM, imm),
            (_, Some(window)) => (IBV_WC_WITH_INV, self.bound[window]),
            _ => (0, completion.extra),
        };
        same(what, (completion.flags, completion.extra), (flags, extra));
        if id & SLOT_ID != 0 {
            let (slot, len) = (id & !SLOT_ID, arrival.data.len());
            let place = self.arena.read(SLOTS + SLOT * slot as usize, SLOT);
            assert!(place[..len] == arrival.data, "{}: other data arrived", what());
            assert!(
                place[len..].iter().all(|byte| *byte == 0),
                "{}: there is more after it",
                what()
            );
            self.arena.write(SLOTS + SLOT * slot as usize, &vec![0; len]);
            self.slots.push(slot);
        }
    }

    /// Polls until all expected completions have come.
    pub(super) fn wait(&mut self, what: &str) {
        let deadline = Instant::now() + TIME_LIMIT;
        let over = |link: &Link| link.sends.is_empty() && link.arrivals.is_empty() && link.farewell == 0;
        loop {
            self.poll();
            if self.links.iter().all(over) {
                return;
            }
            if Instant::now() > deadline {
                let missing = self.links.iter().enumerate().filter(|(_, link)| !over(link));
                let missing: Vec<String> = missing
                    .map(|(i, link)| {
                        let (sends, receives) = (&link.sends, link.arrivals.len() + link.farewell);
                        format!(
                            "connection {i} (QP {}): requests {sends:?}, {receives} receives",
                            link.qp.number()
                        )
                    })
                    .collect();
                panic!("side {}: {what} do not come: {}", self.number, missing.join("; "));
            }
        }
    }

    /// Checks that the memory matches the model.
    pub(super) fn compare(&mut self, world: &World, part: &Part) {
        let known = &world.hosts[self.number].memory;
        let found = self.arena.read(0, KNOWN);
        if found != *known {
            let differs = |at: &usize| found[*at] != known[*at];
            let at = (0..KNOWN).find(differs).unwrap_or_default();
            let count = (0..KNOWN).filter(differs).count();
            panic!(
                "side {}: byte {at:#x} is {:#x}, not {:#x} ({count} bytes differ); {}",
                self.number,
                found[at],
                known[at],
                part.who_uses(at)
            );
        }
        // The values fetched from a counter are the values that it had one after the other.
        let mut fetched = std::mem::take(&mut self.fetched);
        fetched.sort_by_key(|(at, counter, _)| (*counter, word(&self.arena, *at)));
        let mut counters = part.counters.clone();
        for (at, counter, add) in fetched {
            let what = || format!("side {}, what was fetched from counter {counter}", self.number);
            same(what, word(&self.arena, at), counters[counter]);
            counters[counter] += add;
        }
    }
}

fn word(arena: &Arena, at: usize) -> u64 {
    u64::from_ne_bytes(arena.read(at, 8).try_into().expect("eight"))
}
