//! Memory registration.
//!
//! A kernel driver would pin the pages. Here the driver only makes the pages present: the device
//! reads and writes them through the program's own mapping, and finds no hole as long as the
//! program keeps its part of the contract. Pages of regions on demand need not be present: for
//! these regions the kernel copies for the device.

use std::ffi::c_void;

use rustix::io::Errno;
use urnic_device::command::{
    CreateMr, CreateMw, Handle, ModifyMr, NULL_REGION, Nothing, Opcode, features, reregister,
};
use urnic_device::vocabulary::Access;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::driver::Driver;
use crate::objects::{Pd, Region};
use crate::resident::{self, Kept};
use urnic_device::bus::Mapping;

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    /// The region's STag: both keys.
    pub stag: u32,
    /// `None` for a region without memory.
    memory: Option<Mapped>,
}

/// Memory that is mapped for the device.
#[derive(Debug)]
struct Mapped {
    dma: Mapping,
    len: usize,
    /// The bus has mapped the memory. Memory of a region on demand is not: the kernel copies for
    /// the device.
    is_mapped: bool,
    /// `None`: on demand, or another registration has made the pages present.
    kept: Option<Kept>,
}

/// A change of a registration.
#[derive(Debug, Default)]
pub struct Reregistration<'a> {
    /// Other memory: its address, its length, and the offset that names its first byte.
    pub memory: Option<(*mut c_void, usize, u64)>,
    /// Another protection domain.
    pub pd: Option<&'a Pd>,
    /// Whether the rights change.
    pub access: bool,
    /// The rights after the change, also if they stay.
    pub rights: Access,
}

/// The arguments of `CreateMr` for memory that is mapped as `dma`, and the page list if the command
/// needs one.
fn create_arguments(pd: &Pd, dma: &Mapping, len: usize, base: u64, access: Access) -> (CreateMr, Vec<U64>) {
    let (dma, log_page, list) = match dma {
        Mapping::Contiguous(iova) => (*iova, 0, Vec::new()),
        Mapping::Pages {
            pages,
            log_page,
            offset,
        } => (
            *offset,
            *log_page,
            pages.iter().map(|page| U64::new(*page)).collect(),
        ),
    };
    let arguments = CreateMr {
        base: base.into(),
        len: (len as u64).into(),
        dma: dma.into(),
        pd: pd.id.into(),
        access: access.bits().into(),
        log_page: log_page.into(),
        reserved: 0.into(),
    };
    (arguments, list)
}

impl Driver {
    /// Registers `len` bytes at `addr`. `base` names the first byte: the address, the argument of
    /// `ibv_reg_mr_iova`, or 0 if zero-based.
    ///
    /// # Errors
    /// `EFAULT` if a page is not mapped, or is read-only where `access` permits writes; `EINVAL` if
    /// the range wraps or the device refuses the rights (a remote writer without `LOCAL_WRITE`);
    /// `EOPNOTSUPP` for `ON_DEMAND` where the device does not support it; `ENOMEM` if no memory is
    /// left; `EIO` in a forked child.
    pub fn register(
        &self,
        pd: &Pd,
        addr: *mut c_void,
        len: usize,
        base: u64,
        access: Access,
    ) -> Result<Mr, Errno> {
        self.check_usable()?;
        let memory = self.map(addr, len, base, access)?;
        let (arguments, list) = create_arguments(pd, &memory.dma, len, base, access);
        let created = if list.is_empty() {
            self.commands().call::<_, Handle>(Opcode::CreateMr, &arguments)
        } else {
            self.commands()
                .send::<_, Handle>(Opcode::CreateMr, &arguments, list.as_bytes())
        };
        match created {
            Ok(handle) => {
                let stag = handle.id.get();
                let region = Region { len, pd: pd.id };
                self.objects().registered().regions().insert(stag, region);
                Ok(Mr {
                    stag,
                    memory: Some(memory),
                })
            }
            Err(errno) => {
                self.unmap(&memory);
                Err(errno)
            }
        }
    }

    /// Registers a region without memory (`ibv_alloc_null_mr(3)`): the device gathers zeroes from
    /// the region, and discards data that is scattered to it.
    ///
    /// # Errors
    /// `ENOMEM` if the device has no room; `EIO` in a forked child.
    pub fn register_null(&self, pd: &Pd) -> Result<Mr, Errno> {
        self.check_usable()?;
        let nothing = Mapping::Contiguous(0);
        let (mut arguments, _) = create_arguments(pd, &nothing, usize::MAX, 0, Access::LOCAL_WRITE);
        arguments.log_page = NULL_REGION.into();
        let handle: Handle = self.commands().call(Opcode::CreateMr, &arguments)?;
        let stag = handle.id.get();
        let region = Region { len: 0, pd: pd.id };
        self.objects().registered().regions().insert(stag, region);
        Ok(Mr { stag, memory: None })
    }

