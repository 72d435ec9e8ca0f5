//! Two ends and a simulated device between them. The device executes posted requests in an order
//! drawn from a seed, and permits no access to memory that is not exposed. A program on top moves
//! patterns of bytes in both directions, so that every byte can be checked.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;
use urnic_rpc_rdma::engine::{
    Access, Action, Answer, Call, CallError, CallId, Closing, Config, Connection, Event, Exposed, Incoming,
    Item, Message, RegionId, Reply, Role, Source, Span, Terms, WorkId,
};
use urnic_rpc_rdma::payload::{Piece, padding, unreduced};
use urnic_rpc_rdma::{PrivateData, Segment};

#[derive(Clone, Debug)]
pub(crate) struct Memory(Rc<RefCell<Vec<u8>>>);

impl Memory {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Rc::new(RefCell::new(bytes)))
    }

    fn same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

/// A SplitMix64 generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % bound.max(1) as u64) as usize
    }

    /// Whether an event that occurs once in this number of times occurs now.
    fn once_in(&mut self, times: usize) -> bool {
        times > 0 && self.below(times) == 0
    }
}

/// The sizes of a call and of its expected reply.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) arguments: Vec<u32>,
    pub(crate) results: Vec<u32>,
    pub(crate) tail: u32,
    pub(crate) extra: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// Connections are cut once in this number of steps.
    pub(crate) cut: usize,
    /// Calls are cancelled once in this number of steps.
    pub(crate) cancel: usize,
    /// Registrations fail once in this number of times.
    pub(crate) register: usize,
    /// Releases fail once in this number of times.
    pub(crate) release: usize,
    /// Credits change once in this number of steps.
    pub(crate) credits: usize,
}

enum Wire {
    Send(WorkId, Vec<Span<Memory>>, Option<u32>),
    Write(Vec<Span<Memory>>, Segment),
    Read(WorkId, Memory, u64, Segment),
}

enum Done {
    Registered(RegionId, Vec<Segment>),
    RegisterFailed(RegionId),
    Released(RegionId),
    ReleaseFailed(RegionId),
    Completed(WorkId),
}

struct End {
    engine: Connection<Memory>,
    terms: Terms,
    receives: usize,
    wire: VecDeque<Wire>,
    done: Vec<Done>,
    regions: HashMap<RegionId, Memory>,
    sinks: HashMap<(CallId, usize), Memory>,
    held: Vec<Incoming>,
    open: HashSet<CallId>,
    jobs: HashMap<u32, Job>,
    cancelled: HashSet<u32>,
}

/// The access of the peer by a handle.
struct Window {
    region: (usize, RegionId),
    memory: Memory,
    at: usize,
    length: u32,
    access: Access,
}

const BASE: u64 = 0x7000_0000_0000;

pub(crate) struct Simulation {
    ends: [End; 2],
    windows: HashMap<u32, Window>,
    random: Random,
    faults: Faults,
    connected: bool,
    segments: usize,
    private_data: [PrivateData; 2],
    pub(crate) answers: usize,
    /// Accesses that the device refused. Only cancelled calls can cause any.
    pub(crate) refusals: usize,
    pub(crate) long: (usize, usize),
    pub(crate) invalidated: usize,
}

impl Simulation {
    pub(crate) fn new(seed: u64, faults: Faults, segments: usize, private_data: [PrivateData; 2]) -> Self {
        let end = |role| End {
            engine: Connection::new(&Config {
                segments,
                grant: 3,
                request: 6,
                max_reads: 3,
                ..Config::new(role)
            }),
            terms: Terms::default(),
            receives: 0,
            wire: VecDeque::new(),
            done: Vec::new(),
            regions: HashMap::new(),
            sinks: HashMap::new(),
            held: Vec::new(),
            open: HashSet::new(),
            jobs: HashMap::new(),
            cancelled: HashSet::new(),
        };
        Self {
            ends: [end(Role::Client), end(Role::Server)],
            windows: HashMap::new(),
            random: Random(seed),
            faults,
            connected: false,
            segments,
            private_data,
            answers: 0,
            refusals: 0,
            long: (0, 0),
            invalidated: 0,
        }
    }

