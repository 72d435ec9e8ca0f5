//! The engine of one queue pair, from attachment to end.
//!
//! ```text
//!            attach             error of ours or theirs
//!  Detached ────────► Open ───────────────────────────► Terminating
//!                      │                                     │ the stream took
//!                      │ Sqd and nothing left,               │ the Terminate:
//!                      │ the peer's Terminate, or            │ our FIN
//!                      │ modify(Err): our FIN                ▼
//!                      └─────────────────────────────────► Lingering ──► Ended
//!                                             the peer's FIN, or too late
//! ```
//! Work is flushed when `Lingering` or `Ended` begins. A queue pair of kind UC returns to
//! `Detached` instead of `Ended`, unless this side caused the end (end of [`ending`]).

mod ending;
mod receive;
mod send;

use super::confirmation::Confirmation;
use super::confirming::Confirming;
use super::inbound::Parked;
use super::inbound::{Rdmap, Segment};
use super::requester::Requester;
use super::responder::Drops;
use super::responder::Responder;
use super::startup::Startup;
use super::terminate::Outgoing;
use super::watch::Watch;
use crate::capture::own_peer::OwnPeerTap;
use crate::host::PieceRoom;
use crate::llp::Llp;
use crate::llp::loopback::Loopback;
use crate::llp::messages::Messages;
use crate::llp::mpa::{Agreed, Mpa};
use crate::queues::{ReceiveSource, SendQueue};
use crate::rdmap::attachment::{Attachment, Rtr};
use crate::stream::Stream;
use crate::stream::same_host::LocalPeer;
use crate::time::Nanos;
use crate::transport::{Env, QpChange, QpQueues, WrongState};
use std::time::Duration;
use urnic_device::command::QpStatus;
use urnic_device::event::QpFault;
use urnic_device::stream::attached;
use urnic_device::vocabulary::{Access, QpState};
use urnic_wire::mpa::fpdu::CrcMode;

/// The phase of the connection.
#[derive(Debug)]
enum Progress {
    /// There is no stream yet.
    Detached,
    /// In use.
    Open,
    /// An error is being reported.
    Terminating {
        message: Outgoing,
        framed: bool,
        until: Nanos,
    },
    /// Our FIN is sent.
    Lingering { until: Nanos },
    /// There is no stream any more.
    Ended,
}

/// The bytes that may still come from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// More bytes.
    Open,
    /// None: the peer's FIN was read, or the stream is lost. Bytes from before are still processed.
    Ended,
    /// None: the peer's FIN was acted on. Requests that wait for the peer fail after the grace
    /// period; otherwise the queue pair does not change.
    Closed,
    /// None: the peer's FIN was acted on, and this side still sends what the stream has not taken
    /// (RFC 5041 §6.2.1).
    HalfClosed,
}

/// The time for which the first parked message may still wait for a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RnrWait {
    /// No message waits.
    None,
    Endless,
    /// Until this time, at which the message fails.
    Until(Nanos),
}

impl RnrWait {
    fn deadline(self) -> Option<Nanos> {
        match self {
            RnrWait::Until(at) => Some(at),
            RnrWait::None | RnrWait::Endless => None,
        }
    }
}

/// The protocol of one queue pair.
#[derive(Debug)]
pub struct Engine {
    rdmap: Rdmap,
    llp: Option<Llp>,
    state: QpState,
    progress: Progress,
    peer_may_close: bool,
    /// The peer cannot be reached: the next send fails.
    unreachable: bool,
    fin_grace: Duration,
    rnr_timeout: Duration,
    /// Messages that wait for a receive.
    parked: Parked,
    rnr_wait: RnrWait,
    input: Input,
    /// This side ends, and takes in the bytes that have arrived: the end of the stream does not
    /// matter.
    concluding: bool,
    /// The time after the peer's FIN at which requests fail, or posted receives are flushed.
    grace_deadline: Option<Nanos>,
    /// Half closed: the position that the stream had taken when the deadline was set.
    taken_at_deadline: u64,
    /// The segment whose payload is being read to its place, the number of bytes already there, and
    /// the position in the stream where the segment's FPDU begins.
    direct: Option<(Segment, usize, u64)>,
    /// The list of places for payload.
    pieces: PieceRoom,
    terminate_sent: u32,
    terminate_received: u32,
    /// Kind UC: the stream ends, and the queue pair does not change.
    parting: bool,
    watch: Watch,
}

