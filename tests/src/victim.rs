//! A live program, `victim.c`, whose queue pairs are connected to raw [`Peer`]s of the test.

pub mod cm;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::framing::Framing;
use crate::peer::{Peer, hex};
use crate::program::{Program, Running};
use crate::startup::{CRC, ENHANCED, Frame, Introduction, MARKERS, WORD};
use crate::ulpdu;

/// Bytes of the buffer that peers may read and write, and of the pages around it that they may not.
pub const PAGE: usize = 4096;
/// Bytes of the large region, which is readable and writable too.
pub const LARGE: u32 = 16 << 20;
/// Receives that a [`Link`] begins with, of a page each.
pub const RECEIVES: u64 = 4;
/// Pages of the inbox.
const INBOX_PAGES: u64 = 1024;
/// First page that [`Victim::receives`] uses; what is before is for tests that look for themselves.
const FIRST_PAGE: u64 = 64;
const OUR_PSN: u32 = 0x00_1234;
const NONCE: u64 = 0x0123_4567_89ab_cdef;

/// `enum ibv_wc_status`, as far as bad input leads to it.
pub mod status {
    /// `IBV_WC_SUCCESS`.
    pub const SUCCESS: u64 = 0;
    /// `IBV_WC_LOC_LEN_ERR`.
    pub const LOC_LEN_ERR: u64 = 1;
    /// `IBV_WC_LOC_QP_OP_ERR`.
    pub const LOC_QP_OP_ERR: u64 = 2;
    /// `IBV_WC_LOC_PROT_ERR`.
    pub const LOC_PROT_ERR: u64 = 4;
    /// `IBV_WC_WR_FLUSH_ERR`.
    pub const FLUSHED: u64 = 5;
    /// `IBV_WC_REM_INV_REQ_ERR`.
    pub const REM_INV_REQ_ERR: u64 = 9;
    /// `IBV_WC_REM_ACCESS_ERR`.
    pub const REM_ACCESS_ERR: u64 = 10;
    /// `IBV_WC_REM_OP_ERR`.
    pub const REM_OP_ERR: u64 = 11;
    /// `IBV_WC_RETRY_EXC_ERR`.
    pub const RETRY_EXC_ERR: u64 = 12;
    /// `IBV_WC_RNR_RETRY_EXC_ERR`.
    pub const RNR_RETRY_EXC_ERR: u64 = 13;
}

/// `enum ibv_wr_opcode`.
pub mod opcode {
    /// `IBV_WR_RDMA_WRITE`.
    pub const WRITE: u64 = 0;
    /// `IBV_WR_SEND`.
    pub const SEND: u64 = 2;
    /// `IBV_WR_RDMA_READ`.
    pub const READ: u64 = 4;
}

/// `enum ibv_qp_state`.
pub mod state {
    /// `IBV_QPS_RTS`.
    pub const RTS: u64 = 3;
    /// `IBV_QPS_ERR`.
    pub const ERR: u64 = 6;
}

/// `enum ibv_event_type`.
pub mod event {
    /// `IBV_EVENT_QP_FATAL`.
    pub const QP_FATAL: u64 = 1;
    /// `IBV_EVENT_QP_REQ_ERR`.
    pub const QP_REQ_ERR: u64 = 2;
    /// `IBV_EVENT_QP_ACCESS_ERR`.
    pub const QP_ACCESS_ERR: u64 = 3;
}

/// Who of the two opens the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The victim is called: it is MPA's responder.
    Called,
    /// The victim calls: it is MPA's initiator.
    Calls,
}

/// Both.
pub const ROLES: [Role; 2] = [Role::Called, Role::Calls];

/// A queue pair of the victim.
#[derive(Debug, Clone, Copy)]
pub struct Qp {
    /// Its place in the order of creation.
    pub index: u64,
    /// Its number.
    pub qpn: u32,
    /// Its first PSN.
    pub psn: u32,
}

/// What a queue pair shall be like.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// Flags of our start-up frame besides S.
    pub flags: u8,
    /// Inbound Reads at a time.
    pub ird: u8,
    /// Outbound ones.
    pub ord: u8,
    /// `rnr_retry` at both ends.
    pub rnr_retry: u8,
    /// Receives posted, of a page each.
    pub receives: u64,
    /// Remote rights (`enum ibv_access_flags`).
    pub access: u8,
}

impl Default for Wish {
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
    /// The victim's end.
    pub qp: Qp,
    /// Ours.
    pub peer: Peer,
}

