//! Where the connection manager meets the device, and the program's channels.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};
use urnic_device::command::{ModifyQp, Opcode, modify};
use urnic_device::event::{Event, EventKind};
use urnic_device::stream::attach;
use urnic_device::vocabulary::QpState;
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::streams::{Attaching, Buffers, Streams};
use super::{Attributes, Driver, rim, worker};
use urnic_cm::carrier::{Carrier, Inbox};
use urnic_cm::mpa_startup::{Close, Time};
use urnic_cm::rdma_cm::abi::PathResponse;
use urnic_cm::rdma_cm::command::{self, Command, Destination, Question};
use urnic_cm::rdma_cm::opcode;
use urnic_cm::rdma_cm::{Attachment, Device, Engine, Notice, World};
use urnic_config::{self, Config};
use urnic_presence::registry;
use urnic_presence::token::Token;
use urnic_process::addressing::Gid;
use urnic_process::fds::{self, Kind};
use urnic_process::interrupt_context;
use urnic_process::lock::lock;
use urnic_process::signals::HeldBack;

/// A queue pair that never had a receive gets one within this time: its program may still be on the way from the event to the post.
const FIRST_RECEIVE_GRACE: Duration = Duration::from_millis(1000);
/// Longest command: none of `<rdma/rdma_user_cm.h>` comes near.
const MAX_COMMAND: usize = 4096;
/// Longest value of an option.
const MAX_OPTION: usize = 4096;

/// The connection manager of the process.
pub(super) struct Manager {
    engine: Engine,
    buffers: Buffers,
    tokens: HashMap<u64, Token>,
}

impl Manager {
    pub(super) fn new(config: &Config, attributes: &Attributes) -> Result<Manager, Errno> {
        let mut seed = [0; 8];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let depth = |limit: u32| u8::try_from(limit).unwrap_or(u8::MAX);
        Ok(Manager {
            engine: Engine::new(
                config,
                depth(attributes.max_ird),
                depth(attributes.max_ord),
                u64::from_ne_bytes(seed),
            ),
            buffers: Buffers::new(),
            tokens: HashMap::new(),
        })
    }
}

/// A channel of the program's: what its fd stands for. Dropped with the last fd, and all its ids with it.
#[derive(Debug)]
pub struct CmChannel {
    driver: Arc<Driver>,
    key: u64,
    /// In network order.
    node_guid: u64,
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        // In a forked child a thread of the parent's may hold the lock.
        if self.driver.here().is_err() {
            return;
        }
        self.driver
            .manage(|engine, world| engine.close_channel(world, self.key));
        let token = lock(&self.driver.cm).tokens.remove(&self.key);
        drop(token);
    }
}

