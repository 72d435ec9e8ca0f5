//! The device's programming interface: its datasheet.
//!
//! The interface is that of a PCI function: all structures are little-endian, host memory is named
//! by IOVA only, and the fast path never reads a register. A driver works in the same way with a
//! model in its own process, a vfio-user server and silicon.
//!
//! | BAR | contents | |
//! |---|---|---|
//! | 0 | [`registers`] and the command doorbell | trapped |
//! | 2 | [`doorbell`] pages, one 4 KiB page per user context | plain memory where the transport allows it |
//! | 4 | MSI-X table and pending bits | |
//!
//! In host memory, at addresses that the driver chooses: the [`command`] queue and its completions,
//! [`event`] queues, work queues of [`wqe`]s, completion queues of [`cqe`]s, and for each queue a
//! [`record`] with its indices and shadow doorbell.
//!
//! A driver accesses such a device through [`bus::Bus`].

pub mod bus;
pub mod command;
pub mod counter;
pub mod cqe;
pub mod doorbell;
pub mod event;
mod layouts;
pub mod record;
pub mod registers;
pub mod stream;
pub mod vocabulary;
pub mod wqe;

/// Version of this interface: major in the high half (incompatible), minor in the low half
/// (additions).
pub const INTERFACE_VERSION: u32 = 0x0003_0002;

/// Identification in PCI configuration space.
pub mod pci {
    /// Red Hat's vendor id for virtual devices' experiments is not ours to use: this one is from
    /// the range that PCI-SIG never assigns.
    pub const VENDOR_ID: u16 = 0xfffe;
    /// "RN".
    pub const DEVICE_ID: u16 = 0x524e;
    /// Network controller, other.
    pub const CLASS_CODE: u32 = 0x02_80_00;
    /// Registers.
    pub const BAR_REGISTERS: u8 = 0;
    /// Doorbell pages.
    pub const BAR_DOORBELLS: u8 = 2;
    /// MSI-X.
    pub const BAR_MSIX: u8 = 4;
}
