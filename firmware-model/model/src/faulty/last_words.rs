//! The last bytes that the peer of a connection seems to have sent before it closed.

use crate::host::PieceMut;
use crate::stream::StreamError;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use urnic_wire::ddp::Header;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::mpa::marker;
use urnic_wire::mpa::startup::{FrameKind, MAX_FRAME_LEN, StartupFlags, StartupFrame};
use urnic_wire::rdmap::{Body, Opcode, Segment, Terminate};

/// Bytes of the longest message: a Reply.
const MOST: usize = MAX_FRAME_LEN;

/// The bytes in a pipe, from which the kernel copies them to their place.
#[derive(Debug)]
pub(super) struct LastWords {
    pipe: OwnedFd,
    left: usize,
}

impl LastWords {
    /// # Errors
    /// Those of pipe(2).
    fn new(bytes: &[u8]) -> Result<LastWords, Errno> {
        let (pipe, end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let left = rustix::io::write(end, bytes)?;
        Ok(LastWords { pipe, left })
    }

    /// A Terminate with this layer, error type and error code, at this position of the FPDUs.
    ///
    /// # Errors
    /// Those of pipe(2).
    pub(super) fn terminate(code: u16, offset: u64, marked: bool) -> Result<LastWords, Errno> {
        let [kind, code] = code.to_be_bytes();
        let segment = Segment {
            opcode: Opcode::Terminate,
            header: Header::Untagged(Terminate::header()),
            body: Body::Terminate(Terminate {
                layer: kind >> 4,
                etype: kind & 0xf,
                code,
                segment_length: None,
                ddp_header: None,
                read_request: None,
            }),
        };
        let mut ulpdu = [0; MOST];
        let len = segment.emit(&mut ulpdu);
        let mut bytes = [0; MOST];
        // A receiver without CRCs ignores them.
        let len = match marked {
            true => marker::emit(offset, &ulpdu[..len], CrcMode::On, &mut bytes),
            false => fpdu::emit(&ulpdu[..len], CrcMode::On, &mut bytes),
        };
        LastWords::new(&bytes[..len])
    }

    /// The Reply that rejects this Request; `None`: it is not complete.
    ///
    /// # Errors
    /// Those of pipe(2).
    pub(super) fn rejection(request: &[u8]) -> Result<Option<LastWords>, Errno> {
        let Ok((request, _)) = StartupFrame::parse(request) else {
            return Ok(None);
        };
        let reply = StartupFrame {
            kind: FrameKind::Reply,
            flags: StartupFlags {
                reject: true,
                ..request.flags
            },
            private_data: &[],
            ..request
        };
        let mut bytes = [0; MOST];
        let len = reply.emit(&mut bytes).map_err(|_| Errno::PROTO)?;
        LastWords::new(&bytes[..len]).map(Some)
    }

    /// Whether the end comes next.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Receives some of it; 0 at the end.
    pub(super) fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let n = rustix::io::readv(&self.pipe, PieceMut::as_io_slices(into));
        let n = n.map_err(|_| StreamError::Fault)?;
        self.left = self.left.saturating_sub(n);
        Ok(n)
    }
}
