//! Registered memory: protection domains, Stags, and the checks that guard every access (RFC 5041 §7.1, §8; RFC 5042).

mod domains;
mod permutation;
mod table;
#[cfg(test)]
mod tests;
mod window;

pub use domains::{DomainUse, Domains};
pub use table::{BindError, InvalidateBy, InvalidateError, MemoryTable, Registration, TableError};
pub use window::Window;

use crate::host::Mapping;

/// What an access needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The device gathers from here for its own program.
    LocalRead,
    /// The device places receives, Read Responses or atomic results of its own program here.
    LocalWrite,
    /// A peer reads.
    RemoteRead,
    /// A peer writes.
    RemoteWrite,
    /// A peer runs an atomic operation.
    RemoteAtomic,
}

/// Why an access is refused, in the order of the checks (RFC 5041 §7.1, RFC 5040 §7.2; rows DDP-V-01 … 04, 14, RDM-M-03).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No such Stag, or it is not valid: DDP 1/00, RDMAP 0/1/00.
    #[error("invalid Stag")]
    InvalidStag,
    /// The Stag belongs to another protection domain or stream: DDP 1/02, RDMAP 0/1/03.
    #[error("Stag not associated with this stream")]
    NotAssociated,
    /// Offset and length wrap 64 bits: DDP 1/03, RDMAP 0/1/04.
    #[error("tagged offset wraps")]
    Wrap,
    /// Outside of the registered range: DDP 1/01, RDMAP 0/1/01.
    #[error("outside of the registered range")]
    Bounds,
    /// The Stag does not allow that: RDMAP 0/1/02.
    #[error("access right missing")]
    AccessRights,
}

/// Where the bytes of a region are.
#[derive(Debug)]
pub enum Backing {
    /// In one stretch.
    Contiguous(Mapping),
    /// In pages of `1 << log_page` bytes, of which the first `skip` bytes are not part of the region.
    Pages {
        /// log2 of the page size.
        log_page: u32,
        /// Bytes of the first page before the region.
        skip: u64,
        /// The pages, in order.
        pages: Box<[Mapping]>,
    },
}
