//! A live program, `cm_target_process.c`, that connects through librdmacm to raw [`Peer`]s of the
//! test.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use super::{CommandProcess, Wc, fields};
use crate::peer::{Peer, hex};
use crate::program::{Program, Running};

/// `enum rdma_cm_event_type`.
pub mod cm_event {
    /// `RDMA_CM_EVENT_CONNECT_REQUEST`.
    pub const CONNECT_REQUEST: u64 = 4;
    /// `RDMA_CM_EVENT_CONNECT_RESPONSE`.
    pub const CONNECT_RESPONSE: u64 = 5;
    /// `RDMA_CM_EVENT_CONNECT_ERROR`.
    pub const CONNECT_ERROR: u64 = 6;
    /// `RDMA_CM_EVENT_UNREACHABLE`.
    pub const UNREACHABLE: u64 = 7;
    /// `RDMA_CM_EVENT_REJECTED`.
    pub const REJECTED: u64 = 8;
    /// `RDMA_CM_EVENT_ESTABLISHED`.
    pub const ESTABLISHED: u64 = 9;
    /// `RDMA_CM_EVENT_DISCONNECTED`.
    pub const DISCONNECTED: u64 = 10;
    /// `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
    pub const TIMEWAIT_EXIT: u64 = 15;
}

/// An event of the connection manager, as the program got it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// See [`cm_event`].
    pub kind: u64,
    /// 0, or a negative error number.
    pub status: i64,
    /// The id that the event belongs to.
    pub id: u64,
    /// The new id that a Request brings; otherwise the id of the event.
    pub about: u64,
    /// `responder_resources`: the peer's ORD.
    pub ird: u64,
    /// `initiator_depth`: the peer's IRD.
    pub ord: u64,
    /// Private data.
    pub private_data: Vec<u8>,
}

impl Event {
    /// Kind and status of the event.
    pub fn kind_and_status(&self) -> (u64, i64) {
        (self.kind, self.status)
    }
}

