//! A network whose streams and UDP ports are captured.

use super::pcapng::{Datagram, PacketMeta, Way};
use super::staging::MAX;
use super::{Capture, Side, Tap, now, pcapng};
use crate::host::{Piece, PieceMut};
use crate::stream::datagram::{DatagramOptions, DatagramSocket, Incoming, Outgoing};
use crate::stream::wrapper::{DatagramWrapper, WrappedListener, Wrapper};
use crate::stream::{Listener, Network, Stream, StreamError};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;

/// A network, and where it is captured.
#[derive(Debug)]
pub(crate) struct Tapped {
    network: Arc<dyn Network>,
    capture: Capture,
}

#[derive(Debug)]
struct TappedStream {
    stream: Box<dyn Stream>,
    capture: Capture,
    /// Present from the time at which the stream is established.
    tap: Option<Tap>,
    finished: bool,
}

impl Tapped {
    pub(crate) fn new(network: Arc<dyn Network>, capture: Capture) -> Tapped {
        Tapped { network, capture }
    }
}

impl Network for Tapped {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let stream = self.network.connect(remote, local, traffic_class)?;
        Ok(Box::new(TappedStream::new(stream, self.capture.clone(), None)))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let listener = self.network.listen(local, backlog, traffic_class, ipv6_only)?;
        let capture = self.capture.clone();
        let wrap = move |stream: Box<dyn Stream>| -> Box<dyn Stream> {
            let tap = capture.open(stream.ends(), Side::Responder);
            Box::new(TappedStream::new(stream, capture.clone(), Some(tap)))
        };
        Ok(Box::new(WrappedListener { listener, wrap }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        let socket = self.network.bind_datagrams(local, options)?;
        Ok(Box::new(TappedSocket::new(socket, self.capture.clone())))
    }
}

impl TappedStream {
    fn new(stream: Box<dyn Stream>, capture: Capture, tap: Option<Tap>) -> TappedStream {
        TappedStream {
            stream,
            capture,
            tap,
            finished: false,
        }
    }

    fn staged(&self, pieces: &[Piece<'_>]) -> Result<Vec<u8>, Errno> {
        let mut staging = self.capture.shared.staging.lock();
        staging.copy(pieces)
    }

    /// Capturing ends: the bytes that pass cannot be read.
    fn lose(&mut self, errno: Errno) {
        self.tap = None;
        self.capture.shared.lock().writer.stop(errno);
    }

    /// Notes the state of the peer that a failure shows.
    fn note(&mut self, error: StreamError) -> StreamError {
        if let (StreamError::Closed(Errno::CONNRESET), Some(tap)) = (error, &mut self.tap) {
            tap.reset(false);
        }
        error
    }

    fn note_arrival(&mut self, bytes: &[u8]) {
        if let Some(tap) = &mut self.tap {
            match bytes {
                [] => tap.finished(false),
                bytes => tap.received(bytes),
            }
        }
    }
}

impl Wrapper for TappedStream {
    fn inner(&self) -> &dyn Stream {
        &*self.stream
    }

    fn inner_mut(&mut self) -> &mut Box<dyn Stream> {
        &mut self.stream
    }

    /// Sends a copy, so that the capture has the bytes that were sent even if the program changes
    /// its memory meanwhile.
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        if self.tap.is_none() {
            return self.stream.send(pieces);
        }
        let bytes = match self.staged(pieces) {
            Ok(bytes) => bytes,
            Err(Errno::FAULT) => return Err(StreamError::Fault),
            Err(errno) => {
                self.lose(errno);
                return self.stream.send(pieces);
            }
        };
        let taken = self.stream.send_bytes(&bytes).map_err(|error| self.note(error))?;
        if let Some(tap) = &mut self.tap {
            tap.sent(&bytes[..taken]);
        }
        Ok(taken)
    }

    /// The capture takes the content of the program's memory right after the receive for the
    /// received bytes: the program must not touch the memory before the completion.
    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        if self.tap.is_none() {
            return self.stream.receive(into);
        }
        let mut room = MAX;
        let mut cut: Vec<PieceMut<'_>> = Vec::with_capacity(into.len());
        for piece in into.iter_mut() {
            let piece = piece.first(room);
            room -= piece.len();
            cut.push(piece);
        }
        let n = self.stream.receive(&mut cut).map_err(|error| self.note(error))?;
        let mut filled = Vec::with_capacity(cut.len());
        let mut left = n;
        for piece in &cut {
            let piece = piece.filled(left);
            left -= piece.len();
            filled.push(piece);
        }
        match self.staged(&filled) {
            _ if room == MAX => {}
            Ok(mut bytes) => {
                // Fewer bytes only if some of the memory was unmapped since.
                bytes.resize(n, 0);
                self.note_arrival(&bytes);
            }
            Err(Errno::FAULT) => self.note_arrival(&vec![0; n]),
            Err(errno) => self.lose(errno),
        }
        Ok(n)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        self.stream.peek().map_err(|error| self.note(error))
    }

