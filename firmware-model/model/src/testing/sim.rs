//! A simulated network under a virtual clock: latency, other segment boundaries, full buffers,
//! damage, FIN, RST and silence.
//!
//! Time is a shared count of nanoseconds; the code that runs the simulation advances it. Every
//! choice comes from a seed.

use crate::host::{Piece, PieceMut};
use crate::stream::{
    Answers, Ends, FullOperation, Listener, Network, Probing, QpNumbers, Received, Stream, StreamError,
};
use crate::time::Nanos;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use urnic_sync::{Mutex, MutexGuard};

/// The properties of a connection.
#[derive(Debug, Clone)]
pub struct Conditions {
    /// The time from one end to the other.
    pub latency: Duration,
    /// Up to this much later, each message for itself. Nothing for a stream of bytes.
    pub jitter: Duration,
    /// Most bytes that one send takes or one receive gives; each is cut at random below. 0 = as
    /// many as there are.
    pub chunk: usize,
    /// Bytes taken and not yet received, beyond which nothing is taken.
    pub capacity: usize,
    /// Segment size, or the longest message.
    pub mss: u32,
    /// What one send takes, one receive gives, as over SCTP: nothing is cut, also if the last
    /// message goes beyond the capacity.
    pub messages: bool,
    /// The seed of all random choices.
    pub seed: u64,
}

impl Default for Conditions {
    /// Like a loopback interface.
    fn default() -> Conditions {
        Conditions {
            latency: Duration::from_micros(10),
            jitter: Duration::ZERO,
            chunk: 0,
            capacity: 1 << 20,
            mss: 65483,
            messages: false,
            seed: 1,
        }
    }
}

/// What one send took.
#[derive(Debug)]
struct Flying {
    /// When it arrives.
    at: u64,
    bytes: Vec<u8>,
    /// A message that arrived before its turn was offered to be placed.
    was_offered: bool,
    /// Bytes after these that were placed.
    placed: usize,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Pipe {
    flying: VecDeque<Flying>,
    /// How much later than others the next message arrives.
    delay: u64,
    unread: usize,
    /// Instead of that of the conditions.
    capacity: Option<usize>,
    /// When the FIN after them arrives.
    fin: Option<u64>,
    finished: bool,
    taken: u64,
    /// Since when the end that sends asks the other one's system.
    asked: Option<u64>,
    /// Bytes to damage: position and mask.
    damage: Vec<(u64, u8)>,
    /// The connection is reset after this number of bytes.
    cut_at: Option<u64>,
    /// What each send took, as it was before damage.
    record: Option<Vec<Vec<u8>>>,
}

#[derive(Debug)]
struct Link {
    conditions: Conditions,
    clock: Arc<AtomicU64>,
    random: u64,
    pipes: [Pipe; 2],
    /// The error with which both ends see the connection closed.
    closed_with: Option<Errno>,
    /// Since when nothing arrives any more.
    silent: Option<u64>,
    established_at: u64,
}

impl Link {
    fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn latency(&self) -> u64 {
        u64::try_from(self.conditions.latency.as_nanos()).unwrap_or(u64::MAX)
    }

    /// When what a direction sends now arrives.
    fn arrival(&mut self, direction: usize) -> u64 {
        let mut arrival = self.now() + self.latency();
        let jitter = u64::try_from(self.conditions.jitter.as_nanos()).unwrap_or(u64::MAX);
        if self.conditions.messages && jitter > 0 {
            arrival += self.random() % jitter;
        }
        arrival + std::mem::take(&mut self.pipes[direction].delay)
    }

    /// A length from 1 to `len`, or all of it when nothing is cut.
    fn cut(&mut self, len: usize) -> usize {
        if self.conditions.chunk == 0 || self.conditions.messages || len <= 1 {
            return len;
        }
        1 + self.random() as usize % len.min(self.conditions.chunk)
    }

