//! Both directions of a connection in shared memory.

use super::introduction::Introduction;
use super::layout::Direction;
use super::local_peer::LocalPeer;
use super::notification::{PeerPage, Slot};
use super::ring::{RingReceiver, RingSender};
use crate::host::{Piece, PieceMut, SharedMemory};
use crate::stream::StreamError;
use rustix::io::Errno;
use std::sync::Arc;

/// An end of a connection.
#[derive(Debug)]
pub(in crate::stream) struct Connection {
    memory: Arc<SharedMemory>,
    outgoing: Direction,
    sender: RingSender,
    receiver: RingReceiver,
    slot: Slot,
    peer: Arc<PeerPage>,
    /// The connection's place in the peer's notification page.
    peer_slot: u32,
    /// Until the queue pair has it.
    introduction: Option<Introduction>,
    /// It ends without order.
    is_reset: bool,
}

impl Connection {
    pub(super) fn new(
        memory: SharedMemory,
        outgoing: Direction,
        slot: Slot,
        (peer, peer_slot): (Arc<PeerPage>, u32),
        introduction: Option<Introduction>,
    ) -> Connection {
        let memory = Arc::new(memory);
        Connection {
            sender: RingSender::new(memory.clone(), outgoing),
            receiver: RingReceiver::new(memory.clone(), outgoing.other()),
            memory,
            outgoing,
            slot,
            peer,
            peer_slot,
            introduction,
            is_reset: false,
        }
    }

    /// Assigns the bytes that arrive from now on to this queue pair.
    pub(in crate::stream) fn bind(&self, qid: u32) {
        self.slot.bind(qid);
    }

    /// The peer, for queue pair `qid`.
    pub(in crate::stream) fn local_peer(&mut self, qid: u32) -> LocalPeer {
        let notifications = (self.peer.clone(), self.peer_slot);
        let introduction = self.introduction.take();
        LocalPeer::new(&self.memory, self.outgoing, notifications, introduction, qid)
    }

    /// Like [`Stream::send`](crate::stream::Stream::send).
    #[inline]
    pub(in crate::stream) fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let sent = self.sender.send(pieces)?;
        self.peer.notify(self.peer_slot);
        Ok(sent)
    }

    /// Like [`Stream::has_room`](crate::stream::Stream::has_room).
    pub(in crate::stream) fn has_room(&mut self) -> bool {
        self.sender.has_room()
    }

    /// Like [`Stream::receive`](crate::stream::Stream::receive). `WouldBlock` does not mean that
    /// the connection is still open.
    pub(in crate::stream) fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let (received, wanted) = self.receiver.receive(into)?;
        if wanted {
            self.peer.notify(self.peer_slot);
        }
        match received {
            // Zero would be the end.
            0 => Err(StreamError::WouldBlock),
            _ => Ok(received),
        }
    }

    /// Like [`Stream::receive_short`](crate::stream::Stream::receive_short).
    #[inline]
    pub(in crate::stream) fn receive_short(&mut self, into: &mut [u8]) -> Option<usize> {
        let (received, wanted) = self.receiver.receive_short(into)?;
        if wanted {
            self.peer.notify(self.peer_slot);
        }
        Some(received)
    }

    /// Whether bytes have arrived (true), or all were received and the peer sends no more (false).
    pub(in crate::stream) fn peek(&mut self) -> Result<bool, StreamError> {
        match self.receiver.available() {
            Ok(_) => Ok(true),
            Err(StreamError::WouldBlock) if self.receiver.is_ended() => Ok(false),
            Err(StreamError::WouldBlock) if self.is_left() && self.receiver.is_empty() => {
                Err(StreamError::Closed(Errno::CONNRESET))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the peer does not have the connection any more.
    pub(in crate::stream) fn is_left(&self) -> bool {
        self.receiver.is_left()
    }

    /// Whether the peer sends no more.
    pub(in crate::stream) fn is_finished(&self) -> bool {
        self.receiver.is_finished()
    }

    /// When this value is dropped, the peer finds that the connection was lost.
    pub(in crate::stream) fn reset(&mut self) {
        self.is_reset = true;
    }

    /// Marks the end of this direction: no byte follows those that were sent.
    pub(in crate::stream) fn finish(&mut self) {
        self.sender.end();
        self.peer.notify(self.peer_slot);
    }
}

impl Drop for Connection {
    /// Ends this direction after the bytes that were sent, as closing a socket does. In a forked
    /// child, which also maps the memory, this does nothing: the connection belongs to the parent.
    fn drop(&mut self) {
        if !self.slot.is_own() {
            return;
        }
        if !self.is_reset {
            self.sender.end();
        }
        self.sender.leave();
        self.peer.notify(self.peer_slot);
    }
}
