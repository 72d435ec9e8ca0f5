//! Streams under MPA, or under DDP itself, and the networks that make them: kernel TCP ([`tcp`]),
//! [SCTP](sctp) or a simulated one.

pub mod datagram;
pub(crate) mod descriptor;
mod in_memory;
pub(crate) mod linger;
pub mod no_stream;
pub(crate) mod roce_port;
pub(crate) mod same_host;
pub(crate) mod sctp;
mod socket;
pub(crate) mod tcp;
mod udp;
pub mod wrapper;

use crate::host::{Piece, PieceMut};
use crate::time::Nanos;
use datagram::{DatagramOptions, DatagramSocket};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny};
use same_host::LocalPeer;
use std::fmt::Debug;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The longest message that a stream of messages gives. Those of a peer with larger packets than
/// ours are longer than ours.
pub(crate) const LONGEST_MESSAGE: usize = 64 << 10;

/// Why a stream did not take or return bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// No bytes can be taken or returned now.
    #[error("the stream is not ready")]
    WouldBlock,
    /// The connection is closed.
    #[error("the connection is closed: {0}")]
    Closed(Errno),
    /// A piece referred to unmapped memory; the stream itself is still usable.
    #[error("a piece of memory is unmapped")]
    Fault,
}

/// A message that a stream gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Its bytes, without those that were placed; 0 = the peer sent FIN.
    pub len: usize,
    /// Bytes after these that were placed before the message's turn.
    pub placed: usize,
}

/// The time after which TCP retransmits at the earliest (Linux: `TCP_RTO_MIN`).
const FIRST_RETRANSMISSION: Duration = Duration::from_millis(200);

/// Recent signs of life of the peer's system, which is the kernel of its host, not its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// The time since anything arrived.
    pub last: Duration,
    /// Bytes that the stream has taken and the peer's system has not acknowledged.
    pub unacknowledged: u32,
    /// Retransmissions of the oldest of these bytes.
    pub retransmissions: u32,
    /// Probes of the peer's window, or of its presence, since anything arrived.
    pub probes: u32,
}

impl Answers {
    /// The answers of a system that has been silent for `last`. TCP has retransmitted for the time
    /// `retransmitting`, and has probed the system for the time `asking`.
    pub(crate) fn of_silence(
        last: Duration,
        unacknowledged: u32,
        retransmitting: Duration,
        asking: Duration,
    ) -> Answers {
        // TCP doubles the time from one retransmission to the next.
        let doublings = (retransmitting.as_millis() / FIRST_RETRANSMISSION.as_millis() + 1).ilog2();
        Answers {
            last,
            unacknowledged,
            retransmissions: doublings,
            probes: u32::try_from(asking.as_secs()).unwrap_or(u32::MAX),
        }
    }
}

/// The addresses of the two ends of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ends {
    /// Ours.
    pub local: SocketAddr,
    /// The peer's.
    pub remote: SocketAddr,
}

impl Ends {
    /// The same two ends as the peer sees them.
    pub fn reversed(self) -> Ends {
        Ends {
            local: self.remote,
            remote: self.local,
        }
    }
}

/// The numbers of the queue pair that gets a stream.
#[derive(Debug, Clone, Copy)]
pub struct QpNumbers {
    /// The device's.
    pub id: u32,
    /// The one for programs.
    pub label: u32,
}

/// The probing of the peer's system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probing {
    /// An answer is expected within this time. A network that can limit the interval of
    /// retransmissions and of probes of the peer's window should keep it not much longer than this.
    Within(Duration),
    /// Probe at this interval from now on, while nothing else is in flight.
    Every(Duration),
    /// Probe as at the beginning of the connection.
    Usual,
}

/// A stream in full operation.
#[derive(Debug)]
pub struct FullOperation {
    /// The stream, whose bytes are FPDUs from here on.
    pub stream: Box<dyn Stream>,
    /// The peer, if the bytes pass through memory that it shares. Then neither CRCs nor markers are
    /// needed, and the other end knows that, too.
    pub(crate) local_peer: Option<LocalPeer>,
    /// The stream may delay bytes that it has taken: [`advance`](Stream::advance) must be called.
    pub delays: bool,
}

impl FullOperation {
    /// Full operation on the same stream, without a local peer.
    pub fn of(stream: Box<dyn Stream>) -> FullOperation {
        FullOperation {
            stream,
            local_peer: None,
            delays: false,
        }
    }
}

/// A reliable stream of bytes in both directions, or of [messages](Self::carries_messages). A
/// stream around another one is a [`Wrapper`](wrapper::Wrapper).
pub trait Stream: Send + Debug {
    /// Whether what is sent by one call is received by one call: whole, in the order in which it
    /// was sent.
    fn carries_messages(&self) -> bool {
        false
    }

    /// Takes bytes from `pieces` in order; returns their number, at least one unless `pieces` is
    /// empty.
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError>;

