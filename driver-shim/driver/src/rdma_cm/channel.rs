//! A program's channels: `/dev/infiniband/rdma_cm` opened by a program, and the commands that it
//! writes.

use std::net::Ipv6Addr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::driver::Driver;
use crate::manager::inventory::Inventory;
use crate::manager::{AwaitedChannel, Manager};
use urnic_cm::rdma_cm::abi::{CmAddress, IdAddresses, opcode};
use urnic_cm::rdma_cm::command::{self, Command, Destination, QueryKind};
use urnic_config::Config;
use urnic_presence::Presence;
use urnic_presence::registry;
use urnic_presence::token::Token;
use urnic_process::fds::{self, Kind};
use urnic_process::interrupt_context;
use urnic_process::signals::DeferredSignals;

/// Longest value of an option.
const MAX_OPTION: usize = 4096;
/// Longest command in bytes; the commands of `<rdma/rdma_user_cm.h>` are much shorter.
const MAX_COMMAND: usize = 4096;

/// A channel of the program, to which its fd refers. Dropped with the last fd, together with all
/// ids of the channel.
#[derive(Debug)]
pub struct CmChannel {
    /// The driver of the first device, whose thread waits for the channel's events.
    driver: Arc<Driver>,
    key: u64,
    /// The process's configuration and the devices that it sees.
    config: Config,
    presence: &'static Presence,
}

impl Drop for CmChannel {
    fn drop(&mut self) {
        // In a forked child a thread of the parent may hold the lock.
        if self.driver.check_process().is_err() {
            return;
        }
        self.driver
            .with_rdma_cm(|engine, world| engine.close_channel(world, self.key));
        drop(self.manager().remove_token(self.key));
    }
}

impl CmChannel {
    /// Makes `opened`, a new fd of the program, a channel to the connection manager of the process,
    /// and opens the first device; `config` is the configuration of the process.
    ///
    /// # Errors
    /// Those of [`Driver::open`]; `EMFILE` or `ENFILE` if no fd is left, `ENOMEM` if no memory is
    /// left; `EIO` in a forked child.
    pub fn open(config: Config, presence: &'static Presence, opened: BorrowedFd<'_>) -> Result<(), Errno> {
        let driver = Driver::open_shown(0, &config, presence)?;
        driver.check_usable()?;
        let token = Token::stand_for(opened)?;
        let key = driver
            .connections()
            .manager()
            .open_channel(&config, presence, token);
        let channel = CmChannel {
            driver: driver.clone(),
            key,
            config,
            presence,
        };
        registry::enter_cm(opened, Arc::new(channel))
    }

    fn manager(&self) -> &Manager<Driver> {
        self.driver.connections().manager()
    }

    /// Opens the devices that a command needs, before it takes the lock of the connection manager.
    ///
    /// # Errors
    /// Those of [`Driver::open`]. The command reports that no device has an address.
    fn open_devices(&self, command: &Command) -> Result<(), Errno> {
        let Some(inventory) = self.manager().inventory().filter(|it| it.is_plural()) else {
            return Ok(());
        };
        let places = match command {
            Command::Bind {
                local: CmAddress::Ip(local),
                ..
            } => inventory.listening(*local, false),
            Command::Listen { id, .. } => {
                let bound = self
                    .driver
                    .with_rdma_cm(|engine, _| engine.bound_to(self.key, *id))?;
                match bound {
                    None => inventory.listening((Ipv6Addr::UNSPECIFIED, 0).into(), false),
                    Some(_) => return Ok(()),
                }
            }
            Command::ResolveAddress {
                local,
                remote: CmAddress::Ip(remote),
                ..
            } => {
                let source = match local {
                    Some(CmAddress::Ip(local)) if !local.ip().is_unspecified() => Ok(*local),
                    _ => inventory.source(*remote),
                };
                source.and_then(|source| Ok(vec![(inventory.device_of(source.ip())?, source)]))
            }
            _ => return Ok(()),
        };
        for (index, _) in places.unwrap_or_default() {
            let open = self.manager().current(index);
            if open.is_none_or(|driver| driver.is_lost()) {
                Driver::open_shown(index, &self.config, self.presence)?;
            }
        }
        Ok(())
    }

    /// Handles the events that a command caused, of all devices.
    fn handle_events(&self) {
        self.driver.handle_events_if_due();
        if self.manager().inventory().is_some_and(Inventory::is_plural) {
            self.manager()
                .drivers()
                .iter()
                .for_each(|driver| driver.handle_events_if_due());
        }
    }

    /// The channel that `fd` refers to; `None` in a forked child.
    fn of_fd(fd: RawFd) -> Option<Arc<CmChannel>> {
        registry::cm_channel(fd)?.downcast().ok()
    }

    /// The channel that `fd`, which was found to be one a moment ago, still refers to.
    fn of_known_fd(fd: RawFd) -> Option<Arc<CmChannel>> {
        registry::known_cm_channel(fd)?.downcast().ok()
    }

