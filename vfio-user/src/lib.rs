//! The vfio-user protocol (QEMU's `docs/interop/vfio-user.rst`): one process, the *server*,
//! provides a PCI function to another, the *client*, over a unix stream socket. This crate is a
//! codec for both ends without I/O; the caller owns the sockets.
//!
//! ```text
//!  socket ──bytes, fds──▶ Decoder ──▶ Message ──▶ Message::request() or ::reply() ──▶ Request, Reply
//!  socket ◀──bytes─────── Request::emit, Reply::emit, emit_error
//! ```
//!
//! Both sides send commands and reply to the other's: the client sends nearly all commands
//! ([`Request::Version`] first), the server only those for memory that it cannot map
//! ([`Request::DmaRead`], [`Request::DmaWrite`]). A reply carries the id of its command. Each side
//! assigns the ids of its own commands, so commands of the two sides with the same id are
//! unrelated.
//!
//! Data from a peer is never trusted. A message that is too long, or that carries too many
//! descriptors, ends the stream ([`StreamError`]); a message with invalid contents is [`Malformed`]
//! and gets an error reply. No function here panics on a peer's bytes, and a [`Decoder`] holds no
//! more than one message and one read.
//!
//! Numbers are in the byte order of the machine, as the protocol requires: both ends run on it.

#![forbid(unsafe_code)]

mod decoder;
mod device;
mod dma;
mod error;
mod fields;
mod header;
mod irq;
mod message;
mod region;
mod version;

pub use decoder::{Decoder, Limits, Message};
pub use device::{DeviceFlags, DeviceInfo};
pub use dma::{DmaAccess, DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags};
pub use error::{Malformed, StreamError};
pub use header::{Command, HEADER_LEN, Header, Kind};
pub use irq::{IrqAction, IrqData, IrqFlags, IrqInfo, SetIrqs};
pub use message::{Reply, Request, emit_error};
pub use region::{RegionAccess, RegionFlags, RegionInfo, SmallWrite, SparseArea};
pub use version::{Capabilities, MAX_VERSION_DATA, Memory, Urnic, Version};

/// Major number of the protocol version 0.1. QEMU uses 0.0, which is a subset.
pub const MAJOR: u16 = 0;
/// Minor number of the protocol version; see [`MAJOR`].
pub const MINOR: u16 = 1;

/// Region indices of a PCI function (`linux/vfio.h`, `VFIO_PCI_*_REGION_INDEX`).
pub mod region_index {
    /// Configuration space; 0 to 5 are the base address registers.
    pub const CONFIG: u32 = 7;
    /// Number of region indices.
    pub const COUNT: u32 = 9;
}

/// Interrupt indices of a PCI function (`linux/vfio.h`, `VFIO_PCI_*_IRQ_INDEX`).
pub mod irq_index {
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Error notifications.
    pub const ERR: u32 = 3;
    /// The owner requests the device back.
    pub const REQ: u32 = 4;
    /// Number of interrupt indices.
    pub const COUNT: u32 = 5;
}
