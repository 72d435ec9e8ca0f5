//! The options, their sources and their values.
//!
//! Every option is once in [`OPTIONS`], with its key, the form of its values and its purpose. The
//! file (`--config`, `URNIC_CONFIG`), the list (`URNIC_SET`), each option's own variable (`mpa.crc`
//! is `URNIC_MPA_CRC`) and `urnic run --set` all use that table, so they accept and refuse the same
//! settings. Later sources override earlier ones, in that order.
//!
//! The plug-in reads its configuration inside another program: this crate does not panic, and it
//! reads the file by raw system calls (the plug-in interposes libc's `open` and `read`).

#![forbid(unsafe_code)]

mod devices;
mod error;
mod lines;
mod names;
mod options;
mod profile;
mod read;
mod settings;
#[cfg(test)]
mod tests;
mod values;

pub use error::{Error, Source};
pub use names::MAX_DEVICES;
pub use options::{OPTIONS, Opt};
pub use read::read_file;
pub use settings::{
    Cm, CmPorts, Completion, Config, Device, DeviceConfig, Identity, Llp, Mpa, Native, Peer, Placement,
    Present, RealDevices, RtrTypes, SameHost, SctpTransport, Section, Strict, Vfio, VfioApi, Wire,
};
pub use urnic_faults::Network;
