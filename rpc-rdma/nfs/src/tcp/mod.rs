//! RPC over TCP. The data of a WRITE is read from the socket into memory of the pool, and the data
//! of a READ goes to the socket from the memory of the tree.
//!
//! Connections, threads, and memory for calls and replies are limited. Each client, by address, has
//! a share of them. Each message must arrive, or be received by the client, within a time.

mod connection;
mod limits;
mod progress;
pub mod record;

use crate::memory::Pool;
use crate::service::Service;
use connection::{Common, Connection};
pub use limits::Limits;
pub(crate) use record::{append, fragment, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use urnic_rpc_rdma_verbs::eviction::{LogLimit, select_for_eviction};
use urnic_rpc_rdma_verbs::shares::{Holder, Shares};

/// Maximum threads of all connections together, beyond the first thread of each.
const HELPERS: u64 = 256;

/// Pause after a failure for lack of descriptors or threads, so that retries use little processor
/// time.
const PAUSE: Duration = Duration::from_millis(10);

/// Time without progress after which the server ends a connection whose memory other connections
/// wait for.
const STUCK: Duration = Duration::from_secs(2);

/// Accepts connections until the listener fails. Each connection has its own threads. The clients
/// share `memory`, a number of bytes of `pool`.
///
/// # Errors
/// A permanent error of the listener.
pub fn serve(
    listener: &TcpListener,
    service: &Arc<dyn Service>,
    pool: &Pool,
    memory: &Shares,
    limits: Limits,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let common = Common {
        service: service.clone(),
        pool: pool.clone(),
        limits,
    };
    let mut connections = Connections {
        open: Vec::new(),
        common,
        memory: memory.clone(),
        helpers: Shares::new(HELPERS),
        log_limit: LogLimit::default(),
    };
    let mut last_check = Instant::now();
    loop {
        let left = limits.interval().saturating_sub(last_check.elapsed());
        if left.is_zero() {
            // At most two intervals, also if the machine was suspended.
            connections.check(last_check.elapsed().min(2 * limits.interval()));
            last_check = Instant::now();
            continue;
        }
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut ready, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        match listener.accept() {
            Ok((stream, peer)) => connections.add(stream, peer),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if is_temporary(&error) => connections.make_room_after(&error),
            Err(error) => return Err(error),
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, InvalidInput, NotConnected};
    error.raw_os_error().is_some() && !matches!(error.kind(), InvalidInput | NotConnected | BrokenPipe)
}

/// All connections.
struct Connections {
    open: Vec<Weak<Connection>>,
    common: Common,
    memory: Shares,
    helpers: Shares,
    log_limit: LogLimit,
}

impl Connections {
    fn add(&mut self, stream: TcpStream, peer: SocketAddr) {
        self.open.retain(|connection| connection.strong_count() > 0);
        if self.open.len() >= self.common.limits.connections {
            self.make_room("there are too many connections");
        }
        let (memory, helpers) = (self.memory.account(peer.ip()), self.helpers.account(peer.ip()));
        let connection = match Connection::new(stream, peer, self.common.clone(), memory, helpers) {
            Ok(connection) => Arc::new(connection),
            Err(error) => return tracing::debug!(%peer, %error, "the new connection ended at once"),
        };
        tracing::info!(%peer, "connected");
        if !connection.start_thread() {
            self.make_room_after(&io::Error::other("no thread can be started"));
            if !connection.start_thread() {
                return;
            }
        }
        let holder: Weak<dyn Holder> = Arc::<Connection>::downgrade(&connection);
        self.memory.watch(holder);
        self.open.push(Arc::downgrade(&connection));
    }

    /// Makes room after a failure, usually for lack of descriptors.
    fn make_room_after(&mut self, error: &io::Error) {
        self.open.retain(|connection| connection.strong_count() > 0);
        self.make_room(&error.to_string());
        std::thread::sleep(PAUSE);
    }

    /// Ends one connection to make room for another.
    fn make_room(&mut self, why: &str) {
        let open = self.open.iter().enumerate();
        let each = open.filter_map(|(index, connection)| Some(connection.upgrade()?.candidate(index)));
        let Some(index) = select_for_eviction(each) else {
            return;
        };
        // The order of the list is that of acceptance, and stays so.
        if let Some(connection) = self.open.remove(index).upgrade() {
            if let Some(left_out) = self.log_limit.allows() {
                tracing::warn!(peer = %connection.peer(), left_out, "connection ended: {why}");
            }
            connection.end();
        }
    }

    /// Ends connections that take too long. `elapsed` is the time since the last check.
    fn check(&mut self, elapsed: Duration) {
        self.open.retain(|connection| connection.strong_count() > 0);
        for connection in self.open.iter().filter_map(Weak::upgrade) {
            if let Some(why) = connection.overdue(elapsed) {
                tracing::info!(peer = %connection.peer(), "connection ended: {why}");
                connection.end();
            }
        }
        let ended = self.memory.end_stuck(STUCK);
        if ended > 0
            && let Some(left_out) = self.log_limit.allows()
        {
            tracing::warn!(
                ended,
                left_out,
                "connections ended: others wait for the memory that they hold"
            );
        }
    }
}

#[cfg(test)]
mod tests;
