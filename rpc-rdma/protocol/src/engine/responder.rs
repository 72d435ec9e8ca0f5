//! Calls of the peer: the responder fetches their data, passes them to the consumer, and answers
//! them.

use super::gather::{Gather, well_placed};
use super::outbox::Outbox;
use super::{Action, CallId, Closing, Event, Incoming, Reply, Terms, WorkId};
use crate::chunk::{ChunkLists, ReadChunk, Segment, WriteChunk};
use crate::header::{Body, ErrorBody, Header, VERSION};
use crate::malformed::Malformed;
use crate::triage::{self, Profile, Refusal};
use std::collections::{BTreeSet, HashMap, VecDeque};

/// The call is unknown or no longer open: its connection has ended, or it was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such call")]
pub struct UnknownCall;

/// A call that the peer made and whose reply has not been sent.
#[derive(Debug)]
struct Held {
    xid: u32,
    lists: ChunkLists,
    /// The event for the consumer, held until all data is fetched.
    incoming: Option<Incoming>,
    /// Reads that have not completed.
    reads: usize,
    /// Whether the consumer has answered the call.
    answered: bool,
}

/// A Read that waits until the limit of concurrent Reads permits it.
#[derive(Debug)]
struct Waiting {
    call: CallId,
    item: usize,
    length: u64,
    at: u64,
    remote: Segment,
}

/// The purpose of a work request.
#[derive(Debug)]
enum Work {
    Read(CallId),
    Reply(CallId),
    Error,
}

/// The calls that this end answers.
#[derive(Debug)]
pub(super) struct Responder<M> {
    profile: Profile,
    chunks: bool,
    /// Credits granted from now on. With 0, the responder accepts no calls.
    grant: u32,
    /// Receives that the peer may use for calls. The number is below the grant while calls are
    /// held. It is above the grant after the grant was lowered, until enough replies have carried
    /// the lower grant to the peer.
    promised: usize,
    /// Maximum number of concurrent Reads.
    max_reads: usize,
    terms: Option<Terms>,
    calls: HashMap<CallId, Held>,
    works: HashMap<WorkId, Work>,
    waiting: VecDeque<Waiting>,
    reading: usize,
    /// RDMA_ERRORs that are being sent.
    errors: usize,
    /// Replies that are being sent.
    replies: usize,
    /// Replies that wait until earlier replies are sent. While they wait, the peer has no credit
    /// for another call. A peer that reads nothing therefore makes this end hold the memory of at
    /// most twice the grant of replies.
    unsent: VecDeque<(CallId, Reply<M>)>,
    taken: u64,
    /// Transactions that broke a connection. The responder refuses them when they arrive again (RFC
    /// 8166 §4.5.3).
    refused: BTreeSet<u32>,
}

/// Maximum number of remembered transactions that broke a connection. Beyond it, the lowest xid is
/// forgotten first.
const REFUSED: usize = 64;

impl<M: Clone> Responder<M> {
    pub(super) fn new(grant: u32, max_reads: usize, profile: Profile, chunks: bool) -> Self {
        Self {
            profile,
            chunks,
            grant,
            promised: 0,
            max_reads: max_reads.max(1),
            terms: None,
            calls: HashMap::new(),
            works: HashMap::new(),
            waiting: VecDeque::new(),
            reading: 0,
            errors: 0,
            replies: 0,
            unsent: VecDeque::new(),
            taken: 0,
            refused: BTreeSet::new(),
        }
    }

    /// Receives that calls may need from now on.
    pub(super) fn promise(&mut self) -> usize {
        let free = (self.grant as usize).saturating_sub(self.calls.len());
        self.promised = self.promised.max(free);
        self.promised
    }

    pub(super) const fn takes_calls(&self) -> bool {
        self.grant > 0
    }

    pub(super) const fn set_grant(&mut self, credits: u32) {
        self.grant = credits;
    }

    pub(super) fn refuse(&mut self, xids: impl IntoIterator<Item = u32>) {
        self.refused.extend(xids);
        while self.refused.len() > REFUSED {
            self.refused.pop_first();
        }
    }

    pub(super) fn refused(&self) -> impl Iterator<Item = u32> {
        self.refused.iter().copied()
    }

    pub(super) fn connected(&mut self, terms: Terms) {
        self.terms = Some(terms);
        self.promised = 0;
        self.promise();
    }

    pub(super) fn disconnected(&mut self, out: &mut Outbox<M>) {
        self.terms = None;
        self.waiting.clear();
        self.unsent.clear();
        (self.reading, self.errors, self.replies) = (0, 0, 0);
        let mut ended: BTreeSet<_> = self.calls.drain().map(|(call, _)| call).collect();
        ended.extend(self.works.drain().filter_map(|(_, work)| match work {
            Work::Reply(call) => Some(call),
            Work::Read(_) | Work::Error => None,
        }));
        out.events.extend(ended.into_iter().map(Event::Finished));
    }

