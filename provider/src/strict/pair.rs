//! Queue pairs: the requests that the program has posted and whose completion it has not polled.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use urnic_device::vocabulary::WcOpcode;
use urnic_process::lock::lock;

use super::call_site::CallSite;
use super::held::{Arena, Held};
use super::memory;
use super::process::Strict;
use super::queue::QueueCheck;
use super::regions::Place;
use super::rule::Rule;
use super::watched_pages;

/// The check of one queue pair.
pub(crate) struct PairCheck {
    strict: &'static Strict,
    qpn: u32,
    pd: u32,
    /// The completion queues of sends and receives.
    cqs: [Arc<QueueCheck>; 2],
    sends: Mutex<VecDeque<Posted>>,
    receives: Mutex<VecDeque<Posted>>,
    /// Where receives are held back.
    arena: Option<Mutex<Arena>>,
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
    /// Whether it has a completion if it succeeds.
    pub(crate) signalled: bool,
    /// Its elements; none for inline data.
    pub(crate) elements: &'a [Element],
}

/// A request that was posted.
#[derive(Debug)]
struct Posted {
    slot: u32,
    wr_id: u64,
    opcode: WcOpcode,
    signalled: bool,
    site: CallSite,
    /// Address, length and hash of the memory that must not change.
    unchanged: Vec<(usize, usize, u64)>,
    /// A receive that is held back, and its elements with their places.
    held: Option<(Held, Vec<(Element, Place)>)>,
}

impl Posted {
    fn described(&self) -> String {
        format!("the {} with wr_id {:#x}", self.opcode.verbs_name(), self.wr_id)
    }
}

impl PairCheck {
    /// The check of a new queue pair in the protection domain with this number; `arena` is the
    /// address and key of memory of [`ARENA`](super::ARENA) bytes where receives can be held back.
    pub(crate) fn new(
        strict: &'static Strict,
        qpn: u32,
        pd: u32,
        cqs: [Arc<QueueCheck>; 2],
        arena: Option<(usize, u32)>,
    ) -> PairCheck {
        PairCheck {
            strict,
            qpn,
            pd,
            cqs,
            sends: Mutex::default(),
            receives: Mutex::default(),
            arena: arena.map(|(addr, key)| Mutex::new(Arena::new(addr, key))),
        }
    }

    fn report(&self, rule: Rule, site: &CallSite, text: impl FnOnce() -> String) {
        self.strict
            .findings
            .report(rule, site, || format!("qp {:#x}: {}", self.qpn, text()));
    }

    /// The program posts a request to the send queue.
    #[cold]
    pub(crate) fn send_posted(&self, request: &Request<'_>) {
        let is_sent = matches!(request.opcode, WcOpcode::Send | WcOpcode::RdmaWrite);
        let (posted, places) = self.checked(request, !is_sent);
        for (place, len) in places.into_iter().flatten() {
            watched_pages::open_within(place.addr, len);
        }
        if request.signalled {
            self.cqs[0].add(self.strict, &posted.site);
        }
        lock(&self.sends).push_back(posted);
    }

