//! The engine of one queue pair: the order of things, from attachment to end.
//!
//! ```text
//!            attach                 error of ours or theirs
//!  Detached ────────► Open ───────────────────────────────► Terminating
//!                      │  ├─ Sqd and nothing left: our FIN       │ the stream took the Terminate:
//! our FIN
//!                      │  └─ peer's Terminate, modify(Err): FIN  ▼
//!                      └────────────────────────────────────► Lingering ── peer's FIN, or too late
//! ──► Ended ``` Work is flushed when `Lingering` or `Ended` begins. A queue pair of kind UC
//! returns to `Detached` instead of `Ended`, unless this side caused the end (end of [`ending`]).

mod ending;
mod receive;
mod send;

use super::delivery::PeerProgress;
use super::inbound::Held;
use super::inbound::{Halves, Segment};
use super::params::Env;
use super::requester::Requester;
use super::responder::Drops;
use super::responder::Responder;
use super::terminate::Outgoing;
use super::turns::Turns;
use super::watch::Watch;
use crate::capture::own_peer::OwnPeerTap;
use crate::host::PieceRoom;
use crate::llp::Llp;
use crate::llp::loopback::Loopback;
use crate::llp::mpa::{Agreed, Mpa};
use crate::queues::{ReceiveSource, SendQueue};
use crate::rdmap::params::{Attachment, Identity, QpChange, QpParams, Rtr, WrongState};
use crate::stream::Stream;
use crate::stream::same_host::LocalPeer;
use crate::time::Nanos;
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

/// One queue pair's protocol.
#[derive(Debug)]
pub struct Engine {
    halves: Halves,
    llp: Option<Llp>,
    state: QpState,
    progress: Progress,
    /// We sent the MPA Request, or the peer is known to be ready: we may send first (RFC 5044
    /// §7.1.2(4)).
    may_begin: bool,
    /// We sent the MPA Request.
    initiator: bool,
    /// A valid FPDU has come.
    fpdu_received: bool,
    rtr: Option<Rtr>,
    turns: Turns,
    peer_may_close: bool,
    /// The peer's FIN came, and work continues.
    peer_closed: bool,
    /// There is no way to the peer: the next send fails.
    unreachable: bool,
    fin_grace: Duration,
    rnr_timeout: Duration,
    /// Messages that wait for a receive.
    held: Held,
    /// The time of the first held message is running.
    waiting: bool,
    /// The peer's FIN was read, or nothing more can be.
    input_ended: bool,
    /// What has arrived is taken in because this side ends: the end of the stream does not matter.
    concluding: bool,
    /// When the message that waits for a receive fails.
    rnr_deadline: Option<Nanos>,
    /// When requests fail, or posted receives are flushed, after the peer's FIN.
    grace_deadline: Option<Nanos>,
    /// The segment whose payload is being read to its place, how much of it is there, and where its
    /// FPDU begins in the stream.
    direct: Option<(Segment, usize, u64)>,
    /// Room for the places of payload.
    pieces: PieceRoom,
    terminate_sent: u32,
    terminate_received: u32,
    /// How far each end has processed the other's messages: present if the peer is a queue pair of
    /// this device, as long as the peer counts.
    peer_progress: Option<PeerProgress>,
    /// Kind UC: the stream ends, and the queue pair stays as it is.
    parting: bool,
    /// What the local peer had processed at the last look.
    confirmed: u64,
    watch: Watch,
    /// Up to where a confirmation told the peer that its messages are processed.
    told: u64,
}

impl Engine {
    /// An engine in the reset state. A queue pair that is reset gets a new one.
    pub fn new(params: QpParams) -> Engine {
        let qp = Identity {
            qid: params.qid,
            label: params.label,
            pd: params.pd,
            access: Access::empty(),
            extensions: params.extensions,
            unreliable: params.unreliable,
            last_first: params.last_first,
        };
        let requester = Requester::new(params.sq, params.send_cq);
        let responder = Responder::new(params.rq, params.recv_cq, Drops::new(params.unreliable));
        Engine {
            halves: Halves::new(qp, requester, responder),
            llp: None,
            state: QpState::Reset,
            progress: Progress::Detached,
            may_begin: false,
            initiator: false,
            fpdu_received: false,
            rtr: None,
            turns: Turns::default(),
            held: Held::default(),
            waiting: false,
            input_ended: false,
            concluding: false,
            peer_may_close: false,
            peer_closed: false,
            unreachable: false,
            fin_grace: Duration::ZERO,
            rnr_timeout: Duration::MAX,
            rnr_deadline: None,
            grace_deadline: None,
            direct: None,
            pieces: PieceRoom::default(),
            terminate_sent: 0,
            terminate_received: 0,
            peer_progress: None,
            parting: false,
            confirmed: 0,
            watch: Watch::default(),
            told: 0,
        }
    }

