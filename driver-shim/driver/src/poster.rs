//! The interface of the driver to the code that writes send queues.

use std::time::Duration;

/// The code that writes work requests into a queue pair's send queue.
pub trait Poster: Send + Sync {
    /// The gate opened: publish the entries that were written meanwhile, and ring. Called with no
    /// lock of the driver held, except the one that [`Qp::destroy`](crate::Qp::destroy) waits for,
    /// on the thread that makes all connections: the implementation must not wait for the program.
    fn gate_opened(&self);

    /// The time, by [`now`](crate::now), since which work requests wait behind the gate; `None`:
    /// none does. The implementation must not wait for the program.
    fn waiting_since(&self) -> Option<Duration>;

    /// The requests that have a completion, whether the program took it or not; `None` while the
    /// program holds a lock that protects this state. Called after the loss of the device. The
    /// implementation must not wait for the program.
    fn completed(&self) -> Option<Completed>;
}

/// The progress of a queue pair, in completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// Cookie of the oldest send that may still complete: entries of a send queue carry running
    /// numbers.
    pub sends: u32,
    /// Number of receives that completed, modulo 2^32.
    pub receives: u32,
}
