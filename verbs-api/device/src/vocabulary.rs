//! The numbers that the device and the verbs have in common: access rights, queue pair states,
//! completion statuses and opcodes. They are those of `<infiniband/verbs.h>`, so that the provider
//! passes them through.

use bitflags::bitflags;

bitflags! {
    /// Access that a memory region, window or queue pair allows (`enum ibv_access_flags`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The device may write here for receives, Read sinks and atomic results.
        const LOCAL_WRITE = 1;
        /// A peer may RDMA Write here.
        const REMOTE_WRITE = 1 << 1;
        /// A peer may RDMA Read from here.
        const REMOTE_READ = 1 << 2;
        /// A peer may run atomic operations here.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to this region.
        const MW_BIND = 1 << 4;
        /// Tagged offsets start at zero instead of at the virtual address.
        const ZERO_BASED = 1 << 5;
        /// Nothing is promised of the pages: each access finds them, or fails.
        const ON_DEMAND = 1 << 6;
        /// Huge pages may be assumed.
        const HUGETLB = 1 << 7;
        /// Reserved by libibverbs for relaxed ordering and other optional hints; never an error.
        const OPTIONAL = 0x3ff0_0000;
    }
}

impl Access {
    /// Access rights that permit writes to the region.
    pub const WRITERS: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_ATOMIC);
}

/// State of a queue pair (`enum ibv_qp_state`). The conformance rows VRB-Q-01 … 07 map the states
/// to the RDMAC states IDLE, RTS, CLOSING, TERMINATE and ERROR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum QpState {
    /// Just made, or emptied; nothing may be posted.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// A peer is named; receives are served.
    Rtr = 2,
    /// Sends are served.
    Rts = 3,
    /// Closing gracefully: the send queue drains.
    Sqd = 4,
    /// Kind RC: a Terminate was sent or received. Kinds UC and UD: a send failed, and others are
    /// flushed.
    Sqe = 5,
    /// All work is flushed.
    Err = 6,
}

impl QpState {
    /// The state with that number, if there is one.
    pub fn from_raw(raw: u32) -> Option<QpState> {
        Some(match raw {
            0 => QpState::Reset,
            1 => QpState::Init,
            2 => QpState::Rtr,
            3 => QpState::Rts,
            4 => QpState::Sqd,
            5 => QpState::Sqe,
            6 => QpState::Err,
            _ => return None,
        })
    }
}

