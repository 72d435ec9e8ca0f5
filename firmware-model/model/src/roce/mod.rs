//! Queue pairs of kind RC and UC that speak RoCE v2 on the wire (InfiniBand Architecture
//! Specification vol. 1, §9.7, §9.8.2, and annex A17), as adapters and Linux's rdma_rxe do.
//!
//! The protocol is in the crate [`urnic_roce`], which touches no byte of a message. An [`Engine`]
//! connects it to the queue pair: [`requests`] takes work requests from the send queue,
//! [`arrivals`] fills receives and accesses memory for the peer, and [`packets`] makes packets and
//! takes them apart. [`machines`] has what differs between the kinds. As with
//! [`rdmap`](crate::rdmap), its owner serialises the calls.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod arrivals;
mod machines;
mod packets;
mod path;
mod requests;

pub(crate) use path::Path;

use crate::queues::{Overflow, ReceiveSource, SendQueue};
use crate::stream::Ends;
use crate::stream::roce_port::RocePort;
use crate::time::Nanos;
use crate::transport::{Env, QpChange, QpQueues, RxOutcome, TxOutcome, WrongState};
use arrivals::Arrivals;
use packets::Packets;
use requests::Requests;
use rustix::fd::BorrowedFd;
use urnic_device::command::QpStatus;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::stream::attached;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_roce::message::Mtu;
use urnic_roce::{requester, responder};

/// One queue pair of kind RC or UC.
#[derive(Debug)]
pub(crate) struct Engine {
    state: QpState,
    /// Kind UC.
    is_unreliable: bool,
    requests: Requests,
    arrivals: Arrivals,
    packets: Packets,
}

impl Engine {
    /// An engine in the state INIT, which sends and receives by `port`.
    pub(crate) fn new((queues, access): (QpQueues, Access), port: RocePort, is_unreliable: bool) -> Engine {
        Engine {
            state: QpState::Init,
            is_unreliable,
            requests: Requests::new(queues.sq, queues.send_cq),
            arrivals: Arrivals::new((queues.rq, queues.recv_cq), access),
            packets: Packets::new(port),
        }
    }

    /// The state of the queue pair.
    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    /// The answer to `QueryQp`.
    pub(crate) fn status(&self) -> QpStatus {
        let attached = match self.ends() {
            Some(_) => attached::ROCE,
            None => attached::NONE,
        };
        QpStatus {
            state: (self.state as u32).into(),
            attached: attached.into(),
            ..QpStatus::default()
        }
    }

    /// The place from which packets leave, and the one to which they go.
    pub(crate) fn ends(&self) -> Option<Ends> {
        self.packets.ends()
    }

