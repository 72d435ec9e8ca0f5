//! Kernel TCP.

use super::datagram::{DatagramOptions, DatagramSocket};
use super::descriptor::{Descriptor, Descriptors};
use super::in_memory::{InMemory, Prospect};
use super::same_host::{Offers, SameHost, TcpEnd};
use super::socket::KeepAlive;
use super::socket::{mark, peek, uninterrupted};
use super::{ANYWHERE, family, plain};
use super::{
    Answers, Ends, FullOperation, Listener, Network, Probing, QpNumbers, Stream, StreamError, socket, udp,
};
use crate::host::{Piece, PieceMut};
use crate::sys;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use rustix::net::{RecvAncillaryBuffer, SendAncillaryBuffer, sockopt};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Most pieces of one system call (UIO_MAXIOV).
const MAX_PIECES: usize = 1024;
const SEND: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);
/// Sends between two reads of the segment size.
const MSS_REFRESH: u32 = 256;
/// The limits of TCP_RTO_MAX_MS that are set: short ones would disturb paths with long round trips.
const LONGEST_PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(120));
/// The assumed size when the kernel reports none: the smallest that IPv6 must carry.
const FALLBACK_MSS: u32 = 1220;

/// The kernel's TCP, with sockets that belong to one device.
#[derive(Debug)]
pub(crate) struct Tcp {
    pub(crate) descriptors: Arc<Descriptors>,
    /// Connections on this host may pass their bytes through memory.
    pub(crate) same_host: Option<Arc<SameHost>>,
}

#[derive(Debug)]
struct TcpStream {
    /// Dropped before the socket: an offer of memory for this connection must not outlive its port.
    prospect: Prospect,
    /// Absent after a reset.
    socket: Option<Descriptor>,
    established: bool,
    mss: u32,
    sends: u32,
    local: SocketAddr,
    remote: SocketAddr,
    /// The system's keep-alive settings, stored while the device probes more often.
    keep_alive: Option<KeepAlive>,
}

#[derive(Debug)]
struct TcpListener {
    socket: Descriptor,
    local: SocketAddr,
    descriptors: Arc<Descriptors>,
    same_host: Option<(Arc<SameHost>, Arc<Offers>)>,
}

fn new_socket(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    net::socket_with(family, SocketType::STREAM, flags, Some(net::ipproto::TCP))
}

fn set_options(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    // FPDUs leave when they are made (MPA-F-11).
    sockopt::set_tcp_nodelay(socket, true)?;
    // The intervals are the system's, hours: an adapter's queue pair that has nothing to send does
    // not notice either that its peer is gone.
    sockopt::set_socket_keepalive(socket, true)
}

impl Tcp {
    fn bind_listener(
        &self,
        family: AddressFamily,
        local: SocketAddr,
        ipv6_only: bool,
    ) -> Result<OwnedFd, Errno> {
        let socket = new_socket(family)?;
        // A port whose last connections linger in TIME-WAIT may be listened on again; one with a
        // live listener may not.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if family == AddressFamily::INET6 {
            sockopt::set_ipv6_v6only(&socket, ipv6_only)?;
        }
        net::bind(&socket, &local)?;
        Ok(socket)
    }
}

