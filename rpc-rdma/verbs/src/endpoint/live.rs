//! The state of an endpoint during a connection: posted work requests, and memory that is open to
//! the peer.

use super::activity::Activity;
use super::received_call::{Message, ReceivedCall};
use super::work::{Effect, ExposedMemory, Exposure, Kept, Memory, Operation, Posted, Read, Request, Sink};
use crate::memory::{Buffer, MAX_BUFFER, PAGE, Pool, Slice};
use crate::shares::{Account, Wanted};
use crate::verbs::{Batch, Device, Element, Link, Window, Work};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use urnic_rpc_rdma::Segment;
use urnic_rpc_rdma::engine::{Access, CallId, Exposed, Incoming, RegionId, Source, Span};

/// One in this number of Writes has a completion of its own.
const SIGNAL_INTERVAL: usize = 32;

/// The state of an endpoint during a connection.
pub(super) struct Live {
    pub(super) link: Arc<Link>,
    /// Buffers of receives by slot, which are reused.
    pub(super) receives: Vec<Option<Buffer>>,
    /// Slots without a posted receive.
    pub(super) free: Vec<usize>,
    /// Posted work requests, oldest first.
    pub(super) posted: VecDeque<Posted>,
    pub(super) waiting: VecDeque<Request>,
    pub(super) number: u64,
    /// Writes since the last request with a completion.
    pub(super) unsignaled: usize,
    pub(super) room: usize,
    pub(super) windows: Vec<Window>,
    pub(super) exposed: HashMap<RegionId, ExposedMemory>,
    pub(super) sinks: HashMap<(CallId, usize), Sink>,
    pub(super) receive: usize,
    /// Maximum completions that the queue holds.
    pub(super) depth: usize,
    /// The connection is being ended. Nothing is posted.
    pub(super) broken: bool,
    /// A receive failed, as all receives do when the connection ends.
    pub(super) ended: bool,
    /// The peer is known to accept backward calls.
    pub(super) takes_calls: bool,
    pub(super) activity: Activity,
    /// Reads that wait for memory.
    pub(super) reads: VecDeque<Read>,
    /// The amount of memory that the Reads wait for.
    pub(super) wanted: Option<Wanted>,
}

impl Live {
    /// The state of a connection with this number of receives, and with `room` work requests of the
    /// send queue.
    pub(super) fn new(link: Link, receives: u32, room: u32, receive: usize) -> Self {
        Self {
            link: Arc::new(link),
            receives: (0..receives).map(|_| None).collect(),
            free: (0..receives as usize).collect(),
            posted: VecDeque::new(),
            waiting: VecDeque::new(),
            number: 0,
            unsignaled: 0,
            room: room as usize,
            windows: Vec::new(),
            exposed: HashMap::new(),
            sinks: HashMap::new(),
            receive,
            depth: (receives + room) as usize,
            broken: false,
            ended: false,
            takes_calls: false,
            activity: Activity::new(),
            reads: VecDeque::new(),
            wanted: None,
        }
    }

    pub(super) fn device(&self) -> Arc<Device> {
        self.link.device().clone()
    }

    pub(super) fn key(&self, arena: usize) -> io::Result<u32> {
        Ok(self.device().arena(arena)?.local_key)
    }

    pub(super) fn receive(&mut self, pool: &Pool) -> io::Result<()> {
        let slot = self.free.pop().ok_or(io::ErrorKind::QuotaExceeded)?;
        let buffer = match self.receives[slot].take() {
            Some(buffer) => buffer,
            None => pool.take(self.receive).ok_or(io::ErrorKind::OutOfMemory)?,
        };
        let element = Element {
            at: buffer.as_ptr() as usize,
            len: buffer.len() as u32,
            key: self.key(buffer.arena())?,
        };
        self.receives[slot] = Some(buffer);
        // SAFETY: the buffer stays in its slot, and no code accesses it, until the completion with
        // this number arrives or the link is dropped.
        unsafe { self.link.post_receive((slot as u64) << 1 | 1, &element) }
    }

