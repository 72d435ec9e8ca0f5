//! The right that an access needs, and the reason of a refusal.

/// The right that an access needs.
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

/// Why an access is refused, in the order of the checks (RFC 5041 §7.1, RFC 5040 §7.2; rows
/// DDP-V-01 … 04, 14, RDM-M-03).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No such STag, or it is not valid: DDP 1/00, RDMAP 0/1/00.
    #[error("invalid STag")]
    InvalidStag,
    /// The STag belongs to another protection domain or stream: DDP 1/02, RDMAP 0/1/03.
    #[error("STag not associated with this stream")]
    NotAssociated,
    /// Offset and length wrap 64 bits: DDP 1/03, RDMAP 0/1/04.
    #[error("tagged offset wraps")]
    Wrap,
    /// Outside of the registered range: DDP 1/01, RDMAP 0/1/01.
    #[error("outside of the registered range")]
    Bounds,
    /// The STag does not allow that: RDMAP 0/1/02.
    #[error("access right missing")]
    AccessRights,
}