    /// An engine in the reset state for the same queue pair, on the same rings. Requests that are
    /// posted there are dropped.
    pub fn anew(&self) -> Engine {
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &self.halves;
        Engine::new(QpParams {
            qid: qp.qid,
            label: qp.label,
            pd: qp.pd,
            sq: requester.sq.anew(),
            send_cq: requester.cq.queue.clone(),
            rq: responder.rq.anew(),
            recv_cq: responder.cq.queue.clone(),
            extensions: qp.extensions,
            unreliable: qp.unreliable,
            last_first: qp.last_first,
        })
    }

    /// The state of the queue pair.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// What `QueryQp` answers.
    pub fn status(&self) -> QpStatus {
        let (transfer_len, transfer_done) = self.halves.requester.transfer();
        QpStatus {
            state: (self.state as u32).into(),
            attached: match self.is_attached() {
                false => attached::NONE,
                true => attached::STREAM,
            }
            .into(),
            terminate_sent: self.terminate_sent.into(),
            terminate_received: self.terminate_received.into(),
            ird: self.halves.responder.answers.ird.into(),
            ord: self.halves.requester.ord.into(),
            transfer_len: transfer_len.into(),
            transfer_done: transfer_done.into(),
        }
    }

    /// Whether a stream is in use, if only to end it.
    pub fn is_attached(&self) -> bool {
        !matches!(self.progress, Progress::Detached | Progress::Ended)
    }

    /// Whether an error is being reported; work is flushed as soon as that is done.
    pub fn is_ending(&self) -> bool {
        matches!(self.progress, Progress::Terminating { .. })
    }

    /// Whether messages wait for receives.
    pub fn is_held_up(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether nothing is outstanding that the peer or the stream could still complete.
    pub fn is_quiet(&self) -> bool {
        self.llp.as_ref().is_none_or(Llp::is_flushed)
            && !self.is_awaiting_peer()
            && self.halves.responder.answers.is_empty()
            && !self.is_ending()
    }

    /// The send queue, for the state of its doorbells.
    pub fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.halves.requester.sq
    }

    /// Where receives come from, for doorbells.
    pub fn receive_source(&mut self) -> &mut ReceiveSource {
        &mut self.halves.responder.rq
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
        self.open(attachment, Llp::Mpa(Box::new(Mpa::new(agreed))))?;
        self.watch.begin(stream.answers().is_some());
        self.meet_local_peer(local_peer);
        if let Some(llp) = &mut self.llp {
            llp.refresh(&env.now, stream);
        }
        if attachment.terminate != 0 {
            // Start-up failed behind the Reply: RFC 6581 §9 requires the initiator to report it in
            // an FPDU.
            self.fpdu_received = true;
            self.terminate(
                Outgoing::from_control(attachment.terminate),
                QpFault::TerminateSent,
                env,
                stream,
            );
        }
        Ok(())
    }

    /// The queue pair becomes its own peer, with no stream; `capture` makes where that is captured.
    pub(crate) fn attach_loopback(
        &mut self,
        attachment: &Attachment,
        capture: impl FnOnce() -> Option<OwnPeerTap>,
    ) -> Result<(), WrongState> {
        self.open(attachment, Llp::Loopback(Box::default()))?;
        if let Some(tap) = capture() {
            self.llp = Some(Llp::Loopback(Box::new(Loopback::captured(tap))));
        }
        self.may_begin = true;
        // What the loopback has taken is delivered.
        self.halves.requester.delivery.stop();
        self.rtr = None;
        self.halves.expected = None;
        self.halves.responder.msn = attachment.first_msn;
        Ok(())
    }

