//! Queue pairs for datagrams: their numbers, the addresses that they send to, and multicast groups.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::command::{Handle, Opcode};
use urnic_device::stream::{BindDatagrams, DatagramPort, Endpoint, Multicast, octets_of};
use urnic_device::vocabulary::QpKind;
use urnic_device::wqe::DatagramAddress;

use crate::driver::{Driver, Qp};
use crate::refusal::{Reason, Refusal};
use urnic_process::addressing::AddressVector;
use urnic_process::port_gids::ip_of;
use urnic_process::reachability;
use urnic_wire::roce::{MULTICAST_QPN, UDP_PORT};

/// Attempts to find a number that no queue pair of this process has.
const ATTEMPTS: u32 = 64;

/// The number of a new queue pair.
pub(crate) struct Number {
    pub(crate) qpn: u32,
    /// The device's number of the UDP port; 0 for a queue pair without a port of its own.
    pub(crate) port: u32,
}

/// A peer for datagrams: the contents of an address handle.
#[derive(Debug, Clone, Copy)]
pub struct Destination {
    pub(crate) ip: IpAddr,
    pub(crate) scope: u32,
    pub(crate) source: u8,
    pub(crate) traffic_class: u8,
    /// The peer's queue pairs share the port of RoCE v2.
    pub(crate) shares_port: bool,
}

/// Most address handles at a time: enough for each queue pair of a large cluster.
pub const MAX_ADDRESS_HANDLES: u32 = 1 << 16;

/// An address handle as the device's limit counts it, until it is dropped.
pub struct CountedHandle(Arc<Driver>);

impl Drop for CountedHandle {
    fn drop(&mut self) {
        self.0.objects().address_handles().fetch_sub(1, Ordering::Relaxed);
    }
}

impl Destination {
    /// The address of a datagram to the queue pair `qpn` there; the number of a multicast group is
    /// not considered.
    #[inline]
    pub fn address(&self, qpn: u32, qkey: u32) -> DatagramAddress {
        let (port, qpn) = match self.ip.is_multicast() {
            true => (UDP_PORT, MULTICAST_QPN),
            false if self.shares_port => (UDP_PORT, qpn),
            false => ((qpn >> 8) as u16, qpn),
        };
        DatagramAddress {
            ip: octets_of(self.ip),
            qkey: qkey.into(),
            qpn: qpn.into(),
            scope: self.scope.into(),
            port: port.into(),
            source: self.source,
            traffic_class: self.traffic_class,
        }
    }
}

impl Driver {
    /// Counts one more address handle.
    ///
    /// # Errors
    /// `ENOMEM` beyond [`MAX_ADDRESS_HANDLES`].
    pub fn count_address_handle(self: &Arc<Self>) -> Result<CountedHandle, Errno> {
        let counted = CountedHandle(Arc::clone(self));
        let before = self.objects().address_handles().fetch_add(1, Ordering::Relaxed);
        match before < MAX_ADDRESS_HANDLES {
            true => Ok(counted),
            false => Err(Errno::NOMEM),
        }
    }

    /// A number for a new queue pair. A connected one and one for datagrams may have ports of the
    /// same number, so a number that is in use is not taken.
    pub(crate) fn number_for(&self, kind: QpKind) -> Result<Number, Errno> {
        let mut unsuitable = Vec::new();
        let mut found = Err(Errno::ADDRINUSE);
        for _ in 0..ATTEMPTS {
            let number = match kind {
                QpKind::UnreliableDatagram if !self.has_roce_datagrams() => self.bind_datagrams(),
                _ => self
                    .with_native(|engine, world| engine.add_queue_pair(world))
                    .map(|qpn| Number { qpn, port: 0 }),
            };
            match number {
                Ok(number) if self.qid_of(number.qpn).is_some() => unsuitable.push(number),
                number => {
                    found = number;
                    break;
                }
            }
        }
        unsuitable.iter().for_each(|number| self.give_number_back(number));
        found
    }

    /// Returns the number of a queue pair that was not created.
    pub(crate) fn give_number_back(&self, number: &Number) {
        match number.port {
            0 => self.native_remove(number.qpn),
            id => {
                // The device closed the port if the queue pair had it already.
                let _ = self
                    .commands()
                    .run(Opcode::CloseDatagrams, &Handle { id: id.into() });
            }
        }
    }

    /// Binds a UDP port, which becomes part of the number of the queue pair.
    fn bind_datagrams(&self) -> Result<Number, Errno> {
        let ip = self
            .config()
            .native
            .listen
            .unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        let bind = |port| {
            let local = Endpoint::from(SocketAddr::new(ip, port));
            let arguments = BindDatagrams {
                local,
                ..BindDatagrams::default()
            };
            self.commands()
                .call::<_, DatagramPort>(Opcode::BindDatagrams, &arguments)
        };
        let bound = match &self.config().native.port_range {
            None => bind(0)?,
            Some(range) => range
                .clone()
                .map(bind)
                .find(|bound| !matches!(bound, Err(Errno::ADDRINUSE)))
                .unwrap_or(Err(Errno::ADDRINUSE))?,
        };
        Ok(Number {
            qpn: bound.port.get() << 8,
            port: bound.id.get(),
        })
    }

