//! A live program, `target_process.c`, whose queue pairs are connected to raw [`Peer`]s of the
//! test.

pub mod cm;
mod connections;
mod dialogue;
mod numbers;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::peer::{Peer, hex};
use crate::program::{Program, Running};
use crate::startup::{CRC, Introduction};

use dialogue::{CommandProcess, fields};
pub use numbers::{event, opcode, state, status};

/// Bytes of the buffer that peers may read and write, and of the pages around it that they may not.
pub const PAGE: usize = 4096;
/// Bytes of the large region, which is readable and writable too.
pub const LARGE: u32 = 16 << 20;
/// Receives that a [`Link`] begins with, of a page each.
pub const RECEIVES: u64 = 4;
/// Pages of the inbox.
const INBOX_PAGES: u64 = 1024;
/// First page that [`TargetProcess::receives`] uses; tests use the pages before it themselves.
const FIRST_PAGE: u64 = 64;
const OUR_PSN: u32 = 0x00_1234;
const NONCE: u64 = 0x0123_4567_89ab_cdef;

/// The side that opens the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The target accepts: it is MPA's responder.
    Responder,
    /// The target connects: it is MPA's initiator.
    Initiator,
}

/// Both.
pub const ROLES: [Role; 2] = [Role::Responder, Role::Initiator];

/// A queue pair of the target.
#[derive(Debug, Clone, Copy)]
pub struct Qp {
    /// The place of the queue pair in the order of creation.
    pub index: u64,
    /// The queue pair number.
    pub qpn: u32,
    /// The first PSN of the queue pair.
    pub psn: u32,
}

/// The parameters of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QpParams {
    /// Flags of the peer's start-up frame besides S.
    pub flags: u8,
    /// Inbound Reads at a time.
    pub ird: u8,
    /// Outbound Reads at a time.
    pub ord: u8,
    /// `rnr_retry` at both ends.
    pub rnr_retry: u8,
    /// Receives posted, of a page each.
    pub receives: u64,
    /// Remote rights (`enum ibv_access_flags`).
    pub access: u8,
}

impl Default for QpParams {
    fn default() -> Self {
        Self {
            flags: CRC,
            ird: 8,
            ord: 8,
            rnr_retry: 7,
            receives: RECEIVES,
            access: 7,
        }
    }
}

/// A queue pair and the raw peer that it is connected to.
#[derive(Debug)]
pub struct Link {
    /// The target's end.
    pub qp: Qp,
    /// The raw peer.
    pub peer: Peer,
}

/// A work completion, as the program got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// See [`status`].
    pub status: u64,
    /// `enum ibv_wc_opcode`; undefined unless the status is 0.
    pub opcode: u64,
    /// Length of the received message.
    pub len: u64,
    /// The identifier with which the request was posted; receives of a link are 0, 1, ….
    pub id: u64,
    /// `enum ibv_wc_flags`.
    pub flags: u64,
    /// The invalidated STag, or the immediate data.
    pub more: u64,
}

/// The running target.
#[derive(Debug)]
pub struct TargetProcess {
    dialogue: CommandProcess,
    here: HashMap<String, String>,
    gid: [u8; 16],
    /// The address that the target has for its peers; at first, its own address.
    peers: [u8; 16],
    links: u32,
    pages: u64,
}

