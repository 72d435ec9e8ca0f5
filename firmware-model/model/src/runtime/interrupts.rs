//! The destination of the device's interrupts.

/// The destination of the device's interrupts.
pub trait Interrupts: Send + Sync {
    /// Raises a vector. Called from any thread that drives the device, with none of its locks held.
    fn raise(&self, vector: u32);

    /// Called once on the thread that the device has of its own, before it raises anything there:
    /// under it there is no call of the host's.
    fn on_own_thread(&self) {}
}
