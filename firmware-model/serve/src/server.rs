//! The sockets at which clients connect to functions.
//!
//! Clients can make the threads of their sessions wait (see [`passed`](super::passed)), and stay
//! connected. The server's thread never waits for a client. A session whose client has gone is
//! interrupted until it ends; after [`OVERDUE`] its place goes to another client, for a limited
//! number of sessions of each user. The end of the server waits at most [`STOP`].

use super::closer::Closer;
use super::config_space::MAX_VECTORS;
use super::endpoint::Endpoint;
use super::interruption::Interruptible;
use super::link::{MAX_FDS_IN_TRANSIT, is_hung_up};
use super::memory::Budget;
use super::session::Session;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fs::{Mode, chmod, lstat, unlink};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use rustix::process::{Resource, getrlimit};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use urnic_sys::processes;

/// Interval at which sessions that should end are checked.
const TICK: Duration = Duration::from_millis(100);
/// After this time a session whose client has gone no longer occupies a place.
const OVERDUE: Duration = Duration::from_secs(5);
/// Maximum numbers of overdue sessions, of one user and of all users. Beyond them the places stay
/// taken, and the user gets no function.
const MAX_OVERDUE_OF_USER: usize = 4;
const MAX_OVERDUE: usize = 64;
/// Maximum wait for sessions when the server ends. Data that has completed takes some of that time
/// to arrive.
const STOP: Duration = Duration::from_secs(10);
/// A session that has not ended this long after it was requested to end loses its client's socket,
/// too.
const CUT_OFF: Duration = Duration::from_secs(1);

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another server serves the socket.
    #[error("{}: another server serves this socket; stop it, or choose another path", .0.display())]
    Live(PathBuf),
    /// A file that is not a socket is at the path.
    #[error("{}: a file that is not a socket has this name; remove it, or choose another path", .0.display())]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("{}: {}", .0.display(), io::Error::from(*.1))]
    System(PathBuf, Errno),
    /// The process has no free descriptor.
    #[error("cannot serve: {}", io::Error::from(*.0))]
    Process(Errno),
}

/// A socket file that this server made. It is removed on drop if it is still the same file.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode number.
    identity: (u64, u64),
}

fn identity(path: &Path) -> Result<(u64, u64), Errno> {
    lstat(path).map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path) == Ok(self.identity) {
            let _ = unlink(&self.path);
        }
    }
}

/// A running session and its thread. The thread owns the session, which is dropped when the thread
/// ends, so that a client's memory is released at once.
struct Running {
    session: Weak<Session>,
    thread: JoinHandle<()>,
    threads: Arc<Interruptible>,
    user: Option<u32>,
    /// The time since which the session is to end.
    leaving: Option<Instant>,
}

impl Running {
    /// Whether the client has gone, or the session has been requested to end. The threads of such a
    /// session are interrupted.
    fn is_leaving(&mut self) -> bool {
        let leaves = || self.session.upgrade().is_none_or(|session| session.is_leaving());
        if self.leaving.is_none() && leaves() {
            self.leaving = Some(Instant::now());
        }
        if self.leaving.is_some_and(|since| since.elapsed() >= TICK) {
            self.threads.interrupt();
        }
        self.leaving.is_some()
    }

    fn is_overdue(&self) -> bool {
        self.leaving.is_some_and(|since| since.elapsed() >= OVERDUE)
    }
}

struct Listener {
    socket: OwnedFd,
    _file: SocketFile,
    endpoint: Endpoint,
    sessions: Vec<Running>,
    /// Clients that connected while a session whose client has gone still held the function: each
    /// waits for the end of one such session.
    waiting: VecDeque<OwnedFd>,
}

/// A vfio-user server.
pub struct Server {
    listeners: Vec<Listener>,
    budget: Arc<Budget>,
    /// An eventfd that each ended session writes.
    ended: Arc<OwnedFd>,
    closer: Closer,
}

