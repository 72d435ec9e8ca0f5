//! Streams in streaming mode, over which the host runs MPA start-up, and listeners.
//!
//! A stream has at most one receive of the driver and one unsent frame, and a listener a bounded
//! number of connections that the driver has not taken: peers cannot make the device grow.

mod listening;

use crate::events::Effects;
use crate::host::{Mapping, Piece, PieceMut};
use crate::schedule::{Interest, Schedule, Token};
use crate::stream::{Ends, Listener, Stream, StreamError};
use crate::table::Table;
use crate::time::Nanos;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use urnic_device::command::Status;
use urnic_device::event::{Event, EventKind};
use urnic_device::stream::{Endpoint, Endpoints, MAX_STREAMING, input};
use urnic_sync::Mutex;

/// Connections that may wait for the driver at one listener, regardless of the requested backlog.
pub(crate) const MAX_PENDING: u32 = 1024;

/// All streams in streaming mode, and all listeners.
#[derive(Debug)]
pub(crate) struct Streams {
    streams: Table<Streaming>,
    listeners: Table<Listening>,
}

/// A stream in streaming mode.
#[derive(Debug)]
struct Streaming {
    sid: u32,
    /// The listener that accepted the stream; cleared when the driver first names the stream.
    untouched: Mutex<Option<Arc<Listening>>>,
    state: Mutex<StreamingState>,
}

#[derive(Debug)]
struct StreamingState {
    /// The stream; `None` after it is attached or closed.
    stream: Option<Box<dyn Stream>>,
    connecting: bool,
    /// A command on the stream is not complete yet; events of the stream are handled after it.
    command_pending: bool,
    receive: Option<Receive>,
    /// Bytes that the stream has not taken yet.
    unsent: Vec<u8>,
}

/// A receive of at most the buffer's length.
#[derive(Debug)]
struct Receive {
    buffer: Mapping,
    /// The number of bytes with which the receive ends.
    least: usize,
    arrived: usize,
}

#[derive(Debug)]
struct Listening {
    lid: u32,
    limit: u32,
    /// Connections that were accepted, and that the driver has not named yet.
    pending: AtomicU32,
    /// Whether connections may wait that were not accepted because there was no room.
    paused: AtomicBool,
    /// Whether the missing room is the system's, and this was already reported.
    starved: AtomicBool,
    listeners: Mutex<Vec<Box<dyn Listener>>>,
}

/// The status of a command that the network refuses with `errno`.
pub(crate) fn status(errno: Errno) -> Status {
    if matches!(errno, Errno::MFILE | Errno::NFILE) {
        // The program only gets ENOMEM.
        tracing::warn!(
            "no socket for a command: {errno}: raise the limit on open files, as by `ulimit -n \"$(ulimit -Hn)\"`"
        );
    }
    match errno {
        Errno::ADDRINUSE => Status::AddressInUse,
        Errno::ADDRNOTAVAIL => Status::AddressNotAvailable,
        Errno::NETUNREACH | Errno::HOSTUNREACH => Status::Unreachable,
        Errno::ACCESS | Errno::PERM => Status::Denied,
        Errno::INVAL | Errno::AFNOSUPPORT => Status::InvalidArgument,
        _ => Status::NoResources,
    }
}

/// Whether the command itself fails. Otherwise a connection begins and then ends.
fn is_refusal(errno: Errno) -> bool {
    !matches!(errno, Errno::CONNREFUSED | Errno::CONNRESET | Errno::TIMEDOUT)
}

fn code(errno: Errno) -> u16 {
    u16::try_from(errno.raw_os_error()).unwrap_or(u16::MAX)
}

impl Streams {
    pub(crate) fn new(limit: u32) -> Streams {
        Streams {
            streams: Table::new(limit),
            listeners: Table::new(limit),
        }
    }