    fn finish(&mut self) {
        self.stream.finish();
        self.finished = true;
        if let Some(tap) = &mut self.tap {
            tap.finished(true);
        }
    }

    fn reset(&mut self) {
        self.stream.reset();
        self.finished = true;
        if let Some(tap) = &mut self.tap {
            tap.reset(true);
        }
    }

    fn established(&mut self) -> Result<bool, Errno> {
        let established = self.stream.established()?;
        if established && self.tap.is_none() {
            self.tap = Some(self.capture.open(self.stream.ends(), Side::Initiator));
        }
        Ok(established)
    }
}

impl Drop for TappedStream {
    /// Closing ends our direction, too.
    fn drop(&mut self) {
        if let Some(tap) = &mut self.tap
            && !self.finished
        {
            tap.finished(true);
        }
    }
}

// Datagrams as the capture records them: as the packets of RoCE v2 that they are.

/// A UDP port whose packets are captured.
#[derive(Debug)]
pub(super) struct TappedSocket {
    socket: Box<dyn DatagramSocket>,
    capture: Capture,
    /// Addresses that it has sent from.
    senders: Vec<SocketAddr>,
}

impl TappedSocket {
    pub(super) fn new(socket: Box<dyn DatagramSocket>, capture: Capture) -> TappedSocket {
        TappedSocket {
            socket,
            capture,
            senders: Vec::new(),
        }
    }

    fn sender(&self, packet: &Outgoing) -> SocketAddr {
        SocketAddr::new(packet.source, self.socket.local().port())
    }

    /// Makes the senders known before their packets can arrive at another port of this process,
    /// which leaves such packets out.
    fn announce(&mut self, packets: &[Outgoing]) {
        for packet in packets {
            let sender = self.sender(packet);
            if !self.senders.contains(&sender) {
                self.senders.push(sender);
                self.capture.shared.lock().senders.insert(sender);
            }
        }
    }
}

impl Capture {
    fn datagrams<'b>(&self, way: Way, packets: impl Iterator<Item = (Datagram, &'b [u8])>) {
        let meta = PacketMeta {
            interface: self.interface,
            at: now(),
            way: Some(way),
        };
        self.shared.lock().writer.append(|blocks| {
            for (datagram, payload) in packets {
                pcapng::packet(blocks, meta, &datagram.headers(payload), payload);
            }
        });
    }
}

impl DatagramWrapper for TappedSocket {
    fn inner(&self) -> &dyn DatagramSocket {
        &*self.socket
    }

    fn inner_mut(&mut self) -> &mut dyn DatagramSocket {
        &mut *self.socket
    }

    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        self.announce(packets);
        let taken = self.socket.send(buffer, packets)?;
        let captured = packets.iter().take(taken).map(|packet| {
            let datagram = Datagram {
                from: self.sender(packet),
                to: packet.destination,
                traffic_class: packet.traffic_class,
                identification: packet.segment,
            };
            (datagram, &buffer[packet.at..packet.at + packet.len])
        });
        self.capture.datagrams(Way::Out, captured);
        Ok(taken)
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        let before = packets.len();
        let is_full = self.socket.receive(buffer, packets);
        let port = self.socket.local().port();
        let room = self.socket.room();
        let arrived: Vec<_> = {
            let state = self.capture.shared.lock();
            let is_foreign = |packet: &&Incoming| !state.senders.contains(&packet.source);
            packets[before..].iter().filter(is_foreign).collect()
        };
        let captured = arrived.into_iter().map(|packet| {
            let datagram = Datagram {
                from: packet.source,
                to: SocketAddr::new(packet.destination, port),
                traffic_class: packet.traffic_class,
                // The system does not say.
                identification: 0,
            };
            // A longer packet was cut to the room.
            let len = packet.len.min(room);
            (
                datagram,
                buffer.get(packet.at..packet.at + len).unwrap_or_default(),
            )
        });
        self.capture.datagrams(Way::In, captured);
        is_full
    }
}

impl Drop for TappedSocket {
    /// Another process may have the port next.
    fn drop(&mut self) {
        let mut state = self.capture.shared.lock();
        for sender in &self.senders {
            state.senders.remove(sender);
        }
    }
}
