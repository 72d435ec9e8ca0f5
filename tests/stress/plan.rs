//! What both sides do in a round, and what their memory must hold afterwards. Both sides make the
//! same plan from the same seed, and each executes its half, so each has the plan of the other
//! without a message.
//!
//! The programs are legal ones. Requests that run at the same time touch different memory, except
//! where iWARP has an order: on one queue pair a Read or an atomic sees the Writes before it,
//! atomics of one queue pair come in order, what a fenced request sends was fetched before, and
//! additions to one counter commute. A Write is certain to have arrived only after a Send or a Read
//! after it, so each direction's requests end with one.

mod requests;

use std::collections::VecDeque;

use urnic_rdma_core::*;

use crate::host::{Change, Host, Naming, Region, Span};
use crate::layout::{COUNTER_COUNT, COUNTERS, KNOWN, REGION, REGIONS, SCRATCH_PIECES, SLOT_COUNT};
use crate::rng::SeededRng;
use crate::verbs::Shape;

/// Completion queues of a side.
pub(crate) const CQS: usize = 3;
/// Requests of a queue pair, at most.
const DEPTH: u32 = 64;
/// Memory windows of a side.
pub(crate) const WINDOWS: usize = 4;
/// Elements of a Read.
const READ_SGE: usize = 1;

const WRITE: u32 = IBV_ACCESS_LOCAL_WRITE;
const REMOTE: [u32; 3] = [
    IBV_ACCESS_REMOTE_WRITE,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_ATOMIC,
];
pub(crate) const EVERYTHING: u32 =
    WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

/// One end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    pub(crate) shape: Shape,
    pub(crate) send_cq: usize,
    pub(crate) receive_cq: usize,
    /// The end takes receives from the side's shared queue.
    pub(crate) shared: bool,
}

/// How the use of a window ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By the peer's last Send.
    Invalidated,
    /// By a request of the owner.
    Unbound,
    /// The window is freed while it is bound.
    Freed,
}

/// A window that is bound for a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window {
    /// Which of the side's windows.
    pub(crate) slot: usize,
    pub(crate) kind: ibv_mw_type,
    /// The connection whose queue pair binds the window; only that queue pair may use a window of
    /// type 2.
    pub(crate) link: usize,
    pub(crate) at: usize,
    pub(crate) len: usize,
    pub(crate) access: u32,
    pub(crate) ending: Ending,
    used: usize,
}

/// The peer's memory, and the window by which a request uses it, if not by the region.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    pub(crate) at: usize,
    pub(crate) window: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum What {
    Send,
    SendImm(u32),
    /// The peer's window is invalid afterwards.
    SendInv(usize),
    Write(Target),
    WriteImm(Target, u32),
    Read(Target),
    CompareSwap(Target, u64, u64),
    FetchAdd(Target, u64),
}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    pub(crate) what: What,
    pub(crate) local: Vec<Span>,
    /// Instead of `local`: the pieces themselves.
    pub(crate) inline: Option<Vec<Vec<u8>>>,
    pub(crate) flags: u32,
}

/// What arrives at a receive.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    pub(crate) opcode: u32,
    pub(crate) len: usize,
    pub(crate) imm: Option<u32>,
    /// The side's own window.
    pub(crate) invalidated: Option<usize>,
    /// The content of a slot of the shared queue. For other memory the model has the content.
    pub(crate) data: Vec<u8>,
}

/// A connection that is made again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Renewal {
    pub(crate) link: usize,
    /// How many receives are flushed before.
    pub(crate) farewell: usize,
    /// Alternatively, how many requests are in flight when the queue pair is destroyed.
    pub(crate) in_flight: usize,
    /// Whether the memory of the requests in flight is deregistered before.
    pub(crate) revoked: bool,
}

