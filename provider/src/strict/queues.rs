//! Queues: the requests that the program has posted and whose completion it has not polled. Until
//! then their memory is compared, watched, or withheld. Also the checks whether the requests that
//! complete in a completion queue fit, and whether an event may have been missed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, ThreadId};
use urnic_sync::Mutex;

use urnic_device::vocabulary::WcOpcode;

use super::findings::Rule;
use super::memory;
use super::process::{Strict, current};
use super::regions::Place;
use super::watched_pages::{self, PlacedByDevice, Watched};
use super::withheld::{Arena, Withheld};
use crate::call_site::CallSite;

/// The check of one queue pair.
pub(crate) struct PairCheck {
    requests: Requests,
    /// The completion queues of sends and receives.
    cqs: [Arc<QueueCheck>; 2],
    /// The check of the shared receive queue, if the queue pair has one.
    shared: Option<Arc<SharedCheck>>,
    sends: Mutex<VecDeque<Posted>>,
    receives: Mutex<VecDeque<Posted>>,
}

impl PairCheck {
    /// The check of a new queue pair in the protection domain with this number; `arena` is the
    /// address and key of memory of [`ARENA`](super::ARENA) bytes for withheld requests.
    pub(crate) fn new(
        strict: &'static Strict,
        qpn: u32,
        pd: u32,
        cqs: [Arc<QueueCheck>; 2],
        shared: Option<Arc<SharedCheck>>,
        arena: Option<(usize, u32)>,
    ) -> PairCheck {
        PairCheck {
            requests: Requests::new(strict, format!("qp {qpn:#x}"), pd, arena),
            cqs,
            shared,
            sends: Mutex::default(),
            receives: Mutex::default(),
        }
    }

    /// The check of the shared receive queue, if it has one.
    pub(crate) fn shared(&self) -> Option<&SharedCheck> {
        self.shared.as_deref()
    }

    fn report(&self, rule: Rule, site: &CallSite, text: impl FnOnce() -> String) {
        self.requests.report(rule, site, text);
    }

    /// The program posts a request to the send queue. Returns the element for the device, if the
    /// device must place fetched bytes in the arena.
    #[cold]
    pub(crate) fn send_posted(&self, request: &Request<'_>) -> Option<Element> {
        let (posted, element) = self.requests.post(request);
        if request.signalled {
            self.cqs[0].add(self.requests.strict, &posted.site);
        }
        self.sends.lock().push_back(posted);
        element
    }

    /// The program posts a receive. Returns the element for the device, if the device must place
    /// the bytes in the arena.
    #[cold]
    pub(crate) fn receive_posted(&self, request: &Request<'_>) -> Option<Element> {
        let (posted, element) = self.requests.post(request);
        self.cqs[1].add(self.requests.strict, &posted.site);
        self.receives.lock().push_back(posted);
        element
    }

    /// Requests from this slot on, which the program had not completed, are taken back.
    #[cold]
    pub(crate) fn sends_taken_back(&self, slot: u32) {
        let mut sends = self.sends.lock();
        let is_kept = |posted: &Posted| posted.slot.wrapping_sub(slot).cast_signed() < 0;
        let kept = sends.iter().take_while(|posted| is_kept(posted)).count();
        for taken_back in sends.drain(kept..) {
            self.cqs[0].remove(taken_back.signalled.into());
            self.requests.forget(&taken_back);
        }
    }

    /// The program polled the completion of a send: this send and those before it are complete, the
    /// last one successfully if `done`. `failed` is the completion's status, if it is an error
    /// other than a flush.
    #[cold]
    pub(crate) fn send_completed(&self, slot: u32, done: bool, failed: Option<String>) {
        let mut sends = self.sends.lock();
        let is_complete = |posted: &Posted| slot.wrapping_sub(posted.slot).cast_signed() >= 0;
        let count = sends.iter().take_while(|posted| is_complete(posted)).count();
        let complete: Vec<Posted> = sends.drain(..count).collect();
        drop(sends);
        if let (Some(failed), Some(last)) = (failed, complete.last()) {
            self.report(Rule::RequestFailed, &last.site, || failed);
        }
        for posted in &complete {
            self.cqs[0].remove(posted.signalled.into());
            let has_bytes = done || posted.slot != slot;
            self.requests
                .complete(posted, if has_bytes { u32::MAX } else { 0 });
        }
    }