/// Notifies the server of a session's end when dropped.
struct NotifyOnDrop(Arc<OwnedFd>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Number of descriptors of the process itself: sockets, signals, logs.
const PROCESS_FDS: usize = 64;
/// Number of descriptors of a function that do not depend on its driver's commands: socket, wakes,
/// doorbell pages, the client's process.
const FUNCTION_FDS: usize = 8;
/// Descriptors that a function should have (with fewer it is of little use), and the minimum that
/// it gets.
const WANTED: usize = 64;
const FEWEST: usize = 8;

/// How many of the process's descriptors each function's device gets, so that no function can
/// exhaust the descriptors of the others.
fn descriptor_share(limit: Option<u64>, functions: usize, vectors: usize) -> u32 {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else {
        return u32::MAX;
    };
    let functions = functions.max(1);
    let fixed = PROCESS_FDS + functions * (FUNCTION_FDS + vectors + MAX_FDS_IN_TRANSIT);
    let left = limit.saturating_sub(fixed);
    if left < functions * WANTED {
        tracing::warn!(
            "{limit} descriptors (ulimit -n) are few for {functions} clients: raise that, or take fewer (--clients)"
        );
    }
    // Half is distributed in any case: clients rarely have that many in transit.
    let share = left.max(limit / 2) / functions;
    u32::try_from(share.max(FEWEST)).unwrap_or(u32::MAX)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes the socket file that an ended server left at a path.
fn clear(path: &Path, address: &SocketAddrUnix) -> Result<(), ServeError> {
    let failed = |errno| ServeError::System(path.to_owned(), errno);
    let stat = match lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        stat => stat.map_err(failed)?,
    };
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Err(ServeError::NoSocket(path.to_owned()));
    }
    match connect(&new_socket().map_err(failed)?, address) {
        Err(Errno::CONNREFUSED) => unlink(path).map_err(failed),
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN) => Err(ServeError::Live(path.to_owned())),
        Err(errno) => Err(failed(errno)),
    }
}

impl Listener {
    fn new(mut endpoint: Endpoint) -> Result<Listener, ServeError> {
        endpoint.config.doorbell_memory = true;
        // A BAR's length is a power of two, and the MSI-X table has a fixed size.
        endpoint.config.limits.uars = endpoint.config.limits.uars.next_power_of_two();
        endpoint.config.vectors = endpoint.config.vectors.clamp(1, MAX_VECTORS);
        let path = endpoint.path.clone();
        let failed = |errno| ServeError::System(path.clone(), errno);
        let address = SocketAddrUnix::new(&path).map_err(failed)?;
        clear(&path, &address)?;
        let socket = new_socket().map_err(failed)?;
        bind(&socket, &address).map_err(failed)?;
        let file = SocketFile {
            identity: identity(&path).map_err(failed)?,
            path: path.clone(),
        };
        // No client can connect before `listen`, so the process's umask has no effect.
        chmod(&path, Mode::from_raw_mode(endpoint.mode)).map_err(failed)?;
        listen(&socket, 64).map_err(failed)?;
        Ok(Listener {
            socket,
            _file: file,
            endpoint,
            sessions: Vec::new(),
            waiting: VecDeque::new(),
        })
    }

