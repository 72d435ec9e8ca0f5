//! The socket to the server: requests and their replies, and the thread that receives messages.

use std::collections::HashMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use urnic_sync::{Condvar, Mutex};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::{Errno, IoSliceMut};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, shutdown, socket_with,
};
use urnic_vfio_user::{Decoder, Kind, Limits, Message, Request, emit_error};

use urnic_device::bus::{Signal, SignalHandler};
use urnic_process::fds::InternalFd;
use urnic_process::signals;
use urnic_process::threads;
use urnic_sys::processes;

/// A server that takes longer for one message counts as dead.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time that a wait for a reply lasts before the elapsed time is checked.
const LOOK: Duration = Duration::from_millis(100);
/// Most bytes of data in one message of the server.
pub(super) const MAX_TRANSFER: usize = 1 << 20;
/// Limits of the server's messages: data and their header; one descriptor with a region.
const LIMITS: Limits = Limits {
    message: MAX_TRANSFER + 4096,
    fds: 8,
};
/// Most descriptors in one message.
const MAX_FDS: usize = 8;
/// The epoll data of the socket; other values are vectors.
const SOCKET: u64 = u64::MAX;

/// Handles a request of the server: appends the reply to the request, with its id, or an error.
pub(super) type Answer = Box<dyn Fn(u16, Request<'_>, &mut Vec<u8>) -> Result<(), Errno> + Send + Sync>;

/// A connection to a vfio-user server.
pub(super) struct Connection {
    socket: InternalFd,
    epoll: InternalFd,
    sending: Mutex<Sending>,
    /// Requests that wait for a reply, by id; a reply stays here until it is taken.
    due: Mutex<HashMap<u16, Option<Message>>>,
    arrived: Condvar,
    vectors: OnceLock<Vec<InternalFd>>,
    handler: OnceLock<SignalHandler>,
    lost: AtomicBool,
    /// This end closes the connection: the loss is not reported.
    closing: AtomicBool,
}

#[derive(Default)]
struct Sending {
    next_id: u16,
    buffer: Vec<u8>,
}

impl Connection {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// The errors of connect(2), `EMFILE` if no fd is left.
    pub(super) fn open(path: &Path) -> Result<Connection, Errno> {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT))?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let socket = InternalFd::of_device(socket)?;
        let here = socket.get().ok_or(Errno::BADF)?;
        epoll::add(
            &events,
            here,
            epoll::EventData::new_u64(SOCKET),
            epoll::EventFlags::IN,
        )?;
        Ok(Connection {
            socket,
            epoll: InternalFd::of_device(events)?,
            sending: Mutex::default(),
            due: Mutex::default(),
            arrived: Condvar::new(),
            vectors: OnceLock::new(),
            handler: OnceLock::new(),
            lost: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        })
    }

    /// The process that listens at the other end; `None` if it has no number in this namespace.
    pub(super) fn server(&self) -> Option<rustix::process::Pid> {
        processes::peer(self.socket.get()?.as_fd()).ok()?.process
    }

    /// Starts the thread that receives messages, with all signals blocked: they are the program's.
    ///
    /// # Errors
    /// The errors of starting a thread.
    pub(super) fn start(self: &Arc<Self>, answer: Answer) -> Result<(), Errno> {
        let connection = self.clone();
        let thread = std::thread::Builder::new()
            .name("urnic-bus".to_owned())
            .stack_size(128 << 10);
        signals::blocked(|| threads::start(thread, move || connection.serve(&answer)))
            .map(drop)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
    }

    /// Whether the connection to the server is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Sets the handler of vectors and of the loss.
    pub(super) fn signals(&self, handler: SignalHandler) {
        let _ = self.handler.set(handler);
    }

    /// Waits for these eventfds, one for each vector. Called once.
    ///
    /// # Errors
    /// The errors of epoll_ctl(2).
    pub(super) fn listen(&self, vectors: Vec<InternalFd>) -> Result<(), Errno> {
        let epoll = self.epoll.get().ok_or(Errno::BADF)?;
        for (vector, fd) in vectors.iter().enumerate() {
            let fd = fd.get().ok_or(Errno::BADF)?;
            let data = epoll::EventData::new_u64(vector as u64);
            epoll::add(epoll, fd, data, epoll::EventFlags::IN)?;
        }
        let _ = self.vectors.set(vectors);
        Ok(())
    }

    /// Sends a request without a reply.
    ///
    /// # Errors
    /// `EIO`: the connection to the server ended.
    pub(super) fn post(&self, request: &Request<'_>) -> Result<(), Errno> {
        self.send(&[], |sending| {
            let id = sending.id();
            request.emit(id, true, &mut sending.buffer);
        })
    }

    /// Sends a request, and waits for the reply.
    ///
    /// # Errors
    /// The error in the server's reply; `EIO` if the connection to the server ended.
    pub(super) fn ask(&self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Result<Message, Errno> {
        let mut asked = None;
        self.send(fds, |sending| {
            let id = {
                let mut due = self.due.lock();
                // A thread may still wait for the reply to an earlier request with this id, 65536
                // requests ago.
                let mut id = sending.id();
                while due.contains_key(&id) {
                    id = sending.id();
                }
                due.insert(id, None);
                id
            };
            asked = Some(id);
            request.emit(id, false, &mut sending.buffer);
        })
        .inspect_err(|_| {
            if let Some(id) = asked {
                self.due.lock().remove(&id);
            }
        })?;
        let message = self.await_answer(asked.ok_or(Errno::IO)?)?;
        match message.header.kind {
            Kind::Reply { error: None } => Ok(message),
            Kind::Reply { error: Some(errno) } => Err(i32::try_from(errno)
                .ok()
                .filter(|errno| (1..4096).contains(errno))
                .map_or(Errno::IO, Errno::from_raw_os_error)),
            Kind::Command { .. } => Err(Errno::IO),
        }
    }

    fn await_answer(&self, id: u16) -> Result<Message, Errno> {
        let mut left = TIMEOUT;
        let mut due = self.due.lock();
        loop {
            if let Some(Some(_)) = due.get(&id) {
                return due.remove(&id).flatten().ok_or(Errno::IO);
            }
            if self.is_lost() || left.is_zero() {
                due.remove(&id);
                drop(due);
                if !self.is_lost() {
                    tracing::error!("the device's server does not answer");
                    self.shut_down();
                }
                return Err(Errno::IO);
            }
            let start = Instant::now();
            due = self.arrived.wait_timeout(due, LOOK).0;
            // A machine that was suspended meanwhile suspended the server too.
            left = left.saturating_sub(start.elapsed().min(LOOK));
        }
    }

    /// Sends the messages that `write` writes.
    fn send(&self, fds: &[BorrowedFd<'_>], write: impl FnOnce(&mut Sending)) -> Result<(), Errno> {
        if self.is_lost() {
            return Err(Errno::IO);
        }
        let mut sending = self.sending.lock();
        sending.buffer.clear();
        write(&mut sending);
        let sent = self.send_all(&sending.buffer, fds);
        drop(sending);
        sent.map_err(|_| {
            self.shut_down();
            Errno::IO
        })
    }

    fn send_all(&self, mut bytes: &[u8], mut fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let socket = self.socket.get().ok_or(Errno::IO)?;
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Errno::INVAL);
            }
            match sendmsg(
                socket,
                &[IoSlice::new(bytes)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(n) => {
                    bytes = bytes.get(n..).unwrap_or_default();
                    fds = &[];
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Shuts the socket down; the thread then handles the loss.
    fn shut_down(&self) {
        if let Some(socket) = self.socket.get() {
            let _ = shutdown(socket, Shutdown::Both);
        }
    }

    /// Stops the connection: the thread ends, and reports no loss.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.shut_down();
    }

    fn serve(&self, answer: &Answer) {
        let mut decoder = Decoder::new(LIMITS);
        let mut buffer = vec![0; 64 << 10];
        let mut events = Vec::with_capacity(16);
        'alive: while let Some(epoll) = self.epoll.get() {
            match epoll::wait(epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => break,
            }
            for event in events.drain(..) {
                match event.data.u64() {
                    SOCKET => {
                        if let Err(why) = self.receive(&mut decoder, &mut buffer, answer) {
                            if !self.closing.load(Ordering::Acquire) {
                                tracing::debug!("the connection to the device's server ends: {why}");
                            }
                            break 'alive;
                        }
                    }
                    vector => self.interrupted(vector),
                }
            }
        }
        self.lost.store(true, Ordering::Release);
        self.shut_down();
        // Threads that wait for a reply check the flag under this lock.
        drop(self.due.lock());
        self.arrived.notify_all();
        if !self.closing.load(Ordering::Acquire)
            && let Some(handler) = self.handler.get()
        {
            handler(Signal::Lost);
        }
    }

    fn interrupted(&self, vector: u64) {
        let fd = self
            .vectors
            .get()
            .and_then(|vectors| vectors.get(usize::try_from(vector).ok()?)?.get());
        let Some(fd) = fd else { return };
        let mut count = [0; 8];
        let _ = rustix::io::read(fd, &mut count);
        if let Some(handler) = self.handler.get() {
            handler(Signal::Interrupt(vector as u32));
        }
    }

    /// Receives from the socket: one read, so that interrupts are handled in between.
    fn receive(&self, decoder: &mut Decoder, buffer: &mut [u8], answer: &Answer) -> Result<(), String> {
        let socket = self.socket.get().ok_or("closed")?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut ancillary, flags);
        let len = match received {
            Ok(received) if received.bytes == 0 => return Err("closed by the server".to_owned()),
            Ok(received) => received.bytes,
            Err(Errno::INTR | Errno::AGAIN) => return Ok(()),
            Err(errno) => return Err(errno.to_string()),
        };
        let fds: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        decoder.push(buffer.get(..len).unwrap_or_default(), fds);
        for message in decoder {
            self.take(message.map_err(|error| error.to_string())?, answer)?;
        }
        Ok(())
    }

    fn take(&self, message: Message, answer: &Answer) -> Result<(), String> {
        let Kind::Command { no_reply } = message.header.kind else {
            if let Some(place) = self.due.lock().get_mut(&message.header.id) {
                *place = Some(message);
                self.arrived.notify_all();
            }
            return Ok(());
        };
        let (id, command) = (message.header.id, message.header.command);
        let mut reply = Vec::new();
        let answered = match message.request() {
            Ok(request) => answer(id, request, &mut reply),
            Err(malformed) => {
                tracing::debug!("the device's server sent nonsense: {malformed}");
                Err(Errno::INVAL)
            }
        };
        if let Err(errno) = answered {
            reply.clear();
            emit_error(id, command, errno.raw_os_error().unsigned_abs(), &mut reply);
        }
        if no_reply {
            return Ok(());
        }
        let sending = self.sending.lock();
        let sent = self.send_all(&reply, &[]);
        drop(sending);
        sent.map_err(|errno| errno.to_string())
    }
}

impl Sending {
    fn id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }
}

/// Makes an eventfd for a vector.
pub(super) fn vector() -> Result<InternalFd, Errno> {
    use rustix::event::{EventfdFlags, eventfd};
    InternalFd::of_device(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Borrows the descriptors.
pub(super) fn borrowed(fds: &[InternalFd]) -> Result<Vec<BorrowedFd<'_>>, Errno> {
    fds.iter().map(|fd| fd.get().ok_or(Errno::BADF)).collect()
}

/// The descriptor that came with a message.
pub(super) fn descriptor(message: &Message) -> Option<BorrowedFd<'_>> {
    message.fds.first().map(AsFd::as_fd)
}
