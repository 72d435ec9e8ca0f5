//! Offers of initiators, until the device knows of their connections.
//!
//! An offer stays in its unix socket, with the descriptors that come with it, until the first bytes
//! of its connection arrive by TCP.

use super::messages;
use super::messages::LocalSocket;
use super::notification::NotificationPage;
use super::port_names::{LocalListener, PortNames, Protocol};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use urnic_sync::{Mutex, MutexGuard};

/// Most offers of unknown connections that a device keeps: each takes a descriptor. If an offer is
/// dropped for a newer one, its initiator uses TCP.
const KEPT: usize = 64;
/// The time that an offer is kept: its initiator sends the first bytes right after it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most offers that are examined for one connection, whatever other processes send.
const LOOKED_AT: usize = 256;

/// The offers that a device keeps, of all its listeners.
#[derive(Debug)]
pub(super) struct OfferQueue {
    kept: Mutex<Vec<Kept>>,
    /// The page whose thread drops offers in time.
    notifications: Arc<NotificationPage>,
    listeners: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    listener: u64,
    offer: Waiting,
}

/// An offer in its socket.
#[derive(Debug)]
struct Waiting {
    socket: LocalSocket,
    since: Instant,
    /// The end that connected; absent until the offer has come.
    initiator: Option<SocketAddr>,
}

/// The socket where the initiators of a listener's connections leave their offers.
#[derive(Debug)]
pub(in crate::stream) struct Offers {
    socket: LocalListener,
    queue: Arc<OfferQueue>,
    listener: u64,
}

