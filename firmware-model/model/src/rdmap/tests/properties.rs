//! Properties for any requests of programs, any splitting of the stream, and any bytes of a peer.

use super::Pair;
use crate::rdmap::Attachment;
use crate::testing::rig::*;
use crate::testing::sim::Conditions;
use proptest::prelude::*;
use std::time::Duration;
use urnic_device::cqe::CqeFlags;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags, Sge};

/// Bytes of memory that one work request has for itself.
const SLOT: usize = 20_000;

#[derive(Debug, Clone)]
struct Plan {
    opcode: Opcode,
    len: usize,
    /// The boundaries of its scatter/gather list.
    cuts: Vec<usize>,
    fenced: bool,
    signaled: bool,
    inline: bool,
}

fn plan() -> impl Strategy<Value = Plan> {
    let opcode = prop_oneof![
        4 => Just(Opcode::Send),
        3 => Just(Opcode::Write),
        3 => Just(Opcode::Read),
        1 => Just(Opcode::SendImm),
        1 => Just(Opcode::WriteImm),
        1 => Just(Opcode::FetchAdd),
    ];
    let len = prop_oneof![Just(0), 1usize..100, 1000..3000usize, 0..SLOT];
    let cuts = prop::collection::vec(0..SLOT, 0..4);
    (
        opcode,
        len,
        cuts,
        prop::bool::weighted(0.1),
        any::<bool>(),
        prop::bool::weighted(0.2),
    )
        .prop_map(|(opcode, len, cuts, fenced, signaled, inline)| Plan {
            opcode,
            len,
            cuts,
            fenced,
            signaled,
            inline,
        })
}

impl Plan {
    fn is_answered(&self) -> bool {
        matches!(self.opcode, Opcode::Read | Opcode::FetchAdd)
    }

    fn takes_receive(&self) -> bool {
        matches!(self.opcode, Opcode::Send | Opcode::SendImm | Opcode::WriteImm)
    }

    fn len(&self) -> usize {
        if self.opcode == Opcode::FetchAdd {
            8
        } else {
            self.len
        }
    }

    /// The scatter/gather list of the slot's bytes.
    fn sges(&self, region: &Region, slot: usize) -> Vec<Sge> {
        if self.opcode == Opcode::FetchAdd {
            return vec![region.sge(slot * SLOT, 8)];
        }
        let mut ends: Vec<usize> = self.cuts.iter().map(|c| c % (self.len + 1)).collect();
        ends.push(self.len);
        ends.sort_unstable();
        let mut at = 0;
        let piece = |end: usize| {
            let sge = region.sge(slot * SLOT + at, end - at);
            at = end;
            sge
        };
        ends.into_iter().map(piece).collect()
    }
}

#[derive(Debug, Clone)]
struct Scenario {
    conditions: Conditions,
    crc: bool,
    markers: [bool; 2],
    native: bool,
    delivered: bool,
    ord: u32,
    seed: u64,
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let mss = prop::sample::select(vec![88u32, 536, 1460, 8948, 65483]);
    let chunk = prop_oneof![Just(0usize), 1..20usize, 20..5000usize];
    let capacity = prop_oneof![1..200usize, 200..100_000usize];
    let flags = (any::<bool>(), any::<[bool; 2]>(), any::<bool>(), any::<bool>());
    let jitter = prop::sample::select(vec![0u64, 5, 100]);
    (mss, chunk, (capacity, jitter), flags, 1..5u32, any::<u64>()).prop_map(
        |(mss, chunk, (capacity, jitter), (crc, markers, native, delivered), ord, seed)| {
            let latency = Duration::from_micros(10);
            let conditions = Conditions {
                latency,
                jitter: Duration::from_micros(jitter),
                chunk,
                capacity: capacity.max(chunk),
                mss,
                seed,
                ..Conditions::default()
            };
            Scenario {
                conditions,
                crc,
                markers,
                native,
                delivered,
                ord,
                seed,
            }
        },
    )
}

impl Scenario {
    fn pair(&self) -> Pair {
        let attachment = |initiator: bool, markers_tx, markers_rx| Attachment {
            crc: self.crc,
            markers_tx,
            markers_rx,
            delivered: self.delivered,
            spare_read: self.delivered,
            ord: self.ord,
            ord_limit: self.ord + u32::from(self.delivered),
            ird: self.ord,
            ..if self.native {
                native(initiator)
            } else {
                agreed(initiator)
            }
        };
        let a = attachment(true, self.markers[0], self.markers[1]);
        let b = attachment(false, self.markers[1], self.markers[0]);
        Pair::with(&Shape::default(), self.conditions.clone(), a, b)
    }
}

