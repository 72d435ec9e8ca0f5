//! One side: executes its half of each round with real verbs, and compares the results with the
//! plan.

mod completions;
mod windows;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use urnic_rdma_core::*;

use crate::arena::Arena;
use crate::host::{Change, Host, Naming, Span};
use crate::layout::{ARENA, COUNTERS, REGION, REGIONS, SCRATCH, SCRATCH_PIECE, SLOT, SLOT_COUNT, SLOTS};
use crate::plan::*;
use crate::verbs::{Cq, Device, Manner, Mr, Mw, Qp, Receive, Request, Srq, Work};

/// In the id of a receive from the shared queue, with the slot's number.
const SLOT_ID: u64 = 1 << 40;

struct Link {
    qp: Qp,
    shared: bool,
    signal_all: bool,
    /// Successful completions to come, in order: ids and opcodes.
    sends: VecDeque<(u64, u32)>,
    /// Ids of receives that are posted, in order.
    receives: VecDeque<u64>,
    arrivals: VecDeque<Arrival>,
    /// Number of flushed receives to come.
    farewell: usize,
}

/// The parameters of the peer's memory.
#[derive(Default)]
struct Peer {
    names: Vec<u64>,
    keys: Vec<u32>,
    counters: u32,
    counters_at: u64,
    windows: Vec<u32>,
}

pub(crate) struct Side {
    number: usize,
    socket: UnixStream,
    links: Vec<Link>,
    windows: Vec<Mw>,
    mrs: Vec<Mr>,
    /// Counters, results and the shared queue's places.
    rest: Mr,
    srq: Srq,
    cqs: Vec<Cq>,
    peer: Peer,
    /// The keys of windows bound in this round.
    bound: Vec<u32>,
    slots: Vec<u64>,
    next_id: u64,
    /// Where a fetched counter is, which one it was, and how much was added.
    fetched: Vec<(usize, usize, u64)>,
    completions: u64,
    device: Device,
    arena: Arena,
}

impl Side {
    pub(crate) fn new(number: usize, socket: UnixStream, world: &World) -> Side {
        let (device, arena) = (Device::open(), Arena::new(ARENA));
        let host = &world.hosts[number];
        let mrs = (0..REGIONS)
            .map(|i| registered(&device, &arena, host, i))
            .collect();
        let rest_len = ARENA - COUNTERS;
        let rest = Mr::new(
            &device,
            &arena,
            COUNTERS,
            rest_len,
            arena.address(COUNTERS),
            EVERYTHING,
        );
        let manners = [Manner::Polled, Manner::Extended, Manner::Events];
        let size = cq_size(world.links.len());
        let cqs: Vec<Cq> = manners.map(|manner| Cq::new(&device, size, manner)).into();
        let srq = Srq::new(&device, SLOT_COUNT as u32, 1);
        let windows = host.windows.iter().map(|kind| Mw::new(&device, *kind)).collect();
        let links = world
            .links
            .iter()
            .map(|ends| link(&device, &ends[number], &cqs, &srq))
            .collect();
        let mut side = Side {
            number,
            socket,
            links,
            windows,
            mrs,
            rest,
            srq,
            cqs,
            peer: Peer::default(),
            bound: Vec::new(),
            slots: (0..SLOT_COUNT as u64).collect(),
            next_id: 0,
            fetched: Vec::new(),
            completions: 0,
            device,
            arena,
        };
        (0..side.links.len()).for_each(|i| side.connect(i));
        side
    }

    /// Completions taken so far.
    pub(crate) fn completions(&self) -> u64 {
        self.completions
    }

    /// Exchanges words with the peer. Both sides send the same number of words.
    fn exchange(&mut self, words: &[u64]) -> Vec<u64> {
        let mine: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut theirs = vec![0; mine.len()];
        self.socket.write_all(&mine).expect("the other side");
        self.socket.read_exact(&mut theirs).expect("the other side");
        let words = theirs.as_chunks().0.iter();
        words.map(|word| u64::from_le_bytes(*word)).collect()
    }

