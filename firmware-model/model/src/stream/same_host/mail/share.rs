//! The bounds of what a device has for rings of datagrams.

use crate::memory::reserve;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most rings of a device, in both directions together.
pub(super) const RINGS: usize = 512;
/// Most ports of a device that others can find: each takes a descriptor more.
pub(super) const PORTS: usize = 128;

/// One of the rings, or of the ports, that a device may have.
#[derive(Debug)]
pub(super) struct Share(Arc<AtomicUsize>);

impl Share {
    pub(super) fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Share> {
        reserve(taken, 1, most).then(|| Share(taken.clone()))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
