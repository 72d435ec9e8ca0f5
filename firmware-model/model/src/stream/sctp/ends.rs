//! The streams and listeners that the device has.

use super::super::descriptor::Descriptor;
use super::super::{Ends, FullOperation, Listener, QpNumbers, Received, Stream, StreamError};
use super::session::{LEAST_LONGEST, Session};
use super::sessions::{SessionId, SharedSessions};
use super::thread::Thread;
use crate::host::{Piece, PieceMut};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use urnic_sctp::order::Message;

/// The longest wait for the thread to close a port, and the pause between two looks.
const CLOSING: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_micros(50);

/// A session.
#[derive(Debug)]
pub(super) struct SctpStream {
    thread: Arc<Thread>,
    sessions: SharedSessions,
    id: SessionId,
    ends: Ends,
    notification: Arc<Descriptor>,
    /// A message to be sent, in one piece.
    message: Vec<u8>,
}

impl SctpStream {
    pub(super) fn new(
        thread: Arc<Thread>,
        sessions: SharedSessions,
        id: SessionId,
    ) -> Result<SctpStream, Errno> {
        let mut guard = sessions.lock();
        let session = guard.get(id).ok_or(Errno::CONNRESET)?;
        let (ends, notification) = (session.ends, session.notification());
        drop(guard);
        Ok(SctpStream {
            thread,
            sessions,
            id,
            ends,
            notification,
            message: Vec::new(),
        })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Session) -> Result<T, StreamError>) -> Result<T, StreamError> {
        let gone = StreamError::Closed(Errno::CONNRESET);
        self.sessions.lock().get(self.id).map_or(Err(gone), act)
    }

    /// The next message; `None`: the peer's last one was read.
    fn next(&mut self) -> Result<Option<Message>, StreamError> {
        let mut sessions = self.sessions.lock();
        let gone = StreamError::Closed(Errno::CONNRESET);
        let message = sessions.get(self.id).map_or(Err(gone), Session::read)?;
        if sessions.leaves_some {
            // The thread may take more out of the receive window.
            self.thread.ask();
        }
        Ok(message)
    }
}

impl Stream for SctpStream {
    fn carries_messages(&self) -> bool {
        true
    }

    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let mut message = std::mem::take(&mut self.message);
        message.clear();
        let copied = pieces.iter().try_for_each(|piece| piece.append_to(&mut message));
        let sent = match copied {
            Ok(()) => self.send_bytes(&message),
            Err(_) => Err(StreamError::Fault),
        };
        self.message = message;
        sent
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        self.with(|session| session.send(bytes))?;
        self.thread.ask();
        Ok(bytes.len())
    }

    /// Only into memory of our own. A message that is longer is cut.
    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let Some(message) = self.next()? else { return Ok(0) };
        let mut left = &message.data[..];
        let mut filled = 0;
        for piece in PieceMut::as_io_slices(into) {
            filled += left.read(piece).unwrap_or(0);
        }
        Ok(filled)
    }

    fn receive_message(&mut self, into: &mut [u8]) -> Result<Received, StreamError> {
        let (data, placed) = match self.next()? {
            Some(message) => (message.data, message.placed),
            None => (Vec::new(), 0),
        };
        let len = (&data[..]).read(into).unwrap_or(0);
        Ok(Received { len, placed })
    }

    /// The sessions are not locked during `place`: a copy into memory of the program may wait for
    /// the program.
    fn place_early(&mut self, place: &mut dyn FnMut(&[u8]) -> usize) -> bool {
        let early = self.with(|session| Ok(session.next_early()));
        let Ok(Some((ssn, segment))) = early else {
            return false;
        };
        let placed = place(&segment);
        if placed > 0 {
            let kept = segment.len().saturating_sub(placed);
            // Only this end reads the session, so the segment still waits, unless the session has
            // ended.
            let _ = self.with(|session| {
                session.note_placed(ssn, kept);
                Ok(())
            });
        }
        true
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        self.with(|session| session.peek())
    }

    fn has_ended(&self) -> bool {
        let peeked = self.with(|session| session.peek());
        matches!(peeked, Ok(false) | Err(StreamError::Closed(_)))
    }

    fn has_input(&mut self) -> Option<bool> {
        Some(self.peek() != Err(StreamError::WouldBlock))
    }

    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        // A session that is gone has ended, which the next call reports.
        let _ = self.with(|session| {
            session.enter_full_operation();
            Ok(())
        });
        FullOperation::of(self)
    }

    fn finish(&mut self) {
        let _ = self.with(|session| {
            session.finish();
            Ok(())
        });
        self.thread.ask();
    }

    /// A session has only one end (RFC 5043 §6.2).
    fn reset(&mut self) {
        self.finish();
    }

    fn mss(&self) -> u32 {
        let longest = self.with(|session| Ok(session.longest()));
        u32::try_from(longest.unwrap_or(LEAST_LONGEST)).unwrap_or(u32::MAX)
    }

    fn established(&mut self) -> Result<bool, Errno> {
        let mut sessions = self.sessions.lock();
        sessions
            .get(self.id)
            .map_or(Err(Errno::CONNRESET), |session| session.is_established())
    }

    fn unacknowledged(&self) -> u32 {
        let count = self.with(|session| Ok(session.in_flight())).unwrap_or(0);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    fn ends(&self) -> Ends {
        self.ends
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some((*self.notification).as_fd())
    }
}

impl Drop for SctpStream {
    fn drop(&mut self) {
        self.sessions.lock().close(self.id);
        self.thread.ask();
    }
}

/// Accepts sessions.
#[derive(Debug)]
pub(super) struct SctpListener {
    pub(super) thread: Arc<Thread>,
    pub(super) sessions: SharedSessions,
    pub(super) local: SocketAddr,
    pub(super) notification: Arc<Descriptor>,
}

impl Listener for SctpListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        let Some(accepted) = self.sessions.lock().accept() else {
            return Ok(None);
        };
        let stream = SctpStream::new(self.thread.clone(), self.sessions.clone(), accepted)?;
        Ok(Some(Box::new(stream)))
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some((*self.notification).as_fd())
    }
}

impl Drop for SctpListener {
    fn drop(&mut self) {
        self.sessions.lock().unlisten();
        self.thread.ask();
        // The port is free when the listener is gone, unless sessions use it.
        let until = Instant::now() + CLOSING;
        while self.sessions.lock().may_close() && Instant::now() < until {
            std::thread::sleep(PAUSE);
        }
    }
}
