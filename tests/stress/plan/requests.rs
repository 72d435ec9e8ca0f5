//! The requests of a round: each takes its memory from the plan, and the model changes as the
//! memory will.

use urnic_rdma_core::*;

use super::{Arrival, Ending, Op, Part, READ_SGE, Target, WRITE, What, Window, World};
use crate::host::Span;
use crate::layout::{COUNTER_COUNT, COUNTERS, REGION, RESULT_COUNT, RESULTS, SLOT, SLOT_COUNT};

impl World {
    /// The requests of a side at a connection, in their order.
    pub(super) fn requests(&mut self, side: usize, link: usize, parts: &mut [Part; 2]) -> Vec<Op> {
        let shape = self.links[link][side].shape;
        let most = self.rng.below(shape.depth as usize - 8);
        let mut list = Vec::new();
        // Room for the requests of a step, and for the last one.
        for _ in 0..most {
            if list.len() < most {
                self.step(side, link, parts, &mut list);
            }
        }
        let invalidates = |w: &Window| w.link == link && w.ending == Ending::Invalidated;
        let window = parts[1 - side].windows.iter().position(invalidates);
        let what = window.map_or(What::Send, What::SendInv);
        let sent = if list.is_empty() {
            None
        } else {
            self.message(side, link, parts, what)
        };
        if sent.is_none()
            && let Some(window) = window
        {
            parts[1 - side].windows[window].ending = Ending::Unbound;
        }
        if list.is_empty() {
            return list;
        }
        let closing = sent.unwrap_or_else(|| {
            // Nothing is read, but the request still takes its turn.
            let what = What::Read(Target { at: 0, window: None });
            Op {
                what,
                local: Vec::new(),
                inline: None,
                flags: 0,
            }
        });
        list.push(closing);
        for op in &mut list {
            op.flags |= [0, IBV_SEND_SIGNALED][usize::from(self.rng.chance(50))];
            op.flags |= [0, IBV_SEND_FENCE][usize::from(self.rng.chance(5))];
        }
        if let Some(last) = list.last_mut() {
            last.flags |= IBV_SEND_SIGNALED;
            // Without the fence, a Read before it may no longer find the window.
            last.flags |= [0, IBV_SEND_FENCE][usize::from(window.is_some())];
        }
        list
    }

    /// A request, or several that belong together; none if there is no memory for them.
    fn step(&mut self, side: usize, link: usize, parts: &mut [Part; 2], list: &mut Vec<Op>) {
        let imm = self.rng.next() as u32;
        match self.rng.below(100) {
            0..30 => {
                let what = [What::Send, What::SendImm(imm)][usize::from(self.rng.chance(30))];
                list.extend(self.message(side, link, parts, what));
            }
            30..52 => {
                let len = self.rng.len();
                let Some((op, target)) = self.write(side, link, parts, len) else {
                    return;
                };
                let rights = self.rights(1 - side, &parts[1 - side], target);
                let readable = rights & IBV_ACCESS_REMOTE_READ != 0;
                list.push(op);
                // The written data is read back.
                if readable && self.rng.chance(30) {
                    list.extend(self.read_of(side, target, len));
                }
            }
            52..60 => {
                let len = self.rng.len();
                let Some((mut op, target)) = self.write(side, link, parts, len) else {
                    return;
                };
                // The bytes are written whether or not a receive is available.
                let spans = self.receive(1 - side, link, parts, 0);
                if let Some(spans) = spans {
                    op.what = What::WriteImm(target, imm);
                    self.arrive(
                        1 - side,
                        link,
                        parts,
                        spans,
                        Arrival {
                            opcode: IBV_WC_RECV_RDMA_WITH_IMM,
                            len,
                            imm: Some(imm),
                            invalidated: None,
                            data: Vec::new(),
                        },
                    );
                }
                list.push(op);
            }
            60..76 => {
                let len = self.rng.len();
                let Some(target) = self.target(1 - side, link, parts, len, IBV_ACCESS_REMOTE_READ) else {
                    return;
                };
                let Some(read) = self.read_of(side, target, len) else {
                    return;
                };
                let landed = read.local.clone();
                list.push(read);
                if self.rng.chance(40) {
                    list.extend(self.pass_on(side, link, parts, landed));
                }
            }
            76..88 => self.atomics(side, link, parts, list),
            _ => list.extend(self.add(side, parts)),
        }
    }