    fn barrier(&mut self) {
        self.exchange(&[0]);
    }

    fn connect(&mut self, i: usize) {
        let gid = self.device.gid();
        let (head, tail) = gid.raw.split_at(8);
        let word = |half: &[u8]| u64::from_ne_bytes(half.try_into().expect("eight"));
        let theirs = self.exchange(&[self.links[i].qp.number().into(), word(head), word(tail)]);
        let mut gid = ibv_gid { raw: [0; 16] };
        gid.raw[..8].copy_from_slice(&theirs[1].to_ne_bytes());
        gid.raw[8..].copy_from_slice(&theirs[2].to_ne_bytes());
        self.links[i].qp.connect(gid, theirs[0] as u32);
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Executes this side's half of a round and compares the results.
    pub(crate) fn play(&mut self, world: &World, round: &Round) {
        let part = &round.parts[self.number];
        self.renew(world, &round.renewals);
        for &(i, change) in &part.regions {
            let host = &world.hosts[self.number];
            // Both together would be legal, too, but the check does not support a key in two
            // places.
            match change {
                Change::Anew => self.mrs[i] = registered(&self.device, &self.arena, host, i),
                Change::Again => {
                    let name = name(&self.arena, host, i);
                    let rights = rights(&self.device, host, i);
                    self.mrs[i].moved(&self.arena, i * REGION, REGION, name, rights);
                }
                Change::Rights => self.mrs[i].restricted(rights(&self.device, host, i)),
            }
        }
        part.sizes.iter().for_each(|&(i, size)| self.cqs[i].resize(size));
        part.fills
            .iter()
            .for_each(|(at, bytes)| self.arena.write(*at, bytes));
        self.bind(part);
        let slots = std::mem::take(&mut self.slots);
        let place = |slot: u64| sge(self.arena.address(SLOTS + SLOT * slot as usize), SLOT, &self.rest);
        let mut list: Vec<Receive> = slots
            .into_iter()
            .map(|slot| (SLOT_ID | slot, vec![place(slot)]))
            .collect();
        self.srq.post(&mut list);
        self.receives(part, false);
        for (link, arrivals) in self.links.iter_mut().zip(&part.arrivals) {
            link.arrivals = arrivals.clone();
        }
        self.introduce();
        for (i, chain) in part.chains.iter().enumerate() {
            if i == part.chains.len() / 2 {
                self.receives(part, true);
            }
            self.post(chain);
            self.poll();
        }
        if part.chains.is_empty() {
            self.receives(part, true);
        }
        self.wait("the round's completions");
        self.barrier();
        self.compare(world, part);
        self.unbind(part, world);
        // A side that continues may end a connection that the other side still needs.
        self.barrier();
    }

    /// Ends these connections and makes them again.
    fn renew(&mut self, world: &World, renewals: &[Renewal]) {
        for renewal in renewals {
            let i = renewal.link;
            if renewal.farewell > 0 {
                if !self.links[i].shared {
                    let mut list: Vec<Receive> =
                        (0..renewal.farewell).map(|_| (self.id(), Vec::new())).collect();
                    self.links[i]
                        .receives
                        .extend(list.iter().map(|receive| receive.0));
                    self.links[i].qp.receive(&mut list);
                    self.links[i].farewell = renewal.farewell;
                }
                self.barrier();
                self.links[i].qp.fail();
                self.wait("flushed receives");
                self.barrier();
            }
            let memory = self.leave_in_flight(renewal);
            let end = &world.links[i][self.number];
            self.links[i] = link(&self.device, end, &self.cqs, &self.srq);
            drop(memory);
            self.connect(i);
        }
    }

    /// Posts requests that are never awaited, because the queue pair is about to be destroyed.
    /// Returns their memory, unless that is deregistered, too.
    fn leave_in_flight(&mut self, renewal: &Renewal) -> Option<Mr> {
        // In the first round the peer has not yet sent the names of its memory.
        if renewal.in_flight == 0 || self.peer.names.is_empty() {
            return None;
        }
        let (at, len) = (SCRATCH, ARENA - SCRATCH);
        let mr = Mr::new(
            &self.device,
            &self.arena,
            at,
            len,
            self.arena.address(at),
            EVERYTHING,
        );
        let mut requests: Vec<Request> = (0..renewal.in_flight)
            .map(|n| {
                let there = self.peer.counters_at + (SCRATCH - COUNTERS + n * SCRATCH_PIECE) as u64;
                let key = self.peer.counters;
                let here = self.arena.address(SCRATCH + n * SCRATCH_PIECE);
                let (work, len) = match n % 3 {
                    0 => (Work::Write(there, key), SCRATCH_PIECE),
                    1 => (Work::Read(there, key), SCRATCH_PIECE),
                    _ => (Work::FetchAdd(there, key, 1), 8),
                };
                Request {
                    list: vec![sge(here, len, &mr)],
                    ..signaled(n as u64, work)
                }
            })
            .collect();
        self.links[renewal.link].qp.post(&mut requests);
        (!renewal.revoked).then_some(mr)
    }

    /// Sends the names and keys of the memory to the peer, and receives the peer's.
    fn introduce(&mut self) {
        let mut words: Vec<u64> = Vec::new();
        self.mrs
            .iter()
            .for_each(|mr| words.extend([mr.name(), mr.key().into()]));
        words.extend([self.rest.key().into(), self.rest.name()]);
        // The peer may have bound more, or fewer.
        words.extend((0..WINDOWS).map(|i| self.bound.get(i).map_or(0, |key| u64::from(*key))));
        let theirs = self.exchange(&words);
        let (regions, rest) = theirs.split_at(2 * REGIONS);
        self.peer = Peer {
            names: regions.iter().step_by(2).copied().collect(),
            keys: regions.iter().skip(1).step_by(2).map(|key| *key as u32).collect(),
            counters: rest[0] as u32,
            counters_at: rest[1],
            windows: rest[2..].iter().map(|key| *key as u32).collect(),
        };
    }

    fn remote(&self, target: Target) -> (u64, u32) {
        if target.at >= COUNTERS {
            return (
                self.peer.counters_at + (target.at - COUNTERS) as u64,
                self.peer.counters,
            );
        }
        let (region, offset) = (target.at / REGION, target.at % REGION);
        let key = target
            .window
            .map_or(self.peer.keys[region], |window| self.peer.windows[window]);
        (self.peer.names[region] + offset as u64, key)
    }

    /// Elements for our own memory.
    fn list(&self, spans: &[Span]) -> Vec<ibv_sge> {
        let element = |span: &Span| {
            if span.at >= COUNTERS {
                return sge(self.arena.address(span.at), span.len, &self.rest);
            }
            let region = span.at / REGION;
            sge(
                self.mrs[region].name() + (span.at % REGION) as u64,
                span.len,
                &self.mrs[region],
            )
        };
        spans.iter().map(element).collect()
    }

    fn receives(&mut self, part: &Part, late: bool) {
        for (i, (receives, is_late)) in part.receives.iter().enumerate() {
            if *is_late == late && !receives.is_empty() {
                let mut list: Vec<Receive> = receives
                    .iter()
                    .map(|spans| (self.id(), self.list(spans)))
                    .collect();
                self.links[i]
                    .receives
                    .extend(list.iter().map(|receive| receive.0));
                self.links[i].qp.receive(&mut list);
            }
        }
    }

    fn post(&mut self, (i, chain): &(usize, Vec<Op>)) {
        let mut scratch: Vec<Vec<u8>> = Vec::new();
        let mut requests = Vec::new();
        for op in chain {
            let id = self.id();
            let (to, key) = match op.what {
                What::Write(at) | What::WriteImm(at, _) | What::Read(at) => self.remote(at),
                What::CompareSwap(at, ..) | What::FetchAdd(at, _) => self.remote(at),
                _ => (0, 0),
            };
            let (work, opcode) = match op.what {
                What::Send => (Work::Send, IBV_WC_SEND),
                What::SendImm(imm) => (Work::SendImm(imm), IBV_WC_SEND),
                What::SendInv(window) => (Work::SendInv(self.peer.windows[window]), IBV_WC_SEND),
                What::Write(_) => (Work::Write(to, key), IBV_WC_RDMA_WRITE),
                What::WriteImm(_, imm) => (Work::WriteImm(to, key, imm), IBV_WC_RDMA_WRITE),
                What::Read(_) => (Work::Read(to, key), IBV_WC_RDMA_READ),
                What::CompareSwap(_, old, new) => (Work::CompareSwap(to, key, old, new), IBV_WC_COMP_SWAP),
                What::FetchAdd(target, add) => {
                    if target.at >= COUNTERS {
                        self.fetched
                            .push((op.local[0].at, (target.at - COUNTERS) / 8, add));
                    }
                    (Work::FetchAdd(to, key, add), IBV_WC_FETCH_ADD)
                }
            };
            let list = match &op.inline {
                None => self.list(&op.local),
                Some(pieces) => {
                    let first = scratch.len();
                    scratch.extend(pieces.iter().cloned());
                    let element = |piece: &Vec<u8>| ibv_sge {
                        addr: piece.as_ptr().addr() as u64,
                        length: piece.len() as u32,
                        // The key is not checked.
                        lkey: 0xdead_beef,
                    };
                    scratch[first..].iter().map(element).collect()
                }
            };
            if op.flags & IBV_SEND_SIGNALED != 0 || self.links[*i].signal_all {
                self.links[*i].sends.push_back((id, opcode));
            }
            requests.push(Request {
                id,
                flags: op.flags,
                work,
                list,
            });
        }
        self.links[*i].qp.post(&mut requests);
        // The program may change inline data at once.
        scratch.iter_mut().for_each(|piece| piece.fill(0xee));
    }
}

fn sge(addr: u64, len: usize, mr: &Mr) -> ibv_sge {
    ibv_sge {
        addr,
        length: len as u32,
        lkey: mr.key(),
    }
}

fn signaled(id: u64, work: Work<'_>) -> Request<'_> {
    let (flags, list) = (IBV_SEND_SIGNALED, Vec::new());
    Request {
        id,
        flags,
        work,
        list,
    }
}

fn name(arena: &Arena, host: &Host, region: usize) -> u64 {
    match host.regions[region].naming {
        Naming::Address => arena.address(region * REGION),
        Naming::Zero => 0,
        Naming::Given(name) => name,
    }
}

fn registered(device: &Device, arena: &Arena, host: &Host, region: usize) -> Mr {
    let (name, rights) = (name(arena, host, region), rights(device, host, region));
    Mr::new(device, arena, region * REGION, REGION, name, rights)
}

fn rights(device: &Device, host: &Host, region: usize) -> u32 {
    let region = &host.regions[region];
    let bit = |given: bool, bit: u32| if given { bit } else { 0 };
    region.access
        | bit(region.naming == Naming::Zero, IBV_ACCESS_ZERO_BASED)
        | bit(region.on_demand && device.on_demand(), IBV_ACCESS_ON_DEMAND)
}

fn link(device: &Device, end: &End, cqs: &[Cq], srq: &Srq) -> Link {
    let srq = end.shared.then_some(srq);
    Link {
        qp: Qp::new(device, end.shape, &cqs[end.send_cq], &cqs[end.receive_cq], srq),
        shared: end.shared,
        signal_all: end.shape.signal_all,
        sends: VecDeque::new(),
        receives: VecDeque::new(),
        arrivals: VecDeque::new(),
        farewell: 0,
    }
}