    /// The send queue, for the state of its doorbells.
    pub(crate) fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.requests.sq
    }

    /// The receive queue, for doorbells.
    pub(crate) fn receive_source(&mut self) -> &mut ReceiveSource {
        &mut self.arrivals.receives.rq
    }

    /// The descriptors to poll for readiness.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.packets.descriptors()
    }

    /// The peer's requests are taken from the state RTR on, from this path only.
    pub(crate) fn connect(
        &mut self,
        path: Path,
        attributes: responder::Attributes,
    ) -> Result<(), WrongState> {
        match self.state {
            QpState::Init => {
                self.packets.connect(path);
                self.arrivals.begin(attributes, self.is_unreliable);
                Ok(())
            }
            _ => Err(WrongState),
        }
    }

    /// Requests are sent from the state RTS on.
    pub(crate) fn start(
        &mut self,
        attributes: impl FnOnce(Mtu) -> requester::Attributes,
    ) -> Result<(), WrongState> {
        match (self.state, self.packets.mtu()) {
            (QpState::Rtr, Some(mtu)) => {
                self.requests.begin(attributes(mtu), self.is_unreliable);
                Ok(())
            }
            _ => Err(WrongState),
        }
    }

    /// The queues of a queue pair that is reset: posted entries are dropped.
    pub(crate) fn queues_anew(&self) -> QpQueues {
        let receives = &self.arrivals.receives;
        QpQueues {
            sq: self.requests.sq.anew(),
            send_cq: self.requests.completion_queue(),
            rq: receives.rq.anew(),
            recv_cq: receives.cq.queue.clone(),
        }
    }

    /// Kind UC.
    pub(crate) fn is_unreliable(&self) -> bool {
        self.is_unreliable
    }

    /// Changes attributes, then the state.
    pub(crate) fn modify(&mut self, change: &QpChange, env: &mut Env<'_>) -> Result<(), WrongState> {
        use QpState::{Err, Init, Rtr, Rts, Sqd, Sqe};
        if let Some(to) = change.state {
            let allowed = match (self.state, to) {
                (_, Err) | (Init, Rtr) | (Rtr | Sqd, Rts) | (Rts, Sqd) => true,
                (Sqe, Rts) => self.is_unreliable,
                (from, to) => from == to && matches!(to, Init | Rts),
            };
            if !allowed {
                return Result::Err(WrongState);
            }
        }
        if let Some(access) = change.access {
            self.arrivals.access = access;
        }
        match change.state {
            Some(Err) => {
                self.conclude(env);
                self.fail(QpFault::Requested, env);
            }
            Some(state) => {
                self.state = state;
                self.requests.drain(state == Sqd);
            }
            None => {}
        }
        Ok(())
    }

    /// Sends packets until the sockets take no more or nothing is left to send.
    pub(crate) fn transmit(&mut self, env: &mut Env<'_>) -> TxOutcome {
        if self.state == QpState::Err {
            self.flush(env);
            return TxOutcome::Idle;
        }
        if self.state == QpState::Sqe {
            self.stop_sends(env);
            return TxOutcome::Idle;
        }
        self.requests.take(self.state, env);
        let outcome = self.packets.transmit(&mut self.requests, &mut self.arrivals, env);
        self.settle(env);
        outcome
    }

    /// Takes the packets that have arrived. [`transmit`](Self::transmit) sends what they cause.
    pub(crate) fn receive(&mut self, env: &mut Env<'_>) -> RxOutcome {
        let outcome = self.take_in(env);
        self.settle(env);
        outcome
    }

    /// Whether [`transmit`](Self::transmit) would send nothing, or only an acknowledgement that may
    /// wait for a message. Requests that are posted and not taken have a ring of their own.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.state != QpState::Err && !self.arrivals.has_answers() && self.requests.is_waiting()
    }

    /// Whether the peer is owed an acknowledgement, which may wait for a message.
    pub(crate) fn owes_acknowledgement(&self) -> bool {
        self.is_open() && self.arrivals.owes_only_acknowledgement()
    }

    /// Lets the next [`transmit`](Self::transmit) send the acknowledgement although no message is
    /// to be sent, if it is time; the arguments are those of `Service::confirm_alone`.
    pub(crate) fn acknowledge_alone(&mut self, polled_again: bool, is_drained: bool) -> bool {
        self.arrivals.acknowledge_alone(polled_again, is_drained)
    }

    /// Before this side ends: takes the packets that have arrived, and acknowledges them.
    pub(crate) fn conclude(&mut self, env: &mut Env<'_>) {
        if !self.is_open() || env.is_stopped() {
            return;
        }
        self.take_in(env);
        self.arrivals.acknowledge_alone(true, true);
        self.packets.transmit(&mut self.requests, &mut self.arrivals, env);
        self.settle(env);
    }

    fn is_open(&self) -> bool {
        matches!(
            self.state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe
        )
    }

    fn take_in(&mut self, env: &mut Env<'_>) -> RxOutcome {
        match self.is_open() {
            true => self.packets.receive(&mut self.requests, &mut self.arrivals, env),
            false => self.packets.discard(env),
        }
    }

    /// The next time at which [`tick`](Self::tick) has something to do.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.requests.deadline()
    }

    /// Acts on expired timers.
    pub(crate) fn tick(&mut self, env: &mut Env<'_>) {
        // What the timer waits for may have arrived while nothing ran.
        self.take_in(env);
        self.requests.tick(env.now.get());
        self.transmit(env);
    }

    /// Completes what has ended, and ends the queue pair if a request has failed.
    fn settle(&mut self, env: &mut Env<'_>) {
        let completed = self.requests.complete(env);
        let flushed = self.arrivals.receives.cq.flush(env);
        match (completed, flushed) {
            (Ok(_), Err(Overflow)) | (Err(Overflow), _) => self.fail(QpFault::CqOverflow, env),
            (Ok(Some(_)), Ok(())) if self.is_unreliable => self.stop_sends(env),
            (Ok(Some(status)), Ok(())) => self.fail(fault_of(status), env),
            (Ok(None), Ok(())) => {
                // The peer gets the reason first.
                let is_told = self.packets.are_sent() && !self.arrivals.has_answers();
                let fault = self.arrivals.fault().filter(|_| is_told);
                if let Some(fault) = fault {
                    self.fail(fault, env);
                }
            }
        }
    }

    /// Stops the send queue of kind UC after an error (state SQE): sends are flushed, and receives
    /// continue.
    fn stop_sends(&mut self, env: &mut Env<'_>) {
        self.state = QpState::Sqe;
        if let Err(Overflow) = self.requests.flush(env) {
            self.fail(QpFault::CqOverflow, env);
        }
    }

    /// Ends the queue pair: all work is flushed.
    pub(crate) fn fail(&mut self, fault: QpFault, env: &mut Env<'_>) {
        if self.is_open() && !self.is_unreliable {
            // What is complete here is to be complete at the peer.
            self.requests.end();
            self.arrivals.acknowledge_alone(true, true);
            self.packets.transmit(&mut self.requests, &mut self.arrivals, env);
        }
        if self.state != QpState::Err {
            self.state = QpState::Err;
            if let ReceiveSource::Shared(_) = self.arrivals.receives.rq {
                env.effects.event(Event::new(EventKind::LastWqe, env.qp.qid));
            }
            if fault != QpFault::Requested {
                env.effects.qp_error(env.qp.qid, fault, 0);
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
        let (Ok(()) | Err(Overflow)) = self.requests.flush(env);
        let (Ok(()) | Err(Overflow)) = self.arrivals.flush(env);
    }

    /// Closes the ports of a destroyed queue pair.
    pub(crate) fn abandon(&mut self) {
        self.packets.close();
    }
}

/// What the driver is told when a request has failed.
fn fault_of(status: WcStatus) -> QpFault {
    match status {
        WcStatus::RemAccessErr | WcStatus::RemInvReqErr | WcStatus::RemOpErr => QpFault::TerminateReceived,
        WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr => QpFault::StreamLost,
        _ => QpFault::LocalWork,
    }
}
