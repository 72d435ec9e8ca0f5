//! A network that reports when messages pass on the connections of queue pairs, to the observer of
//! the process. Without an observer it is not there, and costs nothing.

#[cfg(test)]
mod tests;

use crate::frames::{Follower, Message};
use crate::host::{Piece, PieceMut};
use crate::stream::datagram::{DatagramOptions, DatagramSocket};
use crate::stream::wrapper::{WrappedListener, Wrapper};
use crate::stream::{Listener, Network, QpNumbers, Stream, StreamError};
use crate::time::Nanos;
use rustix::io::Errno;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use urnic_wire::rdmap::Opcode;

/// A network and its observer.
#[derive(Debug)]
pub(crate) struct Timed {
    network: Arc<dyn Network>,
    observer: &'static dyn Observer,
}

impl Timed {
    pub(crate) fn new(network: Arc<dyn Network>, observer: &'static dyn Observer) -> Timed {
        Timed { network, observer }
    }
}

impl Network for Timed {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let stream = self.network.connect(remote, local, traffic_class)?;
        Ok(Box::new(TimedStream::new(stream, self.observer)))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let listener = self.network.listen(local, backlog, traffic_class, ipv6_only)?;
        let observer = self.observer;
        let wrap = move |stream| -> Box<dyn Stream> { Box::new(TimedStream::new(stream, observer)) };
        Ok(Box::new(WrappedListener { listener, wrap }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.network.bind_datagrams(local, options)
    }
}

// The observer of messages.

/// An RDMAP message that passed the connection of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// The queue pair's number for programs.
    pub qpn: u32,
    /// It was sent; otherwise it was received, and is placed.
    pub sent: bool,
    /// The kind of the message.
    pub opcode: Opcode,
    /// Bytes after the headers of DDP.
    pub bytes: u64,
    /// When the first segment passed.
    pub first: Nanos,
    /// When the last segment had passed.
    pub last: Nanos,
}

/// Gets messages. The calling thread holds locks of the device: an observer must not call the
/// device.
pub trait Observer: Send + Sync + Debug {
    /// A message has passed.
    fn passed(&self, message: Passed);
}

static OBSERVER: OnceLock<&'static dyn Observer> = OnceLock::new();

/// Sets the observer of devices of this process that start from now on. Only the first call has an
/// effect.
pub fn observe(observer: &'static dyn Observer) {
    let _ = OBSERVER.set(observer);
}

/// The observer of the process, if it has one.
pub(crate) fn observer() -> Option<&'static dyn Observer> {
    OBSERVER.get().copied()
}

// A connection whose messages are reported.

/// A connection and its observer.
#[derive(Debug)]
struct TimedStream {
    stream: Box<dyn Stream>,
    observer: &'static dyn Observer,
    /// The queue pair's number for programs, in full operation.
    qpn: Option<u32>,
    /// In full operation: bytes pass through memory, and without markers.
    in_memory: bool,
    sends: Follower,
    receives: Follower,
}

impl TimedStream {
    fn new(stream: Box<dyn Stream>, observer: &'static dyn Observer) -> TimedStream {
        TimedStream {
            stream,
            observer,
            qpn: None,
            in_memory: false,
            sends: Follower::new(),
            receives: Follower::new(),
        }
    }

    /// Reports the messages that ended with what passed.
    fn report(&self, sent: bool) -> impl FnMut(Message) + use<> {
        let (observer, qpn) = (self.observer, self.qpn);
        move |message| {
            if let Some(qpn) = qpn {
                observer.passed(Passed {
                    qpn,
                    sent,
                    opcode: message.opcode,
                    bytes: message.bytes,
                    first: message.began,
                    last: Nanos::monotonic(),
                });
            }
        }
    }

    /// Whether what passes has markers: the other direction's follower has seen the request.
    fn is_marked(&self, requests: &Follower) -> bool {
        requests.requests_markers() && !self.in_memory
    }
}

impl Wrapper for TimedStream {
    fn inner(&self) -> &dyn Stream {
        &*self.stream
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Stream> {
        &mut self.stream
    }

    fn note_full_operation(&mut self, qp: QpNumbers, in_memory: bool) {
        (self.qpn, self.in_memory) = (Some(qp.label), in_memory);
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let began = Nanos::monotonic();
        let taken = self.stream.send(pieces)?;
        let (marked, mut report) = (self.is_marked(&self.receives), self.report(true));
        let pieces = pieces.iter().copied();
        self.sends.pass(pieces, taken, marked, began, &mut report);
        Ok(taken)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let n = self.stream.receive(into)?;
        let (marked, mut report) = (self.is_marked(&self.sends), self.report(false));
        let pieces = into.iter().map(|piece| piece.filled(piece.len()));
        self.receives
            .pass(pieces, n, marked, Nanos::monotonic(), &mut report);
        Ok(n)
    }
}
