//! Where native connections meet the device: stream commands, stream events, and what becomes of queue pairs.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use urnic_device::command::{ModifyQp, Opcode, modify};
use urnic_device::event::{Event, EventKind};
use urnic_device::stream::attach;
use zerocopy::FromZeros;

use super::qp::Qp;
use super::streams::{Attaching, Buffers, Streams};
use super::{Driver, worker};
use urnic_cm::mpa_startup::Time;
use urnic_cm::native::{
    self, Attachment, Ends, Engine, Notice, PSN_MASK, Peer, PeerParams, Place, RtsParams, World,
};
use urnic_cm::qp_attr::{QpAttr, QpMask};
use urnic_config::Config;
use urnic_process::lock::lock;

/// Native connections of the process.
pub(super) struct Native {
    engine: Engine,
    buffers: Buffers,
}

impl Native {
    pub(super) fn new(config: &Config) -> Result<Native, Errno> {
        let mut seed = [0; 16];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        Ok(Native {
            engine: Engine::new(config, u128::from_ne_bytes(seed)),
            buffers: Buffers::new(),
        })
    }
}

impl Driver {
    /// Works on native connections, then does what that came to.
    fn native<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut native = lock(&self.native);
        let Native { engine, buffers } = &mut *native;
        let mut streams = Streams {
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

    pub(super) fn modify(&self, qp: &Qp, mask: u32, rnr_timeout_ms: u32) -> Result<(), Errno> {
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
        let params = PeerParams {
            qid: qp.qid,
            peer,
            rq_psn: attr.rq_psn & PSN_MASK,
            ird: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
        };
        self.native(|engine, world| engine.meet(world, qp.qpn, params));
        self.wake();
    }

    pub(super) fn native_ready(&self, qp: &Qp, attr: &QpAttr) {
        let rts = RtsParams {
            sq_psn: attr.sq_psn & PSN_MASK,
            ord: attr.max_rd_atomic,
            rnr_retry: attr.rnr_retry,
            // InfiniBand's Local ACK Timeout: 4.096 µs · 2^timeout.
            timeout: (attr.timeout != 0).then(|| Duration::from_nanos(4096 << attr.timeout)),
            retry_cnt: attr.retry_cnt,
        };
        self.native(|engine, world| engine.ready(world, qp.qpn, rts));
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
        let outcome = outcome(code);
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

/// The errno in an event of a stream.
pub(super) fn outcome(code: u16) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        code => Err(Errno::from_raw_os_error(code.into())),
    }
}

pub(super) fn milliseconds(timeout: Option<Duration>) -> u32 {
    timeout.map_or(u32::MAX, |t| u32::try_from(t.as_millis()).unwrap_or(u32::MAX - 1))
}

impl native::Streams for Streams<'_> {
    fn listen(&mut self, local: SocketAddr) -> Result<(u32, u16), Errno> {
        Streams::listen(self, local, 0, false)
    }

    fn connect(&mut self, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno> {
        Streams::connect(self, remote, local, 0)
    }

    fn ends(&mut self, sid: u32) -> Result<Ends, Errno> {
        let (local, remote) = Streams::ends(self, sid)?;
        Ok(Ends { local, remote })
    }

    fn is_own(&mut self, place: Place) -> bool {
        self.driver.home.is_own(place)
    }

    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno> {
        let qp = self.driver.qp(attachment.qid).ok_or(Errno::INVAL)?;
        self.driver
            .modify(&qp, modify::RNR, milliseconds(attachment.rnr_timeout))?;
        Streams::attach(
            self,
            &Attaching {
                sid,
                qid: attachment.qid,
                negotiated: attachment.negotiated.as_ref(),
                // IB manners: programs that connect by themselves were written for InfiniBand.
                manners: attach::STALL_ON_EMPTY_RQ | attach::PEER_MAY_CLOSE,
                ird: attachment.ird.into(),
                ord: attachment.ord.into(),
                fin_grace_ms: milliseconds(Some(self.driver.config.native.fin_grace)),
            },
        )
    }

    fn is_waiting(&mut self, qid: u32) -> bool {
        self.driver.qp(qid).is_some_and(|qp| qp.is_waiting())
    }
}