    /// A number of 31 bits.
    fn random(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x >> 33
    }
}

/// A handle on a simulated connection, to watch it and to break it. Direction 0 is what the first
/// end sends.
#[derive(Debug, Clone)]
pub struct Wire(Arc<Mutex<Link>>);

impl Wire {
    fn lock(&self) -> MutexGuard<'_, Link> {
        self.0.lock()
    }

    /// Flips bits of the byte at `position` of a direction, if it was not taken yet.
    pub fn damage(&self, direction: usize, position: u64, mask: u8) {
        self.lock().pipes[direction].damage.push((position, mask));
    }

    /// Resets the connection once a direction has taken this number of bytes.
    pub fn cut_at(&self, direction: usize, position: u64) {
        self.lock().pipes[direction].cut_at = Some(position);
    }

    /// Resets the connection.
    pub fn reset(&self) {
        self.lock().closed_with = Some(Errno::CONNRESET);
    }

    /// From now on nothing arrives, in either direction.
    pub fn silence(&self) {
        let mut link = self.lock();
        link.silent = Some(link.now());
    }

    /// Changes the segment size.
    pub fn set_mss(&self, mss: u32) {
        self.lock().conditions.mss = mss;
    }

    /// Changes how many bytes of a direction may be in flight: 0 = nothing is taken.
    pub fn set_capacity(&self, direction: usize, capacity: usize) {
        self.lock().pipes[direction].capacity = Some(capacity);
    }

    /// The next message of a direction arrives this much later; those after it do not.
    pub fn delay_next(&self, direction: usize, delay: Duration) {
        self.lock().pipes[direction].delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
    }

    /// Records the bytes that a direction sends from now on, for [`recorded`](Self::recorded).
    pub fn record(&self, direction: usize) {
        self.lock().pipes[direction].record = Some(Vec::new());
    }

    /// The bytes that a direction sent since [`record`](Self::record).
    pub fn recorded(&self, direction: usize) -> Vec<u8> {
        self.recorded_messages(direction).concat()
    }

    /// The messages that a direction sent since [`record`](Self::record).
    pub fn recorded_messages(&self, direction: usize) -> Vec<Vec<u8>> {
        self.lock().pipes[direction].record.clone().unwrap_or_default()
    }

    /// Whether the connection was reset.
    pub fn is_reset(&self) -> bool {
        self.lock().closed_with.is_some()
    }

    /// When something arrives next, if anything is in flight.
    pub fn next_arrival(&self) -> Option<Nanos> {
        let link = self.lock();
        if link.silent.is_some() || link.closed_with.is_some() {
            return None;
        }
        let times = link.pipes.iter().flat_map(|p| {
            let first = p.flying.front().map(|first| first.at);
            let others = p.flying.iter().skip(1).map(|other| other.at);
            let others = others.filter(|_| link.conditions.messages);
            first.or(p.fin).into_iter().chain(others)
        });
        times.filter(|at| *at > link.now()).min().map(Nanos)
    }
}

/// One end of a simulated connection.
#[derive(Debug)]
pub struct SimStream {
    wire: Wire,
    end: usize,
    local: SocketAddr,
    remote: SocketAddr,
}

/// Both ends of a connection that is established.
pub fn pair(conditions: Conditions, clock: &Arc<AtomicU64>) -> (SimStream, SimStream, Wire) {
    connection(conditions, clock, nowhere(1), nowhere(2), 0)
}