    /// Begins to connect. An event reports success or failure; a stream that failed is removed
    /// after that event.
    pub(crate) fn connect(
        &self,
        schedule: &Schedule,
        begun: Result<Box<dyn Stream>, Errno>,
        effects: &mut Effects,
    ) -> Result<u32, Status> {
        // A connection to a peer nearby may be established, or refused, by now. If it is neither,
        // room for output will show that it is.
        let begun = begun.map(|mut stream| (stream.established(), stream));
        let (interest, stream, failed) = match begun {
            Ok((Ok(true), stream)) => (Interest::Input, Some(stream), None),
            Ok((Ok(false), stream)) => (Interest::InputAndRoom, Some(stream), None),
            Err(errno) if is_refusal(errno) => return Err(status(errno)),
            Err(errno) | Ok((Err(errno), _)) => (Interest::Input, None, Some(errno)),
        };
        let entry = self.insert(schedule, stream, None, Some(interest))?;
        if let Some(errno) = failed {
            self.streams.remove(entry.sid);
            effects.event(Event::new(EventKind::StreamConnected, entry.sid).with_code(code(errno)));
        }
        effects.check_stream(entry.sid);
        Ok(entry.sid)
    }

    fn insert(
        &self,
        schedule: &Schedule,
        stream: Option<Box<dyn Stream>>,
        accepted_by: Option<Arc<Listening>>,
        connecting: Option<Interest>,
    ) -> Result<Arc<Streaming>, Status> {
        let interest = connecting.unwrap_or(Interest::Input);
        let connecting = connecting.is_some();
        let entry = self.streams.insert_with(Status::NoResources, |sid| {
            Ok(Streaming {
                sid,
                untouched: Mutex::new(accepted_by),
                state: Mutex::new(StreamingState {
                    stream,
                    connecting,
                    command_pending: connecting,
                    receive: None,
                    unsent: Vec::new(),
                }),
            })
        })?;
        let state = entry.state.lock();
        if let Some(fd) = state.stream.as_ref().and_then(|s| s.descriptor())
            && schedule.watch(fd, Token::Stream(entry.sid), interest).is_err()
        {
            drop(state);
            self.streams.remove(entry.sid);
            return Err(Status::NoResources);
        }
        drop(state);
        Ok(entry)
    }

    /// The stream that a command of the driver names.
    fn touch(&self, schedule: &Schedule, sid: u32, effects: &mut Effects) -> Result<Arc<Streaming>, Status> {
        let entry = self.streams.find(sid).ok_or(Status::InvalidHandle)?.clone();
        let accepted_by = entry.untouched.lock().take();
        if let Some(listening) = accepted_by {
            listening.pending.fetch_sub(1, Ordering::SeqCst);
            if listening.paused.load(Ordering::SeqCst) {
                self.accept(schedule, listening.lid, effects);
            }
        }
        Ok(entry)
    }

    /// Sends in streaming mode. Bytes that the stream does not take at once are sent later; no
    /// other send is possible until then.
    pub(crate) fn send(
        &self,
        schedule: &Schedule,
        sid: u32,
        bytes: &[u8],
        now: Nanos,
        effects: &mut Effects,
    ) -> Result<(), Status> {
        let entry = self.touch(schedule, sid, effects)?;
        let mut state = entry.state.lock();
        if state.stream.is_none() || state.connecting {
            return Err(Status::WrongState);
        }
        if !state.unsent.is_empty() {
            return Err(Status::Busy);
        }
        state.unsent.extend_from_slice(bytes);
        // The driver detects an error when it receives.
        let _ = state.flush(sid, now, effects);
        if !state.unsent.is_empty()
            && let Some(fd) = state.stream.as_ref().and_then(|s| s.descriptor())
        {
            schedule.rewatch(fd, Token::Stream(sid), Interest::InputAndRoom);
        }
        Ok(())
    }

    /// Receives at most the buffer's length, and at least `least` bytes, in streaming mode; an
    /// event reports completion.
    pub(crate) fn receive(
        &self,
        schedule: &Schedule,
        sid: u32,
        (buffer, least): (Mapping, usize),
        effects: &mut Effects,
    ) -> Result<(), Status> {
        let entry = self.touch(schedule, sid, effects)?;
        let mut state = entry.state.lock();
        if state.stream.is_none() || state.connecting {
            return Err(Status::WrongState);
        }
        if state.receive.is_some() {
            return Err(Status::Busy);
        }
        state.receive = Some(Receive {
            buffer,
            least,
            arrived: 0,
        });
        state.command_pending = true;
        effects.check_stream(sid);
        Ok(())
    }

