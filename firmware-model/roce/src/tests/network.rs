//! Two ends of a connection, arrays of bytes as their memory, and a network between them that
//! loses, repeats, delays and reorders packets.

use crate::message::{Message, Mtu, Remote};
use crate::requester::{self, Completion, Effect, Requester};
use crate::responder::{self, Arrival, Execution, Fault, Place, Refusal, Responder, Step, Target};
use core::net::SocketAddr;
use std::collections::{HashMap, VecDeque};
use urnic_wire::roce::{
    Body, Ends, Header, Immediate, MAX_HEADER_LEN, MAX_TRAILER_LEN, Psn, Request, parse, seal,
};

/// The key of the memory of an end.
pub(super) const KEY: u32 = 0x1234;
/// Address of the memory of an end.
pub(super) const BASE: u64 = 0x7f00_0000_0000;
/// A time after which everything has failed or ended.
const LIMIT: u64 = 600_000_000_000;
const STEPS: usize = 100_000;

/// A generator whose numbers follow from a seed: splitmix64.
#[derive(Clone, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// What the network does to packets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weather {
    /// Packets of a hundred that are lost.
    pub(super) loss: u64,
    /// Packets of a hundred that arrive twice.
    pub(super) duplication: u64,
    /// The longest delay, in nanoseconds; the shortest is 1000.
    pub(super) delay: u64,
    /// Receives are posted so late, in nanoseconds.
    pub(super) late_receives: u64,
    /// Packets of a hundred that carry a congestion notification back.
    pub(super) congestion: u64,
}

/// A message that has arrived in a receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Received {
    pub(super) bytes: Vec<u8>,
    pub(super) immediate: Option<Immediate>,
    pub(super) invalidated: Option<u32>,
}

#[derive(Debug)]
pub(super) struct End {
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    pub(super) memory: Vec<u8>,
    /// When receives are posted; each has room for any message.
    pub(super) receives: VecDeque<u64>,
    current: Vec<u8>,
    pub(super) received: Vec<Received>,
    /// Bytes of Sends and Writes, and the memory of Reads, by message.
    pub(super) local: HashMap<u64, Vec<u8>>,
    pub(super) originals: Vec<(u64, u64)>,
    pub(super) completions: Vec<Completion>,
    /// Packets sent, of both kinds.
    pub(super) requests: usize,
    pub(super) responses: usize,
}

impl End {
    pub(super) fn new(requester: requester::Attributes, responder: responder::Attributes) -> Self {
        Self {
            requester: Requester::new(requester),
            responder: Responder::new(responder),
            memory: Vec::new(),
            receives: VecDeque::new(),
            current: Vec::new(),
            received: Vec::new(),
            local: HashMap::new(),
            originals: Vec::new(),
            completions: Vec::new(),
            requests: 0,
            responses: 0,
        }
    }

    fn range(&self, address: u64, rkey: u32, length: u32) -> Result<core::ops::Range<usize>, Refusal> {
        let at = address.checked_sub(BASE).ok_or(Refusal::Access)? as usize;
        let end = at + length as usize;
        match rkey == KEY && end <= self.memory.len() {
            true => Ok(at..end),
            false => Err(Refusal::Access),
        }
    }

    /// Does what a place says; the receive is the oldest one.
    fn execute(&mut self, now: u64, place: &Place, payload: &[u8]) -> Result<(), Refusal> {
        if place.takes_receive {
            match self.receives.front() {
                Some(at) if *at <= now => {}
                _ => return Err(Refusal::NotReady),
            }
        }
        if let Some(whole) = place.whole {
            self.range(whole.address, whole.rkey, whole.length)?;
        }
        match place.target {
            Target::Receive { offset } => {
                self.current.truncate(offset as usize);
                assert_eq!(self.current.len(), offset as usize, "no gap");
                self.current.extend(payload);
            }
            Target::Memory { address, rkey } if !payload.is_empty() => {
                let range = self.range(address, rkey, place.length)?;
                self.memory[range].copy_from_slice(payload);
            }
            Target::Memory { .. } => {}
        }
        if place.takes_receive {
            self.receives.pop_front();
        }
        if let Some(end) = place.end.filter(|end| end.completes_receive) {
            let bytes = match place.target {
                Target::Receive { .. } => std::mem::take(&mut self.current),
                Target::Memory { .. } => Vec::new(),
            };
            self.received.push(Received {
                bytes,
                immediate: end.immediate,
                invalidated: end.invalidated,
            });
        }
        Ok(())
    }

