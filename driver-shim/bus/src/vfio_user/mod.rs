//! The device in another process, reached by a vfio-user socket (`urnic serve`).
//!
//! *Memory.* An IOVA is an address of this process. Queues lie in files that the server maps, too
//! ([`arena`]). The program's own memory has no file to pass: the server reads and writes it by
//! process_vm_readv(2) where the kernel permits that, and otherwise by messages to this process.
//!
//! *Doorbells* are stores into pages that both processes map, with no message unless the device
//! sleeps. Registers are messages; the driver does not wait for the completion of writes.
//!
//! *fork(2).* A child has none of the descriptors, and private pages in place of the shared ones.

mod arena;
mod connection;
mod own;
mod ranges;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use urnic_sync::Mutex;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{PTracer, set_ptracer};
use urnic_device::{pci, registers};
use urnic_vfio_user::{
    Capabilities, DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags, IrqAction, IrqData, MAJOR, MINOR, Memory,
    RegionAccess, RegionFlags, RegionInfo, Reply, Request, SetIrqs, Urnic, Version, irq_index, region_index,
};

use super::doorbells::DoorbellPages;
use arena::{Arena, CHUNK};
use connection::{Connection, MAX_TRANSFER, borrowed, descriptor, vector};
use ranges::Ranges;
use urnic_device::bus::{Bus, Mapping, QueueMemory, SignalHandler};
use urnic_process::error_log;
use urnic_process::failure;

/// Most vectors that this process waits for.
const MAX_VECTORS: u32 = 64;
/// PCI command register: offset, and its bits for memory decoding and bus mastering.
const PCI_COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 6;

/// The bus to a device in another process.
pub struct VfioUserBus {
    connection: Arc<Connection>,
    doorbells: DoorbellPages,
    reach: Arc<Reach>,
    /// Locked during the messages that change the mappings.
    mapping: Mutex<()>,
    memory: &'static str,
    abandoned: AtomicBool,
}

/// The memory that the server may access.
struct Reach {
    arena: Arena,
    ranges: Mutex<Ranges>,
}

impl Reach {
    fn covers(&self, address: u64, len: u64) -> bool {
        self.arena.covers(address, len) || self.ranges.lock().covers(address, len)
    }

