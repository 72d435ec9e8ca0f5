//! What a [port](super::port) needs of SCTP: the associations of one SCTP port.

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::IpAddr;
use std::time::Duration;
use urnic_sctp::endpoint::{AssociationId, Event, Peer, Received};
use urnic_wire::sctp::chunk::Contents;

/// Makes an endpoint, in the thread that has it.
pub(super) type MakeEndpoint = Box<dyn FnOnce() -> Box<dyn Endpoint> + Send>;

/// The associations of one SCTP port, and what carries their packets. It takes messages from peers
/// only if they keep the rules of RFC 5043 for an association; those of a session are the port's.
pub(super) trait Endpoint {
    /// The descriptor that is readable when [`Endpoint::receive`] has something to do.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Takes what has come, up to a limit; whether there may be more. What it means is an
    /// [event](Endpoint::next_event).
    fn receive(&mut self, now: Duration) -> bool;

    /// Sends what waits to be sent.
    fn flush(&mut self);

    /// Nobody uses the port any more, which has no associations: it is free for another user.
    fn close(&mut self);

    /// Whether peers may begin associations from now on.
    fn set_listening(&mut self, listens: bool);

    /// Begins an association, or returns the one that there is with this peer.
    ///
    /// # Errors
    /// `ENOSR`: there are too many; those of making and connecting a socket.
    fn connect(&mut self, peer: Peer, now: Duration) -> Result<AssociationId, Errno>;

    /// Ends an association in order, after all messages; see [`Event::Ended`].
    fn shutdown(&mut self, id: AssociationId, now: Duration);

    /// Ends an association at once. No event of it follows.
    fn abort(&mut self, id: AssociationId, now: Duration);

    /// Forgets the messages of an association that has ended.
    fn forget(&mut self, id: AssociationId);

    /// Whether an association is about to end in order.
    fn is_closing(&self, id: AssociationId) -> bool;

    /// Our address in an association.
    fn local_ip(&self, id: AssociationId) -> IpAddr;

    /// The number of streams in each direction, once an association is established.
    fn streams(&self, id: AssociationId) -> Option<u16>;

    /// The longest message of an established association, with its DDP-SSN.
    fn longest(&self, id: AssociationId) -> usize;

    /// Whether [`Endpoint::send`] takes a message of a stream now.
    fn has_room(&self, id: AssociationId, stream: u16) -> bool;

    /// Sends a message, which has its DDP-SSN in front, unordered.
    ///
    /// # Errors
    /// It is too long, or the association has ended.
    fn send(
        &mut self,
        id: AssociationId,
        to: (u16, Contents),
        data: Vec<u8>,
        now: Duration,
    ) -> Result<(), Errno>;

    /// The next message of an association.
    fn take(&mut self, id: AssociationId, now: Duration) -> Option<Received>;

    /// Whether the peer of an association has acknowledged all messages.
    fn is_confirmed(&mut self, id: AssociationId) -> bool;

    /// At least the number of a stream's messages that the peer has not acknowledged. If there are
    /// any, the descriptor reports the next acknowledgements.
    fn unacknowledged_of(&mut self, id: AssociationId, stream: u16) -> usize;

    /// What happened next.
    fn next_event(&mut self) -> Option<Event>;

    /// When [`Endpoint::advance`] is due.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// Does what is due at `now`.
    fn advance(&mut self, now: Duration) {
        let _ = now;
    }
}
