//! A queue pair: an engine, its stream, and the rules for which thread may run it when.
//!
//! A queue pair knows nothing of its device: what it does with the rest of the device is in the
//! [runtime](crate::runtime).
//!
//! No thread waits for a queue pair's lock on the data path: see [`Turns`].

pub(crate) mod gathering;
mod service;
pub(crate) mod turns;

use crate::counters::{Counter, Counters};
use crate::datagram::{self, DatagramParams};
use crate::events::{Effects, Requests};
use crate::qp::gathering::Gathering;
use crate::qp::service::Service;
use crate::qp::turns::Turns;
use crate::queues::{CompletionQueue, SharedReceiveQueue};
use crate::rdmap::{Engine, NoStream, QpParams};
use crate::stream::Stream;
use crate::stream::same_host::Processors;
use crate::table::Last;
use crate::time::{Nanos, Now};
use arc_swap::ArcSwapOption;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use urnic_device::command::{QpStatus, Status};
use urnic_device::stream::attached;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) id: u32,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) srq: Option<Arc<SharedReceiveQueue>>,
    pub(crate) counters: Counters,
    pub(crate) turns: Turns<Inner>,
    /// Requests that the runtime makes later.
    later: AtomicU32,
    /// Whether the runtime has it on its list for that.
    pub(crate) listed: AtomicBool,
    /// Whether a read of the stream may find something.
    pub(crate) readable: AtomicBool,
    /// Whether sends wait for an event of the stream: a poll cannot see that it takes more.
    pub(crate) blocked: AtomicBool,
    /// Both ends of the stream, while the peer may be a queue pair of this device.
    pub(crate) ends: Mutex<Option<(SocketAddr, SocketAddr)>>,
    /// The queue pair of this device at the other end of the stream; 0 = none.
    pub(crate) sibling: AtomicU32,
    /// The shard of the thread that polled it last, if it has a sibling; initially none.
    pub(crate) poller: AtomicUsize,
    /// The polls of the sibling's poller when we last looked.
    pub(crate) seen_polls: AtomicU32,
    /// Where the ends of a stream in memory poll.
    pub(crate) processors: ArcSwapOption<Processors>,
}

/// What one thread at a time is at.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) engine: Service,
    pub(crate) stream: Option<Box<dyn Stream>>,
    /// The stream took no more.
    pub(crate) blocked: bool,
    /// The peer's side has ended; what is left is to be read to the end.
    pub(crate) hung_up: bool,
    /// Destroyed: rings and completion queues are not touched any more.
    pub(crate) dead: bool,
    /// The command that attached a stream is not complete yet; its events come later.
    pub(crate) held: bool,
    pub(crate) gathering: Gathering,
    /// The timer that is set.
    pub(crate) timer: Option<Nanos>,
    /// The stream may be late.
    pub(crate) delays: bool,
}

thread_local! {
    /// The queue pair that this thread rang for or polled last.
    pub(crate) static LAST: Last<Qp> = const { Last::none() };
}

/// Our end of a stream, and the peer's.
pub(crate) type Ends = (SocketAddr, SocketAddr);

impl Qp {
    /// A queue pair of kind RC or UC.
    pub(crate) fn new(params: QpParams, uar: u32, srq: Option<Arc<SharedReceiveQueue>>) -> Qp {
        let (id, pd) = (params.qid, params.pd);
        let cqs = (params.send_cq.clone(), params.recv_cq.clone());
        Qp::with(id, pd, cqs, Service::Connected(Engine::new(params)), uar, srq)
    }

    /// A queue pair of kind UD.
    pub(crate) fn of_datagrams(params: DatagramParams, uar: u32, srq: Option<Arc<SharedReceiveQueue>>) -> Qp {
        let (id, pd) = (params.qid, params.pd);
        let cqs = (params.send_cq.clone(), params.recv_cq.clone());
        let engine = Box::new(datagram::Engine::new(params));
        let qp = Qp::with(id, pd, cqs, Service::Datagrams(engine), uar, srq);
        qp.readable.store(true, Ordering::Relaxed);
        qp
    }

    fn with(
        id: u32,
        pd: u32,
        (send_cq, recv_cq): (Arc<CompletionQueue>, Arc<CompletionQueue>),
        mut engine: Service,
        uar: u32,
        srq: Option<Arc<SharedReceiveQueue>>,
    ) -> Qp {
        engine.receive_source().ring_never();
        Qp {
            id,
            pd,
            uar,
            send_cq,
            recv_cq,
            srq,
            counters: Counters::default(),
            later: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            readable: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            ends: Mutex::default(),
            sibling: AtomicU32::new(0),
            poller: AtomicUsize::new(usize::MAX),
            seen_polls: AtomicU32::new(0),
            processors: ArcSwapOption::empty(),
            turns: Turns::new(Inner {
                engine,
                stream: None,
                blocked: false,
                hung_up: false,
                dead: false,
                held: false,
                gathering: Gathering::default(),
                timer: None,
                delays: false,
            }),
        }
    }

