//! The order of framing: work requests and answers alternate, message by message.

use super::answers::Answered;
use super::confirming;
use super::inbound::Rdmap;
use super::requester::{Requester, Step};
use super::responder::Responder;
use super::terminate::Outgoing;
use crate::counters::Counter;
use crate::llp::Llp;
use crate::transport::Env;

/// The reason why framing stopped.
#[derive(Debug)]
pub(super) enum Framed {
    /// The lower layer is full, or the budget is used up.
    NoRoom,
    /// There is no message to send.
    Nothing,
    /// A request failed locally.
    LocalError,
    /// An answer cannot be sent.
    Refused(Outgoing),
}

impl Rdmap {
    /// Frames ULPDUs: the RTR before all others, answers, and with `sends` also work requests. Each
    /// ULPDU costs one of `budget`.
    #[inline]
    pub(super) fn frame(
        &mut self,
        llp: &mut Llp,
        sends: bool,
        env: &mut Env<'_>,
        budget: &mut u32,
    ) -> Framed {
        let mut fpdus = 0;
        if let Some(rtr) = self.startup.take_rtr() {
            self.requester.frame_rtr(rtr, env, llp);
            *budget -= 1;
            fpdus = 1;
        }
        let framed = self.frame_messages(llp, sends, env, budget, &mut fpdus);
        env.recent.forget();
        if fpdus > 0 {
            self.startup.note_sent();
            env.counters.add(Counter::TxFpdus, fpdus.into());
        }
        framed
    }

    #[inline]
    fn frame_messages(
        &mut self,
        llp: &mut Llp,
        sends: bool,
        env: &mut Env<'_>,
        budget: &mut u32,
        fpdus: &mut u32,
    ) -> Framed {
        let Rdmap {
            requester,
            responder,
            answered_last,
            ..
        } = self;
        while llp.has_room() && *budget > 0 && !env.is_stopped() {
            let before = llp.sealed();
            let within_send = requester.is_within_message();
            if responder.confirming.is_owed() && is_to_confirm(requester, responder, sends) {
                frame_confirmation(responder, llp, env);
                (*budget, *fpdus) = (*budget - 1, *fpdus + 1);
                continue;
            }
            let answers = &mut responder.answers;
            let due = answers.is_within_message() || !(within_send || *answered_last);
            if due && !answers.is_empty() {
                match answers.step(env, llp) {
                    Answered::Done { ended } => *answered_last = ended,
                    Answered::Idle => {}
                    Answered::Failed(message) => return Framed::Refused(message),
                }
            } else if sends {
                match requester.step(env, llp) {
                    Step::Done { .. } => *answered_last = false,
                    Step::Idle if answers.is_empty() => return Framed::Nothing,
                    Step::Idle => {
                        *answered_last = false;
                        continue;
                    }
                    Step::Failed => return Framed::LocalError,
                }
            } else if answers.is_empty() {
                return Framed::Nothing;
            } else {
                *answered_last = false;
                continue;
            }
            // Accesses to the memory of a local peer send no FPDU, but count here as well.
            let cost = requester.take_direct_cost().max(1);
            responder.confirming.message_sent();
            *budget = budget.saturating_sub(cost);
            *fpdus += u32::from(llp.sealed() != before);
        }
        if env.is_stopped() {
            return Framed::Nothing;
        }
        Framed::NoRoom
    }
}

/// Whether the confirmation that is owed to the peer is sent now: between two messages, in front of
/// a message or alone.
fn is_to_confirm(requester: &Requester, responder: &Responder, sends: bool) -> bool {
    let answers = &responder.answers;
    let is_boundary = !requester.is_within_message() && !answers.is_within_message();
    let has_message = !answers.is_empty() || sends && requester.sq.has_posted();
    is_boundary && (has_message || responder.confirming.is_alone())
}

/// Frames the confirmation that is owed to the peer, between two messages. Returns whether one was
/// owed.
pub(super) fn frame_confirmation(responder: &mut Responder, llp: &mut Llp, env: &Env<'_>) -> bool {
    let Some(position) = responder.confirming.take() else {
        return false;
    };
    llp.open(env.buffers, confirming::header(position), 0);
    llp.seal();
    env.counters.add(Counter::TxConfirmations, 1);
    true
}
