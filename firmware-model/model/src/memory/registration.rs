//! Registrations, and why a table refuses to change one.

use super::backing::Backing;
use std::sync::Arc;
use urnic_device::vocabulary::Access;

/// The parameters of a registration.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Protection domain.
    pub pd: u32,
    /// First tagged offset.
    pub base: u64,
    /// Length in bytes.
    pub len: u64,
    /// Rights.
    pub access: Access,
    /// The memory.
    pub backing: Arc<Backing>,
}

/// Why the table was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// No such region or window.
    #[error("no such region or window")]
    UnknownStag,
    /// No such protection domain.
    #[error("no such protection domain")]
    UnknownDomain,
    /// Too many.
    #[error("no room for more regions or windows")]
    Full,
    /// Windows are bound to the region (VRB-M-03).
    #[error("windows are bound to the region")]
    Bound,
    /// The range wraps 64 bits.
    #[error("the range wraps 64 bits")]
    Wrap,
}

/// Why a window was not bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No such window, or not one of this stream.
    #[error("no such window")]
    UnknownWindow,
    /// A type 2 window must be unbound first.
    #[error("the window is bound already")]
    AlreadyBound,
    /// The region is not valid, or not one of this domain.
    #[error("no such region")]
    UnknownRegion,
    /// The range is not inside the region.
    #[error("outside of the region")]
    Bounds,
    /// The region does not allow that.
    #[error("the region does not allow it")]
    AccessRights,
}

/// The origin of an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidateBy {
    /// A work request of the program.
    Local,
    /// A peer's Send with Invalidate.
    Peer,
}

/// Why a STag was not invalidated (RDM-S-04).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidateError {
    /// No such STag, or not valid: 0/2/09.
    #[error("invalid STag")]
    InvalidStag,
    /// The STag belongs to another protection domain or stream: 0/1/09.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// Other streams use it too (RFC 5040 §8.1.1(7)): 0/2/09.
    #[error("other streams share the STag")]
    Shared,
    /// Windows are bound to it (VRB-M-03): 0/2/09.
    #[error("windows are bound to the region")]
    Bound,
}