impl Network for Tcp {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let socket = self.descriptors.adopt(new_socket(family(&remote))?)?;
        set_options(socket.as_fd())?;
        mark(socket.as_fd(), family(&remote), traffic_class)?;
        if let Some(local) = local {
            if local.port() == 0 {
                // To find a port that nothing uses takes longer, the more connections there are.
                sys::choose_port_late(socket.as_fd())?;
            } else {
                sockopt::set_socket_reuseaddr(&socket, true)?;
            }
            net::bind(&socket, &local)?;
        }
        match net::connect(&socket, &remote) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        let prospect = self
            .same_host
            .clone()
            .map_or(Prospect::None, Prospect::Connecting);
        let known = local.filter(|local| local.port() != 0 && !local.ip().is_unspecified());
        Ok(Box::new(TcpStream::new(
            socket,
            known.map(|local| plain(Some(local.into()))),
            remote,
            prospect,
        )))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let socket = if local.ip() == ANYWHERE.ip() && !ipv6_only {
            let everywhere = SocketAddr::new(ANYWHERE.ip(), local.port());
            match self.bind_listener(AddressFamily::INET6, everywhere, false) {
                // A host without IPv6.
                Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => {
                    let everywhere = SocketAddr::new([0, 0, 0, 0].into(), local.port());
                    self.bind_listener(AddressFamily::INET, everywhere, false)?
                }
                bound => bound?,
            }
        } else {
            self.bind_listener(family(&local), local, true)?
        };
        let socket = self.descriptors.adopt(socket)?;
        // Accepted sockets inherit all options (tcp(7) does not document it; every Linux does it).
        set_options(socket.as_fd())?;
        mark(socket.as_fd(), sockopt::socket_domain(&socket)?, traffic_class)?;
        net::listen(&socket, i32::try_from(backlog).unwrap_or(i32::MAX))?;
        let local = plain(net::getsockname(&socket).ok());
        let same_host = self.same_host.as_ref().and_then(|same_host| {
            let offers = same_host.listen(local).inspect_err(|errno| {
                tracing::warn!(%local, %errno, "connections on this host use TCP");
            });
            Some((same_host.clone(), Arc::new(offers.ok()?)))
        });
        let descriptors = self.descriptors.clone();
        Ok(Box::new(TcpListener {
            socket,
            local,
            descriptors,
            same_host,
        }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        let datagram_rings = self
            .same_host
            .as_ref()
            .map(|same_host| same_host.datagram_rings());
        udp::bind(&self.descriptors, local, options, datagram_rings)
    }
}

impl Listener for TcpListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            let room = self.descriptors.room()?;
            match net::acceptfrom_with(&self.socket, flags) {
                Ok((fd, peer)) => {
                    let socket = room.adopt(fd);
                    let prospect = match &self.same_host {
                        Some((same_host, offers)) => Prospect::Accepted(same_host.clone(), offers.clone()),
                        None => Prospect::None,
                    };
                    let known = Some(self.local).filter(|local| !local.ip().is_unspecified());
                    let mut stream = TcpStream::new(socket, known, plain(peer), prospect);
                    stream.note_established();
                    return Ok(Some(Box::new(stream)));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // The connection was aborted before it was accepted, or its network reported an
                // error (accept(2)): continue with the next connection.
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::NETDOWN
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::HOSTDOWN
                    | Errno::NONET
                    | Errno::HOSTUNREACH
                    | Errno::OPNOTSUPP
                    | Errno::NETUNREACH,
                ) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }
}

impl TcpStream {
    /// `local`: the address of this end, if it is known by now.
    fn new(
        socket: Descriptor,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        prospect: Prospect,
    ) -> TcpStream {
        TcpStream {
            socket: Some(socket),
            established: false,
            mss: FALLBACK_MSS,
            sends: 0,
            local: local.unwrap_or(ANYWHERE),
            remote,
            prospect,
            keep_alive: None,
        }
    }

    fn socket(&self) -> Result<&Descriptor, StreamError> {
        self.socket.as_ref().ok_or(StreamError::Closed(Errno::CONNRESET))
    }

    fn note_established(&mut self) {
        self.established = true;
        if self.local == ANYWHERE
            && let Some(socket) = &self.socket
        {
            self.local = plain(net::getsockname(socket).ok());
        }
        self.prospect.established(self.end());
    }

    fn end(&self) -> TcpEnd {
        let number = self
            .socket
            .as_ref()
            .map_or(-1, |socket| socket.as_fd().as_raw_fd());
        TcpEnd {
            local: self.local,
            remote: self.remote,
            socket: number.cast_unsigned(),
        }
    }

    #[inline]
    fn note_send(&mut self) {
        self.sends = self.sends.wrapping_add(1);
        if self.sends.is_multiple_of(MSS_REFRESH) {
            self.refresh_mss();
        }
    }

    fn refresh_mss(&mut self) {
        if let Some(Ok(mss)) = self.socket.as_ref().map(|s| sys::tcp_maxseg(s.as_fd())) {
            self.mss = mss;
        }
    }
}

