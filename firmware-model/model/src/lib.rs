//! The RNIC itself: a device that speaks iWARP (MPA, DDP, RDMAP) over TCP streams and is driven through
//! registers, doorbells and queues in host memory, as `urnic_device` lays down.
//!
//! Protocol engines ([`llp`], [`rdmap`]) do no I/O: bytes, time and host memory go in, bytes, completions and
//! [effects](effects::Effects) come out. The rim around them makes the device: [`stream`]s, queues, commands and
//! the threads that drive them.

mod agenda;
mod asked;
pub mod buffers;
pub mod capture;
mod command;
pub mod config;
pub mod counters;
mod device;
pub mod effects;
pub mod env;
mod failed;
pub mod fault;
#[cfg(fuzzing)]
pub mod fuzzing;
mod gathering;
pub mod host;
pub mod llp;
pub mod memory;
#[cfg(any(test, fuzzing))]
mod mock;
mod pairs;
pub mod process_memory;
mod qp;
pub mod queues;
pub mod rdmap;
mod runtime;
mod shard;
mod state;
pub mod stream;
mod streaming;
mod sys;
mod table;
#[cfg(test)]
mod tests;
pub mod threads;
pub mod time;
mod turns;

pub use config::{DeviceAddress, Limits, ModelConfig, Prefix, Reach};
pub use counters::{Counter, Counters};
pub use device::{Device, DoorbellPages, Interrupts};
pub use failed::FailedCall;
pub use host::{HostMemory, OwnProcess, Piece, PieceMut, RemoteMemory, RemoteWord, Unreachable};
pub use time::Nanos;
