//! Where native connections meet the device: stream commands, stream events, and what becomes of queue pairs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use urnic_verbs_api::device::command::{Handle, ModifyQp, Opcode, modify};
use urnic_verbs_api::device::event::{Event, EventKind};
use urnic_verbs_api::device::stream::{
    Attach, Close as CloseStream, Connect, Endpoint, Endpoints, Listen, Listening, attach, input, rtr,
};
use zerocopy::{FromZeros, transmute};

use super::dma::DmaMemory;
use super::qp::{Qp, QpAttr};
use super::transition::QpMask;
use super::{Driver, lock, worker};
use crate::config::Config;
use crate::mpa_startup::{Close, Rtr, Time};
use crate::native::{Attachment, Engine, Inbox, Meeting, Notice, PSN_MASK, Peer, Readiness, Streams, World};

/// Streams that the device keeps for us until we take them.
const BACKLOG: u32 = 1024;

/// Native connections of the process.
pub(super) struct Native {
    engine: Engine,
    /// Where receives go, by stream.
    buffers: HashMap<u32, DmaMemory>,
}

impl Native {
    pub(super) fn new(config: &Config) -> Result<Native, Errno> {
        let mut nonce = [0; 8];
        getrandom(&mut nonce, GetRandomFlags::empty())?;
        Ok(Native {
            engine: Engine::new(config, u64::from_ne_bytes(nonce)),
            buffers: HashMap::new(),
        })
    }
}

impl Driver {
    /// Works on native connections, then does what that came to.
    fn native<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut native = lock(&self.native);
        let Native { engine, buffers } = &mut *native;
        let mut streams = DeviceStreams {
            driver: self,
            buffers,
        };
        let result = work(
            engine,
            &mut World {
                now: worker::now(),
                streams: &mut streams,
            },
        );
        let notices = engine.notices();
        drop(native);
        for notice in notices {
            self.heed(notice);
        }
        result
    }

    fn heed(&self, notice: Notice) {
        let (Notice::Open(qid) | Notice::Unreachable(qid)) = notice;
        let Some(qp) = self.qp(qid) else { return };
        if notice == Notice::Unreachable(qid) {
            tracing::debug!("{qp:?}: its peer cannot be reached");
            // One that failed by itself meanwhile has flushed what was posted.
            let _ = self.modify(&qp, modify::UNREACHABLE, 0);
        }
        qp.open_gate();
    }

    fn modify(&self, qp: &Qp, mask: u32, rnr_timeout_ms: u32) -> Result<(), Errno> {
        let mut arguments = ModifyQp::new_zeroed();
        arguments.qp = qp.qid.into();
        arguments.mask = mask.into();
        arguments.rnr_timeout_ms = rnr_timeout_ms.into();
        self.commands.run(Opcode::ModifyQp, &arguments)
    }

    pub(super) fn native_number(&self) -> Result<u32, Errno> {
        self.native(|engine, world| engine.enter(world))
    }

    pub(super) fn native_forget(&self, qpn: u32) {
        self.native(|engine, world| engine.leave(world, qpn));
    }

    pub(super) fn native_retire(&self, qpn: u32, again: bool) {
        self.native(|engine, world| engine.retire(world, qpn, again));
    }

    pub(super) fn native_peer(&self, attr: &QpAttr, qpn: u32) -> Result<Peer, Errno> {
        self.home.peer(&attr.av, attr.dest_qpn, qpn)
    }

    pub(super) fn native_meet(&self, qp: &Qp, peer: Option<Peer>, attr: &QpAttr) {
        let Some(peer) = peer else { return };
        let meeting = Meeting {
            qid: qp.qid,
            peer,
            rq_psn: attr.rq_psn & PSN_MASK,
            ird: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
        };
        self.native(|engine, world| engine.meet(world, qp.qpn, meeting));
        self.wake();
    }

    pub(super) fn native_ready(&self, qp: &Qp, attr: &QpAttr) {
        let readiness = Readiness {
            sq_psn: attr.sq_psn & PSN_MASK,
            ord: attr.max_rd_atomic,
            rnr_retry: attr.rnr_retry,
            // InfiniBand's Local ACK Timeout: 4.096 µs · 2^timeout.
            timeout: (attr.timeout != 0).then(|| Duration::from_nanos(4096 << attr.timeout)),
            retry_cnt: attr.retry_cnt,
        };
        self.native(|engine, world| engine.ready(world, qp.qpn, readiness));
        self.wake();
    }

    pub(super) fn native_rnr(&self, qp: &Qp, attr: &QpAttr, mask: QpMask) {
        if mask.contains(QpMask::MIN_RNR_TIMER) {
            let timeout = self.native(|engine, _| engine.rnr_timeout(qp.qpn, attr.min_rnr_timer));
            if let Some(timeout) = timeout {
                let _ = self.modify(qp, modify::RNR, milliseconds(timeout));
            }
        }
    }

    pub(super) fn native_tick(&self) -> Option<Time> {
        self.native(|engine, world| engine.tick(world))
    }

    /// An event of a stream, a listener or a fence.
    pub(super) fn native_event(&self, kind: EventKind, event: &Event) {
        let (object, code, data) = (event.object.get(), event.code.get(), event.data.get());
        let outcome = if code == 0 {
            Ok(())
        } else {
            Err(Errno::from_raw_os_error(code.into()))
        };
        match kind {
            EventKind::FirstFpdu => self.native(|engine, _| engine.first_fpdu(object)),
            EventKind::StreamAccepted => {
                self.native(|engine, world| engine.arrived(world, object, data as u32))
            }
            EventKind::StreamConnected => {
                self.native(|engine, world| engine.connected(world, object, outcome))
            }
            EventKind::StreamReceived => {
                let Some(buffer) = lock(&self.native).buffers.remove(&object) else {
                    return;
                };
                let mut octets = vec![0; (data as usize).min(buffer.len())];
                buffer.copy_out(0, &mut octets);
                let octets = outcome.map(|()| octets);
                let octets = octets.as_deref().map_err(|errno| *errno);
                self.native(|engine, world| engine.received(world, object, octets));
            }
            EventKind::StreamClosed => self.native(|engine, world| engine.closed(world, object)),
            _ => {}
        }
    }
}