    /// Our address and the peer's, and the available input.
    pub(crate) fn query(
        &self,
        schedule: &Schedule,
        sid: u32,
        effects: &mut Effects,
    ) -> Result<Endpoints, Status> {
        let entry = self.touch(schedule, sid, effects)?;
        let mut state = entry.state.lock();
        let connecting = state.connecting;
        let stream = state.stream.as_mut().ok_or(Status::WrongState)?;
        let input = match stream.peek() {
            _ if connecting => input::NONE,
            Ok(true) => input::BYTES,
            Err(StreamError::WouldBlock | StreamError::Fault) => input::NONE,
            Ok(false) | Err(StreamError::Closed(_)) => input::END,
        };
        let Ends { local, remote } = stream.ends();
        Ok(Endpoints {
            local: Endpoint::from(local),
            remote: Endpoint::from(remote),
            input: input.into(),
        })
    }

    /// Closes a stream: by RST, or by FIN after the bytes that were sent. `linger` handles the
    /// second case.
    pub(crate) fn close(
        &self,
        schedule: &Schedule,
        sid: u32,
        abort: bool,
        effects: &mut Effects,
        linger: impl FnOnce(Box<dyn Stream>, Vec<u8>),
    ) -> Result<(), Status> {
        let entry = self.touch(schedule, sid, effects)?;
        self.streams.remove(sid);
        let mut state = entry.state.lock();
        state.receive = None;
        let Some(mut stream) = state.stream.take() else {
            return Ok(());
        };
        if abort || state.connecting {
            stream.reset();
        } else {
            let unsent = std::mem::take(&mut state.unsent);
            drop(state);
            linger(stream, unsent);
        }
        Ok(())
    }

    /// Hands a stream over: RDMA mode begins. `attach` takes the stream unless it fails. The
    /// argument of `attach` is whether the other end belongs to another stream of this device.
    pub(crate) fn hand_over(
        &self,
        schedule: &Schedule,
        sid: u32,
        effects: &mut Effects,
        attach: impl FnOnce(&mut Option<Box<dyn Stream>>, bool, &mut Effects) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let entry = self.touch(schedule, sid, effects)?;
        let ends = entry.state.lock().ends();
        let awaited = ends.is_some_and(|ends| self.has_stream(ends.reversed()));
        let mut state = entry.state.lock();
        let idle = state.receive.is_none() && state.unsent.is_empty() && !state.connecting;
        if !idle || state.stream.is_none() {
            return Err(Status::WrongState);
        }
        attach(&mut state.stream, awaited, effects)?;
        self.streams.remove(sid);
        Ok(())
    }

    /// Whether a stream of this device in streaming mode has these ends. `false` if there is only
    /// one stream, which has these ends.
    fn has_stream(&self, ends: Ends) -> bool {
        ends.local.ip() == ends.remote.ip()
            && self.streams.len() > 1
            && (self.streams.all().iter()).any(|entry| entry.state.lock().ends() == Some(ends))
    }

    /// Continues a stream after a command on it is complete.
    pub(crate) fn resume(&self, sid: u32, now: Nanos, effects: &mut Effects) {
        if let Some(entry) = self.streams.find(sid) {
            entry.state.lock().command_pending = false;
            self.poll(sid, now, effects);
        }
    }

    /// Continues the current operation of a stream after a possible event.
    pub(crate) fn poll(&self, sid: u32, now: Nanos, effects: &mut Effects) {
        let Some(entry) = self.streams.find(sid) else {
            return;
        };
        let mut state = entry.state.lock();
        if state.command_pending {
            return;
        }
        if state.connecting {
            let Some(stream) = &mut state.stream else {
                return;
            };
            let event = Event::new(EventKind::StreamConnected, sid);
            match stream.established() {
                Ok(false) => return,
                Ok(true) => {
                    state.connecting = false;
                    effects.event(event);
                }
                Err(errno) => {
                    state.stream = None;
                    self.streams.remove(sid);
                    effects.event(event.with_code(code(errno)));
                    return;
                }
            }
        }
        let sent = state.flush(sid, now, effects);
        state.fill(sid, effects);
        // Nothing receives on this stream, so nothing else would detect the failure.
        if let Err(errno) = sent
            && state.receive.is_none()
            && state.stream.take().is_some()
        {
            self.streams.remove(sid);
            effects.event(Event::new(EventKind::StreamClosed, sid).with_code(code(errno)));
        }
    }

