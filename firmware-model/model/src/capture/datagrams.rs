//! Datagrams as the capture records them: as the packets of RoCE v2 that they are.

use super::packet::Datagram;
use super::pcapng::{self, PacketMeta, Way};
use super::{Capture, now};
use crate::stream::datagram::{DatagramSocket, Incoming, Outgoing, PACKET_ROOM};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};

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

impl DatagramSocket for TappedSocket {
    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        self.announce(packets);
        let taken = self.socket.send(buffer, packets)?;
        let captured = packets.iter().take(taken).map(|packet| {
            let datagram = Datagram {
                from: self.sender(packet),
                to: packet.destination,
                traffic_class: packet.traffic_class,
            };
            (datagram, &buffer[packet.at..packet.at + packet.len])
        });
        self.capture.datagrams(Way::Out, captured);
        Ok(taken)
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) {
        let before = packets.len();
        self.socket.receive(buffer, packets);
        let port = self.socket.local().port();
        let arrived: Vec<_> = {
            let state = self.capture.shared.lock();
            let arrived = packets[before..].iter().zip(buffer.chunks(PACKET_ROOM));
            arrived
                .filter(|(packet, _)| !state.senders.contains(&packet.source))
                .collect()
        };
        let captured = arrived.into_iter().map(|(packet, bytes)| {
            let datagram = Datagram {
                from: packet.source,
                to: SocketAddr::new(packet.destination, port),
                traffic_class: 0,
            };
            // A longer packet was cut to the room.
            (datagram, &bytes[..packet.len.min(bytes.len())])
        });
        self.capture.datagrams(Way::In, captured);
    }

    fn refused(&mut self, buffer: &mut [u8]) -> Option<(Errno, usize)> {
        self.socket.refused(buffer)
    }

    fn reports_refused(&self) -> bool {
        self.socket.reports_refused()
    }

    fn dropped(&mut self) -> u32 {
        self.socket.dropped()
    }

    fn join(&mut self, group: IpAddr, interface: IpAddr, scope: u32) -> Result<(), Errno> {
        self.socket.join(group, interface, scope)
    }

    fn local(&self) -> SocketAddr {
        self.socket.local()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.descriptor()
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
