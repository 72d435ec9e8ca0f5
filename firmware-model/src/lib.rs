//! The RNIC itself: a device that speaks iWARP (MPA, DDP, RDMAP) over TCP streams and is driven through
//! registers, doorbells and queues in host memory, as `urnic_verbs_api::device` lays down.
//!
//! Protocol engines ([`llp`], [`rdmap`]) do no I/O: bytes, time and host memory go in, bytes, completions and
//! [effects](effects::Effects) come out. The rim around them makes the device: [`stream`]s, queues, commands and
//! the threads that drive them.

pub mod buffers;
pub mod counters;
pub mod effects;
pub mod env;
pub mod host;
pub mod llp;
pub mod memory;
pub mod queues;
pub mod rdmap;
pub mod stream;
pub mod time;

pub use counters::{Counter, Counters};
pub use host::{HostMemory, Piece, PieceMut};
pub use time::Nanos;
