//! The send queue: messages, and the packets to send.

use super::interface::{Attributes, Completion, Packet, Status};
use crate::message::{Message, PostError};
use crate::window::Window;
use std::collections::VecDeque;
use urnic_wire::roce::{Psn, local_ack_timeout_ns};

/// Packets in flight at most, whatever the caller permits: far from half of all PSNs.
const MAX_WINDOW: u32 = 1 << 16;
/// `rnr_retry` of this value: no limit (§9.7.5.2.8).
pub(super) const INFINITE: u8 = 7;

/// A message in the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    pub(super) message: Message,
    /// Position of its first packet.
    pub(super) first: u64,
    pub(super) packets: u32,
}

impl Posted {
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }
}

/// A Read request or atomic operation that was sent: positions of its responses. A Read that is
/// sent again begins later, but ends where it did: the responder compares it with the first one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) first: u64,
    pub(super) end: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    Off,
    /// When the peer is silent for too long.
    Acknowledgement(u64),
    /// When the peer may have a receive.
    ReceiverNotReady(u64),
}

/// The send queue of a reliable connection.
#[derive(Debug)]
pub struct Requester {
    pub(super) attributes: Attributes,
    /// Messages whose completions were not taken.
    pub(super) messages: VecDeque<Posted>,
    /// How many of them, in front, are complete.
    pub(super) complete: usize,
    /// Index of the message that has the packet `next`.
    pub(super) sending: usize,
    /// The oldest packet that is not acknowledged.
    pub(super) acknowledged: u64,
    /// The next packet to send.
    pub(super) next: u64,
    /// The first packet that was never sent.
    pub(super) sent: u64,
    /// The first packet of the next message that is posted.
    pub(super) end: u64,
    /// The first packet since the last one that requested an acknowledgement.
    pub(super) ack_requested: u64,
    pub(super) parts: VecDeque<Part>,
    pub(super) window: Window,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) timer: Timer,
    /// The packet whose loss a later response has shown, and that was sent again for it.
    pub(super) repeated_for: Option<u64>,
    /// The first packet of a message that the caller has refused.
    pub(super) refused: Option<u64>,
    /// The status of the oldest message that is not complete: nothing is sent any more.
    pub(super) failed: Option<Status>,
    pub(super) draining: bool,
}

impl Requester {
    /// A send queue in the state RTS.
    pub fn new(attributes: Attributes) -> Self {
        Self {
            attributes,
            messages: VecDeque::with_capacity(attributes.depth),
            complete: 0,
            sending: 0,
            acknowledged: 0,
            next: 0,
            sent: 0,
            end: 0,
            ack_requested: 0,
            parts: VecDeque::with_capacity(attributes.max_rd_atomic.into()),
            window: Window::new(attributes.window.min(MAX_WINDOW)),
            retries: attributes.retry_cnt,
            rnr_retries: attributes.rnr_retry,
            timer: Timer::Off,
            repeated_for: None,
            refused: None,
            failed: None,
            draining: false,
        }
    }

    /// Queues a message. After a failure it will complete as flushed.
    ///
    /// # Errors
    /// [`PostError`]
    pub fn post(&mut self, message: Message) -> Result<(), PostError> {
        let packets = message.packets(self.attributes.mtu)?;
        if message.kind.needs_resource() && self.attributes.max_rd_atomic == 0 {
            return Err(PostError::NoResources);
        }
        let posted = Posted {
            message,
            first: self.end,
            packets,
        };
        self.end = posted.end();
        self.messages.push_back(posted);
        Ok(())
    }

    /// The next packet to send now; none until something arrives, the timer expires, or a message
    /// is posted.
    pub fn transmit(&mut self, now: u64) -> Option<Packet> {
        if self.failed.is_some() || matches!(self.timer, Timer::ReceiverNotReady(_)) {
            return None;
        }
        let posted = *self.messages.get(self.sending)?;
        let (kind, is_new) = (posted.message.kind, self.next >= self.sent);
        let begins = is_new && self.next == posted.first;
        let waits = self.draining || posted.message.fence && !self.parts.is_empty();
        if begins && waits || self.refused.is_some_and(|refused| self.next >= refused) {
            return None;
        }
        let in_flight = self.next - self.acknowledged;
        let room = u64::from(self.window.size()).checked_sub(in_flight)?;
        let index = (self.next - posted.first) as u32;
        let (offset, length) = self.attributes.mtu.piece(posted.message.length, index);
        let (request, length, packets) = match kind.request(posted.message.length, index, posted.packets) {
            Some(request) if room > 0 => (request, length, 1),
            Some(_) => return None,
            None => {
                let packets = self.part(&posted, room)?;
                let rest = u64::from(posted.message.length - offset);
                let bytes = rest.min(packets * u64::from(self.attributes.mtu.bytes()));
                (kind.resource_request(offset, bytes as u32)?, 0, packets)
            }
        };
        let psn = self.psn(self.next);
        let ends = self.next + packets == posted.end();
        self.next += packets;
        // A quarter of the window without an acknowledgement: the window may shrink, and would be
        // full without one on its way.
        let unrequested = self.next - self.ack_requested;
        let ack_request = ends || unrequested >= u64::from((self.window.size() / 4).max(1));
        if ack_request {
            self.ack_requested = self.next;
        }
        self.sent = self.sent.max(self.next);
        self.skip_to_next();
        if self.timer == Timer::Off {
            self.start_timer(now);
        }
        Some(Packet {
            id: posted.message.id,
            psn,
            request,
            offset,
            length,
            solicited: ends && posted.message.solicited && kind.takes_receive(),
            ack_request,
            repeated: !is_new,
        })
    }

