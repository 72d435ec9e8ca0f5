//! Connections between queue pairs of the target and raw peers.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{Link, NONCE, OUR_PSN, Qp, QpParams, Role, TargetProcess};
use crate::framing::Framing;
use crate::peer::Peer;
use crate::startup::{CRC, ENHANCED, Frame, Introduction, MARKERS, WORD};
use crate::ulpdu;

impl TargetProcess {
    /// A queue pair at RTS that waits for a connect from the test, and the Request for it.
    #[track_caller]
    pub fn awaits_request(&mut self, params: &QpParams) -> (Qp, Frame) {
        let qp = self.qp(params);
        // The lowest port, so that the target, which has the higher number, waits.
        self.links += 1;
        let ours = 0x100 + self.links % 0x100;
        self.connects(qp, ours, params);
        let request = Frame {
            request: true,
            flags: params.flags | ENHANCED,
            revision: 2,
            private_data: self.introduction(qp, ours, params).with_word(WORD),
        };
        (qp, request)
    }

    /// A queue pair at RTS that connects to the test. The Request is read and checked. `flags`:
    /// those of the target's Request. Returns the Reply to send, too.
    #[track_caller]
    pub fn sends_request(&mut self, params: &QpParams, flags: u8) -> (Link, Frame) {
        let qp = self.qp(params);
        let (listener, port) = self.port_above(qp);
        self.links += 1;
        let ours = (u32::from(port) << 8) | (self.links % 0x100);
        self.connects(qp, ours, params);
        let mut peer = Peer::accept(&listener);
        let request = Frame::read(&mut peer);
        let nonce = request.private_data.last_chunk().map(|n| u64::from_be_bytes(*n));
        let reply = self.introduction(qp, ours, params);
        let expected = Introduction {
            from: qp.qpn,
            to: ours,
            sq_psn: qp.psn,
            rq_psn: OUR_PSN,
            rnr_retry: params.rnr_retry,
            nonce: nonce.unwrap_or_default(),
        };
        // Where commands are slow, the target may connect before the command that leads to RTS.
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
            flags: params.flags | ENHANCED,
            revision: 2,
            private_data: Introduction {
                nonce: expected.nonce,
                ..reply
            }
            .with_word(WORD),
        };
        (Link { qp, peer }, reply)
    }

    /// A listener at a port above that of the queue pair's number, so that the target, which has
    /// the lower number, connects.
    fn port_above(&self, qp: Qp) -> (TcpListener, u16) {
        // Above the range from which the kernel picks ports, where the target's is.
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

    /// A connection in full operation, made in this role, with the usual parameters.
    #[track_caller]
    pub fn link(&mut self, role: Role) -> Link {
        self.link_as(role, &QpParams::default(), CRC)
    }

    /// A connection in full operation. `flags`: those of the target's frame.
    #[track_caller]
    pub fn link_as(&mut self, role: Role, params: &QpParams, flags: u8) -> Link {
        let mut link = match role {
            Role::Responder => {
                let (qp, request) = self.awaits_request(params);
                let mut peer = Peer::connect(self.listener(qp));
                peer.send(&request.to_bytes());
                let reply = Frame::read(&mut peer);
                let theirs = Introduction {
                    from: qp.qpn,
                    to: u32::from_be_bytes(request.private_data[12..16].try_into().expect("four bytes")),
                    sq_psn: qp.psn,
                    rq_psn: OUR_PSN,
                    rnr_retry: params.rnr_retry,
                    nonce: NONCE,
                };
                let expected = Frame {
                    request: false,
                    flags: flags | ENHANCED | params.flags & CRC,
                    revision: 2,
                    private_data: theirs.with_word(WORD),
                };
                assert_eq!(reply, expected);
                Link { qp, peer }
            }
            Role::Initiator => {
                let (mut link, reply) = self.sends_request(params, flags);
                link.peer.send(&reply.to_bytes());
                link
            }
        };
        let crc = (flags | params.flags) & CRC != 0;
        link.peer.outbound = Framing::new(crc, flags & MARKERS != 0);
        link.peer.inbound = Framing::new(crc, params.flags & MARKERS != 0);
        let rtr = ulpdu::write(1, 0, b"");
        match role {
            Role::Responder => link.peer.send_ulpdus(&[rtr]),
            Role::Initiator => assert_eq!(link.peer.ulpdu(), rtr),
        }
        link
    }
}