    /// The peer of an address vector.
    ///
    /// # Errors
    /// `EINVAL` for an address without a GID, of another port, or that no own address can reach;
    /// the errors of [`reachability::check`].
    pub fn destination(&self, av: &AddressVector) -> Result<Destination, Refusal> {
        if av.port != 1 {
            return Err(Reason::Invalid {
                argument: "port_num",
                given: av.port.into(),
                valid: "the device has port 1",
            }
            .invalid());
        }
        if !av.is_global {
            return Err(Reason::Rule("is_global is 0: Ethernet needs a GRH").invalid());
        }
        let unknown = Reason::Invalid {
            argument: "grh.sgid_index",
            given: av.sgid_index.into(),
            valid: "the table of GIDs has no such entry",
        };
        let entry = self
            .port_gids()
            .get(usize::from(av.sgid_index))
            .ok_or(unknown.invalid())?;
        let own = self.gids().get(entry.address).ok_or(unknown.invalid())?;
        let ip = ip_of(&av.dgid);
        let local_scope = match ip {
            IpAddr::V6(ip) => ip.is_unicast_link_local() || ip.is_multicast(),
            IpAddr::V4(_) => false,
        };
        if ip.is_unspecified() || ip.is_ipv4() != own.ip.is_ipv4() {
            let rule = "grh.dgid and the GID at grh.sgid_index are of different kinds, or dgid is 0";
            return Err(Reason::Rule(rule).invalid());
        }
        self.check_reachable(av)?;
        Ok(Destination {
            ip,
            scope: if local_scope { own.scope } else { 0 },
            source: u8::try_from(entry.address).map_err(|_| unknown.invalid())?,
            traffic_class: av.traffic_class,
            shares_port: self.has_roce_datagrams(),
        })
    }
}

impl Driver {
    /// Checks that the host reaches the address of a vector, as a kernel driver does for a RoCE NIC
    /// before the device gets the address. Vectors that name no address are checked elsewhere.
    ///
    /// # Errors
    /// Those of [`reachability::check`].
    pub(crate) fn check_reachable(&self, av: &AddressVector) -> Result<(), Refusal> {
        let ip = ip_of(&av.dgid);
        let is_elsewhere = !(ip.is_unspecified() || ip.is_multicast() || self.local_host().is_here(ip));
        if !self.identity().is_roce() || !av.is_global || !is_elsewhere {
            return Ok(());
        }
        let own = self.port_gids().get(usize::from(av.sgid_index));
        let Some(own) = own.and_then(|entry| self.gids().get(entry.address)) else {
            return Ok(());
        };
        let unreachable = Reason::Unreachable {
            to: ip,
            sgid_index: av.sgid_index,
        };
        let scope = match ip {
            // The network of this end's GID, else of any link-local GID, as for a connection.
            IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                let scopes = [own].into_iter().chain(self.gids()).map(|gid| gid.scope);
                let scope = scopes.into_iter().find(|scope| *scope != 0);
                scope.ok_or(unreachable.with(Errno::NETUNREACH))?
            }
            _ => 0,
        };
        let source = (own.ip.is_ipv4() == ip.is_ipv4() && !own.ip.is_loopback()).then_some(own.ip);
        reachability::check(source, ip, scope).map_err(|errno| unreachable.with(errno))
    }
}

impl Qp {
    /// Receives the datagrams to a multicast group, on all networks of its address family.
    ///
    /// # Errors
    /// `EINVAL` for a queue pair of another kind, or an address that is not a group's; the errors
    /// of joining if no network could be joined.
    pub fn attach_multicast(&self, gid: &[u8; 16]) -> Result<(), Refusal> {
        self.multicast(Opcode::AttachMulticast, gid)
    }

    /// Stops receiving the datagrams to a multicast group.
    ///
    /// # Errors
    /// `EINVAL` for a group that is not attached.
    pub fn detach_multicast(&self, gid: &[u8; 16]) -> Result<(), Refusal> {
        self.multicast(Opcode::DetachMulticast, gid)
    }

    fn multicast(&self, opcode: Opcode, gid: &[u8; 16]) -> Result<(), Refusal> {
        let driver = self.driver();
        driver.check_process()?;
        let group = ip_of(gid);
        if self.kind != QpKind::UnreliableDatagram {
            return Err(Reason::Rule("the queue pair is not of type UD").invalid());
        }
        if !group.is_multicast() {
            return Err(Reason::Rule("gid is not a multicast address").invalid());
        }
        let own = driver.gids().iter().enumerate();
        let same_family = own.filter(|(_, own)| own.ip.is_ipv4() == group.is_ipv4());
        let mut outcome = Err(Errno::INVAL);
        for (source, _) in same_family {
            let arguments = Multicast {
                group: Endpoint::from(SocketAddr::new(group, UDP_PORT)),
                qid: self.qid.into(),
                source: (source as u32).into(),
            };
            let done = driver.commands().run(opcode, &arguments);
            if outcome.is_err() {
                outcome = done;
            }
        }
        Ok(outcome?)
    }
}
