//! Requests that the program has posted and whose completion it has not polled: their memory is
//! compared, watched, or held back meanwhile.

use std::sync::Mutex;

use urnic_device::vocabulary::WcOpcode;
use urnic_process::lock::lock;

use super::call_site::CallSite;
use super::held::{Arena, Held};
use super::memory;
use super::process::Strict;
use super::regions::Place;
use super::rule::Rule;
use super::watched_pages::{self, PlacedByDevice, Watched};

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
    back: Option<HeldBack>,
    _placed: Option<PlacedByDevice>,
}

/// A request whose bytes are held back, and its elements with their places.
#[derive(Debug)]
struct HeldBack {
    held: Held,
    elements: Vec<(Element, Place)>,
}

impl Posted {
    fn described(&self) -> String {
        format!("the {} with wr_id {:#x}", self.opcode.verbs_name(), self.wr_id)
    }
}

/// How the requests of one queue pair, or of a shared receive queue, are checked.
pub(super) struct Requests {
    pub(super) strict: &'static Strict,
    /// What the log calls the queue.
    name: String,
    pd: u32,
    arena: Option<Mutex<Arena>>,
}

impl Requests {
    /// `arena` is the address and key of memory of [`ARENA`](super::ARENA) bytes where the bytes of
    /// requests can be held back.
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

    /// The program posts a request. Returns also the element for the device, if that is to place
    /// the bytes elsewhere.
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
        posted.back = self.hold(request, watched, places);
        posted._placed = (has_bytes && posted.back.is_none()).then(PlacedByDevice::new);
        let element = posted.back.as_ref().map(|back| Element {
            key: back.held.key,
            offset: back.held.addr as u64,
            len: back.held.len as u32,
        });
        (posted, element)
    }

    /// Holds a request back. One with a mistake is the device's to refuse.
    fn hold(
        &self,
        request: &Request<'_>,
        watched: Watched,
        places: Vec<Option<(Place, usize)>>,
    ) -> Option<HeldBack> {
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
        let held = lock(arena).hold(watched, &pieces)?;
        Some(HeldBack {
            held,
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
            back: None,
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

    /// The program polled the completion of a request, which has `len` bytes if it is held back.
    pub(super) fn complete(&self, posted: &Posted, len: u32) {
        let mut changed = None;
        if let Some(HeldBack { held, elements }) = &posted.back {
            // The program may have deregistered the memory, and use it for something else.
            let is_there = |(element, place): &(Element, Place)| {
                let Element { key, offset, len } = *element;
                self.strict.regions.place(self.pd, key, offset, len.into(), true) == Ok(Some(*place))
            };
            match elements.iter().all(is_there) {
                true => changed = held.deliver(len as usize),
                false => held.open(),
            }
            self.release(held);
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
        if let Some(HeldBack { held, .. }) = &posted.back {
            held.open();
            self.release(held);
        }
        self.unwatch(posted);
    }

    fn release(&self, held: &Held) {
        if let Some(arena) = &self.arena {
            lock(arena).release(held);
        }
    }

    fn unwatch(&self, posted: &Posted) {
        for number in &posted.watched {
            watched_pages::open(*number);
        }
        if posted.back.is_some() || !posted.watched.is_empty() {
            self.strict.report_looks();
        }
    }
}