    fn serve(&mut self, now: u64, arrival: &Arrival, payload: &[u8]) {
        // The responder is borrowed by its step, and the rest of the end executes it.
        let fresh = Responder::new(responder_attributes(Mtu::Bytes256, Psn::default()));
        let mut responder = std::mem::replace(&mut self.responder, fresh);
        match responder.receive(arrival) {
            Step::Ignored => {}
            Step::Place(placement) => match self.execute(now, placement.place(), payload) {
                Ok(()) => placement.done(),
                Err(refusal) => placement.refuse(refusal),
            },
            Step::Read(check) => {
                let memory = check.memory();
                let checked = match memory.length {
                    0 => Ok(0..0),
                    length => self.range(memory.address, memory.rkey, length),
                };
                match checked {
                    Ok(_) => check.done(),
                    Err(refusal) => check.refuse(refusal),
                }
            }
            Step::Atomic(execution) => match self.atomic(&execution) {
                Ok(original) => execution.done(original),
                Err(refusal) => execution.refuse(refusal),
            },
        }
        self.responder = responder;
    }

    fn atomic(&mut self, execution: &Execution<'_>) -> Result<u64, Refusal> {
        let operand = execution.operand();
        let range = self.range(operand.address, operand.rkey, 8)?;
        let original = u64::from_ne_bytes(self.memory[range.clone()].try_into().unwrap());
        let new = match execution.request() {
            Request::FetchAdd(_) => original.wrapping_add(operand.swap_or_add),
            _ if original == operand.compare => operand.swap_or_add,
            _ => original,
        };
        self.memory[range].copy_from_slice(&new.to_ne_bytes());
        Ok(original)
    }

    fn take(&mut self, now: u64, header: &Header, payload: &[u8]) {
        match header.body {
            Body::Request(request) => {
                let arrival = Arrival {
                    psn: header.psn,
                    request,
                    payload_len: payload.len(),
                    ack_request: header.ack_request,
                };
                self.serve(now, &arrival, payload);
            }
            Body::Response(response) => {
                match self.requester.receive(now, header.psn, &response, payload.len()) {
                    Effect::None => {}
                    Effect::Place { id, offset } => {
                        let at = offset as usize;
                        let memory = self.local.get_mut(&id).expect("the memory of a Read");
                        memory[at..at + payload.len()].copy_from_slice(payload);
                    }
                    Effect::Original { id, value } => self.originals.push((id, value)),
                }
            }
            Body::CongestionNotification => self.requester.congestion_notified(),
            Body::Unreliable(_) | Body::Datagram(..) => panic!("{header}"),
        }
        self.completions
            .extend(std::iter::from_fn(|| self.requester.poll()));
    }

    /// The next packet, and whether it is a request.
    fn packet(&mut self, now: u64) -> Option<(Header, Vec<u8>)> {
        if let Some(packet) = self.responder.transmit() {
            let data = packet.data;
            let payload = match data.length {
                0 => Vec::new(),
                length => match self.range(data.address, data.rkey, length) {
                    Ok(range) => self.memory[range].to_vec(),
                    Err(_) => {
                        self.responder.refuse(&packet, Fault::Access);
                        return self.packet(now);
                    }
                },
            };
            self.responses += 1;
            return Some((
                Header::new(1, packet.psn, Body::Response(packet.response)),
                payload,
            ));
        }
        let packet = self.requester.transmit(now)?;
        self.requests += 1;
        let range = packet.offset as usize..(packet.offset + packet.length) as usize;
        let payload = match range.is_empty() {
            true => Vec::new(),
            false => self.local[&packet.id][range].to_vec(),
        };
        let header = Header {
            solicited: packet.solicited,
            ack_request: packet.ack_request,
            ..Header::new(1, packet.psn, Body::Request(packet.request))
        };
        Some((header, payload))
    }
}

