//! Memory that a server's endpoint counts for its client.

use crate::shares::{Account, Charge};
use std::collections::HashMap;
use urnic_rpc_rdma::engine::CallId;

/// Memory that is counted for the client of an endpoint.
pub(super) struct ClientCharges {
    pub(super) account: Account,
    /// Memory of receives and of copied Sends.
    #[expect(dead_code, reason = "returned when the endpoint is dropped")]
    pub(super) messages: Charge,
    /// Charges of replies that are being sent.
    pub(super) replies: HashMap<CallId, Charge>,
    /// Number of calls that were passed to the application and not answered.
    pub(super) open_calls: usize,
    pub(super) served: bool,
    /// A function that the endpoint calls when Reads wait for memory.
    pub(super) on_memory_wait: Box<dyn Fn() + Send>,
}