    /// Makes memory present, and maps it for the device. For a region on demand, only returns the
    /// range in which memory may appear. A region of no bytes needs no memory.
    fn map(&self, addr: *mut c_void, len: usize, base: u64, access: Access) -> Result<Mapped, Errno> {
        base.checked_add(len as u64).ok_or(Errno::INVAL)?;
        let on_demand = access.contains(Access::ON_DEMAND);
        if on_demand && self.attributes().features & features::ON_DEMAND == 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if on_demand || len == 0 {
            return Ok(Mapped {
                dma: Mapping::Contiguous(addr.expose_provenance() as u64),
                len,
                is_mapped: false,
                kept: None,
            });
        }
        let write = access.intersects(Access::WRITERS);
        let kept = self.resident().keep(addr, len, write)?;
        match self.bus().map(addr.cast(), len, write) {
            Ok(dma) => Ok(Mapped {
                dma,
                len,
                is_mapped: true,
                kept,
            }),
            Err(errno) => {
                self.resident().forget(kept);
                Err(errno)
            }
        }
    }

    fn unmap(&self, memory: &Mapped) {
        if memory.is_mapped {
            self.bus().unmap(&memory.dma, memory.len);
        }
        self.resident().forget(memory.kept);
    }

    /// Applies `change` to a registration (`ibv_rereg_mr(3)`). The STag stays the same. A failed
    /// call changes nothing.
    ///
    /// # Errors
    /// The errors of [`Driver::register`]; `EBUSY` while a window is bound to the region.
    pub fn reregister(&self, mr: &mut Mr, change: &Reregistration<'_>) -> Result<(), Errno> {
        self.check_usable()?;
        let memory = match change.memory {
            Some((addr, len, base)) => Some((self.map(addr, len, base, change.rights)?, base)),
            None => None,
        };
        let mut changes = 0;
        let mut put = |given: bool, bit: u32| changes |= if given { bit } else { 0 };
        put(memory.is_some(), reregister::TRANSLATION);
        put(change.pd.is_some(), reregister::PD);
        put(change.access, reregister::ACCESS);
        let no_memory = Mapping::Contiguous(0);
        let (mapping, len, base) = memory.as_ref().map_or((&no_memory, 0, 0), |(memory, base)| {
            (&memory.dma, memory.len, *base)
        });
        let no_pd = Pd { id: 0 };
        let (new, list) = create_arguments(change.pd.unwrap_or(&no_pd), mapping, len, base, change.rights);
        let arguments = ModifyMr {
            stag: mr.stag.into(),
            what: changes.into(),
            new,
        };
        let changed = if list.is_empty() {
            self.commands().run(Opcode::ModifyMr, &arguments)
        } else {
            self.commands()
                .send::<_, Nothing>(Opcode::ModifyMr, &arguments, list.as_bytes())
                .map(drop)
        };
        match changed {
            Ok(()) => {
                if let Some(region) = self.objects().registered().regions().get_mut(&mr.stag) {
                    region.len = memory.as_ref().map_or(region.len, |(memory, _)| memory.len);
                    region.pd = change.pd.map_or(region.pd, |pd| pd.id);
                }
                if let Some((memory, _)) = memory
                    && let Some(before) = mr.memory.replace(memory)
                {
                    self.unmap(&before);
                }
                Ok(())
            }
            Err(errno) => {
                if let Some((memory, _)) = memory {
                    self.unmap(&memory);
                }
                Err(errno)
            }
        }
    }

    /// Revokes a registration. When this returns, the device no longer places or reads data through
    /// it.
    ///
    /// # Errors
    /// `EBUSY` while a window is bound to the region; `EIO` in a forked child.
    pub fn deregister(&self, mr: &Mr) -> Result<(), Errno> {
        self.check_process()?;
        // Before the device gives the STag to another region.
        let region = self.objects().registered().regions().remove(&mr.stag);
        let destroyed = self.commands().destroy(Opcode::DestroyMr, mr.stag);
        destroyed.inspect_err(|_| {
            if let Some(region) = region {
                self.objects().registered().regions().insert(mr.stag, region);
            }
        })?;
        if let Some(memory) = &mr.memory {
            self.unmap(memory);
        }
        Ok(())
    }

    /// Creates an unbound window of `kind` 1 or 2 (`enum ibv_mw_type`). Returns its STag, which
    /// includes the key.
    ///
    /// # Errors
    /// `EINVAL` for another kind; `ENOMEM` if the device has no room; `EIO` in a forked child.
    pub fn alloc_mw(&self, pd: &Pd, kind: u32) -> Result<u32, Errno> {
        self.check_usable()?;
        let arguments = CreateMw {
            pd: pd.id.into(),
            kind: kind.into(),
        };
        let handle: Handle = self.commands().call(Opcode::CreateMw, &arguments)?;
        Ok(handle.id.get())
    }

    /// Destroys a window, bound or not. `stag` may have any key in its low byte: the program
    /// chooses the key of a type 2 window.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn dealloc_mw(&self, stag: u32) -> Result<(), Errno> {
        self.check_process()?;
        self.commands().destroy(Opcode::DestroyMw, stag)
    }
}

/// Makes pages of a region on demand present before they are used; with `write`, writable
/// (`ibv_advise_mr(3)`).
///
/// # Errors
/// The errors of [`Driver::register`].
pub fn prefetch(addr: *mut c_void, len: usize, write: bool) -> Result<(), Errno> {
    resident::populate(addr, len, write)
}
