//! The context of a thread on which an interrupt is raised. The context decides which thread
//! handles the device's events.
//!
//! The handler takes the driver's locks and, for a gate that opens, the locks of the program's
//! queues. A thread that only raises interrupts holds none of them, and handles events at once: a
//! switch to another thread takes longer than the exchange of all start-up frames.

use std::cell::Cell;

/// The context of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// In any call of the program: the driver's thread handles events.
    Call,
    /// In a call that handles events before it returns.
    Deferred,
    /// On a thread that holds no lock when it raises interrupts: it handles events at once.
    InterruptThread,
}

thread_local!(static CONTEXT: Cell<Context> = const { Cell::new(Context::Call) });

/// The context of the calling thread.
pub fn current() -> Context {
    CONTEXT.get()
}

/// Marks the calling thread as one that holds no lock when it raises an interrupt.
pub fn enter_interrupt_thread() {
    CONTEXT.set(Context::InterruptThread);
}

/// Calls `work`; the caller handles the interrupts of `work` afterwards.
pub fn deferred<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(Context);
    impl Drop for Restore {
        fn drop(&mut self) {
            CONTEXT.set(self.0);
        }
    }
    let _restore = Restore(CONTEXT.replace(Context::Deferred));
    work()
}
