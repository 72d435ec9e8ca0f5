//! State changes, queries and destruction of a queue pair.

use rustix::io::Errno;
use urnic_device::command::{Handle, ModifyQp, Opcode, QpStatus, modify};
use urnic_device::vocabulary::{QpKind, QpState};

use crate::driver::Qp;
use crate::streams::ack_timeout_ms;
use crate::transition::{self, Rules};
use urnic_cm::native::Peer;
use urnic_cm::qp_attr::{MANAGER_QPN, QpAttr, QpMask};
use urnic_cm::timeouts::{RETRIES, retry_time};
use urnic_process::lock::lock;

impl Qp {
    /// Changes state or attributes, as `ibv_modify_qp(3)` does. The change to RTR names the peer
    /// and does not wait for it: the connection is made in the background.
    ///
    /// # Errors
    /// `EINVAL` for a transition that does not exist, attributes missing, superfluous or out of
    /// range, or an address without a route; `EIO` in a forked child; the errors of the device.
    pub fn modify(&self, attr: &QpAttr, mask: QpMask) -> Result<(), Errno> {
        self.driver().check_usable()?;
        if mask.is_empty() {
            return Ok(());
        }
        let mut set = lock(&self.attr);
        let roce = self.driver().identity().is_roce();
        let from = match self.device_state()? {
            QpState::Rts if self.is_draining() => QpState::Sqd,
            state => state,
        };
        // rdma_disconnect(3) of an RNIC makes this change first, also if the peer disconnected
        // earlier.
        let disconnects = !roce && mask == QpMask::STATE && attr.state == QpState::Sqd as u32;
        if disconnects && from != QpState::Rts && self.is_managed() {
            return Ok(());
        }
        let limits = self.driver().attributes();
        let rules = Rules {
            identity: self.driver().identity(),
            kind: self.kind,
            ird: limits.max_ird,
            ord: limits.max_ord,
        };
        let mask = self.own_attributes(from, attr, mask);
        let to = transition::check(&rules, from, attr, mask)?;
        let mut new = *set;
        new.take(attr, mask);
        let peer = match (from, to) {
            _ if self.kind == QpKind::UnreliableDatagram => None,
            (QpState::Init, QpState::Rtr) if roce && new.dest_qpn == MANAGER_QPN => {
                self.set_awaits_stream(true);
                None
            }
            (QpState::Init, QpState::Rtr) if mask.contains(QpMask::AV) => {
                Some(self.driver().native_peer(&new, self.qpn)?)
            }
            _ => None,
        };
        if roce && (from, to) == (QpState::Rts, QpState::Sqd) {
            // Requests that are published are sent; later ones wait behind the gate.
            self.drain();
            *set = new;
            return Ok(());
        }
        if matches!(to, QpState::Reset | QpState::Err) || (to == QpState::Sqd && !roce) {
            self.driver().native_retire(self.qpn, to == QpState::Reset);
        }
        // This call precedes the change in the device. A connection that is attached at the same
        // time, before or after this call, gets this number of Reads. If the call followed the
        // change, a connection attached without Reads would reset the number to zero.
        if (from, to) == (QpState::Rtr, QpState::Rts) && self.connects_natively() {
            self.driver().native_reached_rts(self, &new);
        }
        match self.change(to, &new, mask) {
            // The peer disconnected meanwhile.
            Err(_) if disconnects && self.is_managed() => return Ok(()),
            changed => changed?,
        }
        *set = if to == QpState::Reset {
            QpAttr::default()
        } else {
            new
        };
        tracing::debug!("{self:?}: {from:?} to {to:?}");
        if to == QpState::Sqd && roce {
            return Ok(());
        }
        self.set_last_state(to);
        self.end_draining();
        self.reached(from, to, peer, &new, mask);
        Ok(())
    }

    /// The attributes to use of those that the program names: if it has them from the connection
    /// manager of a RoCE NIC, those of the queue pair's kind.
    fn own_attributes(&self, from: QpState, attr: &QpAttr, mask: QpMask) -> QpMask {
        let by_manager = match from {
            QpState::Init => mask.contains(QpMask::DEST_QPN) && attr.dest_qpn == MANAGER_QPN,
            _ => self.awaits_stream(),
        };
        match by_manager && self.driver().identity().is_roce() {
            true => transition::of_manager(self.kind, mask),
            false => mask,
        }
    }

