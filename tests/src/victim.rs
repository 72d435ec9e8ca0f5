//! A live program, `victim.c`, whose queue pair is connected to a raw [`Peer`] of the test: what it says of itself, and the
//! introduction by which a native connection is made, spelled out byte by byte.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use crate::peer::{Peer, hex, sealed};
use crate::program::{Ended, Program, Running};
use crate::wait::{PATIENCE, free_port};

/// Our queue pair number: the lowest port there is, so that the victim, whose number is higher, waits to be called.
const OUR_QPN: u32 = 0x0000_0100;
/// Our first PSN.
const OUR_PSN: u32 = 0x00_1234;

/// Flags S and C, revision 2 (RFC 6581 §6).
const REQUEST: &str = "4d504120 49442052 65712046 72616d65 50 02 0024";
const REPLY: &str = "4d504120 49442052 65702046 72616d65 50 02 0024";
/// A, C, and no negotiation of read depths (RFC 6581 §9).
const WORD: &str = "bfffbfff";
/// The zero-length Write that opens the responder's fence: vector F-WRITE0-RTR.
const RTR: &str = "000ec140 00000001 00000000 00000000 ebd34c5f";

/// A work completion, as the program got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// `enum ibv_wc_status`; -1 when there was none to poll.
    pub status: i32,
    /// `enum ibv_wc_opcode`; undefined unless the status is 0.
    pub opcode: i32,
    /// Length of what was received.
    pub len: i32,
    /// Receives are 0, 1, …; sends 1000, 1001, ….
    pub wr_id: i32,
}

/// `enum ibv_wc_status`.
pub const SUCCESS: i32 = 0;
/// `IBV_WC_WR_FLUSH_ERR`.
pub const FLUSHED: i32 = 5;

/// The program, and the connection on which it takes orders.
#[derive(Debug)]
pub struct Victim {
    program: Running,
    orders: TcpStream,
    gid: Vec<u8>,
    qpn: u32,
    psn: u32,
    /// Where its buffer of 4096 bytes lies.
    pub address: u64,
    /// Stag of the buffer, for everything.
    pub stag: u32,
    /// Another one, for reading only.
    pub read_only: u32,
    /// One of another protection domain.
    pub elsewhere: u32,
}

impl Victim {
    /// Starts it with so many receives posted; connects nothing yet.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start(receives: u32, variables: &[(&str, &str)]) -> Result<Self, String> {
        let port = free_port();
        let options = format!("-p {port} -r {receives}");
        let mut program = Program::new(crate::compiled("victim")?).line(&options);
        for (name, value) in variables {
            program = program.env(name, value);
        }
        let mut program = program.spawn();
        program.listens(port);
        let mut orders = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens");
        orders.set_read_timeout(Some(PATIENCE)).expect("a TCP socket");

