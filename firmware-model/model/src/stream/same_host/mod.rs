//! Connections between processes of one host: bytes pass through shared memory.
//!
//! The ends connect by TCP and do MPA start-up there, as always. Beside it, before the MPA Request,
//! the initiator offers memory through an abstract unix socket that the listener's address names
//! (network namespaces separate such names as they separate addresses); the listener answers before
//! the MPA Reply. So both know at the beginning of full operation whether its bytes pass through
//! TCP or through memory, and a peer that does not know of this uses TCP. TCP then only reports
//! that the peer is gone. See docs/design/same-host.md.

mod bell;
mod bells;
mod by_file;
mod connection;
mod direction;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod layout;
mod mail;
mod messages;
mod names;
mod neighbour;
mod owner;
mod processors;
mod ring;

pub(crate) use bells::{Asleep, Bells};
pub(super) use connection::Connection;
pub(super) use mail::{Mail, Office};
pub(crate) use neighbour::Neighbour;
pub(crate) use processors::Processors;

use super::descriptor::{Descriptor, Descriptors};
use crate::host::{HostProcess, SharedMemory, revocable};
use crate::memory::Exports;
use bell::{PeerBell, Slot};
use by_file::ByFile;
use direction::Direction;
use messages::Message;
use names::Protocol;
use neighbour::Reach;
use neighbour::process::{PeerProcess, TableMessage};
use owner::{Owners, User};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{PTracer, getpid, set_ptracer};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// Offers that a listener keeps for connections that it does not know yet: each has five
/// descriptors, and any process may send one. The initiator of one that gave way uses TCP.
const KEPT: usize = 64;
/// Offers that are looked at for one connection, whatever others send meanwhile.
const LOOKED_AT: usize = 256;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// What a device has for connections on this host.
#[derive(Debug)]
pub(crate) struct SameHost {
    descriptors: Arc<Descriptors>,
    bells: Arc<Bells>,
    peers: Arc<ByFile<PeerBell>>,
    owners: Mutex<Owners>,
    /// The device's table of STags and the descriptor by which peers read it, if they are to reach
    /// its memory.
    exported: OnceLock<(Arc<Exports>, Descriptor)>,
    processes: ByFile<PeerProcess>,
    /// Yama lets processes of this user reach this one.
    admitted: Once,
    office: Arc<Office>,
}

/// Where Yama's `ptrace_scope` is 1, lets processes that are not our ancestors reach our memory.
fn admit_peers() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    if scope.is_ok_and(|scope| scope.trim() == "1")
        && let Err(errno) = set_ptracer(PTracer::Any)
    {
        tracing::debug!(%errno, "peers cannot reach the memory of this process");
    }
}

/// The descriptors of a table: its own, and that of the host's process.
fn passed<'a>(
    &(exports, file, _): &(&'a Arc<Exports>, &'a Descriptor, TableMessage),
) -> impl Iterator<Item = BorrowedFd<'a>> {
    let host = exports.host().map(HostProcess::descriptor);
    [Some(file.as_fd()), host].into_iter().flatten()
}

/// An offer that the initiator has made.
#[derive(Debug)]
pub(super) struct Offer {
    socket: Descriptor,
    /// The user at the other end of the socket.
    user: User,
    memory: SharedMemory,
    slot: Slot,
}

/// The socket where the initiators of a listener's connections leave their offers.
#[derive(Debug)]
pub(super) struct Offers {
    socket: Descriptor,
    waiting: Mutex<Vec<Waiting>>,
}

/// An offer, before the listener knows of its connection.
#[derive(Debug)]
struct Waiting {
    socket: Descriptor,
    /// Absent until it has arrived.
    content: Option<(Message, Vec<Descriptor>)>,
}

impl SameHost {
    /// # Errors
    /// The system does not let this process know who owns a connection.
    pub(crate) fn new(descriptors: &Arc<Descriptors>, bells: &Arc<Bells>) -> Result<SameHost, Errno> {
        let peers = Arc::default();
        Ok(SameHost {
            descriptors: descriptors.clone(),
            bells: bells.clone(),
            owners: Mutex::new(Owners::new(descriptors)?),
            exported: OnceLock::new(),
            processes: ByFile::default(),
            admitted: Once::new(),
            office: Arc::new(Office::new(descriptors, bells, &peers)),
            peers,
        })
    }

    /// What the device has for datagrams.
    pub(super) fn office(&self) -> &Arc<Office> {
        &self.office
    }

