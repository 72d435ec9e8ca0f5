//! Numbers of the commands (`RDMA_USER_CM_CMD_*` of `<rdma/rdma_user_cm.h>`).

#![expect(missing_docs, reason = "the names are those of <rdma/rdma_user_cm.h>")]

pub const CREATE_ID: u32 = 0;
pub const DESTROY_ID: u32 = 1;
pub const BIND_IP: u32 = 2;
pub const RESOLVE_IP: u32 = 3;
pub const RESOLVE_ROUTE: u32 = 4;
pub const QUERY_ROUTE: u32 = 5;
pub const CONNECT: u32 = 6;
pub const LISTEN: u32 = 7;
pub const ACCEPT: u32 = 8;
pub const REJECT: u32 = 9;
pub const DISCONNECT: u32 = 10;
pub const INIT_QP_ATTR: u32 = 11;
/// The only command that may wait.
pub const GET_EVENT: u32 = 12;
pub const GET_OPTION: u32 = 13;
pub const SET_OPTION: u32 = 14;
pub const NOTIFY: u32 = 15;
pub const JOIN_IP_MCAST: u32 = 16;
pub const LEAVE_MCAST: u32 = 17;
pub const MIGRATE_ID: u32 = 18;
pub const QUERY: u32 = 19;
pub const BIND: u32 = 20;
pub const RESOLVE_ADDR: u32 = 21;
pub const JOIN_MCAST: u32 = 22;

/// Options of [`QUERY`] (`RDMA_USER_CM_QUERY_*`).
pub mod query {
    pub const ADDR: u32 = 0;
    pub const PATH: u32 = 1;
    pub const GID: u32 = 2;
}

/// Levels and options of [`SET_OPTION`] (`RDMA_OPTION_*` of `<rdma/rdma_cma.h>`).
pub mod option {
    pub const LEVEL_ID: u32 = 0;
    pub const LEVEL_IB: u32 = 1;
    pub const ID_TOS: u32 = 0;
    pub const ID_REUSEADDR: u32 = 1;
    pub const ID_AFONLY: u32 = 2;
    pub const ID_ACK_TIMEOUT: u32 = 3;
    pub const IB_PATH: u32 = 1;
}
