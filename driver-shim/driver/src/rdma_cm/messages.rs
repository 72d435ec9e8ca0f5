//! Messages between connection managers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;

use rustix::io::Errno;
use urnic_device::wqe::DatagramAddress;
use urnic_wire::mad::{MAD_LEN, MANAGEMENT_QKEY, MANAGEMENT_QPN};

use crate::driver::Driver;
use crate::message_queues::{Messages, Reach, Received};
use urnic_process::interrupt_context;
use urnic_process::lock::lock;
use urnic_process::port_gids::gid_of;

impl Driver {
    /// Passes messages that arrived to the connection manager.
    pub(crate) fn receive_messages(&self) {
        let Some(messages) = self.connections.messages.get() else {
            return;
        };
        let received = interrupt_context::deferred(|| lock(messages).receive(self.reach()));
        if received.is_empty() {
            return;
        }
        interrupt_context::deferred(|| {
            self.with_rdma_cm(|engine, world| {
                for Received { port, arrival, bytes } in &received {
                    if let Ok(number) = self.slot.number(*port) {
                        engine.message_received(world, number, *arrival, bytes);
                    }
                }
            });
        });
    }

    /// Reports that a message did not arrive.
    pub(crate) fn message_refused(&self, port: u32, psn: u32, errno: Errno) {
        if let Ok(port) = self.slot.number(port) {
            self.with_rdma_cm(|engine, world| engine.message_refused(world, port, psn, errno));
        }
    }

    /// Sends a message of the connection manager from a port and an own address. Returns the PSN of
    /// its packet.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` for an address that the device does not have, or of another family than the
    /// remote one; `EAGAIN` if too many messages wait.
    pub(super) fn send_message(
        &self,
        port: u32,
        local: IpAddr,
        remote: SocketAddr,
        traffic_class: u8,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno> {
        let (local, ip) = (local.to_canonical(), remote.ip().to_canonical());
        let scope = match remote {
            SocketAddr::V6(v6) => v6.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let gids = || self.gids().iter().enumerate();
        let source = gids()
            .find(|(_, gid)| gid.ip == local && (scope == 0 || gid.scope == scope || gid.scope == 0))
            // Linux has all addresses of 127.0.0.0/8.
            .or_else(|| gids().find(|(_, gid)| local.is_loopback() && gid.ip.is_loopback()))
            .filter(|(_, gid)| gid.ip.is_ipv4() == ip.is_ipv4())
            .and_then(|(index, _)| u8::try_from(index).ok())
            .ok_or(Errno::ADDRNOTAVAIL)?;
        let address = DatagramAddress {
            ip: gid_of(ip),
            qkey: MANAGEMENT_QKEY.into(),
            qpn: MANAGEMENT_QPN.into(),
            scope: scope.into(),
            port: remote.port().into(),
            source,
            traffic_class,
        };
        let messages = self.connections.messages.get().ok_or(Errno::INVAL)?;
        lock(messages).send(self.reach(), port, &address, message)
    }

    /// Opens a UDP port for messages of the connection manager. The caller holds its lock, so that
    /// no other thread makes the queues meanwhile.
    ///
    /// # Errors
    /// Those of binding, and of the device's commands; `EOPNOTSUPP` if the device has no datagrams.
    pub(super) fn open_message_port(&self, local: SocketAddr, ipv6_only: bool) -> Result<(u32, u16), Errno> {
        let messages = match self.connections.messages.get() {
            Some(messages) => messages,
            None => {
                let messages = Mutex::new(Messages::new(self.reach())?);
                self.connections.messages.get_or_init(|| messages)
            }
        };
        lock(messages).open(self.reach(), local, ipv6_only)
    }

    /// Closes a UDP port.
    pub(super) fn close_message_port(&self, port: u32) {
        if let Some(messages) = self.connections.messages.get() {
            lock(messages).close(self.reach(), port);
        }
    }

    fn reach(&self) -> Reach<'_> {
        Reach {
            bus: &*self.bus,
            pool: &self.pool,
            commands: &self.commands,
            attributes: &self.attributes,
            gids: self.gids(),
        }
    }
}
