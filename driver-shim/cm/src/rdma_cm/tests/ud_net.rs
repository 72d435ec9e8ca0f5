//! Messages between the processes of a [`Net`], which may be lost.

use super::net::{Net, Wire};
use super::*;

use std::collections::BTreeMap;

/// A channel, and an id on it.
pub(super) type Ud = (u64, u32);

/// A message in flight.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) to: usize,
    pub(super) port: u32,
    pub(super) arrival: Arrival,
    pub(super) bytes: Vec<u8>,
}

/// A UDP port of a process, on one of its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UdPort {
    side: usize,
    pub(super) device: u32,
    port: u16,
    /// Whether the port takes IPv4 and IPv6.
    families: [bool; 2],
}

/// The fate of a message.
#[derive(Debug)]
pub(super) enum Fate {
    Arrives(Sent),
    /// The network reports that no process has the port.
    Refused,
    Lost,
}

/// The UDP ports of all processes.
#[derive(Debug, Default)]
pub(super) struct UdWire {
    /// By number.
    pub(super) ports: BTreeMap<u32, UdPort>,
    /// The addresses of each process's devices but the first, which has all others.
    pub(super) others: [Vec<IpAddr>; 2],
    /// Whether the messages that each process sends are lost.
    pub(super) lost: [bool; 2],
    /// Each process is a host of its own, with the address 10.0.0.N.
    pub(super) hosts: bool,
    /// The devices have no datagrams.
    pub(super) unsupported: bool,
    /// The network does not report ports without a process.
    pub(super) mute: bool,
    /// The number of messages that were sent.
    pub(super) sent: u32,
    /// The last message that was sent.
    pub(super) last: Vec<u8>,
    /// Where it was sent to.
    pub(super) last_remote: Option<SocketAddr>,
}

/// The address of a process that is a host of its own.
pub(super) fn host(side: usize) -> IpAddr {
    [10, 0, 0, side as u8].into()
}

impl UdWire {
    /// The device of a process that has the address.
    pub(super) fn device_of(&self, side: usize, ip: IpAddr) -> u32 {
        let other = self.others[side].iter().position(|other| *other == ip);
        other.map_or(0, |index| index as u32 + 1)
    }

    /// Whether a port is on the host of this process.
    pub(super) fn is_of(&self, port: &UdPort, side: usize) -> bool {
        !self.hosts || port.side == side
    }

    /// Whether a port is on the host with this address.
    fn is_on(&self, port: &UdPort, ip: IpAddr) -> bool {
        !self.hosts || ip == host(port.side)
    }
}

impl Wire {
    /// Opens a UDP port: with several devices, that of an unspecified address on each device.
    pub(super) fn open_ports(
        &mut self,
        side: usize,
        local: SocketAddr,
        ipv6_only: bool,
    ) -> Result<(Vec<u32>, u16), Errno> {
        let port = match local.port() {
            0 => 50_000 + self.number() as u16,
            port => port,
        };
        let devices = match local.ip().is_unspecified() {
            true => (0..=self.ud.others[side].len() as u32).collect(),
            false => vec![self.ud.device_of(side, local.ip())],
        };
        let local = SocketAddr::new(local.ip(), port);
        let open = |device| self.open_port(side, device, local, ipv6_only);
        let numbers: Result<Vec<u32>, Errno> = devices.into_iter().map(open).collect();
        Ok((numbers?, port))
    }

    pub(super) fn open_port(
        &mut self,
        side: usize,
        device: u32,
        local: SocketAddr,
        ipv6_only: bool,
    ) -> Result<u32, Errno> {
        let dual = local.is_ipv6() && local.ip().is_unspecified() && !ipv6_only;
        let families = [dual || local.is_ipv4(), local.is_ipv6()];
        let number = self.number();
        let port = match local.port() {
            0 => 50_000 + number as u16,
            port => port,
        };
        if self
            .ud
            .ports
            .values()
            .filter(|other| (0..2).any(|family| other.families[family] && families[family]))
            .filter(|other| self.ud.is_of(other, side))
            .any(|other| other.port == port && other.device == device)
        {
            return Err(Errno::ADDRINUSE);
        }
        let opened = UdPort {
            side,
            device,
            port,
            families,
        };
        self.ud.ports.insert(number, opened);
        Ok(number)
    }

