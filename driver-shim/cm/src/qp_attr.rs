//! The attributes that describe a queue pair.

use bitflags::bitflags;

use urnic_process::addressing::AddressVector;

/// Capacities of a queue pair (`struct ibv_qp_cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpCaps {
    /// Work requests that may be outstanding in the send queue.
    pub max_send_wr: u32,
    /// Work requests that may be outstanding in the receive queue.
    pub max_recv_wr: u32,
    /// Maximum number of elements of a send request.
    pub max_send_sge: u32,
    /// Maximum number of elements of a receive request.
    pub max_recv_sge: u32,
    /// Maximum number of bytes of inline data of a send request.
    pub max_inline: u32,
}

/// Attributes of a queue pair (`struct ibv_qp_attr`), in verbs' numbers and unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpAttr {
    /// The requested state; in a query the current state.
    pub state: u32,
    /// The state that the program expects; in a query the current state.
    pub cur_state: u32,
    /// `enum ibv_mtu`; stored for queries.
    pub path_mtu: u32,
    /// The PSN expected of the peer: compared with the peer's `sq_psn` when the two ends connect.
    pub rq_psn: u32,
    /// The first PSN of this end.
    pub sq_psn: u32,
    /// The peer's queue pair number.
    pub dest_qpn: u32,
    /// The Q_Key of a queue pair for datagrams.
    pub qkey: u32,
    /// Remote access rights (`enum ibv_access_flags`).
    pub access: u32,
    /// Always 0.
    pub pkey_index: u16,
    /// Always 1.
    pub port: u8,
    /// Maximum number of inbound Reads.
    pub max_dest_rd_atomic: u8,
    /// Maximum number of outbound Reads.
    pub max_rd_atomic: u8,
    /// Minimum time that a sender waits when no receive is posted: a code of InfiniBand's table.
    pub min_rnr_timer: u8,
    /// The time to wait for an answer: 4.096 µs · 2^timeout; 0 = no limit.
    pub timeout: u8,
    /// The number of retries after that time.
    pub retry_cnt: u8,
    /// The number of retries when the peer has no receive posted; 7 = no limit.
    pub rnr_retry: u8,
    /// The peer's address.
    pub av: AddressVector,
}

bitflags! {
    /// Attributes of a queue pair that a call names (`enum ibv_qp_attr_mask`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct QpMask: u32 {
        /// `state`.
        const STATE = 1;
        /// `cur_state`: the state that the program expects.
        const CUR_STATE = 1 << 1;
        /// An event once the send queue is drained.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `access`.
        const ACCESS_FLAGS = 1 << 3;
        /// `pkey_index`.
        const PKEY_INDEX = 1 << 4;
        /// `port`.
        const PORT = 1 << 5;
        /// `qkey`: for datagrams only.
        const QKEY = 1 << 6;
        /// `av`.
        const AV = 1 << 7;
        /// `path_mtu`.
        const PATH_MTU = 1 << 8;
        /// `timeout`.
        const TIMEOUT = 1 << 9;
        /// `retry_cnt`.
        const RETRY_CNT = 1 << 10;
        /// `rnr_retry`.
        const RNR_RETRY = 1 << 11;
        /// `rq_psn`.
        const RQ_PSN = 1 << 12;
        /// `max_rd_atomic`.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// Alternate path: Ethernet has none.
        const ALT_PATH = 1 << 14;
        /// `min_rnr_timer`.
        const MIN_RNR_TIMER = 1 << 15;
        /// `sq_psn`.
        const SQ_PSN = 1 << 16;
        /// `max_dest_rd_atomic`.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// Path migration state: accepted and never used.
        const PATH_MIG_STATE = 1 << 18;
        /// Capacities: never changed.
        const CAP = 1 << 19;
        /// `dest_qpn`.
        const DEST_QPN = 1 << 20;
    }
}

/// The peer's number in the attributes that the connection manager gives the program of a RoCE NIC:
/// that of its general services, which the peer's connection manager uses. The queue pair then
/// awaits a stream of the connection manager.
pub const MANAGER_QPN: u32 = 1;

impl QpMask {
    /// The attributes that bring a reliable connection of a channel adapter to RTR.
    pub const RTR_OF_CHANNEL_ADAPTER: QpMask = QpMask::STATE
        .union(QpMask::AV)
        .union(QpMask::PATH_MTU)
        .union(QpMask::DEST_QPN)
        .union(QpMask::RQ_PSN)
        .union(QpMask::MAX_DEST_RD_ATOMIC)
        .union(QpMask::MIN_RNR_TIMER);

    /// The attributes that bring a reliable connection of a channel adapter to RTS.
    pub const RTS_OF_CHANNEL_ADAPTER: QpMask = QpMask::STATE
        .union(QpMask::TIMEOUT)
        .union(QpMask::RETRY_CNT)
        .union(QpMask::RNR_RETRY)
        .union(QpMask::SQ_PSN)
        .union(QpMask::MAX_QP_RD_ATOMIC);

    /// The attributes that `INIT_QP_ATTR` names for RTR: the connection manager has the peer, and
    /// the program sets none.
    pub const RTR_BY_MANAGER: QpMask = QpMask::STATE.union(QpMask::ACCESS_FLAGS).union(QpMask::PORT);
}

impl QpAttr {
    /// Copies the attributes that `mask` names, except the state.
    pub fn take(&mut self, from: &QpAttr, mask: QpMask) {
        let mut put = |bit, set: &dyn Fn(&mut QpAttr)| {
            if mask.contains(bit) {
                set(self);
            }
        };
        put(QpMask::ACCESS_FLAGS, &|to| to.access = from.access);
        put(QpMask::PKEY_INDEX, &|to| to.pkey_index = from.pkey_index);
        put(QpMask::PORT, &|to| to.port = from.port);
        put(QpMask::AV, &|to| to.av = from.av);
        put(QpMask::PATH_MTU, &|to| to.path_mtu = from.path_mtu);
        put(QpMask::TIMEOUT, &|to| to.timeout = from.timeout);
        put(QpMask::RETRY_CNT, &|to| to.retry_cnt = from.retry_cnt);
        put(QpMask::RNR_RETRY, &|to| to.rnr_retry = from.rnr_retry);
        put(QpMask::RQ_PSN, &|to| to.rq_psn = from.rq_psn);
        put(QpMask::MAX_QP_RD_ATOMIC, &|to| {
            to.max_rd_atomic = from.max_rd_atomic
        });
        put(QpMask::MIN_RNR_TIMER, &|to| to.min_rnr_timer = from.min_rnr_timer);
        put(QpMask::SQ_PSN, &|to| to.sq_psn = from.sq_psn);
        put(QpMask::MAX_DEST_RD_ATOMIC, &|to| {
            to.max_dest_rd_atomic = from.max_dest_rd_atomic
        });
        put(QpMask::QKEY, &|to| to.qkey = from.qkey);
        put(QpMask::DEST_QPN, &|to| to.dest_qpn = from.dest_qpn);
    }
}
