//! Work requests of an endpoint, and the memory that they need.

use crate::memory::{Buffer, Slice};
use crate::shares::Charge;
use crate::verbs::{Element, Region, Window};
use std::sync::Arc;
use urnic_rpc_rdma::Segment;
use urnic_rpc_rdma::engine::{CallId, RegionId, WorkId};

/// Memory that moves by RDMA: pieces in order. Memory into which a device writes, or from which it
/// reads for a peer, is one piece.
pub(crate) type Memory = Arc<[Slice]>;

/// A posted work request: the memory that it needs, and the effect of its completion.
pub(super) struct Posted {
    pub(super) number: u64,
    pub(super) keep: Vec<Kept>,
    pub(super) effect: Effect,
}

/// Memory that is kept until a work request completes.
#[expect(dead_code)]
pub(super) enum Kept {
    Slice(Slice),
    Buffer(Buffer),
}

pub(super) enum Effect {
    Nothing,
    Completed(WorkId),
    Released(RegionId, Window),
}

/// A request that waits for room in the queue.
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) elements: Vec<Element>,
    pub(super) keep: Vec<Kept>,
    pub(super) effect: Effect,
}

pub(super) enum Operation {
    Send(Option<u32>),
    Read(Segment),
    Write(Segment),
    Bind {
        region: RegionId,
        arena: usize,
        at: usize,
        len: u32,
        writes: bool,
    },
    Invalidate(u32),
}

/// The object by which the peer has access to a region.
pub(super) enum Exposure {
    Window(Window),
    Region(Region),
}

/// Memory that is exposed to the peer.
pub(super) struct ExposedMemory {
    pub(super) exposure: Exposure,
    /// Memory of the endpoint: long calls and replies.
    pub(super) own: Option<Buffer>,
    /// Memory of the application. It is kept while it is exposed.
    #[expect(dead_code)]
    pub(super) application: Option<Memory>,
}

/// The memory into which an item is read.
pub(super) struct Sink {
    /// On iWARP, the registration for the Read Responses. It is dropped before its memory.
    pub(super) region: Option<Region>,
    pub(super) buffer: Buffer,
    pub(super) key: u32,
    pub(super) charge: Option<Charge>,
}

/// A Read of a part of a call's item.
pub(super) struct Read {
    pub(super) work: WorkId,
    pub(super) item: (CallId, usize),
    /// Bytes of the whole item.
    pub(super) length: u64,
    pub(super) at: u64,
    pub(super) remote: Segment,
}

/// The slot of a receive. Receives have odd numbers, made of their slots. Other work requests have
/// even numbers, in order.
pub(super) fn receive_slot(number: u64) -> Option<usize> {
    (number & 1 == 1).then_some((number >> 1) as usize)
}
