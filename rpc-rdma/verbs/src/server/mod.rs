//! A server: the end that accepts connections and answers calls.

mod work;

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::eviction::{Candidate, LogLimit, select_for_eviction};
use crate::memory::Pool;
use crate::options::Options;
use crate::peer::{Dispatch, Job, Keep, Peer};
use crate::service::Service;
use crate::shares::{Account, Charge, Holder, Shares, Wanted};
use crate::verbs::{Channel, Device, Event as CmEvent, Id, Link};
use crate::xid;
use rdma_mummy_sys::rdma_cm_event_type as kind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::PrivateData;
use urnic_rpc_rdma::engine::{Config, Connection, Role, Terms};
use urnic_sync::Mutex;

/// Connection requests in the backlog.
const BACKLOG: i32 = 128;
/// Number of peers whose faulty transactions are remembered.
const REFUSED: usize = 64;
/// Longest interval of the checks for connections without progress. Time beyond it, as after a
/// suspension of the machine, does not count against peers.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of the checks whether there is memory for waiting calls.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Time without progress after which the server ends a connection if other connections wait for its
/// memory.
const STUCK: Duration = Duration::from_secs(2);

/// Time in one call after which a thread loses the connection that it keeps, and the interval of
/// this check.
const TICK: Duration = Duration::from_millis(1);

/// A listener whose clients' calls a [`Service`] answers.
///
/// The threads are those of [`serve`](Self::serve). One accepts connections. Each of the others
/// waits for all connections, and the thread that receives a call runs the service for it. Further
/// calls that arrived with it wait for this thread if it is fast, and go to other threads
/// otherwise.
pub struct Server {
    // Identifiers are dropped before their channel, and after the objects that they keep alive.
    connections: Mutex<HashMap<u64, Arc<Peer>>>,
    devices: Mutex<HashMap<usize, Weak<Device>>>,
    listener: Id,
    channel: Arc<Channel>,
    options: Options,
    pool: Pool,
    dispatch: Arc<Dispatch>,
    /// Transactions that broke a connection (RFC 8166 §4.5.3).
    refused: Mutex<VecDeque<(IpAddr, Vec<u32>)>>,
    shares: Shares,
    /// Calls that wait until memory can be counted for their replies.
    deferred: Mutex<VecDeque<(Job, Wanted)>>,
    /// Limit of log lines about ended or refused connections.
    log_limit: LogLimit,
    /// Whether the device of the listener was removed.
    removed: AtomicBool,
}

/// Drops the queued calls at the end, even if a service panics.
struct ClearQueues<'a>(&'a Server);

impl Drop for ClearQueues<'_> {
    fn drop(&mut self) {
        self.0.dispatch.clear();
        self.0.deferred.lock().clear();
    }
}

impl Server {
    /// Listens. Port 0 selects a free port, which [`address`](Self::address) returns.
    ///
    /// # Errors
    /// There are no RDMA libraries or devices, or the server cannot listen on the address.
    pub fn bind(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        Self::with_pool(address, options, &Pool::new())
    }

