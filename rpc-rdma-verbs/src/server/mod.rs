//! The end that listens and answers.

mod work;

use crate::crowd::longest_idle;
use crate::dispatch::lock;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::memory::Pool;
use crate::options::Options;
use crate::peer::{Dispatch, Keep, Peer};
use crate::service::Service;
use crate::verbs::{Channel, Device, Event as CmEvent, Id, Link};
use crate::xid;
use rdma_mummy_sys::rdma_cm_event_type as kind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::PrivateData;
use urnic_rpc_rdma::engine::{Config, Connection, Role, Terms};

/// Connection requests that may wait.
const BACKLOG: i32 = 128;
/// Peers whose faulty transactions are remembered.
const REFUSED: usize = 64;
/// Time between looks for connections that do not go on, and how many find nothing new before one is ended. They are counted, not the time: that
/// of a machine that was stopped is nobody's fault.
const BETWEEN_LOOKS: Duration = Duration::from_secs(10);
const LOOKS: u32 = 6;

/// For so long a thread may be in a call before the connection is taken from it that it keeps, which is looked after as often.
const TICK: Duration = Duration::from_millis(1);

/// Listens for clients, and has a [`Service`] answer their calls.
///
/// Its threads are those of [`serve`](Self::serve). One takes connections, and each of the others waits for any of these, takes what came, and calls the service
/// itself; what came together with that waits for it where it answers fast, and is left to the others where not.
pub struct Server {
    // Identifiers go before their channel; what they keep alive, before them.
    connections: Mutex<HashMap<u64, Arc<Peer>>>,
    devices: Mutex<HashMap<usize, Weak<Device>>>,
    listener: Id,
    channel: Arc<Channel>,
    options: Options,
    pool: Pool,
    dispatch: Arc<Dispatch>,
    /// Transactions that broke a connection (RFC 8166 §4.5.3).
    refused: Mutex<BTreeMap<IpAddr, Vec<u32>>>,
    /// The listener's device is gone.
    removed: AtomicBool,
}

/// Calls that nobody has begun are forgotten in the end, even if a service panics.
struct Forgotten<'a>(&'a Dispatch);

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

impl Server {
    /// Listens. Port 0 is any that is free, as [`address`](Self::address) says then.
    ///
    /// # Errors
    /// There are no RDMA libraries or devices, or the address cannot be listened at.
    pub fn bind(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        Self::with_pool(address, options, &Pool::new())
    }

