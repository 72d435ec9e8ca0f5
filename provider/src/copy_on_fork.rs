//! Whether forked children may have memory that is registered with the devices of this process.
//!
//! An adapter writes to physical pages that the kernel pinned. Before Linux 5.12 a fork could give
//! these pages to the child, so libibverbs withholds registered memory from children
//! (MADV_DONTFORK): a child that touches it is killed. Later kernels copy pinned pages at the fork.
//! A device in user space pins nothing, and reaches memory through the page tables of the process
//! that registered it. Adapters of this machine may be present beside it: then the kernel's answer
//! counts.

use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use urnic_config::{Config, Device};
use urnic_process::netlink;

use crate::guard::guarded;

/// Whether children may have registered memory, because every device sees what this process writes
/// after a fork. Determined once.
pub(crate) fn children_may_have_registered_memory() -> bool {
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    let answer = ANSWER.load(Ordering::Relaxed);
    if answer != UNKNOWN {
        return answer == YES;
    }
    let found = guarded(|| Ok(!is_pinned()? && netlink::copies_pinned_pages_on_fork()?));
    if let Ok(found) = found {
        ANSWER.store(if found { YES } else { NO }, Ordering::Relaxed);
    }
    found.unwrap_or(false)
}

/// Whether a device of the configuration pins memory: a PCI function.
fn is_pinned() -> Result<bool, Errno> {
    let config = Config::from_env().map_err(|_| Errno::INVAL)?;
    let mut devices = config.each_device().into_iter();
    Ok(devices.any(|device| matches!(device.device, Device::Vfio(_))))
}