    /// The program posts a receive. Returns the element for the device, if that is to place the
    /// bytes elsewhere.
    #[cold]
    pub(crate) fn receive_posted(&self, request: &Request<'_>) -> Option<Element> {
        let (mut posted, places) = self.checked(request, true);
        self.cqs[1].add(self.strict, &posted.site);
        // A receive with a mistake is the device's to refuse.
        let places: Option<Vec<_>> = places.into_iter().collect();
        if let Some((arena, places)) = self.arena.as_ref().zip(places) {
            let pieces: Vec<_> = places
                .iter()
                .map(|(place, len)| (place.addr, *len, !place.remote))
                .collect();
            let with_bytes = request.elements.iter().filter(|element| element.len > 0);
            let elements = with_bytes
                .zip(places)
                .map(|(element, (place, _))| (*element, place));
            let held = lock(arena).hold(request.wr_id, &pieces);
            posted.held = held.map(|held| (held, elements.collect()));
        }
        let element = posted.held.as_ref().map(|(held, _)| Element {
            key: held.key,
            offset: held.addr as u64,
            len: held.len as u32,
        });
        lock(&self.receives).push_back(posted);
        element
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
            held: None,
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

    /// Requests from this slot on, which the program had not completed, are taken back.
    #[cold]
    pub(crate) fn sends_taken_back(&self, slot: u32) {
        let mut sends = lock(&self.sends);
        let is_kept = |posted: &Posted| posted.slot.wrapping_sub(slot).cast_signed() < 0;
        let kept = sends.iter().take_while(|posted| is_kept(posted)).count();
        for taken_back in sends.drain(kept..) {
            self.cqs[0].remove(taken_back.signalled.into());
        }
    }

    /// The program polled the completion of a send: it and those before are complete. `failed` is
    /// what the completion says, if it is an error and no flush.
    #[cold]
    pub(crate) fn send_completed(&self, slot: u32, failed: Option<String>) {
        let mut sends = lock(&self.sends);
        let is_complete = |posted: &Posted| slot.wrapping_sub(posted.slot).cast_signed() >= 0;
        let count = sends.iter().take_while(|posted| is_complete(posted)).count();
        let complete: Vec<Posted> = sends.drain(..count).collect();
        drop(sends);
        if let (Some(failed), Some(last)) = (failed, complete.last()) {
            self.report(Rule::RequestFailed, &last.site, || failed);
        }
        for posted in &complete {
            self.cqs[0].remove(posted.signalled.into());
            for &(addr, len, hash) in &posted.unchanged {
                if memory::hash(addr, len).is_some_and(|now| now != hash) {
                    self.report(Rule::BufferChanged, &posted.site, || {
                        format!(
                            "{len} B at {addr:#x} changed between the post of {} and the poll of its completion",
                            posted.described()
                        )
                    });
                }
            }
        }
    }

    /// The program polled the completion of its oldest receive, which has `len` bytes.
    #[cold]
    pub(crate) fn receive_completed(&self, len: u32, failed: Option<String>) {
        // Receives of a shared queue are not known here.
        let Some(posted) = lock(&self.receives).pop_front() else {
            return;
        };
        self.cqs[1].remove(1);
        if let Some((held, elements)) = &posted.held {
            // The program may have deregistered the memory, and use it for something else.
            let is_there = |(element, place): &(Element, Place)| {
                let Element { key, offset, len } = *element;
                self.strict.regions.place(self.pd, key, offset, len.into(), true) == Ok(Some(*place))
            };
            let changed = match elements.iter().all(is_there) {
                true => held.deliver(len as usize),
                false => {
                    held.open();
                    None
                }
            };
            if let Some(arena) = &self.arena {
                lock(arena).release();
            }
            self.strict.report_looks();
            if let Some((addr, len)) = changed {
                self.report(Rule::BufferChanged, &posted.site, || {
                    format!(
                        "{len} B at {addr:#x} changed between the post of {} and the poll of its completion",
                        posted.described()
                    )
                });
            }
        }
        if let Some(failed) = failed {
            self.report(Rule::RequestFailed, &posted.site, || failed);
        }
    }

    /// The queues were emptied: nothing completes any more.
    pub(crate) fn emptied(&self) {
        let sends: Vec<_> = lock(&self.sends).drain(..).collect();
        let signalled = sends.iter().filter(|posted| posted.signalled).count();
        self.cqs[0].remove(signalled as u32);
        let receives: Vec<_> = lock(&self.receives).drain(..).collect();
        for (held, _) in receives.iter().filter_map(|posted| posted.held.as_ref()) {
            held.open();
        }
        if let Some(arena) = &self.arena {
            lock(arena).clear();
        }
        self.cqs[1].remove(receives.len() as u32);
    }

    /// A post was refused, for this reason; `full`: the send queue has no slot.
    #[cold]
    pub(crate) fn refused(&self, reason: &str, full: bool) {
        let site = CallSite::here();
        let sends = lock(&self.sends);
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
