//! A call of the peer in the form for the application.

use crate::memory::Slice;
use crate::shares::Charge;
use urnic_rpc_rdma::engine::Incoming;

/// A call of the peer, with the data that was read for it.
pub(crate) struct ReceivedCall {
    pub(crate) incoming: Incoming,
    /// The RPC message, without the items.
    pub(crate) message: Message,
    /// Items, except the message itself, each with its Position.
    pub(crate) items: Vec<(u32, Slice)>,
    /// Charges for the memory of the items.
    #[expect(dead_code, reason = "returned when the call is dropped")]
    pub(crate) charges: Vec<Charge>,
}

/// An RPC message, inline or in memory of the pool.
pub(crate) enum Message {
    Short(Vec<u8>),
    Long(Slice),
}

impl Message {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(slice) => slice,
        }
    }
}
