//! The driver's side of a device's queues, for tests of devices and drivers.
//!
//! A test brings the [`Memory`] that it shares with the device. The queues here put commands and
//! requests into it and take completions and events out of it; the test writes registers and rings
//! doorbells. A [`Folder`] is for the files of a test, a [`Wait`] ends one that hangs, and a
//! [`Source`] makes a fuzzer's bytes into choices. The kit depends only on the device's interface,
//! so that the model, the buses, the driver and `urnic conformance` can use it. No crate of the
//! product does.

mod commands;
mod consumer;
mod folder;
mod memory;
mod posts;
mod source;
mod wait;

pub use commands::CommandQueue;
pub use consumer::{CompletionQueue, Consumer, Entry, EventQueue};
pub use folder::Folder;
pub use memory::Memory;
pub use posts::{ReceiveQueue, SendQueue, request};
pub use source::Source;
pub use wait::Wait;
