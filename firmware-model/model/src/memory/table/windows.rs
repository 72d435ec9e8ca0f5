//! Memory windows: made, bound, unbound and destroyed.

use super::{Kind, MemoryTable, Record};
use crate::memory::entry::Entry;
use crate::memory::registration::{BindError, TableError};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use urnic_device::vocabulary::Access;
use urnic_device::wqe::BindOperands;

impl MemoryTable {
    /// Makes an unbound window; an `exclusive` one (type 2) serves only the queue pair that binds
    /// it.
    pub fn create_window(&self, pd: u32, exclusive: bool) -> Result<u32, TableError> {
        let mut admin = self.lock();
        if admin.windows >= self.max_windows {
            return Err(TableError::Full);
        }
        let slot = self.allocate(&mut admin, pd)?;
        admin.windows += 1;
        let stag = self.stag(slot, admin.key());
        let kind = Kind::Window {
            exclusive,
            region: None,
        };
        admin.records.insert(slot, Record { stag, pd, kind });
        Ok(stag)
    }

    /// Destroys a window, bound or not. Its key does not matter: a program chooses it anew for
    /// every bind, also for one that fails.
    pub fn destroy_window(&self, stag: u32) -> Result<(), TableError> {
        let record = self
            .lock()
            .records
            .get(&self.slot(stag))
            .map(|record| record.stag);
        self.remove(record.unwrap_or(stag), |kind| match kind {
            Kind::Window { .. } => Ok(()),
            Kind::Region { .. } => Err(TableError::UnknownStag),
        })
    }

    /// Carries out a bind for queue pair `qid` of domain `pd` (VRB-M-03).
    pub fn bind(&self, operands: &BindOperands, pd: u32, qid: u32) -> Result<(), BindError> {
        let (new_stag, mr_stag) = (operands.new_stag.get(), operands.mr_stag.get());
        let (offset, len) = (operands.offset.get(), operands.len.get());
        let access = Access::from_bits_truncate(operands.access.get());
        let (slot, region_slot) = (self.slot(new_stag), self.slot(mr_stag));
        let mut admin = self.lock();
        let id = admin.entry_id();
        let record = admin.records.get(&slot).ok_or(BindError::UnknownWindow)?;
        let Kind::Window {
            exclusive,
            region: bound_to,
        } = record.kind
        else {
            return Err(BindError::UnknownWindow);
        };
        if record.pd != pd {
            return Err(BindError::UnknownWindow);
        }
        if exclusive && (bound_to.is_some() || len == 0) {
            return Err(BindError::AlreadyBound);
        }
        let entry = if len == 0 {
            None
        } else {
            let region = admin
                .record(region_slot, mr_stag)
                .filter(|r| r.pd == pd && self.is_valid(region_slot))
                .ok_or(BindError::UnknownRegion)?;
            let Kind::Region { registration, .. } = &region.kind else {
                return Err(BindError::UnknownRegion);
            };
            let start = offset
                .checked_sub(registration.base)
                .filter(|start| *start <= registration.len && len <= registration.len - start)
                .ok_or(BindError::Bounds)?;
            let rights = registration.access;
            // A right to write from afar needs the region's owner to have the right to write
            // (verbs, ibv_bind_mw).
            let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            if !rights.contains(Access::MW_BIND) || (writes && !rights.contains(Access::LOCAL_WRITE)) {
                return Err(BindError::AccessRights);
            }
            Some(Arc::new(Entry {
                id,
                stag: new_stag,
                pd,
                qid: exclusive.then_some(qid),
                base: if access.contains(Access::ZERO_BASED) {
                    0
                } else {
                    offset
                },
                len,
                access,
                is_window: true,
                backing: registration.backing.clone(),
                start,
                reported: AtomicBool::new(false),
            }))
        };
        let region = entry.is_some().then_some(region_slot);
        admin.release(bound_to);
        if let Some(region) = region
            && let Some(Record {
                kind: Kind::Region { windows, .. },
                ..
            }) = admin.records.get_mut(&region)
        {
            *windows += 1;
        }
        if let Some(record) = admin.records.get_mut(&slot) {
            record.stag = new_stag;
            record.kind = Kind::Window { exclusive, region };
        }
        let old = self.replace(slot, entry);
        drop(admin);
        self.retire(old);
        Ok(())
    }

    /// Unbinds the windows that serve only queue pair `qid`, which is going away.
    pub(crate) fn unbind_all_of(&self, qid: u32) {
        let mut admin = self.lock();
        if admin.windows == 0 {
            return;
        }
        let slots: Vec<u32> = admin
            .records
            .iter()
            .filter(|(slot, r)| matches!(r.kind, Kind::Window { .. }) && self.owner(**slot) == Some(qid))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in slots {
            let mut bound_to = None;
            if let Some(Record {
                kind: Kind::Window { region, .. },
                ..
            }) = admin.records.get_mut(&slot)
            {
                bound_to = region.take();
            }
            admin.release(bound_to);
            self.replace(slot, None);
        }
    }
}
