//! What a response does to the requester.

use super::interface::{Effect, Status};
use super::queue::{INFINITE, Requester, Timer};
use urnic_wire::roce::{Aeth, NakCode, Psn, Response, Syndrome, rnr_timer_ns};

impl Requester {
    /// Takes a response with `payload_len` bytes of payload. What does not belong to a packet in
    /// flight has no effect. Completions follow from [`poll`](Self::poll), packets to send again
    /// from [`transmit`](Self::transmit).
    pub fn receive(&mut self, now: u64, psn: Psn, response: &Response, payload_len: usize) -> Effect {
        let ahead = psn.since(self.psn(self.acknowledged));
        let Ok(ahead) = u64::try_from(ahead) else {
            return Effect::None;
        };
        let position = self.acknowledged + ahead;
        // A sequence error names the packet that the responder expects, which may be the next one.
        let may_be_next = matches!(
            response,
            Response::Acknowledge(Aeth {
                syndrome: Syndrome::Nak(NakCode::PsnSequenceError),
                ..
            })
        );
        if self.failed.is_some() || position >= self.sent + u64::from(may_be_next) {
            return Effect::None;
        }
        match *response {
            Response::Acknowledge(aeth) => {
                self.acknowledge(now, position, aeth.syndrome);
                Effect::None
            }
            Response::ReadFirst(aeth) => self.read(now, position, false, Some(aeth), payload_len),
            Response::ReadMiddle => self.read(now, position, false, None, payload_len),
            Response::ReadLast(aeth) | Response::ReadOnly(aeth) => {
                self.read(now, position, true, Some(aeth), payload_len)
            }
            Response::AtomicAcknowledge(aeth, value) => self.original(now, position, aeth, value),
        }
    }

    fn acknowledge(&mut self, now: u64, position: u64, syndrome: Syndrome) {
        if let Syndrome::Ack(_) = syndrome {
            self.advance(now, position + 1);
            return;
        }
        // Each negative acknowledgement acknowledges all packets before its own (§9.7.5.1). That
        // of a packet that is not in flight is a duplicate.
        if !self.advance(now, position) || self.failed.is_some() || self.next == self.acknowledged {
            return;
        }
        match syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::RnrNak(timer) => self.receiver_not_ready(now, timer),
            Syndrome::Nak(code) => match code {
                NakCode::PsnSequenceError => self.repeat(),
                NakCode::InvalidRequest => self.fail(Status::RemoteInvalidRequest),
                NakCode::RemoteAccessError => self.fail(Status::RemoteAccess),
                NakCode::RemoteOperationalError => self.fail(Status::RemoteOperation),
                NakCode::InvalidRdRequest => self.fail(Status::BadResponse),
            },
        }
    }

    /// A packet of the response of a Read, which is the last one of its request or not.
    fn read(
        &mut self,
        now: u64,
        position: u64,
        last: bool,
        aeth: Option<Aeth>,
        payload_len: usize,
    ) -> Effect {
        if !self.advance(now, position) || self.failed.is_some() {
            return Effect::None;
        }
        let (Some(posted), Some(part)) = (self.messages.get(self.complete), self.parts.front()) else {
            self.fail(Status::BadResponse);
            return Effect::None;
        };
        let message = &posted.message;
        let index = (position - posted.first) as u32;
        let (offset, length) = self.attributes.mtu.piece(message.length, index);
        // A Read that is sent again begins with its first missing packet, and a response to the
        // earlier request may be on its way: so First and Middle, or Last and Only, are alike.
        let fits = message.kind.needs_resource()
            && !message.kind.is_atomic()
            && (position + 1 == part.end) == last
            && payload_len == length as usize
            && aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack(_)));
        if !fits {
            self.fail(Status::BadResponse);
            return Effect::None;
        }
        let id = message.id;
        self.arrived(now, position);
        Effect::Place { id, offset }
    }

    fn original(&mut self, now: u64, position: u64, aeth: Aeth, value: u64) -> Effect {
        if !self.advance(now, position) || self.failed.is_some() {
            return Effect::None;
        }
        let atomic = self
            .messages
            .get(self.complete)
            .filter(|posted| posted.message.kind.is_atomic());
        let (Some(posted), Syndrome::Ack(_)) = (atomic, aeth.syndrome) else {
            self.fail(Status::BadResponse);
            return Effect::None;
        };
        let id = posted.message.id;
        self.arrived(now, position);
        Effect::Original { id, value }
    }

    /// The response to `position`, which is the oldest packet, has arrived.
    fn arrived(&mut self, now: u64, position: u64) {
        self.acknowledged = position + 1;
        if self
            .messages
            .get(self.complete)
            .is_some_and(|posted| posted.end() <= self.acknowledged)
        {
            self.complete += 1;
        }
        self.progressed(now, 1);
    }

    /// Acknowledges all packets before `position`; returns whether that was possible. A Read or
    /// atomic operation before it whose response is missing was lost (§9.7.5.1: an implied NAK).
    fn advance(&mut self, now: u64, position: u64) -> bool {
        let before = self.acknowledged;
        let mut missing = false;
        while self.acknowledged < position {
            let Some(posted) = self.messages.get(self.complete) else {
                break;
            };
            if posted.message.kind.needs_resource() {
                missing = true;
                break;
            }
            self.acknowledged = position.min(posted.end());
            if self.acknowledged == posted.end() {
                self.complete += 1;
            }
        }
        if self.acknowledged > before {
            self.progressed(now, self.acknowledged - before);
        }
        if missing && self.failed.is_none() {
            self.response_lost();
        }
        !missing
    }

    /// Packets were acknowledged.
    fn progressed(&mut self, now: u64, packets: u64) {
        self.retries = self.attributes.retry_cnt;
        self.rnr_retries = self.attributes.rnr_retry;
        self.window.acknowledged(packets);
        while self
            .parts
            .front()
            .is_some_and(|part| part.end <= self.acknowledged)
        {
            self.parts.pop_front();
        }
        // An acknowledgement of packets that were about to be sent again.
        self.next = self.next.max(self.acknowledged);
        self.ack_requested = self.ack_requested.max(self.acknowledged);
        self.sending = self.sending.max(self.complete);
        self.skip_to_next();
        // If the receiver was not ready for the oldest packet, it has it now.
        match self.acknowledged == self.next {
            true => self.timer = Timer::Off,
            false => self.start_timer(now),
        }
        self.fail_if_refused();
    }

    /// A later response shows that the oldest one was lost. Those that follow show it again: only
    /// the timer counts until the oldest arrives.
    fn response_lost(&mut self) {
        if self.next > self.acknowledged && self.repeated_for != Some(self.acknowledged) {
            self.repeated_for = Some(self.acknowledged);
            self.repeat();
        }
    }

    /// Sends everything again after a loss, within the limit.
    fn repeat(&mut self) {
        let Some(retries) = self.retries.checked_sub(1) else {
            return self.fail(Status::RetryExceeded);
        };
        self.retries = retries;
        self.window.congested(self.acknowledged, self.sent);
        self.timer = Timer::Off;
        self.go_back();
    }

    fn receiver_not_ready(&mut self, now: u64, timer: u8) {
        if self.attributes.rnr_retry < INFINITE {
            let Some(retries) = self.rnr_retries.checked_sub(1) else {
                return self.fail(Status::RnrRetryExceeded);
            };
            self.rnr_retries = retries;
        }
        self.timer = Timer::ReceiverNotReady(now.saturating_add(rnr_timer_ns(timer)));
        self.go_back();
    }
}
