//! The RNIC itself: a device that speaks iWARP (MPA, DDP, RDMAP) over TCP streams and is driven
//! through registers, doorbells and queues in host memory, as `urnic_device` lays down.
//!
//! Protocol engines ([`llp`], [`rdmap`]) do no I/O: bytes, time and host memory go in, bytes,
//! completions and [effects](events::Effects) come out. The rim around them makes the device:
//! [`stream`]s, queues, commands and the threads that drive them.
//!
//! The folders have an order, and a folder uses only those below it; see ARCHITECTURE.md.

pub mod capture;
mod command;
pub mod config;
pub mod counters;
mod datagram;
mod device;
pub mod events;
mod faulty;
mod frames;
mod handshakes;
pub mod host;
pub mod llp;
pub mod log_limit;
pub mod memory;
mod probes;
pub mod qp;
pub mod queues;
pub mod rdmap;
mod roce;
mod runtime;
mod schedule;
mod shard;
pub mod stream;
mod sys;
mod table;
#[cfg(any(test, fuzzing, feature = "simulation"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod time;
pub mod timed;
pub mod transport;
mod tuning;

pub use config::{BusyPoll, DeviceAddress, Limits, ModelConfig, Reach, SctpTransport, ThreadStart};
pub use counters::{Counter, Counters};
pub use device::{Device, DoorbellPages, Interrupts};
pub use host::{HostMemory, OwnProcess, Piece, PieceMut, RemoteMemory, RemoteWord, Unreachable};
pub use sys::failed::FailedCall;
pub use time::Nanos;
