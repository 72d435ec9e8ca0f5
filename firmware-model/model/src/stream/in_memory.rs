//! Connections whose bytes pass through memory, and how a TCP connection becomes one.

use super::descriptor::Descriptor;
use super::same_host::{Connection, Offer, Offers, SameHost, TcpEnd};
use super::{Ends, FullOperation, QpNumbers, Stream, StreamError, socket};
use crate::host::{Piece, PieceMut};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use std::mem;
use std::sync::Arc;

/// The memory that the ends of a TCP connection may share, up to full operation.
#[derive(Debug)]
pub(super) enum Prospect {
    /// There is none.
    None,
    /// Memory will be offered when the connection is established.
    Connecting(Arc<SameHost>),
    /// Memory was offered. The listener answers before its MPA Reply.
    Offered(Arc<SameHost>, Box<Offer>),
    /// The initiator may have offered memory, before its MPA Request.
    Accepted(Arc<SameHost>, Arc<Offers>),
    /// Both ends have the memory, for full operation.
    Agreed(Box<Connection>),
}

impl Prospect {
    /// The connection is established.
    pub(super) fn established(&mut self, end: TcpEnd) {
        if let Prospect::Connecting(same_host) = self {
            *self = match same_host.offer(end) {
                Some(offer) => Prospect::Offered(same_host.clone(), Box::new(offer)),
                None => Prospect::None,
            };
        }
    }

    /// Bytes have arrived by TCP: those of the initiator's Request come after its offer.
    #[inline]
    pub(super) fn bytes_arrived(&mut self, end: TcpEnd) {
        if let Prospect::Accepted(same_host, offers) = self {
            *self = match same_host.take_up(offers, end) {
                Some(connection) => Prospect::Agreed(Box::new(connection)),
                None => Prospect::None,
            };
        }
    }

    /// The memory that full operation uses, if both ends have it.
    ///
    /// # Errors
    /// The ends do not agree on that, so the connection is lost.
    pub(super) fn conclude(&mut self, end: TcpEnd) -> Result<Option<Box<Connection>>, Errno> {
        match mem::replace(self, Prospect::None) {
            Prospect::Agreed(connection) => Ok(Some(connection)),
            Prospect::Offered(same_host, offer) => Ok(same_host.conclude(*offer, end)?.map(Box::new)),
            _ => Ok(None),
        }
    }
}

/// A connection whose bytes pass through memory. TCP reports that the peer is gone.
#[derive(Debug)]
pub(super) struct InMemory {
    /// Absent after a reset, as is the socket.
    connection: Option<Box<Connection>>,
    socket: Option<Descriptor>,
    ends: Ends,
    /// TCP has reported the end of the connection, or an error.
    hung_up: bool,
}

const RESET: StreamError = StreamError::Closed(Errno::CONNRESET);

impl InMemory {
    /// Full operation begins, for a queue pair with these numbers.
    pub(super) fn enter(
        mut connection: Box<Connection>,
        socket: Option<Descriptor>,
        ends: Ends,
        qp: QpNumbers,
    ) -> FullOperation {
        let Ends { local, remote } = ends;
        tracing::debug!(%local, %remote, "this connection passes its bytes through memory");
        connection.bind(qp.id);
        let local_peer = connection.local_peer(qp.id);
        FullOperation {
            stream: Box::new(InMemory {
                connection: Some(connection),
                socket,
                ends,
                hung_up: false,
            }),
            local_peer: Some(local_peer),
            delays: false,
        }
    }

    #[inline]
    fn connection(&mut self) -> Result<&mut Connection, StreamError> {
        self.connection.as_deref_mut().ok_or(RESET)
    }

    /// Whether the peer still has the connection.
    ///
    /// # Errors
    /// `EPIPE`: the peer closed the connection without a mark in the memory. Otherwise TCP's error.
    fn check_peer(&self) -> Result<(), StreamError> {
        let connection = self.connection.as_ref().ok_or(RESET)?;
        if connection.is_left() {
            return Err(RESET);
        }
        match socket::peek(self.socket.as_ref().ok_or(RESET)?) {
            // The peer has finished sending, and has marked this in the memory.
            Ok(false) if connection.is_finished() => Ok(()),
            Ok(false) => Err(StreamError::Closed(Errno::PIPE)),
            // In full operation no bytes may arrive by TCP.
            Ok(true) => Err(StreamError::Closed(Errno::PROTO)),
            Err(StreamError::WouldBlock) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Stream for InMemory {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        if self.hung_up {
            self.check_peer()?;
        }
        self.connection()?.send(pieces)
    }

    #[inline]
    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        match self.connection()?.receive(into) {
            Err(StreamError::WouldBlock) => {}
            received => return received,
        }
        match self.peek()? {
            // They came in the meantime.
            true => self.connection()?.receive(into),
            false => Ok(0),
        }
    }

    #[inline]
    fn receive_short(&mut self, into: &mut [u8]) -> Option<usize> {
        self.connection().ok()?.receive_short(into)
    }

    #[inline]
    fn peek(&mut self) -> Result<bool, StreamError> {
        match self.connection()?.peek() {
            Err(StreamError::WouldBlock) if self.hung_up => {}
            known => return known,
        }
        // A peer that was killed leaves no mark in the memory.
        let Err(ended) = self.check_peer() else {
            return Err(StreamError::WouldBlock);
        };
        match self.connection()?.peek() {
            Err(StreamError::WouldBlock) => match ended {
                StreamError::Closed(Errno::PIPE) => Ok(false),
                ended => Err(ended),
            },
            known => known,
        }
    }

    #[inline]
    fn has_input(&mut self) -> Option<bool> {
        let nothing = !self.hung_up && self.connection().ok()?.peek() == Err(StreamError::WouldBlock);
        Some(!nothing)
    }

    #[inline]
    fn has_room(&mut self) -> bool {
        self.connection().is_ok_and(Connection::has_room)
    }

    /// It is in full operation already.
    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        FullOperation::of(self)
    }

    fn note_hang_up(&mut self) {
        self.hung_up = true;
    }

    fn finish(&mut self) {
        if let Ok(connection) = self.connection() {
            connection.finish();
        }
        if let Some(socket) = &self.socket {
            // The call fails only if the connection is closed already.
            let _ = shutdown(socket, Shutdown::Write);
        }
    }

    fn reset(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.reset();
        }
        if let Some(socket) = self.socket.take() {
            socket::reset(socket);
        }
    }

    /// There are no packets: the longest ULPDU is best.
    fn mss(&self) -> u32 {
        u32::MAX
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Ok(true)
    }

    /// Sent bytes stay in the memory that the peer has mapped, even if this process ends.
    fn unacknowledged(&self) -> u32 {
        0
    }

    fn ends(&self) -> Ends {
        self.ends
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }
}
