//! States, groups, and the destruction of a queue pair.

use super::staged::Staged;
use super::{Engine, Membership};
use crate::queues::Overflow;
use crate::rdmap::env::Env;
use crate::rdmap::{QpChange, WrongState};
use crate::stream::datagram::DatagramSocket;
use std::net::{IpAddr, SocketAddr};
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};

impl Engine {
    /// Returns to the reset state, on the same rings and ports: posted entries are dropped.
    pub(crate) fn reset(&mut self) {
        self.sq = self.sq.anew();
        self.rq = self.rq.anew();
        self.staged = Staged::default();
        self.state = QpState::Reset;
        (self.qkey, self.psn) = (0, 0);
        self.groups.clear();
    }

    /// Changes attributes, then the state.
    pub(crate) fn modify(&mut self, change: &QpChange, env: &mut Env<'_>) -> Result<(), WrongState> {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqe};
        if let Some(to) = change.state {
            let allowed = match (self.state, to) {
                (_, Err) | (Reset, Init) | (Init, Rtr) | (Rtr | Sqe, Rts) => true,
                (from, to) => from == to && matches!(to, Init | Rts),
            };
            if !allowed {
                return Result::Err(WrongState);
            }
        }
        if let Some(qkey) = change.qkey {
            self.qkey = qkey;
        }
        match change.state {
            Some(Err) => self.fail(QpFault::Requested, env),
            Some(state) => self.state = state,
            None => {}
        }
        Ok(())
    }

    /// Ends the queue pair: all work is flushed.
    pub(crate) fn fail(&mut self, fault: QpFault, env: &mut Env<'_>) {
        if self.state != QpState::Err {
            self.state = QpState::Err;
            if fault != QpFault::Requested {
                env.effects.qp_error(self.qp.qid, fault, 0);
            }
        }
        self.flush(env);
    }

    /// Flushes the requests that were posted in the error state.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err || env.is_stopped() {
            return;
        }
        // The effects name a queue that overflowed; nothing is left to end here.
        let (Ok(()) | Err(Overflow)) = self.flush_sends(env);
        let (Ok(()) | Err(Overflow)) = self.flush_receives(env);
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        // Entries of a shared queue do not belong to a queue pair yet.
        if let crate::queues::ReceiveSource::Own(_) = self.rq {
            while self.rq.take(&mut self.wqe, env.effects).is_some() {
                self.complete_receive(WcStatus::WrFlushErr, env)?;
            }
        }
        self.recv_cq.flush(env)
    }

    /// Completes the receive that was taken, in error.
    pub(super) fn complete_receive(&mut self, status: WcStatus, env: &mut Env<'_>) -> Result<(), Overflow> {
        let cqe = self.qp.cqe(self.wqe.cookie, WcOpcode::Recv, status);
        self.recv_cq.push(cqe, env)
    }

    /// Joins a group: receives its datagrams by a socket that is bound to the group's port.
    pub(crate) fn enter_group(
        &mut self,
        group: SocketAddr,
        interface: IpAddr,
        socket: Box<dyn DatagramSocket>,
    ) {
        self.groups.push(Membership {
            group,
            interface,
            socket,
        });
    }

    /// Whether the queue pair receives a group on the network of this address.
    pub(crate) fn is_in_group(&self, group: SocketAddr, interface: IpAddr) -> bool {
        let same = |known: &Membership| (known.group, known.interface) == (group, interface);
        self.groups.iter().any(same)
    }

    /// Leaves a group.
    pub(crate) fn leave_group(&mut self, group: SocketAddr, interface: IpAddr) {
        self.groups
            .retain(|known| (known.group, known.interface) != (group, interface));
    }

    /// Closes the ports of a destroyed queue pair.
    pub(crate) fn abandon(&mut self) {
        self.sockets.clear();
        self.groups.clear();
    }
}