    /// Accepts a client, or rejects it if the maximum number of clients is reached.
    fn accept(&mut self, closer: &Closer, overdue: &[Option<u32>]) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.socket, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(errno) => {
                tracing::warn!("cannot take a client: {}", io::Error::from(errno));
                // No descriptor is free: a client must disconnect before a retry can succeed.
                std::thread::sleep(std::time::Duration::from_millis(50));
                return;
            }
        };
        let (staying, gone) = self.waiting.drain(..).partition(|s| !is_hung_up(s.as_fd()));
        self.waiting = staying;
        let gone: VecDeque<OwnedFd> = gone;
        gone.into_iter().for_each(|socket| closer.close(socket));
        let user = user_of(&socket);
        let mut staying = 0;
        for session in &mut self.sessions {
            staying += usize::from(!session.is_leaving());
        }
        let refused = if overdue.iter().filter(|of| **of == user).count() >= MAX_OVERDUE_OF_USER {
            format!(
                "{MAX_OVERDUE_OF_USER} sessions of its user (uid {user:?}) do not end: they wait for descriptors that clients passed"
            )
        } else if staying + self.waiting.len() >= self.endpoint.clients {
            format!("there are {} already", self.endpoint.clients)
        } else {
            self.waiting.push_back(socket);
            return;
        };
        tracing::warn!(path = %self.endpoint.path.display(), "a client was sent away: {refused}");
        closer.close(socket);
    }

    /// Removes sessions that have ended, and serves clients that waited for their places.
    fn admit(&mut self, budget: &Arc<Budget>, ended: &Arc<OwnedFd>, closer: &Closer, overdue: usize) {
        // A thread drops its session after all steps that may wait, so the thread itself ends at
        // once.
        self.sessions.retain(|running| running.session.strong_count() > 0);
        let mut places = self.endpoint.clients;
        if overdue <= MAX_OVERDUE {
            places += self.sessions.iter().filter(|s| s.is_overdue()).count();
        }
        while self.sessions.len() < places
            && let Some(socket) = self.waiting.pop_front()
        {
            match self.serve(socket, budget.clone(), ended.clone(), closer) {
                Ok(started) => self.sessions.push(started),
                Err(error) => tracing::warn!("cannot serve a client: {error}"),
            }
        }
    }

    /// Starts a client's session. If that is not possible, the closer gets the socket.
    fn serve(
        &self,
        socket: OwnedFd,
        budget: Arc<Budget>,
        ended: Arc<OwnedFd>,
        closer: &Closer,
    ) -> io::Result<Running> {
        let user = user_of(&socket);
        let session = Session::new(socket, &self.endpoint, budget).map_err(|(errno, socket)| {
            closer.close(socket);
            errno
        })?;
        let of_thread = session.clone();
        let thread = std::thread::Builder::new()
            .name("urnic-function".to_owned())
            .spawn(move || {
                let _notify = NotifyOnDrop(ended);
                // Dropped first, after a panic too.
                let session = of_thread;
                session.run();
            });
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => {
                session.cut_off();
                closer.drop_owner(Box::new(session));
                return Err(error);
            }
        };
        Ok(Running {
            session: Arc::downgrade(&session),
            thread,
            threads: session.threads(),
            user,
            leaving: None,
        })
    }
}

impl Server {
    /// Opens the sockets.
    ///
    /// # Errors
    ///
    /// A socket cannot be opened. No socket stays open then.
    pub fn bind(endpoints: Vec<Endpoint>) -> Result<Server, ServeError> {
        let functions = endpoints.iter().map(|endpoint| endpoint.clients).sum();
        let limit = getrlimit(Resource::Nofile).current;
        let listeners = endpoints
            .into_iter()
            .map(|mut endpoint| {
                let vectors = endpoint.config.vectors.clamp(1, MAX_VECTORS);
                let share = descriptor_share(limit, functions, vectors as usize);
                let limits = &mut endpoint.config.limits;
                limits.descriptors = limits.descriptors.min(share);
                Listener::new(endpoint)
            })
            .collect::<Result<_, _>>()?;
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Server {
            listeners,
            budget: Budget::new(functions),
            ended: Arc::new(ended.map_err(ServeError::Process)?),
            closer: Closer::start()
                .map_err(|error| ServeError::Process(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?,
        })
    }

    /// Serves until `stop` is readable; then the clients lose their functions, and the socket files
    /// are removed.
    pub fn run(mut self, stop: BorrowedFd<'_>) {
        loop {
            let mut fds = vec![
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::new(&self.ended, PollFlags::IN),
            ];
            let full = self.closer.is_full();
            if !full {
                let sockets = self.listeners.iter().map(|listener| &listener.socket);
                fds.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
            }
            super::link::wait(&mut fds, self.is_expecting().then_some(TICK));
            let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                break;
            }
            ready.drain(..2);
            // Before the sessions are checked: a session that ends from now on makes it readable
            // again.
            let _ = rustix::io::read(&self.ended, &mut [0u8; 8]);
            self.closer.interrupt_if_busy();
            let overdue = self.overdue();
            ready.resize(self.listeners.len(), false);
            for (listener, ready) in self.listeners.iter_mut().zip(ready) {
                if ready {
                    listener.accept(&self.closer, &overdue);
                }
                for session in &mut listener.sessions {
                    if session.leaving.is_some() {
                        session.is_leaving();
                    }
                }
                listener.admit(&self.budget, &self.ended, &self.closer, overdue.len());
            }
        }
        self.stop();
    }

