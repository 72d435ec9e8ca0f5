//! A client: the end that connects and makes calls.

mod call;
mod state;

pub use call::{Answer, Call};

use crate::adaptive_polling::POLLS_PER_YIELD;
use crate::endpoint::{Endpoint, Memory, ReceivedCall};
use crate::error::Error;
use crate::memory::{Pool, Slice};
use crate::options::Options;
use crate::service::{Request, Response, Service, reply};
use crate::verbs::{Channel, Device, Event as CmEvent, Id, Link};
use crate::xid;
use rdma_mummy_sys::rdma_cm_event_type as kind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use state::{Phase, State, granted};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::PrivateData;
use urnic_rpc_rdma::binding::{bound, may_go_backward};
use urnic_rpc_rdma::engine::{self, Item, Terms};
use urnic_rpc_rdma::rpc::{self, CallHeader};
use urnic_sync::{Condvar, Mutex, MutexGuard};

/// Time in milliseconds in which librdmacm must resolve the address, and then the route.
const RESOLUTION: i32 = 2000;
/// A client of one server. When the connection breaks, the client connects again and repeats the
/// calls without an answer, with the same xid.
///
/// A client has no thread. It makes progress while threads are in [`call`](Self::call),
/// [`wait`](Self::wait) or [`attend`](Self::attend): one of these threads waits for the device, and
/// the others for this thread. They also answer the calls of the server.
pub struct Client {
    address: SocketAddr,
    options: Options,
    pool: Pool,
    channel: Arc<Channel>,
    xid: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// There are no RDMA libraries, or no server answered within [`Options::connect_timeout`].
    pub fn connect(address: SocketAddr, options: &Options) -> Result<Self, Error> {
        Self::with_pool(address, options, &Pool::new())
    }

    /// Connects to a server, with an existing pool.
    ///
    /// # Errors
    /// There are no RDMA libraries, or no server answered within [`Options::connect_timeout`].
    pub fn with_pool(address: SocketAddr, options: &Options, pool: &Pool) -> Result<Self, Error> {
        let client = Self {
            address,
            options: options.clone(),
            pool: pool.clone(),
            channel: Channel::new()?,
            // Servers may remember transactions, so a restarted program must not repeat
            // transactions of its predecessor.
            xid: AtomicU32::new(xid::first()),
            state: Mutex::new(State::new(options, pool)),
            changed: Condvar::new(),
        };
        client.until(None, |state| match (&state.phase, &state.lost) {
            (Phase::Connected, _) => Some(Ok(())),
            (_, Some((since, why))) if since.elapsed() >= client.options.connect_timeout => {
                Some(Err(Error::Unreachable(why.clone())))
            }
            _ => None,
        })?;
        Ok(client)
    }

    /// The pool of memory for arguments and results.
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A new transaction id for the next call.
    pub fn xid(&self) -> u32 {
        self.xid.fetch_add(1, Relaxed)
    }

    /// Makes a call and waits for its answer.
    ///
    /// # Errors
    /// The call is invalid, has no answer, or the server is unreachable.
    pub fn call(&self, call: Call) -> Result<Answer, Error> {
        let xid = self.submit(call)?;
        self.wait(xid)
    }

    /// Sends a call and returns its xid, with which [`wait`](Self::wait) returns the answer.
    ///
    /// # Errors
    /// The call is invalid.
    pub fn submit(&self, call: Call) -> Result<u32, Error> {
        let Call {
            mut message,
            mut argument,
            mut result,
            mut max_reply,
        } = call;
        // Data that the binding does not name is part of the message (RFC 8166 §6).
        let bound = bound(&self.options.all_bindings(), &message);
        // The engine refuses an argument with an invalid offset.
        let end = message.len();
        let goes_with = |(offset, _): &mut (usize, _)| {
            bound.argument != Some(*offset) && *offset <= end && *offset % 4 == 0
        };
        if let Some((offset, bytes)) = argument.take_if(goes_with) {
            let padding = bytes.len().next_multiple_of(4) - bytes.len();
            let padded = bytes.iter().copied().chain(std::iter::repeat_n(0, padding));
            message.splice(offset..offset, padded);
        }
        if let Some(buffer) = result.take_if(|_| bound.result.is_none()) {
            max_reply += buffer.len().next_multiple_of(4);
        }
        let item = |offset, memory: Slice| {
            let len = memory.len() as u32;
            let memory: Memory = [memory].into();
            vec![Item { offset, memory, len }]
        };
        let call = engine::Call {
            message: message.into(),
            arguments: argument
                .map(|(offset, memory)| item(offset, memory))
                .unwrap_or_default(),
            results: result.map(|buffer| item(0, buffer.share())).unwrap_or_default(),
            max_reply,
        };
        let mut state = self.lock();
        // No thread waited until now.
        if state.endpoint.engine.outstanding() == 0
            && let Some((since, _)) = &mut state.lost
        {
            *since = Instant::now();
        }
        let xid = state.endpoint.engine.call(call)?;
        state.endpoint.execute_actions();
        state.take_events();
        Ok(xid)
    }