impl Stream for TcpStream {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        self.note_send();
        let socket = self.socket()?;
        let io = Piece::as_io_slices(&pieces[..pieces.len().min(MAX_PIECES)]);
        uninterrupted(|| net::sendmsg(socket, io, &mut SendAncillaryBuffer::default(), SEND))
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        self.note_send();
        let socket = self.socket()?;
        uninterrupted(|| net::send(socket, bytes, SEND))
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let socket = self.socket()?;
        let count = into.len().min(MAX_PIECES);
        let io = PieceMut::as_io_slices(&mut into[..count]);
        let received = uninterrupted(|| {
            let message = net::recvmsg(
                socket,
                io,
                &mut RecvAncillaryBuffer::default(),
                RecvFlags::DONTWAIT,
            );
            message.map(|message| message.bytes)
        })?;
        if received > 0 {
            let end = self.end();
            self.prospect.bytes_arrived(end);
        }
        Ok(received)
    }

    fn receive_bytes(&mut self, into: &mut [u8]) -> Result<usize, StreamError> {
        let socket = self.socket()?;
        uninterrupted(|| net::recv(socket, &mut *into, RecvFlags::DONTWAIT).map(|(_, n)| n))
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        peek(self.socket()?)
    }

    fn enter_full_operation(mut self: Box<Self>, qp: QpNumbers) -> FullOperation {
        match self.prospect.conclude(self.end()) {
            Ok(None) => {}
            Ok(Some(connection)) => {
                let ends = self.ends();
                return InMemory::enter(connection, self.socket.take(), ends, qp);
            }
            Err(errno) => {
                tracing::warn!(%errno, "a connection on this host is lost");
                self.reset();
            }
        }
        self.refresh_mss();
        FullOperation::of(self)
    }

    fn finish(&mut self) {
        if let Some(socket) = &self.socket {
            // The call fails only if the connection is closed already.
            let _ = net::shutdown(socket, Shutdown::Write);
        }
    }

    fn reset(&mut self) {
        self.prospect = Prospect::None;
        if let Some(socket) = self.socket.take() {
            socket::reset(socket);
        }
    }

    fn mss(&self) -> u32 {
        self.mss
    }

    fn established(&mut self) -> Result<bool, Errno> {
        if self.established {
            return Ok(true);
        }
        let Some(socket) = &self.socket else {
            return Err(Errno::CONNRESET);
        };
        match net::getpeername(socket) {
            Ok(_) => {
                self.note_established();
                Ok(true)
            }
            Err(Errno::NOTCONN) => sockopt::socket_error(socket)?.map(|()| false),
            Err(errno) => Err(errno),
        }
    }

    fn unacknowledged(&self) -> u32 {
        self.socket
            .as_ref()
            .and_then(|s| sys::unacknowledged(s.as_fd()).ok())
            .unwrap_or(0)
    }

    fn reports_answers(&self) -> bool {
        self.socket.is_some()
    }

    fn answers(&self) -> Option<Answers> {
        let info = sys::tcp_info(self.socket.as_ref()?.as_fd()).ok()?;
        let last = info.tcpi_last_ack_recv.min(info.tcpi_last_data_recv);
        Some(Answers {
            last: Duration::from_millis(last.into()),
            unacknowledged: self.unacknowledged(),
            // The kernel counts attempts for which it has no route, too.
            retransmissions: info.tcpi_retransmits.into(),
            probes: info.tcpi_probes.into(),
        })
    }

    fn probe_peer(&mut self, probing: Probing) {
        let Some(socket) = &self.socket else { return };
        let outcome = match probing {
            Probing::Within(limit) => {
                let pause = limit.clamp(LONGEST_PAUSE.0, LONGEST_PAUSE.1);
                // Older kernels do not have the option, and the pauses grow to two minutes.
                let _ = sys::limit_retransmission(socket.as_fd(), pause.as_millis() as u32);
                return;
            }
            Probing::Usual => self.keep_alive.take().map_or(Ok(()), |usual| usual.set(socket)),
            Probing::Every(interval) => KeepAlive::of(socket).and_then(|usual| {
                self.keep_alive.get_or_insert(usual);
                KeepAlive::at(interval).set(socket)
            }),
        };
        if let Err(errno) = outcome {
            tracing::debug!(%errno, "the interval of TCP's keep-alive is not changed");
        }
    }

    fn ends(&self) -> Ends {
        Ends {
            local: self.local,
            remote: self.remote,
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }
}

#[cfg(test)]
mod tests;
