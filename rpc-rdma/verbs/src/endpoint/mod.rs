//! One end of a connection: an engine, and the queue pair that executes its actions.
//!
//! An endpoint never waits. Its owner passes the application's requests to it, then calls
//! [`Endpoint::execute_actions`], and [`Endpoint::progress`] when its descriptor is readable.

mod activity;
mod client_charges;
mod live;
mod received_call;
mod work;

pub(crate) use activity::Ages;
pub(crate) use received_call::ReceivedCall;
pub(crate) use work::Memory;

use crate::memory::{Buffer, Pool};
use crate::shares::{Account, Charge};
use crate::verbs::{Device, Failure, Link};
use client_charges::ClientCharges;
use live::{Live, footprint};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use urnic_rpc_rdma::PrivateData;
use urnic_rpc_rdma::engine::{Action, CallId, Connection, Event, Incoming, RegionId, Reply, Terms};
use work::{Effect, Exposure, Kept, Operation, Posted, Read, Request, receive_slot};

/// Maximum posted work requests of the send queue. Further requests wait in the endpoint.
const SENDS: u32 = 256;

/// One end of a connection.
pub(crate) struct Endpoint {
    pub(crate) engine: Connection<Memory>,
    pool: Pool,
    live: Option<Live>,
    /// Long replies that the application has not fetched.
    replies: HashMap<RegionId, Buffer>,
    private_data: PrivateData,
    /// At a server, the memory that is counted for the client.
    charges: Option<ClientCharges>,
}

impl Endpoint {
    pub(crate) fn new(engine: Connection<Memory>, pool: &Pool, private_data: PrivateData) -> Self {
        Self {
            engine,
            pool: pool.clone(),
            live: None,
            replies: HashMap::new(),
            private_data,
            charges: None,
        }
    }

    /// Counts memory from now on. `messages` is the charge for the memory of receives and of copied
    /// Sends. The endpoint calls `on_memory_wait` when Reads wait for memory.
    /// [`execute_actions`](Self::execute_actions) continues these Reads.
    pub(crate) fn charge(
        &mut self,
        account: &Account,
        messages: Charge,
        on_memory_wait: impl Fn() + Send + 'static,
    ) {
        self.charges = Some(ClientCharges {
            account: account.clone(),
            messages,
            replies: HashMap::new(),
            open_calls: 0,
            served: false,
            on_memory_wait: Box::new(on_memory_wait),
        });
    }

    /// Bytes of memory for messages, with this number of receives and of concurrent calls.
    pub(crate) fn footprint(private_data: &PrivateData, receives: u32, calls: u32) -> u64 {
        u64::from(receives) * footprint(private_data.receive_size)
            + u64::from(calls) * footprint(private_data.send_size)
    }

