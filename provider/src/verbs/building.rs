//! The state that the work-request builder ([`qp_ex`](super::qp_ex)) keeps with the send queue
//! while the queue is locked.

use rustix::io::Errno;
use urnic_device::wqe::Opcode;

use super::send_queue::{Entry, SendQueue};

/// The state between `wr_start` and `wr_complete`.
#[derive(Default)]
pub(crate) struct Building {
    /// The mark of the queue at `wr_start`.
    pub(super) mark: (u32, u32),
    /// The entry that gets the next operands.
    pub(super) entry: Option<Entry>,
    /// The first error.
    pub(super) error: Option<Errno>,
}

impl Building {
    /// Begins the next entry.
    pub(super) fn begin(
        &mut self,
        queue: &mut SendQueue,
        opcode: Opcode,
        flags: u32,
        wr_id: u64,
        fill: impl FnOnce(&mut SendQueue, &mut Entry),
    ) {
        self.finish(queue);
        match queue.begin(opcode, flags, wr_id) {
            Ok(mut entry) => {
                fill(queue, &mut entry);
                self.entry = Some(entry);
            }
            Err(errno) => self.fail(errno),
        }
    }

    /// Ends the last entry.
    pub(super) fn finish(&mut self, queue: &mut SendQueue) {
        if let Some(mut entry) = self.entry.take() {
            queue.commit(&mut entry);
        }
    }

    /// Records an error.
    pub(super) fn fail(&mut self, errno: Errno) {
        self.error.get_or_insert(errno);
    }
}