    /// Whether the peer of a stream in memory polls on the processor of this thread, which polls
    /// without result.
    pub(crate) fn shares_processor(&self) -> bool {
        self.processors
            .load()
            .as_ref()
            .is_some_and(|processors| processors.are_one())
    }

    pub(crate) fn uses_srq(&self, srqid: u32) -> bool {
        self.srq.as_ref().is_some_and(|srq| srq.id == srqid)
    }

    /// Whether a read of the stream may find something.
    #[inline]
    pub(crate) fn is_readable(&self) -> bool {
        self.readable.load(Ordering::Relaxed)
    }

    /// Whether a poll of the stream, without a look at events, finds all that there is to do.
    #[inline]
    pub(crate) fn only_receives(&self) -> bool {
        self.is_readable() && !self.blocked.load(Ordering::Relaxed)
    }

    /// Leaves something to the runtime.
    pub(crate) fn note_later(&self, requests: Requests) {
        self.later.fetch_or(requests.bits(), Ordering::SeqCst);
    }

    /// Takes the requests that the runtime must make now.
    pub(crate) fn take_later(&self) -> Requests {
        Requests::from_bits_retain(self.later.swap(0, Ordering::AcqRel)) - Requests::AGAIN
    }

    pub(crate) fn has_later(&self) -> bool {
        self.later.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn has_later_than_flush(&self) -> bool {
        self.later.load(Ordering::Relaxed) & !Requests::FLUSH.bits() != 0
    }

    /// Runs a command that reads or changes the queue pair; requests that others made meanwhile are
    /// carried out when the command is complete.
    pub(crate) fn command<R>(
        &self,
        effects: &mut Effects,
        run: impl FnOnce(&mut Inner, &mut Effects) -> Result<(R, Requests), Status>,
    ) -> Result<R, Status> {
        let done = run(&mut self.turns.lock(), effects);
        let requests = done.as_ref().map_or(Requests::empty(), |(_, requests)| *requests);
        effects.kick(self.id, requests);
        done.map(|(answer, _)| answer)
    }

    /// Adds up the counters, as of now. The accesses of a peer on this host are counted then only,
    /// because they make no run of the queue pair.
    pub(crate) fn sum_counters_into(&self, sums: &mut [u64; Counter::ALL.len()], effects: &mut Effects) {
        self.turns.lock().engine.count_accesses(&self.counters);
        // What others requested meanwhile.
        effects.kick(self.id, Requests::empty());
        self.counters.sum_into(sums);
    }

    /// Carries out `QueryQp`: its state, and both ends of its stream.
    pub(crate) fn status(&self, effects: &mut Effects) -> Result<(QpStatus, Option<Ends>), Status> {
        self.command(effects, |inner, _| {
            let ends = inner
                .stream
                .as_ref()
                .map(|stream| (stream.local(), stream.remote()));
            let mut status = inner.engine.status();
            if inner.is_in_memory() && status.attached.get() == attached::STREAM {
                status.attached = attached::MEMORY.into();
            }
            Ok(((status, ends), Requests::empty()))
        })
    }
}

impl Inner {
    /// Whether packets or bytes may arrive.
    #[inline]
    pub(crate) fn has_input(&self) -> bool {
        self.stream.is_some() || self.engine.is_datagrams()
    }

    #[inline]
    pub(crate) fn is_in_memory(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.is_in_memory())
    }

    /// Whether a stream that took no more may now, as far as it tells that without an event.
    #[inline]
    pub(crate) fn has_room(&mut self) -> bool {
        self.blocked && self.stream.as_mut().is_some_and(|stream| stream.has_room())
    }

    /// The number of blocks by which the event index must be ahead: without gathering, `ahead`.
    #[inline]
    pub(crate) fn ring_ahead(&self, ahead: u32) -> u32 {
        self.gathering.ahead(ahead, || self.is_in_memory())
    }

    /// Lets what is late in the stream go on; returns when to do so again.
    #[inline]
    pub(crate) fn advance(&mut self, now: &Now<'_>) -> Option<Nanos> {
        let stream = self.stream.as_mut().filter(|_| self.delays)?;
        stream.advance(now.get())
    }

    pub(crate) fn with_engine<R>(&mut self, run: impl FnOnce(&mut Service, &mut dyn Stream) -> R) -> R {
        match &mut self.stream {
            Some(stream) => run(&mut self.engine, &mut **stream),
            None => run(&mut self.engine, &mut NoStream),
        }
    }
}
