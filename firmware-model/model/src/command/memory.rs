//! Commands on protection domains, regions and windows.

use super::Job;
use super::answer::{Answer, Check as _, Refused, argument, done, handle};
use crate::memory::{Backing, Registration, Remote, TableError};
use std::sync::Arc;
use urnic_device::command::{CreateMr, CreateMw, Handle, ModifyMr, NULL_REGION, Status, reregister};
use urnic_device::vocabulary::Access;

/// log2 of the page sizes that a page list may have.
const LOG_PAGE: std::ops::RangeInclusive<u32> = 12..=40;

impl From<TableError> for Status {
    fn from(error: TableError) -> Status {
        match error {
            TableError::UnknownStag | TableError::UnknownDomain => Status::InvalidHandle,
            TableError::Full => Status::NoResources,
            TableError::Bound => Status::Busy,
            TableError::Wrap => Status::InvalidArgument,
        }
    }
}

impl From<TableError> for Refused {
    fn from(error: TableError) -> Refused {
        Status::from(error).into()
    }
}

fn access(bits: u32) -> Result<Access, Status> {
    let access = Access::from_bits(bits).ok_or(Status::InvalidArgument)?;
    // Remote write requires local write (ibv_reg_mr).
    let remote_writers = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(remote_writers) && !access.contains(Access::LOCAL_WRITE) {
        return Err(Status::InvalidArgument);
    }
    Ok(access)
}

impl Job<'_> {
    pub(super) fn alloc_pd(&self) -> Answer {
        let domains = self.core.memory.domains();
        handle(domains.allocate().ok_or(Status::NoResources)?)
    }

    pub(super) fn free_pd(&self) -> Answer {
        match self.core.memory.domains().free(self.handle()) {
            None => None.of(argument!(Handle.id)),
            Some(false) => Err(Status::Busy.into()),
            Some(true) => done(),
        }
    }

    pub(super) fn create_mr(&self) -> Answer {
        let arguments: CreateMr = self.arguments();
        let registration = Registration {
            pd: arguments.pd.get(),
            base: arguments.base.get(),
            len: arguments.len.get(),
            access: access(arguments.access.get()).of(argument!(CreateMr.access))?,
            backing: self.backing(&arguments)?,
        };
        handle(self.core.memory.register(registration)?)
    }

    pub(super) fn destroy_mr(&self) -> Answer {
        self.core.memory.deregister(self.handle())?;
        done()
    }

    pub(super) fn modify_mr(&self) -> Answer {
        let arguments: ModifyMr = self.arguments();
        let (requested, new) = (arguments.what.get(), &arguments.new);
        let has = |bit| requested & bit != 0;
        let known = reregister::TRANSLATION | reregister::PD | reregister::ACCESS;
        (requested & !known == 0).of(argument!(ModifyMr.what))?;
        let backing = has(reregister::TRANSLATION)
            .then(|| self.backing(new))
            .transpose()?;
        let access = has(reregister::ACCESS)
            .then(|| access(new.access.get()))
            .transpose()
            .of(argument!(ModifyMr.new))?;
        self.core
            .memory
            .reregister(arguments.stag.get(), |registration| {
                if let Some(backing) = backing {
                    registration.backing = backing;
                    registration.base = new.base.get();
                    registration.len = new.len.get();
                }
                if let Some(access) = access {
                    registration.access = access;
                }
                if has(reregister::PD) {
                    registration.pd = new.pd.get();
                }
            })?;
        done()
    }

    pub(super) fn create_mw(&self) -> Answer {
        let arguments: CreateMw = self.arguments();
        let exclusive = match arguments.kind.get() {
            1 => false,
            2 => true,
            _ => return Err(Status::InvalidArgument).of(argument!(CreateMw.kind)),
        };
        handle(self.core.memory.create_window(arguments.pd.get(), exclusive)?)
    }

    pub(super) fn destroy_mw(&self) -> Answer {
        self.core.memory.destroy_window(self.handle())?;
        done()
    }

    /// The memory that a registration names.
    fn backing(&self, arguments: &CreateMr) -> Result<Arc<Backing>, Status> {
        let (len, dma) = (arguments.len.get(), arguments.dma.get());
        if arguments.log_page.get() == NULL_REGION {
            let local = Access::from_bits_truncate(arguments.access.get()) - Access::LOCAL_WRITE;
            return if local.is_empty() {
                Ok(Arc::new(Backing::Null))
            } else {
                Err(Status::InvalidArgument)
            };
        }
        if Access::from_bits_truncate(arguments.access.get()).contains(Access::ON_DEMAND) {
            let host = &self.core.host;
            let named = host.on_demand() && arguments.log_page.get() == 0;
            let remote = named.then(|| Remote::new(host, dma, len)).flatten();
            return Ok(Arc::new(Backing::Remote(remote.ok_or(Status::InvalidArgument)?)));
        }
        if len > self.core.config.limits.mr_size {
            return Err(Status::InvalidArgument);
        }
        let backing = match arguments.log_page.get() {
            0 => self.contiguous(dma, len)?,
            log_page if LOG_PAGE.contains(&log_page) => self.pages(log_page, dma, len)?,
            _ => return Err(Status::InvalidArgument),
        };
        Ok(Arc::new(backing))
    }

    fn contiguous(&self, iova: u64, len: u64) -> Result<Backing, Status> {
        match self.map(iova, len as usize, 1) {
            Ok(mapping) => Ok(Backing::Contiguous { mapping, iova }),
            Err(_) if len == 0 => Ok(Backing::Null),
            Err(status) => Remote::new(&self.core.host, iova, len)
                .map(Backing::Remote)
                .ok_or(status),
        }
    }

    /// A page list, if there is room for it; pages that lie side by side become one extent.
    fn pages(&self, log_page: u32, skip: u64, len: u64) -> Result<Backing, Status> {
        let page_len = 1u64 << log_page;
        if skip >= page_len {
            return Err(Status::InvalidArgument);
        }
        let count = (skip + len).div_ceil(page_len);
        let list = self.input()?;
        if count * 8 > list.len() as u64 {
            return Err(Status::InvalidArgument);
        }
        let room = self.core.page_room.take(count as usize);
        let room = room.ok_or(Status::NoResources)?;
        let iovas: Vec<u64> = (0..count as usize)
            .map(|index| u64::from_le(list.read(index * 8)))
            .collect();
        let adjacent = |pair: &[u64]| pair[0].checked_add(page_len) == Some(pair[1]);
        if let Some(first) = iovas.first()
            && iovas.windows(2).all(adjacent)
            && let Ok(whole) = self.contiguous(first.wrapping_add(skip), len)
        {
            return Ok(whole);
        }
        let pages = iovas.iter().map(|iova| self.map(*iova, page_len as usize, 1));
        Ok(Backing::Pages {
            log_page,
            skip,
            pages: pages.collect::<Result<_, _>>()?,
            iovas: iovas.into(),
            room,
        })
    }
}