    pub(crate) fn call(&mut self, end: usize, xid: u32, job: &Job) {
        let call = call_of(xid, job);
        assert_eq!(self.ends[end].engine.call(call), Ok(xid));
        self.ends[end].jobs.insert(xid, job.clone());
    }

    fn connect(&mut self) {
        for (index, end) in self.ends.iter_mut().enumerate() {
            end.terms = Terms::agreed(&self.private_data[index], &self.private_data[1 - index]);
            end.receives = 0;
            end.engine.connected(end.terms);
        }
        self.ends[1].engine.peer_takes_calls();
        self.connected = true;
    }

    fn disconnect(&mut self) {
        self.connected = false;
        for end in &mut self.ends {
            end.wire.clear();
            end.done.retain(|done| !matches!(done, Done::Completed(_)));
            end.engine.disconnected();
        }
    }

    /// Runs until no step is left, with faults in between.
    pub(crate) fn run(&mut self) {
        for _ in 0..200_000 {
            if !self.connected {
                self.connect();
            }
            self.post(0);
            self.post(1);
            if !self.connected {
                continue;
            }
            if !self.step() {
                return self.check_nothing_is_left();
            }
            if self.random.once_in(self.faults.cut) {
                self.disconnect();
            }
            if self.random.once_in(self.faults.credits) {
                let (grant, request) = (1 + self.random.below(8) as u32, 1 + self.random.below(8) as u32);
                self.ends[1].engine.set_grant(grant);
                self.ends[0].engine.set_request(request);
                self.ends[0].engine.set_grant(1 + grant / 2);
            }
            if self.random.once_in(self.faults.cancel) {
                let end = self.random.below(2);
                let mut xids: Vec<_> = self.ends[end].jobs.keys().copied().collect();
                xids.sort_unstable();
                if !xids.is_empty() {
                    let xid = xids[self.random.below(xids.len())];
                    // A call that has ended keeps its outcome, even if its event was not taken yet.
                    if self.ends[end].engine.cancel(xid) {
                        self.ends[end].cancelled.insert(xid);
                    }
                }
            }
        }
        panic!("the simulation does not end");
    }

    fn check_nothing_is_left(&mut self) {
        assert!(self.windows.is_empty(), "memory stayed exposed");
        for end in &self.ends {
            assert_eq!(end.engine.outstanding(), 0);
            assert!(end.jobs.is_empty(), "never answered: {:?}", end.jobs);
            assert!(end.regions.is_empty() && end.held.is_empty());
            assert!(end.open.is_empty(), "never finished: {:?}", end.open);
        }
    }

    /// Executes the actions of an end, and handles its events.
    fn post(&mut self, index: usize) {
        for action in self.ends[index].engine.actions() {
            self.act(index, action);
        }
        for event in self.ends[index].engine.events() {
            self.handle_event(index, event);
        }
    }

    fn act(&mut self, index: usize, action: Action<Memory>) {
        match action {
            Action::Receive(count) => self.ends[index].receives += count,
            Action::Register { region, what, access } => {
                let (memory, length) = match what {
                    Exposed::Memory(memory, len) => (memory, len),
                    Exposed::Bytes(bytes) => (Memory::new(bytes.to_vec()), bytes.len() as u32),
                    Exposed::Fresh(len) => (Memory::new(vec![0; len as usize]), len),
                };
                self.register(index, region, memory, length, access);
            }
            Action::Release {
                region,
                invalidated,
                keep,
            } => {
                if !keep {
                    self.ends[index].regions.remove(&region);
                }
                self.release(index, region, invalidated);
            }
            Action::Send {
                work,
                pieces,
                invalidate,
            } => self.ends[index]
                .wire
                .push_back(Wire::Send(work, pieces, invalidate)),
            Action::Write { pieces, remote } => self.ends[index].wire.push_back(Wire::Write(pieces, remote)),
            Action::Read {
                work,
                call,
                item,
                length,
                at,
                remote,
            } => {
                let end = &mut self.ends[index];
                let sink = end.sinks.entry((call, item));
                let sink = sink
                    .or_insert_with(|| Memory::new(vec![0; length as usize]))
                    .clone();
                end.wire.push_back(Wire::Read(work, sink, at, remote));
            }
            Action::Close(Closing::Release) => {
                assert!(self.faults.release > 0);
                self.disconnect();
            }
            Action::Close(why) => panic!("{why}"),
        }
    }