    /// Applies a change of state that the device made to the connection and to the gate.
    fn reached(&self, from: QpState, to: QpState, peer: Option<Peer>, new: &QpAttr, mask: QpMask) {
        match to {
            QpState::Reset => {
                self.set_awaits_stream(false);
                self.driver().cm_lost(self.qid, Errno::CONNRESET);
                self.clear_managed();
                self.close_gate();
                if self.kind == QpKind::UnreliableDatagram {
                    self.open_gate();
                }
            }
            // When the gate opens, the device flushes the requests that were posted behind it.
            QpState::Err | QpState::Sqd => self.open_gate(),
            QpState::Rtr => self.driver().native_reached_rtr(self, peer, new),
            QpState::Rts if from == QpState::Rts => self.driver().native_rnr(self, new, mask),
            QpState::Init | QpState::Rts | QpState::Sqe => {}
        }
    }

    /// The queue pair's attributes as they were set, with the state that the device reports.
    ///
    /// # Errors
    /// `EIO` in a forked child or on a lost device.
    pub fn query(&self) -> Result<QpAttr, Errno> {
        self.driver().check_usable()?;
        let set = lock(&self.attr);
        let status = self.status()?;
        let state = match QpState::from_raw(status.state.get()).ok_or(Errno::IO)? {
            // An RNIC's idle state covers both: receives may be posted right after creation
            // (conformance §8, table of states).
            QpState::Reset if !self.driver().identity().is_roce() => QpState::Init,
            QpState::Rts if self.is_draining() => QpState::Sqd,
            state => state,
        } as u32;
        let mut attr = QpAttr {
            state,
            cur_state: state,
            ..*set
        };
        if self.is_managed() {
            // Only the connection manager sets these.
            let depth = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
            attr.max_rd_atomic = depth(status.ord.get());
            attr.max_dest_rd_atomic = depth(status.ird.get());
            if !self.driver().identity().is_roce() {
                (attr.timeout, attr.retry_cnt) = (self.ack_timeout(), RETRIES);
            }
        }
        Ok(attr)
    }

    /// Destroys the queue pair: the connection, then the device's object. Data that its completed
    /// sends put on the stream still arrives. Afterwards no thread calls the queue pair's
    /// [`Poster`](super::Poster) or reports its events.
    ///
    /// # Errors
    /// `EIO` in a forked child; the errors of the device.
    pub fn destroy(&self) -> Result<(), Errno> {
        self.driver().check_process()?;
        let _changes = lock(&self.attr);
        self.driver().native_retire(self.qpn, false);
        self.driver().commands.destroy(Opcode::DestroyQp, self.qid)?;
        if self.kind != QpKind::UnreliableDatagram {
            self.driver().native_remove(self.qpn);
        }
        self.driver().remove_qp(self);
        self.driver().cm_lost(self.qid, Errno::CONNRESET);
        self.remove_poster();
        tracing::debug!("{self:?}: destroyed");
        Ok(())
    }

    /// The queue pair's state in the device.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn status(&self) -> Result<QpStatus, Errno> {
        self.driver()
            .commands
            .call(Opcode::QueryQp, &Handle { id: self.qid.into() })
    }

    pub(crate) fn device_state(&self) -> Result<QpState, Errno> {
        QpState::from_raw(self.status()?.state.get()).ok_or(Errno::IO)
    }

    /// Whether the queue pair connects to the peer that its program named.
    fn connects_natively(&self) -> bool {
        self.kind != QpKind::UnreliableDatagram && !self.awaits_stream()
    }

    fn change(&self, to: QpState, new: &QpAttr, mask: QpMask) -> Result<(), Errno> {
        // The device closes a stream in SQD.
        let mask = match to {
            QpState::Sqd if self.driver().identity().is_roce() => mask - QpMask::STATE,
            _ => mask,
        };
        let flags = [
            (QpMask::STATE, modify::STATE),
            (QpMask::ACCESS_FLAGS, modify::ACCESS),
            (QpMask::MAX_DEST_RD_ATOMIC, modify::IRD),
            (QpMask::MAX_QP_RD_ATOMIC, modify::ORD),
            (QpMask::QKEY, modify::QKEY),
            (QpMask::TIMEOUT, modify::ACK_TIMEOUT),
            (QpMask::RETRY_CNT, modify::ACK_TIMEOUT),
        ];
        let bits = flags
            .iter()
            .filter(|(bit, _)| mask.contains(*bit))
            .fold(0, |bits, (_, flag)| bits | flag);
        if bits == 0 {
            return Ok(());
        }
        let arguments = ModifyQp {
            qp: self.qid.into(),
            mask: bits.into(),
            state: (to as u32).into(),
            access: (new.access & !transition::FLUSH).into(),
            ird: u32::from(new.max_dest_rd_atomic).into(),
            ord: u32::from(new.max_rd_atomic).into(),
            rnr_timeout_ms: 0.into(),
            qkey: new.qkey.into(),
            ack_timeout_ms: ack_timeout_ms(retry_time(new.timeout, new.retry_cnt)).into(),
            reserved: 0.into(),
        };
        self.driver().commands.run(Opcode::ModifyQp, &arguments)
    }
}
