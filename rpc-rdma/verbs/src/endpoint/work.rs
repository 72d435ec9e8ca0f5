//! Work requests of an endpoint, and the memory that they need.

use crate::memory::{Buffer, Slice};
use crate::shares::Charge;
use crate::verbs::{Element, Region, Window};
use std::sync::Arc;
use urnic_rpc_rdma::Segment;
use urnic_rpc_rdma::engine::{CallId, RegionId, WorkId};

/// Memory that goes by RDMA: pieces, one behind the other. What a device is to write into, or to read for a peer, is one piece.
pub(crate) type Memory = Arc<[Slice]>;

/// What is to be done when a work request is over, and the memory that it needs until then.
pub(super) struct Posted {
    pub(super) number: u64,
    pub(super) keep: Vec<Kept>,
    pub(super) then: Then,
}

/// Not looked at, only there.
#[expect(dead_code)]
pub(super) enum Kept {
    Slice(Slice),
    Buffer(Buffer),
}

pub(super) enum Then {
    Nothing,
    Completed(WorkId),
    Released(RegionId, Window),
}

/// A request that waits for room in the queue.
pub(super) struct Request {
    pub(super) what: What,
    pub(super) elements: Vec<Element>,
    pub(super) keep: Vec<Kept>,
    pub(super) then: Then,
}

pub(super) enum What {
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

/// How the peer gets at a region.
pub(super) enum Opening {
    Window(Window),
    Region(Region),
}

/// Memory that is exposed.
pub(super) struct Open {
    pub(super) opening: Opening,
    /// What of it is ours: long calls and replies.
    pub(super) own: Option<Buffer>,
    /// The application's, so that it stays.
    #[expect(dead_code)]
    pub(super) theirs: Option<Memory>,
}

/// Where an item is read to.
pub(super) struct Sink {
    /// On iWARP, what the Read Responses come in by. It goes before its memory.
    pub(super) region: Option<Region>,
    pub(super) buffer: Buffer,
    pub(super) key: u32,
    pub(super) charge: Option<Charge>,
}

/// A Read of a part of a call's item.
pub(super) struct Read {
    pub(super) work: WorkId,
    pub(super) item: (CallId, usize),
    /// Of the whole item.
    pub(super) length: u64,
    pub(super) at: u64,
    pub(super) remote: Segment,
}

/// Receives have odd numbers, of their slots; what sends has even ones, counted.
pub(super) fn receive_slot(number: u64) -> Option<usize> {
    (number & 1 == 1).then_some((number >> 1) as usize)
}
