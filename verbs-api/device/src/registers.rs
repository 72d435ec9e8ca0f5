//! BAR 0. All registers without another width are 32 bits wide; 64-bit registers may be accessed as
//! two halves, low first. Reads of unlisted offsets return 0, writes to them are ignored.

use bitflags::bitflags;

/// Length of BAR 0 in bytes.
pub const BAR_LEN: u32 = 4096;
/// Value of [`MAGIC`]: "urni".
pub const MAGIC_VALUE: u32 = 0x696e_7275;

/// RO: [`MAGIC_VALUE`].
pub const MAGIC: u32 = 0x00;
/// RO: [`super::INTERFACE_VERSION`].
pub const VERSION: u32 = 0x04;
/// RO: [`Status`].
pub const STATUS: u32 = 0x08;
/// RW: [`Control`].
pub const CONTROL: u32 = 0x0c;
/// RO: why [`Status::FATAL`] is set; 0 = it is not.
pub const FATAL_CODE: u32 = 0x10;
/// RO: number of interrupt vectors.
pub const VECTORS: u32 = 0x14;
/// RO: number of doorbell pages in BAR 2; page 0 is the driver's own.
pub const UARS: u32 = 0x18;
/// RW: log2 of the entries of the command queue and of its completion queue, 1 … 12.
pub const CMD_LOG_SIZE: u32 = 0x1c;
/// RW, 64 bits: IOVA of the command queue ([`super::command::Command`] entries).
pub const CMD_BASE: u32 = 0x20;
/// RW, 64 bits: IOVA of its completion queue ([`super::command::Completion`] entries).
pub const CMD_COMPLETION_BASE: u32 = 0x28;
/// WO: producer index of the command queue, free running modulo 2^32.
pub const CMD_DOORBELL: u32 = 0x30;
/// RW: vector raised after command completions, or [`NO_VECTOR`] when the driver polls.
pub const CMD_VECTOR: u32 = 0x34;
/// WO: any value makes a sleeping device read its doorbell pages; see
/// [`super::doorbell::WAKE`].
pub const KICK: u32 = 0x38;

/// The value of every register after the function was removed, as on any PCI bus. [`STATUS`] and
/// [`CONTROL`] have this value at no other time.
pub const GONE: u32 = u32::MAX;

/// In [`CMD_VECTOR`] and event queues: raise nothing.
pub const NO_VECTOR: u32 = u32::MAX;

bitflags! {
    /// Bits of [`STATUS`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Status: u32 {
        /// The device executes commands.
        const READY = 1;
        /// The device stopped; only a reset helps. [`FATAL_CODE`] has the reason.
        const FATAL = 2;
    }

    /// Bits of [`CONTROL`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Control: u32 {
        /// Start executing commands; the command queue registers must be set.
        const ENABLE = 1;
        /// Function reset: all objects are destroyed, registers return to their defaults; what
        /// completed still arrives. Reads as 0 when done.
        const RESET = 2;
    }
}

/// Values of [`FATAL_CODE`].
pub mod fatal {
    /// The command queue could not be read or written by DMA.
    pub const COMMAND_DMA: u32 = 1;
    /// Memory that the device was given vanished while queues or records lay there, those of events
    /// included: it was unmapped too early. All objects have been destroyed.
    pub const HOST_MEMORY: u32 = 2;
}
