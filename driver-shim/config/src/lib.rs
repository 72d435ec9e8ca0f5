//! What can be set, from where, and what it is set to.
//!
//! Every option stands once, in [`OPTIONS`]: its key, what a value looks like, what it is for. The
//! file (`--config`, `URNIC_CONFIG`), the list (`URNIC_SET`), each option's own variable (`mpa.crc`
//! is `URNIC_MPA_CRC`) and `urnic run --set` all go through that table, so they accept the same and
//! refuse the same. Later ones win, in that order.
//!
//! The plug-in reads its configuration inside somebody else's program: nothing here panics, and the
//! file is read by raw system calls (the plug-in interposes libc's `open` and `read`).

#![forbid(unsafe_code)]

mod error;
mod lines;
mod log_filter;
mod network;
mod options;
mod profile;
mod read;
mod settings;
#[cfg(test)]
mod tests;

pub use error::{Error, Source};
pub use log_filter::{is_log_filter, log_filter};
pub use network::Network;
pub use options::{OPTIONS, Opt};
pub use settings::{Cm, Config, Device, Mpa, Native, Peer, Present, RtrTypes, Vfio, VfioApi};