    /// The program polled the completion of its oldest receive, which has `len` bytes.
    #[cold]
    pub(crate) fn receive_completed(&self, len: u32, failed: Option<String>) {
        let Some(posted) = self.receives.lock().pop_front() else {
            return;
        };
        self.cqs[1].remove(1);
        self.requests.complete(&posted, len);
        if let Some(failed) = failed {
            self.report(Rule::RequestFailed, &posted.site, || failed);
        }
    }

    /// The queues were emptied: nothing completes any more.
    pub(crate) fn emptied(&self) {
        let sends: Vec<_> = self.sends.lock().drain(..).collect();
        let signalled = sends.iter().filter(|posted| posted.signalled).count();
        self.cqs[0].remove(signalled as u32);
        let receives: Vec<_> = self.receives.lock().drain(..).collect();
        self.cqs[1].remove(receives.len() as u32);
        for posted in sends.iter().chain(&receives) {
            self.requests.forget(posted);
        }
    }

    /// A post was refused, for this reason; `full`: the send queue has no slot.
    #[cold]
    pub(crate) fn refused(&self, reason: &str, full: bool) {
        let site = CallSite::here();
        let sends = self.sends.lock();
        let unsignalled = full && !sends.is_empty() && !sends.iter().any(|posted| posted.signalled);
        let outstanding = sends.len();
        drop(sends);
        if unsignalled {
            self.report(Rule::NoneSignalled, &site, || {
                format!(
                    "the send queue is full: of its {outstanding} requests none is signalled, so no completion \
                     will ever free a place"
                )
            });
        } else {
            self.report(Rule::PostRefused, &site, || reason.to_owned());
        }
    }
}

/// The check of one shared receive queue. It gives each receive a token, which is the device's name
/// of it, because programs may use a `wr_id` several times.
pub(crate) struct SharedCheck {
    requests: Requests,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    last: u64,
    posted: HashMap<u64, Posted>,
}

impl SharedCheck {
    /// The check of a new queue in the protection domain with this number; `arena` as for queue
    /// pairs.
    pub(crate) fn new(
        strict: &'static Strict,
        srqn: u32,
        pd: u32,
        arena: Option<(usize, u32)>,
    ) -> SharedCheck {
        SharedCheck {
            requests: Requests::new(strict, format!("srq {srqn:#x}"), pd, arena),
            known: Mutex::default(),
        }
    }

    /// The program posts a receive. Returns its token, and the element for the device, if the
    /// device must place the bytes in the arena.
    #[cold]
    pub(crate) fn receive_posted(&self, request: &Request<'_>) -> (u64, Option<Element>) {
        let (posted, element) = self.requests.post(request);
        let mut known = self.known.lock();
        known.last += 1;
        let token = known.last;
        known.posted.insert(token, posted);
        (token, element)
    }

    /// The program's name of a receive.
    pub(crate) fn wr_id(&self, token: u64) -> u64 {
        self.known
            .lock()
            .posted
            .get(&token)
            .map_or(token, |posted| posted.wr_id)
    }

    /// The program polled the completion of a receive, which has `len` bytes. `failed` is the
    /// completion's status, if it is an error other than a flush.
    #[cold]
    pub(crate) fn receive_completed(&self, token: u64, len: u32, failed: Option<String>) {
        let Some(posted) = self.known.lock().posted.remove(&token) else {
            return;
        };
        self.requests.complete(&posted, len);
        if let Some(failed) = failed {
            self.requests.report(Rule::RequestFailed, &posted.site, || failed);
        }
    }

    /// The queue is destroyed: nothing completes any more.
    pub(crate) fn emptied(&self) {
        let posted: Vec<_> = self.known.lock().posted.drain().collect();
        for (_, posted) in &posted {
            self.requests.forget(posted);
        }
    }
}

/// The check of one completion queue.
#[derive(Debug)]
pub(crate) struct QueueCheck {
    /// The number of entries that the program asked for.
    entries: AtomicU32,
    /// Requests that are posted and will complete here: signalled sends, and receives.
    outstanding: AtomicU32,
    /// The program has not polled since.
    armed: Mutex<Option<Armed>>,
}

/// A request for an event while completions waited.
#[derive(Debug)]
struct Armed {
    site: CallSite,
    waiting: u32,
    thread: ThreadId,
}

impl QueueCheck {
    /// The check of a queue for which the program asked for this many entries.
    pub(crate) fn new(entries: u32) -> QueueCheck {
        QueueCheck {
            entries: AtomicU32::new(entries),
            outstanding: AtomicU32::new(0),
            armed: Mutex::default(),
        }
    }

    /// The program changed the number of entries.
    pub(crate) fn resized(&self, entries: u32) {
        self.entries.store(entries, Ordering::Relaxed);
    }