    /// Waits for the answer to a call, which is returned once.
    ///
    /// # Errors
    /// The call has no answer, or the server is unreachable.
    pub fn wait(&self, xid: u32) -> Result<Answer, Error> {
        self.until(None, |state| state.answers.remove(&xid))
    }

    /// Answers calls of the server by [`Options::callbacks`] for this time, and connects again when
    /// the connection breaks.
    pub fn attend(&self, time: Duration) {
        let end = Instant::now().checked_add(time);
        self.until(end, |_| end.filter(|end| *end <= Instant::now()).map(drop));
    }

    /// Waits for the answer to any outstanding call.
    ///
    /// # Errors
    /// No call is outstanding. The outcome of the call itself is returned with its xid.
    pub fn wait_any(&self) -> Result<(u32, Result<Answer, Error>), Error> {
        self.until(None, |state| {
            if let Some(xid) = state.answers.keys().next().copied() {
                return state.answers.remove(&xid).map(|answer| Ok((xid, answer)));
            }
            (state.endpoint.engine.outstanding() == 0)
                .then(|| Err(Error::Verbs(io::ErrorKind::NotFound.into())))
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Waits until `found` returns a value. With `end`, it is called at this time, too.
    fn until<T>(&self, end: Option<Instant>, mut found: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut state = self.lock();
        loop {
            if let Some(found) = found(&mut state) {
                return found;
            }
            if let Some(received) = state.incoming_calls.pop_front() {
                drop(state);
                let response = self.answer(&received);
                state = self.lock();
                let (call, engine) = (received.incoming.call, &mut state.endpoint.engine);
                // A call that ended with its connection needs no answer.
                let _ = match response {
                    Some(response) => engine.reply(call, &reply(response)),
                    None => engine.drop_call(call),
                };
                state.endpoint.execute_actions();
                continue;
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if state.has_leader {
                state.followers += 1;
                state = match left {
                    None => self.changed.wait(state),
                    Some(left) => self.changed.wait_timeout(state, left).0,
                };
                state.followers -= 1;
                continue;
            }
            state.has_leader = true;
            let arrived;
            (state, arrived) = self.poll_for_event(state);
            if arrived || state.endpoint.arm() {
                // The completions of `rest` may also have made events.
                state.take_events();
            } else {
                let link = state.endpoint.link().cloned();
                let timeout = state.timeout(self.options.connect_timeout);
                let timeout = timeout.into_iter().chain(left).min();
                drop(state);
                self.sleep(link.as_deref(), timeout);
                // The endpoint drops its link only below, so this is not the last reference.
                drop(link);
                state = self.lock();
                self.process_events(&mut state);
            }
            state.has_leader = false;
            if state.followers > 0 {
                self.changed.notify_all();
            }
        }
    }

    /// Polls for an answer or a call of the server, as long as polling was recently useful.
    fn poll_for_event<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        // A wait without an outstanding call may be long.
        if state.endpoint.engine.outstanding() == 0 || !matches!(state.phase, Phase::Connected) {
            return (state, false);
        }
        let start = Instant::now();
        let mut turn = 0;
        loop {
            let (before, moving) = (state.endpoint.engine.outstanding(), state.endpoint.is_moving());
            state.endpoint.progress();
            state.take_events();
            // Completions of Sends do not count.
            let arrived = state.endpoint.engine.outstanding() < before || !state.incoming_calls.is_empty();
            let time = start.elapsed();
            if arrived {
                state.adaptive_polling.succeeded(time, moving);
                return (state, true);
            }
            if state.endpoint.ended() || time >= state.adaptive_polling.time() {
                state.adaptive_polling.failed();
                return (state, false);
            }
            // Other threads need the lock for their calls.
            drop(state);
            turn += 1;
            if turn % POLLS_PER_YIELD == 0 {
                std::thread::yield_now();
            }
            state = self.lock();
        }
    }

    /// Answers a call of the server by the service.
    fn answer(&self, received: &ReceivedCall) -> Option<Response> {
        let service: &dyn Service = self.options.callbacks.as_deref()?;
        let message = received.message.bytes();
        let header = CallHeader::parse(message).ok()?;
        if !may_go_backward(&self.options.all_bindings(), &header) {
            let message = rpc::proc_unavail(header.xid);
            return Some(Response { message, item: None });
        }
        service.call(Request {
            peer: self.address,
            message,
            item: None,
            back: None,
        })
    }

    fn sleep(&self, link: Option<&Link>, timeout: Option<Duration>) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.channel.fd(), PollFlags::IN)];
        fds.extend(link.map(|link| PollFd::from_borrowed_fd(link.fd(), PollFlags::IN)));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // An interruption is a turn without events.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// Handles completions and events.
    fn process_events(&self, state: &mut State) {
        state.endpoint.progress();
        // Events are taken before the event that ends the connection.
        state.take_events();
        loop {
            match self.channel.next() {
                Ok(Some(event)) => self.handle_event(state, event),
                Ok(None) => break,
                Err(error) => {
                    state.connection_lost(format!("connection manager: {error}"));
                    break;
                }
            }
        }
        // The peer may never report the end of the connection.
        if state.is_broken() {
            state.connection_lost("the connection was given up".into());
        }
        if let Phase::Idle(then) = state.phase
            && then <= Instant::now()
        {
            self.start_connecting(state);
        }
        // One connection may be slow to answer, but all attempts together have a limit.
        if let Some((since, _)) = &state.lost
            && !matches!(state.phase, Phase::Connected)
            && since.elapsed() >= self.options.connect_timeout
        {
            for xid in state.endpoint.engine.outstanding_xids() {
                state.endpoint.engine.cancel(xid);
            }
            state.endpoint.execute_actions();
        }
        state.take_events();
    }

    fn start_connecting(&self, state: &mut State) {
        let started = Id::new(&self.channel).and_then(|id| {
            id.resolve_address(self.address, RESOLUTION)?;
            Ok(id)
        });
        match started {
            Ok(id) => state.phase = Phase::Resolving(id),
            Err(error) => state.connection_lost(error.to_string()),
        }
    }

    fn handle_event(&self, state: &mut State, event: CmEvent) {
        let ours = match &state.phase {
            Phase::Resolving(id) => id.key() == event.key,
            Phase::Connecting | Phase::Connected => state
                .endpoint
                .link()
                .is_some_and(|link| link.id().key() == event.key),
            Phase::Idle(_) => false,
        };
        if !ours {
            return;
        }
        match event.kind {
            kind::RDMA_CM_EVENT_ADDR_RESOLVED => {
                if let Phase::Resolving(id) = &state.phase
                    && let Err(error) = id.resolve_route(RESOLUTION)
                {
                    state.connection_lost(error.to_string());
                }
            }
            kind::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                if let Err(error) = self.attach(state) {
                    state.connection_lost(error.to_string());
                }
            }
            kind::RDMA_CM_EVENT_ESTABLISHED => {
                let windows = (state.endpoint.link()).is_some_and(|link| link.device().limits.windows);
                let ours = state.endpoint.private_data(windows);
                let theirs = PrivateData::find(&event.private_data).unwrap_or_default();
                state.connected(Terms::agreed(&ours, &theirs));
            }
            kind::RDMA_CM_EVENT_DISCONNECTED | kind::RDMA_CM_EVENT_DEVICE_REMOVAL => {
                state.connection_lost("the connection broke".into());
            }
            kind::RDMA_CM_EVENT_ADDR_ERROR
            | kind::RDMA_CM_EVENT_ROUTE_ERROR
            | kind::RDMA_CM_EVENT_CONNECT_ERROR
            | kind::RDMA_CM_EVENT_UNREACHABLE
            | kind::RDMA_CM_EVENT_REJECTED => {
                let errno = io::Error::from_raw_os_error(event.status.saturating_abs());
                state.connection_lost(format!("{} ({errno})", failed(event.kind)));
            }
            _ => {}
        }
    }