impl Engine {
    /// An engine in the reset state. A queue pair that is reset gets a new one. `unreliable`: kind
    /// UC.
    pub fn new(queues: QpQueues, unreliable: bool) -> Engine {
        let requester = Requester::new(queues.sq, queues.send_cq);
        let responder = Responder::new(queues.rq, queues.recv_cq, Drops::new(unreliable));
        Engine {
            rdmap: Rdmap::new(requester, responder),
            llp: None,
            state: QpState::Reset,
            progress: Progress::Detached,
            parked: Parked::default(),
            rnr_wait: RnrWait::None,
            input: Input::Open,
            concluding: false,
            peer_may_close: false,
            unreachable: false,
            fin_grace: Duration::ZERO,
            rnr_timeout: Duration::MAX,
            grace_deadline: None,
            taken_at_deadline: 0,
            direct: None,
            pieces: PieceRoom::default(),
            terminate_sent: 0,
            terminate_received: 0,
            parting: false,
            watch: Watch::default(),
        }
    }

    /// An engine in the reset state for the same queue pair, on the same rings. Requests that are
    /// posted there are dropped.
    pub fn anew(&self) -> Engine {
        let Rdmap {
            requester, responder, ..
        } = &self.rdmap;
        let queues = QpQueues {
            sq: requester.sq.anew(),
            send_cq: requester.cq.queue.clone(),
            rq: responder.rq.anew(),
            recv_cq: responder.cq.queue.clone(),
        };
        Engine::new(queues, self.is_unreliable())
    }

    /// The queues and the remote rights of a queue pair in the state INIT, for an engine of another
    /// wire. Requests that are posted stay.
    pub(crate) fn before_connection(&self) -> Result<(QpQueues, Access), WrongState> {
        if self.state != QpState::Init {
            return Err(WrongState);
        }
        let Rdmap {
            requester, responder, ..
        } = &self.rdmap;
        let queues = QpQueues {
            sq: requester.sq.same(),
            send_cq: requester.cq.queue.clone(),
            rq: responder.rq.same(),
            recv_cq: responder.cq.queue.clone(),
        };
        Ok((queues, responder.access))
    }

    /// Kind UC: messages may be dropped, and the queue pair outlives its stream.
    #[inline]
    pub(crate) fn is_unreliable(&self) -> bool {
        self.rdmap.responder.drops.are_on()
    }

    /// The state of the queue pair.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// The result of `QueryQp`.
    pub fn status(&self) -> QpStatus {
        let (transfer_len, transfer_done) = self.rdmap.requester.transfer();
        QpStatus {
            state: (self.state as u32).into(),
            attached: match self.is_attached() {
                false => attached::NONE,
                true if matches!(self.llp, Some(Llp::Messages(_))) => attached::SCTP,
                true => attached::STREAM,
            }
            .into(),
            terminate_sent: self.terminate_sent.into(),
            terminate_received: self.terminate_received.into(),
            ird: self.rdmap.responder.answers.ird.into(),
            ord: self.rdmap.requester.ord.into(),
            transfer_len: transfer_len.into(),
            transfer_done: transfer_done.into(),
        }
    }

    /// Whether a stream is in use, also if it is only being ended.
    pub fn is_attached(&self) -> bool {
        !matches!(self.progress, Progress::Detached | Progress::Ended)
    }

    /// Whether an error is being reported; work is flushed as soon as that is done.
    pub fn is_ending(&self) -> bool {
        matches!(self.progress, Progress::Terminating { .. })
    }

    /// Whether messages wait for receives.
    pub fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Whether nothing is outstanding that the peer or the stream could still complete.
    pub fn is_quiet(&self) -> bool {
        self.llp.as_ref().is_none_or(Llp::is_flushed)
            && !self.is_awaiting_peer()
            && self.rdmap.responder.answers.is_empty()
            && !self.is_ending()
    }