    /// One more request will complete here.
    pub(super) fn add(&self, strict: &Strict, site: &CallSite) {
        let outstanding = self.outstanding.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let entries = self.entries.load(Ordering::Relaxed);
        if outstanding > entries {
            strict.findings.report(Rule::CqTooSmall, site, || {
                format!(
                    "{outstanding} requests are outstanding whose completions go to a completion queue \
                     that was created for {entries}"
                )
            });
        }
    }

    /// `count` requests completed, or will not complete.
    pub(super) fn remove(&self, count: u32) {
        self.outstanding.fetch_sub(count, Ordering::Relaxed);
    }

    /// The program requested an event while `waiting` completions were in the queue.
    pub(crate) fn armed(&self, waiting: u32) {
        *self.armed.lock() = (waiting > 0).then(|| Armed {
            site: CallSite::here(),
            waiting,
            thread: thread::current().id(),
        });
    }

    /// The program polls.
    pub(crate) fn polled(&self) {
        *self.armed.lock() = None;
    }

    /// The program waited for an event, and has one.
    pub(crate) fn waited(&self) {
        let mut armed = self.armed.lock();
        // Another thread may wait while the one that requested the event is about to poll.
        let Some(Armed { site, waiting, .. }) = armed.take_if(|armed| armed.thread == thread::current().id())
        else {
            return;
        };
        drop(armed);
        if let Some(strict) = current() {
            strict.findings.report(Rule::MissedRearm, &site, || {
                format!(
                    "an event was requested while {waiting} completions waited, which cause none, and the \
                     program waited for an event without another poll"
                )
            });
        }
    }
}

/// An element of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    pub(crate) key: u32,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

/// A request that the program posts.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    /// The number of its slot.
    pub(crate) slot: u32,
    pub(crate) wr_id: u64,
    pub(crate) opcode: WcOpcode,
    /// Whether the request has a completion if it succeeds.
    pub(crate) signalled: bool,
    /// The elements of the request; none for inline data.
    pub(crate) elements: &'a [Element],
}

/// A request that was posted.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) slot: u32,
    pub(super) wr_id: u64,
    opcode: WcOpcode,
    pub(super) signalled: bool,
    pub(super) site: CallSite,
    /// Address, length and hash of the memory that must not change.
    unchanged: Vec<(usize, usize, u64)>,
    /// Numbers of the pages that can only be read.
    watched: Vec<usize>,
    withheld: Option<WithheldRequest>,
    _placed: Option<PlacedByDevice>,
}

/// A request whose bytes are withheld, and its elements with their places.
#[derive(Debug)]
struct WithheldRequest {
    withheld: Withheld,
    elements: Vec<(Element, Place)>,
}

impl Posted {
    fn described(&self) -> String {
        format!("the {} with wr_id {:#x}", self.opcode.verbs_name(), self.wr_id)
    }
}

/// The check of the requests of one queue pair, or of a shared receive queue.
pub(super) struct Requests {
    pub(super) strict: &'static Strict,
    /// The name of the queue in the log.
    name: String,
    pd: u32,
    arena: Option<Mutex<Arena>>,
}

impl Requests {
    /// `arena` is the address and key of memory of [`ARENA`](super::ARENA) bytes for withheld
    /// requests.
    pub(super) fn new(
        strict: &'static Strict,
        name: String,
        pd: u32,
        arena: Option<(usize, u32)>,
    ) -> Requests {
        Requests {
            strict,
            name,
            pd,
            arena: arena.map(|(addr, key)| Mutex::new(Arena::new(addr, key))),
        }
    }

    pub(super) fn report(&self, rule: Rule, site: &CallSite, text: impl FnOnce() -> String) {
        self.strict
            .findings
            .report(rule, site, || format!("{}: {}", self.name, text()));
    }

    /// The program posts a request. Returns also the element for the device, if the device must
    /// place the bytes in the arena.
    pub(super) fn post(&self, request: &Request<'_>) -> (Posted, Option<Element>) {
        let watched = Watched {
            wr_id: request.wr_id,
            opcode: request.opcode,
        };
        let writes = !watched.is_sent();
        let (mut posted, places) = self.checked(request, writes);
        for (place, len) in places.iter().flatten() {
            watched_pages::open_within(place.addr, *len, writes);
        }
        if !writes {
            let regions = &self.strict.regions;
            let places = places.into_iter().flatten();
            let ours = places.filter(|(place, len)| !regions.peers_write(place.addr, *len));
            posted.watched = ours
                .filter_map(|(place, len)| watched_pages::close(place.addr, len, watched))
                .collect();
            return (posted, None);
        }
        let has_bytes = !places.is_empty();
        posted.withheld = self.withhold(request, watched, places);
        posted._placed = (has_bytes && posted.withheld.is_none()).then(PlacedByDevice::new);
        let element = posted.withheld.as_ref().map(|request| Element {
            key: request.withheld.key,
            offset: request.withheld.addr as u64,
            len: request.withheld.len as u32,
        });
        (posted, element)
    }

