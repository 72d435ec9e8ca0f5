//! Backward calls: those of a server to its clients over the clients' connections (RFC 8167).

use crate::error::Error;
use crate::peer::{Peer, Waiting};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use urnic_rpc_rdma::engine::{self, CallError};

/// The means to call a client ([`Request::back`](crate::Request::back)). It is valid as long as the
/// client's connection.
#[derive(Clone)]
pub struct Backchannel(pub(crate) Arc<Peer>);

impl fmt::Debug for Backchannel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("Backchannel").field(&self.0.address).finish()
    }
}

impl Backchannel {
    /// Address of the client.
    pub fn peer(&self) -> SocketAddr {
        self.0.address
    }

    /// A new transaction id for the next call to this client.
    pub fn xid(&self) -> u32 {
        self.0.xid.fetch_add(1, Relaxed)
    }

    /// Calls the client and waits for its answer. Both are RPC messages from the xid that fit into
    /// one Send, because there are no chunks in this direction. The upper layer must know that the
    /// client accepts calls (RFC 8167 §6), as NFSv4.1 does after CREATE_SESSION. Other clients
    /// never answer.
    ///
    /// The calling thread waits: a service that waits here takes one of
    /// [`Options::threads`](crate::Options::threads) for as long.
    ///
    /// # Errors
    /// The call is invalid, too long, or was refused; [`Error::Disconnected`] if its connection
    /// ends first; [`CallError::Cancelled`] if there is no answer within `timeout`, or if an
    /// earlier call has none yet.
    pub fn call(&self, message: Vec<u8>, timeout: Duration) -> Result<Vec<u8>, Error> {
        let peer = &self.0;
        let notification =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let notification = Arc::new(notification);
        let mut endpoint = peer.endpoint.lock();
        let Some(link) = endpoint.link().cloned() else {
            return Err(Error::Disconnected);
        };
        endpoint.takes_calls();
        if endpoint.engine.abandoned() > 0 {
            return Err(CallError::Cancelled.into());
        }
        let xid = endpoint.engine.call(engine::Call {
            message: message.into(),
            arguments: Vec::new(),
            results: Vec::new(),
            // The client must keep to this limit, because there is no memory for a longer reply.
            max_reply: 0,
        })?;
        peer.waiting
            .lock()
            .insert(xid, Waiting::notified_by(&notification));
        // The connection returns to all threads. The thread that receives the event of the answer
        // takes the answer.
        peer.give_back(&mut endpoint);
        let end = Instant::now().checked_add(timeout);
        // All threads of the server may wait in such calls, so each polls for itself.
        loop {
            endpoint.execute_actions();
            endpoint.progress();
            let ended = endpoint.ended();
            let late = end.is_some_and(|end| end <= Instant::now());
            if ended || late {
                endpoint.engine.cancel(xid);
                endpoint.execute_actions();
            }
            peer.queue_all(&mut endpoint);
            let mut others = peer.waiting.lock();
            if let Some(answer) = others.get_mut(&xid).and_then(Waiting::answer) {
                others.remove(&xid);
                return match answer {
                    // The connection may have ended since the last poll.
                    Err(CallError::Cancelled) if ended || !late => Err(Error::Disconnected),
                    other => other.map_err(Error::from),
                };
            }
            drop(others);
            let more = endpoint.arm();
            drop(endpoint);
            let mut fds = [
                PollFd::from_borrowed_fd(link.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(notification.as_fd(), PollFlags::IN),
            ];
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            // An interruption is a turn without events.
            if !more {
                let _ = poll(&mut fds, left.as_ref());
            }
            endpoint = peer.endpoint.lock();
        }
    }
}
