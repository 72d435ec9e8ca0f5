//! The connections of one channel adapter: messages in and out, and the times at which messages are
//! repeated.

use std::collections::VecDeque;

use urnic_wire::mad::{
    About, CommIds, ConnectReject, ConnectRequest, DISCONNECT_REPLY_PRIVATE_DATA, DisconnectReply, Mad,
    Message, REJECT_PRIVATE_DATA, RejectInformation, RejectReason,
};

use super::connection::{Connection, State};
use super::event::{Event, Output};
use super::peer::Route;
use super::refusals::Refusals;
use super::settings::Settings;
use super::table::Table;
use crate::mpa_startup::Time;
use crate::qp_attr::{QpAttr, QpMask};
use crate::timers::Timers;

/// Source of random numbers that peers cannot predict. A number of a connection that a stranger
/// guesses lets the stranger end it.
pub type Random = Box<dyn FnMut() -> u64 + Send>;

/// The largest number of 24 bits.
pub(super) const MAX_24: u32 = 0xff_ffff;

/// What a listener does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It is shown to the listener's program.
    Shown,
    /// Too many requests wait for the program: the peer repeats it.
    Full,
    /// There is no listener.
    NoListener,
}

/// Why a call has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// There is no connection with this number.
    #[error("there is no connection 0x{0:08x}")]
    Unknown(u32),
    /// The connection is in another state.
    #[error("the connection is in the state \"{0}\"")]
    State(State),
    /// More private data than the message carries.
    #[error("{len} bytes of private data: the message carries {max}")]
    PrivateData {
        /// Bytes given.
        len: usize,
        /// Maximum.
        max: usize,
    },
    /// Not a number that a queue pair of kind RC can have.
    #[error("{0} is no queue pair that can be connected")]
    QueuePair(u32),
    /// The limits of connections are reached.
    #[error("there are too many connections, or too many with this peer")]
    NoRoom,
}

/// The connections of one channel adapter. Messages of its peers, calls of the owner and the time
/// go in; messages to peers and events come out of [`next_output`](Self::next_output).
pub struct Connections {
    pub(super) settings: Settings,
    pub(super) table: Table,
    pub(super) refusals: Refusals,
    timers: Timers<u32>,
    outputs: VecDeque<Output>,
    random: Random,
}

impl Connections {
    /// No connections yet.
    pub fn new(settings: Settings, random: Random) -> Connections {
        Connections {
            table: Table::new(settings.limits),
            settings,
            refusals: Refusals::default(),
            timers: Timers::default(),
            outputs: VecDeque::new(),
            random,
        }
    }

    /// The next message to send, or event.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`expire`](Self::expire) has work.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// The state of a connection; `None` when its number is free.
    pub fn state(&self, id: u32) -> Option<State> {
        self.table.get(id).map(|connection| connection.state)
    }

    /// The attributes, without the address vector, with which a queue pair reaches RTR; `None`
    /// while the peer's are not known, and after the end of the connection.
    pub fn rtr(&self, id: u32) -> Option<(QpAttr, QpMask)> {
        self.table.get(id)?.rtr()
    }

    /// The attributes with which a queue pair reaches RTS; `None` as [`rtr`](Self::rtr).
    pub fn rts(&self, id: u32) -> Option<(QpAttr, QpMask)> {
        self.table.get(id)?.rts()
    }

    /// Takes a message that arrived at queue pair 1. `admit` says what the listener of a request
    /// does. Messages for other purposes than connections have no effect.
    pub fn receive(
        &mut self,
        now: Time,
        route: Route,
        mad: &Mad,
        admit: &mut dyn FnMut(&Route, &ConnectRequest) -> Admission,
    ) {
        let transaction_id = mad.transaction_id;
        match &mad.message {
            Message::Connect(request) => self.requested(now, route, (transaction_id, request), admit),
            Message::Receipt(receipt) => self.prolong(now, route, receipt),
            Message::Reject(reject) => self.rejected(now, route, reject),
            Message::ConnectReply(reply) => self.replied(now, route, transaction_id, reply),
            Message::Ready(ready) => self.peer_is_ready(route, ready),
            Message::Disconnect(request) => {
                self.disconnect_requested(now, route, transaction_id, request);
            }
            Message::DisconnectReply(reply) => self.disconnect_answered(now, route, reply.ids),
            Message::Request(_) | Message::Reply(_) => {}
        }
    }

    /// Repeats what is overdue, and gives up what was repeated often enough.
    pub fn expire(&mut self, now: Time) {
        while let Some(id) = self.timers.due(now) {
            let Some(connection) = self.table.get_mut(id) else {
                continue;
            };
            if connection.state == State::TimeWait {
                self.tell(id, Event::TimeWaitExit);
                self.remove(id);
                continue;
            }
            let Some(left) = connection.left.checked_sub(1) else {
                self.give_up(now, id);
                continue;
            };
            (connection.left, connection.prolonged) = (left, false);
            let (route, last) = (connection.route, connection.last);
            let next = now + connection.repetition.interval;
            self.timers.set(id, Some(next));
            if let Some(mad) = last {
                tracing::debug!("{route}: again: {mad}");
                self.send_again(route, mad);
            }
        }
    }

