//! The stand-in for a stream where there is none.

use super::{ANYWHERE, Ends, FullOperation, QpNumbers, Stream, StreamError};
use crate::host::{Piece, PieceMut};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

/// The stand-in for a stream where there is none.
#[derive(Debug, Default)]
pub struct NoStream;

const CLOSED: StreamError = StreamError::Closed(Errno::NOTCONN);

impl Stream for NoStream {
    fn send(&mut self, _: &[Piece<'_>]) -> Result<usize, StreamError> {
        Err(CLOSED)
    }

    fn receive(&mut self, _: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        Err(CLOSED)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        Err(CLOSED)
    }

    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        FullOperation::of(self)
    }

    fn finish(&mut self) {}

    fn reset(&mut self) {}

    fn mss(&self) -> u32 {
        0
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Err(Errno::NOTCONN)
    }

    fn unacknowledged(&self) -> u32 {
        0
    }

    fn ends(&self) -> Ends {
        Ends {
            local: ANYWHERE,
            remote: ANYWHERE,
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
