//! Commands on UDP ports and multicast groups.

use super::Job;
use super::answer::{Answer, done, ok};
use crate::runtime::streaming::status;
use crate::stream::datagram::{DatagramOptions, DatagramSocket};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use urnic_device::command::Status;
use urnic_device::stream::{BindDatagrams, DatagramPort, Multicast, bind};

/// Attempts to find a port that is free on all addresses of a confined device.
const ATTEMPTS: u32 = 16;

impl Job<'_> {
    pub(super) fn bind_datagrams(&mut self) -> Answer {
        let arguments: BindDatagrams = self.arguments();
        let (local, flags) = (SocketAddr::from(arguments.local), arguments.flags.get());
        if flags & !(bind::IPV6_ONLY | bind::REPORT_REFUSED) != 0 || arguments.reserved.get() != 0 {
            return Err(Status::InvalidArgument);
        }
        let options = DatagramOptions {
            shared: false,
            ipv6_only: flags & bind::IPV6_ONLY != 0,
            reports_refused: flags & bind::REPORT_REFUSED != 0,
        };
        let core = self.core;
        let places = core
            .config
            .listen_addresses(local.ip(), options.ipv6_only)
            .ok_or(Status::Denied)?;
        let mut attempts = 0;
        let sockets = loop {
            attempts += 1;
            match self.bind_all(&places, local, options) {
                // The port that the first address got is taken on another one.
                Err(Status::AddressInUse) if local.port() == 0 && attempts < ATTEMPTS => {}
                bound => break bound?,
            }
        };
        let port = sockets.first().ok_or(Status::AddressNotAvailable)?.local().port();
        let id = core.ports.insert(sockets).ok_or(Status::NoResources)?;
        ok(&DatagramPort {
            id: id.into(),
            port: u32::from(port).into(),
        })
    }

    fn bind_all(
        &self,
        places: &[IpAddr],
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Vec<Box<dyn DatagramSocket>>, Status> {
        let mut port = local.port();
        let mut sockets = Vec::new();
        for ip in places {
            let mut place = SocketAddr::new(*ip, port);
            if let SocketAddr::V6(v6) = &mut place {
                let own = self.core.config.addresses.iter().find(|own| own.ip == *ip);
                v6.set_scope_id(own.map_or(0, |own| own.scope));
            }
            let socket = self.core.network.bind_datagrams(place, options).map_err(status)?;
            port = socket.local().port();
            sockets.push(socket);
        }
        Ok(sockets)
    }

    pub(super) fn close_datagrams(&self) -> Answer {
        let port = self.core.ports.take(self.handle());
        port.map(drop).ok_or(Status::InvalidHandle)?;
        done()
    }

    pub(super) fn attach_multicast(&mut self) -> Answer {
        let (qid, group, interface) = self.multicast()?;
        let core = self.core;
        if !core.config.allows(group.ip()) {
            return Err(Status::Denied);
        }
        let own = core.config.addresses.iter().find(|own| own.ip == interface);
        let scope = own.map_or(0, |own| own.scope);
        let everywhere = match group {
            SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
        };
        let socket = || {
            let place = SocketAddr::new(everywhere, group.port());
            let options = DatagramOptions {
                shared: true,
                ..DatagramOptions::default()
            };
            let mut socket = core.network.bind_datagrams(place, options).map_err(status)?;
            socket.join(group.ip(), interface, scope).map_err(status)?;
            Ok(socket)
        };
        let qp = core.qps.find(qid).ok_or(Status::InvalidHandle)?;
        qp.enter_group(core, group, interface, socket, self.effects)?;
        done()
    }

    pub(super) fn detach_multicast(&mut self) -> Answer {
        let (qid, group, interface) = self.multicast()?;
        let qp = self.core.qps.find(qid).ok_or(Status::InvalidHandle)?;
        qp.leave_group(group, interface, self.effects)?;
        done()
    }

    /// The queue pair, the group and the own address that the arguments name.
    fn multicast(&self) -> Result<(u32, SocketAddr, IpAddr), Status> {
        let arguments: Multicast = self.arguments();
        let group = SocketAddr::from(arguments.group);
        let own = self.core.config.addresses.get(arguments.source.get() as usize);
        let interface = own.ok_or(Status::InvalidArgument)?.ip;
        let fits = group.ip().is_multicast() && group.port() != 0;
        if !fits || interface.is_ipv4() != group.is_ipv4() {
            return Err(Status::InvalidArgument);
        }
        Ok((arguments.qid.get(), group, interface))
    }
}
