//! A UDP port whose datagrams get lost or damaged, arrive twice, or in another order.

use crate::stream::datagram::{DatagramSocket, Incoming, Outgoing};
use crate::stream::wrapper::DatagramWrapper;
use rustix::io::Errno;
use urnic_faults::{DatagramFault, DevicePlan, occasion};

/// Most batches that a port which is down loses in one call.
const MOST_LOST: usize = 64;

/// A UDP port with its faults.
#[derive(Debug)]
pub(super) struct FaultySocket {
    socket: Box<dyn DatagramSocket>,
    plan: DevicePlan,
    /// A packet that is sent after the next one.
    late: Option<(Outgoing, Vec<u8>)>,
}

impl FaultySocket {
    pub(super) fn new(socket: Box<dyn DatagramSocket>, plan: DevicePlan) -> FaultySocket {
        FaultySocket {
            socket,
            plan,
            late: None,
        }
    }

    /// Sends one packet, with its faults.
    fn send_one(&mut self, buffer: &[u8], packet: &Outgoing) -> Result<usize, Errno> {
        let occasion = occasion::datagram(packet.destination.ip());
        let (mut is_lost, mut is_late, mut is_doubled, mut is_damaged) = (false, false, false, false);
        for fault in self.plan.strikes(&occasion) {
            match fault {
                DatagramFault::Drop => is_lost = true,
                DatagramFault::Duplicate => is_doubled = true,
                DatagramFault::Reorder => is_late = true,
                DatagramFault::Corrupt => is_damaged = true,
            }
        }
        if is_lost || self.plan.port_down_for().is_some() {
            return Ok(1);
        }
        let copied;
        let (mut buffer, mut packet) = (buffer, *packet);
        if is_late || is_damaged {
            let mut bytes = buffer
                .get(packet.at..packet.at + packet.len)
                .unwrap_or_default()
                .to_vec();
            if is_damaged {
                damage(&mut bytes);
            }
            packet.at = 0;
            if is_late && self.late.is_none() {
                self.late = Some((packet, bytes));
                return Ok(1);
            }
            copied = bytes;
            buffer = &copied;
        }
        let taken = self.socket.send(buffer, &[packet])?;
        if taken == 0 {
            return Ok(0);
        }
        // A packet that the network does not take now is lost.
        if is_doubled {
            let _ = self.socket.send(buffer, &[packet]);
        }
        if let Some((late, bytes)) = self.late.take() {
            let _ = self.socket.send(&bytes, &[late]);
        }
        Ok(1)
    }
}

/// Changes a bit in the middle, which a checksum covers.
fn damage(bytes: &mut [u8]) {
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
}

impl DatagramWrapper for FaultySocket {
    fn inner(&self) -> &dyn DatagramSocket {
        &*self.socket
    }

    fn inner_mut(&mut self) -> &mut dyn DatagramSocket {
        &mut *self.socket
    }

    fn send(&mut self, buffer: &[u8], packets: &[Outgoing]) -> Result<usize, Errno> {
        let mut taken = 0;
        for packet in packets {
            match self.send_one(buffer, packet) {
                Ok(0) => break,
                Ok(_) => taken += 1,
                Err(errno) if taken == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(taken)
    }

    /// Each packet has faults of its own.
    fn divides(&self) -> bool {
        false
    }

    fn receive(&mut self, buffer: &mut [u8], packets: &mut Vec<Incoming>) -> bool {
        let before = packets.len();
        let mut is_full = false;
        for _ in 0..MOST_LOST {
            is_full = self.socket.receive(buffer, packets);
            if packets.len() == before || self.plan.port_down_for().is_none() {
                break;
            }
            packets.truncate(before);
        }
        is_full
    }
}
