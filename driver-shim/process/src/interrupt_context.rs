//! Where a thread stands when an interrupt comes on it, which decides who handles what the device
//! has to tell.
//!
//! Handling takes the driver's locks and, for a gate that opens, the program's queues'. A thread
//! that only carries interrupts holds none of them and handles at once: every hand-over to another
//! thread costs a connection that is being made more than all its frames together.

use std::cell::Cell;

/// Where a thread stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Anywhere in a call of the program: the driver's thread handles it.
    Anywhere,
    /// In a call that handles it before it returns.
    Within,
    /// On a thread that raises interrupts with nothing held.
    AtRest,
}

thread_local!(static PLACE: Cell<Place> = const { Cell::new(Place::Anywhere) });

/// Where the calling thread stands.
pub fn here() -> Place {
    PLACE.get()
}

/// From here on the calling thread holds nothing whenever it raises an interrupt.
pub fn rest() {
    PLACE.set(Place::AtRest);
}

/// Does `work`, whose interrupts the caller handles afterwards.
pub fn within<T>(work: impl FnOnce() -> T) -> T {
    struct Back(Place);
    impl Drop for Back {
        fn drop(&mut self) {
            PLACE.set(self.0);
        }
    }
    let _back = Back(PLACE.replace(Place::Within));
    work()
}