    /// Lets peers of this user reach the memory that the table describes.
    pub(crate) fn export(&self, exports: Arc<Exports>, file: OwnedFd) -> Result<(), Errno> {
        let file = self.descriptors.adopt(file)?;
        let _ = self.exported.set((exports, file));
        Ok(())
    }

    /// What a peer of `user` gets to reach our memory: that is for processes of our own user, which
    /// may do so anyhow, unless Yama restricts them to descendants: then any process of the user
    /// may from here on (`PR_SET_PTRACER`).
    fn table_for(&self, user: User) -> Option<(&Arc<Exports>, &Descriptor, TableMessage)> {
        let (exports, file) = self.exported.get()?;
        let process = getpid().as_raw_nonzero().get().cast_unsigned();
        let message = TableMessage {
            process,
            slots: exports.slots(),
            address: exports.address(),
            has_host: exports.host().is_some(),
        };
        if !user.is_own() || !revocable::is_available() {
            return None;
        }
        self.admitted.call_once(admit_peers);
        Some((exports, file, message))
    }

    /// What comes of the table that a peer passed and of ours, if it got ours.
    fn reach(
        &self,
        socket: BorrowedFd<'_>,
        user: User,
        message: &Message,
        [file, host]: [Option<Descriptor>; 2],
    ) -> Reach {
        let process = owner::process_of_peer(socket);
        // Its own number of itself is another one in another pid namespace.
        let process = process.filter(|process| {
            let table = message.table();
            table.is_some_and(|t| t.process == process.as_raw_nonzero().get().cast_unsigned())
        });
        let (Some(process), Some(file), Some(table)) = (process, file, message.table()) else {
            return Reach::default();
        };
        let Some((exports, ..)) = self.table_for(user) else {
            return Reach::default();
        };
        let there = self.processes.get(&file, || {
            PeerProcess::open(process, &file, table, host, &self.descriptors)
        });
        match &there {
            Ok(_) => tracing::debug!(?process, "the memory of this peer is in reach"),
            Err(errno) => tracing::debug!(%errno, ?process, "the memory of this peer is out of reach"),
        }
        Reach {
            there: there.ok(),
            here: Some((exports.clone(), process)),
        }
    }

    fn owner(&self, local: SocketAddr, remote: SocketAddr) -> Result<User, Errno> {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.of(local, remote)
    }

    /// Opens the place for offers to a listener.
    pub(super) fn listen(&self, local: SocketAddr) -> Result<Offers, Errno> {
        Ok(Offers {
            socket: names::listen(Protocol::Tcp, local, &self.descriptors)?,
            waiting: Mutex::default(),
        })
    }

