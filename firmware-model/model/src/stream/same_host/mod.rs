//! Connections between processes of one host: bytes pass through shared memory.
//!
//! The ends connect by TCP and do MPA start-up there. Before the MPA Request, the initiator also
//! offers memory through an abstract unix socket that is named by the listener's address (network
//! namespaces separate such names as they separate addresses); the listener answers before the MPA
//! Reply. So at the beginning of full operation both know whether its bytes pass through TCP or
//! through memory. A peer that does not implement this uses TCP, as do peers of another user. TCP
//! then only reports that the peer is gone. See docs/design/same-host.md.

mod blocking;
mod by_file;
mod connection;
mod datagram_rings;
mod introduction;
mod layout;
mod local_peer;
mod messages;
mod netlink;
mod nonce;
mod notification;
mod offers;
mod owner;
mod port_names;
mod ring;
#[cfg(any(test, fuzzing))]
pub(crate) mod testing;
mod user;

pub(super) use connection::Connection;
pub(super) use datagram_rings::{DatagramPort, DatagramRings};
pub(crate) use local_peer::{LocalPeer, ProcessedWord};
pub(super) use messages::LocalSocket;
pub(crate) use notification::{Asleep, NotificationPage};
pub(super) use offers::Offers;
pub(super) use port_names::{LocalListener, PortNames, Protocol};

use super::descriptor::Descriptors;
use crate::host::SharedMemory;
use crate::memory::RemoteAccessTable;
use crate::sys::thread_start::ThreadStart;
use by_file::ByFile;
use introduction::{Challenge, Introduction, PeerEnd, Tables};
use layout::Direction;
use messages::Greeting;
use notification::{PeerPage, Slot};
use offers::OfferQueue;
use owner::{Owner, Owners};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The state of a device for connections on this host.
#[derive(Debug)]
pub(crate) struct SameHost {
    descriptors: Arc<Descriptors>,
    local: Arc<PortNames>,
    owners: Owners,
    notifications: Arc<NotificationPage>,
    peers: Arc<ByFile<PeerPage>>,
    offers: Arc<OfferQueue>,
    tables: Arc<Tables>,
    datagram_rings: Arc<DatagramRings>,
}

/// This end's TCP connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct TcpEnd {
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// The number of the socket.
    pub(super) socket: u32,
}

/// An offer that the initiator has made.
#[derive(Debug)]
pub(super) struct Offer {
    socket: LocalSocket,
    memory: SharedMemory,
    slot: Slot,
    challenge: Option<Challenge>,
}

impl SameHost {
    /// # Errors
    /// The system does not tell this process the owner of a connection, or the process does not
    /// belong to one user.
    pub(crate) fn new(descriptors: &Arc<Descriptors>, start: ThreadStart) -> Result<SameHost, Errno> {
        let peers = Arc::default();
        let notifications = Arc::new(NotificationPage::new(descriptors)?);
        let local = Arc::new(PortNames::new(descriptors, start)?);
        Ok(SameHost {
            descriptors: descriptors.clone(),
            owners: Owners::new(descriptors)?,
            offers: Arc::new(OfferQueue::new(&notifications)),
            tables: Arc::new(Tables::new(descriptors)),
            datagram_rings: Arc::new(DatagramRings::new(&local, &notifications, &peers)),
            local,
            notifications,
            peers,
        })
    }

    /// The notification page, in which peers show that bytes have arrived.
    #[inline]
    pub(crate) fn notifications(&self) -> &NotificationPage {
        &self.notifications
    }

    /// Lets go what waits for connections that do not come; returns when to call this again, if
    /// something is left.
    pub(crate) fn expire(&self) -> Option<Duration> {
        let next = [self.offers.expire(), self.peers.expire(), self.tables.expire()];
        next.into_iter().flatten().min()
    }

    /// The state of the device for datagrams.
    pub(super) fn datagram_rings(&self) -> &Arc<DatagramRings> {
        &self.datagram_rings
    }

    /// Lets peers of this user reach the memory that the table describes.
    pub(crate) fn export(&self, table: Arc<RemoteAccessTable>, file: OwnedFd) -> Result<(), Errno> {
        self.tables.export(table, file)
    }

    /// The owner of the other end of a connection, if it is the device's user.
    fn owner(&self, end: TcpEnd) -> Result<Option<Owner>, Errno> {
        let owner = self.owners.of(end.local, end.remote)?;
        Ok(Some(owner).filter(|owner| self.local.is_own(owner.uid)))
    }

