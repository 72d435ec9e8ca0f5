//! The verbs: what libibverbs calls, translated to work queue entries, doorbells and driver calls.
//!
//! Posting and polling touch only memory shared with the device, ring its doorbell and hold one lock of one queue;
//! they neither allocate nor panic. Everything else goes to the driver, and its answer becomes an errno.

mod completion_ring;
mod ledger;
mod lock;
mod receive_queue;
#[cfg(test)]
mod ring_tests;
mod send_queue;
