//! One outstanding call of this end: its memory, its Send, and the check of replies against it.

use super::gather::Gather;
use super::{Answer, Call, CallError, Message, RegionId};
use crate::chunk::{ChunkLists, ReadSegment, Segment, WriteChunk};
use crate::header::{Body, Header, VERSION};
use crate::payload::positions;
use crate::triage;

/// The part of a call that a region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The position-zero Read chunk.
    Message,
    /// The Read chunk of an argument.
    Argument(usize),
    /// The Write chunk of a result.
    Result(usize),
    /// The Reply chunk.
    Reply,
}

/// The state of the peer's access to a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exposure {
    /// An action requests the registration.
    Asked,
    /// The peer may have access by these segments.
    Open(Vec<Segment>),
    /// An action requests the release.
    Closing,
    /// The release failed. The region stays open until the connection has ended.
    Stuck,
    /// The peer has no access.
    Closed,
}

/// Memory that a call exposes to the peer.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) id: RegionId,
    pub(super) part: Part,
    pub(super) exposure: Exposure,
}

/// The state of a call.
#[derive(Debug)]
pub(super) enum State {
    /// The call waits for a connection, or for credits.
    Queued,
    /// The memory of the call is being registered.
    Registering,
    /// The peer has the call.
    Sent,
    /// The memory of the call is being released. The call then ends with this outcome. Without an
    /// outcome, it is queued again.
    Ending(Option<Result<Answer, CallError>>),
}

/// A call that has not ended.
#[derive(Debug)]
pub(super) struct Outstanding<M> {
    pub(super) call: Call<M>,
    /// Order in which the calls were made, and in which they are sent and sent again.
    pub(super) order: u64,
    pub(super) regions: Vec<Region>,
    pub(super) state: State,
}

impl Region {
    /// The segments by which the peer may have access.
    pub(super) const fn segments(&self) -> Option<&Vec<Segment>> {
        match &self.exposure {
            Exposure::Open(segments) => Some(segments),
            _ => None,
        }
    }
}

impl<M> Outstanding<M> {
    fn segments(&self, part: Part) -> Option<&Vec<Segment>> {
        self.regions.iter().find(|region| region.part == part)?.segments()
    }

    /// The Write list, with a chunk for each result that has memory of its own.
    fn writes(&self) -> Vec<WriteChunk> {
        (0..self.call.results.len())
            .filter_map(|index| self.segments(Part::Result(index)).cloned().map(WriteChunk))
            .collect()
    }

    /// The Send of the call. `None` if the position of an argument does not fit into 32 bits.
    pub(super) fn compose(&self, xid: u32, credits: u32) -> Option<Gather<M>>
    where
        M: Clone,
    {
        let call = &self.call;
        let mut lists = ChunkLists {
            reads: Vec::new(),
            writes: self.writes(),
            reply: self.segments(Part::Reply).cloned().map(WriteChunk),
        };
        let long = self.segments(Part::Message);
        let mut read = |position, segments: &[Segment]| {
            let entries = segments.iter().map(|segment| ReadSegment {
                position,
                segment: *segment,
            });
            lists.reads.extend(entries);
        };
        if let Some(segments) = long {
            read(0, segments);
        }
        // Either all arguments with bytes are chunks, or none is.
        let chunks = (0..call.arguments.len()).any(|index| self.segments(Part::Argument(index)).is_some());
        let places = call
            .arguments
            .iter()
            .map(|item| (item.offset, u64::from(item.len)));
        if chunks {
            for (index, position) in positions(places)?.into_iter().enumerate() {
                if let Some(segments) = self.segments(Part::Argument(index)) {
                    read(position, segments);
                }
            }
        }
        let body = if long.is_some() {
            Body::NoMsg(lists)
        } else {
            Body::Msg(lists)
        };
        let header = Header {
            xid,
            version: VERSION,
            credits,
            body,
        };
        let mut bytes = Vec::new();
        header.emit(&mut bytes);
        let mut message = Gather::bytes(bytes);
        if long.is_none() {
            let inline = if chunks { &[][..] } else { &call.arguments };
            message.append(Gather::with_items(&call.message, inline));
        }
        Some(message)
    }

    /// The answer in a reply. `None` if the reply does not fit this call.
    pub(super) fn fit(&self, reply: &triage::Reply) -> Option<Answer> {
        let (lists, message) = match reply {
            triage::Reply::Short { lists, payload, .. } => (lists, Message::Short(payload.to_vec())),
            triage::Reply::Long { lists, .. } => {
                let region = self.regions.iter().find(|region| region.part == Part::Reply)?;
                let offered = WriteChunk(region.segments()?.clone());
                let returned = lists.reply.as_ref()?;
                let len = u32::try_from(returned.bytes()).ok()?;
                // A message without xid and msg_type (8 bytes) is no reply.
                if !returned.returns(&offered) || len < 8 {
                    return None;
                }
                (
                    lists,
                    Message::Long {
                        region: region.id,
                        len,
                    },
                )
            }
            triage::Reply::Error { .. } => return None,
        };
        let mut returned = lists.writes.iter();
        let mut placed = Vec::with_capacity(self.call.results.len());
        for index in 0..self.call.results.len() {
            let Some(segments) = self.segments(Part::Result(index)) else {
                placed.push(None);
                continue;
            };
            // If the returned list is short, the memory of the remaining results is unused.
            let len = match returned.next() {
                Some(chunk) if chunk.returns(&WriteChunk(segments.clone())) => {
                    u32::try_from(chunk.bytes()).ok()?
                }
                Some(_) => return None,
                None => 0,
            };
            placed.push(Some(len));
        }
        returned.next().is_none().then_some(Answer { message, placed })
    }
}
