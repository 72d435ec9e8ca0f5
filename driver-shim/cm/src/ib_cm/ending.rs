//! How connections and attempts end: refusals, DREQ and DREP, silence, and the program's end. Also
//! MRA, which delays the end.

use urnic_wire::mad::{
    About, CommIds, ConnectReject, DISCONNECT_PRIVATE_DATA, DisconnectRequest, Message, REJECT_PRIVATE_DATA,
    ReceiptAck, RejectReason,
};

use super::connection::State;
use super::connections::{CallError, Connections, padded};
use super::event::Event;
use super::peer::{Numbered, Route};
use crate::mpa_startup::Time;

const NO_DATA: [u8; REJECT_PRIVATE_DATA] = [0; REJECT_PRIVATE_DATA];

impl Connections {
    /// Refuses a request, or the acceptance of an own one: the connection's number is free. Or
    /// takes an own acceptance back. No event follows.
    ///
    /// # Errors
    /// [`CallError`]; the connection is as before.
    pub fn reject(&mut self, now: Time, id: u32, private_data: &[u8]) -> Result<(), CallError> {
        let private_data = padded::<REJECT_PRIVATE_DATA>(private_data)?;
        let state = self.state(id).ok_or(CallError::Unknown(id))?;
        if !matches!(state, State::ReqRcvd | State::RepRcvd | State::RepSent) {
            return Err(CallError::State(state));
        }
        self.refuse(now, id, RejectReason::CONSUMER, private_data);
        match state {
            State::RepSent => self.abandon(now, id),
            _ => self.remove(id),
        }
        Ok(())
    }

    /// Ends an established connection.
    ///
    /// # Errors
    /// [`CallError`] if it is not established.
    pub fn disconnect(&mut self, now: Time, id: u32) -> Result<(), CallError> {
        match self.state(id).ok_or(CallError::Unknown(id))? {
            State::Established => self.send_disconnect(now, id),
            other => return Err(CallError::State(other)),
        }
        Ok(())
    }

    /// The program has no more use for a connection: ends it, and causes no further event.
    pub fn release(&mut self, now: Time, id: u32) {
        let Some(connection) = self.table.get_mut(id) else {
            return;
        };
        connection.held = false;
        match connection.state {
            State::ReqSent => {
                self.refuse(now, id, RejectReason::TIMEOUT, NO_DATA);
                self.remove(id);
            }
            State::ReqRcvd | State::RepRcvd => {
                self.refuse(now, id, RejectReason::CONSUMER, NO_DATA);
                self.remove(id);
            }
            State::RepSent => {
                self.refuse(now, id, RejectReason::CONSUMER, NO_DATA);
                self.abandon(now, id);
            }
            State::Established => self.send_disconnect(now, id),
            State::DreqSent | State::TimeWait => {}
        }
    }

    /// An own acceptance was taken back. The peer may have sent packets already.
    fn abandon(&mut self, now: Time, id: u32) {
        if let Some(connection) = self.table.get_mut(id) {
            connection.held = false;
        }
        self.wait(now, id);
    }

    /// Sends the REJ of a connection in the state that it has.
    fn refuse(&mut self, now: Time, id: u32, reason: RejectReason, data: [u8; REJECT_PRIVATE_DATA]) {
        let Some(connection) = self.table.get(id) else {
            return;
        };
        let (route, transaction_id) = (connection.route, connection.transaction_id);
        let (state, remote_id) = (connection.state, connection.remote_id());
        let mut ids = connection.ids();
        let about = match state {
            // The peer has not been told the number of this end.
            State::ReqRcvd => {
                ids.local = 0;
                About::REQUEST
            }
            State::RepRcvd => About::REPLY,
            _ => About::OTHER,
        };
        let refusal = self.send_reject(route, transaction_id, (ids, about), (reason, data));
        if let (State::ReqRcvd, Some(requester)) = (state, remote_id) {
            self.refusals.add(now, requester, refusal);
        }
    }

    fn send_disconnect(&mut self, now: Time, id: u32) {
        let transaction_id = self.new_transaction_id();
        let Some(connection) = self.table.get_mut(id) else {
            return;
        };
        connection.transaction_id = transaction_id;
        let request = DisconnectRequest {
            ids: connection.ids(),
            remote_qpn: connection.remote.map_or(0, |remote| remote.qpn),
            private_data: [0; DISCONNECT_PRIVATE_DATA],
        };
        self.send_until_answered(now, id, State::DreqSent, Message::Disconnect(request));
    }

    /// The peer uses the queue pair of a connection for another one, so it has forgotten this one
    /// (§12.9.8.3).
    pub(super) fn end_stale(&mut self, now: Time, id: u32) {
        match self.state(id) {
            Some(State::Established) => self.send_disconnect(now, id),
            Some(State::ReqRcvd | State::RepSent | State::RepRcvd) => {
                let (reason, private_data) = (RejectReason::STALE_CONNECTION, Vec::new());
                self.tell(id, Event::Rejected { reason, private_data });
                self.wait(now, id);
            }
            _ => {}
        }
    }

