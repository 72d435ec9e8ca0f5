//! The bits of arguments and results.

/// Bits of `ModifyMr::what`: those of `enum ibv_rereg_mr_flags`.
pub mod reregister {
    /// `new.base`, `new.len`, `new.dma`, `new.log_page`.
    pub const TRANSLATION: u32 = 1;
    /// `new.pd`.
    pub const PD: u32 = 2;
    /// `new.access`.
    pub const ACCESS: u32 = 4;
}

/// Bits of `CreateCq::flags`.
pub mod cq {
    /// The driver does not read the timestamps of the entries: they may be 0. That saves the device
    /// reading its clock for each.
    pub const UNTIMED: u32 = 1;
}

/// Bits of `CreateQp::rules`.
pub mod create_qp {
    /// Errors are as the InfiniBand Architecture Specification has them. Only windows of kind 2
    /// that are bound to the queue pair can be invalidated through it, by a work request or by the
    /// peer (vol. 1, o10-37.2.26); a work request that would invalidate something else completes
    /// with `MwBindErr`. With `PEER_MAY_CLOSE`, a Terminate by which the peer reports an error of
    /// its own (0/0/00, no header) does not end the queue pair: the peer's FIN follows.
    pub const INFINIBAND: u32 = 1;
    /// Kind UD: the queue pair does not receive what it sent to a group itself.
    pub const BLOCK_OWN_MULTICAST: u32 = 2;
    /// Kind UD: the queue pair sends and receives packets at UDP port 4791, as RoCE v2 has it, and
    /// has no UDP port of its own. Queue pairs of kind RC and UC get their wire with their peer
    /// ([`Path`](crate::stream::Path)). With feature [`ROCE`](super::features::ROCE).
    pub const ROCE: u32 = 4;
}

/// Bits of `ModifyQp::mask`.
pub mod modify {
    /// `state`.
    pub const STATE: u32 = 1;
    /// `access`.
    pub const ACCESS: u32 = 2;
    /// `ird`.
    pub const IRD: u32 = 4;
    /// `ord`.
    pub const ORD: u32 = 8;
    /// `rnr_timeout_ms`.
    pub const RNR: u32 = 16;
    /// No field: the peer cannot be reached. The stream, if there is one, is given up. The queue
    /// pair stays as it is, and receives wait, but the first send posted or yet to come completes
    /// with `RetryExcErr` and puts it into the error state. If the driver moved the queue pair to
    /// that state before, this send is flushed like all others. With kind UC, no send fails.
    pub const UNREACHABLE: u32 = 32;
    /// `qkey`.
    pub const QKEY: u32 = 64;
    /// `ack_timeout_ms`.
    pub const ACK_TIMEOUT: u32 = 128;
}

/// Bits of `DeviceAttributes::features`.
pub mod features {
    /// RFC 7306 atomics.
    pub const ATOMICS: u32 = 1;
    /// RFC 7306 immediate data.
    pub const IMMEDIATE: u32 = 2;
    /// Shared receive queues.
    pub const SRQ: u32 = 4;
    /// Memory windows.
    pub const WINDOWS: u32 = 8;
    /// Doorbell pages are plain memory that the device polls: see [`doorbell`](crate::doorbell).
    pub const DOORBELL_MEMORY: u32 = 16;
    /// Regions of [`Access::ON_DEMAND`](crate::vocabulary::Access::ON_DEMAND): memory that need not
    /// be there, then or later.
    pub const ON_DEMAND: u32 = 32;
    /// [`Opcode::ModerateCq`](crate::command::Opcode::ModerateCq).
    pub const MODERATION: u32 = 64;
    /// Queue pairs of kind UC.
    pub const UNRELIABLE: u32 = 128;
    /// Queue pairs of kind UD.
    pub const DATAGRAMS: u32 = 256;
    /// Streams over SCTP ([`llp::SCTP`](crate::stream::llp::SCTP)).
    pub const SCTP: u32 = 512;
    /// Queue pairs that send and receive packets of RoCE v2 at UDP port 4791
    /// ([`Opcode::ConnectPath`](crate::command::Opcode::ConnectPath),
    /// [`create_qp::ROCE`](super::create_qp::ROCE)).
    pub const ROCE: u32 = 1024;
}