/// What one side does in a round.
#[derive(Default)]
pub(crate) struct Part {
    /// Regions to register otherwise.
    pub(crate) regions: Vec<(usize, Change)>,
    pub(crate) sizes: Vec<(usize, u32)>,
    pub(crate) windows: Vec<Window>,
    /// What this side first writes into its own memory.
    pub(crate) fills: Vec<(usize, Vec<u8>)>,
    /// By link: the receives, and whether they are posted late.
    pub(crate) receives: Vec<(Vec<Vec<Span>>, bool)>,
    /// Lists of requests, in the order of posting.
    pub(crate) chains: Vec<(usize, Vec<Op>)>,
    /// By link.
    pub(crate) arrivals: Vec<VecDeque<Arrival>>,
    /// The peer's counters before the round.
    pub(crate) counters: Vec<u64>,
    results: usize,
    shared: usize,
}

impl Part {
    /// The users of this side's own memory at that byte.
    pub(crate) fn who_uses(&self, at: usize) -> String {
        let within = |spans: &[Span]| {
            spans
                .iter()
                .any(|span| (span.at..span.at + span.len).contains(&at))
        };
        for (link, ops) in &self.chains {
            if let Some(op) = ops.iter().find(|op| within(&op.local)) {
                return format!(
                    "local memory at connection {link} of {:?} {:#x}",
                    op.what, op.flags
                );
            }
        }
        for (link, (receives, late)) in self.receives.iter().enumerate() {
            if let Some(i) = receives.iter().position(|spans| within(spans)) {
                return format!("receive {i} at connection {link}, late: {late}");
            }
        }
        "the peer's to use".to_owned()
    }
}

pub(crate) struct Round {
    pub(crate) renewals: Vec<Renewal>,
    pub(crate) parts: [Part; 2],
}

/// The state that both sides share.
pub(crate) struct World {
    rng: SeededRng,
    pub(crate) hosts: [Host; 2],
    pub(crate) links: Vec<[End; 2]>,
}

impl World {
    pub(crate) fn new(seed: u64, links: usize) -> World {
        let mut rng = SeededRng::new(seed);
        let mut host = || Host {
            memory: vec![0; KNOWN],
            regions: (0..REGIONS).map(|i| region(&mut rng, i)).collect(),
            used: vec![0; REGIONS],
            windows: (0..WINDOWS).map(|_| 1 + rng.below(2) as ibv_mw_type).collect(),
        };
        let hosts = [host(), host()];
        let links = (0..links).map(|_| [end(&mut rng), end(&mut rng)]).collect();
        World { rng, hosts, links }
    }

    /// Plans the next round and moves the model to the state of the memory after it.
    pub(crate) fn round(&mut self) -> Round {
        let mut round = Round {
            renewals: Vec::new(),
            parts: [Part::default(), Part::default()],
        };
        for link in 0..self.links.len() {
            if self.rng.chance(3) {
                let farewell = [0, self.rng.below(8)][self.rng.below(2)];
                let in_flight = match farewell {
                    0 => self.rng.below(SCRATCH_PIECES + 1),
                    _ => 0,
                };
                round.renewals.push(Renewal {
                    link,
                    farewell,
                    in_flight,
                    revoked: self.rng.chance(50),
                });
                self.links[link] = [end(&mut self.rng), end(&mut self.rng)];
            }
        }
        for side in 0..2 {
            self.prepare(side, &mut round.parts[side]);
            let counters = (0..COUNTER_COUNT).map(|i| self.hosts[side].word(COUNTERS + 8 * i));
            round.parts[1 - side].counters = counters.collect();
        }
        for side in 0..2 {
            let mut lists: Vec<VecDeque<Op>> = Vec::new();
            for link in 0..self.links.len() {
                lists.push(self.requests(side, link, &mut round.parts).into());
            }
            while lists.iter().any(|list| !list.is_empty()) {
                let link = self.rng.below(lists.len());
                let count = (1 + self.rng.below(6)).min(lists[link].len());
                let chain: Vec<Op> = lists[link].drain(..count).collect();
                if !chain.is_empty() {
                    round.parts[side].chains.push((link, chain));
                }
            }
        }
        for part in &mut round.parts {
            for (receives, late) in &mut part.receives {
                *late = !receives.is_empty() && self.rng.chance(15);
            }
        }
        round
    }

