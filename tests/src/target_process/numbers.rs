//! Numbers of libibverbs, as the program prints them.

/// `enum ibv_wc_status`: the values that bad input can cause.
pub mod status {
    /// `IBV_WC_SUCCESS`.
    pub const SUCCESS: u64 = 0;
    /// `IBV_WC_LOC_LEN_ERR`.
    pub const LOC_LEN_ERR: u64 = 1;
    /// `IBV_WC_LOC_QP_OP_ERR`.
    pub const LOC_QP_OP_ERR: u64 = 2;
    /// `IBV_WC_LOC_PROT_ERR`.
    pub const LOC_PROT_ERR: u64 = 4;
    /// `IBV_WC_WR_FLUSH_ERR`.
    pub const FLUSHED: u64 = 5;
    /// `IBV_WC_REM_INV_REQ_ERR`.
    pub const REM_INV_REQ_ERR: u64 = 9;
    /// `IBV_WC_REM_ACCESS_ERR`.
    pub const REM_ACCESS_ERR: u64 = 10;
    /// `IBV_WC_REM_OP_ERR`.
    pub const REM_OP_ERR: u64 = 11;
    /// `IBV_WC_RETRY_EXC_ERR`.
    pub const RETRY_EXC_ERR: u64 = 12;
    /// `IBV_WC_RNR_RETRY_EXC_ERR`.
    pub const RNR_RETRY_EXC_ERR: u64 = 13;
}

/// `enum ibv_wr_opcode`.
pub mod opcode {
    /// `IBV_WR_RDMA_WRITE`.
    pub const WRITE: u64 = 0;
    /// `IBV_WR_SEND`.
    pub const SEND: u64 = 2;
    /// `IBV_WR_RDMA_READ`.
    pub const READ: u64 = 4;
}

/// `enum ibv_qp_state`.
pub mod state {
    /// `IBV_QPS_RTS`.
    pub const RTS: u64 = 3;
    /// `IBV_QPS_ERR`.
    pub const ERR: u64 = 6;
}

/// `enum ibv_event_type`.
pub mod event {
    /// `IBV_EVENT_QP_FATAL`.
    pub const QP_FATAL: u64 = 1;
    /// `IBV_EVENT_QP_REQ_ERR`.
    pub const QP_REQ_ERR: u64 = 2;
    /// `IBV_EVENT_QP_ACCESS_ERR`.
    pub const QP_ACCESS_ERR: u64 = 3;
}