    /// Opens the place for offers to a listener.
    pub(super) fn listen(&self, local: SocketAddr) -> Result<Offers, Errno> {
        self.offers.listen(&self.local, local)
    }

    /// Offers memory for a connection, if a process of this user takes offers at the other end.
    pub(super) fn offer(&self, end: TcpEnd) -> Option<Offer> {
        let socket = self.local.connect(Protocol::Tcp, end.remote)?;
        let slot = self.notifications.slot()?;
        let (memory, file) = SharedMemory::create("urnic-stream", layout::MEMORY).ok()?;
        let challenge = self.tables.challenge();
        let nonce = challenge.as_ref().map(Challenge::address);
        let greeting = Greeting::new(end.local, slot.number)
            .with_target(end.remote)
            .with_socket(end.socket)
            .with_nonce(nonce, Default::default());
        let [notifications, waker] = slot.notifications.passed();
        messages::send(&socket, &greeting, &[file.as_fd(), notifications, waker]).ok()?;
        Some(Offer {
            socket,
            memory,
            slot,
            challenge,
        })
    }

    /// The connection that resulted from an offer, now that the listener has had the opportunity to
    /// answer; `None`: it did not.
    ///
    /// # Errors
    /// It did, and the connection cannot be used.
    pub(super) fn conclude(&self, offer: Offer, end: TcpEnd) -> Result<Option<Connection>, Errno> {
        let Offer {
            socket,
            memory,
            slot,
            challenge,
        } = offer;
        let (answer, mut passed) = match messages::receive::<Greeting>(&socket, true, &self.descriptors) {
            // The answer arrived, and the listener relies on it, but this process has no room for
            // its descriptors.
            Err(errno @ Errno::MFILE) => return Err(errno),
            // A listener sends its answer, if any, before the Reply. Any other message is from
            // another process.
            Err(_) => return Ok(None),
            Ok(answer) => answer,
        };
        let remote = end.remote;
        let peer = match PeerEnd::known(&answer, &socket, &self.tables) {
            Some(known) => Ok(known),
            None => match self.owner(end)? {
                Some(owner) => PeerEnd::of(&answer, &socket, owner),
                None => Err(Errno::PERM),
            },
        };
        let Ok(peer) = peer else {
            tracing::warn!(%remote, "a process answered that does not have the other end of the connection");
            return Ok(None);
        };
        let notifications = passed.notifications(&self.peers, peer.is_known())?;
        let notifications = (notifications, answer.slot());
        let introduction = Introduction::initiate(&self.tables, socket, challenge, peer);
        let outgoing = Direction::FromInitiator;
        Ok(Some(Connection::new(
            memory,
            outgoing,
            slot,
            notifications,
            introduction,
        )))
    }

    /// Takes up the offer for the accepted connection, if there is one, and answers it.
    pub(super) fn take_up(&self, offers: &Offers, end: TcpEnd) -> Option<Connection> {
        let remote = end.remote;
        if !self.local.is_local(remote.ip()) {
            return None;
        }
        let socket = offers.find(remote)?;
        let (offer, mut passed) = messages::receive::<Greeting>(&socket, false, &self.descriptors).ok()?;
        // An offer that names both ends of the connection belongs to no other one.
        let known = PeerEnd::known(&offer, &socket, &self.tables).filter(|_| offer.is_to(end.local));
        let peer = known.or_else(|| {
            let owner = self.owner(end).ok()??;
            PeerEnd::of(&offer, &socket, owner).ok()
        });
        let Some(peer) = peer.filter(|_| !offer.is_of_datagrams()) else {
            tracing::warn!(%remote, "a process offered memory that does not have the other end of the connection");
            return None;
        };
        let memory = passed.once(|fd| SharedMemory::open(fd, layout::MEMORY)).ok()?;
        let notifications = passed.notifications(&self.peers, peer.is_known()).ok()?;
        let slot = self.notifications.slot()?;
        let greeting = Greeting::new(remote, slot.number).with_socket(end.socket);
        let introduction = Introduction::respond(&self.tables, socket, self.tables.challenge(), peer);
        let (answer, socket) = match &introduction {
            Ok(introduction) => {
                let (nonce, proof) = introduction.answer();
                (greeting.with_nonce(nonce, proof), introduction.socket())
            }
            Err(socket) => (greeting, socket),
        };
        messages::send(socket, &answer, &slot.notifications.passed()).ok()?;
        let notifications = (notifications, offer.slot());
        let outgoing = Direction::FromResponder;
        Some(Connection::new(
            memory,
            outgoing,
            slot,
            notifications,
            introduction.ok(),
        ))
    }
}