fn nowhere(port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

fn connection(
    conditions: Conditions,
    clock: &Arc<AtomicU64>,
    first: SocketAddr,
    second: SocketAddr,
    established_at: u64,
) -> (SimStream, SimStream, Wire) {
    let wire = Wire(Arc::new(Mutex::new(Link {
        random: conditions.seed,
        conditions,
        clock: clock.clone(),
        pipes: Default::default(),
        closed_with: None,
        silent: None,
        established_at,
    })));
    let end = |end, local, remote| SimStream {
        wire: wire.clone(),
        end,
        local,
        remote,
    };
    (end(0, first, second), end(1, second, first), wire)
}

impl Stream for SimStream {
    fn carries_messages(&self) -> bool {
        self.wire.lock().conditions.messages
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let mut link = self.wire.lock();
        if let Some(errno) = link.closed_with {
            return Err(StreamError::Closed(errno));
        }
        if link.pipes[self.end].finished {
            return Err(StreamError::Closed(Errno::PIPE));
        }
        let offered: usize = pieces.iter().map(Piece::len).sum();
        let pipe = &link.pipes[self.end];
        let capacity = pipe.capacity.unwrap_or(link.conditions.capacity);
        let room = capacity.saturating_sub(pipe.unread);
        let len = match link.conditions.messages {
            true if room > 0 => offered,
            _ => link.cut(offered.min(room)),
        };
        if len == 0 && offered > 0 {
            return Err(StreamError::WouldBlock);
        }
        let mut bytes = vec![0; len];
        let mut at = 0;
        for piece in pieces {
            // SAFETY: a simulation's memory stays in place as long as its devices exist.
            at += unsafe { piece.copy_out(&mut bytes[at..]) };
        }
        let at = link.arrival(self.end);
        let pipe = &mut link.pipes[self.end];
        if let Some(record) = &mut pipe.record {
            record.push(bytes.clone());
        }
        let start = pipe.taken;
        for (position, mask) in &pipe.damage {
            let byte = position
                .checked_sub(start)
                .and_then(|i| bytes.get_mut(usize::try_from(i).ok()?));
            if let Some(byte) = byte {
                *byte ^= mask;
            }
        }
        pipe.taken += len as u64;
        pipe.unread += len;
        pipe.flying.push_back(Flying {
            at,
            bytes,
            was_offered: false,
            placed: 0,
        });
        if pipe.cut_at.is_some_and(|at| pipe.taken >= at) {
            link.closed_with = Some(Errno::CONNRESET);
        }
        Ok(len)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let mut link = self.wire.lock();
        let closed_with = link.closed_with;
        if link.silent.is_some() && closed_with.is_none() {
            return Err(StreamError::WouldBlock);
        }
        let now = link.now();
        let room: usize = into.iter().map(PieceMut::len).sum();
        let mut left = link.cut(room);
        let messages = link.conditions.messages;
        let pipe = &mut link.pipes[1 - self.end];
        if messages && let Some(message) = pipe.flying.front() {
            assert!(message.bytes.len() <= room, "a message would be cut");
            left = message.bytes.len();
        }
        let mut got = 0;
        let mut pieces = into.iter_mut().map(|piece| piece.first(usize::MAX));
        let mut piece = pieces.next();
        while left > 0
            && let Some(target) = piece
        {
            if target.is_empty() {
                piece = pieces.next();
                continue;
            }
            let Some(first) = pipe.flying.front_mut().filter(|first| first.at <= now) else {
                break;
            };
            let bytes = &mut first.bytes;
            let n = bytes.len().min(left);
            // SAFETY: a simulation's memory stays in place as long as its devices exist, and no
            // reference into it exists during a call.
            let n = unsafe { target.copy_in(&bytes[..n]) };
            bytes.drain(..n);
            if bytes.is_empty() {
                pipe.unread -= first.placed;
                pipe.flying.pop_front();
            }
            (got, left) = (got + n, left - n);
            pipe.unread -= n;
            piece = Some(target.skip(n));
        }
        let ended = pipe.flying.is_empty() && pipe.fin.is_some_and(|at| at <= now);
        match (got, closed_with) {
            // As in Linux, what had arrived before the reset can still be read.
            (0, Some(errno)) => Err(StreamError::Closed(errno)),
            (0, None) if ended => Ok(0),
            (0, None) => Err(StreamError::WouldBlock),
            (n, _) => Ok(n),
        }
    }

    fn receive_message(&mut self, into: &mut [u8]) -> Result<Received, StreamError> {
        let first = |link: &Link| {
            link.pipes[1 - self.end]
                .flying
                .front()
                .map_or(0, |first| first.placed)
        };
        let placed = first(&self.wire.lock());
        let len = self.receive_bytes(into)?;
        Ok(Received { len, placed })
    }

    fn place_early(&mut self, place: &mut dyn FnMut(&[u8]) -> usize) -> bool {
        let mut link = self.wire.lock();
        let (now, is_silent) = (link.now(), link.silent.is_some() || link.closed_with.is_some());
        let flying = &mut link.pipes[1 - self.end].flying;
        let is_due = |message: &Flying| message.at <= now;
        if is_silent || flying.front().is_none_or(is_due) {
            return false;
        }
        let mut early = flying
            .iter_mut()
            .filter(|message| is_due(message) && !message.was_offered);
        let Some(early) = early.next() else {
            return false;
        };
        early.was_offered = true;
        early.placed = place(&early.bytes);
        early.bytes.truncate(early.bytes.len() - early.placed);
        true
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        let link = self.wire.lock();
        if let Some(errno) = link.closed_with {
            return Err(StreamError::Closed(errno));
        }
        let pipe = &link.pipes[1 - self.end];
        let now = link.now();
        let arrived = pipe.flying.front().is_some_and(|first| first.at <= now);
        let ended = pipe.flying.is_empty() && pipe.fin.is_some_and(|at| at <= now);
        if link.silent.is_some() || !(arrived || ended) {
            return Err(StreamError::WouldBlock);
        }
        Ok(arrived)
    }

    fn finish(&mut self) {
        let mut link = self.wire.lock();
        let at = link.now() + link.latency();
        let pipe = &mut link.pipes[self.end];
        pipe.finished = true;
        pipe.fin.get_or_insert(at);
    }

    fn reset(&mut self) {
        self.wire.reset();
    }

    fn mss(&self) -> u32 {
        self.wire.lock().conditions.mss
    }

    fn established(&mut self) -> Result<bool, Errno> {
        let link = self.wire.lock();
        match link.closed_with {
            Some(errno) => Err(errno),
            None => Ok(link.silent.is_none() && link.established_at <= link.now()),
        }
    }

    fn unacknowledged(&self) -> u32 {
        let link = self.wire.lock();
        u32::try_from(link.pipes[self.end].unread).unwrap_or(u32::MAX)
    }

    fn answers(&self) -> Option<Answers> {
        let link = self.wire.lock();
        let (now, pipe) = (link.now(), &link.pipes[self.end]);
        let sent = |arrival: &u64| arrival.saturating_sub(link.latency());
        let lost = |arrival: &u64| *arrival > link.silent.unwrap_or(now);
        let flying = || pipe.flying.iter().filter(|flying| lost(&flying.at));
        let unacknowledged = flying().map(|flying| flying.bytes.len()).sum::<usize>() as u32;
        let Some(silent) = link.silent else {
            let zero = Duration::ZERO;
            return Some(Answers::of_silence(zero, unacknowledged, zero, zero));
        };
        let time = |since: Option<u64>| Nanos(now).since(Nanos(since.unwrap_or(now).max(silent)));
        let oldest = flying().next().map(|flying| sent(&flying.at));
        let (sent, asked) = (time(oldest), time(pipe.asked));
        Some(Answers::of_silence(
            time(Some(silent)),
            unacknowledged,
            sent,
            asked,
        ))
    }

    fn probe_peer(&mut self, probing: Probing) {
        let mut link = self.wire.lock();
        let now = link.now();
        match probing {
            Probing::Within(_) => {}
            Probing::Every(_) => link.pipes[self.end].asked = Some(now),
            Probing::Usual => link.pipes[self.end].asked = None,
        }
    }

    fn ends(&self) -> Ends {
        Ends {
            local: self.local,
            remote: self.remote,
        }
    }

    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        FullOperation::of(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for SimStream {
    /// As TCP does: closing with unread data resets, otherwise a FIN follows the taken bytes.
    fn drop(&mut self) {
        let unread = self.wire.lock().pipes[1 - self.end].unread > 0;
        if unread { self.wire.reset() } else { self.finish() }
    }
}

/// A network of simulated connections.
#[derive(Debug, Clone)]
pub struct SimNetwork(Arc<Mutex<Nodes>>);

#[derive(Debug)]
struct Nodes {
    conditions: Conditions,
    clock: Arc<AtomicU64>,
    listeners: HashMap<u16, VecDeque<SimStream>>,
    wires: Vec<Wire>,
    next_port: u16,
}

impl SimNetwork {
    /// A network on which all connections have the given conditions.
    pub fn new(conditions: Conditions, clock: Arc<AtomicU64>) -> SimNetwork {
        SimNetwork(Arc::new(Mutex::new(Nodes {
            conditions,
            clock,
            listeners: HashMap::new(),
            wires: Vec::new(),
            next_port: 49152,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock()
    }

    /// All connections made so far; direction 0 is what the initiator sends.
    pub fn wires(&self) -> Vec<Wire> {
        self.lock().wires.clone()
    }

    /// When something arrives next on any connection.
    pub fn next_arrival(&self) -> Option<Nanos> {
        self.wires().iter().filter_map(Wire::next_arrival).min()
    }
}

impl Network for SimNetwork {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        _traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let mut nodes = self.lock();
        nodes.next_port = nodes.next_port.wrapping_add(1).max(49152);
        let local = local.unwrap_or(SocketAddr::new(remote.ip(), nodes.next_port));
        let (conditions, clock) = (nodes.conditions.clone(), nodes.clock.clone());
        let round_trip = u64::try_from(2 * conditions.latency.as_nanos()).unwrap_or(u64::MAX);
        let established_at = clock.load(Ordering::Relaxed).saturating_add(round_trip);
        let (ours, theirs, wire) = connection(conditions, &clock, local, remote, established_at);
        match nodes.listeners.get_mut(&remote.port()) {
            Some(waiting) => waiting.push_back(theirs),
            None => wire.lock().closed_with = Some(Errno::CONNREFUSED),
        }
        nodes.wires.push(wire);
        Ok(Box::new(ours))
    }

    fn listen(
        &self,
        local: SocketAddr,
        _backlog: u32,
        _traffic_class: u8,
        _ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let mut nodes = self.lock();
        let mut local = local;
        while local.port() == 0 {
            nodes.next_port = nodes.next_port.wrapping_add(1).max(49152);
            if !nodes.listeners.contains_key(&nodes.next_port) {
                local.set_port(nodes.next_port);
            }
        }
        if nodes.listeners.contains_key(&local.port()) {
            return Err(Errno::ADDRINUSE);
        }
        nodes.listeners.insert(local.port(), VecDeque::new());
        Ok(Box::new(SimListener {
            network: self.clone(),
            local,
        }))
    }
}

#[derive(Debug)]
struct SimListener {
    network: SimNetwork,
    local: SocketAddr,
}

impl Listener for SimListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        let mut nodes = self.network.lock();
        let Some(waiting) = nodes.listeners.get_mut(&self.local.port()) else {
            return Err(Errno::INVAL);
        };
        let ready = waiting
            .front_mut()
            .is_some_and(|s| s.established().unwrap_or(true));
        let accepted = if ready { waiting.pop_front() } else { None };
        Ok(accepted.map(|stream| Box::new(stream) as Box<dyn Stream>))
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let unanswered = self.network.lock().listeners.remove(&self.local.port());
        for stream in unanswered.into_iter().flatten() {
            stream.wire.reset();
        }
    }
}
