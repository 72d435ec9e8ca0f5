//! The writer of a send queue, as the driver sees it.

/// Whoever writes work requests into a queue pair's send queue.
pub trait Poster: Send + Sync {
    /// The gate opened: publish and ring for what was written meanwhile. Called with no lock of the
    /// driver held but the one that [`Qp::destroy`](crate::Qp::destroy) waits for, on the thread
    /// that makes all connections: it must not wait for the program.
    fn gate_opened(&self);

    /// Whether work requests wait behind the gate. Must not wait for the program either.
    fn is_waiting(&self) -> bool;

    /// What has a completion by now, taken by the program or not; `None` while the program keeps
    /// that from being seen. Asked when the device is lost. Must not wait for the program either.
    fn completed(&self) -> Option<Completed>;
}

/// How far a queue pair has come, in completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// Cookie of the oldest send that may yet complete: entries of a send queue carry running
    /// numbers.
    pub sends: u32,
    /// Receives that completed, ever, modulo 2^32.
    pub receives: u32,
}