    /// Executes a command; `option` is the value of a [`Command::SetOption`]. Returns the answer;
    /// `None`: the command takes an event, and there is none.
    fn execute(&self, command: Command, option: &[u8]) -> Result<Option<Answer>, Errno> {
        let driver = &*self.driver;
        let channel = self.key;
        Ok(Some(match command {
            Command::CreateId {
                answer,
                uid,
                port_space,
            } => {
                let id = driver.with_rdma_cm(|engine, _| engine.create(channel, uid, port_space))?;
                Answer::new(answer, &id)
            }
            Command::DestroyId { answer, id } => {
                let reported = driver.with_rdma_cm(|engine, world| engine.destroy(world, channel, id))?;
                Answer::new(answer, &reported)
            }
            Command::MigrateId { answer, id, fd } => {
                let old = CmChannel::of_fd(fd.cast_signed()).ok_or(Errno::INVAL)?;
                let reported =
                    driver.with_rdma_cm(|engine, world| engine.migrate(world, old.key, channel, id))?;
                Answer::new(answer, &reported)
            }
            Command::GetEvent { answer } => {
                let event = driver.with_rdma_cm(|engine, world| engine.take_event(world, channel));
                return Ok(event.map(|event| Answer::new(answer, &event)));
            }
            Command::InitQpAttr { answer, id, state } => {
                let attributes =
                    driver.with_rdma_cm(|engine, world| engine.qp_attributes(world, channel, id, state))?;
                Answer::new(answer, &attributes)
            }
            Command::JoinMulticast {
                answer,
                id,
                uid,
                group,
            } => {
                let membership =
                    driver.with_rdma_cm(|engine, world| engine.join(world, channel, id, uid, group))?;
                Answer::new(answer, &membership)
            }
            Command::LeaveMulticast { answer, membership } => {
                let reported =
                    driver.with_rdma_cm(|engine, world| engine.leave(world, channel, membership))?;
                Answer::new(answer, &reported)
            }
            Command::SetOption { id, level, name, .. } => {
                driver.with_rdma_cm(|engine, world| {
                    engine.set_option(world, channel, id, (level, name), option)
                })?;
                Answer::none()
            }
            Command::QueryRoute { answer, id } => Answer::new(answer, &self.addresses(id)?.route()),
            Command::Query { answer, id, kind } => {
                let addresses = self.addresses(id)?;
                match kind {
                    QueryKind::Addresses => Answer::new(answer, &addresses.addresses()),
                    QueryKind::Gids => Answer::new(answer, &addresses.gids()),
                    QueryKind::Paths => Answer::new(answer, &addresses.path()),
                }
            }
            command => {
                self.execute_without_answer(command)?;
                Answer::none()
            }
        }))
    }

    /// The addresses of an id.
    fn addresses(&self, id: u32) -> Result<IdAddresses, Errno> {
        self.driver
            .with_rdma_cm(|engine, world| engine.addresses(world, self.key, id))
    }

    /// Executes a command that has no answer and names no memory of the program.
    fn execute_without_answer(&self, command: Command) -> Result<(), Errno> {
        let channel = self.key;
        self.driver.with_rdma_cm(|engine, world| match command {
            Command::Bind { id, local } => engine.bind(world, channel, id, local),
            Command::ResolveAddress { id, local, remote } => {
                engine.resolve_address(world, channel, id, local, remote)
            }
            Command::ResolveRoute { id } => engine.resolve_route(world, channel, id),
            Command::Connect { id, parameters } => engine.connect(world, channel, id, parameters),
            Command::Listen { id, backlog } => engine.listen(world, channel, id, backlog),
            Command::Accept { id, uid, parameters } => engine.accept(world, channel, id, uid, parameters),
            Command::Reject { id, private_data } => engine.reject(world, channel, id, &private_data),
            Command::Disconnect { id } => engine.disconnect(world, channel, id),
            Command::Notify { id, event } => engine.notify(world, channel, id, event),
            Command::WriteEvent {
                id,
                event,
                status,
                argument,
            } => engine.write_event(world, channel, id, (event, status, argument)),
            _ => Err(Errno::INVAL),
        })
    }

    /// Polls the device for an event, for a short time. Returns `None` if no event came, and fails
    /// with `EINTR` if a signal came.
    fn await_event(
        &self,
        command: &Command,
        readable: BorrowedFd<'_>,
        signals: &DeferredSignals,
    ) -> Result<Option<Answer>, Errno> {
        let driver = &*self.driver;
        let mut taken = Ok(None);
        let mut done = || {
            driver.handle_events_if_due();
            taken = self.execute(command.clone(), &[]);
            !matches!(taken, Ok(None))
        };
        let awaited = AwaitedChannel::set(self.key);
        driver
            .event_loop()
            .poll(|time| interrupt_context::deferred(|| driver.bus().lend(time, readable, &mut done)));
        driver.handle_events_if_due();
        drop(awaited);
        self.manager().lock().parts().1.show_pending(self.key);
        if matches!(taken, Ok(None)) && signals.would_interrupt() {
            return Err(Errno::INTR);
        }
        taken
    }
}