    /// An addition to one of the peer's counters; `None` if there is no room for the result.
    fn add(&mut self, side: usize, parts: &mut [Part; 2]) -> Option<Op> {
        if parts[side].results == RESULT_COUNT {
            return None;
        }
        let at = COUNTERS + 8 * self.rng.below(COUNTER_COUNT);
        let add = 1 + self.rng.below(1 << 20) as u64;
        let sum = self.hosts[1 - side].word(at).wrapping_add(add);
        self.hosts[1 - side].set_word(at, sum);
        let result = Span {
            at: RESULTS + 8 * parts[side].results,
            len: 8,
        };
        parts[side].results += 1;
        let what = What::FetchAdd(Target { at, window: None }, add);
        Some(Op {
            what,
            local: vec![result],
            inline: None,
            flags: 0,
        })
    }

    /// Sends the fetched data back, fenced.
    fn pass_on(&mut self, side: usize, link: usize, parts: &mut [Part; 2], landed: Vec<Span>) -> Option<Op> {
        let len = landed.iter().map(|span| span.len).sum();
        let data = self.hosts[side].gather(&landed);
        let what = if self.rng.chance(50) {
            let target = self.target(1 - side, link, parts, len, IBV_ACCESS_REMOTE_WRITE)?;
            self.hosts[1 - side].scatter(&[Span { at: target.at, len }], &data);
            What::Write(target)
        } else {
            let spans = self.receive(1 - side, link, parts, len)?;
            self.sent(side, link, parts, spans, What::Send, &data);
            What::Send
        };
        Some(Op {
            what,
            local: landed,
            inline: None,
            flags: IBV_SEND_FENCE,
        })
    }

    /// A word that is written, changed by atomics and read, all on one queue pair.
    fn atomics(&mut self, side: usize, link: usize, parts: &mut [Part; 2], list: &mut Vec<Op>) {
        let rights = IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        let Some(target) = self.target(1 - side, link, parts, 8, rights) else {
            return;
        };
        if self.rng.chance(50) {
            let Some(from) = self.hosts[side].span(&mut self.rng, 8, 0) else {
                return;
            };
            self.fill(side, parts, &[from]);
            let word = self.hosts[side].word(from.at);
            self.hosts[1 - side].set_word(target.at, word);
            list.push(Op {
                what: What::Write(target),
                local: vec![from],
                inline: None,
                flags: 0,
            });
        }
        for _ in 0..=self.rng.below(3) {
            let Some(into) = self.hosts[side].span(&mut self.rng, 8, WRITE) else {
                return;
            };
            let old = self.hosts[1 - side].word(target.at);
            let operand = self.rng.next();
            let (what, new) = match self.rng.below(3) {
                0 => (What::FetchAdd(target, operand), old.wrapping_add(operand)),
                1 => (What::CompareSwap(target, old, operand), operand),
                _ => (What::CompareSwap(target, !old, operand), old),
            };
            self.hosts[1 - side].set_word(target.at, new);
            self.hosts[side].set_word(into.at, old);
            list.push(Op {
                what,
                local: vec![into],
                inline: None,
                flags: 0,
            });
            if self.rng.chance(30) {
                list.extend(self.pass_on(side, link, parts, vec![into]));
            }
        }
        if self.rng.chance(50) {
            list.extend(self.read_of(side, target, 8));
        }
    }

    /// A Send of any kind.
    fn message(&mut self, side: usize, link: usize, parts: &mut [Part; 2], what: What) -> Option<Op> {
        let len = self.rng.len();
        let spans = self.receive(1 - side, link, parts, len)?;
        let mut op = self.source(side, link, parts, len)?;
        let data = match &op.inline {
            Some(pieces) => pieces.concat(),
            None => self.hosts[side].gather(&op.local),
        };
        self.sent(side, link, parts, spans, what, &data);
        op.what = what;
        op.flags |= [0, IBV_SEND_SOLICITED][usize::from(self.rng.chance(10))];
        Some(op)
    }

    /// A Send arrives.
    fn sent(
        &mut self,
        side: usize,
        link: usize,
        parts: &mut [Part; 2],
        spans: Vec<Span>,
        what: What,
        data: &[u8],
    ) {
        let mut arrival = Arrival {
            opcode: IBV_WC_RECV,
            len: data.len(),
            imm: None,
            invalidated: None,
            data: data.to_vec(),
        };
        match what {
            What::SendImm(imm) => arrival.imm = Some(imm),
            What::SendInv(window) => arrival.invalidated = Some(window),
            _ => {}
        }
        if !self.links[link][1 - side].shared {
            self.hosts[1 - side].scatter(&spans, data);
        }
        self.arrive(1 - side, link, parts, spans, arrival);
    }

