//! The device of the connection manager's engine: stream commands, changes of queue pairs, and
//! messages to other connection managers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::command::modify;
use urnic_device::vocabulary::{QpKind, QpState};
use urnic_device::wqe::DatagramAddress;
use urnic_wire::mad::{MAD_LEN, MANAGEMENT_QKEY, MANAGEMENT_QPN};
use urnic_wire::roce::UDP_PORT;

use crate::driver::Driver;
use crate::events::now;
use crate::manager::OpenDevices;
use crate::manager::Slot;
use crate::manager::inventory::Inventory;
use crate::manager::inventory::{source_of_device, source_of_host};
use crate::message_queues::{Messages, Reach, Received};
use crate::streams::Streams;
use urnic_cm::carrier::{Attachment, Carrier, Inbox, Terms};
use urnic_cm::mpa_startup::Close;
use urnic_cm::rdma_cm::{ChannelAdapter, Device, Engine, Notice, World};
use urnic_config::Llp;
use urnic_process::interrupt_context;
use urnic_process::port_gids::gid_of;

/// Ports that a listener on any address tries, if the program asked for no certain one.
const PORTS_TO_TRY: u32 = 16;

impl Driver {
    /// Calls the engine of the connection manager, then applies its notices.
    pub(crate) fn with_rdma_cm<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let manager = self.connections().manager();
        let mut state = manager.lock();
        let (engine, devices) = state.parts();
        let mut device = CmDevice {
            inventory: manager.inventory(),
            devices,
        };
        let before = engine.deadline();
        let result = work(
            engine,
            &mut World {
                now: now(),
                device: &mut device,
            },
        );
        let notices = engine.notices();
        let after = engine.deadline();
        drop(state);
        for Notice::Open(number) in notices {
            let (slot, qid) = Slot::split(number);
            if let Some(qp) = manager.driver(slot).and_then(|driver| driver.qp(qid)) {
                qp.gate().open();
            }
        }
        self.event_loop().wake_if_earlier(before, after);
        self.wake_others();
        result
    }

    /// Wakes the threads of other devices whose events a command on this thread caused: this thread
    /// handles only those of its own device.
    fn wake_others(&self) {
        let manager = &self.connections().manager();
        if manager.inventory().is_some_and(Inventory::is_plural) {
            for driver in manager.drivers() {
                if !std::ptr::eq(&*driver, self) && driver.event_loop().is_due() {
                    driver.event_loop().wake();
                }
            }
        }
    }

    /// Reports that a queue pair lost its stream.
    pub(crate) fn cm_lost(&self, qid: u32, errno: Errno) {
        if let Ok(number) = self.connections().slot().number(qid) {
            self.with_rdma_cm(|engine, world| engine.connection_ended(world, number, errno));
        }
    }

    /// Ends the device's connections that are made by messages: no stream does that when the
    /// process ends.
    pub(crate) fn cm_end(&self) {
        if self.has_roce_connections() && !self.commands().is_lost() {
            let slot = self.connections().slot();
            self.with_rdma_cm(|engine, world| engine.end(world, |number| Slot::split(number).0 == slot));
        }
    }

    /// Reports that the device is lost.
    pub(crate) fn cm_lost_device(&self) {
        let (manager, slot) = (&self.connections().manager(), self.connections().slot());
        let inventory = manager.inventory();
        let index = manager.index(slot);
        let is_at = |local: SocketAddr| inventory.is_none_or(|it| it.device_of(local.ip()).ok() == index);
        let is_its = |number| Slot::split(number).0 == slot;
        self.with_rdma_cm(|engine, world| engine.device_lost(world, is_its, is_at));
    }

    fn set_state(&self, qid: u32, state: QpState) -> Result<(), Errno> {
        self.modify_qp(qid, modify::STATE, |to| to.state = (state as u32).into())
    }

    /// Passes messages that arrived to the connection manager.
    pub(crate) fn receive_messages(&self) {
        let Some(messages) = self.connections().messages() else {
            return;
        };
        let received = interrupt_context::deferred(|| messages.lock().receive(self.reach()));
        if received.is_empty() {
            return;
        }
        interrupt_context::deferred(|| {
            self.with_rdma_cm(|engine, world| {
                for Received { port, arrival, bytes } in &received {
                    if let Ok(number) = self.connections().slot().number(*port) {
                        engine.message_received(world, number, *arrival, bytes);
                    }
                }
            });
        });
    }

    /// Reports that a message did not arrive.
    pub(crate) fn message_refused(&self, port: u32, psn: u32, errno: Errno) {
        if let Ok(port) = self.connections().slot().number(port) {
            self.with_rdma_cm(|engine, world| engine.message_refused(world, port, psn, errno));
        }
    }

    /// Sends a message of the connection manager from a port and an own address. Returns the PSN of
    /// its packet.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` for an address that the device does not have, or of another family than the
    /// remote one; `EAGAIN` if too many messages wait.
    fn send_message(
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
            port: match self.has_roce_datagrams() {
                true => UDP_PORT,
                false => remote.port(),
            }
            .into(),
            source,
            traffic_class,
        };
        let messages = self.connections().messages().ok_or(Errno::INVAL)?;
        messages.lock().send(self.reach(), port, &address, message)
    }

    fn new_messages(&self) -> Result<Messages, Errno> {
        let member = match self.has_roce_connections() {
            true => self.native_port()?,
            false => 0,
        };
        Messages::new(self.reach(), member)
    }

    /// Opens a UDP port for messages of the connection manager. The caller holds the connection
    /// manager's lock, so that no other thread makes the queues at the same time.
    ///
    /// # Errors
    /// Those of binding, and of the device's commands; `EOPNOTSUPP` if the device has no datagrams.
    fn open_message_port(&self, local: SocketAddr, ipv6_only: bool) -> Result<(u32, u16), Errno> {
        let messages = self.connections().messages_or(|| self.new_messages())?;
        messages.lock().open(self.reach(), local, ipv6_only)
    }

    /// At the port of RoCE v2, the number of queue pair 1; at another one, that of a new UDP port.
    /// The caller holds the connection manager's lock.
    ///
    /// # Errors
    /// As [`open_message_port`](Self::open_message_port).
    fn open_common_port(&self, local: SocketAddr) -> Result<u32, Errno> {
        if local.port() != UDP_PORT || !self.has_roce_connections() {
            return Ok(self.open_message_port(local, false)?.0);
        }
        let messages = self.connections().messages_or(|| self.new_messages())?;
        messages.lock().open_general(self.reach())
    }

    /// Closes a UDP port.
    fn close_message_port(&self, port: u32) {
        if let Some(messages) = self.connections().messages() {
            messages.lock().close(self.reach(), port);
        }
    }

    fn reach(&self) -> Reach<'_> {
        Reach {
            bus: &**self.bus(),
            pool: self.pool(),
            commands: self.commands(),
            attributes: self.attributes(),
            gids: self.gids(),
            has_roce_datagrams: self.has_roce_datagrams(),
            has_roce_connections: self.has_roce_connections(),
        }
    }
}

