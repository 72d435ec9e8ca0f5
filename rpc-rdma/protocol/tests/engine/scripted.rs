//! One end, with a peer and a device that the test scripts.

use std::collections::VecDeque;
use urnic_rpc_rdma::engine::{
    Action, Call, Config, Connection, Event, Exposed, Item, RegionId, Role, Source, Span, Terms, WorkId,
};
use urnic_rpc_rdma::{Body, ChunkLists, Header, Limits, Segment, VERSION};

/// Memory of the consumer. Its bytes do not matter in these tests.
pub(crate) type Memory = &'static str;

pub(crate) struct End {
    pub(crate) engine: Connection<Memory>,
    pub(crate) receives: usize,
    pub(crate) sent: VecDeque<Sent>,
    pub(crate) others: Vec<Action<Memory>>,
    pub(crate) events: Vec<Event<Memory>>,
    /// Whether registrations are answered at once.
    pub(crate) registers: bool,
    pub(crate) releases: bool,
}

#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) work: WorkId,
    pub(crate) header: Header,
    /// Bytes of the whole message.
    pub(crate) len: usize,
    /// Bytes of the message that are in the consumer's memory.
    pub(crate) memory: Vec<(Memory, usize)>,
    pub(crate) payload: Vec<u8>,
    pub(crate) invalidate: Option<u32>,
}

impl Sent {
    pub(crate) fn lists(&self) -> &ChunkLists {
        match &self.header.body {
            Body::Msg(lists) | Body::NoMsg(lists) => lists,
            Body::Error(_) => panic!("RDMA_ERROR has no lists"),
        }
    }
}

pub(crate) fn handle(region: RegionId) -> u32 {
    0x100 + region.0 as u32
}

impl End {
    pub(crate) fn new(role: Role) -> Self {
        Self::with(&Config::new(role))
    }

    pub(crate) fn with(config: &Config) -> Self {
        Self::over(config, Terms::default())
    }

    /// An end of a connection with these terms.
    pub(crate) fn over(config: &Config, terms: Terms) -> Self {
        let mut end = Self {
            engine: Connection::new(config),
            receives: 0,
            sent: VecDeque::new(),
            others: Vec::new(),
            events: Vec::new(),
            registers: true,
            releases: true,
        };
        end.engine.connected(terms);
        end.run();
        end
    }

    /// Executes the actions of the engine.
    pub(crate) fn run(&mut self) {
        loop {
            let actions = self.engine.actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Receive(count) => self.receives += count,
                    Action::Register { region, ref what, .. } if self.registers => {
                        let length = match what {
                            Exposed::Memory(_, len) | Exposed::Fresh(len) => *len,
                            Exposed::Bytes(bytes) => bytes.len() as u32,
                        };
                        let segment = Segment {
                            handle: handle(region),
                            length,
                            offset: 0,
                        };
                        self.engine.registered(region, vec![segment]);
                        self.others.push(action);
                    }
                    Action::Release { region, .. } if self.releases => {
                        self.engine.released(region);
                        self.others.push(action);
                    }
                    Action::Send {
                        work,
                        pieces,
                        invalidate,
                    } => self.sent.push_back(sent(work, &pieces, invalidate)),
                    other => self.others.push(other),
                }
            }
        }
        self.events.extend(self.engine.events());
    }

    pub(crate) fn receive(&mut self, message: &[u8], invalidated: Option<u32>) {
        assert!(self.receives > 0, "nothing was posted for this message");
        self.receives -= 1;
        self.engine.received(message, invalidated);
        self.run();
    }

    pub(crate) fn call(&mut self, xid: u32) {
        self.engine.call(short(xid)).unwrap();
        self.run();
    }

    /// The end receives a reply without data.
    pub(crate) fn receive_reply(&mut self, xid: u32, credits: u32) {
        self.receive(&rpc(xid, 1, credits, ChunkLists::default()), None);
    }

    /// The end receives a call without data, which the consumer answers.
    pub(crate) fn receive_call(&mut self, xid: u32, credits: u32) {
        self.receive(&rpc(xid, 0, credits, ChunkLists::default()), None);
    }

    pub(crate) fn next(&mut self) -> Sent {
        self.sent.pop_front().unwrap()
    }
}

fn sent(work: WorkId, pieces: &[Span<Memory>], invalidate: Option<u32>) -> Sent {
    let mut bytes = Vec::new();
    let mut memory = Vec::new();
    for Span { source, at, len } in pieces {
        match source {
            Source::Bytes(all) => bytes.extend(&all[*at..][..*len]),
            Source::Memory(name) => {
                memory.push((*name, *len));
                bytes.extend(std::iter::repeat_n(b'm', *len));
            }
        }
    }
    let (header, payload) = Header::parse(&bytes, &Limits::default()).unwrap();
    Sent {
        work,
        header,
        len: bytes.len(),
        memory,
        payload: payload.to_vec(),
        invalidate,
    }
}

pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

pub(crate) fn message(xid: u32, msg_type: u32, len: usize) -> Vec<u8> {
    let mut bytes = words(&[xid, msg_type]);
    bytes.resize(len.max(8), b'.');
    bytes
}

pub(crate) fn rpc(xid: u32, msg_type: u32, credits: u32, lists: ChunkLists) -> Vec<u8> {
    let mut bytes = header(xid, credits, Body::Msg(lists));
    bytes.extend(message(xid, msg_type, 24));
    bytes
}

pub(crate) fn header(xid: u32, credits: u32, body: Body) -> Vec<u8> {
    let mut bytes = Vec::new();
    Header {
        xid,
        version: VERSION,
        credits,
        body,
    }
    .emit(&mut bytes);
    bytes
}

pub(crate) fn short(xid: u32) -> Call<Memory> {
    Call {
        message: message(xid, 0, 40).into(),
        arguments: vec![],
        results: vec![],
        max_reply: 100,
    }
}

pub(crate) fn item(offset: usize, memory: Memory, len: u32) -> Item<Memory> {
    Item { offset, memory, len }
}

/// A call of `len` bytes with one argument at its end, and memory for one result. The rest of the
/// reply has `max_reply` bytes.
pub(crate) fn call(xid: u32, len: usize, argument: u32, result: u32, max_reply: usize) -> Call<Memory> {
    let mut call = short(xid);
    call.message = message(xid, 0, len).into();
    if argument > 0 {
        call.arguments = vec![item(len, "argument", argument)];
    }
    if result > 0 {
        call.results = vec![item(0, "result", result)];
    }
    call.max_reply = max_reply;
    call
}