    /// The buffers for a message of that length; `None` if it must not arrive.
    fn receive(&mut self, side: usize, link: usize, parts: &[Part; 2], len: usize) -> Option<Vec<Span>> {
        let end = self.links[link][side];
        if end.shared {
            return (parts[side].shared < SLOT_COUNT && len <= SLOT).then(Vec::new);
        }
        if parts[side].receives[link].0.len() as u32 >= end.shape.depth {
            return None;
        }
        let room = len + [0, self.rng.below(50)][self.rng.below(2)];
        self.hosts[side].spans(&mut self.rng, room, end.shape.sge as usize, WRITE)
    }

    fn arrive(
        &mut self,
        side: usize,
        link: usize,
        parts: &mut [Part; 2],
        spans: Vec<Span>,
        arrival: Arrival,
    ) {
        let part = &mut parts[side];
        if self.links[link][side].shared {
            part.shared += 1;
        } else {
            part.receives[link].0.push(spans);
        }
        part.arrivals[link].push_back(arrival);
    }

    fn write(&mut self, side: usize, link: usize, parts: &mut [Part; 2], len: usize) -> Option<(Op, Target)> {
        let target = self.target(1 - side, link, parts, len, IBV_ACCESS_REMOTE_WRITE)?;
        let mut op = self.source(side, link, parts, len)?;
        let data = match &op.inline {
            Some(pieces) => pieces.concat(),
            None => self.hosts[side].gather(&op.local),
        };
        self.hosts[1 - side].scatter(&[Span { at: target.at, len }], &data);
        op.what = What::Write(target);
        Some((op, target))
    }

    fn read_of(&mut self, side: usize, target: Target, len: usize) -> Option<Op> {
        let local = self.hosts[side].spans(&mut self.rng, len, READ_SGE, WRITE)?;
        let data = self.hosts[1 - side].gather(&[Span { at: target.at, len }]);
        self.hosts[side].scatter(&local, &data);
        Some(Op {
            what: What::Read(target),
            local,
            inline: None,
            flags: 0,
        })
    }

    /// New data of that length, in memory or inline.
    fn source(&mut self, side: usize, link: usize, parts: &mut [Part; 2], len: usize) -> Option<Op> {
        let shape = self.links[link][side].shape;
        let mut op = Op {
            what: What::Send,
            local: Vec::new(),
            inline: None,
            flags: 0,
        };
        if len <= shape.inline as usize && self.rng.chance(40) {
            let cut = self.rng.below(len + 1);
            let data = self.rng.bytes(len);
            let (head, tail) = data.split_at(cut);
            op.inline = Some([head, tail].map(<[u8]>::to_vec)[usize::from(cut == 0)..].to_vec());
            op.flags = IBV_SEND_INLINE;
        } else {
            op.local = self.hosts[side].spans(&mut self.rng, len, shape.sge as usize, 0)?;
            self.fill(side, parts, &op.local);
        }
        Some(op)
    }

    fn fill(&mut self, side: usize, parts: &mut [Part; 2], spans: &[Span]) {
        for span in spans {
            let data = self.rng.bytes(span.len);
            self.hosts[side].scatter(&[*span], &data);
            parts[side].fills.push((span.at, data));
        }
    }

    /// Memory of that side for the peer to use at that connection.
    fn target(
        &mut self,
        side: usize,
        link: usize,
        parts: &mut [Part; 2],
        len: usize,
        access: u32,
    ) -> Option<Target> {
        let windows = &mut parts[side].windows;
        if !windows.is_empty() && self.rng.chance(60) {
            let i = self.rng.below(windows.len());
            let w = &mut windows[i];
            let at = w.used.next_multiple_of(8);
            if (w.kind == IBV_MW_TYPE_1 || w.link == link) && w.access & access == access && at + len <= w.len
            {
                w.used = at + len;
                return Some(Target {
                    at: w.at + at,
                    window: Some(i),
                });
            }
        }
        let span = self.hosts[side].span(&mut self.rng, len, access)?;
        Some(Target {
            at: span.at,
            window: None,
        })
    }

    fn rights(&self, side: usize, part: &Part, target: Target) -> u32 {
        match target.window {
            Some(window) => part.windows[window].access,
            None => self.hosts[side].regions[target.at / REGION].access,
        }
    }
}