    /// Whether a process has the UDP port for messages.
    pub(super) fn has_udp_port(&self, port: u16) -> bool {
        self.ud.ports.values().any(|own| own.port == port)
    }

    pub(super) fn message(
        &mut self,
        side: usize,
        from: u32,
        (local, remote): (IpAddr, SocketAddr),
        bytes: &[u8],
    ) -> Result<Fate, Errno> {
        let UdPort { device, port, .. } = *self.ud.ports.get(&from).ok_or(Errno::INVAL)?;
        if device != self.ud.device_of(side, local) {
            return Err(Errno::ADDRNOTAVAIL);
        }
        self.ud.sent += 1;
        self.ud.last = bytes.to_vec();
        self.ud.last_remote = Some(remote);
        let is_there = |at: &UdPort| {
            let family = usize::from(remote.is_ipv6());
            let device = self.ud.device_of(at.side, remote.ip());
            let fits = at.port == remote.port() && at.device == device && at.families[family];
            fits && self.ud.is_on(at, remote.ip())
        };
        let found = self.ud.ports.iter().find(|(_, at)| is_there(at));
        let sent = found.map(|(number, at)| Sent {
            to: at.side,
            port: *number,
            arrival: Arrival {
                local: remote.ip(),
                remote: SocketAddr::new(local, port),
            },
            bytes: bytes.to_vec(),
        });
        Ok(match sent {
            _ if self.ud.lost[side] => Fate::Lost,
            Some(sent) => Fate::Arrives(sent),
            // A port of SCTP drops other packets.
            None if self.ud.mute || self.llps(remote.port()).contains(&Llp::Sctp) => Fate::Lost,
            None => Fate::Refused,
        })
    }
}

impl Net {
    /// A listener for datagrams on a channel of its own.
    pub(super) fn listen_for_datagrams(&mut self, side: usize, port: u16, backlog: u32) -> Ud {
        self.at(side, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, 100, PS_DATAGRAMS[0]).unwrap();
            let local = CmAddress::Ip(format!("0.0.0.0:{port}").parse().unwrap());
            engine.bind(world, channel, id, local).unwrap();
            engine.listen(world, channel, id, backlog).unwrap();
            (channel, id)
        })
    }

    /// An id for datagrams that is ready to connect.
    pub(super) fn ready_for_datagrams(&mut self, side: usize, port: u16, uid: u64) -> Ud {
        self.ready_for_datagrams_to(side, &format!("127.0.0.1:{port}"), uid)
    }

    /// An id for datagrams that is ready to connect to this service.
    pub(super) fn ready_for_datagrams_to(&mut self, side: usize, remote: &str, uid: u64) -> Ud {
        let (channel, id) = self.at(side, |engine, world| {
            let channel = engine.open_channel();
            let id = engine.create(channel, uid, PS_DATAGRAMS[0]).unwrap();
            let remote = CmAddress::Ip(remote.parse().unwrap());
            engine.resolve_address(world, channel, id, None, remote).unwrap();
            engine.resolve_route(world, channel, id).unwrap();
            (channel, id)
        });
        assert_eq!(
            self.take_events(side, channel),
            [(uid, id, 0, 0), (uid, id, 2, 0)]
        );
        (channel, id)
    }

    /// The UDP port of a process from which ids without a port send queries.
    pub(super) fn common_port(&self, side: usize) -> u16 {
        let number = self.engines[side].datagrams.common_ports[&0];
        self.wire.borrow().ud.ports[&number].port
    }

    /// Delivers a message of a stranger to a UDP port.
    pub(super) fn inject(&mut self, side: usize, port: u16, bytes: &[u8]) {
        self.inject_from("203.0.113.7:4000", side, port, bytes);
    }

    /// Delivers a message from this address to a UDP port.
    pub(super) fn inject_from(&mut self, from: &str, side: usize, port: u16, bytes: &[u8]) {
        let ports = self.wire.borrow().ud.ports.clone();
        let (number, _) = ports
            .iter()
            .find(|(_, at)| (at.side, at.port) == (side, port))
            .unwrap();
        let arrival = Arrival {
            local: [127, 0, 0, 1].into(),
            remote: from.parse().unwrap(),
        };
        self.at(side, |engine, world| {
            engine.message_received(world, *number, arrival, bytes);
        });
        self.run();
    }
}