    /// Whether a session or the closer must be checked again soon.
    fn is_expecting(&self) -> bool {
        let mut sessions = self.listeners.iter().flat_map(|listener| &listener.sessions);
        self.closer.is_busy() || sessions.any(|session| session.leaving.is_some())
    }

    /// The users of the overdue sessions.
    fn overdue(&self) -> Vec<Option<u32>> {
        let sessions = self.listeners.iter().flat_map(|listener| &listener.sessions);
        let overdue = sessions.filter(|s| s.is_overdue() && !s.thread.is_finished());
        overdue.map(|session| session.user).collect()
    }

    /// Ends all sessions, and waits for them up to [`STOP`].
    fn stop(self) {
        let begun = Instant::now();
        let mut sessions = Vec::new();
        for listener in self.listeners {
            // No client can find the socket any more; connections not yet accepted are closed with
            // it.
            drop(listener._file);
            self.closer.close(listener.socket);
            let waiting = listener.waiting.into_iter();
            waiting.for_each(|socket| self.closer.close(socket));
            sessions.extend(listener.sessions);
        }
        for session in &mut sessions {
            session.leaving.get_or_insert(begun);
            if let Some(session) = session.session.upgrade() {
                session.stop();
            }
        }
        let mut closer = Some(self.closer);
        loop {
            sessions.retain(|running| !running.thread.is_finished());
            closer = closer.and_then(|closer| closer.finish().err());
            if sessions.is_empty() && closer.is_none() {
                return;
            }
            if begun.elapsed() >= STOP {
                break;
            }
            for running in &mut sessions {
                running.is_leaving();
                if begun.elapsed() >= CUT_OFF
                    && let Some(session) = running.session.upgrade()
                {
                    session.cut_off();
                }
            }
            if let Some(closer) = &closer {
                closer.interrupt_if_busy();
            }
            // A session that ends meanwhile ends the wait.
            let _ = rustix::io::read(&self.ended, &mut [0u8; 8]);
            super::link::wait(&mut [PollFd::new(&self.ended, PollFlags::IN)], Some(TICK));
        }
        tracing::warn!(
            "{} sessions do not end: they wait for descriptors that clients passed, or for memory of theirs",
            sessions.len()
        );
    }
}

/// The user of the process that connected.
fn user_of(socket: &OwnedFd) -> Option<u32> {
    processes::peer(socket.as_fd()).ok().map(|peer| peer.user)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_equal_shares_of_the_descriptors() {
        let vectors = 9;
        let fixed = |functions| PROCESS_FDS + functions * (FUNCTION_FDS + vectors + MAX_FDS_IN_TRANSIT);
        for (limit, functions) in [(1 << 20, 16), (1 << 20, 1), (4096, 4)] {
            let share = descriptor_share(Some(limit as u64), functions, vectors) as usize;
            assert!(
                share * functions + fixed(functions) <= limit,
                "{limit} for {functions}"
            );
            assert!(share >= limit / 2 / functions, "{limit} for {functions}");
        }
        assert_eq!(descriptor_share(Some(1024), 16, vectors), 32);
        assert_eq!(descriptor_share(Some(256), 1024, vectors), FEWEST as u32);
        assert_eq!(descriptor_share(None, 16, vectors), u32::MAX);
    }
}
