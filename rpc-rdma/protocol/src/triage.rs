//! The classification of received messages: a message is accepted, answered with RDMA_ERROR, or
//! discarded (RFC 8166 §4.5, RFC 8167 §5).

use crate::chunk::{ChunkLists, ReadChunk};
use crate::header::{self, Body, ErrorBody, Header, MIN_LEN, VERSION};
use crate::limits::Limits;
use crate::malformed::Malformed;
use crate::payload;
use crate::procedure;
use crate::xdr::Reader;

/// The specification that receivers follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// RFC 8166, 8167, 8797.
    #[default]
    Rfc8166,
    /// draft-ietf-nfsv4-rfc5666bis-04: RDMA_DONE and truncated headers are answered. RFC 8166
    /// requires to discard them.
    Draft04,
}

/// msg_type of an RPC message (RFC 5531 §9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// CALL: the header requests credits.
    Call,
    /// REPLY: the header grants credits.
    Reply,
}

const CALL: u32 = 0;
const REPLY: u32 = 1;

/// The direction of a header and the payload after it, if it is known. A payload has it in
/// msg_type. Without a payload, the chunk lists that are present determine it. RDMA_ERROR has no
/// direction (RFC 8167 §4.1).
pub fn direction(header: &Header, payload: &[u8]) -> Option<Direction> {
    match &header.body {
        Body::Msg(_) => match Reader(payload.get(4..)?).word().ok()? {
            CALL => Some(Direction::Call),
            REPLY => Some(Direction::Reply),
            _ => None,
        },
        Body::NoMsg(lists) if lists.reads.is_empty() => Some(Direction::Reply),
        Body::NoMsg(_) => Some(Direction::Call),
        Body::Error(_) => None,
    }
}

/// The treatment of a message that the receiver cannot use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Discard it without an answer.
    Discard(Malformed),
    /// Send this header, with the current grant as its credits.
    Answer(Header, Malformed),
}

/// A call with a valid header.
#[derive(Debug, PartialEq, Eq)]
pub struct Call<'a> {
    /// Transaction id.
    pub xid: u32,
    /// Credits requested.
    pub credits: u32,
    /// The reduced Payload stream. `None` if it is in the first of `reads` (a long call).
    pub payload: Option<&'a [u8]>,
    /// Read chunks by ascending Position.
    pub reads: Vec<ReadChunk>,
    /// The chunk lists, which the reply returns.
    pub lists: ChunkLists,
}

/// Classifies a message at a responder.
///
/// # Errors
/// The treatment of a message that is no usable call.
pub fn call<'a>(message: &'a [u8], limits: &Limits, profile: Profile) -> Result<Call<'a>, Refusal> {
    call_of(message, Header::parse(message, limits), profile)
}

/// Classifies a message at a responder, as [`call`] does, with an already parsed header.
pub(crate) fn call_of<'a>(
    message: &[u8],
    parsed: Result<(Header, &'a [u8]), Malformed>,
    profile: Profile,
) -> Result<Call<'a>, Refusal> {
    let taken = parsed.and_then(|(header, rest)| take_call(header, rest));
    taken.map_err(|malformed| refused(message, malformed, profile))
}

/// The treatment of a message that a responder refuses because of this fault.
pub fn refused(message: &[u8], malformed: Malformed, profile: Profile) -> Refusal {
    let Some((xid, version, procedure)) = header::fixed(message) else {
        return Refusal::Discard(malformed);
    };
    let draft = profile == Profile::Draft04;
    let silent = match procedure {
        // An answer to an error could cause an endless exchange of errors.
        procedure::ERROR => true,
        procedure::DONE => !draft,
        // RFC 8166 §4.5: a responder does not parse a message that is shorter than any call.
        _ => message.len() < MIN_LEN && !draft,
    };
    if silent {
        return Refusal::Discard(malformed);
    }
    let error = match malformed {
        Malformed::Version(_) => ErrorBody::Version {
            low: VERSION,
            high: VERSION,
        },
        _ => ErrorBody::Chunk,
    };
    let header = Header {
        xid,
        version,
        credits: 0,
        body: Body::Error(error),
    };
    Refusal::Answer(header, malformed)
}

