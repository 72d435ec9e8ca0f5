//! A network that reports when messages pass on the connections of queue pairs, to the observer of
//! the process. Without an observer it is not there, and costs nothing.

#[cfg(test)]
mod tests;

use crate::frames::{Follower, Message};
use crate::host::{Piece, PieceMut};
use crate::stream::datagram::{DatagramOptions, DatagramSocket};
use crate::stream::same_host::{Neighbour, Processors};
use crate::stream::{Answers, Listener, Network, Stream, StreamError};
use crate::time::Nanos;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use urnic_wire::rdmap::Opcode;

/// A network, and who is told.
#[derive(Debug)]
pub(crate) struct Timed {
    network: Arc<dyn Network>,
    observer: &'static dyn Observer,
}

#[derive(Debug)]
struct TimedListener {
    listener: Box<dyn Listener>,
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
        Ok(Box::new(TimedListener {
            listener: self.network.listen(local, backlog, traffic_class, ipv6_only)?,
            observer: self.observer,
        }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.network.bind_datagrams(local, options)
    }
}

impl Listener for TimedListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        let accepted = self.listener.accept()?;
        Ok(accepted.map(|stream| -> Box<dyn Stream> { Box::new(TimedStream::new(stream, self.observer)) }))
    }

    fn local(&self) -> SocketAddr {
        self.listener.local()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.listener.descriptor()
    }
}

// Who is told of messages.

/// An RDMAP message that passed the connection of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Passed {
    /// The queue pair's number for programs.
    pub qpn: u32,
    /// It was sent; otherwise it was received, and is placed.
    pub sent: bool,
    /// Its kind.
    pub opcode: Opcode,
    /// Bytes behind the headers of DDP.
    pub bytes: u64,
    /// When the first segment passed.
    pub first: Nanos,
    /// When the last segment had passed.
    pub last: Nanos,
}

/// Is told of messages. The thread that tells has locks of the device: an observer must not call
/// the device.
pub trait Observer: Send + Sync + Debug {
    /// A message has passed.
    fn passed(&self, message: Passed);
}

static OBSERVER: OnceLock<&'static dyn Observer> = OnceLock::new();

/// Lets devices of this process that are started from now on tell `observer`. The first one counts.
pub fn observe(observer: &'static dyn Observer) {
    let _ = OBSERVER.set(observer);
}

/// The observer of the process, if it has one.
pub(crate) fn observer() -> Option<&'static dyn Observer> {
    OBSERVER.get().copied()
}

// A connection whose messages are reported.

/// A connection, and who is told what passes.
#[derive(Debug)]
struct TimedStream {
    stream: Box<dyn Stream>,
    observer: &'static dyn Observer,
    /// The queue pair's number for programs, in full operation.
    qpn: Option<u32>,
    sends: Follower,
    receives: Follower,
}

impl TimedStream {
    fn new(stream: Box<dyn Stream>, observer: &'static dyn Observer) -> TimedStream {
        TimedStream {
            stream,
            observer,
            qpn: None,
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

    /// These pieces were offered at `began`, and `taken` bytes of them were sent.
    fn sent(&mut self, pieces: &[Piece<'_>], taken: usize, began: Nanos) {
        // Streams in memory have no markers.
        let marked = self.receives.requests_markers() && !self.stream.is_in_memory();
        let mut report = self.report(true);
        self.sends
            .pass(pieces.iter().copied(), taken, marked, began, &mut report);
    }

    fn received<'a>(&mut self, pieces: impl Iterator<Item = Piece<'a>>, taken: usize) {
        let marked = self.sends.requests_markers() && !self.stream.is_in_memory();
        let mut report = self.report(false);
        self.receives
            .pass(pieces, taken, marked, Nanos::monotonic(), &mut report);
    }
}

impl Stream for TimedStream {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let began = Nanos::monotonic();
        let taken = self.stream.send(pieces)?;
        self.sent(pieces, taken, began);
        Ok(taken)
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let began = Nanos::monotonic();
        let taken = self.stream.send_bytes(bytes)?;
        self.sent(&[Piece::of(bytes)], taken, began);
        Ok(taken)
    }

    fn has_room(&mut self) -> bool {
        self.stream.has_room()
    }

    fn is_cut(&self) -> bool {
        self.stream.is_cut()
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let n = self.stream.receive(into)?;
        self.received(into.iter().map(|piece| piece.filled(piece.len())), n);
        Ok(n)
    }

    fn receive_bytes(&mut self, into: &mut [u8]) -> Result<usize, StreamError> {
        let n = self.stream.receive_bytes(into)?;
        self.received([Piece::of(into)].into_iter(), n);
        Ok(n)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        self.stream.peek()
    }

    fn enter_full_operation(&mut self, qid: u32) -> Result<(), Errno> {
        self.stream.enter_full_operation(qid)
    }

    fn note_number(&mut self, qpn: u32) {
        self.qpn = Some(qpn);
    }

    fn is_in_memory(&self) -> bool {
        self.stream.is_in_memory()
    }

    fn neighbour(&mut self, qid: u32) -> Option<Neighbour> {
        self.stream.neighbour(qid)
    }

    fn processors(&self) -> Option<Processors> {
        self.stream.processors()
    }

    fn delays(&self) -> bool {
        self.stream.delays()
    }

    fn advance(&mut self, now: Nanos) -> Option<Nanos> {
        self.stream.advance(now)
    }

    fn note_hang_up(&mut self) {
        self.stream.note_hang_up();
    }

    fn finish(&mut self) {
        self.stream.finish();
    }

    fn reset(&mut self) {
        self.stream.reset();
    }

    fn mss(&self) -> u32 {
        self.stream.mss()
    }

    fn established(&mut self) -> Result<bool, Errno> {
        self.stream.established()
    }

    fn unacknowledged(&self) -> u32 {
        self.stream.unacknowledged()
    }

    fn answers(&self) -> Option<Answers> {
        self.stream.answers()
    }

    fn expect_answers(&mut self, within: Duration) {
        self.stream.expect_answers(within);
    }

    fn ask_peer(&mut self, interval: Option<Duration>) {
        self.stream.ask_peer(interval);
    }

    fn local(&self) -> SocketAddr {
        self.stream.local()
    }

    fn remote(&self) -> SocketAddr {
        self.stream.remote()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.descriptor()
    }
}