/// The devices of the engine, while the lock of the connection manager is held.
struct CmDevice<'a> {
    inventory: Option<&'a Inventory>,
    devices: &'a mut OpenDevices<Driver>,
}

impl CmDevice<'_> {
    /// Calls `work` with the streams of the device in a slot.
    ///
    /// # Errors
    /// Those of `work`; `EIO` if the device is gone.
    fn in_slot<T>(
        &mut self,
        slot: Slot,
        work: impl FnOnce(&mut Streams<'_>) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let (driver, buffers) = self.devices.driver_and_buffers(slot).ok_or(Errno::IO)?;
        work(&mut Streams {
            driver: &driver,
            buffers,
        })
    }

    /// Calls `work` with the streams of the device of an object, and the device's number of it.
    ///
    /// # Errors
    /// Those of `work`; `EIO` if the device is gone.
    fn on<T>(
        &mut self,
        number: u32,
        work: impl FnOnce(&mut Streams<'_>, u32) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let (slot, of_device) = Slot::split(number);
        self.in_slot(slot, |streams| work(streams, of_device))
    }

    /// The slot of the device that has the address.
    ///
    /// # Errors
    /// `ENODEV` if no device has it.
    fn slot_of(&self, local: SocketAddr) -> Result<Slot, Errno> {
        let index = self.inventory.map_or(Ok(0), |it| it.device_of(local.ip()))?;
        self.devices.current(index)
    }

    /// The driver of the device that has the address.
    fn driver_of(&self, local: SocketAddr) -> Option<Arc<Driver>> {
        let slot = self.slot_of(local).ok()?;
        self.devices.driver(slot)
    }

    /// Opens something with `open` at all places where an id listens that is bound to `local`, at
    /// one port. Returns the numbers, and the port. `close` undoes it.
    ///
    /// # Errors
    /// The error of the first place at which the device cannot open it, except that it has lost the
    /// address.
    fn open_everywhere(
        &mut self,
        local: SocketAddr,
        ipv6_only: bool,
        open: impl Fn(&mut Streams<'_>, SocketAddr) -> Result<(u32, u16), Errno>,
        close: impl Fn(&mut Self, u32),
    ) -> Result<(Vec<u32>, u16), Errno> {
        let places = match self.inventory {
            Some(inventory) => inventory.listening(local, ipv6_only)?,
            None => vec![(0, local)],
        };
        let mut opened = self.open_at(&places, &open, &close);
        // The port that the first device chose may be in use at another address.
        for _ in 1..PORTS_TO_TRY {
            if local.port() == 0 && opened == Err(Errno::ADDRINUSE) {
                opened = self.open_at(&places, &open, &close);
            }
        }
        opened
    }

    /// Opens something at all these places, as [`open_everywhere`](CmDevice::open_everywhere).
    fn open_at(
        &mut self,
        places: &[(usize, SocketAddr)],
        open: impl Fn(&mut Streams<'_>, SocketAddr) -> Result<(u32, u16), Errno>,
        close: impl Fn(&mut Self, u32),
    ) -> Result<(Vec<u32>, u16), Errno> {
        let mut numbers = Vec::new();
        let mut chosen = 0;
        for (index, place) in places {
            let mut local = *place;
            if place.port() == 0 {
                local.set_port(chosen);
            }
            let opened = self.devices.current(*index).and_then(|slot| {
                self.in_slot(slot, |streams| {
                    let (number, port) = open(streams, local)?;
                    Ok((slot.number(number)?, port))
                })
            });
            match opened {
                Ok((number, port)) => {
                    numbers.push(number);
                    chosen = port;
                }
                Err(Errno::ADDRNOTAVAIL) if places.len() > 1 => {
                    tracing::debug!("not listening at {local}: its interface has lost the address");
                }
                Err(errno) => {
                    numbers.into_iter().for_each(|number| close(self, number));
                    return Err(errno);
                }
            }
        }
        if numbers.is_empty() {
            return Err(Errno::ADDRNOTAVAIL);
        }
        Ok((numbers, chosen))
    }

    fn close_listener(&mut self, number: u32) {
        let _ = self.on(number, |streams, lid| {
            streams.unlisten(lid);
            Ok(())
        });
    }
}

impl Carrier for CmDevice<'_> {
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno> {
        self.on(sid, |streams, sid| streams.send(sid, bytes))
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        self.on(sid, |streams, sid| streams.receive(sid, len))
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        self.on(sid, |streams, sid| streams.inbox(sid))
    }

    fn close(&mut self, sid: u32, how: Close) {
        let _ = self.on(sid, |streams, sid| {
            streams.close(sid, how);
            Ok(())
        });
    }
}

impl Device for CmDevice<'_> {
    fn listen(
        &mut self,
        llp: Llp,
        local: SocketAddr,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<(u32, u16), Errno> {
        let open = |streams: &mut Streams<'_>, local| {
            let opened = streams.listen(llp, local, traffic_class, ipv6_only);
            opened.map_err(of_connection_manager)
        };
        let (numbers, port) = self.open_everywhere(local, ipv6_only, open, CmDevice::close_listener)?;
        let number = self
            .devices
            .listeners()
            .join(&numbers)
            .ok_or(Errno::ADDRNOTAVAIL)?;
        Ok((number, port))
    }

    fn unlisten(&mut self, lid: u32) {
        for number in self.devices.listeners().part(lid) {
            self.close_listener(number);
        }
    }

    fn connect(
        &mut self,
        llp: Llp,
        remote: SocketAddr,
        local: SocketAddr,
        traffic_class: u8,
    ) -> Result<u32, Errno> {
        let slot = self.slot_of(local)?;
        let connect = |streams: &mut Streams<'_>| {
            let begun = streams.connect(llp, remote, Some(local), traffic_class);
            begun.map_err(of_connection_manager)
        };
        slot.number(self.in_slot(slot, connect)?)
    }

    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno> {
        self.on(sid, |streams, sid| streams.ends(sid))
    }

    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno> {
        if let Some(errno) = urnic_faults::fails("", "resolve_addr") {
            return Err(Errno::from_raw_os_error(errno));
        }
        if let Some(inventory) = self.inventory.filter(|it| it.is_plural()) {
            return inventory.source(remote);
        }
        let by_kernel = source_of_host(remote);
        self.in_slot(self.devices.current(0)?, |streams| {
            let driver = streams.driver;
            if driver.config().device == urnic_config::Device::Inproc {
                return by_kernel;
            }
            by_kernel
                .ok()
                .filter(|source| driver.gids().iter().any(|gid| gid.ip == source.ip()))
                .or_else(|| source_of_device(driver.gids(), remote))
                .ok_or(Errno::NETUNREACH)
        })
    }

    fn own_gid(&mut self, address: SocketAddr) -> (u8, [u8; 16]) {
        let driver = self.driver_of(address);
        let own = driver.and_then(|driver| driver.local_host().own_gid(address.ip()));
        own.unwrap_or((0, gid_of(address.ip())))
    }

    fn node_guid(&mut self, local: SocketAddr) -> u64 {
        let guid = |it: &Inventory| Some(it.node_guid(it.device_of(local.ip()).ok()?));
        self.inventory.and_then(guid).unwrap_or(0)
    }

    fn queue_pair(&mut self, local: SocketAddr, qpn: u32) -> Option<u32> {
        let slot = self.slot_of(local).ok()?;
        let qid = self.driver_of(local)?.qid_of(qpn)?;
        slot.number(qid).ok()
    }

    fn is_unreliable(&mut self, qid: u32) -> bool {
        let is_unreliable = |streams: &mut Streams<'_>, qid| {
            let qp = streams.driver.qp(qid);
            Ok(qp.is_some_and(|qp| qp.kind == QpKind::UnreliableConnected))
        };
        self.on(qid, is_unreliable) == Ok(true)
    }

    fn awaits_stream(&mut self, qid: u32) -> bool {
        let awaits = |streams: &mut Streams<'_>, qid| {
            let qp = streams.driver.qp(qid);
            Ok(qp.is_some_and(|qp| qp.awaits_stream()))
        };
        self.on(qid, awaits) == Ok(true)
    }

    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno> {
        let (slot, qid) = Slot::split(attachment.qid);
        if Slot::split(sid).0 != slot {
            return Err(Errno::INVAL);
        }
        self.on(sid, |streams, sid| {
            attach_stream(streams, sid, &Attachment { qid, ..*attachment })
        })
    }

    fn drain(&mut self, qid: u32) {
        // A queue pair in another state is disconnecting already.
        let _ = self.on(qid, |streams, qid| streams.driver.set_state(qid, QpState::Sqd));
    }

    fn abort(&mut self, qid: u32) {
        let _ = self.on(qid, |streams, qid| {
            let _ = streams.driver.set_state(qid, QpState::Err);
            if let Some(qp) = streams.driver.qp(qid) {
                qp.set_last_state(QpState::Err);
            }
            Ok(())
        });
    }

    fn open_ports(&mut self, local: SocketAddr, ipv6_only: bool) -> Result<(Vec<u32>, u16), Errno> {
        let open = |streams: &mut Streams<'_>, local| {
            let opened = streams.driver.open_message_port(local, ipv6_only);
            opened.map_err(of_connection_manager)
        };
        self.open_everywhere(local, ipv6_only, open, Device::close_port)
    }

    fn open_port_of(&mut self, device: u32, local: SocketAddr) -> Result<u32, Errno> {
        let (slot, _) = Slot::split(device);
        let port = self.in_slot(slot, |streams| streams.driver.open_common_port(local))?;
        slot.number(port)
    }

    fn device_of(&mut self, local: SocketAddr) -> Result<u32, Errno> {
        self.slot_of(local)?.number(0)
    }

    fn device_of_port(&mut self, port: u32) -> u32 {
        Slot::split(port).0.number(0).unwrap_or(0)
    }

    fn channel_adapter(&mut self, device: u32) -> Result<ChannelAdapter, Errno> {
        let (slot, _) = Slot::split(device);
        let driver = self.devices.driver(slot).ok_or(Errno::IO)?;
        let index = self.devices.index(slot).ok_or(Errno::IO)?;
        let inventory = self.inventory.ok_or(Errno::NODEV)?;
        if !driver.has_roce_connections() {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(ChannelAdapter {
            guid: u64::from_be(inventory.node_guid(index)),
            path_mtu: inventory.path_mtu(index).ok_or(Errno::NODEV)?,
            native_port: driver.native_port()?,
        })
    }

    fn close_port(&mut self, port: u32) {
        let _ = self.on(port, |streams, port| {
            streams.driver.close_message_port(port);
            Ok(())
        });
    }

    fn send_message(
        &mut self,
        port: u32,
        local: IpAddr,
        remote: SocketAddr,
        traffic_class: u8,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno> {
        self.on(port, |streams, port| {
            let driver = streams.driver;
            driver.send_message(port, local, remote, traffic_class, message)
        })
    }

    fn signal(&mut self, channel: u64, events: bool) {
        self.devices.show(channel, events);
    }
}

/// The error number of the connection manager for that of a device command: where the system
/// denies an address or a port, the kernel's connection manager has `EACCES`.
fn of_connection_manager(errno: Errno) -> Errno {
    match errno {
        Errno::PERM => Errno::ACCESS,
        errno => errno,
    }
}

/// Brings a queue pair of the device to RTS and attaches a stream to it.
fn attach_stream(streams: &Streams<'_>, sid: u32, attachment: &Attachment) -> Result<(), Errno> {
    let driver = streams.driver;
    let qid = attachment.qid;
    let qp = driver.qp(qid).ok_or(Errno::INVAL)?;
    let steps: &[QpState] = match qp.device_state()? {
        QpState::Init => &[QpState::Rtr, QpState::Rts],
        QpState::Rtr => &[QpState::Rts],
        QpState::Rts => &[],
        QpState::Reset | QpState::Sqd | QpState::Sqe | QpState::Err => return Err(Errno::INVAL),
    };
    for state in steps {
        driver.set_state(qid, *state)?;
    }
    streams.attach(Some(sid), attachment)?;
    if let Terms::RdmaCm { ack_timeout, .. } = attachment.terms {
        qp.set_managed(ack_timeout);
    }
    Ok(())
}