macro_rules! numbered {
    ($(#[$m:meta])* $name:ident: $repr:ty { $($(#[$vm:meta])* $v:ident = $n:expr,)* }) => {
        $(#[$m])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr($repr)]
        pub enum $name { $($(#[$vm])* $v = $n,)* }
        impl $name {
            /// The variant with that number, if there is one.
            #[inline]
            pub fn from_raw(raw: $repr) -> Option<Self> {
                match raw { $(n if n == $n => Some(Self::$v),)* _ => None }
            }
        }
    };
}
pub(crate) use numbered;

numbered! {
    /// The service of a queue pair (the transport service types of InfiniBand).
    QpKind: u32 {
        /// RC: a connection over a stream.
        ReliableConnected = 0,
        /// UC: a connection over a stream; a message that finds no receive is dropped.
        UnreliableConnected = 1,
        /// UD: datagrams, by UDP.
        UnreliableDatagram = 2,
    }
}

numbered! {
    /// The result of a work request (`enum ibv_wc_status`).
    WcStatus: u8 {
        /// Done.
        Success = 0,
        /// The message does not fit the posted receive.
        LocLenErr = 1,
        /// The device could not carry the request out.
        LocQpOpErr = 2,
        /// A local STag, range or right is wrong.
        LocProtErr = 4,
        /// Flushed: the queue pair went to the error state first.
        WrFlushErr = 5,
        /// A memory window could not be bound.
        MwBindErr = 6,
        /// The peer answered with something that makes no sense.
        BadRespErr = 7,
        /// A local right is missing.
        LocAccessErr = 8,
        /// The peer refused the request as malformed.
        RemInvReqErr = 9,
        /// The peer refused access to its memory.
        RemAccessErr = 10,
        /// The peer failed to carry the request out.
        RemOpErr = 11,
        /// The peer did not answer within the retry budget.
        RetryExcErr = 12,
        /// The peer had no receive posted for too long.
        RnrRetryExcErr = 13,
        /// The stream was ended by the peer.
        RemAbortErr = 16,
        /// Fatal error of the device.
        FatalErr = 19,
        /// No answer in time.
        RespTimeoutErr = 20,
        /// Anything else.
        GeneralErr = 21,
    }
}

numbered! {
    /// The operation that completed (`enum ibv_wc_opcode`).
    WcOpcode: u8 {
        /// A Send of any kind.
        Send = 0,
        /// An RDMA Write of any kind.
        RdmaWrite = 1,
        /// An RDMA Read.
        RdmaRead = 2,
        /// An atomic compare-and-swap.
        CompSwap = 3,
        /// An atomic fetch-and-add.
        FetchAdd = 4,
        /// A memory window was bound.
        BindMw = 5,
        /// A local STag was invalidated.
        LocalInv = 6,
        /// A receive: bit 7, as in verbs.
        Recv = 128,
        /// A receive consumed by an immediate that followed an RDMA Write.
        RecvRdmaWithImm = 129,
    }
}

impl QpState {
    /// The name in verbs, without `IBV_QPS_`.
    pub const fn verbs_name(self) -> &'static str {
        match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Sqd => "SQD",
            QpState::Sqe => "SQE",
            QpState::Err => "ERR",
        }
    }
}

impl WcStatus {
    /// The name in verbs, without `IBV_WC_`.
    pub const fn verbs_name(self) -> &'static str {
        match self {
            WcStatus::Success => "SUCCESS",
            WcStatus::LocLenErr => "LOC_LEN_ERR",
            WcStatus::LocQpOpErr => "LOC_QP_OP_ERR",
            WcStatus::LocProtErr => "LOC_PROT_ERR",
            WcStatus::WrFlushErr => "WR_FLUSH_ERR",
            WcStatus::MwBindErr => "MW_BIND_ERR",
            WcStatus::BadRespErr => "BAD_RESP_ERR",
            WcStatus::LocAccessErr => "LOC_ACCESS_ERR",
            WcStatus::RemInvReqErr => "REM_INV_REQ_ERR",
            WcStatus::RemAccessErr => "REM_ACCESS_ERR",
            WcStatus::RemOpErr => "REM_OP_ERR",
            WcStatus::RetryExcErr => "RETRY_EXC_ERR",
            WcStatus::RnrRetryExcErr => "RNR_RETRY_EXC_ERR",
            WcStatus::RemAbortErr => "REM_ABORT_ERR",
            WcStatus::FatalErr => "FATAL_ERR",
            WcStatus::RespTimeoutErr => "RESP_TIMEOUT_ERR",
            WcStatus::GeneralErr => "GENERAL_ERR",
        }
    }
}

impl WcOpcode {
    /// The name in verbs, without `IBV_WC_`.
    pub const fn verbs_name(self) -> &'static str {
        match self {
            WcOpcode::Send => "SEND",
            WcOpcode::RdmaWrite => "RDMA_WRITE",
            WcOpcode::RdmaRead => "RDMA_READ",
            WcOpcode::CompSwap => "COMP_SWAP",
            WcOpcode::FetchAdd => "FETCH_ADD",
            WcOpcode::BindMw => "BIND_MW",
            WcOpcode::LocalInv => "LOCAL_INV",
            WcOpcode::Recv => "RECV",
            WcOpcode::RecvRdmaWithImm => "RECV_RDMA_WITH_IMM",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_as_the_same_variant() {
        for raw in 0..=255u8 {
            if let Some(s) = WcStatus::from_raw(raw) {
                assert_eq!(s as u8, raw);
            }
            if let Some(o) = WcOpcode::from_raw(raw) {
                assert_eq!(o as u8, raw);
            }
            if let Some(s) = QpState::from_raw(raw.into()) {
                assert_eq!(s as u8, raw);
            }
        }
    }
}