    /// Whether [`transmit`](Self::transmit) has no packet until something arrives, the timer
    /// expires, or a message is posted. It may have none otherwise, too.
    pub fn is_waiting(&self) -> bool {
        self.failed.is_some()
            || matches!(self.timer, Timer::ReceiverNotReady(_))
            || self.next >= self.end
            || self.next - self.acknowledged >= u64::from(self.window.size())
    }

    /// How many packets of response the next request of a Read or atomic operation asks for; none
    /// if it cannot be sent now, for lack of a resource of the responder or of room in the window.
    fn part(&mut self, posted: &Posted, room: u64) -> Option<u64> {
        let next = self.next;
        if next < self.sent {
            let part = self
                .parts
                .iter()
                .find(|part| part.first <= next && next < part.end)?;
            return (room > 0).then_some(part.end - next);
        }
        if self.parts.len() >= self.attributes.max_rd_atomic.into() {
            return None;
        }
        let rest = posted.end() - next;
        let packets = rest.min(room);
        // Few large parts rather than many small ones: each costs the responder a resource.
        let enough = rest.min((u64::from(self.window.size()) / 2).max(1));
        if packets < enough {
            return None;
        }
        self.parts.push_back(Part {
            first: next,
            end: next + packets,
        });
        Some(packets)
    }

    /// When [`on_timer`](Self::on_timer) has something to do.
    pub fn deadline(&self) -> Option<u64> {
        match self.timer {
            Timer::Off => None,
            Timer::Acknowledgement(at) | Timer::ReceiverNotReady(at) => Some(at),
        }
    }

    /// Acts on a timer that has expired.
    pub fn on_timer(&mut self, now: u64) {
        match self.timer {
            Timer::Acknowledgement(at) if now >= at => {
                self.timer = Timer::Off;
                let Some(retries) = self.retries.checked_sub(1) else {
                    return self.fail(Status::RetryExceeded);
                };
                self.retries = retries;
                self.repeated_for = None;
                self.window.timed_out(self.sent);
                self.go_back();
            }
            Timer::ReceiverNotReady(at) if now >= at => self.timer = Timer::Off,
            _ => {}
        }
    }

    /// The next message that has ended, in the order in which they were posted.
    pub fn poll(&mut self) -> Option<Completion> {
        let status = match (self.complete, self.failed) {
            (0, None) => return None,
            (0, Some(failed)) => failed,
            _ => Status::Success,
        };
        let posted = self.messages.pop_front()?;
        match status {
            Status::Success => self.complete -= 1,
            _ => self.failed = Some(Status::Flushed),
        }
        self.sending = self.sending.saturating_sub(1);
        Some(Completion {
            id: posted.message.id,
            status,
        })
    }

    /// A congestion notification packet arrived for the connection.
    pub fn congestion_notified(&mut self) {
        self.window.congested(self.acknowledged, self.sent);
    }

    /// Ends the connection with a message whose memory the caller cannot read or write: messages
    /// before it complete first, then this one has [`Status::Local`].
    pub fn refuse(&mut self, id: u64) {
        let mut messages = self.messages.iter().enumerate();
        let found = messages.find(|(_, posted)| posted.message.id == id);
        let Some((index, first)) = found.map(|(index, posted)| (index, posted.first)) else {
            return;
        };
        if index < self.complete {
            // Its last response has just arrived, and could not be placed.
            self.complete = index;
            return self.fail(Status::Local);
        }
        let earlier = self.refused.unwrap_or(first);
        self.refused = Some(earlier.min(first));
        self.fail_if_refused();
    }

    /// Ends the connection: messages that are not complete are flushed.
    pub fn flush(&mut self) {
        self.fail(Status::Flushed);
    }

    /// Begins no further message (the state SQD), or goes on.
    pub fn drain(&mut self, draining: bool) {
        self.draining = draining;
    }

    /// Whether all messages that have begun are complete, and none begins.
    pub fn is_drained(&self) -> bool {
        let begun = self
            .messages
            .get(self.complete)
            .is_some_and(|posted| posted.first < self.sent);
        self.draining && !begun
    }

    /// Whether the connection has failed, or was flushed.
    pub fn is_ended(&self) -> bool {
        self.failed.is_some()
    }

    /// Packets that may be in flight.
    pub fn window(&self) -> u32 {
        self.window.size()
    }

    pub(super) fn psn(&self, position: u64) -> Psn {
        self.attributes.first_psn.after(position as u32)
    }

    pub(super) fn start_timer(&mut self, now: u64) {
        self.timer = match local_ack_timeout_ns(self.attributes.timeout) {
            Some(timeout) => Timer::Acknowledgement(now.saturating_add(timeout)),
            None => Timer::Off,
        };
    }

    /// Sets `sending` to the message that has the packet `next`.
    pub(super) fn skip_to_next(&mut self) {
        let next = self.next;
        while self
            .messages
            .get(self.sending)
            .is_some_and(|posted| posted.end() <= next)
        {
            self.sending += 1;
        }
    }

    /// Sends everything again from the oldest packet that is not acknowledged.
    pub(super) fn go_back(&mut self) {
        self.next = self.acknowledged;
        self.ack_requested = self.acknowledged;
        self.sending = self.complete;
    }

    pub(super) fn fail_if_refused(&mut self) {
        if self.refused.is_some_and(|refused| self.acknowledged >= refused) {
            self.fail(Status::Local);
        }
    }

    pub(super) fn fail(&mut self, status: Status) {
        self.failed = self.failed.or(Some(status));
        self.timer = Timer::Off;
    }
}