    /// Offers memory for the connection from `local` to `remote`, if somebody there takes offers.
    pub(super) fn offer(&self, local: SocketAddr, remote: SocketAddr) -> Option<Offer> {
        let socket = names::call(Protocol::Tcp, remote, &self.descriptors)?;
        let user = User::of_peer(socket.as_fd())?;
        let slot = self.bells.slot(user)?;
        let (memory, file) = SharedMemory::create("urnic-stream", layout::MEMORY).ok()?;
        let [bell, waker] = slot.bell.passed();
        let table = self.table_for(user);
        let message = Message::new(local, slot.number, table.map(|(.., message)| message));
        let mut fds = vec![file.as_fd(), bell, waker];
        fds.extend(table.iter().flat_map(passed));
        messages::send(socket.as_fd(), &message, &fds).ok()?;
        Some(Offer {
            socket,
            user,
            memory,
            slot,
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
        let (message, fds) = match messages::receive(offer.socket.as_fd(), 2, &self.descriptors) {
            // It sends its answer, if any, before the Reply.
            Err(Errno::AGAIN | Errno::CONNRESET) => return Ok(None),
            answer => answer?,
        };
        if self.owner(local, remote)? != offer.user {
            tracing::warn!(%remote, "another user answered in the name of a listener");
            return Ok(None);
        }
        let mut fds = fds.into_iter();
        let (Some(bell), Some(waker)) = (fds.next(), fds.next()) else {
            return Err(Errno::PROTO);
        };
        let peer = (
            self.peers.get(&bell, || PeerBell::open(&bell, waker))?,
            message.slot(),
        );
        let reach = self.reach(
            offer.socket.as_fd(),
            offer.user,
            &message,
            [fds.next(), fds.next()],
        );
        let Offer { memory, slot, .. } = offer;
        let outgoing = Direction::FromInitiator;
        Ok(Some(Connection::new(memory, outgoing, slot, peer, reach)))
    }

    /// Takes up the offer for the accepted connection, if there is one, and answers it.
    pub(super) fn take_up(
        &self,
        offers: &Offers,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<Connection> {
        let Waiting { socket, content } = offers.find(remote, &self.descriptors)?;
        let (message, fds) = content?;
        let user = User::of_peer(socket.as_fd())?;
        if self.owner(local, remote).ok()? != user {
            tracing::warn!(%remote, "another user offered memory in the name of a connection");
            return None;
        }
        let mut fds = fds.into_iter();
        let (file, bell, waker) = (fds.next()?, fds.next()?, fds.next()?);
        let memory = SharedMemory::open(file.as_fd(), layout::MEMORY).ok()?;
        let peer = (
            self.peers.get(&bell, || PeerBell::open(&bell, waker)).ok()?,
            message.slot(),
        );
        let reach = self.reach(socket.as_fd(), user, &message, [fds.next(), fds.next()]);
        let slot = self.bells.slot(user)?;
        let table = self.table_for(user).filter(|_| message.table().is_some());
        let answer = Message::new(remote, slot.number, table.map(|(.., message)| message));
        let mut fds = slot.bell.passed().to_vec();
        fds.extend(table.iter().flat_map(passed));
        messages::send(socket.as_fd(), &answer, &fds).ok()?;
        let outgoing = Direction::FromResponder;
        Some(Connection::new(memory, outgoing, slot, peer, reach))
    }
}

impl Offers {
    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The offer for the connection from `initiator`.
    fn find(&self, initiator: SocketAddr, descriptors: &Arc<Descriptors>) -> Option<Waiting> {
        let initiator = SocketAddr::new(initiator.ip().to_canonical(), initiator.port());
        let mut waiting = self.waiting();
        waiting.retain_mut(|offer| offer.read(descriptors));
        // A later connection may have the same port as one that was given up.
        if let Some(found) = waiting.iter().rposition(|offer| offer.is_of(initiator)) {
            return Some(waiting.remove(found));
        }
        for _ in 0..LOOKED_AT {
            let socket = descriptors.adopt(accept_with(&self.socket, FLAGS).ok()?).ok()?;
            let mut offer = Waiting {
                socket,
                content: None,
            };
            if !offer.read(descriptors) {
                continue;
            }
            if offer.is_of(initiator) {
                return Some(offer);
            }
            if waiting.len() >= KEPT {
                waiting.remove(0);
            }
            waiting.push(offer);
        }
        None
    }
}

impl Waiting {
    /// Reads the offer if that was not possible before; `false`: it is none.
    fn read(&mut self, descriptors: &Arc<Descriptors>) -> bool {
        if self.content.is_some() {
            return true;
        }
        match messages::receive(self.socket.as_fd(), 3, descriptors) {
            Ok(content) => {
                self.content = Some(content);
                true
            }
            // An initiator sends its offer as soon as it has connected.
            Err(errno) => errno == Errno::AGAIN,
        }
    }

    fn is_of(&self, initiator: SocketAddr) -> bool {
        let content = self.content.as_ref();
        content.is_some_and(|(message, _)| message.initiator() == initiator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anybody may send offers: they cost a listener a bounded number of descriptors, and an
    /// initiator whose offer comes behind them has it found.
    #[test]
    fn many_offers_of_strangers_cost_little() {
        let descriptors = Descriptors::new(4096, None);
        let bells = Arc::new(Bells::new(&descriptors).unwrap());
        let same_host = SameHost::new(&descriptors, &bells).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let there = port.local_addr().unwrap();
        let offers = same_host.listen(there).unwrap();
        let before = descriptors.numbers().len();
        let offer = |number: u16| {
            let from = SocketAddr::new(there.ip(), number);
            same_host.offer(from, there).unwrap().user
        };
        for number in 1..=200 {
            offer(number);
        }
        let own = SocketAddr::new(there.ip(), 1000);
        let kept = same_host.offer(own, there).unwrap();
        let found = offers.find(own, &descriptors).unwrap();
        assert!(found.is_of(own));
        drop((found, kept));
        // The bell of this user has four.
        let after = descriptors.numbers().len();
        assert!(after <= before + 4 * KEPT + 4, "{before}, then {after}");
        assert_eq!(offers.waiting().len(), KEPT);
    }
}