/// One program: its requests, its memory, and the requests of the other program.
struct Side {
    plans: Vec<Plan>,
    /// Sources of sends and Writes, sinks of Reads.
    own: Region,
    /// Targets of the peer's Writes, sources of its Reads.
    shared: Region,
    /// Receives of the peer's Sends.
    receives: Region,
    posted: usize,
    received: usize,
}

/// Bytes that identify the slot.
fn contents(tag: usize, slots: usize) -> Vec<u8> {
    (0..slots * SLOT)
        .map(|i| (i.wrapping_mul(167) ^ (i >> 7) ^ (i / SLOT * 59) ^ tag) as u8)
        .collect()
}

impl Side {
    fn new(node: &Node, plans: Vec<Plan>, slots: usize, tag: usize) -> Side {
        let slots = slots.max(1);
        let region = |tag| {
            let region = node.region(slots * SLOT, everything());
            region.write(0, &contents(tag, slots));
            region
        };
        Side {
            plans,
            own: region(tag),
            shared: region(tag + 1),
            receives: node.region(slots * SLOT, everything()),
            posted: 0,
            received: 0,
        }
    }

    /// Posts the next request, if there is one and room for it.
    fn post(&mut self, node: &mut Node, peer: &Region) {
        let Some(plan) = self.plans.get(self.posted) else {
            return;
        };
        if node.sq_room() < 16 {
            return;
        }
        let slot = self.posted;
        let mut work = Work::new(plan.opcode, slot as u64)
            .to(peer.stag, peer.base + (slot * SLOT) as u64)
            .immediate((slot as u32).to_be_bytes());
        if plan.opcode == Opcode::FetchAdd {
            work = work.atomic(slot as u64 + 1, 0);
        }
        if plan.inline && !plan.is_answered() && plan.len <= 900 {
            let at = slot * SLOT;
            work = work.inline(&self.own.bytes()[at..at + plan.len]);
        } else {
            work = plan.sges(&self.own, slot).into_iter().fold(work, Work::sge);
        }
        if plan.fenced {
            work = work.flags(SendFlags::FENCE);
        }
        let last = self.posted + 1 == self.plans.len();
        node.post(&if plan.signaled || last {
            work
        } else {
            work.unsignaled()
        });
        self.posted += 1;
    }

    /// Posts the next receive, if the peer has a message for it.
    fn post_recv(&mut self, node: &mut Node, messages: usize) {
        if self.received < messages {
            let at = self.received * SLOT;
            node.post_recv(
                self.received as u64,
                &[self.receives.sge(at, 10), self.receives.sge(at + 10, SLOT - 10)],
            );
            self.received += 1;
        }
    }

    fn messages(&self) -> Vec<(usize, &Plan)> {
        self.plans
            .iter()
            .enumerate()
            .filter(|(_, p)| p.takes_receive())
            .collect()
    }

