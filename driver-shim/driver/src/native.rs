//! Native connections at the device: stream commands, and changes of queue pairs.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{ModifyQp, Opcode, QpStatus, modify};
use urnic_device::vocabulary::{QpKind, QpState};
use zerocopy::FromZeros;

use crate::command::{ack_timeout_ms, milliseconds};
use crate::driver::{Driver, Qp};
use crate::events::now;
use crate::streams::Streams;
use urnic_cm::carrier::Attachment;
use urnic_cm::mpa_startup::Time;
use urnic_cm::native::{
    self, Endpoints, Engine, HostAddress, Notice, PSN_MASK, Peer, PeerParams, RtsParams, World,
};
use urnic_cm::qp_attr::{QpAttr, QpMask};
use urnic_cm::timeouts::retry_time;
use urnic_config::Llp;

impl Driver {
    /// Calls the engine of native connections, then applies its notices.
    pub(crate) fn with_native<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut native = self.connections().native();
        let (engine, buffers) = native.parts();
        let mut streams = Streams {
            driver: self,
            buffers,
        };
        let before = engine.deadline();
        let result = work(
            engine,
            &mut World {
                now: now(),
                streams: &mut streams,
            },
        );
        let notices = engine.notices();
        let after = engine.deadline();
        drop(native);
        self.event_loop().wake_if_earlier(before, after);
        for notice in notices {
            self.apply(notice);
        }
        result
    }

    /// The upper 16 bits of the numbers of the process's queue pairs.
    ///
    /// # Errors
    /// Those of listening.
    pub(super) fn native_port(&self) -> Result<u16, Errno> {
        let mut native = self.connections().native();
        let (engine, buffers) = native.parts();
        engine.own_port(&mut Streams {
            driver: self,
            buffers,
        })
    }

    fn apply(&self, notice: Notice) {
        let (Notice::Open(qid) | Notice::Unreachable(qid)) = notice;
        let Some(qp) = self.qp(qid) else { return };
        if notice == Notice::Unreachable(qid) {
            tracing::debug!("{qp:?}: its peer cannot be reached");
            // A queue pair that failed meanwhile has flushed its posted requests.
            let _ = self.modify_qp(qid, modify::UNREACHABLE, |_| {});
        }
        qp.gate().open();
    }

    /// Changes what `mask` names ([`modify`]) of a queue pair, to what `set` sets.
    pub(super) fn modify_qp(
        &self,
        qid: u32,
        mask: u32,
        set: impl FnOnce(&mut ModifyQp),
    ) -> Result<(), Errno> {
        let mut arguments = ModifyQp::new_zeroed();
        arguments.qp = qid.into();
        arguments.mask = mask.into();
        set(&mut arguments);
        self.commands().run(Opcode::ModifyQp, &arguments)
    }

    /// Sets how long a Send of the peer of a queue pair waits for a posted receive; `None` = no
    /// limit.
    pub(super) fn set_rnr_timeout(&self, qp: &Qp, timeout: Option<Duration>) -> Result<(), Errno> {
        let timeout = milliseconds(timeout);
        self.modify_qp(qp.qid, modify::RNR, |to| to.rnr_timeout_ms = timeout.into())
    }

    /// Sets how long the peer of a queue pair may be silent while a request waits for it; `None`
    /// leaves that to TCP.
    pub(super) fn limit_silence(&self, qp: &Qp, limit: Option<Duration>) -> Result<(), Errno> {
        let limit = ack_timeout_ms(limit);
        self.modify_qp(qp.qid, modify::ACK_TIMEOUT, |to| to.ack_timeout_ms = limit.into())
    }

    pub(super) fn native_remove(&self, qpn: u32) {
        self.with_native(|engine, world| engine.remove_queue_pair(world, qpn));
    }

    pub(super) fn native_retire(&self, qpn: u32, may_reconnect: bool) {
        self.with_native(|engine, world| engine.retire(world, qpn, may_reconnect));
    }

    pub(super) fn native_reached_rtr(&self, qp: &Qp, peer: Option<Peer>, attr: &QpAttr) {
        let Some(peer) = peer else { return };
        let params = PeerParams {
            qid: qp.qid,
            peer,
            rq_psn: attr.rq_psn & PSN_MASK,
            ird: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            unreliable: qp.kind == QpKind::UnreliableConnected,
        };
        qp.note_rtr();
        self.with_native(|engine, world| engine.reached_rtr(world, qp.qpn, params));
    }

    pub(super) fn native_reached_rts(&self, qp: &Qp, attr: &QpAttr) {
        let rts = RtsParams {
            sq_psn: attr.sq_psn & PSN_MASK,
            ord: attr.max_rd_atomic,
            rnr_retry: attr.rnr_retry,
            retry_time: retry_time(attr.timeout, attr.retry_cnt),
        };
        self.with_native(|engine, world| engine.reached_rts(world, qp.qpn, rts));
    }

    pub(super) fn native_rnr(&self, qp: &Qp, attr: &QpAttr, mask: QpMask) {
        if mask.contains(QpMask::MIN_RNR_TIMER) {
            let timeout = self.with_native(|engine, _| engine.rnr_timeout(qp.qpn, attr.min_rnr_timer));
            if let Some(timeout) = timeout {
                let _ = self.set_rnr_timeout(qp, timeout);
            }
        }
    }

    /// A queue pair lost its stream.
    pub(super) fn native_lost(&self, qid: u32) {
        let Some(qp) = self.qp(qid).filter(|qp| qp.kind == QpKind::UnreliableConnected) else {
            return;
        };
        let _changes = qp.lock_attributes();
        // The queue pair may have failed, or have another stream since.
        let parted = |status: QpStatus| {
            let state = QpState::from_raw(status.state.get());
            status.attached.get() == 0 && state != Some(QpState::Err)
        };
        if qp.status().is_ok_and(parted) {
            self.with_native(|engine, world| engine.lost(world, qid));
        }
    }
}

impl native::Streams for Streams<'_> {
    fn listen(&mut self, llp: Llp, local: SocketAddr) -> Result<(u32, u16), Errno> {
        Streams::listen(self, llp, local, 0, false)
    }

    fn unlisten(&mut self, lid: u32) {
        Streams::unlisten(self, lid);
    }

    fn connect(&mut self, llp: Llp, remote: SocketAddr, local: Option<SocketAddr>) -> Result<u32, Errno> {
        Streams::connect(self, llp, remote, local, 0)
    }

    fn ends(&mut self, sid: u32) -> Result<Endpoints, Errno> {
        let (local, remote) = Streams::ends(self, sid)?;
        Ok(Endpoints { local, remote })
    }

    fn is_own(&mut self, address: HostAddress) -> bool {
        self.driver.local_host().is_own(address)
    }

    fn attach(&mut self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno> {
        Streams::attach(self, sid, attachment)
    }

    fn waiting_since(&mut self, qid: u32) -> Option<Time> {
        self.driver.qp(qid)?.gate().waiting_since()
    }

    fn has_moved_on(&mut self, qid: u32) -> bool {
        self.driver.qp(qid).is_some_and(|qp| qp.has_moved_on())
    }
}