    fn register(&mut self, index: usize, region: RegionId, memory: Memory, length: u32, access: Access) {
        if self.random.once_in(self.faults.register) {
            return self.ends[index].done.push(Done::RegisterFailed(region));
        }
        let mut segments = Vec::new();
        let mut at = 0;
        while at < length {
            let left = length - at;
            let last = segments.len() + 1 == self.segments;
            let part = if last {
                left
            } else {
                1 + self.random.below(left as usize) as u32
            };
            let handle = self.random.below(usize::MAX) as u32;
            self.windows.insert(
                handle,
                Window {
                    region: (index, region),
                    memory: memory.clone(),
                    at: at as usize,
                    length: part,
                    access,
                },
            );
            segments.push(Segment {
                handle,
                length: part,
                offset: BASE + u64::from(at),
            });
            at += part;
        }
        self.ends[index].regions.insert(region, memory);
        self.ends[index].done.push(Done::Registered(region, segments));
    }

    fn release(&mut self, index: usize, region: RegionId, invalidated: Option<u32>) {
        if let Some(handle) = invalidated {
            assert!(
                !self.windows.contains_key(&handle),
                "it should have been invalidated"
            );
        }
        let connected = self.connected;
        if connected && self.random.once_in(self.faults.release) {
            self.ends[index].done.push(Done::ReleaseFailed(region));
        } else {
            self.ends[index].done.push(Done::Released(region));
        }
    }

    /// Executes one of the possible steps. Returns `false` if there is none.
    fn step(&mut self) -> bool {
        let mut choices = Vec::new();
        for (index, end) in self.ends.iter().enumerate() {
            choices.extend((!end.wire.is_empty()).then_some((index, 0)));
            choices.extend((!end.done.is_empty()).then_some((index, 1)));
            choices.extend((!end.held.is_empty()).then_some((index, 2)));
        }
        if choices.is_empty() {
            return false;
        }
        let (index, what) = choices[self.random.below(choices.len())];
        match what {
            0 => self.transmit(index),
            1 => self.complete(index),
            _ => self.answer(index),
        }
        true
    }

    fn complete(&mut self, index: usize) {
        let choice = self.random.below(self.ends[index].done.len());
        let done = self.ends[index].done.swap_remove(choice);
        let engine = &mut self.ends[index].engine;
        match done {
            Done::Registered(region, segments) => engine.registered(region, segments),
            Done::RegisterFailed(region) => engine.register_failed(region),
            Done::Released(region) => {
                self.windows.retain(|_, window| window.region != (index, region));
                engine.released(region);
            }
            Done::ReleaseFailed(region) => {
                engine.release_failed(region);
                // The end of the connection protects the memory.
                self.windows.retain(|_, window| window.region != (index, region));
            }
            Done::Completed(work) => engine.completed(work),
        }
    }

    fn transmit(&mut self, index: usize) {
        let Some(wire) = self.ends[index].wire.pop_front() else {
            return;
        };
        let granted = match wire {
            Wire::Send(work, pieces, invalidate) => {
                let message = bytes(&pieces);
                assert!(
                    message.len() <= self.ends[index].terms.send,
                    "longer than the threshold"
                );
                self.ends[index].done.push(Done::Completed(work));
                let peer = &mut self.ends[1 - index];
                assert!(peer.receives > 0, "a Send without a receive");
                peer.receives -= 1;
                let valid = invalidate.is_none_or(|handle| self.windows.remove(&handle).is_some());
                if valid {
                    self.invalidated += usize::from(invalidate.is_some());
                    self.ends[1 - index].engine.received(&message, invalidate);
                }
                valid
            }
            Wire::Write(pieces, remote) => self.access(1 - index, remote, Access::RemoteWrite, |target| {
                target.copy_from_slice(&bytes(&pieces));
            }),
            Wire::Read(work, sink, at, remote) => {
                let granted = self.access(1 - index, remote, Access::RemoteRead, |source| {
                    sink.0.borrow_mut()[at as usize..][..source.len()].copy_from_slice(source);
                });
                if granted {
                    self.ends[index].done.push(Done::Completed(work));
                } else {
                    self.ends[index].engine.failed(work);
                }
                granted
            }
        };
        if !granted {
            let cancelled = self.ends.iter().any(|end| !end.cancelled.is_empty());
            assert!(cancelled, "an access that was not granted");
            self.refusals += 1;
            self.disconnect();
        }
    }

