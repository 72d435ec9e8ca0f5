//! Calls of a server's to its clients, backward over the connections that those made (RFC 8167).

use crate::error::Error;
use crate::lock::lock;
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

/// The way to a client that called, [`Request::back`](crate::Request::back). It may be kept, and is of use for as long as the connection lasts.
#[derive(Clone)]
pub struct Caller(pub(crate) Arc<Peer>);

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("Caller").field(&self.0.address).finish()
    }
}

impl Caller {
    /// Who it leads to.
    pub fn peer(&self) -> SocketAddr {
        self.0.address
    }

    /// A transaction for the next call to this client.
    pub fn xid(&self) -> u32 {
        self.0.xid.fetch_add(1, Relaxed)
    }

    /// Calls the client and waits for its answer: RPC messages, from the xid on, which fit into Sends, since there are no chunks in this direction. Of the client's
    /// program it must be known that it takes calls (RFC 8167 §6): NFSv4.1's says so by CREATE_SESSION. One that takes none never answers.
    ///
    /// The calling thread waits: a service that waits here takes one of [`Options::threads`](crate::Options::threads) for as long.
    ///
    /// # Errors
    /// The call makes no sense, is too long or was refused; [`Error::Gone`] when its connection ends first; [`CallError::Cancelled`] when there was no
    /// answer for as long as `patience`, or a call before had none and has none still.
    pub fn call(&self, message: Vec<u8>, patience: Duration) -> Result<Vec<u8>, Error> {
        let peer = &self.0;
        let told = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let told = Arc::new(told);
        let mut endpoint = lock(&peer.endpoint);
        let Some(link) = endpoint.link().cloned() else {
            return Err(Error::Gone);
        };
        endpoint.takes_calls();
        if endpoint.engine.abandoned() > 0 {
            return Err(CallError::Cancelled.into());
        }
        let xid = endpoint.engine.call(engine::Call {
            message: message.into(),
            arguments: Vec::new(),
            results: Vec::new(),
            // The client's to keep to: there is no memory to offer for a longer one.
            max_reply: 0,
        })?;
        lock(&peer.waiting).insert(xid, Waiting::told_by(&told));
        // Nobody keeps the connection that is called over: whoever is told of the answer takes it.
        peer.give_back(&mut endpoint);
        let end = Instant::now().checked_add(patience);
        // The server's threads may all be in calls like this one: each looks for itself.
        loop {
            endpoint.carry();
            endpoint.progress();
            let gone = endpoint.ended();
            let late = end.is_some_and(|end| end <= Instant::now());
            if gone || late {
                endpoint.engine.cancel(xid);
                endpoint.carry();
            }
            peer.leave_all(&mut endpoint);
            let mut others = lock(&peer.waiting);
            if let Some(answer) = others.get_mut(&xid).and_then(Waiting::answer) {
                others.remove(&xid);
                return match answer {
                    // It may have ended since that look.
                    Err(CallError::Cancelled) if gone || !late => Err(Error::Gone),
                    other => other.map_err(Error::from),
                };
            }
            drop(others);
            let more = endpoint.rest();
            drop(endpoint);
            let mut fds = [
                PollFd::from_borrowed_fd(link.fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(told.as_fd(), PollFlags::IN),
            ];
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            // An interruption is a turn with nothing in it.
            if !more {
                let _ = poll(&mut fds, left.as_ref());
            }
            endpoint = lock(&peer.endpoint);
        }
    }
}
