//! The calls of this end. The requester sends a call when there are credits and the memory of the
//! call is exposed. The call ends when the peer has no more access to this memory.

use super::gather::well_placed;
use super::outbox::Outbox;
use super::outstanding::{Exposure, Outstanding, Part, Region, State};
use super::plan::Plan;
use super::{
    Access, Action, Answer, Call, CallError, Closing, Event, Exposed, Invalid, Message, RegionId, Terms,
};
use crate::chunk::Segment;
use crate::triage;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The calls of one end. They stay outstanding across connections.
#[derive(Debug)]
pub(super) struct Requester<M> {
    chunks: bool,
    /// Maximum segments of a region.
    segments: usize,
    /// Credits requested from the peer.
    requested: u32,
    /// Credits granted by the peer.
    granted: u32,
    /// `None` while there is no connection, or while the peer is not ready for calls.
    terms: Option<Terms>,
    calls: HashMap<u32, Outstanding<M>>,
    queue: BTreeMap<u64, u32>,
    /// Calls of this connection without a reply from the peer, including cancelled calls. Each of
    /// them uses a credit.
    unanswered: HashSet<u32>,
    regions: HashMap<RegionId, u32>,
    made: u64,
    exposed: u64,
}

impl<M: Clone> Requester<M> {
    pub(super) fn new(requested: u32, segments: usize, chunks: bool) -> Self {
        Self {
            chunks,
            segments,
            requested,
            granted: 1,
            terms: None,
            calls: HashMap::new(),
            queue: BTreeMap::new(),
            unanswered: HashSet::new(),
            regions: HashMap::new(),
            made: 0,
            exposed: 0,
        }
    }

    /// Number of calls whose replies may still arrive.
    pub(super) fn unanswered(&self) -> usize {
        self.unanswered.len()
    }

    /// Number of sent calls that were cancelled and that the peer may still answer.
    pub(super) fn abandoned(&self) -> usize {
        let waited_for = |xid: &&u32| self.calls.contains_key(xid);
        self.unanswered.len() - self.unanswered.iter().filter(waited_for).count()
    }

