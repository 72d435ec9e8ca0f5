//! The bound of a device's rings of datagrams.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most rings of a device, in both directions together.
pub(super) const RINGS: usize = 512;

/// One of the rings that a device may have.
#[derive(Debug)]
pub(super) struct Share(Arc<AtomicUsize>);

impl Share {
    pub(super) fn take(rings: &Arc<AtomicUsize>) -> Option<Share> {
        let more = |count| (count < RINGS).then_some(count + 1);
        let taken = rings.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| Share(rings.clone()))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