/// A work completion, as the program got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// See [`status`].
    pub status: u64,
    /// `enum ibv_wc_opcode`; undefined unless the status is 0.
    pub opcode: u64,
    /// Length of what was received.
    pub len: u64,
    /// As it was posted; receives of a link are 0, 1, ….
    pub id: u64,
    /// `enum ibv_wc_flags`.
    pub flags: u64,
    /// What was invalidated, or the immediate.
    pub more: u64,
}

/// A program that does what lines say and answers each with one that begins with "= ".
#[derive(Debug)]
struct Obedient {
    program: Running,
    /// Answers taken so far, as bytes of its output.
    heard: usize,
}

impl Obedient {
    /// Starts the C program of that name.
    fn start(
        name: &str,
        variables: &[(&str, &str)],
        place: impl FnOnce(Program) -> Program,
    ) -> Result<Self, String> {
        let program = Program::new(crate::compiled(name)?);
        let program = variables
            .iter()
            .fold(program, |program, (name, value)| program.env(name, value));
        Ok(Self {
            program: place(program).spawn(),
            heard: 0,
        })
    }

    /// The next line that it answers.
    #[track_caller]
    fn answer(&mut self) -> String {
        let (line, heard) = self.program.says_from(self.heard, "an answer", |output| {
            let mut heard = 0;
            for line in output.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
                heard += line.len();
                if let Some(answer) = line.strip_prefix("= ") {
                    return Some((answer.trim_end().to_owned(), heard));
                }
            }
            None
        });
        self.heard += heard;
        line
    }

    /// Has it do something; its answer.
    #[track_caller]
    fn order(&mut self, line: &str) -> String {
        self.program.tell(&format!("{line}\n"));
        self.answer()
    }

    /// The same; the numbers of its answer by their names.
    #[track_caller]
    fn ask(&mut self, line: &str) -> impl Fn(&str) -> u64 + use<> {
        let answer = self.order(line);
        let fields = fields(&answer);
        move |name| match fields.get(name).map(|text| u64::from_str_radix(text, 16)) {
            Some(Ok(number)) => number,
            _ => panic!("no {name} in {answer}"),
        }
    }
}

/// The program.
#[derive(Debug)]
pub struct Victim {
    dialogue: Obedient,
    here: HashMap<String, String>,
    gid: [u8; 16],
    /// Where it is told that its peers are; at first, where it is itself.
    peers: [u8; 16],
    links: u32,
    pages: u64,
}