    /// A message was repeated often enough.
    pub(super) fn give_up(&mut self, now: Time, id: u32) {
        match self.state(id) {
            Some(State::ReqSent) => {
                self.refuse(now, id, RejectReason::TIMEOUT, NO_DATA);
                self.tell(id, Event::Unreachable);
                self.remove(id);
            }
            Some(State::RepSent) => {
                self.refuse(now, id, RejectReason::TIMEOUT, NO_DATA);
                self.tell(id, Event::Unreachable);
                self.wait(now, id);
            }
            Some(State::DreqSent) => {
                self.tell(id, Event::Disconnected { timed_out: true });
                self.wait(now, id);
            }
            _ => {}
        }
    }

    /// An MRA arrived.
    pub(super) fn prolong(&mut self, now: Time, route: Route, receipt: &ReceiptAck) {
        let wait = self.settings.prolonged(receipt.service_timeout);
        let ids = receipt.ids;
        let (connection, awaited) = match receipt.about {
            About::REQUEST => (self.table.find_requested(route, ids.remote), State::ReqSent),
            About::REPLY => (self.table.find(route, ids), State::RepSent),
            _ => return,
        };
        let Some(connection) = connection.filter(|connection| connection.state == awaited) else {
            return;
        };
        if !connection.prolonged {
            connection.prolonged = true;
            let (id, interval) = (connection.comm_id, connection.repetition.interval);
            self.set_timer(id, Some(now + wait.max(interval)));
        }
    }

    /// A REJ arrived.
    pub(super) fn rejected(&mut self, now: Time, route: Route, reject: &ConnectReject) {
        let Some(id) = self.rejected_connection(route, reject) else {
            return tracing::debug!("{route}: of no connection: {reject}");
        };
        let reason = reject.reason;
        let private_data = reject.private_data.to_vec();
        match self.state(id) {
            // The program asked for the end, and the peer has no connection any more.
            Some(State::DreqSent) => {
                self.tell(id, Event::Disconnected { timed_out: false });
                self.wait(now, id);
            }
            Some(State::TimeWait) | None => {}
            Some(state) => {
                self.tell(id, Event::Rejected { reason, private_data });
                // Else nothing was ever sent to the queue pair.
                let may_have_packets = !matches!(state, State::ReqSent | State::ReqRcvd);
                match may_have_packets || reason == RejectReason::STALE_CONNECTION {
                    true => self.wait(now, id),
                    false => self.remove(id),
                }
            }
        }
    }

    /// The connection that a REJ of its peer is about.
    fn rejected_connection(&mut self, route: Route, reject: &ConnectReject) -> Option<u32> {
        let ids = reject.ids;
        if let Some(connection) = self.table.find(route, ids) {
            return Some(connection.comm_id);
        }
        // Before the REP this end does not know the peer's number.
        if let Some(connection) = self.table.find_requested(route, ids.remote) {
            return Some(connection.comm_id);
        }
        // A peer that gives up its REQ does not know this end's number, but gives its GUID.
        if reject.reason != RejectReason::TIMEOUT {
            return None;
        }
        let ca_guid = u64::from_be_bytes(*reject.information.bytes().first_chunk()?);
        let requester = Numbered {
            peer: route.remote,
            ca_guid,
            number: ids.local,
        };
        let id = self.table.with_remote_id(&requester)?;
        let connection = self.table.get(id)?;
        let is_undecided = matches!(connection.state, State::ReqRcvd | State::RepSent);
        (is_undecided && connection.route == route).then_some(id)
    }

    /// A DREQ arrived. It is answered at once: the owner's queue pair goes to the error state by
    /// the event.
    pub(super) fn disconnect_requested(
        &mut self,
        now: Time,
        route: Route,
        transaction_id: u64,
        request: &DisconnectRequest,
    ) {
        let own = CommIds {
            local: request.ids.remote,
            remote: request.ids.local,
        };
        let Some(connection) = self.table.find(route, request.ids) else {
            // The DREP was lost, and the connection has left TimeWait.
            return self.send_disconnect_reply(route, transaction_id, own);
        };
        if connection.qpn != request.remote_qpn {
            return tracing::debug!("{route}: of another queue pair: {request}");
        }
        let id = connection.comm_id;
        match connection.state {
            // The RTU may have been lost.
            State::RepSent | State::Established | State::DreqSent => {
                self.send_disconnect_reply(route, transaction_id, own);
                self.tell(id, Event::Disconnected { timed_out: false });
                self.wait(now, id);
            }
            State::TimeWait => self.send_disconnect_reply(route, transaction_id, own),
            State::ReqSent | State::ReqRcvd | State::RepRcvd => {}
        }
    }

    /// A DREP arrived.
    pub(super) fn disconnect_answered(&mut self, now: Time, route: Route, ids: CommIds) {
        let connection = self.table.find(route, ids);
        if let Some(connection) = connection.filter(|connection| connection.state == State::DreqSent) {
            let id = connection.comm_id;
            self.tell(id, Event::Disconnected { timed_out: false });
            self.wait(now, id);
        }
    }
}