    /// Handles a request of a server that cannot access the program's memory by itself.
    fn answer(&self, id: u16, request: Request<'_>, out: &mut Vec<u8>) -> Result<(), Errno> {
        match request {
            Request::DmaRead(access) => {
                let len = usize::try_from(access.count).map_err(|_| Errno::INVAL)?;
                if len > MAX_TRANSFER {
                    return Err(Errno::INVAL);
                }
                if !self.covers(access.address, access.count) {
                    return Err(Errno::FAULT);
                }
                let mut data = vec![0; len];
                own::read(access.address, &mut data)?;
                let address = access.address;
                Reply::DmaRead { address, data: &data }.emit(id, out);
                Ok(())
            }
            Request::DmaWrite { address, data } => {
                if !self.covers(address, data.len() as u64) {
                    return Err(Errno::FAULT);
                }
                own::write(address, data)?;
                Reply::DmaWrite.emit(id, out);
                Ok(())
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

impl VfioUserBus {
    /// Connects to the server at `path`, which makes a function for this process.
    ///
    /// # Errors
    /// The errors of connecting; `ENODEV` if the server has no urnic device; `EIO` if the server
    /// closes the connection, for example because it has enough clients.
    pub fn open(path: &Path) -> Result<Arc<VfioUserBus>, Errno> {
        VfioUserBus::connect(path).inspect_err(|errno| {
            let path = path.display();
            error_log::log_once(match *errno {
                Errno::NOENT | Errno::CONNREFUSED => {
                    format!("no device at {path} ({errno}): start one with `urnic serve --socket {path}`")
                }
                Errno::ACCESS | Errno::PERM => {
                    format!("this user may not use the device at {path} ({errno}): check the owner and mode of the socket")
                }
                Errno::IO => format!(
                    "the server at {path} hung up: it may have as many clients as it takes (`urnic serve --clients`)"
                ),
                errno => format!("the device at {path} cannot be used: {}", failure::explained(errno)),
            });
        })
    }

    fn connect(path: &Path) -> Result<Arc<VfioUserBus>, Errno> {
        let connection = Arc::new(Connection::open(path)?);
        let reach = Arc::new(Reach {
            arena: Arena::new(),
            ranges: Mutex::default(),
        });
        let answering = reach.clone();
        connection.start(Box::new(move |id, request, out| {
            answering.answer(id, request, out)
        }))?;
        VfioUserBus::set_up(connection.clone(), reach)
            .map(Arc::new)
            .inspect_err(|_| connection.close())
    }

    fn set_up(connection: Arc<Connection>, reach: Arc<Reach>) -> Result<VfioUserBus, Errno> {
        let_server_reach_us(&connection);
        let memory = negotiate(&connection)?;
        let mut identity = [0; 4];
        read_region(&connection, region_index::CONFIG, 0, &mut identity)?;
        let ours = u32::from(pci::DEVICE_ID) << 16 | u32::from(pci::VENDOR_ID);
        let registers = region(&connection, u32::from(pci::BAR_REGISTERS))?.0;
        if u32::from_le_bytes(identity) != ours || registers.size < u64::from(registers::BAR_LEN) {
            tracing::error!("the server lends another device than urnic's");
            return Err(Errno::NODEV);
        }
        // Set before the device does DMA, as with every PCI function.
        let command = MEMORY_AND_MASTER.to_le_bytes();
        write_region(&connection, region_index::CONFIG, PCI_COMMAND, &command)?;
        let doorbells = map_doorbells(&connection)?;
        set_up_vectors(&connection)?;
        Ok(VfioUserBus {
            connection,
            doorbells,
            reach,
            mapping: Mutex::default(),
            memory,
            abandoned: AtomicBool::new(false),
        })
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    fn send_unmap(&self, (start, end): ranges::Range) {
        let unmap = Request::DmaUnmap(DmaUnmap {
            flags: DmaUnmapFlags::empty(),
            address: start,
            size: end - start,
        });
        if let Err(errno) = self.connection.ask(&unmap, &[])
            && !self.connection.is_lost()
        {
            tracing::warn!("the device's server keeps memory at {start:#x}: {errno}");
        }
    }
}

/// Under Yama's scope 1 a process must name the process that may attach to it.
fn let_server_reach_us(connection: &Connection) {
    let scope = || {
        let file = rustix::fs::open(
            "/proc/sys/kernel/yama/ptrace_scope",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let mut scope = [0; 1];
        rustix::io::read(file, &mut scope)?;
        Ok::<_, Errno>(scope)
    };
    if scope() == Ok(*b"1")
        && let Some(pid) = connection.server()
        && let Err(errno) = set_ptracer(PTracer::ProcessID(pid))
    {
        tracing::debug!("process {pid:?} cannot be allowed to reach our memory: {errno}");
    }
}

/// Negotiates the version. Returns how the server reaches the program's memory.
fn negotiate(connection: &Connection) -> Result<&'static str, Errno> {
    let urnic = Urnic {
        identity: true,
        memory: None,
    };
    let version = Request::Version(Version {
        major: MAJOR,
        minor: MINOR,
        capabilities: Capabilities {
            max_msg_fds: Some(8),
            max_data_xfer_size: Some(MAX_TRANSFER as u64),
            pgsizes: Some(4096),
            urnic: Some(urnic),
            ..Capabilities::default()
        },
    });
    let message = connection.ask(&version, &[])?;
    let Ok(Reply::Version(theirs)) = message.reply() else {
        return Err(Errno::PROTO);
    };
    if theirs.major != MAJOR {
        return Err(Errno::PROTONOSUPPORT);
    }
    Ok(match theirs.capabilities.urnic.and_then(|urnic| urnic.memory) {
        Some(Memory::ProcessVm) => "process_vm",
        Some(Memory::Messages) | None => "messages",
    })
}

/// Queries a region. Returns its description and the message with its descriptor.
fn region(connection: &Connection, index: u32) -> Result<(RegionInfo, urnic_vfio_user::Message), Errno> {
    // Room for more areas than a region has.
    let argsz = 1024;
    let message = connection.ask(&Request::RegionInfo { argsz, index }, &[])?;
    let Ok(Reply::RegionInfo(info)) = message.reply() else {
        return Err(Errno::PROTO);
    };
    Ok((info, message))
}

fn map_doorbells(connection: &Connection) -> Result<DoorbellPages, Errno> {
    let (info, message) = region(connection, u32::from(pci::BAR_DOORBELLS))?;
    let whole = info.sparse.as_ref().is_none_or(|areas| {
        areas
            .iter()
            .any(|area| area.offset == 0 && area.size == info.size)
    });
    let fd = descriptor(&message).filter(|_| info.flags.contains(RegionFlags::MMAP) && whole);
    let Some(fd) = fd else {
        tracing::error!("the device's doorbell pages cannot be mapped");
        return Err(Errno::NODEV);
    };
    let len = usize::try_from(info.size).map_err(|_| Errno::NODEV)?;
    DoorbellPages::map(fd, info.offset, len)
}

fn set_up_vectors(connection: &Connection) -> Result<(), Errno> {
    let (argsz, index) = (urnic_vfio_user::IrqInfo::LEN, irq_index::MSIX);
    let message = connection.ask(&Request::IrqInfo { argsz, index }, &[])?;
    let Ok(Reply::IrqInfo(info)) = message.reply() else {
        return Err(Errno::PROTO);
    };
    let vectors = (0..info.count.min(MAX_VECTORS))
        .map(|_| vector())
        .collect::<Result<Vec<_>, _>>()?;
    // A message has room for few descriptors: each vector gets a message.
    for (start, fd) in borrowed(&vectors)?.into_iter().enumerate() {
        let set = SetIrqs {
            index,
            start: start as u32,
            count: 1,
            action: IrqAction::Trigger,
            data: IrqData::Eventfd,
        };
        connection.ask(&Request::SetIrqs(set), &[fd])?;
    }
    connection.listen(vectors)
}

fn read_region(connection: &Connection, region: u32, offset: u64, into: &mut [u8]) -> Result<(), Errno> {
    let access = RegionAccess {
        offset,
        region,
        count: into.len() as u32,
    };
    let message = connection.ask(&Request::RegionRead(access), &[])?;
    match message.reply() {
        Ok(Reply::RegionRead { data, .. }) if data.len() == into.len() => {
            into.copy_from_slice(data);
            Ok(())
        }
        _ => Err(Errno::PROTO),
    }
}

fn write_region(connection: &Connection, region: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
    connection.post(&Request::RegionWrite { offset, region, data })
}

impl Bus for VfioUserBus {
    fn read32(&self, offset: u32) -> u32 {
        if self.is_abandoned() {
            return 0;
        }
        let mut value = [0; 4];
        let region = u32::from(pci::BAR_REGISTERS);
        match read_region(&self.connection, region, offset.into(), &mut value) {
            Ok(()) => u32::from_le_bytes(value),
            Err(_) => registers::GONE,
        }
    }

    fn write32(&self, offset: u32, value: u32) {
        if self.is_abandoned() {
            return;
        }
        // On a lost device the write fails, which is ignored.
        let region = u32::from(pci::BAR_REGISTERS);
        let _ = write_region(&self.connection, region, offset.into(), &value.to_le_bytes());
    }

    #[inline]
    fn doorbell(&self, uar: u32, offset: u32, value: u64) {
        if self.doorbells.ring(uar, offset, value) {
            self.write32(registers::KICK, 1);
        }
    }

    fn features(&self, features: u32) {
        self.doorbells.features(features);
    }

    #[inline]
    fn progress(&self, _queue_pair: u32) {
        self.doorbells.yield_when_idle();
    }

    #[inline]
    fn has_gathered(&self) -> bool {
        false
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        if self.is_abandoned() {
            return Err(Errno::IO);
        }
        let ptr = self.reach.arena.allocate(len, |base, file| {
            let map = Request::DmaMap(DmaMap {
                flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
                offset: 0,
                address: base.as_ptr().expose_provenance() as u64,
                size: CHUNK as u64,
            });
            self.connection.ask(&map, &[file.as_fd()]).map(drop)
        })?;
        let iova = ptr.addr().get() as u64;
        Ok(QueueMemory { ptr, iova })
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        if !self.is_abandoned() {
            // SAFETY: the caller promises memory from `allocate` with this length, that no code
            // uses.
            unsafe { self.reach.arena.free(memory.ptr, len) };
        }
    }

    fn map(&self, ptr: *mut u8, len: usize, _write: bool) -> Result<Mapping, Errno> {
        if self.is_abandoned() {
            return Err(Errno::IO);
        }
        let address = ptr.expose_provenance() as u64;
        let range = ranges::pages(address, len as u64);
        let _mapping = self.mapping.lock();
        // The rights of the pages are checked at the registration: several registrations may be
        // over one page.
        let added = self.reach.ranges.lock().add(range);
        for (mapped, (start, end)) in added.iter().enumerate() {
            let map = Request::DmaMap(DmaMap {
                flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
                offset: 0,
                address: *start,
                size: end - start,
            });
            if let Err(errno) = self.connection.ask(&map, &[]) {
                added
                    .iter()
                    .take(mapped)
                    .for_each(|range| self.send_unmap(*range));
                // Only this registration is over the new extents.
                self.reach.ranges.lock().remove(range);
                return Err(if self.connection.is_lost() {
                    Errno::IO
                } else {
                    errno
                });
            }
        }
        Ok(Mapping::Contiguous(address))
    }

    fn unmap(&self, mapping: &Mapping, len: usize) {
        let Mapping::Contiguous(address) = mapping else {
            return;
        };
        if self.is_abandoned() {
            return;
        }
        let _mapping = self.mapping.lock();
        let removed = self
            .reach
            .ranges
            .lock()
            .remove(ranges::pages(*address, len as u64));
        removed.into_iter().for_each(|range| self.send_unmap(range));
    }

    fn signals(&self, handler: SignalHandler) {
        self.connection.signals(handler);
    }

    fn memory(&self) -> &'static str {
        self.memory
    }

    /// The server outlives this process, and finishes the work in progress.
    fn shutdown(&self) {}

    fn abandon_in_child(&self) {
        self.abandoned.store(true, Ordering::Release);
        self.doorbells.cut();
        self.reach.arena.abandon_in_child();
    }
}

impl Drop for VfioUserBus {
    fn drop(&mut self) {
        self.connection.close();
    }
}