impl Victim {
    /// Starts it.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        Self::start_by(variables, |program| program)
    }

    /// Starts it in a place of its own.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start_by(
        variables: &[(&str, &str)],
        place: impl FnOnce(Program) -> Program,
    ) -> Result<Self, String> {
        let mut victim = Self {
            dialogue: Obedient::start("victim", variables, place)?,
            here: HashMap::new(),
            gid: [0; 16],
            peers: [0; 16],
            links: 0,
            pages: 0,
        };
        victim.here = fields(&victim.dialogue.answer());
        let gid = hex(&victim.here["gid"]);
        victim.gid = gid.try_into().expect("a GID has 16 octets");
        victim.peers = victim.gid;
        Ok(victim)
    }

    /// Has it do something; its answer.
    #[track_caller]
    pub fn order(&mut self, line: &str) -> String {
        self.dialogue.order(line)
    }

    #[track_caller]
    fn ask(&mut self, line: &str) -> impl Fn(&str) -> u64 + use<> {
        self.dialogue.ask(line)
    }

    /// The STag of one of its regions: `all`, `read`, `write`, `local`, `foreign`, `zero`, `in`,
    /// `big`.
    #[track_caller]
    pub fn stag(&self, name: &str) -> u32 {
        u32::from_str_radix(&self.here[name], 16).expect("a number")
    }

    /// A STag that nobody has.
    pub fn no_stag(&self) -> u32 {
        let taken = |stag: u32| self.here.values().any(|text| *text == format!("{stag:x}"));
        let mut stag = self.stag("all") ^ 0x5555_5500;
        while taken(stag) {
            stag ^= 0x0001_0100;
        }
        stag
    }

    /// Where its buffer of a page lies.
    pub fn buffer(&self) -> u64 {
        self.address("buffer")
    }

    /// Where one of `arena`, `buffer`, `inbox`, `large` lies.
    #[track_caller]
    pub fn address(&self, name: &str) -> u64 {
        u64::from_str_radix(&self.here[name], 16).expect("a number")
    }

    /// Its GID 0, as the program sees it.
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

    /// Where the listener of a queue pair is.
    pub fn listener(&self, qp: Qp) -> SocketAddr {
        let port = u16::try_from(qp.qpn >> 8).expect("24 bits");
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    /// A new queue pair, with receives posted.
    #[track_caller]
    pub fn qp(&mut self, wish: &Wish) -> Qp {
        let field = self.ask(&format!("qp 40 {:x}", wish.access));
        let qp = Qp {
            index: field("qp"),
            qpn: field("qpn") as u32,
            psn: field("psn") as u32,
        };
        for id in 0..wish.receives {
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
        self.order(&format!("recv {:x} {id:x} {offset:x} {len:x}", qp.index));
    }

    /// Brings a queue pair to RTS, with such a peer.
    #[track_caller]
    pub fn connects(&mut self, qp: Qp, qpn: u32, wish: &Wish) {
        let gid: String = self.peers.iter().map(|octet| format!("{octet:02x}")).collect();
        let Wish {
            ird, ord, rnr_retry, ..
        } = wish;
        self.order(&format!(
            "connect {:x} {gid} {qpn:x} {OUR_PSN:x} {ird:x} {ord:x} {rnr_retry:x}",
            qp.index
        ));
    }

    /// What the peer `qpn` says to this queue pair.
    pub fn introduction(&self, qp: Qp, qpn: u32, wish: &Wish) -> Introduction {
        Introduction {
            from: qpn,
            to: qp.qpn,
            sq_psn: OUR_PSN,
            rq_psn: qp.psn,
            rnr_retry: wish.rnr_retry,
            nonce: NONCE,
        }
    }

    /// A queue pair at RTS that waits to be called by us, and the Request for it.
    #[track_caller]
    pub fn expecting(&mut self, wish: &Wish) -> (Qp, Frame) {
        let qp = self.qp(wish);
        // The lowest port there is, so that the victim, whose number is higher, waits.
        self.links += 1;
        let ours = 0x100 + self.links % 0x100;
        self.connects(qp, ours, wish);
        let request = Frame {
            request: true,
            flags: wish.flags | ENHANCED,
            revision: 2,
            private_data: self.introduction(qp, ours, wish).with_word(WORD),
        };
        (qp, request)
    }

    /// A queue pair at RTS that calls us; its Request is read and is what it should be. `flags`:
    /// those of the victim's Request. Comes with the Reply to send.
    #[track_caller]
    pub fn calling(&mut self, wish: &Wish, flags: u8) -> (Link, Frame) {
        let qp = self.qp(wish);
        let (listener, port) = self.port_above(qp);
        self.links += 1;
        let ours = (u32::from(port) << 8) | (self.links % 0x100);
        self.connects(qp, ours, wish);
        let mut peer = Peer::answer(&listener);
        let request = Frame::read(&mut peer);
        let nonce = request.private_data.last_chunk().map(|n| u64::from_be_bytes(*n));
        let reply = self.introduction(qp, ours, wish);
        let expected = Introduction {
            from: qp.qpn,
            to: ours,
            sq_psn: qp.psn,
            rq_psn: OUR_PSN,
            rnr_retry: wish.rnr_retry,
            nonce: nonce.unwrap_or_default(),
        };
        // Where commands take their time, it may have called before the one that leads to RTS.
        let early = request.private_data == expected.before_rts(WORD);
        let private_data = match early {
            true => expected.before_rts(WORD),
            false => expected.with_word(WORD),
        };
        assert_eq!(
            request,
            Frame {
                request: true,
                flags: flags | ENHANCED,
                revision: 2,
                private_data
            }
        );
        let reply = Frame {
            request: false,
            flags: wish.flags | ENHANCED,
            revision: 2,
            private_data: Introduction {
                nonce: expected.nonce,
                ..reply
            }
            .with_word(WORD),
        };
        (Link { qp, peer }, reply)
    }

    /// A listener at a port above that of the queue pair's number, so that the victim, whose number
    /// is lower, calls.
    fn port_above(&self, qp: Qp) -> (TcpListener, u16) {
        // Above the range from which the kernel picks ports, where the victim's is.
        const FIRST: u32 = 61_000;
        const COUNT: u32 = 4_500;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // Test processes that run side by side start at different places.
        let start = std::process::id().wrapping_mul(97);
        for _ in 0..COUNT {
            let step = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(start);
            let port = (FIRST + step % COUNT) as u16;
            if u32::from(port) > qp.qpn >> 8
                && let Ok(listener) = TcpListener::bind((self.ip(), port))
            {
                return (listener, port);
            }
        }
        panic!("no free port above {}", qp.qpn >> 8);
    }

    /// A connection in full operation, made in this role, as most want it.
    #[track_caller]
    pub fn link(&mut self, role: Role) -> Link {
        self.link_as(role, &Wish::default(), CRC)
    }

    /// A connection in full operation. `flags`: those of the victim's frame.
    #[track_caller]
    pub fn link_as(&mut self, role: Role, wish: &Wish, flags: u8) -> Link {
        let mut link = match role {
            Role::Called => {
                let (qp, request) = self.expecting(wish);
                let mut peer = Peer::call(self.listener(qp));
                peer.send(&request.octets());
                let reply = Frame::read(&mut peer);
                let theirs = Introduction {
                    from: qp.qpn,
                    to: u32::from_be_bytes(request.private_data[12..16].try_into().expect("four octets")),
                    sq_psn: qp.psn,
                    rq_psn: OUR_PSN,
                    rnr_retry: wish.rnr_retry,
                    nonce: NONCE,
                };
                let expected = Frame {
                    request: false,
                    flags: flags | ENHANCED | wish.flags & CRC,
                    revision: 2,
                    private_data: theirs.with_word(WORD),
                };
                assert_eq!(reply, expected);
                Link { qp, peer }
            }
            Role::Calls => {
                let (mut link, reply) = self.calling(wish, flags);
                link.peer.send(&reply.octets());
                link
            }
        };
        let crc = (flags | wish.flags) & CRC != 0;
        link.peer.outbound = Framing::new(crc, flags & MARKERS != 0);
        link.peer.inbound = Framing::new(crc, wish.flags & MARKERS != 0);
        let rtr = ulpdu::write(1, 0, b"");
        match role {
            Role::Called => link.peer.tell(&[rtr]),
            Role::Calls => assert_eq!(link.peer.ulpdu(), rtr),
        }
        link
    }

    /// Waits for the next completion.
    #[track_caller]
    pub fn completion(&mut self, qp: Qp) -> Wc {
        let field = self.ask(&format!("wait {:x}", qp.index));
        Wc {
            status: field("status"),
            opcode: field("opcode"),
            len: field("len"),
            id: field("id"),
            flags: field("flags"),
            more: field("more"),
        }
    }

    /// Waits for a receive that went well: its identifier and its length.
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

    /// Whether its completion queue is empty.
    #[track_caller]
    pub fn has_none(&mut self, qp: Qp) -> bool {
        self.order(&format!("poll {:x}", qp.index)) == "none"
    }

    /// Destroys a queue pair.
    #[track_caller]
    pub fn destroys(&mut self, qp: Qp) {
        self.order(&format!("destroy {:x}", qp.index));
    }

    /// Its state.
    #[track_caller]
    pub fn state(&mut self, qp: Qp) -> u64 {
        self.ask(&format!("state {:x}", qp.index))("state")
    }

    /// Waits for the next asynchronous event: kind, and index of the queue pair.
    #[track_caller]
    pub fn event(&mut self) -> (u64, u64) {
        let field = self.ask("event");
        (field("kind"), field("qp"))
    }

    /// Whether no asynchronous event waits.
    #[track_caller]
    pub fn is_quiet(&mut self) -> bool {
        self.ask("quiet")("quiet") == 1
    }

    /// Posts a Send of so many bytes of its buffer.
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
        assert_eq!(self.ask(&line)("errno"), 0, "{line}");
    }

    /// Bytes of one of its regions `arena`, `inbox`, `large`.
    #[track_caller]
    pub fn dump(&mut self, region: &str, offset: usize, len: usize) -> Vec<u8> {
        hex(&self.order(&format!("dump {region} {offset:x} {len:x}")))
    }

    /// The buffer and the pages around it.
    #[track_caller]
    pub fn arena(&mut self) -> Vec<u8> {
        self.dump("arena", 0, 3 * PAGE)
    }

    /// Deregisters one of its regions.
    #[track_caller]
    pub fn deregisters(&mut self, name: &str) {
        self.order(&format!("dereg {name}"));
    }

    /// Other traffic of the program goes on: a hundred exchanges between two queue pairs of its
    /// own, over TCP.
    #[track_caller]
    pub fn is_healthy(&mut self) {
        assert_eq!(self.order("healthy"), "healthy");
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.dialogue.program.pid()
    }

    /// All that it has said.
    pub fn output(&self) -> String {
        self.dialogue.program.output()
    }

    /// The program itself.
    pub fn program(&mut self) -> &mut Running {
        &mut self.dialogue.program
    }

    /// Its process.
    pub fn process(&self) -> &Running {
        &self.dialogue.program
    }

    /// Lets it leave in good order; panics if it cannot.
    #[track_caller]
    pub fn leaves(mut self) {
        self.dialogue.program.tell("quit\n");
        self.dialogue.program.wait().success();
    }
}

/// `a=1 b=2`.
fn fields(answer: &str) -> HashMap<String, String> {
    answer
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// What the victim's region with this seed holds at first: `fill()` of rc.h.
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
