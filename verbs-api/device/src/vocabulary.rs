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

/// As [`numbered`], with the names in verbs.
macro_rules! named {
    ($(#[$m:meta])* $name:ident: $repr:ty { $($(#[$vm:meta])* $v:ident = $n:literal => $text:literal,)* }) => {
        numbered! { $(#[$m])* $name: $repr { $($(#[$vm])* $v = $n,)* } }
        impl $name {
            /// The name in verbs, without its prefix.
            pub const fn verbs_name(self) -> &'static str {
                match self { $(Self::$v => $text,)* }
            }
        }
    };
}

named! {
    /// State of a queue pair (`enum ibv_qp_state`). The conformance rows VRB-Q-01 … 07 map the
    /// states to the RDMAC states IDLE, RTS, CLOSING, TERMINATE and ERROR.
    #[derive(PartialOrd, Ord)]
    QpState: u32 {
        /// Just made, or emptied; nothing may be posted.
        Reset = 0 => "RESET",
        /// Receives may be posted.
        Init = 1 => "INIT",
        /// A peer is named; receives are served.
        Rtr = 2 => "RTR",
        /// Sends are served.
        Rts = 3 => "RTS",
        /// Closing gracefully: the send queue drains.
        Sqd = 4 => "SQD",
        /// Kind RC: a Terminate was sent or received. Kinds UC and UD: a send failed, and others
        /// are flushed.
        Sqe = 5 => "SQE",
        /// All work is flushed.
        Err = 6 => "ERR",
    }
}

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

named! {
    /// The result of a work request (`enum ibv_wc_status`).
    WcStatus: u8 {
        /// Done.
        Success = 0 => "SUCCESS",
        /// The message does not fit the posted receive.
        LocLenErr = 1 => "LOC_LEN_ERR",
        /// The device could not carry the request out.
        LocQpOpErr = 2 => "LOC_QP_OP_ERR",
        /// A local STag, range or right is wrong.
        LocProtErr = 4 => "LOC_PROT_ERR",
        /// Flushed: the queue pair went to the error state first.
        WrFlushErr = 5 => "WR_FLUSH_ERR",
        /// A memory window could not be bound.
        MwBindErr = 6 => "MW_BIND_ERR",
        /// The peer answered with something that makes no sense.
        BadRespErr = 7 => "BAD_RESP_ERR",
        /// A local right is missing.
        LocAccessErr = 8 => "LOC_ACCESS_ERR",
        /// The peer refused the request as malformed.
        RemInvReqErr = 9 => "REM_INV_REQ_ERR",
        /// The peer refused access to its memory.
        RemAccessErr = 10 => "REM_ACCESS_ERR",
        /// The peer failed to carry the request out.
        RemOpErr = 11 => "REM_OP_ERR",
        /// The peer did not answer within the retry budget.
        RetryExcErr = 12 => "RETRY_EXC_ERR",
        /// The peer had no receive posted for too long.
        RnrRetryExcErr = 13 => "RNR_RETRY_EXC_ERR",
        /// The stream was ended by the peer.
        RemAbortErr = 16 => "REM_ABORT_ERR",
        /// Fatal error of the device.
        FatalErr = 19 => "FATAL_ERR",
        /// No answer in time.
        RespTimeoutErr = 20 => "RESP_TIMEOUT_ERR",
        /// Anything else.
        GeneralErr = 21 => "GENERAL_ERR",
    }
}

named! {
    /// The operation that completed (`enum ibv_wc_opcode`).
    WcOpcode: u8 {
        /// A Send of any kind.
        Send = 0 => "SEND",
        /// An RDMA Write of any kind.
        RdmaWrite = 1 => "RDMA_WRITE",
        /// An RDMA Read.
        RdmaRead = 2 => "RDMA_READ",
        /// An atomic compare-and-swap.
        CompSwap = 3 => "COMP_SWAP",
        /// An atomic fetch-and-add.
        FetchAdd = 4 => "FETCH_ADD",
        /// A memory window was bound.
        BindMw = 5 => "BIND_MW",
        /// A local STag was invalidated.
        LocalInv = 6 => "LOCAL_INV",
        /// A receive: bit 7, as in verbs.
        Recv = 128 => "RECV",
        /// A receive consumed by an immediate that followed an RDMA Write.
        RecvRdmaWithImm = 129 => "RECV_RDMA_WITH_IMM",
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