fn take_call(header: Header, rest: &[u8]) -> Result<Call<'_>, Malformed> {
    let (xid, credits) = (header.xid, header.credits);
    match header.body {
        Body::Msg(lists) => {
            check_payload(xid, rest, CALL)?;
            let reads = lists.read_chunks();
            // An item at position zero would precede the xid.
            if reads.first().is_some_and(|chunk| chunk.position == 0) {
                return Err(Malformed::Position(0));
            }
            payload::unreduced(rest.len(), &places(&reads))?;
            Ok(Call {
                xid,
                credits,
                payload: Some(rest),
                reads,
                lists,
            })
        }
        Body::NoMsg(lists) => {
            let reads = lists.read_chunks();
            let Some((first, items)) = reads.split_first() else {
                return Err(Malformed::NoPayload);
            };
            if first.position != 0 || first.bytes() == 0 {
                return Err(Malformed::NoPayload);
            }
            // A long call may also leave out items.
            let inline = usize::try_from(first.bytes()).map_err(|_| Malformed::ReadBytes(first.bytes()))?;
            payload::unreduced(inline, &places(items))?;
            Ok(Call {
                xid,
                credits,
                payload: None,
                reads,
                lists,
            })
        }
        Body::Error(_) => Err(Malformed::Procedure(procedure::ERROR)),
    }
}

fn places(chunks: &[ReadChunk]) -> Vec<(u32, u64)> {
    chunks.iter().map(ReadChunk::place).collect()
}

/// A reply with a valid header. The requester checks whether it fits the call.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// The RPC message is inline.
    Short {
        /// Transaction id.
        xid: u32,
        /// Credits granted.
        credits: u32,
        /// The chunk lists with the lengths that the responder placed.
        lists: ChunkLists,
        /// The reduced Payload stream.
        payload: &'a [u8],
    },
    /// The RPC message is in the Reply chunk.
    Long {
        /// Transaction id.
        xid: u32,
        /// Credits granted.
        credits: u32,
        /// The chunk lists with the lengths that the responder placed.
        lists: ChunkLists,
    },
    /// No RPC reply will follow (RFC 8166 §4.5: "a permanent error"). The credits of the header are
    /// ignored, because their direction is unknown.
    Error {
        /// Transaction id.
        xid: u32,
        /// The contents of RDMA_ERROR: the reason.
        error: ErrorBody,
    },
}

/// Classifies a message at a requester.
///
/// # Errors
/// The fault of the message. The requester must discard the message (RFC 8166 §4.5).
pub fn reply<'a>(message: &'a [u8], limits: &Limits) -> Result<Reply<'a>, Malformed> {
    Header::parse(message, limits).and_then(|(header, rest)| reply_of(header, rest))
}

/// Classifies a message at a requester, as [`reply`] does, with an already parsed header.
pub(crate) fn reply_of(header: Header, rest: &[u8]) -> Result<Reply<'_>, Malformed> {
    let (xid, credits) = (header.xid, header.credits);
    match header.body {
        Body::Msg(lists) | Body::NoMsg(lists) if !lists.reads.is_empty() => Err(Malformed::ReplyReads),
        Body::Msg(lists) => {
            check_payload(xid, rest, REPLY)?;
            Ok(Reply::Short {
                xid,
                credits,
                lists,
                payload: rest,
            })
        }
        Body::NoMsg(lists) => Ok(Reply::Long { xid, credits, lists }),
        Body::Error(error) => Ok(Reply::Error { xid, error }),
    }
}

/// Checks that the payload begins with the header's xid and with this msg_type (RFC 8166 §4.2.1).
fn check_payload(xid: u32, payload: &[u8], msg_type: u32) -> Result<(), Malformed> {
    let mut reader = Reader(payload);
    if reader.word() != Ok(xid) {
        return Err(Malformed::Xid(xid));
    }
    if reader.word() != Ok(msg_type) {
        return Err(Malformed::Direction);
    }
    Ok(())
}