    fn attach(&self, state: &mut State) -> io::Result<()> {
        let Phase::Resolving(id) = std::mem::replace(&mut state.phase, Phase::Connecting) else {
            return Ok(());
        };
        let device = Arc::new(Device::of(&id, &self.pool, self.options.windows)?);
        let (limits, sends) = (device.limits, Endpoint::sends(&device));
        // One receive for each reply, and one for each call of the server. One further receive,
        // because it is posted before the reply that makes room for it is sent.
        let receives = self.options.credits + granted(&self.options).map_or(0, |granted| granted + 1);
        let link = Link::new(id, device, sends, receives)?;
        let private_data = state.endpoint.private_data(limits.windows).emit();
        state.endpoint.attach(link, receives, sends);
        match state.endpoint.link() {
            Some(link) => link.connect(&private_data, limits.reads),
            None => Ok(()),
        }
    }
}

/// The message for a failed attempt.
const fn failed(kind: kind::Type) -> &'static str {
    match kind {
        kind::RDMA_CM_EVENT_ADDR_ERROR => "no device leads to the address",
        kind::RDMA_CM_EVENT_ROUTE_ERROR => "no route leads to the address",
        kind::RDMA_CM_EVENT_REJECTED => "the server rejected the connection",
        _ => "the server does not answer",
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        state.endpoint.disconnect();
        state.endpoint.detach();
    }
}
