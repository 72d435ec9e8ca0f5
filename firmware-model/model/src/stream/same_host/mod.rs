//! Connections between processes of one host: bytes pass through shared memory.
//!
//! The ends connect by TCP and do MPA start-up there, as always. Before the MPA Request, the
//! initiator also offers memory through an abstract unix socket that the listener's address names
//! (network namespaces separate such names as they separate addresses); the listener answers before
//! the MPA Reply. So both know at the beginning of full operation whether its bytes pass through
//! TCP or through memory, and a peer that does not know of this uses TCP, as do peers of another
//! user. TCP then only reports that the peer is gone. See docs/design/same-host.md.

mod bell;
mod by_file;
mod closer;
mod connection;
mod direction;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod introduction;
mod layout;
mod local_peers;
mod local_socket;
mod mail;
mod messages;
mod neighbour;
mod netlink;
mod nonce;
mod offers;
mod owner;
mod processors;
mod ring;
mod routes;
mod traceable;
mod user;

pub(crate) use bell::{Asleep, Bell};
pub(super) use connection::Connection;
pub(super) use mail::{Mail, Office};
pub(crate) use neighbour::Neighbour;
pub(super) use offers::Offers;
pub(crate) use processors::Processors;

use super::descriptor::Descriptors;
use crate::config::ThreadStart;
use crate::host::SharedMemory;
use crate::memory::Exports;
use bell::{PeerBell, Slot};
use by_file::ByFile;
use direction::Direction;
use introduction::{Challenge, Introduction, Tables};
use local_peers::{LocalPeers, Protocol};
use local_socket::LocalSocket;
use messages::Greeting;
use offers::OfferQueue;
use owner::Owners;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// What a device has for connections on this host.
#[derive(Debug)]
pub(crate) struct SameHost {
    descriptors: Arc<Descriptors>,
    local: Arc<LocalPeers>,
    owners: Owners,
    bell: Arc<Bell>,
    peers: Arc<ByFile<PeerBell>>,
    offers: Arc<OfferQueue>,
    tables: Arc<Tables>,
    office: Arc<Office>,
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
    /// The system does not let this process know who owns a connection, or the process has no user
    /// of its own.
    pub(crate) fn new(descriptors: &Arc<Descriptors>, start: ThreadStart) -> Result<SameHost, Errno> {
        let peers = Arc::default();
        let bell = Arc::new(Bell::new(descriptors)?);
        let local = Arc::new(LocalPeers::new(descriptors, start)?);
        Ok(SameHost {
            descriptors: descriptors.clone(),
            owners: Owners::new(descriptors)?,
            offers: Arc::new(OfferQueue::new(&bell)),
            tables: Arc::new(Tables::new(descriptors)),
            office: Arc::new(Office::new(&local, &bell, &peers)),
            local,
            bell,
            peers,
        })
    }

    /// Where peers say that something has come.
    #[inline]
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Lets go what waits for connections that do not come; returns when to call this again, if
    /// something is left.
    pub(crate) fn expire(&self) -> Option<Duration> {
        self.offers.expire()
    }

    /// What the device has for datagrams.
    pub(super) fn office(&self) -> &Arc<Office> {
        &self.office
    }

    /// Lets peers of this user reach the memory that the table describes.
    pub(crate) fn export(&self, exports: Arc<Exports>, file: OwnedFd) -> Result<(), Errno> {
        self.tables.export(exports, file)
    }

    /// Whether the device's user has the other end of a connection.
    fn is_own(&self, local: SocketAddr, remote: SocketAddr) -> Result<bool, Errno> {
        let uid = self.owners.of(local, remote)?;
        Ok(self.local.is_own(uid))
    }

    /// Opens the place for offers to a listener.
    pub(super) fn listen(&self, local: SocketAddr) -> Result<Offers, Errno> {
        self.offers.listen(&self.local, local)
    }

    /// Offers memory for the connection from `local` to `remote`, if a process of this user there
    /// takes offers.
    pub(super) fn offer(&self, local: SocketAddr, remote: SocketAddr) -> Option<Offer> {
        let socket = self.local.connect(Protocol::Tcp, remote)?;
        let slot = self.bell.slot()?;
        let (memory, file) = SharedMemory::create("urnic-stream", layout::MEMORY).ok()?;
        let challenge = self.tables.challenge();
        let nonce = challenge.as_ref().map(Challenge::address);
        let greeting = Greeting::new(local, slot.number).with_nonce(nonce, Default::default());
        let [bell, waker] = slot.bell.passed();
        messages::send(&socket, &greeting, &[file.as_fd(), bell, waker]).ok()?;
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
    pub(super) fn conclude(
        &self,
        offer: Offer,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<Option<Connection>, Errno> {
        let Offer {
            socket,
            memory,
            slot,
            challenge,
        } = offer;
        // A listener sends its answer, if any, before the Reply. What is no answer is of none.
        let Ok((answer, mut passed)) = messages::receive::<Greeting>(&socket, true, &self.descriptors) else {
            return Ok(None);
        };
        if !self.is_own(local, remote)? {
            tracing::warn!(%remote, "another user has the connection that a listener of this user answered for");
            return Ok(None);
        }
        let bell = passed.bell(&self.peers, &self.descriptors)?;
        let introduction = Introduction::initiate(&self.tables, socket, challenge, &answer);
        let peer = (bell, answer.slot());
        let outgoing = Direction::FromInitiator;
        Ok(Some(Connection::new(memory, outgoing, slot, peer, introduction)))
    }

    /// Takes up the offer for the accepted connection, if there is one, and answers it.
    pub(super) fn take_up(
        &self,
        offers: &Offers,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<Connection> {
        let socket = offers.find(remote)?;
        if !self.is_own(local, remote).ok()? {
            tracing::warn!(%remote, "this user offered memory for a connection of another one");
            return None;
        }
        let (offer, mut passed) = messages::receive::<Greeting>(&socket, false, &self.descriptors).ok()?;
        let (memory, _) = passed
            .take(|fd| SharedMemory::open(fd.as_fd(), layout::MEMORY))
            .ok()?;
        let bell = passed.bell(&self.peers, &self.descriptors).ok()?;
        let slot = self.bell.slot()?;
        let greeting = Greeting::new(remote, slot.number);
        let introduction = Introduction::respond(&self.tables, socket, self.tables.challenge(), &offer);
        let (answer, socket) = match &introduction {
            Ok(introduction) => {
                let (nonce, proof) = introduction.answer();
                (greeting.with_nonce(nonce, proof), introduction.socket())
            }
            Err(socket) => (greeting, socket),
        };
        messages::send(socket, &answer, &slot.bell.passed()).ok()?;
        let peer = (bell, offer.slot());
        let outgoing = Direction::FromResponder;
        Some(Connection::new(memory, outgoing, slot, peer, introduction.ok()))
    }
}