/// Bytes in the form of a command line.
fn digits(bytes: &[u8]) -> String {
    match bytes {
        [] => "-".to_owned(),
        bytes => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// The running target.
#[derive(Debug)]
pub struct CmTargetProcess {
    dialogue: CommandProcess,
}

impl CmTargetProcess {
    /// Starts the target.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        Self::start_by(variables, |program| program)
    }

    /// Starts the target in a place of its own.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start_by(
        variables: &[(&str, &str)],
        place: impl FnOnce(Program) -> Program,
    ) -> Result<Self, String> {
        let variables = [&[("URNIC_LOG", "off")], variables].concat();
        let mut dialogue = CommandProcess::start("cm_target_process", &variables, place)?;
        assert_eq!(dialogue.answer(), "ready");
        Ok(Self { dialogue })
    }

    /// Sends a command that succeeds or fails with an error number, 0 for success.
    #[track_caller]
    fn outcome(&mut self, line: &str) -> u64 {
        self.dialogue.query(line)("errno")
    }

    /// Listens on IPv4's loopback; returns the listener and its address.
    #[track_caller]
    pub fn listens(&mut self, backlog: u32) -> (u64, SocketAddr) {
        self.listens_at("127.0.0.1", backlog)
    }

    /// Listens at this address.
    #[track_caller]
    pub fn listens_at(&mut self, address: &str, backlog: u32) -> (u64, SocketAddr) {
        let field = self.dialogue.query(&format!("listen {address} {backlog:x}"));
        let ip: IpAddr = address.parse().expect("an address");
        (field("id"), SocketAddr::from((ip, field("port") as u16)))
    }

    /// Connects to this address; returns the id.
    #[track_caller]
    pub fn connects(&mut self, there: SocketAddr, (ird, ord): (u8, u8), private_data: &[u8]) -> u64 {
        let data = digits(private_data);
        let (ip, port) = (there.ip(), there.port());
        let field = self
            .dialogue
            .query(&format!("connect {ip} {port:x} {ird:x} {ord:x} {data}"));
        assert_eq!(field("errno"), 0);
        field("id")
    }

    /// Connects to a raw peer; returns the id, and the peer before it has read anything.
    #[track_caller]
    pub fn connects_to_peer(&mut self, depths: (u8, u8), private_data: &[u8]) -> (u64, Peer, TcpListener) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let there = listener.local_addr().expect("a bound socket");
        let id = self.connects(there, depths, private_data);
        let peer = Peer::accept(&listener);
        (id, peer, listener)
    }

    /// Waits for the next event.
    #[track_caller]
    pub fn event(&mut self) -> Event {
        let answer = self.dialogue.command("event");
        let fields = fields(&answer);
        let number = |name: &str| match fields.get(name).map(|text| u64::from_str_radix(text, 16)) {
            Some(Ok(number)) => number,
            _ => panic!("no {name} in {answer}"),
        };
        let private_data = match fields.get("data").map(String::as_str) {
            None | Some("-") => Vec::new(),
            Some(digits) => hex(digits),
        };
        Event {
            kind: number("event"),
            status: number("status").cast_signed(),
            id: number("id"),
            about: number("about"),
            ird: number("ird"),
            ord: number("ord"),
            private_data,
        }
    }

    /// Waits for the next event and checks that it is this one.
    #[track_caller]
    pub fn expects_event(&mut self, id: u64, kind: u64, status: i64) -> Event {
        let event = self.event();
        assert_eq!(
            (event.id, event.kind, event.status),
            (id, kind, status),
            "{event:?}"
        );
        event
    }

    /// Whether no event is pending.
    #[track_caller]
    pub fn is_quiet(&mut self) -> bool {
        self.dialogue.query("quiet")("quiet") == 1
    }

    /// Accepts with a new queue pair; returns an error number.
    #[track_caller]
    pub fn accepts(&mut self, id: u64, (ird, ord): (u8, u8), private_data: &[u8]) -> u64 {
        let data = digits(private_data);
        self.outcome(&format!("accept {id:x} {ird:x} {ord:x} {data}"))
    }

    /// Rejects a Request; returns an error number.
    #[track_caller]
    pub fn rejects(&mut self, id: u64, private_data: &[u8]) -> u64 {
        let data = digits(private_data);
        self.outcome(&format!("reject {id:x} {data}"))
    }

    /// Disconnects; returns an error number.
    #[track_caller]
    pub fn disconnects(&mut self, id: u64) -> u64 {
        self.outcome(&format!("disconnect {id:x}"))
    }

    /// Completes the start-up of an external connect; returns an error number.
    #[track_caller]
    pub fn establishes(&mut self, id: u64) -> u64 {
        self.outcome(&format!("establish {id:x}"))
    }

    /// Moves the queue pair of an id to the error state.
    #[track_caller]
    pub fn fails(&mut self, id: u64) {
        assert_eq!(self.dialogue.command(&format!("fail {id:x}")), "done");
    }

    /// Destroys an id and its queue pair.
    #[track_caller]
    pub fn destroys(&mut self, id: u64) {
        assert_eq!(self.dialogue.command(&format!("destroy {id:x}")), "done");
    }

    /// Queue pairs share a completion queue from here on.
    #[track_caller]
    pub fn shares_completion_queue(&mut self) {
        self.dialogue.command("shared");
    }

    /// From here on librdmacm does not manage the queue pairs.
    #[track_caller]
    pub fn manages_own_queue_pairs(&mut self) {
        self.dialogue.command("external");
    }

    /// Posts a request of this many bytes of the target's buffer and returns an error number.
    #[track_caller]
    pub fn posts(&mut self, id: u64, opcode: u64, wr_id: u64, len: u64, far: (u64, u32)) -> u64 {
        let (at, rkey) = far;
        self.outcome(&format!(
            "post {id:x} {opcode:x} {wr_id:x} {len:x} {at:x} {rkey:x}"
        ))
    }

    /// Posts a Send.
    #[track_caller]
    pub fn sends(&mut self, id: u64, wr_id: u64, len: u64) {
        assert_eq!(self.posts(id, super::opcode::SEND, wr_id, len, (0, 0)), 0);
    }

    /// The target's buffer: address and rkey.
    #[track_caller]
    pub fn buffer(&mut self) -> (u64, u32) {
        let field = self.dialogue.query("buffer");
        (field("address"), field("rkey") as u32)
    }

    /// Waits for the next completion on the queue of an id; returns the id of the completion's
    /// queue pair, and the completion.
    #[track_caller]
    pub fn completion(&mut self, id: u64) -> (u64, Wc) {
        let field = self.dialogue.query(&format!("wait {id:x}"));
        let wc = Wc {
            status: field("status"),
            len: field("len"),
            id: field("id"),
            opcode: 0,
            flags: 0,
            more: 0,
        };
        (field("of"), wc)
    }

    /// Waits for these completions, in this order: identifier and status.
    #[track_caller]
    pub fn completes(&mut self, id: u64, expected: &[(u64, u64)]) {
        for (number, expected) in expected.iter().enumerate() {
            let (_, wc) = self.completion(id);
            assert_eq!((wc.id, wc.status), *expected, "completion {number}: {wc:?}");
        }
    }

    /// Whether the completion queue of this id is empty.
    #[track_caller]
    pub fn has_no_completion(&mut self, id: u64) -> bool {
        self.dialogue.command(&format!("poll {id:x}")) == "none"
    }

    /// The state of the queue pair of this id.
    #[track_caller]
    pub fn state(&mut self, id: u64) -> u64 {
        self.dialogue.query(&format!("state {id:x}"))("state")
    }

    /// The process of the target.
    pub fn process(&self) -> &Running {
        &self.dialogue.program
    }

    /// Ends the target in good order; panics if that fails.
    #[track_caller]
    pub fn quits(mut self) {
        self.dialogue.program.write_stdin("quit\n");
        self.dialogue.program.wait().success();
    }
}