    fn open(&mut self, attachment: &Attachment, llp: Llp) -> Result<(), WrongState> {
        let unreliable = self.halves.qp.unreliable;
        let ready =
            matches!(self.state, QpState::Rtr | QpState::Rts) || (unreliable && self.state == QpState::Sqe);
        if !matches!(self.progress, Progress::Detached) || !ready {
            return Err(WrongState);
        }
        self.llp = Some(llp);
        self.progress = Progress::Open;
        self.initiator = attachment.initiator;
        self.may_begin = attachment.initiator || attachment.fence_open;
        self.rtr = attachment.rtr_send;
        self.peer_may_close = attachment.peer_may_close;
        self.fin_grace = attachment.fin_grace;
        let needs_slot = |rtr| u32::from(rtr == Some(Rtr::Read));
        let Halves {
            requester,
            responder,
            expected,
            strict_rtr,
            ..
        } = &mut self.halves;
        requester.begin(attachment.first_msn);
        responder.answers.ird = needs_slot(attachment.rtr_expect);
        if !unreliable {
            requester.ord = attachment.ord;
            requester.ord_limit = attachment.ord_limit;
            requester.delivered = attachment.delivered;
            if attachment.delivered {
                requester.delivery.begin(attachment.confirmation);
            }
            responder.answers.takes_confirmations = attachment.confirmation;
            responder.answers.spare = u32::from(attachment.spare_read);
            responder.answers.ird = attachment.ird.max(responder.answers.ird);
            responder.stalls = attachment.stall_on_empty_rq;
            responder.stalls_at_first = attachment.stall_at_first;
        }
        *expected = attachment.rtr_expect;
        *strict_rtr = attachment.strict_rtr;
        Ok(())
    }

    /// The queue pair is destroyed: on return, nothing refers to host memory.
    pub fn abandon(&mut self) {
        self.halves.requester.part();
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
        let Halves {
            qp,
            requester,
            responder,
            ..
        } = &mut self.halves;
        if let Some(access) = change.access {
            qp.access = access;
            if let Some(local_peer) = &mut requester.local_peer {
                local_peer.permit(qp.pd, access);
            }
        }
        if !qp.unreliable {
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
                    self.halves.requester.flush_status,
                    self.halves.requester.vendor_error,
                ) = (None, 0);
            }
            Some(state) => {
                self.state = state;
                if state == QpState::Sqd {
                    self.halves.requester.delivery.confirm_all();
                }
                self.close_if_drained(env, stream);
            }
            None => {}
        }
        Ok(())
    }

    /// There is no way to the peer. Work stays until the next send fails.
    fn give_up_peer(&mut self, env: &mut Env<'_>, stream: &mut dyn Stream) {
        if self.halves.qp.unreliable {
            return self.part_from(env, stream);
        }
        match self.progress {
            Progress::Detached => {}
            Progress::Open => {
                stream.reset();
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
            (Sqe, Rts) if self.halves.qp.unreliable => Ok(()),
            (from, to) if from == to && matches!(to, Init | Rts) => Ok(()),
            _ => Result::Err(WrongState),
        }
    }

    /// Whether our direction is open (RFC 5044 §7.1.2(4)): a responder sends nothing before a valid
    /// FPDU arrived.
    fn may_send(&self) -> bool {
        self.may_begin || self.fpdu_received
    }

    /// MSNs of the next messages of ours on queues 0 (Sends), 1 (requests) and 3 (Atomic
    /// Responses).
    #[cfg(test)]
    pub(in crate::rdmap) fn send_msns(&mut self, [sends, requests, responses]: [u32; 3]) {
        self.halves.requester.msn = sends;
        self.halves.requester.request_msn = requests;
        self.halves.responder.answers.response_msn = responses;
    }

    /// Sets the MSNs that the peer must use.
    #[cfg(test)]
    pub(in crate::rdmap) fn expect_msns(&mut self, [sends, requests, responses]: [u32; 3]) {
        self.halves.responder.msn = sends;
        self.halves.responder.answers.msn = requests;
        self.halves.response_msn = responses;
    }

    /// Sets the state that results when `bytes` bytes of the current message have come.
    #[cfg(test)]
    pub(in crate::rdmap) fn have_received(&mut self, bytes: u64) {
        self.halves.responder.have_received(bytes);
    }

    /// Sets a MULPDU that no segment size results in.
    #[cfg(test)]
    pub(in crate::rdmap) fn set_mulpdu(&mut self, mulpdu: usize) {
        if let Some(Llp::Mpa(mpa)) = &mut self.llp {
            mpa.tx.set_mulpdu(mulpdu);
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