impl TargetProcess {
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
        // The rules of the wire are shown without the device's own Reads.
        let variables = [&[("URNIC_COMPLETION", "taken")], variables].concat();
        let mut target = Self {
            dialogue: CommandProcess::start("target_process", &variables, place)?,
            here: HashMap::new(),
            gid: [0; 16],
            peers: [0; 16],
            links: 0,
            pages: 0,
        };
        target.here = fields(&target.dialogue.answer());
        let gid = hex(&target.here["gid"]);
        target.gid = gid.try_into().expect("a GID has 16 bytes");
        target.peers = target.gid;
        Ok(target)
    }

    /// Sends a command to the target and returns the answer.
    #[track_caller]
    pub fn command(&mut self, line: &str) -> String {
        self.dialogue.command(line)
    }

    #[track_caller]
    fn query(&mut self, line: &str) -> impl Fn(&str) -> u64 + use<> {
        self.dialogue.query(line)
    }

    /// The STag of one of the target's regions: `all`, `read`, `write`, `local`, `foreign`, `zero`,
    /// `in`, `big`.
    #[track_caller]
    pub fn stag(&self, name: &str) -> u32 {
        u32::from_str_radix(&self.here[name], 16).expect("a number")
    }

    /// An STag that does not exist.
    pub fn no_stag(&self) -> u32 {
        let taken = |stag: u32| self.here.values().any(|text| *text == format!("{stag:x}"));
        let mut stag = self.stag("all") ^ 0x5555_5500;
        while taken(stag) {
            stag ^= 0x0001_0100;
        }
        stag
    }

    /// The address of the target's buffer of a page.
    pub fn buffer(&self) -> u64 {
        self.address("buffer")
    }

    /// The address of `arena`, `buffer`, `inbox` or `large`.
    #[track_caller]
    pub fn address(&self, name: &str) -> u64 {
        u64::from_str_radix(&self.here[name], 16).expect("a number")
    }

    /// GID 0 of the target, as the program sees it.
    pub fn gid(&self) -> [u8; 16] {
        self.gid
    }

    fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.gid).to_canonical()
    }

    /// The peers of queue pairs that are connected from now on are on another host.
    pub fn expects_peers_at(&mut self, ip: Ipv4Addr) {
        self.peers = ip.to_ipv6_mapped().octets();
    }

    /// The address of the listener of a queue pair.
    pub fn listener(&self, qp: Qp) -> SocketAddr {
        let port = u16::try_from(qp.qpn >> 8).expect("24 bits");
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    /// A new queue pair, with receives posted.
    #[track_caller]
    pub fn qp(&mut self, params: &QpParams) -> Qp {
        let field = self.query(&format!("qp 40 {:x}", params.access));
        let qp = Qp {
            index: field("qp"),
            qpn: field("qpn") as u32,
            psn: field("psn") as u32,
        };
        for id in 0..params.receives {
            self.receives(qp, id);
        }
        qp
    }

    /// Posts another receive of a page.
    #[track_caller]
    pub fn receives(&mut self, qp: Qp, id: u64) {
        let page = FIRST_PAGE + self.pages % (INBOX_PAGES - FIRST_PAGE);
        self.pages += 1;
        self.receives_at(qp, id, page * PAGE as u64, PAGE as u64);
    }

    /// Posts a receive somewhere in the inbox.
    #[track_caller]
    pub fn receives_at(&mut self, qp: Qp, id: u64, offset: u64, len: u64) {
        self.command(&format!("recv {:x} {id:x} {offset:x} {len:x}", qp.index));
    }

    /// Brings a queue pair to RTS, with such a peer.
    #[track_caller]
    pub fn connects(&mut self, qp: Qp, qpn: u32, params: &QpParams) {
        let gid: String = self.peers.iter().map(|byte| format!("{byte:02x}")).collect();
        let QpParams {
            ird, ord, rnr_retry, ..
        } = params;
        self.command(&format!(
            "connect {:x} {gid} {qpn:x} {OUR_PSN:x} {ird:x} {ord:x} {rnr_retry:x}",
            qp.index
        ));
    }

    /// The introduction that the peer `qpn` sends to this queue pair.
    pub fn introduction(&self, qp: Qp, qpn: u32, params: &QpParams) -> Introduction {
        Introduction {
            from: qpn,
            to: qp.qpn,
            sq_psn: OUR_PSN,
            rq_psn: qp.psn,
            rnr_retry: params.rnr_retry,
            nonce: NONCE,
        }
    }

    /// Waits for the next completion.
    #[track_caller]
    pub fn completion(&mut self, qp: Qp) -> Wc {
        let field = self.query(&format!("wait {:x}", qp.index));
        Wc {
            status: field("status"),
            opcode: field("opcode"),
            len: field("len"),
            id: field("id"),
            flags: field("flags"),
            more: field("more"),
        }
    }

    /// Waits for a receive that succeeded: its identifier and its length.
    #[track_caller]
    pub fn received(&mut self, qp: Qp) -> (u64, u64) {
        let wc = self.completion(qp);
        assert_eq!(wc.status, status::SUCCESS, "{wc:?}");
        (wc.id, wc.len)
    }

    /// Waits for these completions, in this order: identifier and status.
    #[track_caller]
    pub fn completes(&mut self, qp: Qp, expected: &[(u64, u64)]) {
        for (number, expected) in expected.iter().enumerate() {
            let wc = self.completion(qp);
            assert_eq!((wc.id, wc.status), *expected, "completion {number}: {wc:?}");
        }
    }

    /// Whether the completion queue of this queue pair is empty.
    #[track_caller]
    pub fn has_no_completion(&mut self, qp: Qp) -> bool {
        self.command(&format!("poll {:x}", qp.index)) == "none"
    }

    /// Destroys a queue pair.
    #[track_caller]
    pub fn destroys(&mut self, qp: Qp) {
        self.command(&format!("destroy {:x}", qp.index));
    }

    /// The state of the queue pair.
    #[track_caller]
    pub fn state(&mut self, qp: Qp) -> u64 {
        self.query(&format!("state {:x}", qp.index))("state")
    }

    /// Waits for the next asynchronous event: kind, and index of the queue pair.
    #[track_caller]
    pub fn event(&mut self) -> (u64, u64) {
        let field = self.query("event");
        (field("kind"), field("qp"))
    }

    /// Whether no asynchronous event is pending.
    #[track_caller]
    pub fn is_quiet(&mut self) -> bool {
        self.query("quiet")("quiet") == 1
    }

    /// Posts a Send of this many bytes of the target's buffer.
    #[track_caller]
    pub fn sends(&mut self, qp: Qp, id: u64, len: u64) {
        let buffer = self.buffer();
        self.posts(qp, opcode::SEND, id, "all", buffer, len, (0, 0));
    }

    /// Posts a request; `far` is address and rkey. Panics if it is refused.
    #[track_caller]
    #[expect(clippy::too_many_arguments, reason = "a work request has that many parts")]
    pub fn posts(&mut self, qp: Qp, opcode: u64, id: u64, mr: &str, at: u64, len: u64, far: (u64, u32)) {
        let (far, rkey) = far;
        const SIGNALED: u64 = 2;
        let line = format!(
            "post {:x} {opcode:x} {id:x} {mr} {at:x} {len:x} {far:x} {rkey:x} {SIGNALED:x}",
            qp.index
        );
        assert_eq!(self.query(&line)("errno"), 0, "{line}");
    }

    /// Bytes of the target's region `arena`, `inbox` or `large`.
    #[track_caller]
    pub fn dump(&mut self, region: &str, offset: usize, len: usize) -> Vec<u8> {
        hex(&self.command(&format!("dump {region} {offset:x} {len:x}")))
    }

    /// The buffer and the pages around it.
    #[track_caller]
    pub fn arena(&mut self) -> Vec<u8> {
        self.dump("arena", 0, 3 * PAGE)
    }

    /// Deregisters one of the target's regions.
    #[track_caller]
    pub fn deregisters(&mut self, name: &str) {
        self.command(&format!("dereg {name}"));
    }

    /// Checks that the program's other traffic continues: a hundred exchanges between two queue
    /// pairs of the program, over TCP.
    #[track_caller]
    pub fn is_healthy(&mut self) {
        assert_eq!(self.command("healthy"), "healthy");
    }

    /// The process ID of the target.
    pub fn pid(&self) -> u32 {
        self.dialogue.program.pid()
    }

    /// All output of the target.
    pub fn output(&self) -> String {
        self.dialogue.program.output()
    }

    /// The program itself.
    pub fn program(&mut self) -> &mut Running {
        &mut self.dialogue.program
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

/// The initial content of the target's region with this seed: `fill()` of rc.h.
pub fn filled(seed: u64, len: usize) -> Vec<u8> {
    let byte = |at: u64| {
        let x = (at + seed * 0x1_0001).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x >> 56) ^ (x >> 24)) as u8
    };
    (0..len as u64).map(byte).collect()
}

/// Seed of the arena.
pub const ARENA_SEED: u64 = 3;
/// Seed of the large region.
pub const LARGE_SEED: u64 = 4;