    /// The send queue, for the state of its doorbells.
    pub fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.rdmap.requester.sq
    }

    /// The source of receives, for doorbells.
    pub fn receive_source(&mut self) -> &mut ReceiveSource {
        &mut self.rdmap.responder.rq
    }

    /// Begins full operation over `stream`; `local_peer`: the peer, if it shares its memory.
    pub fn attach(
        &mut self,
        attachment: &Attachment,
        local_peer: Option<LocalPeer>,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(), WrongState> {
        let crc = if attachment.crc { CrcMode::On } else { CrcMode::Off };
        let agreed = Agreed {
            crc,
            markers_tx: attachment.markers_tx,
            markers_rx: attachment.markers_rx,
        };
        let llp = match stream.carries_messages() {
            true => Llp::Messages(Box::new(Messages::new(stream))),
            false => Llp::Mpa(Box::new(Mpa::new(agreed))),
        };
        self.open(attachment, llp)?;
        self.watch.begin(stream.reports_answers());
        self.use_local_peer(local_peer, env);
        if let Some(llp) = &mut self.llp {
            llp.refresh(&env.now, stream);
        }
        if attachment.terminate != 0 {
            // Start-up failed after the Reply: RFC 6581 §9 requires the initiator to report it in
            // an FPDU.
            self.rdmap.startup.abort();
            self.terminate(
                Outgoing::from_control(attachment.terminate),
                QpFault::TerminateSent,
                env,
                stream,
            );
        }
        Ok(())
    }

    /// Makes the queue pair its own peer, with no stream; `capture` makes the tap that captures its
    /// ULPDUs.
    pub(crate) fn attach_loopback(
        &mut self,
        attachment: &Attachment,
        capture: impl FnOnce() -> Option<OwnPeerTap>,
    ) -> Result<(), WrongState> {
        self.open(attachment, Llp::Loopback(Box::default()))?;
        if let Some(tap) = capture() {
            self.llp = Some(Llp::Loopback(Box::new(Loopback::captured(tap))));
        }
        self.rdmap.startup = Startup::of_own_peer();
        self.rdmap.requester.confirmation.stop_reads();
        self.rdmap.responder.msn = attachment.first_msn;
        Ok(())
    }

    fn open(&mut self, attachment: &Attachment, llp: Llp) -> Result<(), WrongState> {
        let unreliable = self.is_unreliable();
        let ready =
            matches!(self.state, QpState::Rtr | QpState::Rts) || (unreliable && self.state == QpState::Sqe);
        if !matches!(self.progress, Progress::Detached) || !ready {
            return Err(WrongState);
        }
        self.llp = Some(llp);
        self.progress = Progress::Open;
        self.rdmap.startup = Startup::new(attachment);
        self.peer_may_close = attachment.peer_may_close;
        self.fin_grace = attachment.fin_grace;
        let needs_slot = |rtr| u32::from(rtr == Some(Rtr::Read));
        let Rdmap {
            requester, responder, ..
        } = &mut self.rdmap;
        let confirmation = Confirmation::new(attachment.delivered && !unreliable);
        requester.begin(attachment.first_msn, confirmation);
        responder.confirming = Confirming::default();
        responder.answers.ird = needs_slot(attachment.rtr_expect);
        if !unreliable {
            requester.ord = attachment.ord;
            requester.ord_limit = attachment.ord_limit;
            responder.answers.spare = u32::from(attachment.spare_read);
            responder.answers.ird = attachment.ird.max(responder.answers.ird);
            responder.without_receive = attachment.without_receive;
        }
        Ok(())
    }

    /// The queue pair is destroyed: on return, nothing refers to host memory.
    pub fn abandon(&mut self) {
        self.rdmap.requester.part();
        self.llp = None;
    }

    /// Changes attributes, then the state.
    pub fn modify(
        &mut self,
        change: &QpChange,
        env: &mut Env<'_>,
        stream: &mut dyn Stream,
    ) -> Result<(), WrongState> {
        if let Some(state) = change.state {
            self.check_transition(state)?;
        }
        let Rdmap {
            requester, responder, ..
        } = &mut self.rdmap;
        if let Some(access) = change.access {
            responder.access = access;
            if let Some(local_peer) = &mut requester.local_peer {
                local_peer.permit(env.qp.pd, access);
            }
        }
        if !env.qp.unreliable {
            responder.answers.ird = change.ird.unwrap_or(responder.answers.ird);
            requester.ord = change.ord.unwrap_or(requester.ord);
        }
        if let Some(timeout) = change.rnr_timeout {
            self.rnr_timeout = timeout;
        }
        if let Some(limit) = change.ack_timeout {
            self.limit_silence(limit, stream);
        }
        if change.unreachable {
            self.give_up_peer(env, stream);
        }
        match change.state {
            Some(QpState::Err) => {
                self.fail(QpFault::Requested, env, stream);
                // The error that would have ended the queue pair must not be reported by a later
                // request, because that request is flushed.
                self.unreachable = false;
                (
                    self.rdmap.requester.flush_status,
                    self.rdmap.requester.vendor_error,
                ) = (None, 0);
            }
            Some(state) => {
                self.state = state;
                if state == QpState::Sqd {
                    self.rdmap.requester.confirmation.confirm_all();
                }
                self.close_if_drained(env, stream);
            }
            None => {}
        }
        Ok(())
    }

    /// The peer cannot be reached. Work stays until the next send fails.
    fn give_up_peer(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if env.qp.unreliable {
            return self.part_from(env, stream);
        }
        match self.progress {
            Progress::Detached => {}
            Progress::Open => {
                stream.reset();
                self.rdmap.requester.sq.reopen();
                self.llp = None;
                self.progress = Progress::Ended;
            }
            Progress::Terminating { .. } | Progress::Lingering { .. } | Progress::Ended => return,
        }
        (self.unreachable, self.peer_may_close) = (true, true);
    }

    /// Checks which transitions a driver may request (rows VRB-Q-03 … 05). Reset makes a new engine
    /// instead.
    fn check_transition(&self, to: QpState) -> Result<(), WrongState> {
        use QpState::*;
        match (self.state, to) {
            (_, Err) => Ok(()),
            (Reset, Init) | (Init, Rtr) | (Rtr, Rts) | (Rts, Sqd) => Ok(()),
            (Sqe, Rts) if self.is_unreliable() => Ok(()),
            (from, to) if from == to && matches!(to, Init | Rts) => Ok(()),
            _ => Result::Err(WrongState),
        }
    }

    /// MSNs of the next messages of ours on queues 0 (Sends), 1 (requests) and 3 (Atomic
    /// Responses).
    #[cfg(test)]
    pub(in crate::rdmap) fn send_msns(&mut self, [sends, requests, responses]: [u32; 3]) {
        self.rdmap.requester.msn = sends;
        self.rdmap.requester.request_msn = requests;
        self.rdmap.responder.answers.response_msn = responses;
    }

    /// Sets the MSNs that the peer must use.
    #[cfg(test)]
    pub(in crate::rdmap) fn expect_msns(&mut self, [sends, requests, responses]: [u32; 3]) {
        self.rdmap.responder.msn = sends;
        self.rdmap.responder.answers.msn = requests;
        self.rdmap.response_msn = responses;
    }

    /// Sets the state that results when `bytes` bytes of the current message have arrived.
    #[cfg(test)]
    pub(in crate::rdmap) fn have_received(&mut self, bytes: u64) {
        self.rdmap.responder.have_received(bytes);
    }

    /// Sets a MULPDU that no segment size results in.
    #[cfg(test)]
    pub(in crate::rdmap) fn set_mulpdu(&mut self, mulpdu: usize) {
        match &mut self.llp {
            Some(Llp::Mpa(mpa)) => mpa.tx.set_mulpdu(mulpdu),
            Some(Llp::Messages(messages)) => messages.set_mulpdu(mulpdu),
            Some(Llp::Loopback(_)) | None => {}
        }
    }

    /// Bytes that were received and belong to no whole FPDU.
    #[cfg(test)]
    pub(in crate::rdmap) fn buffered(&self) -> usize {
        match &self.llp {
            Some(Llp::Mpa(mpa)) => mpa.rx.buffered(),
            _ => 0,
        }
    }
}