    fn access(&self, owner: usize, remote: Segment, access: Access, body: impl FnOnce(&mut [u8])) -> bool {
        let Some(window) = self.windows.get(&remote.handle) else {
            return false;
        };
        let within = (remote.offset - BASE)
            .checked_sub(window.at as u64)
            .is_some_and(|at| at + u64::from(remote.length) <= u64::from(window.length));
        if !within || window.access != access || window.region.0 != owner {
            return false;
        }
        let at = (remote.offset - BASE) as usize;
        body(&mut window.memory.0.borrow_mut()[at..][..remote.length as usize]);
        true
    }

    fn handle_event(&mut self, index: usize, event: Event<Memory>) {
        match event {
            Event::CallReceived(incoming) => {
                let end = &mut self.ends[index];
                end.open.insert(incoming.call);
                end.held.push(incoming);
            }
            Event::Finished(call) => {
                let end = &mut self.ends[index];
                // Calls that were never passed to the program finish, too.
                end.open.remove(&call);
                end.held.retain(|incoming| incoming.call != call);
                end.sinks.retain(|(of, _), _| *of != call);
            }
            Event::Answered { xid, call, outcome } => self.answered(index, xid, &call, outcome),
        }
    }

    fn answered(&mut self, index: usize, xid: u32, call: &Call<Memory>, outcome: Result<Answer, CallError>) {
        self.answers += 1;
        for item in call.arguments.iter().chain(&call.results) {
            let exposed = self
                .windows
                .values()
                .any(|window| window.memory.same(&item.memory));
            assert!(
                !exposed,
                "the peer still has access to the memory of a finished call"
            );
        }
        let end = &mut self.ends[index];
        let job = end.jobs.remove(&xid).unwrap();
        match outcome {
            Ok(answer) => {
                let (message, long) = match answer.message {
                    Message::Short(message) => (message, false),
                    Message::Long { region, len } => (
                        end.regions.remove(&region).unwrap().0.borrow()[..len as usize].to_vec(),
                        true,
                    ),
                };
                self.long.1 += usize::from(long);
                check_answer(xid, &job, call, &message, &answer.placed);
            }
            Err(CallError::Cancelled) => assert!(end.cancelled.contains(&xid)),
            Err(CallError::Register) => assert!(self.faults.register > 0),
            Err(error) => panic!("{error}"),
        }
    }

    /// Makes the program answer one of the calls that it holds.
    fn answer(&mut self, index: usize) {
        let end = &mut self.ends[index];
        let incoming = end.held.swap_remove(self.random.below(end.held.len()));
        let sink = |item| end.sinks[&(incoming.call, item)].0.borrow().clone();
        let long = incoming.message.is_none();
        self.long.0 += usize::from(long);
        let inline = incoming.message.clone().unwrap_or_else(|| sink(0));
        let items = &incoming.items[usize::from(long)..];
        let mut whole = Vec::new();
        for piece in unreduced(inline.len(), items).unwrap() {
            match piece {
                Piece::Inline(range) => whole.extend(&inline[range]),
                Piece::Chunk(item) => whole.extend(sink(item + usize::from(long))),
                Piece::Pad(count) => whole.extend(std::iter::repeat_n(0, count)),
            }
        }
        let reply = reply_to(incoming.xid, &whole);
        end.engine.reply(incoming.call, &reply).unwrap();
    }
}