impl OfferQueue {
    pub(super) fn new(notifications: &Arc<NotificationPage>) -> OfferQueue {
        OfferQueue {
            kept: Mutex::default(),
            notifications: notifications.clone(),
            listeners: AtomicU64::new(0),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.kept.lock()
    }

    /// Drops offers whose connections did not come; returns the time of the next call, if other
    /// offers remain.
    pub(super) fn expire(&self) -> Option<Duration> {
        let now = Instant::now();
        let mut kept = self.kept();
        kept.retain_mut(|kept| kept.offer.is_alive(now));
        let ages = kept.iter().map(|kept| now.duration_since(kept.offer.since));
        ages.max().map(|oldest| PATIENCE.saturating_sub(oldest))
    }

    /// Opens the place for offers to a listener.
    pub(super) fn listen(
        self: &Arc<Self>,
        peers: &Arc<PortNames>,
        local: SocketAddr,
    ) -> Result<Offers, Errno> {
        Ok(Offers {
            socket: peers.listen(Protocol::Tcp, local)?,
            queue: self.clone(),
            listener: self.listeners.fetch_add(1, Ordering::Relaxed),
        })
    }
}

impl Offers {
    /// The socket of the offer for the connection from `initiator`.
    pub(super) fn find(&self, initiator: SocketAddr) -> Option<LocalSocket> {
        let initiator = SocketAddr::new(initiator.ip().to_canonical(), initiator.port());
        let now = Instant::now();
        let mut kept = self.queue.kept();
        kept.retain_mut(|kept| kept.offer.is_alive(now));
        // A later connection may have the same port as an abandoned one.
        let is_it = |kept: &Kept| kept.listener == self.listener && kept.offer.initiator == Some(initiator);
        if let Some(found) = kept.iter().rposition(is_it) {
            return Some(kept.remove(found).offer.socket);
        }
        let mut looks = LOOKED_AT;
        while let Some(socket) = self.socket.accept(&mut looks) {
            let mut offer = Waiting {
                socket,
                since: now,
                initiator: None,
            };
            if !offer.is_alive(now) {
                continue;
            }
            if offer.initiator == Some(initiator) {
                return Some(offer.socket);
            }
            if kept.is_empty() {
                // The sleeping thread has no deadline for offers yet.
                self.queue.notifications.wake();
            }
            if kept.len() >= KEPT {
                kept.remove(0);
            }
            let listener = self.listener;
            kept.push(Kept { listener, offer });
        }
        None
    }
}

impl Drop for Offers {
    fn drop(&mut self) {
        if self.socket.is_own() {
            self.queue.kept().retain(|kept| kept.listener != self.listener);
        }
    }
}

impl Waiting {
    /// Examines the offer if that was not possible before; `false`: it is not an offer, or its
    /// initiator has ended.
    fn is_alive(&mut self, now: Instant) -> bool {
        if now.duration_since(self.since) > PATIENCE || self.socket.is_hung_up() {
            return false;
        }
        if self.initiator.is_some() {
            return true;
        }
        match messages::look_at_offer(&self.socket) {
            Ok(offer) => {
                self.initiator = Some(offer.initiator());
                true
            }
            // An initiator sends its offer as soon as it has connected.
            Err(errno) => errno == Errno::AGAIN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::descriptor::Descriptors;
    use crate::sys::thread_start::ThreadStart;
    use crate::testing::mock::wait_for;
    use messages::Greeting;

    struct Device {
        descriptors: Arc<Descriptors>,
        peers: Arc<PortNames>,
        queue: Arc<OfferQueue>,
        offers: Offers,
        at: SocketAddr,
        _port: std::net::TcpListener,
    }

    fn device() -> Device {
        let descriptors = Descriptors::new(4096, None);
        let notifications = Arc::new(NotificationPage::new(&descriptors).unwrap());
        let peers = Arc::new(PortNames::new(&descriptors, ThreadStart::default()).unwrap());
        let queue = Arc::new(OfferQueue::new(&notifications));
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = port.local_addr().unwrap();
        Device {
            offers: queue.listen(&peers, at).unwrap(),
            descriptors,
            peers,
            queue,
            at,
            _port: port,
        }
    }

    impl Device {
        /// An offer for a connection from a port.
        fn offer(&self, port: u16) -> LocalSocket {
            let socket = self.peers.connect(Protocol::Tcp, self.at).unwrap();
            let greeting = Greeting::new(SocketAddr::new(self.at.ip(), port), 0);
            messages::send(&socket, &greeting, &[]).unwrap();
            socket
        }

        fn find(&self, port: u16) -> Option<LocalSocket> {
            self.offers.find(SocketAddr::new(self.at.ip(), port))
        }
    }

    /// They cost a listener a bounded number of descriptors, and a later offer is still found.
    #[test]
    fn shm_22_many_offers_cost_little() {
        let device = device();
        let before = device.descriptors.numbers().len();
        let sockets: Vec<_> = (1..=200).map(|port| device.offer(port)).collect();
        let own = device.offer(1000);
        // Another thread closes dropped offers; the device sometimes waits for it.
        wait_for("its offer", || device.find(1000));
        let taken = || device.descriptors.numbers().len() - before - sockets.len() - 1;
        wait_for("the end of the others", || (taken() <= KEPT).then_some(()));
        assert!(device.find(1).is_none(), "it gave way");
        drop(own);
    }

    #[test]
    fn shm_22_offers_without_a_connection_go_away() {
        let device = device();
        let before = device.descriptors.numbers().len();
        // One initiator hangs up, one only waits, and one never sends an offer.
        let gone = device.offer(1);
        let _stays = device.offer(2);
        let _silent = device.peers.connect(Protocol::Tcp, device.at).unwrap();
        assert!(device.find(3).is_none());
        assert!(device.queue.expire().is_some());
        drop(gone);
        wait_for("the end of all", || device.queue.expire().is_none().then_some(()));
        wait_for("only the offerers' sockets", || {
            (device.descriptors.numbers().len() == before + 2).then_some(())
        });
        assert!(device.find(2).is_none());
    }

    #[test]
    fn offers_end_with_their_listener() {
        let Device {
            queue,
            offers,
            peers,
            at,
            _port,
            ..
        } = device();
        let waits = peers.connect(Protocol::Tcp, at).unwrap();
        assert!(offers.find(at).is_none());
        drop(offers);
        assert!(queue.expire().is_none());
        assert!(waits.is_hung_up());
    }
}