    /// Checks that everything arrived once, in order, bit for bit.
    fn check(&self, node: &mut Node, peer: &Side, tag: usize, peer_tag: usize) {
        // Completions of sends: those that were signaled, in order.
        let expected: Vec<_> = (0..self.plans.len())
            .filter(|n| self.plans[*n].signaled || n + 1 == self.plans.len())
            .map(|n| (n as u64, WcStatus::Success))
            .collect();
        assert_eq!(node.sent(), expected);
        assert_eq!(node.sq_outstanding(), 0);
        // Completions of receives: the peer's messages, in order.
        let messages = peer.messages();
        let sent = contents(peer_tag, peer.plans.len().max(self.plans.len()).max(1));
        let receives = self.receives.bytes();
        for (n, (slot, plan)) in messages.iter().enumerate() {
            let cqe = node.recv_cq.poll().expect("a completion for every message");
            assert_eq!((cqe.cookie.get(), status(&cqe)), (n as u64, WcStatus::Success));
            assert_eq!(cqe.byte_len.get() as usize, plan.len);
            let immediate = plan.opcode != Opcode::Send;
            assert_eq!(
                CqeFlags::from_bits_truncate(cqe.flags).contains(CqeFlags::WITH_IMM),
                immediate
            );
            if immediate {
                assert_eq!(u32::from_be_bytes(cqe.extra) as usize, *slot);
            }
            if plan.opcode == Opcode::WriteImm {
                assert_eq!(opcode(&cqe), WcOpcode::RecvRdmaWithImm);
                continue;
            }
            assert_eq!(opcode(&cqe), WcOpcode::Recv);
            assert!(
                receives[n * SLOT..][..plan.len] == sent[slot * SLOT..][..plan.len],
                "message {n}"
            );
            assert!(
                receives[n * SLOT + plan.len..(n + 1) * SLOT]
                    .iter()
                    .all(|b| *b == 0)
            );
        }
        assert!(node.recv_cq.poll().is_none());
        // Memory: the peer's Writes, and this program's Reads.
        let mut shared = contents(tag + 1, shared_slots(self));
        let mut own = contents(tag, shared_slots(self));
        let peers_shared = contents(peer_tag + 1, shared_slots(self));
        for (slot, plan) in peer.plans.iter().enumerate() {
            let place = slot * SLOT..slot * SLOT + plan.len();
            match plan.opcode {
                Opcode::Write | Opcode::WriteImm => shared[place.clone()].copy_from_slice(&sent[place]),
                Opcode::FetchAdd => {
                    let old = u64::from_ne_bytes(shared[place.clone()].try_into().unwrap());
                    shared[place].copy_from_slice(&old.wrapping_add(slot as u64 + 1).to_ne_bytes());
                }
                _ => {}
            }
        }
        for (slot, plan) in self.plans.iter().enumerate().filter(|(_, p)| p.is_answered()) {
            let place = slot * SLOT..slot * SLOT + plan.len();
            own[place.clone()].copy_from_slice(&peers_shared[place]);
        }
        assert!(
            self.shared.bytes() == shared,
            "the peer's Writes and atomics, and nothing else"
        );
        assert!(self.own.bytes() == own, "what was read, and nothing else");
    }
}

fn shared_slots(side: &Side) -> usize {
    side.own.len / SLOT
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn requests_arrive_once_in_order_unchanged(
        scenario in scenario(),
        a in prop::collection::vec(plan(), 0..25),
        b in prop::collection::vec(plan(), 0..25),
    ) {
        let mut pair = scenario.pair();
        if !scenario.native {
            pair.open_fence();
        }
        let slots = a.len().max(b.len());
        let (mut left, mut right) = (Side::new(&pair.a, a, slots, 3), Side::new(&pair.b, b, slots, 77));
        let (to_left, to_right) = (right.messages().len(), left.messages().len());
        if !scenario.native {
            // Without a receive posted a message is an error.
            for _ in 0..slots {
                left.post_recv(&mut pair.a, to_left);
                right.post_recv(&mut pair.b, to_right);
            }
        }
        let mut random = scenario.seed;
        let mut quiet = 0;
        while quiet < 3 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            match random >> 61 {
                0 | 1 => left.post(&mut pair.a, &right.shared),
                2 | 3 => right.post(&mut pair.b, &left.shared),
                4 => left.post_recv(&mut pair.a, to_left),
                5 => right.post_recv(&mut pair.b, to_right),
                _ => {}
            }
            if !pair.a.pump() && !pair.b.pump() {
                let done = left.posted == left.plans.len() && right.posted == right.plans.len()
                    && left.received == to_left && right.received == to_right;
                match pair.wire.next_arrival() {
                    Some(at) => pair.clock.store(at.0, std::sync::atomic::Ordering::Relaxed),
                    None if done => quiet += 1,
                    None => {}
                }
            }
        }
        prop_assert!(pair.a.faults().is_empty() && pair.b.faults().is_empty());
        left.check(&mut pair.a, &right, 3, 77);
        right.check(&mut pair.b, &left, 77, 3);
    }

    #[test]
    fn a_damaged_stream_delivers_a_prefix_and_completes_all(
        mut scenario in scenario(),
        plans in prop::collection::vec(plan(), 1..25),
        fault in (any::<bool>(), 0u64..200_000, 1..=255u8),
    ) {
        let (cut, position, mask) = fault;
        // Without a CRC, damaged bytes are other data.
        scenario.crc |= !cut;
        scenario.native = false;
        scenario.conditions.capacity = scenario.conditions.capacity.max(2000);
        let mut pair = scenario.pair();
        pair.open_fence();
        let mut left = Side::new(&pair.a, plans, 25, 3);
        let mut right = Side::new(&pair.b, Vec::new(), 25, 77);
        let messages = left.messages().len();
        for _ in 0..messages {
            right.post_recv(&mut pair.b, messages);
        }
        if cut || !Pair::HAS_FPDUS {
            pair.wire.cut_at(0, position);
        } else {
            pair.wire.damage(0, position, mask);
        }
        for _ in 0..left.plans.len() {
            left.post(&mut pair.a, &right.shared);
            pair.run_now();
        }
        // A request that is not complete now does not complete.
        for node in [&mut pair.a, &mut pair.b] {
            node.set_state(QpState::Err);
            while node.pump() {}
        }
        let sent = pair.a.sent();
        let cookies: Vec<u64> = sent.iter().map(|(cookie, _)| *cookie).collect();
        prop_assert!(cookies.is_sorted_by(|a, b| a < b));
        let good = sent.iter().take_while(|(_, s)| *s == WcStatus::Success).count();
        prop_assert!(sent[good..].iter().all(|(_, s)| *s != WcStatus::Success));
        prop_assert!(sent.last().is_some_and(|(cookie, _)| *cookie as usize + 1 == left.posted));
        let received = pair.b.received();
        prop_assert_eq!(received.len(), messages);
        let source = contents(3, 25);
        let receives = right.receives.bytes();
        for ((n, status, len), (slot, plan)) in received.iter().zip(left.messages()) {
            if *status != WcStatus::Success {
                prop_assert_eq!(*len, 0);
                continue;
            }
            prop_assert_eq!(*len as usize, plan.len);
            if plan.opcode != Opcode::WriteImm {
                let at = *n as usize * SLOT;
                prop_assert!(receives[at..at + plan.len] == source[slot * SLOT..][..plan.len]);
            }
        }
    }
}