impl CmChannel {
    /// Makes `opened`, a fresh fd of the program, a channel to `driver`, whose device shows `node_guid` (in host order).
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`; `EIO` in a forked child.
    pub fn open(driver: Arc<Driver>, node_guid: u64, opened: BorrowedFd<'_>) -> Result<(), Errno> {
        driver.alive()?;
        let token = Token::stand_for(opened)?;
        let key = {
            let mut manager = lock(&driver.cm);
            let key = manager.engine.open_channel();
            manager.tokens.insert(key, token);
            key
        };
        let channel = CmChannel {
            driver,
            key,
            node_guid: node_guid.to_be(),
        };
        registry::enter_cm(opened, Arc::new(channel))
    }

    /// The one that `fd` stands for; none in a forked child.
    fn behind(fd: RawFd) -> Option<Arc<CmChannel>> {
        registry::cm_channel(fd)?.downcast().ok()
    }

    /// Carries out a command; `false` if it was for an event and there is none.
    fn execute(&self, command: Command) -> Result<bool, Errno> {
        let driver = &*self.driver;
        let channel = self.key;
        let node_guid = self.node_guid;
        match command {
            Command::CreateId {
                answer,
                uid,
                port_space,
            } => {
                let id = driver.manage(|engine, _| engine.create(channel, uid, port_space))?;
                put(answer, &id);
            }
            Command::DestroyId { answer, id } => {
                let reported = driver.manage(|engine, world| engine.destroy(world, channel, id))?;
                put(answer, &reported);
            }
            Command::Bind { id, local } => {
                driver.manage(|engine, world| engine.bind(world, channel, id, local))?;
            }
            Command::ResolveAddress { id, local, remote } => {
                driver.manage(|engine, world| engine.resolve_address(world, channel, id, local, remote))?;
            }
            Command::ResolveRoute { id } => {
                driver.manage(|engine, world| engine.resolve_route(world, channel, id))?;
            }
            Command::QueryRoute { answer, id } => {
                let place = driver.manage(|engine, _| engine.addresses(channel, id, node_guid))?;
                put(answer, &place.route());
            }
            Command::Query { answer, id, question } => {
                let place = driver.manage(|engine, _| engine.addresses(channel, id, node_guid))?;
                match question {
                    Question::Addresses => put(answer, &place.addresses()),
                    Question::Gids => put(answer, &place.gids()),
                    // The network routes IP: there are no path records.
                    Question::Paths => put(answer, &PathResponse::new_zeroed()),
                }
            }
            Command::Connect { id, parameters } => {
                driver.manage(|engine, world| engine.connect(world, channel, id, parameters))?;
            }
            Command::Listen { id, backlog } => {
                driver.manage(|engine, world| engine.listen(world, channel, id, backlog))?;
            }
            Command::Accept { id, uid, parameters } => {
                driver.manage(|engine, world| engine.accept(world, channel, id, uid, parameters))?;
            }
            Command::Reject { id, private_data } => {
                driver.manage(|engine, world| engine.reject(world, channel, id, &private_data))?;
            }
            Command::Disconnect { id } => {
                driver.manage(|engine, world| engine.disconnect(world, channel, id))?;
            }
            Command::InitQpAttr { answer, id, state } => {
                let attributes = driver.manage(|engine, _| engine.qp_attributes(channel, id, state))?;
                put(answer, &attributes);
            }
            Command::GetEvent { answer } => {
                let Some(event) = driver.manage(|engine, world| engine.take_event(world, channel)) else {
                    return Ok(false);
                };
                put(answer, &event);
            }
            Command::SetOption {
                id,
                level,
                name,
                address,
                len,
            } => {
                let value = take(address, len)?;
                driver
                    .manage(|engine, world| engine.set_option(world, channel, id, (level, name), &value))?;
            }
            Command::Notify { id } => {
                driver.manage(|engine, _| engine.notify(channel, id))?;
            }
            // iWARP has no multicast.
            Command::JoinMulticast { id } => {
                driver.manage(|engine, _| engine.addresses(channel, id, node_guid))?;
                return Err(Errno::OPNOTSUPP);
            }
            Command::LeaveMulticast { .. } => return Err(Errno::NOENT),
            Command::MigrateId { answer, id, fd } => {
                let old = CmChannel::behind(fd.cast_signed()).ok_or(Errno::INVAL)?;
                let reported = driver.manage(|engine, world| engine.migrate(world, old.key, channel, id))?;
                put(answer, &reported);
            }
        }
        Ok(true)
    }

    /// Waits for an event at the device, for a short time; `false` if there is none still, and `EINTR` if a signal came.
    fn await_event(
        &self,
        command: &Command,
        told: BorrowedFd<'_>,
        signals: &HeldBack,
    ) -> Result<bool, Errno> {
        let driver = &*self.driver;
        let mut taken = Ok(false);
        let mut done = || {
            driver.attend_if_due();
            taken = self.execute(command.clone());
            taken != Ok(false)
        };
        driver
            .patience
            .wait(|patience| interrupt_context::within(|| driver.bus.lend(patience, told, &mut done)));
        driver.attend_if_due();
        if taken == Ok(false) && signals.would_interrupt() {
            return Err(Errno::INTR);
        }
        taken
    }
}

/// Carries out what the program wrote to its channel `fd`. Returns how much was written, as write(2) would; `None` when it asks for an event and there
/// is none: `fd` is readable, as a socket, once there is. `signals`: those of the program, which are held back meanwhile.
///
/// # Errors
/// Those of the command; `EINTR` if it waited for an event and one of `signals` would end that; `EIO` in a forked child, which has no device. While another thread
/// closes the channel: `EBADFD` for who asks for an event, and would wait for ever in a kernel; else `EBADF`.
///
/// # Safety
/// `bytes` points to `len` readable bytes. As with the kernel's device, a command contains addresses that are read and written:
/// the caller vouches for them by writing the command.
pub unsafe fn cm_write(
    fd: RawFd,
    bytes: *const u8,
    len: usize,
    signals: &HeldBack,
) -> Result<Option<usize>, Errno> {
    if bytes.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: as promised by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(bytes, len.min(MAX_COMMAND)) };
    let channel = match CmChannel::behind(fd) {
        Some(channel) => channel,
        // Inherited by a forked child.
        None if fds::kind(fd) == Some(Kind::Cm) => return Err(Errno::IO),
        // Another thread closes it at this moment.
        None if command::number(bytes) == Some(opcode::GET_EVENT) => return Err(Errno::BADFD),
        None => return Err(Errno::BADF),
    };
    // On a lost device events are still there to be taken, and ids to be destroyed; the rest fails by itself.
    channel.driver.here()?;
    let command = Command::parse(bytes).inspect_err(|errno| {
        tracing::debug!("channel {fd}: command {:?}: {errno}", command::number(bytes));
    })?;
    let mut done = interrupt_context::within(|| channel.execute(command.clone()));
    channel.driver.attend_if_due();
    // SAFETY: only asked for its flags, and whether it is readable.
    let told = unsafe { BorrowedFd::borrow_raw(fd) };
    if done == Ok(false) && !fcntl_getfl(told).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
        done = channel.await_event(&command, told, signals);
        let same = |now: Arc<CmChannel>| Arc::ptr_eq(&now, &channel);
        if done == Ok(false) && !CmChannel::behind(fd).is_some_and(same) {
            // Closed meanwhile.
            return Err(Errno::BADFD);
        }
    }
    let done = done.inspect_err(|errno| tracing::debug!("channel {fd}: {command:?}: {errno}"))?;
    Ok(done.then_some(len))
}

/// Writes an answer where the program wants it, as far as it has room.
fn put<T: IntoBytes + Immutable>(answer: Destination, value: &T) {
    let bytes = value.as_bytes();
    let len = bytes.len().min(answer.room);
    // SAFETY: the program gave this address and its room for the answer (cm_write).
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), answer.address as *mut u8, len) };
}

/// Reads a value of an option.
fn take(address: u64, len: u32) -> Result<Vec<u8>, Errno> {
    let len = len as usize;
    match (address, len) {
        (_, 0) => Ok(Vec::new()),
        (0, _) => Err(Errno::FAULT),
        (_, len) if len > MAX_OPTION => Err(Errno::INVAL),
        // SAFETY: the program gave this address and length for the value (cm_write).
        (address, len) => Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec()),
    }
}

impl Driver {
    /// Has the connection manager do something, then does what that came to.
    fn manage<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut manager = lock(&self.cm);
        let Manager {
            engine,
            buffers,
            tokens,
        } = &mut *manager;
        let mut device = Managed {
            streams: Streams {
                driver: self,
                buffers,
            },
            tokens,
        };
        let before = engine.deadline();
        let result = work(
            engine,
            &mut World {
                now: worker::now(),
                device: &mut device,
            },
        );
        let notices = engine.notices();
        let earlier = engine
            .deadline()
            .filter(|after| before.is_none_or(|before| *after < before));
        drop(manager);
        for Notice::Open(qid) in notices {
            if let Some(qp) = self.qp(qid) {
                qp.open_gate();
            }
        }
        if let Some(at) = earlier {
            self.wake_by(at);
        }
        result
    }

    pub(super) fn cm_tick(&self) -> Option<Time> {
        self.manage(|engine, world| engine.tick(world))
    }

    /// A queue pair has no stream any more.
    pub(super) fn cm_lost(&self, qid: u32, errno: Errno) {
        self.manage(|engine, world| engine.lose(world, qid, errno));
    }

    /// The device is gone.
    pub(super) fn cm_lost_device(&self) {
        self.manage(|engine, world| engine.lose_device(world));
    }

    /// An event of a stream, a listener or a fence; `false` if it is not the connection manager's.
    pub(super) fn cm_event(&self, kind: EventKind, event: &Event) -> bool {
        let (object, data) = (event.object.get(), event.data.get());
        let outcome = rim::outcome(event.code.get());
        {
            let manager = lock(&self.cm);
            let ours = match kind {
                EventKind::FirstFpdu => manager.engine.has_queue_pair(object),
                EventKind::StreamAccepted => manager.engine.has_listener(object),
                _ => manager.engine.has_stream(object),
            };
            if !ours {
                return false;
            }
        }
        match kind {
            EventKind::FirstFpdu => self.manage(|engine, world| engine.first_fpdu(world, object)),
            EventKind::StreamAccepted => {
                self.manage(|engine, world| engine.arrived(world, object, data as u32));
            }
            EventKind::StreamConnected => {
                self.manage(|engine, world| engine.connected(world, object, outcome));
            }
            EventKind::StreamReceived => {
                let Some(buffer) = lock(&self.cm).buffers.remove(&object) else {
                    return true;
                };
                let mut octets = vec![0; (data as usize).min(buffer.len())];
                buffer.copy_out(0, &mut octets);
                let octets = outcome.map(|()| octets);
                let octets = octets.as_deref().map_err(|errno| *errno);
                self.manage(|engine, world| engine.received(world, object, octets));
            }
            EventKind::StreamClosed => self.manage(|engine, world| engine.stream_closed(world, object)),
            _ => {}
        }
        true
    }

    fn set_state(&self, qid: u32, state: QpState) -> Result<(), Errno> {
        let mut arguments = ModifyQp::new_zeroed();
        arguments.qp = qid.into();
        arguments.mask = modify::STATE.into();
        arguments.state = (state as u32).into();
        self.commands.run(Opcode::ModifyQp, &arguments)
    }
}

/// The kernel's routing tables, asked by a socket that sends nothing.
fn source_of_host(remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let family = if remote.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let probe = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    connect(&probe, &remote)?;
    SocketAddr::try_from(getsockname(&probe)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// Of a device's own addresses that in whose network `remote` is, the narrowest first; else its first of that family.
fn source_of_device(gids: &[Gid], remote: SocketAddr) -> Option<SocketAddr> {
    let shared = |gid: &Gid| match (gid.ip, remote.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    };
    let of_family = || gids.iter().filter(|gid| gid.ip.is_ipv4() == remote.is_ipv4());
    let near = of_family()
        .filter(|gid| shared(gid) >= gid.prefix_len.into())
        .max_by_key(|gid| gid.prefix_len);
    near.or_else(|| of_family().next()).map(|gid| match gid.ip {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), 0),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, gid.scope).into(),
    })
}

/// The device, while the manager's lock is held.
struct Managed<'a> {
    streams: Streams<'a>,
    tokens: &'a HashMap<u64, Token>,
}

impl Carrier for Managed<'_> {
    fn send(&mut self, sid: u32, octets: &[u8]) -> Result<(), Errno> {
        self.streams.send(sid, octets)
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        self.streams.receive(sid, len)
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        self.streams.inbox(sid)
    }

    fn close(&mut self, sid: u32, how: Close) {
        self.streams.close(sid, how);
    }
}

impl Device for Managed<'_> {
    fn listen(&mut self, local: SocketAddr, traffic_class: u8, ipv6_only: bool) -> Result<(u32, u16), Errno> {
        self.streams.listen(local, traffic_class, ipv6_only)
    }

    fn unlisten(&mut self, lid: u32) {
        self.streams.unlisten(lid);
    }

    fn connect(&mut self, remote: SocketAddr, local: SocketAddr, traffic_class: u8) -> Result<u32, Errno> {
        self.streams.connect(remote, Some(local), traffic_class)
    }

    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno> {
        self.streams.ends(sid)
    }

    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno> {
        let driver = self.streams.driver;
        let by_kernel = source_of_host(remote);
        if driver.config.device == urnic_config::Device::Inproc {
            return by_kernel;
        }
        by_kernel
            .ok()
            .filter(|source| driver.gids().iter().any(|gid| gid.ip == source.ip()))
            .or_else(|| source_of_device(driver.gids(), remote))
            .ok_or(Errno::NETUNREACH)
    }

    fn queue_pair(&mut self, qpn: u32) -> Option<u32> {
        self.streams.driver.qid_of(qpn)
    }

    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno> {
        let qid = attachment.qid;
        let driver = self.streams.driver;
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
        // iWARP manners, but for as much patience as the option says.
        let (patience, grace) = match attachment.rnr_grace {
            Duration::ZERO => (attach::STALL_AT_FIRST, FIRST_RECEIVE_GRACE),
            grace => (attach::STALL_ON_EMPTY_RQ, grace),
        };
        driver.modify(&qp, modify::RNR, rim::milliseconds(Some(grace)))?;
        let strict = if attachment.strict_rtr {
            attach::STRICT_RTR
        } else {
            0
        };
        self.streams.attach(&Attaching {
            sid: Some(sid),
            qid,
            negotiated: Some(&attachment.negotiated),
            manners: patience | strict,
            ird: attachment.ird.into(),
            ord: attachment.ord.into(),
            fin_grace_ms: 0,
        })?;
        qp.manage(attachment.ack_timeout);
        Ok(())
    }

    fn drain(&mut self, qid: u32) {
        // In the wrong state it is ending already.
        let _ = self.streams.driver.set_state(qid, QpState::Sqd);
    }

    fn abort(&mut self, qid: u32) {
        let _ = self.streams.driver.set_state(qid, QpState::Err);
        if let Some(qp) = self.streams.driver.qp(qid) {
            qp.reach(QpState::Err);
        }
    }

    fn signal(&mut self, channel: u64, events: bool) {
        if let Some(token) = self.tokens.get(&channel) {
            token.show(events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_its_own_addresses_speaks_from_the_nearest() {
        let gid = |ip: &str, prefix_len| Gid {
            ip: ip.parse().unwrap(),
            scope: 0,
            prefix_len,
        };
        let gids = [gid("10.0.0.5", 8), gid("10.1.0.5", 16), gid("192.0.2.5", 24)];
        let source = |remote: &str| {
            let source = source_of_device(&gids, SocketAddr::new(remote.parse().unwrap(), 7))?;
            Some(source.ip().to_string())
        };
        assert_eq!(source("10.1.9.9").as_deref(), Some("10.1.0.5"));
        assert_eq!(source("10.2.9.9").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("192.0.2.9").as_deref(), Some("192.0.2.5"));
        assert_eq!(source("198.51.100.1").as_deref(), Some("10.0.0.5"));
        assert_eq!(source("2001:db8::1"), None);
    }
}