    /// Listens with an existing pool, which provides the memory of
    /// [`Response::item`](crate::Response::item).
    ///
    /// # Errors
    /// There are no RDMA libraries or devices, or the server cannot listen on the address.
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
            shares: options.shares.clone().unwrap_or_else(|| Shares::new(u64::MAX)),
            deferred: Mutex::default(),
            log_limit: LogLimit::default(),
            removed: AtomicBool::new(false),
        })
    }

    /// The address of the listener.
    pub fn address(&self) -> SocketAddr {
        self.listener.local()
    }

    /// Memory for [`Response::item`](crate::Response::item).
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Serves until [`stop`](Self::stop) on [`Options::threads`] threads. The calling thread
    /// accepts connections.
    ///
    /// # Errors
    /// The device of the listener was removed, so no client can connect.
    pub fn serve(&self, service: &dyn Service) -> Result<(), Error> {
        let _clear_queues = ClearQueues(self);
        std::thread::scope(|scope| {
            for _ in 0..self.options.threads {
                scope.spawn(|| self.work(service));
            }
            self.manage_connections();
            // Threads that wait for the answer of a client get none, and return.
            let peers: Vec<_> = self.connections.lock().drain().collect();
            for (_, peer) in peers {
                let mut endpoint = peer.endpoint.lock();
                endpoint.disconnect();
                peer.ended(&mut endpoint);
            }
        });
        if self.removed.load(Relaxed) {
            return Err(Error::Removed);
        }
        Ok(())
    }

    /// Ends all connections, and makes all threads of [`serve`](Self::serve) return.
    pub fn stop(&self) {
        self.dispatch.stop();
    }

    /// Handles events of the connection manager and checks connections, until the server stops.
    /// Services may occupy all other threads.
    fn manage_connections(&self) {
        let interval = self.interval();
        let mut last_check = Instant::now();
        let mut keeping = false;
        let mut waiting = false;
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
            let timeout = match (keeping, waiting) {
                (true, _) => TICK,
                (false, true) => MEMORY_CHECK_INTERVAL,
                (false, false) => interval.saturating_sub(last_check.elapsed()),
            };
            match poll(&mut fds, Timespec::try_from(timeout).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "poll");
                    return self.stop();
                }
            }
            let [cm_event, stop, kept] = fds.map(|fd| !fd.revents().is_empty());
            if stop {
                return;
            }
            if cm_event {
                self.handle_cm_event();
            }
            if keeping {
                let peers: Vec<_> = self.connections.lock().values().cloned().collect();
                peers.iter().for_each(|peer| peer.release_if_blocked(TICK));
            }
            if keeping || kept {
                keeping = self.dispatch.any_kept();
            }
            if self.dispatch.take_check_request() || waiting {
                self.end_marked_connections();
                waiting = self.resume_deferred();
            }
            if last_check.elapsed() >= interval {
                self.check_progress(last_check.elapsed().min(2 * interval));
                last_check = Instant::now();
                waiting |= self.resume_deferred();
            }
        }
    }

    /// Interval of the checks whether a time is over.
    fn interval(&self) -> Duration {
        let Options { idle, stall, .. } = self.options;
        (idle.unwrap_or(stall).min(stall) / 4).clamp(MEMORY_CHECK_INTERVAL, MAX_CHECK_INTERVAL)
    }

    /// Handles one event of the connection manager, which may take long.
    fn handle_cm_event(&self) {
        match self.channel.next() {
            Ok(Some(event)) => self.handle_event(event),
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "connection manager"),
        }
    }

    fn handle_event(&self, event: CmEvent) {
        let CmEvent {
            kind, key, incoming, ..
        } = event;
        match (kind, incoming) {
            (kind::RDMA_CM_EVENT_CONNECT_REQUEST, Some(id)) => {
                let peer = id.peer();
                if self.connections.lock().len() >= self.options.connections && !self.make_room() {
                    if let Some(left_out) = self.log_limit.allows() {
                        tracing::warn!(%peer, left_out, "refused: there are too many connections");
                    }
                    return id.reject();
                }
                match self.accept(id, &event.private_data, event.reads, event.served_reads) {
                    Ok(()) => tracing::debug!(%peer, "accepted"),
                    Err(error) => {
                        if let Some(left_out) = self.log_limit.allows() {
                            tracing::warn!(%peer, %error, left_out, "not accepted");
                        }
                    }
                }
            }
            (kind::RDMA_CM_EVENT_DEVICE_REMOVAL, _) if key == self.listener.key() => {
                tracing::error!(address = %self.address(), "the device was removed");
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
            ) => self.remove(key),
            _ => {}
        }
    }

    fn device(&self, id: &Id) -> io::Result<Arc<Device>> {
        let mut devices = self.devices.lock();
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
        // The peer states the number of Reads that it accepts. The number 0 counts as 1.
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
        engine.refuse(self.take_refused(address.ip()));
        let offered = self.options.private_data();
        let mut endpoint = Endpoint::new(engine, &self.pool, offered);
        // One receive more than credits, because a receive is posted before the reply that makes
        // room for it is sent. Further receives are for replies to backward calls.
        let receives = self.options.credits + 1 + self.options.backward.max(1);
        let account = self.shares.account(address.ip());
        let messages = self.charge_messages(
            &account,
            Endpoint::footprint(&offered, receives, self.options.credits),
        )?;
        let waits = Arc::clone(&self.dispatch);
        endpoint.charge(&account, messages, move || waits.request_check());
        endpoint.attach(Link::new(id, device, sends, receives)?, receives, sends);
        let ours = endpoint.private_data(limits.invalidates);
        let theirs = PrivateData::find(private_data).unwrap_or_default();
        // The first call may arrive before the event of the established connection.
        endpoint.connected(Terms::agreed(&ours, &theirs));
        let link = match endpoint.link().cloned() {
            Some(link) if !endpoint.broken() => link,
            // There was no memory for the messages that the peer may send.
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
            account,
            stuck: AtomicU64::new(0),
            must_end: AtomicBool::new(false),
        });
        let holder: Weak<dyn Holder> = Arc::<Peer>::downgrade(&peer);
        self.shares.watch(holder);
        let _held = peer.endpoint.lock();
        self.connections.lock().insert(key, Arc::clone(&peer));
        let added = self.dispatch.add(key, link.fd());
        let accepted = added.and_then(|()| link.accept(&ours.emit(), reads, served_reads.min(limits.reads)));
        drop((_held, link));
        accepted.inspect_err(|_| self.remove(key))
    }

    /// Memory for the messages of a connection. Another connection may be ended to make room for
    /// it.
    fn charge_messages(&self, account: &Account, bytes: u64) -> io::Result<Charge> {
        if let Some(charge) = account.take(bytes) {
            return Ok(charge);
        }
        let _wanted = account.want(bytes);
        self.shares.end_stuck(STUCK);
        self.end_marked_connections();
        account
            .take(bytes)
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Transactions of this client that broke connections.
    fn take_refused(&self, address: IpAddr) -> Vec<u32> {
        let mut refused = self.refused.lock();
        let place = refused.iter().position(|(of, _)| *of == address);
        let found = place.and_then(|place| refused.remove(place));
        found.map(|(_, xids)| xids).unwrap_or_default()
    }

    /// Ends one connection to make room for another.
    fn make_room(&self) -> bool {
        let each = |(key, peer): (&u64, &Arc<Peer>)| {
            // If another thread holds the lock, that thread works for the connection.
            let endpoint = peer.endpoint.try_lock();
            Candidate {
                address: peer.address.ip(),
                served: endpoint.as_ref().is_none_or(|endpoint| endpoint.served()),
                last_message: endpoint.and_then(|endpoint| endpoint.last_activity()),
                key: *key,
            }
        };
        let one = select_for_eviction(self.connections.lock().iter().map(each));
        let Some(key) = one else { return false };
        self.end(key, "there are too many connections");
        true
    }

    /// Ends connections that take too long, `elapsed` after the last check. Otherwise a peer that
    /// reads nothing would hold the memory of its replies.
    fn check_progress(&self, elapsed: Duration) {
        let Options { idle, stall, .. } = self.options;
        let overdue = |(key, peer): (&u64, &Arc<Peer>)| {
            // If another thread holds the lock, the connection makes progress.
            let ages = peer.endpoint.try_lock()?.check_progress(elapsed);
            peer.stuck.store(ages.stuck.as_millis() as u64, Relaxed);
            let why = if ages.stuck >= stall {
                "it does not receive what the server sends"
            } else if ages.unused && ages.idle >= stall {
                "it makes no call"
            } else if idle.is_some_and(|idle| ages.idle >= idle) && peer.waiting.lock().is_empty() {
                "it is idle"
            } else {
                return None;
            };
            Some((*key, why))
        };
        let overdue: Vec<_> = self.connections.lock().iter().filter_map(overdue).collect();
        for (key, why) in overdue {
            self.end(key, why);
        }
        self.shares.end_stuck(STUCK);
        self.end_marked_connections();
    }

    fn end_marked_connections(&self) {
        let marked = |(key, peer): (&u64, &Arc<Peer>)| peer.must_end.load(Relaxed).then_some(*key);
        let keys: Vec<_> = self.connections.lock().iter().filter_map(marked).collect();
        for key in keys {
            self.end(key, "others wait for the memory that it holds");
        }
    }

    /// Continues calls that waited for memory, as far as there is memory. Returns whether calls
    /// still wait.
    fn resume_deferred(&self) -> bool {
        if !self.shares.wanted() {
            return false;
        }
        let deferred = std::mem::take(&mut *self.deferred.lock());
        for (mut job, wanted) in deferred {
            job.reserved = job.peer.account.take(self.options.reply_memory);
            if job.reserved.is_some() || job.peer.endpoint.lock().broken() {
                self.dispatch.queue(job);
            } else {
                self.deferred.lock().push_back((job, wanted));
            }
        }
        let peers: Vec<_> = self.connections.lock().values().cloned().collect();
        let mut waiting = !self.deferred.lock().is_empty();
        for peer in peers {
            // If another thread holds the lock, the connection continues by itself, or still waits.
            let Some(mut endpoint) = peer.endpoint.try_lock() else {
                waiting = true;
                continue;
            };
            if endpoint.waits_for_memory() {
                endpoint.execute_actions();
                waiting |= endpoint.waits_for_memory();
            }
        }
        waiting
    }

    fn end(&self, key: u64, why: &'static str) {
        if let Some(peer) = self.connections.lock().get(&key)
            && let Some(left_out) = self.log_limit.allows()
        {
            tracing::warn!(peer = %peer.address, left_out, "connection ended: {why}");
        }
        // There is no disconnect first, because a peer that receives nothing would not receive it.
        self.remove(key);
    }

    fn remove(&self, key: u64) {
        let Some(peer) = self.connections.lock().remove(&key) else {
            return;
        };
        tracing::debug!(peer = %peer.address, "disconnected");
        let mut endpoint = peer.endpoint.lock();
        if let Some(link) = endpoint.link() {
            self.dispatch.remove(link.fd());
        }
        peer.ended(&mut endpoint);
        let xids: Vec<_> = endpoint.engine.refused().collect();
        let mut refused = self.refused.lock();
        if !xids.is_empty() {
            refused.retain(|(of, _)| *of != peer.address.ip());
            // The most recent transactions are the ones that clients repeat.
            if refused.len() >= REFUSED {
                refused.pop_front();
            }
            refused.push_back((peer.address.ip(), xids));
        }
    }
}