    /// Number of calls that have not ended.
    pub(super) fn outstanding(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn xids(&self) -> Vec<u32> {
        self.calls.keys().copied().collect()
    }

    pub(super) fn request(&mut self, credits: u32, out: &mut Outbox<M>) {
        self.requested = credits.max(1);
        self.pump(out);
    }

    pub(super) fn connected(&mut self, terms: Terms, out: &mut Outbox<M>) {
        self.terms = Some(terms);
        // RFC 8166 §3.3.3: one credit, until a reply grants more.
        self.granted = 1;
        self.pump(out);
    }

    pub(super) fn disconnected(&mut self, out: &mut Outbox<M>) {
        self.terms = None;
        self.unanswered.clear();
        let mut xids: Vec<_> = self.calls.iter().map(|(xid, call)| (call.order, *xid)).collect();
        xids.sort_unstable();
        for (_, xid) in xids {
            let Some(call) = self.calls.get_mut(&xid) else {
                continue;
            };
            for region in &mut call.regions {
                if region.exposure == Exposure::Stuck {
                    region.exposure = Exposure::Closed;
                }
            }
            // Calls without an answer are sent again over the next connection, with the same xid.
            if matches!(call.state, State::Registering | State::Sent) {
                call.state = State::Ending(None);
            }
            self.withdraw(xid, None, out);
        }
    }

    pub(super) fn call(&mut self, call: Call<M>, out: &mut Outbox<M>) -> Result<u32, Invalid> {
        let words = call.message.first_chunk::<8>().ok_or(Invalid::NotACall)?;
        let [a, b, c, d, 0, 0, 0, 0] = *words else {
            return Err(Invalid::NotACall);
        };
        let xid = u32::from_be_bytes([a, b, c, d]);
        if !well_placed(call.message.len(), &call.arguments) || call.results.iter().any(|item| item.len == 0)
        {
            return Err(Invalid::Items);
        }
        // The xid of a cancelled call is free when its reply has arrived or can no longer arrive.
        if self.calls.contains_key(&xid) || self.unanswered.contains(&xid) {
            return Err(Invalid::XidInUse(xid));
        }
        self.made += 1;
        let order = self.made;
        let outstanding = Outstanding {
            call,
            order,
            regions: Vec::new(),
            state: State::Queued,
        };
        self.calls.insert(xid, outstanding);
        self.queue.insert(order, xid);
        self.pump(out);
        Ok(xid)
    }

    pub(super) fn cancel(&mut self, xid: u32, out: &mut Outbox<M>) -> bool {
        let Some(call) = self.calls.get(&xid) else {
            return false;
        };
        match call.state {
            // The call is already answered, and ends with that outcome.
            State::Ending(Some(_)) => {}
            State::Queued | State::Registering | State::Ending(None) => {
                self.unanswered.remove(&xid);
                self.end(xid, Err(CallError::Cancelled), None, out);
            }
            // The peer continues the call, which uses its credit until the reply.
            State::Sent => self.end(xid, Err(CallError::Cancelled), None, out),
        }
        self.pump(out);
        true
    }

    /// Starts as many calls as the credits permit.
    fn pump(&mut self, out: &mut Outbox<M>) {
        let Some(terms) = self.terms else { return };
        // RFC 8166 §3.3.1: the limit is the lower of requested and granted credits, less the calls
        // in flight.
        while self.unanswered.len() < self.requested.min(self.granted) as usize {
            let Some((_, xid)) = self.queue.pop_first() else {
                return;
            };
            self.start(xid, &terms, out);
        }
    }

    fn start(&mut self, xid: u32, terms: &Terms, out: &mut Outbox<M>) {
        let Some(outstanding) = self.calls.get_mut(&xid) else {
            return;
        };
        let call = &outstanding.call;
        let plan = match Plan::of(call, terms, self.segments, self.chunks) {
            Ok(plan) => plan,
            Err(error) => return self.end(xid, Err(error), None, out),
        };
        let mut parts = Vec::new();
        if plan.long_call {
            parts.push((Part::Message, Exposed::Bytes(call.message.clone())));
        }
        let memory = |item: &super::Item<M>| Exposed::Memory(item.memory.clone(), item.len);
        if plan.read_arguments {
            let arguments = call.arguments.iter().enumerate();
            // An empty item has no memory, and the peer reads nothing.
            let arguments = arguments.filter(|(_, item)| item.len > 0);
            parts.extend(arguments.map(|(index, item)| (Part::Argument(index), memory(item))));
        }
        if plan.write_results {
            let results = call.results.iter().enumerate();
            parts.extend(results.map(|(index, item)| (Part::Result(index), memory(item))));
        }
        if plan.long_reply {
            let Ok(len) = u32::try_from(call.max_reply) else {
                return self.end(xid, Err(CallError::TooLong), None, out);
            };
            parts.push((Part::Reply, Exposed::Fresh(len)));
        }
        self.unanswered.insert(xid);
        outstanding.regions.clear();
        outstanding.state = State::Registering;
        for (part, what) in parts {
            self.exposed += 1;
            let id = RegionId(self.exposed);
            let access = match part {
                Part::Message | Part::Argument(_) => Access::RemoteRead,
                Part::Result(_) | Part::Reply => Access::RemoteWrite,
            };
            outstanding.regions.push(Region {
                id,
                part,
                exposure: Exposure::Asked,
            });
            self.regions.insert(id, xid);
            out.actions.push(Action::Register {
                region: id,
                what,
                access,
            });
        }
        self.send_if_registered(xid, out);
    }

    pub(super) fn registered(&mut self, id: RegionId, segments: Vec<Segment>, out: &mut Outbox<M>) {
        let Some(xid) = self.expose(id, Exposure::Open(segments)) else {
            return;
        };
        if matches!(
            self.calls.get(&xid),
            Some(Outstanding {
                state: State::Registering,
                ..
            })
        ) {
            self.send_if_registered(xid, out);
        } else {
            // The call was cancelled, or the connection was lost, in the meantime.
            self.withdraw(xid, None, out);
        }
        self.pump(out);
    }

    pub(super) fn register_failed(&mut self, id: RegionId, out: &mut Outbox<M>) {
        let Some(xid) = self.expose(id, Exposure::Closed) else {
            return;
        };
        if matches!(
            self.calls.get(&xid),
            Some(Outstanding {
                state: State::Registering,
                ..
            })
        ) {
            self.unanswered.remove(&xid);
            self.end(xid, Err(CallError::Register), None, out);
        } else {
            self.withdraw(xid, None, out);
        }
        self.pump(out);
    }

    pub(super) fn released(&mut self, id: RegionId, out: &mut Outbox<M>) {
        let Some(xid) = self.expose(id, Exposure::Closed) else {
            return;
        };
        self.withdraw(xid, None, out);
        self.pump(out);
    }

    pub(super) fn release_failed(&mut self, id: RegionId, out: &mut Outbox<M>) {
        if self.terms.is_none() {
            return self.released(id, out);
        }
        if self.expose(id, Exposure::Stuck).is_some() {
            out.actions.push(Action::Close(Closing::Release));
        }
    }

    fn expose(&mut self, id: RegionId, exposure: Exposure) -> Option<u32> {
        let xid = *self.regions.get(&id)?;
        let region = self
            .calls
            .get_mut(&xid)?
            .regions
            .iter_mut()
            .find(|region| region.id == id)?;
        if exposure == Exposure::Closed {
            self.regions.remove(&id);
        }
        region.exposure = exposure;
        Some(xid)
    }

    fn send_if_registered(&mut self, xid: u32, out: &mut Outbox<M>) {
        let (Some(terms), Some(outstanding)) = (self.terms, self.calls.get_mut(&xid)) else {
            return;
        };
        if outstanding
            .regions
            .iter()
            .any(|region| region.exposure == Exposure::Asked)
        {
            return;
        }
        let Some(message) = outstanding.compose(xid, self.requested) else {
            self.unanswered.remove(&xid);
            return self.end(xid, Err(CallError::TooLong), None, out);
        };
        // The registration returned more segments than the plan assumed.
        if message.len() > terms.send {
            self.unanswered.remove(&xid);
            return self.end(xid, Err(CallError::TooLong), None, out);
        }
        outstanding.state = State::Sent;
        let work = out.work();
        out.actions.push(Action::Send {
            work,
            pieces: message.into_spans(),
            invalidate: None,
        });
    }

    pub(super) fn replied(&mut self, reply: triage::Reply, invalidated: Option<u32>, out: &mut Outbox<M>) {
        let (triage::Reply::Short { xid, .. }
        | triage::Reply::Long { xid, .. }
        | triage::Reply::Error { xid, .. }) = reply;
        if !self.unanswered.contains(&xid) {
            return;
        }
        let outcome = match self.calls.get(&xid) {
            // The peer has not received this call, so it cannot have answered it.
            Some(call) if matches!(call.state, State::Registering) => return,
            Some(call) if matches!(call.state, State::Sent) => match reply {
                triage::Reply::Error { error, .. } => Some(Err(CallError::Refused(error))),
                // RFC 8166 §4.5: a reply that does not fit the call is discarded.
                _ => match call.fit(&reply) {
                    Some(answer) => Some(Ok(answer)),
                    None => return,
                },
            },
            // The call was cancelled, so only the credit matters.
            _ => None,
        };
        self.unanswered.remove(&xid);
        if let triage::Reply::Short { credits, .. } | triage::Reply::Long { credits, .. } = reply {
            // A grant of 0 would stop the requester forever (RPC-C-04).
            self.granted = credits.max(1);
        }
        if let Some(outcome) = outcome {
            self.end(xid, outcome, invalidated, out);
        }
        self.pump(out);
    }

    /// Whether a call still has this handle exposed.
    pub(super) fn exposes(&self, handle: u32) -> bool {
        let regions = self.calls.values().flat_map(|call| &call.regions);
        regions
            .filter_map(Region::segments)
            .flatten()
            .any(|segment| segment.handle == handle)
    }

    /// Ends the call with this outcome when its memory is released.
    fn end(
        &mut self,
        xid: u32,
        outcome: Result<Answer, CallError>,
        invalidated: Option<u32>,
        out: &mut Outbox<M>,
    ) {
        let Some(call) = self.calls.get_mut(&xid) else {
            return;
        };
        self.queue.remove(&call.order);
        call.state = State::Ending(Some(outcome));
        self.withdraw(xid, invalidated, out);
    }

    /// Releases the memory of a call that is ending, and ends the call when all of it is released.
    fn withdraw(&mut self, xid: u32, invalidated: Option<u32>, out: &mut Outbox<M>) {
        let Some(call) = self.calls.get_mut(&xid) else {
            return;
        };
        if !matches!(call.state, State::Ending(_)) {
            return;
        }
        let wanted = match &call.state {
            State::Ending(Some(Ok(Answer {
                message: Message::Long { region, .. },
                ..
            }))) => Some(*region),
            _ => None,
        };
        for region in &mut call.regions {
            let Exposure::Open(segments) = &region.exposure else {
                continue;
            };
            let invalidated =
                invalidated.filter(|handle| segments.iter().any(|segment| segment.handle == *handle));
            out.actions.push(Action::Release {
                region: region.id,
                invalidated,
                keep: wanted == Some(region.id),
            });
            region.exposure = Exposure::Closing;
        }
        if call
            .regions
            .iter()
            .any(|region| region.exposure != Exposure::Closed)
        {
            return;
        }
        call.regions.clear();
        if matches!(call.state, State::Ending(None)) {
            call.state = State::Queued;
            self.queue.insert(call.order, xid);
        } else if let Some(Outstanding {
            call,
            state: State::Ending(Some(outcome)),
            ..
        }) = self.calls.remove(&xid)
        {
            out.events.push(Event::Answered { xid, call, outcome });
        }
    }
}