    /// [`bind`](Self::bind), with a pool that there is already: that of the memory in [`Response::item`].
    ///
    /// # Errors
    /// As there.
    pub fn with_pool(address: SocketAddr, options: &Options, pool: &Pool) -> Result<Self, Error> {
        let channel = Channel::new()?;
        let listener = Id::new(&channel)?;
        listener.listen(address, BACKLOG)?;
        Ok(Self {
            connections: Mutex::default(),
            devices: Mutex::default(),
            listener,
            channel,
            options: options.clone(),
            pool: pool.clone(),
            dispatch: Arc::new(Dispatch::new()?),
            refused: Mutex::default(),
            removed: AtomicBool::new(false),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listener.local()
    }

    /// Memory for [`Response::item`].
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Serves until [`stop`](Self::stop), on as many threads as [`Options::threads`] says; this one takes connections.
    ///
    /// # Errors
    /// Nobody can connect any more, since the device is gone that it listened at.
    pub fn serve(&self, service: &dyn Service) -> Result<(), Error> {
        let _forgotten = Forgotten(&self.dispatch);
        std::thread::scope(|scope| {
            for _ in 0..self.options.threads {
                scope.spawn(|| self.work(service));
            }
            self.attend();
            // Whoever waits for an answer of a client's has none any more, and is through.
            let peers: Vec<_> = lock(&self.connections).drain().collect();
            for (_, peer) in peers {
                let mut endpoint = lock(&peer.endpoint);
                endpoint.disconnect();
                peer.ended(&mut endpoint);
            }
        });
        if self.removed.load(Relaxed) {
            return Err(Error::Removed);
        }
        Ok(())
    }

    /// Has all threads of [`serve`](Self::serve) return, and all connections end.
    pub fn stop(&self) {
        self.dispatch.stop();
    }

    /// Takes what the connection manager tells, and looks after connections, until it is time to stop. Services may take all of their threads' time.
    fn attend(&self) {
        let mut next_look = Instant::now() + BETWEEN_LOOKS;
        let mut keeping = false;
        loop {
            let flags = if keeping {
                PollFlags::empty()
            } else {
                PollFlags::IN
            };
            let mut fds = [
                PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.dispatch.stopped(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.dispatch.keeping(), flags),
            ];
            let timeout = Timespec::try_from(if keeping { TICK } else { BETWEEN_LOOKS }).ok();
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "poll");
                    return self.stop();
                }
            }
            let [told, stop, kept] = fds.map(|fd| !fd.revents().is_empty());
            if stop {
                return;
            }
            if told {
                self.manage();
            }
            if keeping {
                let peers: Vec<_> = lock(&self.connections).values().cloned().collect();
                peers.iter().for_each(|peer| peer.relieve(TICK));
            }
            if keeping || kept {
                keeping = self.dispatch.any_kept();
            }
            if next_look <= Instant::now() {
                next_look = Instant::now() + BETWEEN_LOOKS;
                self.end_those_that_take_nothing();
            }
        }
    }

    /// Takes one thing that the connection manager tells: that may take its time.
    fn manage(&self) {
        match self.channel.next() {
            Ok(Some(event)) => self.happened(event),
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "connection manager"),
        }
    }

    fn happened(&self, event: CmEvent) {
        let CmEvent {
            kind, key, incoming, ..
        } = event;
        match (kind, incoming) {
            (kind::RDMA_CM_EVENT_CONNECT_REQUEST, Some(id)) => {
                let peer = id.peer();
                if lock(&self.connections).len() >= self.options.connections && !self.make_room() {
                    tracing::warn!(%peer, "refused: there are too many connections");
                    return id.reject();
                }
                match self.accept(id, &event.private_data, event.reads, event.served_reads) {
                    Ok(()) => tracing::debug!(%peer, "accepted"),
                    Err(error) => tracing::warn!(%peer, %error, "not accepted"),
                }
            }
            (kind::RDMA_CM_EVENT_DEVICE_REMOVAL, _) if key == self.listener.key() => {
                tracing::error!(address = %self.address(), "the device is gone");
                self.removed.store(true, Relaxed);
                self.stop();
            }
            (
                kind::RDMA_CM_EVENT_DISCONNECTED
                | kind::RDMA_CM_EVENT_CONNECT_ERROR
                | kind::RDMA_CM_EVENT_UNREACHABLE
                | kind::RDMA_CM_EVENT_REJECTED
                | kind::RDMA_CM_EVENT_DEVICE_REMOVAL,
                _,
            ) => self.gone(key),
            _ => {}
        }
    }

    fn device(&self, id: &Id) -> io::Result<Arc<Device>> {
        let mut devices = lock(&self.devices);
        devices.retain(|_, device| device.strong_count() > 0);
        let key = Device::key(id)?;
        if let Some(device) = devices.get(&key).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(Device::of(id, &self.pool, self.options.windows)?);
        devices.insert(key, Arc::downgrade(&device));
        Ok(device)
    }

    fn accept(&self, id: Id, private_data: &[u8], reads: u8, served_reads: u8) -> io::Result<()> {
        let (key, address) = (id.key(), id.peer());
        let device = self.device(&id)?;
        // What the peer takes; a peer that says nothing takes one.
        let (limits, sends) = (device.limits, Endpoint::sends(&device));
        let reads = reads.min(limits.reads).max(1);
        let config = Config {
            grant: self.options.credits,
            request: self.options.backward,
            profile: self.options.profile,
            limits: self.options.limits,
            max_reads: reads.into(),
            ..Config::new(Role::Server)
        };
        let mut engine = Connection::new(&config);
        engine.refuse(lock(&self.refused).remove(&address.ip()).unwrap_or_default());
        let mut endpoint = Endpoint::new(engine, &self.pool, self.options.private_data());
        // One more, since a receive is posted before a reply that makes room for it is out; and those for replies.
        let receives = self.options.credits + 1 + self.options.backward.max(1);
        endpoint.attach(Link::new(id, device, sends, receives)?, receives, sends);
        let ours = endpoint.says(limits.invalidates);
        let theirs = PrivateData::find(private_data).unwrap_or_default();
        // The first call may be here before we hear that the connection is there.
        endpoint.connected(Terms::agreed(&ours, &theirs));
        let link = match endpoint.link().cloned() {
            Some(link) if !endpoint.broken() => link,
            // There was no memory for what it may send.
            _ => return Err(io::ErrorKind::OutOfMemory.into()),
        };
        let peer = Arc::new(Peer {
            address,
            key,
            endpoint: Mutex::new(endpoint),
            keep: Mutex::new(Keep::default()),
            dispatch: Arc::clone(&self.dispatch),
            waiting: Mutex::default(),
            xid: AtomicU32::new(xid::first()),
        });
        let _held = lock(&peer.endpoint);
        lock(&self.connections).insert(key, Arc::clone(&peer));
        let added = self.dispatch.add(key, link.fd());
        let accepted = added.and_then(|()| link.accept(&ours.emit(), reads, served_reads.min(limits.reads)));
        drop((_held, link));
        accepted.inspect_err(|_| self.gone(key))
    }

    /// Ends the connection that has to make room for another.
    fn make_room(&self) -> bool {
        let each = |(key, peer): (&u64, &Arc<Peer>)| {
            // Whom another thread is at is at work.
            let heard = peer
                .endpoint
                .try_lock()
                .ok()
                .and_then(|endpoint| endpoint.heard());
            (peer.address.ip(), heard, *key)
        };
        let longest = longest_idle(lock(&self.connections).iter().map(each));
        let Some(key) = longest else { return false };
        self.end(key, "idle, and there are too many connections");
        true
    }

    /// Ends connections on which what was posted does not go on: a peer that reads nothing would keep the memory of its replies for ever.
    fn end_those_that_take_nothing(&self) {
        let stuck = |(key, peer): (&u64, &Arc<Peer>)| {
            // Whom another thread is at goes on.
            let mut endpoint = peer.endpoint.try_lock().ok()?;
            (endpoint.stuck_for() >= LOOKS).then_some(*key)
        };
        let stuck: Vec<_> = lock(&self.connections).iter().filter_map(stuck).collect();
        for key in stuck {
            self.end(key, "takes nothing of what is sent to it");
        }
    }

    fn end(&self, key: u64, why: &'static str) {
        if let Some(peer) = lock(&self.connections).get(&key) {
            tracing::warn!(peer = %peer.address, "ended: {why}");
        }
        // Not first disconnected: whoever takes nothing does not take that either.
        self.gone(key);
    }

    fn gone(&self, key: u64) {
        let Some(peer) = lock(&self.connections).remove(&key) else {
            return;
        };
        tracing::debug!(peer = %peer.address, "gone");
        let mut endpoint = lock(&peer.endpoint);
        if let Some(link) = endpoint.link() {
            self.dispatch.remove(link.fd());
        }
        peer.ended(&mut endpoint);
        let xids: Vec<_> = endpoint.engine.refused().collect();
        let mut refused = lock(&self.refused);
        if !xids.is_empty() && refused.len() < REFUSED {
            refused.insert(peer.address.ip(), xids);
        }
    }
}