    /// Sends a message.
    pub(super) fn send(&mut self, route: Route, transaction_id: u64, message: Message) -> Mad {
        let mad = Mad {
            transaction_id,
            message,
        };
        tracing::debug!("{route}: {mad}");
        self.send_again(route, mad);
        mad
    }

    pub(super) fn send_again(&mut self, route: Route, mad: Mad) {
        self.outputs.push_back(Output::Send(route, Box::new(mad)));
    }

    /// Sends a message of a connection, and repeats it until the connection leaves the state that
    /// it enters now.
    pub(super) fn send_until_answered(&mut self, now: Time, id: u32, state: State, message: Message) {
        let Some(connection) = self.table.get(id) else {
            return;
        };
        let (route, transaction_id, repetition) =
            (connection.route, connection.transaction_id, connection.repetition);
        let mad = self.send(route, transaction_id, message);
        self.table.enter(id, state);
        if let Some(connection) = self.table.get_mut(id) {
            connection.last = Some(mad);
            connection.left = repetition.times;
            connection.prolonged = false;
        }
        self.timers.set(id, Some(now + repetition.interval));
    }

    /// Refuses a message of a peer.
    pub(super) fn send_reject(
        &mut self,
        route: Route,
        transaction_id: u64,
        (ids, about): (CommIds, About),
        (reason, private_data): (RejectReason, [u8; REJECT_PRIVATE_DATA]),
    ) -> Mad {
        // Only with the GUID can a peer that has not been told the number find the connection.
        let guid = self.settings.ca_guid.to_be_bytes();
        let information = match reason {
            RejectReason::TIMEOUT => RejectInformation::new(&guid),
            _ => None,
        };
        let reject = ConnectReject {
            ids,
            about,
            reason,
            information: information.unwrap_or(RejectInformation::NONE),
            private_data,
        };
        self.send(route, transaction_id, Message::Reject(reject))
    }

    /// Answers a DREQ.
    pub(super) fn send_disconnect_reply(&mut self, route: Route, transaction_id: u64, ids: CommIds) {
        let reply = DisconnectReply {
            ids,
            private_data: [0; DISCONNECT_REPLY_PRIVATE_DATA],
        };
        self.send(route, transaction_id, Message::DisconnectReply(reply));
    }

    /// Queues an event, if the program still has the connection.
    pub(super) fn tell(&mut self, id: u32, event: Event) {
        if self.table.get(id).is_some_and(|connection| connection.held) {
            self.outputs.push_back(Output::Event(id, event));
        }
    }

    /// The next time at which a connection needs attention.
    pub(super) fn set_timer(&mut self, id: u32, at: Option<Time>) {
        self.timers.set(id, at);
    }

    /// Packets of the ended connection may still arrive: its number stays in use for a while.
    pub(super) fn wait(&mut self, now: Time, id: u32) {
        self.table.enter(id, State::TimeWait);
        if let Some(connection) = self.table.get_mut(id) {
            connection.last = None;
        }
        self.timers.set(id, Some(now + self.settings.time_wait()));
    }

    pub(super) fn remove(&mut self, id: u32) {
        self.timers.set(id, None);
        self.table.remove(id);
    }

    /// Adds a connection for the program.
    pub(super) fn insert(&mut self, connection: Connection) {
        self.table.insert(connection);
    }

    /// An unused number for a connection. 0 means "none" in a REJ. There is one, since the limits
    /// permit fewer connections than a prefix leaves numbers.
    pub(super) fn new_comm_id(&mut self) -> u32 {
        let random = (self.random)() as u32;
        let (prefix, mask) = match self.settings.number_prefix {
            Some(prefix) => (u32::from(prefix) << 16, u32::from(u16::MAX)),
            None => (0, u32::MAX),
        };
        let numbers = (0..=mask).map(|step| prefix | (random.wrapping_add(step) & mask));
        let mut free = numbers.filter(|id| *id != 0 && self.table.get(*id).is_none());
        free.next().unwrap_or(prefix)
    }

    pub(super) fn new_psn(&mut self) -> u32 {
        (self.random)() as u32 & MAX_24
    }

    pub(super) fn new_transaction_id(&mut self) -> u64 {
        (self.random)()
    }
}

/// Private data, with zeros after it.
pub(super) fn padded<const MAX: usize>(given: &[u8]) -> Result<[u8; MAX], CallError> {
    let mut bytes = [0; MAX];
    let too_long = CallError::PrivateData {
        len: given.len(),
        max: MAX,
    };
    bytes
        .get_mut(..given.len())
        .ok_or(too_long)?
        .copy_from_slice(given);
    Ok(bytes)
}

/// Whether a queue pair of kind RC can have this number: 0 and 1 are for management, and the
/// largest one means multicast.
pub(super) fn is_connectable(qpn: u32) -> bool {
    (2..MAX_24).contains(&qpn)
}