    pub(super) fn received(
        &mut self,
        message: &[u8],
        parsed: Result<(Header, &[u8]), Malformed>,
        out: &mut Outbox<M>,
    ) {
        match triage::call_of(message, parsed, self.profile) {
            Ok(call) if !self.chunks && !call.lists.is_empty() => {
                // RFC 8167 §5.3: calls in this direction have no chunks.
                let refusal = triage::refused(message, Malformed::Segments, self.profile);
                self.refusal(refusal, out);
            }
            Ok(call) if self.refused.remove(&call.xid) => self.error(call.xid, ErrorBody::Chunk, out),
            Ok(_) if self.promise() == 0 => out.actions.push(Action::Close(Closing::Credits)),
            Ok(call) => self.take(call, out),
            Err(refusal) => self.refusal(refusal, out),
        }
    }

    pub(super) fn refusal(&mut self, refusal: Refusal, out: &mut Outbox<M>) {
        if let Refusal::Answer(header, _) = refusal {
            self.send_error(header, out);
        }
    }

    fn error(&mut self, xid: u32, error: ErrorBody, out: &mut Outbox<M>) {
        let header = Header {
            xid,
            version: VERSION,
            credits: 0,
            body: Body::Error(error),
        };
        self.send_error(header, out);
    }

    fn send_error(&mut self, header: Header, out: &mut Outbox<M>) {
        // A peer that does not take errors makes this end hold at most as many as it has credits.
        if self.errors >= (self.grant as usize).max(1) {
            return out.actions.push(Action::Close(Closing::Faults));
        }
        let credits = self.grant.max(1);
        let mut bytes = Vec::new();
        Header { credits, ..header }.emit(&mut bytes);
        self.errors += 1;
        let work = out.work();
        self.works.insert(work, Work::Error);
        out.actions.push(Action::Send {
            work,
            pieces: Gather::bytes(bytes).into_spans(),
            invalidate: None,
        });
    }

    fn take(&mut self, call: triage::Call, out: &mut Outbox<M>) {
        // The call used a receive. The receives of refused or discarded messages are posted again,
        // because no reply to them carries a lower grant.
        self.promised = self.promised.saturating_sub(1);
        self.taken += 1;
        let id = CallId(self.taken);
        let room = |chunk: &WriteChunk| (!chunk.is_empty()).then(|| chunk.bytes());
        let incoming = Incoming {
            call: id,
            xid: call.xid,
            message: call.payload.map(<[u8]>::to_vec),
            items: call.reads.iter().map(ReadChunk::place).collect(),
            results: call.lists.writes.iter().map(room).collect(),
            reply: call.lists.reply.as_ref().map(WriteChunk::bytes),
        };
        let mut reads = 0;
        for (item, chunk) in call.reads.iter().enumerate() {
            let mut at = 0;
            for segment in chunk.segments.iter().filter(|segment| segment.length > 0) {
                self.waiting.push_back(Waiting {
                    call: id,
                    item,
                    length: chunk.bytes(),
                    at,
                    remote: *segment,
                });
                at += u64::from(segment.length);
                reads += 1;
            }
        }
        let held = Held {
            xid: call.xid,
            lists: call.lists,
            incoming: Some(incoming),
            reads,
            answered: false,
        };
        self.calls.insert(id, held);
        self.read(out);
        self.hand_over(id, out);
    }

    /// Posts the Reads that the limit permits.
    fn read(&mut self, out: &mut Outbox<M>) {
        while self.reading < self.max_reads
            && let Some(next) = self.waiting.pop_front()
        {
            self.reading += 1;
            let work = out.work();
            self.works.insert(work, Work::Read(next.call));
            out.actions.push(Action::Read {
                work,
                call: next.call,
                item: next.item,
                length: next.length,
                at: next.at,
                remote: next.remote,
            });
        }
    }

    fn hand_over(&mut self, call: CallId, out: &mut Outbox<M>) {
        if let Some(held) = self.calls.get_mut(&call)
            && held.reads == 0
            && let Some(incoming) = held.incoming.take()
        {
            out.events.push(Event::CallReceived(incoming));
        }
    }

    pub(super) fn completed(&mut self, work: WorkId, out: &mut Outbox<M>) {
        match self.works.remove(&work) {
            Some(Work::Read(call)) => {
                self.reading -= 1;
                if let Some(held) = self.calls.get_mut(&call) {
                    held.reads -= 1;
                }
                self.read(out);
                self.hand_over(call, out);
            }
            Some(Work::Reply(call)) => {
                self.replies -= 1;
                out.events.push(Event::Finished(call));
                if let Some((call, reply)) = self.unsent.pop_front() {
                    self.send_reply(call, &reply, out);
                }
            }
            Some(Work::Error) => self.errors -= 1,
            None => {}
        }
    }

    /// Remembers the call of this work request, whose failure is about to break the connection.
    pub(super) fn failed(&mut self, work: WorkId) {
        if let Some(Work::Read(call)) = self.works.get(&work)
            && let Some(held) = self.calls.get(call)
        {
            self.refuse([held.xid]);
        }
    }