/// ULPDUs: nearly valid ones and random bytes.
fn ulpdu() -> impl Strategy<Value = Vec<u8>> {
    let control = prop_oneof![Just(0x41u8), Just(0x01), Just(0xc1), Just(0x81), any::<u8>()];
    let rdmap = prop_oneof![(0x40u8..0x4c), any::<u8>()];
    let word = prop_oneof![Just(0u32), 0..4u32, any::<u32>()];
    let fields = prop::array::uniform4(word);
    let payload = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..80),
        prop::collection::vec(any::<u8>(), 8..=8),
        prop::collection::vec(any::<u8>(), 28..=28),
        prop::collection::vec(any::<u8>(), 52..=52),
        (0..65000usize).prop_map(pattern),
    ];
    prop_oneof![
        8 => (control, rdmap, fields, payload).prop_map(|(ddp, rdmap, [word, qn, msn, mo], payload)| {
            untagged(ddp, rdmap, word, qn, msn, mo, &payload)
        }),
        1 => prop::collection::vec(any::<u8>(), 0..40),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn no_peer_makes_an_engine_panic_or_lose_a_completion(
        ulpdus in prop::collection::vec(ulpdu(), 0..12),
        noise in prop::collection::vec(any::<u8>(), 0..100),
        options in (any::<[bool; 7]>(), 1usize..5000),
        knows_stag in any::<bool>(),
    ) {
        let ([crc, markers, native, initiator, extensions, delivered, fills], cut) = options;
        let peer = Hostile { crc, markers, native, initiator, extensions, delivered, fills, knows_stag, cut };
        peer.send(ulpdus, &noise);
    }

    #[test]
    fn no_work_request_makes_an_engine_panic(
        blocks in prop::collection::vec(prop::array::uniform32(any::<u8>()), 1..20),
        opcodes in prop::collection::vec(0..12u8, 20),
    ) {
        let mut pair = Pair::new();
        pair.open_fence();
        for (half, opcode) in blocks.iter().zip(opcodes) {
            let mut block = [*half, *half].concat();
            (block[0], block[2], block[3]) = (opcode, block[2] % 4, 1 + block[3] % 3);
            if block[1] & 8 != 0 {
                block[2] = 0;
            } else {
                block[4..8].fill(0);
            }
            pair.a.post_raw(&block);
        }
        pair.run();
        pair.a.set_state(QpState::Err);
        pair.run();
        prop_assert_eq!(pair.a.sq_outstanding(), 0);
        prop_assert_eq!(pair.a.engine.state(), QpState::Err);
    }
}
