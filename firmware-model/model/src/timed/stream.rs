//! A connection whose messages are reported.

use super::observer::{Observer, Passed};
use crate::frames::{Follower, Message};
use crate::host::{Piece, PieceMut};
use crate::stream::same_host::{Neighbour, Processors};
use crate::stream::{Answers, Stream, StreamError};
use crate::time::Nanos;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::time::Duration;

/// A connection, and who is told what passes.
#[derive(Debug)]
pub(super) struct TimedStream {
    stream: Box<dyn Stream>,
    observer: &'static dyn Observer,
    /// The queue pair's number for programs, in full operation.
    qpn: Option<u32>,
    sends: Follower,
    receives: Follower,
}

impl TimedStream {
    pub(super) fn new(stream: Box<dyn Stream>, observer: &'static dyn Observer) -> TimedStream {
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