        let mut told = [0; 48];
        orders.read_exact(&mut told).expect("an introduction");
        let word = |at: usize| u32::from_ne_bytes([told[at], told[at + 1], told[at + 2], told[at + 3]]);
        let address = u64::from(word(16)) | u64::from(word(20)) << 32;
        let mut ours = told[..16].to_vec();
        ours.extend([0; 8]);
        ours.extend([OUR_QPN, OUR_PSN, 0, 0].map(u32::to_ne_bytes).concat());
        orders.write_all(&ours).expect("it listens");
        let mut ready = [0];
        orders.read_exact(&mut ready).expect("that it is at RTS");
        Ok(Self {
            program,
            orders,
            gid: told[..16].to_vec(),
            address,
            qpn: word(24),
            psn: word(28),
            stag: word(32),
            read_only: word(40),
            elsewhere: word(44),
        })
    }

    /// Where it listens.
    pub fn listener(&self) -> SocketAddr {
        let port = u16::try_from(self.qpn >> 8).expect("24 bits");
        SocketAddr::from((Ipv4Addr::LOCALHOST, port))
    }

    /// Its GID 0.
    pub fn gid(&self) -> &[u8] {
        &self.gid
    }

    /// The Request by which its peer calls: start-up frame, enhanced word, introduction.
    pub fn request(&self) -> Vec<u8> {
        self.request_from(OUR_QPN, self.qpn, OUR_PSN, self.psn)
    }

    /// The Request with these numbers in the introduction.
    pub fn request_from(&self, from: u32, to: u32, sq_psn: u32, rq_psn: u32) -> Vec<u8> {
        let mut bytes = [hex(REQUEST), hex(WORD), b"uRNC".to_vec()].concat();
        // Version 1; a call; sq_psn and rnr_retry are known; rnr_retry 7.
        bytes.extend([1, 0, 3, 7]);
        bytes.extend([from, to, sq_psn, rq_psn].map(u32::to_be_bytes).concat());
        bytes.extend(0x0123_4567_89ab_cdef_u64.to_be_bytes());
        bytes
    }

    /// Calls it as its peer, as far as its Reply; panics unless that accepts.
    #[track_caller]
    pub fn call(&self) -> Peer {
        let mut peer = Peer::call(self.listener());
        peer.send(&self.request());
        let reply = peer.take(20);
        // Reject is bit 0x20 of the flags (RFC 5044 §7.1.1).
        assert_eq!(reply[16] & 0x20, 0, "rejected: {reply:02x?}");
        let private_data = peer.take(usize::from(u16::from_be_bytes([reply[18], reply[19]])));
        assert_eq!(reply, hex(REPLY));
        assert_eq!(private_data[..4], hex(WORD));
        peer
    }

    /// Calls it and sends the RTR: a connection in full operation.
    #[track_caller]
    pub fn connect(&self) -> Peer {
        let mut peer = self.call();
        peer.send(&hex(RTR));
        peer
    }

    fn order(&mut self, letter: char, answer: &mut [u8]) {
        let told = self
            .orders
            .write_all(&[letter as u8])
            .and_then(|()| self.orders.read_exact(answer));
        told.unwrap_or_else(|error| panic!("order {letter}: {error}:\n{}", self.program.output()));
    }

    /// Other traffic of the program goes on: a hundred exchanges on another queue pair.
    pub fn is_healthy(&mut self) {
        self.order('h', &mut [0]);
    }

    /// Its buffer.
    pub fn memory(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        self.order('m', &mut bytes);
        bytes
    }

    /// Posts a Send of five bytes.
    pub fn sends(&mut self) {
        self.order('s', &mut []);
    }

    /// Deregisters the buffer.
    pub fn revokes(&mut self) {
        self.order('d', &mut [0]);
    }

    /// Waits for the next completion.
    pub fn completion(&mut self) -> Wc {
        self.completion_by('w')
    }

    /// Polls for a completion once.
    pub fn poll(&mut self) -> Wc {
        self.completion_by('p')
    }

    fn completion_by(&mut self, letter: char) -> Wc {
        let mut bytes = [0; 16];
        self.order(letter, &mut bytes);
        let word = |at: usize| i32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Wc {
            status: word(0),
            opcode: word(4),
            len: word(8),
            wr_id: word(12),
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Lets it leave in good order; panics if it cannot.
    #[track_caller]
    pub fn leaves(mut self) {
        self.order('q', &mut []);
        let ended: Ended = self.program.wait();
        ended.success();
    }
}

/// The FPDU of an untagged segment (RFC 5041 §4.3), the last of its message.
pub fn untagged(control: u8, opcode: u8, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![control, opcode, 0, 0, 0, 0];
    ulpdu.extend([qn, msn, mo].map(u32::to_be_bytes).concat());
    ulpdu.extend(payload);
    sealed(&ulpdu)
}

/// The FPDU of a tagged segment (RFC 5041 §4.2), the last of its message.
pub fn tagged(control: u8, opcode: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![control, opcode];
    ulpdu.extend(stag.to_be_bytes());
    ulpdu.extend(to.to_be_bytes());
    ulpdu.extend(payload);
    sealed(&ulpdu)
}

/// A Send on queue 0.
pub fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(0x41, 0x43, 0, msn, 0, payload)
}

/// An RDMA Write.
pub fn write(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0xc1, 0x40, stag, to, payload)
}

/// A Read Request on queue 1 (RFC 5040 §4.4).
pub fn read_request(msn: u32, source: u32, to: u64, len: u32) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(0x77_u32.to_be_bytes());
    header.extend(0x1000_u64.to_be_bytes());
    header.extend(len.to_be_bytes());
    header.extend(source.to_be_bytes());
    header.extend(to.to_be_bytes());
    untagged(0x41, 0x41, 1, msn, 0, &header)
}
