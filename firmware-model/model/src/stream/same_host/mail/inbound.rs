//! The receiver's end of a ring of datagrams.

use super::super::bell::Slot;
use super::super::local_socket::LocalSocket;
use super::super::ring::{Receiver, Sender};
use super::packet::{Gone, HEADER, Header};
use super::share::Share;
use crate::host::PieceMut;
use crate::stream::datagram::Incoming;
use std::net::SocketAddr;
use urnic_device::stream::ip_of;
use zerocopy::FromBytes;

/// A ring from another port.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) receiver: Receiver,
    /// Of the other direction, which has no bytes: it shows that we are gone.
    pub(super) back: Sender,
    pub(super) socket: LocalSocket,
    pub(super) slot: Slot,
    pub(super) sender: SocketAddr,
    /// Datagrams that came from the sender by UDP since its offer.
    pub(super) by_udp: u32,
    /// The next packet of the ring, if its header was taken.
    pub(super) header: Option<Header>,
    /// Given back with it.
    pub(super) _share: Share,
}

impl Inbound {
    /// Whether there is a packet, or half of one.
    pub(super) fn has_data(&mut self) -> bool {
        self.header.is_some() || !self.receiver.is_empty()
    }

    /// The header of the next packet.
    pub(super) fn header(&mut self) -> Result<Option<Header>, Gone> {
        if self.header.is_none() && !self.receiver.is_empty() {
            let mut bytes = [0; HEADER];
            self.take_whole(&mut bytes)?;
            self.header = Some(Header::read_from_bytes(&bytes).map_err(|_| Gone)?);
        }
        Ok(self.header)
    }

    /// A sender publishes whole packets only.
    fn take_whole(&mut self, into: &mut [u8]) -> Result<(), Gone> {
        match self.receiver.receive(&mut [PieceMut::of(into)]) {
            Ok((n, _)) if n == into.len() => Ok(()),
            _ if into.is_empty() => Ok(()),
            _ => Err(Gone),
        }
    }

    /// Takes the next packet into `place`, if there is one and all that the sender sent before it
    /// by UDP has come.
    pub(super) fn take(&mut self, local: SocketAddr, place: &mut [u8]) -> Result<Option<Incoming>, Gone> {
        let Some(header) = self.header()? else {
            return Ok(None);
        };
        // Positions on a circle.
        if header.by_udp.wrapping_sub(self.by_udp).cast_signed() > 0 {
            return Ok(None);
        }
        let len = header.len as usize;
        self.take_whole(place.get_mut(..len).ok_or(Gone)?)?;
        self.header = None;
        let destination = ip_of(&header.destination);
        let own = local.ip().to_canonical();
        if !own.is_unspecified() && own != destination {
            return Err(Gone);
        }
        Ok(Some(Incoming {
            len,
            source: SocketAddr::new(ip_of(&header.source), self.sender.port()),
            destination,
        }))
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        if self.slot.is_own() {
            self.back.leave();
        }
    }
}