    /// Gives the peer access to memory.
    pub(super) fn open(
        &mut self,
        pool: &Pool,
        id: RegionId,
        what: Exposed<Memory>,
        access: Access,
    ) -> io::Result<Segment> {
        let allocate = |len| pool.take(len).ok_or(io::ErrorKind::OutOfMemory);
        let (own, application, len) = match what {
            Exposed::Memory(memory, len) => (None, Some(memory), len),
            Exposed::Bytes(bytes) => {
                let mut buffer = allocate(bytes.len())?;
                buffer.copy_from_slice(&bytes);
                (Some(buffer), None, bytes.len() as u32)
            }
            Exposed::Fresh(len) => (Some(allocate(len as usize)?), None, len),
        };
        let (at, arena) = match (&own, application.as_deref()) {
            (Some(buffer), _) => (buffer.as_ptr() as usize, buffer.arena()),
            (None, Some([slice])) if slice.len() >= len as usize => (slice.as_ptr() as usize, slice.arena()),
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let device = self.device();
        let writes = access == Access::RemoteWrite;
        let (exposure, handle) = if device.limits.windows {
            let window = match self.windows.pop() {
                Some(window) => window,
                None => self.link.window()?,
            };
            let key = window.next_key();
            self.waiting.push_back(Request {
                operation: Operation::Bind {
                    region: id,
                    arena,
                    at,
                    len,
                    writes,
                },
                elements: Vec::new(),
                keep: Vec::new(),
                effect: Effect::Nothing,
            });
            (Exposure::Window(window), key)
        } else {
            let region = device.open(at, len as usize, writes)?;
            let key = region.remote_key;
            (Exposure::Region(region), key)
        };
        self.exposed.insert(
            id,
            ExposedMemory {
                exposure,
                own,
                application,
            },
        );
        Ok(Segment {
            handle,
            length: len,
            offset: at as u64,
        })
    }

    /// Removes the request to bind a window to a region, if it was not posted yet. Returns whether
    /// there was one.
    pub(super) fn cancel_bind(&mut self, id: RegionId) -> bool {
        let binds =
            |request: &Request| matches!(request.operation, Operation::Bind { region, .. } if region == id);
        let place = self.waiting.iter().position(binds);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    /// Copies bytes of several places into one buffer.
    pub(super) fn copy_pieces(
        &self,
        pool: &Pool,
        pieces: &[Span<Memory>],
    ) -> io::Result<(Vec<Element>, Vec<Kept>)> {
        let len = pieces.iter().map(|piece| piece.len).sum();
        let mut buffer = pool.take(len).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut rest = &mut buffer[..];
        for span in pieces {
            let copy = |bytes: &[u8], rest: &mut &mut [u8]| {
                let (first, others) = std::mem::take(rest).split_at_mut(bytes.len());
                first.copy_from_slice(bytes);
                *rest = others;
            };
            match &span.source {
                Source::Bytes(bytes) => copy(&bytes[span.at..span.at + span.len], &mut rest),
                Source::Memory(slices) => {
                    within(slices, span.at, span.len).for_each(|part| copy(&part, &mut rest))
                }
            }
        }
        let element = Element {
            at: buffer.as_ptr() as usize,
            len: len as u32,
            key: self.key(buffer.arena())?,
        };
        Ok((vec![element], vec![Kept::Buffer(buffer)]))
    }

    /// Queues RDMA Writes of all pieces: from memory of the application without a copy, from bytes
    /// of the engine with a copy.
    pub(super) fn write(
        &mut self,
        pool: &Pool,
        pieces: Vec<Span<Memory>>,
        remote: Segment,
    ) -> io::Result<()> {
        let device = self.device();
        let mut at = remote.offset;
        let (mut elements, mut keep) = (Vec::new(), Vec::new());
        let mut ours = Vec::new();
        let mut pieces = pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            match &piece.source {
                Source::Bytes(_) => {
                    ours.push(piece);
                    if pieces
                        .peek()
                        .is_none_or(|next| matches!(next.source, Source::Memory(_)))
                    {
                        let (copy, kept) = self.copy_pieces(pool, &std::mem::take(&mut ours))?;
                        elements.extend(copy);
                        keep.extend(kept);
                    }
                }
                Source::Memory(slices) => {
                    for part in within(slices, piece.at, piece.len) {
                        elements.push(Element {
                            at: part.as_ptr() as usize,
                            len: part.len() as u32,
                            key: self.key(part.arena())?,
                        });
                        keep.push(Kept::Slice(part));
                    }
                }
            }
        }
        let mut keep = Some(keep);
        let most = device.limits.elements as usize;
        let count = elements.len().div_ceil(most);
        for (index, elements) in elements.chunks(most).enumerate() {
            let length = elements.iter().map(|element| element.len).sum();
            let operation = Operation::Write(Segment {
                length,
                offset: at,
                ..remote
            });
            // The peer chose the offset. If the sum wraps around, the peer refuses the Write.
            at = at.wrapping_add(u64::from(length));
            // The last request to complete keeps the memory of all.
            let keep = if index + 1 == count {
                keep.take().unwrap_or_default()
            } else {
                Vec::new()
            };
            let (elements, effect) = (elements.to_vec(), Effect::Nothing);
            self.waiting.push_back(Request {
                operation,
                elements,
                keep,
                effect,
            });
        }
        Ok(())
    }

    /// The memory into which an item is read. `None` while the client's share is used up.
    pub(super) fn sink(
        &mut self,
        pool: &Pool,
        account: Option<&Account>,
        item: (CallId, usize),
        length: u64,
    ) -> io::Result<Option<&Sink>> {
        if !self.sinks.contains_key(&item) {
            let len = usize::try_from(length).ok().filter(|len| *len <= MAX_BUFFER);
            let len = len.ok_or(io::ErrorKind::OutOfMemory)?;
            let charge = match account {
                None => None,
                Some(account) => match account.take(footprint(len)) {
                    None => return Ok(None),
                    charge => charge,
                },
            };
            let buffer = pool.take(len).ok_or(io::ErrorKind::OutOfMemory)?;
            let device = self.device();
            let (region, key) = if device.limits.open_sinks {
                let region = device.open(buffer.as_ptr() as usize, buffer.len(), true)?;
                let key = region.local_key;
                (Some(region), key)
            } else {
                (None, self.key(buffer.arena())?)
            };
            let sink = Sink {
                region,
                buffer,
                key,
                charge,
            };
            self.sinks.insert(item, sink);
        }
        let sink = self.sinks.get(&item);
        sink.map(Some).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Queues a Read. Returns `false` while the client's share is used up.
    pub(super) fn read(&mut self, pool: &Pool, account: Option<&Account>, read: &Read) -> io::Result<bool> {
        let Read {
            work,
            item,
            length,
            at,
            remote,
        } = *read;
        let Some(sink) = self.sink(pool, account, item, length)? else {
            return Ok(false);
        };
        let element = Element {
            at: sink.buffer.as_ptr() as usize + at as usize,
            len: remote.length,
            key: sink.key,
        };
        self.waiting.push_back(Request {
            operation: Operation::Read(remote),
            elements: vec![element],
            keep: Vec::new(),
            effect: Effect::Completed(work),
        });
        Ok(true)
    }

    /// Queues the Reads that waited for memory, as far as there is memory.
    pub(super) fn resume_reads(&mut self, pool: &Pool, account: Option<&Account>) -> io::Result<()> {
        while let Some(read) = self.reads.pop_front() {
            if !self.read(pool, account, &read)? {
                self.reads.push_front(read);
                return Ok(());
            }
        }
        self.wanted = None;
        Ok(())
    }

    /// Posts as many waiting requests as the queue has room for.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let device = self.device();
        let mut batch = Batch::default();
        while self.posted.len() < self.room
            && let Some(Request {
                operation,
                elements,
                keep,
                effect,
            }) = self.waiting.pop_front()
        {
            self.number += 1;
            let number = self.number << 1;
            self.unsignaled += 1;
            let signaled = !matches!(operation, Operation::Write(_) | Operation::Bind { .. })
                || self.unsignaled >= SIGNAL_INTERVAL.min(self.room / 2);
            if signaled {
                self.unsignaled = 0;
            }
            // The request is kept before it is posted, so that `detach` finds it if the post fails.
            self.posted.push_back(Posted { number, keep, effect });
            let mut add = |work: Work<'_>| batch.push(number, signaled, work, &elements);
            match operation {
                Operation::Send(invalidate) => add(Work::Send { invalidate }),
                Operation::Read(remote) => add(Work::Read(remote)),
                Operation::Write(remote) => add(Work::Write(remote)),
                Operation::Invalidate(key) => add(Work::Invalidate(key)),
                Operation::Bind {
                    region,
                    arena,
                    at,
                    len,
                    writes,
                } => {
                    if let Some(ExposedMemory {
                        exposure: Exposure::Window(window),
                        ..
                    }) = self.exposed.get(&region)
                    {
                        let region = &*device.arena(arena)?;
                        add(Work::Bind {
                            window,
                            region,
                            at,
                            len,
                            writes,
                        });
                    }
                }
            }
        }
        // SAFETY: `posted` keeps the memory of sent data until the request completes. Sinks stay
        // until their Reads complete, and exposed memory until it is released. Without a
        // completion, all of them stay until the link's queue pair is destroyed. Windows are in
        // `exposed`, and arenas stay registered while the device exists.
        unsafe { self.link.post(batch) }
    }

    /// A call of the peer with the data that was read for it.
    pub(super) fn take_call(&mut self, mut incoming: Incoming, pool: &Pool) -> Option<ReceivedCall> {
        self.activity.received_call = true;
        let mut fetched = Vec::with_capacity(incoming.items.len());
        let mut charges = Vec::new();
        for (index, (position, len)) in incoming.items.iter().enumerate() {
            let slice = match self.sinks.remove(&(incoming.call, index)) {
                Some(sink) => {
                    // The peer must have no more access when the application reads the memory.
                    if let Some(region) = sink.region
                        && let Err(error) = region.close()
                    {
                        tracing::warn!(%error, "memory could not be deregistered");
                        std::mem::forget(sink.buffer);
                        return None;
                    }
                    charges.extend(sink.charge);
                    sink.buffer.share()
                }
                // The item is empty, so nothing was read.
                None => pool.take(0)?.share(),
            };
            fetched.push((*position, slice.part(0..*len as usize)));
        }
        let message = match incoming.message.take() {
            Some(short) => Message::Short(short),
            None => Message::Long(fetched.remove(0).1),
        };
        Some(ReceivedCall {
            incoming,
            message,
            items: fetched,
            charges,
        })
    }
}

/// Bytes of pool memory that a buffer of `len` bytes occupies.
pub(super) fn footprint(len: usize) -> u64 {
    len.max(PAGE).next_power_of_two() as u64
}

/// The `len` bytes from `at`, out of slices that are joined in order.
pub(super) fn within(slices: &[Slice], mut at: usize, mut len: usize) -> impl Iterator<Item = Slice> {
    slices.iter().filter_map(move |slice| {
        let start = at.min(slice.len());
        at -= start;
        let count = len.min(slice.len() - start);
        len -= count;
        (count > 0).then(|| slice.part(start..start + count))
    })
}