    /// Withholds the bytes of a request; not of one with a mistake, which the device must refuse.
    fn withhold(
        &self,
        request: &Request<'_>,
        watched: Watched,
        places: Vec<Option<(Place, usize)>>,
    ) -> Option<WithheldRequest> {
        let places: Vec<_> = places.into_iter().collect::<Option<_>>()?;
        let arena = self.arena.as_ref()?;
        let pieces: Vec<_> = places
            .iter()
            .map(|(place, len)| (place.addr, *len, !place.remote))
            .collect();
        let with_bytes = request.elements.iter().filter(|element| element.len > 0);
        let elements = with_bytes
            .zip(places)
            .map(|(element, (place, _))| (*element, place));
        let withheld = arena.lock().withhold(watched, &pieces)?;
        Some(WithheldRequest {
            withheld,
            elements: elements.collect(),
        })
    }

    /// Checks the memory of a request; `writes`: the device writes there. Returns also where its
    /// elements are; `None`: not in memory that this process has.
    fn checked(&self, request: &Request<'_>, writes: bool) -> (Posted, Vec<Option<(Place, usize)>>) {
        let mut places = Vec::new();
        let mut posted = Posted {
            slot: request.slot,
            wr_id: request.wr_id,
            opcode: request.opcode,
            signalled: request.signalled,
            site: CallSite::here(),
            unchanged: Vec::new(),
            watched: Vec::new(),
            withheld: None,
            _placed: None,
        };
        for (number, element) in request.elements.iter().enumerate() {
            let Element { key, offset, len } = *element;
            if len == 0 {
                continue;
            }
            let place = self
                .strict
                .regions
                .place(self.pd, key, offset, len.into(), writes);
            let len = len as usize;
            places.push(place.as_ref().ok().copied().flatten().map(|place| (place, len)));
            match place {
                Ok(Some(Place { addr, .. })) if !writes => {
                    posted
                        .unchanged
                        .extend(memory::hash(addr, len).map(|hash| (addr, len, hash)));
                }
                Ok(_) => {}
                Err(wrong) => self.report(Rule::BadLkey, &posted.site, || {
                    format!("element {number} of {}: {wrong}", posted.described())
                }),
            }
        }
        (posted, places)
    }

    /// The program polled the completion of a request, which has `len` bytes if they are withheld.
    pub(super) fn complete(&self, posted: &Posted, len: u32) {
        let mut changed = None;
        if let Some(WithheldRequest { withheld, elements }) = &posted.withheld {
            // The program may have deregistered the memory, and use it for something else.
            let is_there = |(element, place): &(Element, Place)| {
                let Element { key, offset, len } = *element;
                self.strict.regions.place(self.pd, key, offset, len.into(), true) == Ok(Some(*place))
            };
            match elements.iter().all(is_there) {
                true => changed = withheld.deliver(len as usize),
                false => withheld.open(),
            }
            self.release(withheld);
        }
        let is_changed = |(addr, len, hash): &&(usize, usize, u64)| {
            memory::hash(*addr, *len).is_some_and(|now| now != *hash)
        };
        let sent = posted.unchanged.iter().filter(is_changed);
        for (addr, len) in sent.map(|(addr, len, _)| (*addr, *len)).chain(changed) {
            self.report(Rule::BufferChanged, &posted.site, || {
                format!(
                    "{len} B at {addr:#x} changed between the post of {} and the poll of its completion",
                    posted.described()
                )
            });
        }
        self.unwatch(posted);
    }

    /// A request will not complete.
    pub(super) fn forget(&self, posted: &Posted) {
        if let Some(WithheldRequest { withheld, .. }) = &posted.withheld {
            withheld.open();
            self.release(withheld);
        }
        self.unwatch(posted);
    }

    fn release(&self, withheld: &Withheld) {
        if let Some(arena) = &self.arena {
            arena.lock().release(withheld);
        }
    }

    fn unwatch(&self, posted: &Posted) {
        for number in &posted.watched {
            watched_pages::open(*number);
        }
        if posted.withheld.is_some() || !posted.watched.is_empty() {
            self.strict.report_looks();
        }
    }
}