    pub(super) fn drop_call(&mut self, call: CallId, out: &mut Outbox<M>) -> Result<(), UnknownCall> {
        self.calls.contains_key(&call).then_some(()).ok_or(UnknownCall)?;
        out.actions.push(Action::Close(Closing::Dropped));
        Ok(())
    }

    pub(super) fn reply(
        &mut self,
        call: CallId,
        reply: &Reply<M>,
        out: &mut Outbox<M>,
    ) -> Result<(), UnknownCall> {
        // Only a call that the consumer has received can be answered, not one whose data is being
        // fetched.
        let held = self.calls.get_mut(&call).ok_or(UnknownCall)?;
        if held.incoming.is_some() || held.answered {
            return Err(UnknownCall);
        }
        held.answered = true;
        if self.replies < (self.grant as usize).max(1) {
            self.send_reply(call, reply, out);
        } else {
            self.unsent.push_back((call, reply.clone()));
        }
        Ok(())
    }

    fn send_reply(&mut self, call: CallId, reply: &Reply<M>, out: &mut Outbox<M>) {
        let (Some(terms), Some(held)) = (self.terms, self.calls.remove(&call)) else {
            return;
        };
        self.replies += 1;
        // The promise is counted now, because the grant may change before the receives are posted.
        self.promise();
        let work = out.work();
        self.works.insert(work, Work::Reply(call));
        let made = compose(&held, reply, &terms, self.grant.max(1));
        let (writes, message) = made.unwrap_or_else(|| {
            // The reply does not fit, so no RPC reply is possible (RFC 8166 §4.5.3). Requesters
            // ignore the credits of an error.
            self.promised += 1;
            let header = Header {
                xid: held.xid,
                version: VERSION,
                credits: self.grant.max(1),
                body: Body::Error(ErrorBody::Chunk),
            };
            let mut bytes = Vec::new();
            header.emit(&mut bytes);
            (Vec::new(), Gather::bytes(bytes))
        });
        out.actions.extend(writes);
        out.actions.push(Action::Send {
            work,
            pieces: message.into_spans(),
            invalidate: terms
                .remote_invalidation
                .then(|| held.lists.handles().next())
                .flatten(),
        });
    }
}

/// The RDMA Writes and the Send that make the reply. `None` if the reply fits neither inline nor
/// into a chunk.
fn compose<M: Clone>(
    held: &Held,
    reply: &Reply<M>,
    terms: &Terms,
    credits: u32,
) -> Option<(Vec<Action<M>>, Gather<M>)> {
    if !well_placed(reply.message.len(), &reply.results) {
        return None;
    }
    let mut actions = Vec::new();
    let mut inline = Vec::new();
    let mut writes = Vec::new();
    let mut chunks = held.lists.writes.iter();
    // RFC 8166 §4.3.2.1: each result takes the next chunk. A result goes inline if there is no
    // further chunk, or if the chunk is empty.
    for item in &reply.results {
        match chunks.next() {
            Some(chunk) if !chunk.is_empty() => {
                let filled = chunk.filled(u64::from(item.len))?;
                write(Gather::memory(&item.memory, item.len), &filled, &mut actions);
                writes.push(filled);
            }
            chunk => {
                writes.extend(chunk.cloned());
                inline.push(item);
            }
        }
    }
    // The remaining chunks are returned unused.
    writes.extend(chunks.filter_map(|chunk| chunk.filled(0)));

    let payload = Gather::with_items(&reply.message, inline);
    let offered = held.lists.reply.as_ref();
    let header = |body| Header {
        xid: held.xid,
        version: VERSION,
        credits,
        body,
    };
    let lists = |reply| ChunkLists {
        reads: Vec::new(),
        writes: writes.clone(),
        reply,
    };
    let short = header(Body::Msg(lists(offered.and_then(|chunk| chunk.filled(0)))));
    let mut bytes = Vec::new();
    if short.encoded_len() + payload.len() <= terms.send {
        short.emit(&mut bytes);
        let mut message = Gather::bytes(bytes);
        message.append(payload);
        return Some((actions, message));
    }
    let filled = offered?.filled(payload.len() as u64)?;
    write(payload, &filled, &mut actions);
    let long = header(Body::NoMsg(lists(Some(filled))));
    if long.encoded_len() > terms.send {
        return None;
    }
    long.emit(&mut bytes);
    Some((actions, Gather::bytes(bytes)))
}

/// Appends the Writes that place `bytes` in `chunk`, whose lengths have the same sum.
fn write<M: Clone>(mut bytes: Gather<M>, chunk: &WriteChunk, actions: &mut Vec<Action<M>>) {
    for remote in chunk.0.iter().filter(|segment| segment.length > 0) {
        let pieces = bytes.take(remote.length as usize);
        actions.push(Action::Write {
            pieces,
            remote: *remote,
        });
    }
}
