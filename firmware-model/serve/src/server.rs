//! The sockets at which clients ask for functions.
//!
//! Clients can make the threads of their sessions wait (see [`passed`](super::passed)), and stay.
//! The thread here never waits for one: a session whose client has gone is interrupted until it
//! ends; after [`OVERDUE`] its place goes to another client, a few times over for each user, and
//! the end of the server waits for [`STOP`] at the longest.

use super::closer::Closer;
use super::config_space::MAX_VECTORS;
use super::endpoint::Endpoint;
use super::interruption::Interruptible;
use super::link::{MAX_FDS_UNDER_WAY, is_hung_up};
use super::memory::Budget;
use super::session::Session;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fs::{Mode, chmod, lstat, unlink};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
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

/// How often sessions that should end are looked at.
const TICK: Duration = Duration::from_millis(100);
/// A session that has not ended so long after its client has gone keeps nobody from its place any
/// more.
const OVERDUE: Duration = Duration::from_secs(5);
/// Such sessions of one user, and of all: with more their places stay taken, and the user gets no
/// function.
const MAX_OVERDUE_OF_USER: usize = 4;
const MAX_OVERDUE: usize = 64;
/// Longest wait for sessions when the server ends. What has completed takes some of that to arrive.
const STOP: Duration = Duration::from_secs(10);
/// A session that has not ended so long after it was told to loses its client's socket, too.
const CUT_OFF: Duration = Duration::from_secs(1);

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Somebody serves it.
    #[error("{}: a server is there already; stop it, or choose another path", .0.display())]
    Live(PathBuf),
    /// Something else is there.
    #[error("{}: there is something that is no socket; remove it, or choose another path", .0.display())]
    NoSocket(PathBuf),
    /// The kernel says no.
    #[error("{}: {}", .0.display(), io::Error::from(*.1))]
    System(PathBuf, Errno),
    /// The kernel has no descriptor left for this process.
    #[error("cannot serve: {}", io::Error::from(*.0))]
    Process(Errno),
}

/// A socket file of ours; removed when dropped, if it is still ours.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode.
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

/// A session and its thread, to which it belongs: it goes with that, so that a client's memory is
/// let go at once.
struct Running {
    session: Weak<Session>,
    thread: JoinHandle<()>,
    threads: Arc<Interruptible>,
    user: Option<u32>,
    /// Since when it is to end.
    leaving: Option<Instant>,
}

impl Running {
    /// Whether the client has gone, or the session has been told to end. What is left of such a
    /// session is interrupted.
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
    /// Clients that came while one that has left still had its function: each waits for the end of
    /// one such session.
    waiting: VecDeque<OwnedFd>,
}

/// A vfio-user server.
pub struct Server {
    listeners: Vec<Listener>,
    budget: Arc<Budget>,
    /// Written by each session that has ended.
    ended: Arc<OwnedFd>,
    closer: Closer,
}

/// Tells the server of a session's end.
struct Told(Arc<OwnedFd>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Descriptors of the process itself: sockets, signals, logs.
const OF_THE_PROCESS: usize = 64;
/// Descriptors of a function that no command of its driver makes more of: socket, wakes, doorbell
/// pages, the client's process.
const OF_A_FUNCTION: usize = 8;
/// A function with fewer is of little use, and with less than the fewest of none.
const WANTED: usize = 64;
const FEWEST: usize = 8;

/// How many of the descriptors that the process may have each function's device gets, so that none
/// can leave the others without.
fn descriptor_share(limit: Option<u64>, functions: usize, vectors: usize) -> u32 {
    let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else {
        return u32::MAX;
    };
    let functions = functions.max(1);
    let fixed = OF_THE_PROCESS + functions * (OF_A_FUNCTION + vectors + MAX_FDS_UNDER_WAY);
    let left = limit.saturating_sub(fixed);
    if left < functions * WANTED {
        tracing::warn!(
            "{limit} descriptors (ulimit -n) are few for {functions} clients: raise that, or take fewer (--clients)"
        );
    }
    // Half is shared out in any case: clients hardly ever have so many under way.
    let share = left.max(limit / 2) / functions;
    u32::try_from(share.max(FEWEST)).unwrap_or(u32::MAX)
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes what a dead server left at a path.
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
        // A BAR's length is a power of two, and the MSI-X table has so much room.
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
        // Nobody can connect before `listen`, whatever the process's umask was.
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

    /// Takes a client, or sends it away if there are as many as there may be.
    fn accept(&mut self, closer: &Closer, overdue: &[Option<u32>]) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.socket, flags) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(errno) => {
                tracing::warn!("cannot take a client: {}", io::Error::from(errno));
                // There is no descriptor left: some client must go before this can be tried again.
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

    /// Forgets sessions that have ended, and serves those that waited for their places.
    fn admit(&mut self, budget: &Arc<Budget>, ended: &Arc<OwnedFd>, overdue: usize) {
        // Its last word is behind all that may wait; the thread itself is joined in no time.
        self.sessions.retain(|running| running.session.strong_count() > 0);
        let mut places = self.endpoint.clients;
        if overdue <= MAX_OVERDUE {
            places += self.sessions.iter().filter(|s| s.is_overdue()).count();
        }
        while self.sessions.len() < places
            && let Some(socket) = self.waiting.pop_front()
        {
            match self.serve(socket, budget.clone(), ended.clone()) {
                Ok(started) => self.sessions.push(started),
                Err(error) => tracing::warn!("cannot serve a client: {error}"),
            }
        }
    }

    fn serve(&self, socket: OwnedFd, budget: Arc<Budget>, ended: Arc<OwnedFd>) -> io::Result<Running> {
        let user = user_of(&socket);
        let session = Session::new(socket, &self.endpoint, budget)?;
        let (handle, threads) = (Arc::downgrade(&session), session.threads());
        let thread = std::thread::Builder::new()
            .name("urnic-function".to_owned())
            .spawn(move || {
                let _told = Told(ended);
                // Dropped first, by a panic too.
                let session = session;
                session.run();
            })?;
        Ok(Running {
            session: handle,
            thread,
            threads,
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
    /// One of them cannot be opened; none is then.
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
            // Before the sessions are looked at: one that ends from now on makes it readable again.
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
                listener.admit(&self.budget, &self.ended, overdue.len());
            }
        }
        self.stop();
    }

    /// Whether something is to be looked at again soon.
    fn is_expecting(&self) -> bool {
        let mut sessions = self.listeners.iter().flat_map(|listener| &listener.sessions);
        self.closer.is_busy() || sessions.any(|session| session.leaving.is_some())
    }

    /// The users of the sessions that should have ended.
    fn overdue(&self) -> Vec<Option<u32>> {
        let sessions = self.listeners.iter().flat_map(|listener| &listener.sessions);
        let overdue = sessions.filter(|s| s.is_overdue() && !s.thread.is_finished());
        overdue.map(|session| session.user).collect()
    }

    /// Ends all sessions, and waits for them as long as that makes sense.
    fn stop(self) {
        let begun = Instant::now();
        let mut sessions = Vec::new();
        for listener in self.listeners {
            // Nobody finds it any more; what has not been accepted goes with the socket.
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
    socket_peercred(socket).ok().map(|peer| peer.uid.as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_equal_shares_of_the_descriptors() {
        let vectors = 9;
        let fixed = |functions| OF_THE_PROCESS + functions * (OF_A_FUNCTION + vectors + MAX_FDS_UNDER_WAY);
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
