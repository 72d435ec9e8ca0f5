//! What a TCP connection has beside it: a way through memory, or the prospect of one.

use super::StreamError;
use super::descriptor::Descriptor;
use super::same_host::{Connection, Neighbour, Offer, Offers, Processors, SameHost, TcpEnd};
use super::socket;
use crate::host::{Piece, PieceMut};
use rustix::io::Errno;
use std::mem;
use std::sync::Arc;

/// A way through memory, at each stage of a connection.
#[derive(Debug)]
pub(super) enum Beside {
    /// There is none.
    Nothing,
    /// Memory will be offered when the connection is established.
    Connecting(Arc<SameHost>),
    /// Memory was offered. The listener answers before its MPA Reply.
    Offered(Arc<SameHost>, Box<Offer>),
    /// The initiator may have offered memory, before its MPA Request.
    Accepted(Arc<SameHost>, Arc<Offers>),
    /// Both ends have the memory, for full operation.
    Agreed(Box<Connection>),
    /// Full operation: all bytes pass through memory.
    Instead(InMemory),
}

/// A connection whose bytes pass through memory. TCP reports that the peer is gone.
#[derive(Debug)]
pub(super) struct InMemory {
    connection: Box<Connection>,
    /// TCP has reported the end of the connection, or an error.
    hung_up: bool,
}

impl Beside {
    /// The connection is established.
    pub(super) fn established(&mut self, end: TcpEnd) {
        if let Beside::Connecting(same_host) = self {
            *self = match same_host.offer(end) {
                Some(offer) => Beside::Offered(same_host.clone(), Box::new(offer)),
                None => Beside::Nothing,
            };
        }
    }

    /// Bytes have arrived by TCP: those of the initiator's Request come behind its offer.
    #[inline]
    pub(super) fn bytes_arrived(&mut self, end: TcpEnd) {
        if let Beside::Accepted(same_host, offers) = self {
            *self = match same_host.take_up(offers, end) {
                Some(connection) => Beside::Agreed(Box::new(connection)),
                None => Beside::Nothing,
            };
        }
    }

    /// As [`Stream::enter_full_operation`](super::Stream::enter_full_operation).
    pub(super) fn enter_full_operation(&mut self, qid: u32, end: TcpEnd) -> Result<(), Errno> {
        let connection = match mem::replace(self, Beside::Nothing) {
            Beside::Agreed(connection) => connection,
            Beside::Offered(same_host, offer) => match same_host.conclude(*offer, end)? {
                Some(connection) => Box::new(connection),
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        let TcpEnd { local, remote, .. } = end;
        tracing::debug!(%local, %remote, "this connection passes its bytes through memory");
        connection.bind(qid);
        *self = Beside::Instead(InMemory {
            connection,
            hung_up: false,
        });
        Ok(())
    }
}

impl InMemory {
    /// As [`Stream::send`](super::Stream::send).
    pub(super) fn send(
        &mut self,
        pieces: &[Piece<'_>],
        socket: Option<&Descriptor>,
    ) -> Result<usize, StreamError> {
        if self.hung_up {
            self.check_peer(socket)?;
        }
        self.connection.send(pieces)
    }

    /// As [`Stream::has_room`](super::Stream::has_room).
    pub(super) fn has_room(&mut self) -> bool {
        self.connection.has_room()
    }

    /// As [`Stream::is_cut`](super::Stream::is_cut).
    pub(super) fn is_cut(&self) -> bool {
        self.connection.is_cut()
    }

    /// As [`Stream::receive`](super::Stream::receive).
    #[inline]
    pub(super) fn receive(
        &mut self,
        into: &mut [PieceMut<'_>],
        socket: Option<&Descriptor>,
    ) -> Result<usize, StreamError> {
        match self.connection.receive(into) {
            Err(StreamError::WouldBlock) => {}
            received => return received,
        }
        match self.peek(socket)? {
            // They came in the meantime.
            true => self.connection.receive(into),
            false => Ok(0),
        }
    }

    /// As [`Stream::is_quiet`](super::Stream::is_quiet).
    #[inline]
    pub(super) fn is_quiet(&mut self) -> bool {
        !self.hung_up && self.connection.peek() == Err(StreamError::WouldBlock)
    }

    /// As [`Stream::peek`](super::Stream::peek).
    #[inline]
    pub(super) fn peek(&mut self, socket: Option<&Descriptor>) -> Result<bool, StreamError> {
        match self.connection.peek() {
            Err(StreamError::WouldBlock) if self.hung_up => {}
            known => return known,
        }
        // A peer that was killed leaves no mark in the memory.
        let Err(ended) = self.check_peer(socket) else {
            return Err(StreamError::WouldBlock);
        };
        match self.connection.peek() {
            Err(StreamError::WouldBlock) => match ended {
                StreamError::Closed(Errno::PIPE) => Ok(false),
                ended => Err(ended),
            },
            known => known,
        }
    }

    /// Whether the peer still has the connection.
    ///
    /// # Errors
    /// `EPIPE`: it ended without a word. Otherwise TCP's error.
    fn check_peer(&self, socket: Option<&Descriptor>) -> Result<(), StreamError> {
        if self.connection.is_left() {
            return Err(StreamError::Closed(Errno::CONNRESET));
        }
        let socket = socket.ok_or(StreamError::Closed(Errno::CONNRESET))?;
        match socket::peek(socket) {
            // It sends no more, and said so in the memory.
            Ok(false) if self.connection.is_finished() => Ok(()),
            Ok(false) => Err(StreamError::Closed(Errno::PIPE)),
            // Nothing belongs there.
            Ok(true) => Err(StreamError::Closed(Errno::PROTO)),
            Err(StreamError::WouldBlock) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// As [`Stream::note_hang_up`](super::Stream::note_hang_up).
    pub(super) fn note_hang_up(&mut self) {
        self.hung_up = true;
    }

    /// The connection ends without order as soon as this value is dropped.
    pub(super) fn reset(&mut self) {
        self.connection.reset();
    }

    /// As [`Stream::neighbour`](super::Stream::neighbour).
    pub(super) fn neighbour(&mut self, qid: u32) -> Neighbour {
        self.connection.neighbour(qid)
    }

    /// As [`Stream::processors`](super::Stream::processors).
    pub(super) fn processors(&self) -> Processors {
        self.connection.processors()
    }

    /// As [`Stream::finish`](super::Stream::finish).
    pub(super) fn finish(&mut self) {
        self.connection.finish();
    }
}
