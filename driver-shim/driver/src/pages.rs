//! Doorbell pages of a context: one page, and further ones if the context has many completion
//! queues.
//!
//! The record of a queue counts posted requests, so no request is lost if a doorbell is overwritten
//! in its slot. The arming of a completion queue is only in its slot: two queues that share a slot
//! could lose a wake-up. So no page gets more completion queues than it has slots.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use urnic_device::command::{Handle, Nothing, Opcode};
use urnic_device::doorbell::CQ_SLOTS;

use super::command::CommandQueue;
use urnic_process::lock::lock;

/// The pages of a context.
#[derive(Debug)]
pub(super) struct Pages {
    own: u32,
    /// Pages with the completion queues in use; the first page is `own`.
    pages: Mutex<Vec<Arc<Page>>>,
}

#[derive(Debug)]
struct Page {
    uar: u32,
    cqs: AtomicU32,
}

/// The slot of a completion queue in a page; dropping the value frees the slot.
#[derive(Debug)]
pub(super) struct PageSlot(Arc<Page>);

impl Page {
    /// Takes a free slot. The caller holds the lock of the pages: meanwhile slots are only freed.
    fn reserve(self: &Arc<Page>) -> Option<PageSlot> {
        (self.cqs.load(Ordering::Acquire) < CQ_SLOTS).then(|| {
            self.cqs.fetch_add(1, Ordering::AcqRel);
            PageSlot(self.clone())
        })
    }
}

impl PageSlot {
    /// The page's number.
    pub(super) fn uar(&self) -> u32 {
        self.0.uar
    }
}

impl Drop for PageSlot {
    fn drop(&mut self) {
        self.0.cqs.fetch_sub(1, Ordering::AcqRel);
    }
}

fn allocate(commands: &CommandQueue) -> Result<Arc<Page>, Errno> {
    let uar: Handle = commands.call(Opcode::AllocUar, &Nothing {})?;
    Ok(Arc::new(Page {
        uar: uar.id.get(),
        cqs: AtomicU32::new(0),
    }))
}

impl Pages {
    /// Allocates the first page of a context.
    pub(super) fn new(commands: &CommandQueue) -> Result<Pages, Errno> {
        let page = allocate(commands)?;
        Ok(Pages {
            own: page.uar,
            pages: Mutex::new(vec![page]),
        })
    }

    /// The number of the page for all objects but completion queues.
    pub(super) fn own(&self) -> u32 {
        self.own
    }

    /// Allocates a slot for a completion queue, in a new page if all other pages are full.
    pub(super) fn slot(&self, commands: &CommandQueue) -> Result<PageSlot, Errno> {
        let mut pages = lock(&self.pages);
        if let Some(slot) = pages.iter().find_map(Page::reserve) {
            return Ok(slot);
        }
        let page = allocate(commands)?;
        pages.push(page.clone());
        page.reserve().ok_or(Errno::NOMEM)
    }

    /// Frees the pages, the first one last.
    pub(super) fn free(&self, commands: &CommandQueue) -> Result<(), Errno> {
        let mut pages = lock(&self.pages);
        while let Some(page) = pages.last() {
            commands.destroy(Opcode::FreeUar, page.uar)?;
            pages.pop();
        }
        Ok(())
    }
}