pub(super) fn requester_attributes(mtu: Mtu, first_psn: Psn) -> requester::Attributes {
    requester::Attributes {
        mtu,
        first_psn,
        timeout: 8,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 4,
        window: 64,
        depth: 64,
    }
}

pub(super) fn responder_attributes(mtu: Mtu, first_psn: Psn) -> responder::Attributes {
    responder::Attributes {
        mtu,
        first_psn,
        min_rnr_timer: 3,
        max_dest_rd_atomic: 4,
        ack_every: 16,
    }
}

pub(super) struct Network {
    pub(super) ends: [End; 2],
    pub(super) now: u64,
    pub(super) weather: Weather,
    pub(super) random: Random,
    /// When packets arrive, and at which end.
    flying: Vec<(u64, usize, Vec<u8>)>,
    pub(super) steps: usize,
}

fn addresses() -> Ends {
    Ends {
        source: SocketAddr::from(([10, 1, 2, 3], 49152)),
        destination: SocketAddr::from(([10, 1, 2, 4], 4791)),
    }
}

fn sealed(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; MAX_HEADER_LEN + payload.len() + MAX_TRAILER_LEN];
    let at = header.emit(&mut packet, payload.len());
    packet[at..at + payload.len()].copy_from_slice(payload);
    let len = seal(&mut packet, at + payload.len(), &addresses());
    packet.truncate(len);
    packet
}

impl Network {
    pub(super) fn new(mtu: Mtu, seed: u64, weather: Weather) -> Self {
        let mut random = Random(seed);
        // Numbers that soon wrap.
        let [one, other] = [(); 2].map(|()| Psn::MAX.after(0u32.wrapping_sub(random.below(300) as u32)));
        let end = |own, peer| End::new(requester_attributes(mtu, own), responder_attributes(mtu, peer));
        Self {
            ends: [end(one, other), end(other, one)],
            now: 0,
            weather,
            random,
            flying: Vec::new(),
            steps: 0,
        }
    }

    pub(super) fn post(&mut self, end: usize, message: Message, local: Vec<u8>) {
        self.ends[end].local.insert(message.id, local);
        self.ends[end].requester.post(message).expect("a valid message");
    }

    fn send(&mut self, from: usize, packet: Vec<u8>) {
        let weather = self.weather;
        if self.random.percent(weather.congestion) {
            let notification = sealed(&Header::new(1, Psn::default(), Body::CongestionNotification), b"");
            self.flying.push((self.now + 1000, from, notification));
        }
        if self.random.percent(weather.loss) {
            return;
        }
        let copies = 1 + usize::from(self.random.percent(weather.duplication));
        for _ in 0..copies {
            let delay = 1000 + self.random.below(weather.delay);
            self.flying.push((self.now + delay, 1 - from, packet.clone()));
        }
    }

    /// Sends what can be sent, and goes on to the next event; returns whether there is one.
    fn step(&mut self) -> bool {
        for from in 0..2 {
            // What a poll of the socket takes at once.
            for _ in 0..64 {
                let Some((header, payload)) = self.ends[from].packet(self.now) else {
                    break;
                };
                self.send(from, sealed(&header, &payload));
            }
        }
        let arrival = self.flying.iter().map(|packet| packet.0).min();
        let timers = self.ends.iter().filter_map(|end| end.requester.deadline());
        let Some(next) = timers.chain(arrival).min() else {
            return false;
        };
        self.now = self.now.max(next);
        while let Some(index) = self.flying.iter().position(|packet| packet.0 <= self.now) {
            let (_, to, bytes) = self.flying.remove(index);
            let (header, payload) = parse(&bytes, &addresses()).expect("a packet of our own");
            self.ends[to].take(self.now, &header, payload);
        }
        for end in &mut self.ends {
            end.requester.on_timer(self.now);
            end.completions
                .extend(std::iter::from_fn(|| end.requester.poll()));
        }
        true
    }

    /// Goes on until nothing happens any more.
    pub(super) fn run(&mut self) {
        while self.step() {
            self.steps += 1;
            assert!(self.now < LIMIT && self.steps < STEPS, "it does not end");
        }
    }
}

/// Memory of the peer, from this offset on.
pub(super) fn at(offset: usize) -> Remote {
    Remote {
        address: BASE + offset as u64,
        rkey: KEY,
    }
}
