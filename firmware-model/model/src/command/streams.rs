//! Commands on streams.

use super::Job;
use super::answer::{Answer, Check as _, Refused, argument, done, handle, ok};
use crate::rdmap::Attachment;
use crate::runtime::BoundPort;
use crate::runtime::streaming::{MAX_PENDING, status};
use crate::stream::Listener;
use crate::stream::datagram::DatagramOptions;
use crate::stream::roce_port::ServiceName;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use urnic_device::command::{Handle, Status};
use urnic_device::stream::{
    Attach, BindDatagrams, Close, Connect, DatagramPort, Listen, Listening, MAX_STREAMING, Multicast,
    Receive, bind, listen, llp,
};
use zerocopy::little_endian::U32;

pub(super) fn traffic_class(given: U32) -> Result<u8, Status> {
    u8::try_from(given.get()).map_err(|_| Status::InvalidArgument)
}

impl Job<'_> {
    pub(super) fn stream_connect(&mut self) -> Answer {
        self.room_for_events()?;
        let arguments: Connect = self.arguments();
        let remote = SocketAddr::from(arguments.remote);
        let local = Some(SocketAddr::from(arguments.local))
            .filter(|local| local.port() != 0 || arguments.local.ip != [0; 16]);
        let class = traffic_class(arguments.traffic_class);
        let traffic_class = class.of(argument!(Connect.traffic_class))?;
        (remote.port() != 0 && !remote.ip().is_multicast()).of(argument!(Connect.remote))?;
        let is_sctp = match arguments.llp.get() {
            llp::TCP => false,
            llp::SCTP => true,
            _ => return Err(Status::InvalidArgument).of(argument!(Connect.llp)),
        };
        let core = self.core;
        let given = local.map(|l| l.ip()).filter(|ip| !ip.is_unspecified());
        if !core.config.may_connect(remote.ip(), given) {
            return Err(Status::Denied.into());
        }
        let local = match core.config.own_address_towards(remote.ip()) {
            Some(own) if given.is_none() => Some(SocketAddr::new(own, local.map_or(0, |l| l.port()))),
            _ => local,
        };
        let network = core.network_of(is_sctp)?;
        let stream = network.connect(remote, local, traffic_class);
        handle(core.streams.connect(&core.schedule, stream, self.effects)?)
    }

    pub(super) fn stream_listen(&mut self) -> Answer {
        self.room_for_events()?;
        let arguments: Listen = self.arguments();
        let local = SocketAddr::from(arguments.local);
        let given = arguments.traffic_class.get();
        let ipv6_only = given & listen::IPV6_ONLY != 0;
        let class = traffic_class((given & !(listen::IPV6_ONLY | listen::SCTP)).into());
        let traffic_class = class.of(argument!(Listen.traffic_class))?;
        let core = self.core;
        let network = core.network_of(given & listen::SCTP != 0)?;
        let limit = arguments.backlog.get().clamp(1, MAX_PENDING);
        let mut listeners: Vec<Box<dyn Listener>> = Vec::new();
        let mut port = local.port();
        let places = core.config.listen_addresses(local.ip(), ipv6_only);
        for ip in places.ok_or(Status::Denied)? {
            let place = match SocketAddr::new(ip, port) {
                SocketAddr::V6(mut v6) => {
                    if let SocketAddr::V6(requested) = local {
                        v6.set_scope_id(requested.scope_id());
                    }
                    SocketAddr::V6(v6)
                }
                v4 => v4,
            };
            let listener = network.listen(place, limit, traffic_class, ipv6_only);
            let listener = listener.map_err(status)?;
            port = listener.local().port();
            listeners.push(listener);
        }
        if port == 0 {
            // It has no address of that family, so nothing chose a port.
            return Err(Status::AddressNotAvailable.into());
        }
        let lid = core.streams.listen(listeners, limit, self.effects)?;
        ok(&Listening {
            lid: lid.into(),
            port: u32::from(port).into(),
        })
    }

    pub(super) fn stream_unlisten(&self) -> Answer {
        self.core.streams.unlisten(&self.core.schedule, self.handle())?;
        done()
    }

    pub(super) fn stream_send(&mut self) -> Answer {
        let sid = self.arguments::<Handle>().id.get();
        if self.command.input_len.get() > MAX_STREAMING {
            return Err(Status::InvalidArgument.into());
        }
        let input = self.input()?;
        let mut bytes = vec![0; input.len()];
        input.copy_out(0, &mut bytes);
        let core = self.core;
        let now = core.clock.now();
        core.streams
            .send(&core.schedule, sid, &bytes, now, self.effects)?;
        done()
    }

    pub(super) fn stream_receive(&mut self) -> Answer {
        self.room_for_events()?;
        let Receive { sid, least } = self.arguments();
        let (sid, least) = (sid.get(), least.get());
        let len = self.command.output_len.get();
        if len == 0 || len > MAX_STREAMING {
            return Err(Status::InvalidArgument.into());
        }
        (least <= len).of(argument!(Receive.least))?;
        let buffer = self.output()?;
        let core = self.core;
        let least = if least == 0 { len } else { least };
        core.streams
            .receive(&core.schedule, sid, (buffer, least as usize), self.effects)?;
        done()
    }

    pub(super) fn stream_query(&mut self) -> Answer {
        let core = self.core;
        let endpoints = core.streams.query(&core.schedule, self.handle(), self.effects)?;
        self.write_output(&endpoints)?;
        done()
    }

    pub(super) fn stream_close(&mut self) -> Answer {
        let arguments: Close = self.arguments();
        let abort = arguments.abort.get() != 0;
        let (core, sid) = (self.core, arguments.sid.get());
        core.streams
            .close(&core.schedule, sid, abort, self.effects, |stream, unsent| {
                core.linger(stream, unsent);
            })?;
        done()
    }

    pub(super) fn stream_attach(&mut self) -> Answer {
        self.room_for_events()?;
        let (arguments, attachment) = self.attachment()?;
        let (core, sid) = (self.core, arguments.sid.get());
        let qp = core.qps.find(arguments.qid.get()).of(argument!(Attach.qid))?;
        let attach =
            |stream: &mut _, awaited, effects: &mut _| qp.attach(core, stream, &attachment, awaited, effects);
        core.streams
            .hand_over(&core.schedule, sid, self.effects, attach)?;
        done()
    }

    pub(super) fn loopback_attach(&mut self) -> Answer {
        self.room_for_events()?;
        let (arguments, attachment) = self.attachment()?;
        let qp = self.core.qps.find(arguments.qid.get());
        let qp = qp.of(argument!(Attach.qid))?;
        qp.attach_loopback(self.core, &attachment, self.effects)?;
        done()
    }

    fn attachment(&self) -> Result<(Attach, Attachment), Status> {
        let arguments: Attach = self.arguments();
        let limits = &self.core.config.limits;
        let mut attachment = Attachment::try_from(&arguments).map_err(|_| Status::InvalidArgument)?;
        // Start-up may name 0x3fff, "no limit of mine" (EMPA-37): the device's own holds.
        attachment.ird = attachment.ird.min(limits.ird);
        attachment.ord = attachment.ord.min(limits.ord);
        Ok((arguments, attachment))
    }
}

