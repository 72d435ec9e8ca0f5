//! Streams, listeners and UDP ports around another one.

use super::datagram::{DatagramSocket, Incoming, Outgoing, Refused};
use super::no_stream::NoStream;
use super::{Answers, Ends, FullOperation, Listener, Probing, QpNumbers, Stream, StreamError};
use crate::host::{Piece, PieceMut};
use crate::time::Nanos;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::fmt::{self, Debug, Formatter};
use std::mem;
use std::net::{IpAddr, SocketAddr};

/// A stream around another one. It has the methods of [`Stream`]; each method that a wrapper does
/// not implement calls that of the inner stream.
pub trait Wrapper: Send + Debug + Sized + 'static {
    /// The wrapper may delay bytes that it has taken, even if the inner stream does not.
    const DELAYS: bool = false;

    /// The inner stream.
    fn inner(&self) -> &dyn Stream;

    /// The inner stream, which full operation may replace.
    fn inner_mut(&mut self) -> &mut Box<dyn Stream>;

    /// Full operation begins for a queue pair with these numbers; `in_memory`: with a local peer.
    fn note_full_operation(&mut self, qp: QpNumbers, in_memory: bool) {
        let _ = (qp, in_memory);
    }

    /// Like [`Stream::send`].
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        self.inner_mut().send(pieces)
    }

    /// Like [`Stream::receive`].
    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        self.inner_mut().receive(into)
    }

    /// Like [`Stream::peek`].
    fn peek(&mut self) -> Result<bool, StreamError> {
        self.inner_mut().peek()
    }

    /// Like [`Stream::has_input`].
    fn has_input(&mut self) -> Option<bool> {
        self.inner_mut().has_input()
    }

    /// Like [`Stream::has_room`].
    fn has_room(&mut self) -> bool {
        self.inner_mut().has_room()
    }

    /// Like [`Stream::advance`].
    fn advance(&mut self, now: Nanos) -> Option<Nanos> {
        self.inner_mut().advance(now)
    }

    /// Like [`Stream::finish`].
    fn finish(&mut self) {
        self.inner_mut().finish();
    }

    /// Like [`Stream::reset`].
    fn reset(&mut self) {
        self.inner_mut().reset();
    }

    /// Like [`Stream::established`].
    fn established(&mut self) -> Result<bool, Errno> {
        self.inner_mut().established()
    }

    /// Like [`Stream::unacknowledged`].
    fn unacknowledged(&self) -> u32 {
        self.inner().unacknowledged()
    }

    /// Like [`Stream::answers`].
    fn answers(&self) -> Option<Answers> {
        self.inner().answers()
    }

    /// Like [`Stream::probe_peer`].
    fn probe_peer(&mut self, probing: Probing) {
        self.inner_mut().probe_peer(probing);
    }
}

impl<W: Wrapper> Stream for W {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        Wrapper::send(self, pieces)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        Wrapper::receive(self, into)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        Wrapper::peek(self)
    }

    fn has_input(&mut self) -> Option<bool> {
        Wrapper::has_input(self)
    }

    fn has_room(&mut self) -> bool {
        Wrapper::has_room(self)
    }

    fn advance(&mut self, now: Nanos) -> Option<Nanos> {
        Wrapper::advance(self, now)
    }

    fn finish(&mut self) {
        Wrapper::finish(self);
    }

    fn reset(&mut self) {
        Wrapper::reset(self);
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Wrapper::established(self)
    }

    fn unacknowledged(&self) -> u32 {
        Wrapper::unacknowledged(self)
    }

    fn answers(&self) -> Option<Answers> {
        Wrapper::answers(self)
    }

    fn probe_peer(&mut self, probing: Probing) {
        Wrapper::probe_peer(self, probing);
    }

    fn enter_full_operation(mut self: Box<Self>, qp: QpNumbers) -> FullOperation {
        let inner = mem::replace(self.inner_mut(), Box::new(NoStream));
        let entered = inner.enter_full_operation(qp);
        *self.inner_mut() = entered.stream;
        self.note_full_operation(qp, entered.local_peer.is_some());
        FullOperation {
            stream: self,
            local_peer: entered.local_peer,
            delays: entered.delays || W::DELAYS,
        }
    }

    fn note_hang_up(&mut self) {
        self.inner_mut().note_hang_up();
    }

    fn carries_messages(&self) -> bool {
        self.inner().carries_messages()
    }

    fn has_ended(&self) -> bool {
        self.inner().has_ended()
    }

    fn mss(&self) -> u32 {
        self.inner().mss()
    }

    fn ends(&self) -> Ends {
        self.inner().ends()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner().descriptor()
    }
}

/// A listener whose accepted streams are wrapped.
pub(crate) struct WrappedListener<W> {
    /// The inner listener.
    pub(crate) listener: Box<dyn Listener>,
    /// Wraps an accepted stream.
    pub(crate) wrap: W,
}

impl<W> Debug for WrappedListener<W> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WrappedListener").field(&self.listener).finish()
    }
}

impl<W: FnMut(Box<dyn Stream>) -> Box<dyn Stream> + Send> Listener for WrappedListener<W> {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        Ok(self.listener.accept()?.map(&mut self.wrap))
    }

    fn local(&self) -> SocketAddr {
        self.listener.local()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.listener.descriptor()
    }
}

/// A UDP port around another one, which changes or sees what is sent and received.
pub(crate) trait DatagramWrapper: Send + Debug {
    /// The inner port.
    fn inner(&self) -> &dyn DatagramSocket;

    /// The inner port, to be changed.
    fn inner_mut(&mut self) -> &mut dyn DatagramSocket;

    /// As [`DatagramSocket::send`].
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno>;

    /// As [`DatagramSocket::divides`].
    fn divides(&self) -> bool {
        self.inner().divides()
    }

    /// As [`DatagramSocket::receive`].
    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool;
}

impl<W: DatagramWrapper> DatagramSocket for W {
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        DatagramWrapper::send(self, buffer, packets)
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        DatagramWrapper::receive(self, buffer, packets)
    }

    fn divides(&self) -> bool {
        DatagramWrapper::divides(self)
    }

    fn room(&self) -> usize {
        self.inner().room()
    }

    fn has_more(&mut self) -> bool {
        self.inner_mut().has_more()
    }

    fn direct(&mut self) -> u64 {
        self.inner_mut().direct()
    }

    fn bind(&mut self, qid: u32) {
        self.inner_mut().bind(qid);
    }

    fn forget_peers(&mut self) {
        self.inner_mut().forget_peers();
    }

    fn refused(&mut self, buffer: &mut [u8]) -> Option<Refused> {
        self.inner_mut().refused(buffer)
    }

    fn reports_refused(&self) -> bool {
        self.inner().reports_refused()
    }

    fn dropped(&mut self) -> u32 {
        self.inner_mut().dropped()
    }

    fn join(&mut self, group: IpAddr, interface: IpAddr, scope: u32) -> Result<(), Errno> {
        self.inner_mut().join(group, interface, scope)
    }

    fn local(&self) -> SocketAddr {
        self.inner().local()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner().descriptor()
    }
}