    /// Polls all listeners and streams once, for networks that do not report readiness.
    pub(crate) fn poll_all(&self, schedule: &Schedule, now: Nanos, effects: &mut Effects) {
        for entry in self.listeners.all() {
            self.accept(schedule, entry.lid, effects);
        }
        for entry in self.streams.all() {
            self.poll(entry.sid, now, effects);
        }
    }

    /// Stops all listeners, and closes all streams in an orderly way, by `linger`.
    pub(crate) fn close_all(&self, linger: impl Fn(Box<dyn Stream>, Vec<u8>)) {
        for entry in self.listeners.drain() {
            entry.listeners.lock().clear();
        }
        for entry in self.streams.drain() {
            let mut state = entry.state.lock();
            state.receive = None;
            let unsent = std::mem::take(&mut state.unsent);
            match state.stream.take() {
                Some(stream) if !state.connecting => linger(stream, unsent),
                _ => {}
            }
        }
    }

    /// Resets all streams and stops all listeners.
    pub(crate) fn clear(&self) {
        for entry in self.listeners.drain() {
            entry.listeners.lock().clear();
        }
        for entry in self.streams.drain() {
            let mut state = entry.state.lock();
            state.receive = None;
            if let Some(mut stream) = state.stream.take() {
                stream.reset();
            }
        }
    }
}

impl StreamingState {
    /// The addresses of this end and of the peer's end.
    fn ends(&self) -> Option<Ends> {
        self.stream.as_ref().map(|stream| stream.ends())
    }

    /// Sends the remaining bytes, and lets delayed bytes of the stream continue.
    fn flush(&mut self, sid: u32, now: Nanos, effects: &mut Effects) -> Result<(), Errno> {
        self.advance(sid, now, effects);
        self.flush_unsent()?;
        self.advance(sid, now, effects);
        Ok(())
    }

    fn advance(&mut self, sid: u32, now: Nanos, effects: &mut Effects) {
        let due = self.stream.as_mut().and_then(|stream| stream.advance(now));
        if let Some(due) = due {
            effects.check_stream_at(due, sid);
        }
    }

    fn flush_unsent(&mut self) -> Result<(), Errno> {
        while !self.unsent.is_empty()
            && let Some(stream) = &mut self.stream
        {
            match stream.send(&[Piece::of(&self.unsent)]) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(StreamError::WouldBlock) => return Ok(()),
                Err(StreamError::Closed(errno)) => return Err(errno),
                Err(StreamError::Fault) => return Err(Errno::FAULT),
            }
        }
        Ok(())
    }

    /// Continues the receive. The event of the receive reports how many bytes arrived, and the
    /// errno if the stream failed.
    fn fill(&mut self, sid: u32, effects: &mut Effects) {
        let (Some(stream), Some(receive)) = (&mut self.stream, &mut self.receive) else {
            return;
        };
        let failed = loop {
            let wanted = receive.buffer.len() - receive.arrived;
            if wanted == 0 || stream.carries_messages() && receive.arrived > 0 {
                break 0;
            }
            // Streaming mode is no fast path, and the buffer may be in a guest: received here, then
            // copied.
            let mut bytes = [0u8; MAX_STREAMING as usize];
            match stream.receive(&mut [PieceMut::of(&mut bytes[..wanted])]) {
                Ok(0) => break 0,
                Ok(n) => {
                    receive.buffer.copy_in(receive.arrived, &bytes[..n]);
                    receive.arrived += n;
                }
                Err(StreamError::WouldBlock) if receive.arrived >= receive.least => break 0,
                Err(StreamError::WouldBlock) => return,
                Err(StreamError::Closed(errno)) => break code(errno),
                Err(StreamError::Fault) => break code(Errno::FAULT),
            }
        };
        let event = Event::new(EventKind::StreamReceived, sid)
            .with_code(failed)
            .with_data(receive.arrived as u64);
        effects.event(event);
        self.receive = None;
    }
}