fn milliseconds(timeout: Option<Duration>) -> u32 {
    timeout.map_or(u32::MAX, |t| u32::try_from(t.as_millis()).unwrap_or(u32::MAX - 1))
}

/// The device's stream commands, while the engine's lock is held.
struct DeviceStreams<'a> {
    driver: &'a Driver,
    buffers: &'a mut HashMap<u32, DmaMemory>,
}

impl Streams for DeviceStreams<'_> {
    fn listen(&mut self, local: SocketAddr) -> Result<(u32, u16), Errno> {
        let arguments = Listen {
            local: Endpoint::from(local),
            backlog: BACKLOG.into(),
        };
        let listening: Listening = self.driver.commands.call(Opcode::StreamListen, &arguments)?;
        Ok((listening.lid.get(), listening.port.get() as u16))
    }

    fn connect(&mut self, remote: SocketAddr) -> Result<u32, Errno> {
        let arguments = Connect {
            remote: Endpoint::from(remote),
            local: Endpoint::new_zeroed(),
        };
        let handle: Handle = self.driver.commands.call(Opcode::StreamConnect, &arguments)?;
        Ok(handle.id.get())
    }

    fn send(&mut self, sid: u32, octets: &[u8]) -> Result<(), Errno> {
        self.driver
            .commands
            .send(Opcode::StreamSend, &Handle { id: sid.into() }, octets)
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        let buffer = self.driver.pool.allocate(len)?;
        self.driver
            .commands
            .output(Opcode::StreamReceive, &Handle { id: sid.into() }, &buffer, len)?;
        self.buffers.insert(sid, buffer);
        Ok(())
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        let len = size_of::<Endpoints>();
        let buffer = self.driver.pool.allocate(len)?;
        self.driver
            .commands
            .output(Opcode::StreamQuery, &Handle { id: sid.into() }, &buffer, len)?;
        let mut octets = [0; size_of::<Endpoints>()];
        buffer.copy_out(0, &mut octets);
        Ok(match transmute!(octets) {
            Endpoints { input, .. } if input.get() == input::NONE => Inbox::Empty,
            Endpoints { input, .. } if input.get() == input::BYTES => Inbox::Octets,
            Endpoints { .. } => Inbox::End,
        })
    }

    fn close(&mut self, sid: u32, how: Close) {
        let abort = u32::from(how == Close::Abort);
        let closed = self.driver.commands.run(
            Opcode::StreamClose,
            &CloseStream {
                sid: sid.into(),
                abort: abort.into(),
            },
        );
        if let Err(errno) = closed {
            tracing::debug!("stream {sid}: not closed: {errno}");
        }
        // A closed stream receives no more.
        self.buffers.remove(&sid);
    }

    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno> {
        let Some(qp) = self.driver.qp(attachment.qid) else {
            return Err(Errno::INVAL);
        };
        self.driver
            .modify(&qp, modify::RNR, milliseconds(attachment.rnr_timeout))?;
        let mut arguments = Attach::new_zeroed();
        // IB manners: programs that connect by themselves were written for InfiniBand.
        let mut flags = attach::STALL_ON_EMPTY_RQ | attach::PEER_MAY_CLOSE;
        if let Some(negotiated) = &attachment.negotiated {
            let mut set = |on, flag| flags |= if on { flag } else { 0 };
            set(negotiated.initiator, attach::INITIATOR);
            set(negotiated.crc, attach::CRC);
            set(negotiated.markers_tx, attach::MARKERS_TX);
            set(negotiated.markers_rx, attach::MARKERS_RX);
            let message = match negotiated.rtr {
                None => rtr::NONE,
                Some(Rtr::Send) => rtr::SEND,
                Some(Rtr::Write) => rtr::WRITE,
                Some(Rtr::Read) => rtr::READ,
            };
            let rtr = if negotiated.initiator {
                &mut arguments.rtr_send
            } else {
                &mut arguments.rtr_expect
            };
            *rtr = message.into();
            arguments.terminate = u64::from(negotiated.terminate.unwrap_or(0)).into();
        }
        arguments.sid = sid.unwrap_or(0).into();
        arguments.qid = attachment.qid.into();
        arguments.flags = flags.into();
        arguments.ord = u32::from(attachment.ord).into();
        arguments.ird = u32::from(attachment.ird).into();
        arguments.first_msn = 1.into();
        let fin_grace = self.driver.config.native.fin_grace;
        arguments.fin_grace_ms = milliseconds(Some(fin_grace)).into();
        let opcode = if sid.is_some() {
            Opcode::StreamAttach
        } else {
            Opcode::LoopbackAttach
        };
        self.driver.commands.run(opcode, &arguments)
    }

    fn is_waiting(&mut self, qid: u32) -> bool {
        self.driver.qp(qid).is_some_and(|qp| qp.is_waiting())
    }
}
