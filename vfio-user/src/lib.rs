//! The vfio-user protocol (QEMU's `docs/interop/vfio-user.rst`): how a PCI function is lent from
//! one process, the *server*, to another, the *client*, over a unix stream socket. A codec for both
//! ends that does no I/O; sockets are the caller's.
//!
//! ```text
//!  socket ──bytes, fds──▶ Decoder ──▶ Message ──▶ Message::request() or ::reply() ──▶ Request, Reply
//!  socket ◀──bytes─────── Request::emit, Reply::emit, emit_error
//! ```
//!
//! Either side sends commands and answers the other's: the client asks for nearly everything
//! ([`Request::Version`] first), the server only for memory that it cannot map
//! ([`Request::DmaRead`], [`Request::DmaWrite`]). Replies carry the id of their command; ids belong
//! to whoever sent the command, so a command and a reply with the same id have nothing to do with
//! each other unless they crossed.
//!
//! What comes from a peer is never trusted. A message that is too long, or that brings too many
//! descriptors, ends the stream ([`StreamError`]); one whose contents make no sense is
//! [`Malformed`] and deserves an error reply. Nothing here panics on a peer's bytes, and a
//! [`Decoder`] holds no more than one message and one read.
//!
//! Numbers are in the byte order of the machine, as the protocol says: both ends are on it.

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

/// Protocol version spoken: 0.1. QEMU says 0.0, which is a part of it.
pub const MAJOR: u16 = 0;
/// See [`MAJOR`].
pub const MINOR: u16 = 1;

/// Region indices of a PCI function (`linux/vfio.h`, `VFIO_PCI_*_REGION_INDEX`).
pub mod region_index {
    /// Base address register 0; 1 … 5 are the others.
    pub const BAR0: u32 = 0;
    /// The last base address register.
    pub const BAR5: u32 = 5;
    /// Expansion ROM.
    pub const ROM: u32 = 6;
    /// Configuration space.
    pub const CONFIG: u32 = 7;
    /// Legacy VGA ranges.
    pub const VGA: u32 = 8;
    /// How many there are.
    pub const COUNT: u32 = 9;
}

/// Interrupt indices of a PCI function (`linux/vfio.h`, `VFIO_PCI_*_IRQ_INDEX`).
pub mod irq_index {
    /// Legacy interrupt pin.
    pub const INTX: u32 = 0;
    /// MSI.
    pub const MSI: u32 = 1;
    /// MSI-X.
    pub const MSIX: u32 = 2;
    /// Error notifications.
    pub const ERR: u32 = 3;
    /// The owner wants the device back.
    pub const REQ: u32 = 4;
    /// How many there are.
    pub const COUNT: u32 = 5;
}