    /// Like [`send`](Self::send), of bytes of our own: cheaper than one piece.
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        self.send(&[Piece::of(bytes)])
    }

    /// Fills `into` in order with arrived bytes; returns their number, 0 = the peer sent FIN.
    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError>;

    /// Like [`receive`](Self::receive), into memory of our own: cheaper than one piece.
    fn receive_bytes(&mut self, into: &mut [u8]) -> Result<usize, StreamError> {
        self.receive(&mut [PieceMut::of(into)])
    }

    /// Of a stream of messages: the next message. Like [`receive_bytes`](Self::receive_bytes), but
    /// also says which bytes [`place_early`](Self::place_early) has placed.
    fn receive_message(&mut self, into: &mut [u8]) -> Result<Received, StreamError> {
        let len = self.receive_bytes(into)?;
        Ok(Received { len, placed: 0 })
    }

    /// Of a stream of messages: offers the next one that has arrived before its turn to `place`,
    /// each only once. `place` returns the number of bytes at its end that it has placed; at its
    /// turn the message comes without them. Returns whether there was a message.
    fn place_early(&mut self, place: &mut dyn FnMut(&[u8]) -> usize) -> bool {
        let _ = place;
        false
    }

    /// All bytes that have arrived, if they fit into `into`, and no system call is needed. `None`:
    /// nothing is taken.
    fn receive_short(&mut self, into: &mut [u8]) -> Option<usize> {
        let _ = into;
        None
    }

    /// Whether [`receive`](Self::receive) would return bytes (true) or the peer's FIN (false);
    /// takes nothing.
    fn peek(&mut self) -> Result<bool, StreamError>;

    /// Whether bytes, or the end, have arrived. `None`: only a system call can tell.
    fn has_input(&mut self) -> Option<bool> {
        None
    }

    /// Whether a blocked stream certainly has room again. Never makes a system call.
    fn has_room(&mut self) -> bool {
        false
    }

    /// MPA start-up is over: the bytes from here on are FPDUs, and what arrives is for
    /// queue pair `qp`. The returned stream may be another one than that of MPA start-up.
    fn enter_full_operation(self: Box<Self>, qp: QpNumbers) -> FullOperation;

    /// Passes on the delayed bytes that are due at `now`. Returns the time of the next call, if no
    /// event requires an earlier one.
    fn advance(&mut self, now: Nanos) -> Option<Nanos> {
        let _ = now;
        None
    }

    /// Whether the peer has ended, or an error has: for a stream whose
    /// [descriptor](Self::descriptor) does not report that.
    fn has_ended(&self) -> bool {
        false
    }

    /// The [descriptor](Self::descriptor) has reported that the peer closed, or an error.
    fn note_hang_up(&mut self) {}

    /// Ends our direction in an orderly way (FIN) after all that was taken.
    fn finish(&mut self);

    /// Ends both directions at once (RST).
    fn reset(&mut self);

    /// Largest TCP segment at present, in bytes (EMSS of RFC 5044 §4.5); `u32::MAX`: there are no
    /// segments, now and later. Of a stream of messages: the longest message, always the same.
    fn mss(&self) -> u32;

    /// Whether a connection that [`Network::connect`] began is established; an error ends the
    /// attempt.
    fn established(&mut self) -> Result<bool, Errno>;

    /// Bytes taken that the peer has not acknowledged.
    fn unacknowledged(&self) -> u32;

    /// How the peer's system answers. `None`: the stream cannot lose bytes, so there are no answers
    /// to watch.
    fn answers(&self) -> Option<Answers> {
        None
    }

    /// Whether [`Stream::answers`] reports answers.
    fn reports_answers(&self) -> bool {
        self.answers().is_some()
    }

    /// Changes the probing of the peer's system.
    fn probe_peer(&mut self, probing: Probing) {
        let _ = probing;
    }

    /// Our address, and the peer's.
    fn ends(&self) -> Ends;

    /// The descriptor to poll for readiness; `None` for streams that only a manual
    /// [step](crate::Device::step) drives.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Waits for connections.
pub trait Listener: Send + Debug {
    /// The next connection, if one waits.
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno>;

    /// The address on which it listens.
    fn local(&self) -> SocketAddr;

    /// The descriptor to poll for readiness, as in [`Stream::descriptor`].
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Makes streams.
pub trait Network: Send + Sync + Debug {
    /// Begins to connect to `remote`, from `local` if there is one, in packets of this traffic
    /// class; see [`Stream::established`].
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno>;

    /// Listens. An unspecified IPv6 address means all of the host's, IPv4 and IPv6, unless
    /// `ipv6_only`; with port 0 the network chooses. The accepted streams have the given traffic
    /// class.
    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno>;

    /// Binds a UDP port. An unspecified IPv6 address means all of the host's, IPv4 and IPv6, unless
    /// the options say otherwise; with port 0 the network chooses.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for a network without datagrams; those of bind(2).
    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        let _ = (local, options);
        Err(Errno::OPNOTSUPP)
    }
}

// Addresses of sockets.

const ANYWHERE: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);

/// The address in its own family: IPv4 peers of a dual-stack socket have IPv6 addresses there.
fn plain(address: Option<SocketAddrAny>) -> SocketAddr {
    let address = address.and_then(|a| SocketAddr::try_from(a).ok());
    address.map_or(ANYWHERE, |a| match a {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), v6.port()),
            None => a,
        },
        SocketAddr::V4(_) => a,
    })
}

fn family(address: &SocketAddr) -> AddressFamily {
    match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    }
}