    fn prepare(&mut self, side: usize, part: &mut Part) {
        let (rng, host) = (&mut self.rng, &mut self.hosts[side]);
        for i in 0..REGIONS {
            host.used[i] = rng.below(64);
            if rng.chance(10) {
                let (before, new) = (host.regions[i], region(rng, i));
                let change = match rng.below(3) {
                    // The given name applies to new registrations.
                    0 if !matches!(new.naming, Naming::Given(_)) => Change::Again,
                    1 => Change::Rights,
                    _ => Change::Anew,
                };
                host.regions[i] = match change {
                    Change::Rights => Region {
                        access: new.access,
                        ..before
                    },
                    _ => new,
                };
                part.regions.push((i, change));
            }
        }
        if rng.chance(10) {
            part.sizes
                .push((rng.below(CQS), cq_size(self.links.len()) + rng.below(1000) as u32));
        }
        for slot in 0..WINDOWS {
            if rng.chance(50) {
                let access = REMOTE
                    .into_iter()
                    .filter(|_| rng.chance(60))
                    .fold(0, |all, right| all | right);
                let len = 8 + rng.below(8192);
                let home = rng.below(REGIONS);
                let at = host.used[home].next_multiple_of(8);
                let may = host.regions[home].access & IBV_ACCESS_MW_BIND != 0
                    && host.regions[home].naming == Naming::Address
                    && (access & (REMOTE[0] | REMOTE[2]) == 0 || host.regions[home].access & WRITE != 0);
                if access == 0 || !may || at + len > REGION {
                    continue;
                }
                host.used[home] = at + len;
                let (link, kind) = (rng.below(self.links.len()), host.windows[slot]);
                let another = part
                    .windows
                    .iter()
                    .any(|w: &Window| w.link == link && w.ending == Ending::Invalidated);
                let ending = match rng.below(4) {
                    0 | 1 if kind == IBV_MW_TYPE_2 && !another => Ending::Invalidated,
                    2 => Ending::Freed,
                    _ => Ending::Unbound,
                };
                if ending == Ending::Freed {
                    host.windows[slot] = 1 + rng.below(2) as ibv_mw_type;
                }
                let at = home * REGION + at;
                part.windows.push(Window {
                    slot,
                    kind,
                    link,
                    at,
                    len,
                    access,
                    ending,
                    used: 0,
                });
            }
        }
        part.receives = self.links.iter().map(|_| (Vec::new(), false)).collect();
        part.arrivals = self.links.iter().map(|_| VecDeque::new()).collect();
    }
}

/// Room for all that can complete in a round.
pub(crate) fn cq_size(links: usize) -> u32 {
    (links as u32) * 2 * DEPTH + SLOT_COUNT as u32
}

/// The first region of a side can do everything.
fn region(rng: &mut SeededRng, i: usize) -> Region {
    let rights = [WRITE, REMOTE[0], REMOTE[1], REMOTE[2], IBV_ACCESS_MW_BIND];
    let chosen = rights
        .into_iter()
        .filter(|_| rng.chance(70))
        .fold(0, |all, right| all | right);
    let naming = match rng.below(4) {
        0 => Naming::Zero,
        // The name has the same offset in a page as the memory, which begins a page.
        1 => Naming::Given((rng.next() >> 20) & !0xfff),
        _ => Naming::Address,
    };
    let on_demand = rng.chance(20);
    let needed = if chosen & (REMOTE[0] | REMOTE[2]) != 0 {
        WRITE
    } else {
        0
    };
    match i {
        0 => Region {
            access: EVERYTHING,
            naming: Naming::Address,
            on_demand: false,
        },
        _ => Region {
            access: chosen | needed,
            naming,
            on_demand,
        },
    }
}

fn end(rng: &mut SeededRng) -> End {
    End {
        shape: Shape {
            depth: 16 + rng.below(DEPTH as usize - 15) as u32,
            sge: [1, 2, 4, 16][rng.below(4)],
            inline: [0, 64, 512][rng.below(3)],
            signal_all: rng.chance(15),
            builder: rng.chance(40),
        },
        send_cq: rng.below(CQS),
        receive_cq: rng.below(CQS),
        shared: rng.chance(40),
    }
}