fn bytes(pieces: &[Span<Memory>]) -> Vec<u8> {
    let mut all = Vec::new();
    for Span { source, at, len } in pieces {
        match source {
            Source::Bytes(bytes) => all.extend(&bytes[*at..][..*len]),
            Source::Memory(memory) => all.extend(&memory.0.borrow()[*at..][..*len]),
        }
    }
    all
}

/// A pattern of bytes that identifies an item of a call.
fn pattern(xid: u32, item: usize, len: u32) -> Vec<u8> {
    (0..len)
        .map(|n| (n ^ xid.wrapping_mul(31) ^ (item as u32 * 97)) as u8)
        .collect()
}

fn put(word: u32, out: &mut Vec<u8>) {
    out.extend(word.to_be_bytes());
}

/// A call: `xid CALL results:n len* tail extra arguments:n (len opaque)* extra-bytes`.
fn call_of(xid: u32, job: &Job) -> Call<Memory> {
    let mut message = Vec::new();
    for word in [xid, 0, job.results.len() as u32] {
        put(word, &mut message);
    }
    for word in job
        .results
        .iter()
        .chain(&[job.tail, job.extra, job.arguments.len() as u32])
    {
        put(*word, &mut message);
    }
    let mut arguments = Vec::new();
    for (index, len) in job.arguments.iter().enumerate() {
        put(*len, &mut message);
        arguments.push(Item {
            offset: message.len(),
            memory: Memory::new(pattern(xid, index, *len)),
            len: *len,
        });
    }
    message.extend(pattern(xid, 50, job.extra));
    let room = |len: &u32| Item {
        offset: 0,
        memory: Memory::new(vec![0xee; *len as usize + 3]),
        len: *len + 3,
    };
    Call {
        message: message.into(),
        arguments,
        results: job.results.iter().map(room).collect(),
        max_reply: 8 + 4 * job.results.len() + job.tail as usize,
    }
}

/// Checks the call byte by byte, and makes its reply: `xid REPLY (len opaque)* tail-bytes`.
fn reply_to(xid: u32, whole: &[u8]) -> Reply<Memory> {
    let mut words = whole.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word));
    let mut word = || words.next().unwrap();
    assert_eq!((word(), word()), (xid, 0));
    let results: Vec<_> = (0..word()).map(|_| word()).collect();
    let (tail, extra, arguments) = (word(), word(), word());
    let mut at = 4 * (6 + results.len());
    for index in 0..arguments as usize {
        let len = u32::from_be_bytes(whole[at..][..4].try_into().unwrap());
        at += 4;
        let padded = len as usize + padding(u64::from(len));
        let mut expected = pattern(xid, index, len);
        expected.resize(padded, 0);
        assert_eq!(whole[at..][..padded], expected, "argument {index}");
        at += padded;
    }
    assert_eq!(whole[at..], pattern(xid, 50, extra));

    let mut message = Vec::new();
    put(xid, &mut message);
    put(1, &mut message);
    let mut items = Vec::new();
    for (index, len) in results.iter().enumerate() {
        put(*len, &mut message);
        items.push(Item {
            offset: message.len(),
            memory: Memory::new(pattern(xid, 100 + index, *len)),
            len: *len,
        });
    }
    message.extend(pattern(xid, 51, tail));
    Reply {
        message: message.into(),
        results: items,
    }
}

fn check_answer(xid: u32, job: &Job, call: &Call<Memory>, message: &[u8], placed: &[Option<u32>]) {
    let mut expected = Vec::new();
    put(xid, &mut expected);
    put(1, &mut expected);
    for (index, len) in job.results.iter().enumerate() {
        put(*len, &mut expected);
        let content = pattern(xid, 100 + index, *len);
        match placed[index] {
            Some(bytes) => {
                assert_eq!(bytes, *len);
                let memory = call.results[index].memory.0.borrow();
                assert_eq!(memory[..*len as usize], content, "result {index}");
                assert_eq!(memory[*len as usize..], [0xee; 3], "padding was written");
            }
            None => {
                expected.extend(content);
                expected.extend(std::iter::repeat_n(0, padding(u64::from(*len))));
            }
        }
    }
    expected.extend(pattern(xid, 51, job.tail));
    assert_eq!(message, expected);
}