/// Executes the command that the program wrote to its channel `fd`. Returns the number of bytes
/// written, as write(2) would, or `None` if the command takes an event and there is none: `fd`
/// becomes readable, as a socket does, once there is one. `signals` are the program's signals,
/// which are deferred during the call.
///
/// # Errors
/// The errors of the command; `EINTR` if the command waited for an event and one of `signals` would
/// interrupt it; `EIO` in a forked child, which has no device. While another thread closes the
/// channel: `EBADFD` for a command that takes an event, which would wait without end in a kernel,
/// and `EBADF` for any other.
///
/// # Safety
/// `bytes` points to `len` readable bytes. As with the kernel's device, a command contains
/// addresses that are read and written: they are memory of the program that is valid, and that no
/// other code accesses, during the call.
pub unsafe fn cm_write(
    fd: RawFd,
    bytes: *const u8,
    len: usize,
    signals: &DeferredSignals,
) -> Result<Option<usize>, Errno> {
    if bytes.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller promises `len` readable bytes at `bytes`, which is not null.
    let bytes = unsafe { std::slice::from_raw_parts(bytes, len.min(MAX_COMMAND)) };
    let channel = match CmChannel::of_known_fd(fd) {
        Some(channel) => channel,
        // Inherited by a forked child.
        None if fds::kind(fd) == Some(Kind::Cm) => return Err(Errno::IO),
        // Another thread is closing the channel.
        None if command::number(bytes) == Some(opcode::GET_EVENT) => return Err(Errno::BADFD),
        None => return Err(Errno::BADF),
    };
    // On a lost device the program can still take events and destroy ids; other commands fail in
    // the engine.
    channel.driver.check_process()?;
    let command = Command::parse(bytes).inspect_err(|errno| {
        tracing::debug!("channel {fd}: command {:?}: {errno}", command::number(bytes));
    })?;
    channel.open_devices(&command)?;
    let option = match &command {
        // SAFETY: the caller promises that the addresses in the command are valid.
        Command::SetOption { address, len, .. } => unsafe { read_option(*address, *len) },
        _ => Ok(Vec::new()),
    };
    if matches!(command, Command::Connect { .. } | Command::Accept { .. })
        && channel.driver.event_loop().expects_poll()
    {
        // A wait for the peer's answer follows, by a thread that has waited before.
        channel.driver.bus().will_lend();
    }
    let mut done =
        option.and_then(|option| interrupt_context::deferred(|| channel.execute(command.clone(), &option)));
    channel.handle_events();
    // SAFETY: `fd` was a channel above; it is only queried for its flags and polled, which fails on
    // a closed descriptor.
    let readable = unsafe { BorrowedFd::borrow_raw(fd) };
    if matches!(done, Ok(None)) && !fcntl_getfl(readable).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    {
        done = channel.await_event(&command, readable, signals);
        let same = |now: Arc<CmChannel>| Arc::ptr_eq(&now, &channel);
        if matches!(done, Ok(None)) && !CmChannel::of_fd(fd).is_some_and(same) {
            // The channel was closed in between.
            return Err(Errno::BADFD);
        }
    }
    let done = done.inspect_err(|errno| tracing::debug!("channel {fd}: {command:?}: {errno}"))?;
    Ok(done.map(|answer| {
        // SAFETY: the caller promises that the addresses in the command are valid.
        unsafe { answer.write() };
        len
    }))
}

/// The answer to a command, if it has one, for the program's memory.
struct Answer {
    to: Option<Destination>,
    bytes: Vec<u8>,
}

impl Answer {
    fn new<T: IntoBytes + Immutable>(to: Destination, value: &T) -> Answer {
        Answer {
            to: Some(to),
            bytes: value.as_bytes().to_vec(),
        }
    }

    /// The empty answer.
    fn none() -> Answer {
        Answer {
            to: None,
            bytes: Vec::new(),
        }
    }

    /// Writes the answer to the program's memory, truncated to the room for it.
    ///
    /// # Safety
    /// The `room` bytes at the address of the destination are writable memory of the program, and
    /// no other code accesses them during the call.
    unsafe fn write(&self) {
        let Some(to) = self.to else { return };
        let len = self.bytes.len().min(to.room);
        // SAFETY: the caller promises `room` writable bytes at this address, and `len` is not more;
        // `bytes` is memory of the driver and does not overlap them.
        unsafe { std::ptr::copy_nonoverlapping(self.bytes.as_ptr(), to.address as *mut u8, len) };
    }
}

/// Reads the value of an option from the program's memory.
///
/// # Errors
/// `EFAULT` for a null address, `EINVAL` for a value that is too long.
///
/// # Safety
/// The `len` bytes at `address` are readable memory of the program, unless `address` is 0, and no
/// other code writes them during the call.
unsafe fn read_option(address: u64, len: u32) -> Result<Vec<u8>, Errno> {
    let len = len as usize;
    match (address, len) {
        (_, 0) => Ok(Vec::new()),
        (0, _) => Err(Errno::FAULT),
        (_, len) if len > MAX_OPTION => Err(Errno::INVAL),
        // SAFETY: the caller promises `len` readable bytes at this address, which is not null, and
        // that no other code writes them.
        (address, len) => Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec()),
    }
}
