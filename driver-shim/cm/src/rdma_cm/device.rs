//! The device that the connection manager acts on.

use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use urnic_wire::mad::MAD_LEN;

use crate::carrier::{Attachment, Carrier};
use crate::mpa_startup::Time;
use urnic_config::Llp;

/// The device's stream commands, whose results [`StreamOwner`](crate::carrier::StreamOwner) takes,
/// and the host's data on addresses and queue pairs.
pub trait Device: Carrier {
    /// Listens over a lower layer, for connections in packets of this traffic class. An unspecified
    /// IPv6 address also means IPv4, unless `ipv6_only`. Returns listener and port.
    fn listen(
        &mut self,
        llp: Llp,
        local: SocketAddr,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<(u32, u16), Errno>;
    /// Stops listening.
    fn unlisten(&mut self, lid: u32);
    /// Begins a connection over a lower layer in packets of this traffic class.
    fn connect(
        &mut self,
        llp: Llp,
        remote: SocketAddr,
        local: SocketAddr,
        traffic_class: u8,
    ) -> Result<u32, Errno>;
    /// The addresses of both ends of a stream, the local one first.
    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno>;
    /// The source address of packets to `remote`; its port has no meaning.
    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno>;
    /// The GID of an address of this host, and its index.
    fn own_gid(&mut self, address: SocketAddr) -> (u8, [u8; 16]);
    /// The number of the queue pair with the verbs number `qpn`, on the device that has the address
    /// `local`.
    fn queue_pair(&mut self, local: SocketAddr, qpn: u32) -> Option<u32>;
    /// The node GUID, in network order, of the device that has the address `local`.
    fn node_guid(&mut self, local: SocketAddr) -> u64;
    /// Whether the queue pair is of kind UC.
    fn is_unreliable(&mut self, qid: u32) -> bool;
    /// Whether the program of a RoCE NIC brought the queue pair to RTR or RTS with the attributes
    /// of `Engine::qp_attributes`, so that it waits for a stream of the connection manager.
    fn awaits_stream(&mut self, qid: u32) -> bool;
    /// Brings a queue pair to RTS and attaches a stream to it.
    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno>;
    /// Makes a queue pair send its posted work and then close.
    fn drain(&mut self, qid: u32);
    /// Puts a queue pair into the error state.
    fn abort(&mut self, qid: u32);
    /// Opens a UDP port for messages to other connection managers. An unspecified IPv6 address also
    /// means IPv4, unless `ipv6_only`. Returns its number and the UDP port;
    /// `Engine::message_received` takes the messages that arrive there. With several devices, an
    /// unspecified address means a number for each address of all devices.
    ///
    /// With the wire of RoCE v2 the port only holds its number: all messages come and go by one
    /// queue pair of the device, whose number is that of [`open_port_of`](Self::open_port_of).
    fn open_ports(&mut self, local: SocketAddr, ipv6_only: bool) -> Result<(Vec<u32>, u16), Errno>;
    /// Opens a UDP port for such messages on this device, and returns its number. With the wire of
    /// RoCE v2 this is the number of queue pair 1, at each call the same.
    fn open_port_of(&mut self, device: u32, local: SocketAddr) -> Result<u32, Errno>;
    /// A number of the device that has the address.
    fn device_of(&mut self, local: SocketAddr) -> Result<u32, Errno>;
    /// The number, as of [`device_of`](Self::device_of), of the device that has a port.
    fn device_of_port(&mut self, port: u32) -> u32;
    /// The properties of a device that connections of RoCE need.
    fn channel_adapter(&mut self, device: u32) -> Result<ChannelAdapter, Errno>;
    /// Closes a UDP port.
    fn close_port(&mut self, port: u32);
    /// Sends a message from a UDP port and an own address; returns its number at the port. The
    /// message may be lost: if the network reports this, the report goes to
    /// `Engine::message_refused`.
    fn send_message(
        &mut self,
        port: u32,
        local: IpAddr,
        remote: SocketAddr,
        traffic_class: u8,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno>;
    /// Sets whether a channel has events.
    fn signal(&mut self, channel: u64, events: bool);
}

/// The time and the device during a call of the engine.
pub struct World<'a> {
    /// The current time.
    pub now: Time,
    /// The device's streams and queue pairs.
    pub device: &'a mut dyn Device,
}

/// A request to the driver concerning a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The queue pair may send: open the gate.
    Open(u32),
}

/// A device, as its peers see it with `wire=roce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelAdapter {
    /// The node GUID.
    pub guid: u64,
    /// The largest path MTU (`enum ibv_mtu`).
    pub path_mtu: u8,
    /// The upper 16 bits of the numbers of its queue pairs, which no other process of the host has.
    pub native_port: u16,
}

/// The addresses of a message that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The own address that the message was sent to.
    pub local: IpAddr,
    /// The sender's address, and the UDP port that it sent from.
    pub remote: SocketAddr,
}
