//! The device's programming interface: its datasheet.
//!
//! Written for a PCI function from the start: all structures are little-endian, host memory is
//! named by IOVA only, and the fast path never reads a register. What drives it need not know
//! whether a model in the same process, a vfio-user server or silicon answers.
//!
//! | BAR | contents | |
//! |---|---|---|
//! | 0 | [`registers`] and the command doorbell | trapped |
//! | 2 | [`doorbell`] pages, one 4 KiB page per user context | plain memory where the transport allows it |
//! | 4 | MSI-X table and pending bits | |
//!
//! In host memory, at addresses that the driver gives: the [`command`] queue and its completions,
//! [`event`] queues, work queues of [`wqe`]s, completion queues of [`cqe`]s, and for each queue a
//! [`record`] with its indices and shadow doorbell.
//!
//! [`bus::Bus`] is how a driver reaches such a device.

pub mod bus;
pub mod command;
pub mod counter;
pub mod cqe;
pub mod doorbell;
pub mod event;
pub mod record;
pub mod registers;
pub mod stream;
pub mod vocabulary;
pub mod wqe;

/// Version of this interface: major in the high half (incompatible), minor in the low half
/// (additions).
pub const INTERFACE_VERSION: u32 = 0x0001_0000;

/// Identity in PCI configuration space.
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
