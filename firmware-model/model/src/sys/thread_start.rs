//! The start of the device's threads.

use std::io;
use std::thread::{Builder, JoinHandle};

/// The function that the device's thread runs.
pub type ThreadMain = Box<dyn FnOnce() + Send>;

/// The function that starts the device's thread. A device inside a program supplies its own
/// function if the program must not see a thread begin later.
#[derive(Debug, Clone, Copy)]
pub struct ThreadStart(pub fn(Builder, ThreadMain) -> io::Result<JoinHandle<()>>);

impl PartialEq for ThreadStart {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl Eq for ThreadStart {}

impl Default for ThreadStart {
    fn default() -> ThreadStart {
        ThreadStart(|builder, run| builder.spawn(run))
    }
}