// Commands on UDP ports and multicast groups.

/// Attempts to find a port that is free on all addresses of a confined device.
const ATTEMPTS: u32 = 16;

impl Job<'_> {
    pub(super) fn bind_datagrams(&mut self) -> Answer {
        let arguments: BindDatagrams = self.arguments();
        let (local, flags) = (SocketAddr::from(arguments.local), arguments.flags.get());
        let known = bind::IPV6_ONLY | bind::REPORT_REFUSED | bind::SERVICE;
        (flags & !known == 0).of(argument!(BindDatagrams.flags))?;
        (arguments.reserved.get() == 0).of(argument!(BindDatagrams.reserved))?;
        let options = DatagramOptions {
            ipv6_only: flags & bind::IPV6_ONLY != 0,
            reports_refused: flags & bind::REPORT_REFUSED != 0,
            ..DatagramOptions::EXCLUSIVE
        };
        let core = self.core;
        let places = core
            .config
            .listen_addresses(local.ip(), options.ipv6_only)
            .ok_or(Status::Denied)?;
        let mut attempts = 0;
        let is_service = flags & bind::SERVICE != 0;
        let bound = loop {
            attempts += 1;
            match self.bind_all(&places, local, options, is_service) {
                // The port that the first address got is taken on another one.
                Err(Status::AddressInUse) if local.port() == 0 && attempts < ATTEMPTS => {}
                bound => break bound?,
            }
        };
        let first = bound.sockets.first().ok_or(Status::AddressNotAvailable)?;
        let port = first.local().port();
        let id = core.ports.insert(bound).ok_or(Status::NoResources)?;
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
        is_service: bool,
    ) -> Result<BoundPort, Status> {
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
        let service = match is_service {
            true => self.name_service(port, places, options.ipv6_only)?,
            false => None,
        };
        Ok(BoundPort { sockets, service })
    }

    /// Has other members of the port of RoCE v2 pass on the requests for services with this number.
    fn name_service(
        &self,
        number: u16,
        places: &[IpAddr],
        ipv6_only: bool,
    ) -> Result<Option<ServiceName>, Status> {
        match self.core.roce.name_service(number, places.to_vec(), ipv6_only) {
            Ok(name) => Ok(Some(name)),
            // Nobody passes packets on.
            Err(errno @ (Errno::NOTCONN | Errno::OPNOTSUPP)) => {
                tracing::debug!(%errno, number, "no other process passes requests for a service on");
                Ok(None)
            }
            Err(errno) => Err(status(errno)),
        }
    }

    pub(super) fn close_datagrams(&self) -> Answer {
        let port = self.core.ports.take(self.handle());
        port.map(drop).of(argument!(Handle.id))?;
        done()
    }

    pub(super) fn attach_multicast(&mut self) -> Answer {
        let (qid, group, interface) = self.multicast()?;
        let core = self.core;
        if !core.config.allows(group.ip()) {
            return Err(Status::Denied.into());
        }
        let own = core.config.addresses.iter().find(|own| own.ip == interface);
        let scope = own.map_or(0, |own| own.scope);
        // Not on all addresses: the port is also that of connections.
        let socket = |mut place: SocketAddr| {
            if let SocketAddr::V6(v6) = &mut place
                && !v6.ip().is_unspecified()
            {
                v6.set_scope_id(scope);
            }
            let options = DatagramOptions {
                shared: true,
                ..DatagramOptions::default()
            };
            let mut socket = core.network.bind_datagrams(place, options).map_err(status)?;
            socket.join(group.ip(), interface, scope).map_err(status)?;
            Ok(socket)
        };
        let qp = core.qps.find(qid).of(argument!(Multicast.qid))?;
        qp.enter_group(core, group, interface, socket, self.effects)?;
        done()
    }

    pub(super) fn detach_multicast(&mut self) -> Answer {
        let (qid, group, interface) = self.multicast()?;
        let qp = self.core.qps.find(qid).of(argument!(Multicast.qid))?;
        qp.leave_group(group, interface, self.effects)?;
        done()
    }

    /// The queue pair, the group and the own address that the arguments name.
    fn multicast(&self) -> Result<(u32, SocketAddr, IpAddr), Refused> {
        let arguments: Multicast = self.arguments();
        let group = SocketAddr::from(arguments.group);
        let own = self.core.config.addresses.get(arguments.source.get() as usize);
        let own = own
            .ok_or(Status::InvalidArgument)
            .of(argument!(Multicast.source))?;
        let interface = own.ip;
        let fits = group.ip().is_multicast() && group.port() != 0;
        (fits && interface.is_ipv4() == group.is_ipv4()).of(argument!(Multicast.group))?;
        Ok((arguments.qid.get(), group, interface))
    }
}