    /// Whether Reads wait for memory.
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.live.as_ref().is_some_and(|live| !live.reads.is_empty())
    }

    /// Whether a call was answered.
    pub(crate) fn served(&self) -> bool {
        self.charges.as_ref().is_some_and(|charges| charges.served)
    }

    /// Answers a call, or drops it without a reply. `charge` is counted until the reply is sent.
    pub(crate) fn answer(&mut self, call: CallId, reply: Option<&Reply<Memory>>, charge: Option<Charge>) {
        // A call that ended with its connection needs no answer.
        let answered = match reply {
            Some(reply) => self.engine.reply(call, reply),
            None => self.engine.drop_call(call),
        };
        if let Some(charges) = &mut self.charges {
            charges.open_calls = charges.open_calls.saturating_sub(1);
            charges.served = true;
            if let (Ok(()), Some(charge)) = (answered, charge) {
                charges.replies.insert(call, charge);
            }
        }
        self.execute_actions();
    }

    /// The private data of this end, on this device.
    pub(crate) fn private_data(&self, invalidation: bool) -> PrivateData {
        PrivateData {
            remote_invalidation: invalidation,
            ..self.private_data
        }
    }

    pub(crate) fn link(&self) -> Option<&Arc<Link>> {
        self.live.as_ref().map(|live| &live.link)
    }

    /// Attaches a link with this number of receives, and with `room` work requests of the send
    /// queue.
    pub(crate) fn attach(&mut self, link: Link, receives: u32, room: u32) {
        self.live = Some(Live::new(link, receives, room, self.private_data.receive_size));
    }

    /// Number of work requests of the send queue on a device.
    pub(crate) fn sends(device: &Device) -> u32 {
        SENDS.min(device.limits.works)
    }

    /// Begins a connection with the agreed terms.
    pub(crate) fn connected(&mut self, terms: Terms) {
        self.engine.connected(terms);
        self.execute_actions();
    }

    /// Notes that the upper layer of the client accepts calls. Repeated calls have no effect.
    pub(crate) fn takes_calls(&mut self) {
        if let Some(live) = &mut self.live
            && !std::mem::replace(&mut live.takes_calls, true)
        {
            self.engine.peer_takes_calls();
        }
    }

    /// Whether this end gave up the connection.
    pub(crate) fn broken(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.broken)
    }

    /// Whether this end gave up the connection, or the connection has ended. The connection manager
    /// reports the end later.
    pub(crate) fn ended(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.broken || live.ended)
    }

    /// Whether bytes move by RDMA: memory is open to the peer, or work requests have not completed.
    pub(crate) fn is_moving(&self) -> bool {
        let moving =
            |live: &Live| !(live.exposed.is_empty() && live.sinks.is_empty() && live.posted.is_empty());
        self.live.as_ref().is_some_and(moving)
    }

    /// Time of the last message or completion.
    pub(crate) fn last_activity(&self) -> Option<Instant> {
        self.live.as_ref().map(|live| live.activity.last_activity)
    }

    /// Checks the progress of the connection, `elapsed` after the last check.
    pub(crate) fn check_progress(&mut self, elapsed: Duration) -> Ages {
        let open = self.charges.as_ref().map_or(0, |charges| charges.open_calls);
        let Some(live) = &mut self.live else {
            return Ages::default();
        };
        let oldest = live.posted.front().map_or(0, |posted| posted.number);
        let busy = open > 0 || !live.posted.is_empty() || !live.reads.is_empty();
        live.activity.check(oldest, busy, elapsed)
    }

    /// Ends the connection. [`detach`](Self::detach) follows when it has ended.
    pub(crate) fn disconnect(&mut self) {
        if let Some(live) = &mut self.live {
            live.broken = true;
            live.link.disconnect();
        }
    }

    /// Removes the ended connection. The peer has no access when this returns.
    pub(crate) fn detach(&mut self) {
        let Some(live) = self.live.take() else { return };
        // The queue pair is destroyed first, so that nothing uses memory when it is returned. A
        // window of type 2 gives no access without its queue pair.
        live.link.destroy_queue_pair();
        let Live {
            link,
            exposed,
            posted,
            waiting,
            windows,
            sinks,
            receives,
            wanted,
            ..
        } = live;
        let effects = (posted.into_iter().map(|posted| posted.effect))
            .chain(waiting.into_iter().map(|request| request.effect));
        for effect in effects {
            if let Effect::Released(region, window) = effect {
                drop(window);
                self.engine.released(region);
            }
        }
        // These objects are dropped before the link, which keeps the device open.
        drop((exposed, windows, sinks, receives, wanted));
        drop(link);
        self.engine.disconnected();
        self.execute_actions();
    }

    /// Executes the actions of the engine.
    pub(crate) fn execute_actions(&mut self) {
        if let Some(live) = &mut self.live
            && !live.reads.is_empty()
            && !live.broken
            && let Err(error) =
                live.resume_reads(&self.pool, self.charges.as_ref().map(|charges| &charges.account))
        {
            tracing::warn!(%error, "the connection is closed");
            self.disconnect();
        }
        loop {
            let actions = self.engine.actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                if let Err(error) = self.act(action) {
                    tracing::warn!(%error, "the connection is closed");
                    self.disconnect();
                }
            }
        }
        let Some(live) = &mut self.live else { return };
        if !live.broken
            && let Err(error) = live.flush()
        {
            tracing::warn!(%error, "the connection is closed");
            self.disconnect();
        }
    }

    fn act(&mut self, action: Action<Memory>) -> io::Result<()> {
        let Some(live) = &mut self.live else {
            // Only these actions outlive connections.
            match action {
                Action::Register { region, .. } => self.engine.register_failed(region),
                Action::Release { region, .. } => self.engine.released(region),
                _ => {}
            }
            return Ok(());
        };
        match action {
            Action::Receive(count) => {
                for _ in 0..count {
                    live.receive(&self.pool)?;
                }
            }
            Action::Register { region, what, access } => match live.open(&self.pool, region, what, access) {
                Ok(segment) => self.engine.registered(region, vec![segment]),
                Err(error) => {
                    tracing::warn!(%error, "memory could not be exposed");
                    self.engine.register_failed(region);
                }
            },
            Action::Release {
                region,
                invalidated,
                keep,
            } => self.release(region, invalidated, keep),
            Action::Send {
                work,
                pieces,
                invalidate,
            } => {
                let (elements, keep) = live.copy_pieces(&self.pool, &pieces)?;
                let (operation, effect) = (Operation::Send(invalidate), Effect::Completed(work));
                live.waiting.push_back(Request {
                    operation,
                    elements,
                    keep,
                    effect,
                });
            }
            Action::Write { pieces, remote } => live.write(&self.pool, pieces, remote)?,
            Action::Read {
                work,
                call,
                item,
                length,
                at,
                remote,
            } => {
                return self.read(Read {
                    work,
                    item: (call, item),
                    length,
                    at,
                    remote,
                });
            }
            Action::Close(why) => {
                tracing::debug!(%why, "closing");
                self.disconnect();
            }
        }
        Ok(())
    }

    /// Ends the peer's access to a region. With `keep`, the memory is kept for the application.
    fn release(&mut self, region: RegionId, invalidated: Option<u32>, keep: bool) {
        let Some(live) = &mut self.live else { return };
        let Some(memory) = live.exposed.remove(&region) else {
            self.engine.released(region);
            return;
        };
        let (reply, own) = if keep {
            (memory.own, None)
        } else {
            (None, memory.own)
        };
        self.replies.extend(reply.map(|buffer| (region, buffer)));
        match memory.exposure {
            Exposure::Window(window) if live.cancel_bind(region) => {
                live.windows.push(window);
                self.engine.released(region);
            }
            Exposure::Window(window) if invalidated == Some(window.remote_key()) => {
                live.windows.push(window);
                self.engine.released(region);
            }
            Exposure::Window(window) => live.waiting.push_back(Request {
                operation: Operation::Invalidate(window.remote_key()),
                elements: Vec::new(),
                // The peer has access until the request completes.
                keep: own.map(Kept::Buffer).into_iter().collect(),
                effect: Effect::Released(region, window),
            }),
            Exposure::Region(region_memory) => match region_memory.close() {
                Ok(()) => self.engine.released(region),
                Err(error) => {
                    tracing::warn!(%error, "memory could not be deregistered");
                    // The peer may still have access, so nothing else may use the memory.
                    std::mem::forget(own);
                    self.engine.release_failed(region);
                }
            },
        }
    }

    /// Begins a Read, or queues it until there is memory.
    fn read(&mut self, read: Read) -> io::Result<()> {
        let Some(live) = &mut self.live else { return Ok(()) };
        let account = self.charges.as_ref().map(|charges| &charges.account);
        // Reads begin in the order of their requests.
        if (!live.reads.is_empty() || !live.read(&self.pool, account, &read)?)
            && let Some(charges) = &self.charges
        {
            let wanted = footprint(read.length as usize);
            live.reads.push_back(read);
            live.wanted.get_or_insert_with(|| charges.account.want(wanted));
            (charges.on_memory_wait)();
        }
        Ok(())
    }

    /// Handles completions and executes the resulting actions. Returns whether there were
    /// completions.
    ///
    /// One run of this function handles at most as many completions as the queue holds, so a fast
    /// peer cannot keep it busy.
    pub(crate) fn progress(&mut self) -> bool {
        let mut completions = Vec::new();
        let mut seen = 0;
        while let Some(live) = &mut self.live
            && seen < live.depth
        {
            completions.clear();
            if let Err(error) = live.link.poll(&mut completions) {
                tracing::warn!(%error, "the completion queue fails");
                self.disconnect();
                break;
            }
            if completions.is_empty() {
                break;
            }
            seen += completions.len();
            live.activity.last_activity = Instant::now();
            for completion in &completions {
                self.handle_completion(completion);
            }
            self.execute_actions();
        }
        self.execute_actions();
        seen > 0
    }

    /// Arms the completion queue before a wait for the descriptor of the link. Returns whether
    /// there were completions already.
    ///
    /// The queue still holds all earlier completions, so one more poll finds them. A later
    /// completion makes an event.
    pub(crate) fn arm(&mut self) -> bool {
        if let Some(live) = &self.live
            && let Err(error) = live.link.arm()
        {
            tracing::warn!(%error, "the completion queue fails");
            self.disconnect();
        }
        self.progress()
    }

    fn handle_completion(&mut self, completion: &crate::verbs::Completion) {
        let Some(live) = &mut self.live else { return };
        if let Some(slot) = receive_slot(completion.number) {
            live.free.push(slot);
            live.ended |= completion.failed.is_some();
            if let Some(Some(buffer)) = live.receives.get(slot)
                && completion.failed.is_none()
                && !live.broken
            {
                let message = buffer.get(..completion.len as usize).unwrap_or_default();
                self.engine.received(message, completion.invalidated);
            }
            return;
        }
        if completion.failed.is_some() {
            // Failed requests stay in `posted`, for `detach`.
            if live.broken {
                return;
            }
            let work = live
                .posted
                .iter()
                .find(|posted| posted.number == completion.number);
            if let Some(Posted {
                effect: Effect::Completed(work),
                ..
            }) = work
                // A failure of the connection is no failure of the call, which is sent again.
                && completion.failed == Some(Failure::Refused)
            {
                self.engine.failed(*work);
            }
            tracing::debug!(failure = ?completion.failed, "a work request failed");
            return self.disconnect();
        }
        // Requests complete in order, so this completion also covers all earlier requests.
        while live
            .posted
            .front()
            .is_some_and(|first| first.number <= completion.number)
            && let Some(Posted { keep, effect, .. }) = live.posted.pop_front()
        {
            drop(keep);
            match effect {
                Effect::Nothing => {}
                Effect::Completed(work) => self.engine.completed(work),
                Effect::Released(region, window) => {
                    live.windows.push(window);
                    self.engine.released(region);
                }
            }
        }
    }

    /// Takes the events for the application.
    pub(crate) fn events(&mut self) -> Vec<Event<Memory>> {
        let events = self.engine.events();
        if let Some(charges) = &mut self.charges {
            for event in &events {
                match event {
                    Event::CallReceived(_) => charges.open_calls += 1,
                    Event::Finished(call) => drop(charges.replies.remove(call)),
                    Event::Answered { .. } => {}
                }
            }
        }
        events
    }

    /// Returns a call of the peer, with the data that was read for it.
    pub(crate) fn take_call(&mut self, incoming: Incoming) -> Option<ReceivedCall> {
        self.live.as_mut()?.take_call(incoming, &self.pool)
    }

    /// Takes the long reply in this region.
    pub(crate) fn long_reply(&mut self, region: RegionId) -> Option<Buffer> {
        self.replies.remove(&region)
    }
}
