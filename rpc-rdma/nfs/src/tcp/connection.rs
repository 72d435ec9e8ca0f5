//! The connection of one client. Its threads read in turns, and each thread answers the call that
//! it read.
//!
//! Only threads of this connection wait for its peer. The accepting thread checks all connections
//! and ends those that take too long, so the other threads need no clock.

use super::limits::Limits;
use super::progress::{Progress, State};
use super::record::{self, HEAD, MAX_RECORD, Received, Room};
use crate::memory::Pool;
use crate::service::{Request, Response, Service};
use rustix::fd::{AsFd, BorrowedFd};
use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use urnic_rpc_rdma_verbs::eviction::Candidate;
use urnic_rpc_rdma_verbs::shares::{Account, Charge, Holder};
use urnic_sync::Mutex;

/// Maximum threads of a connection.
const THREADS: usize = 8;

/// Maximum threads of a connection that may wait for their turn to read. Further threads end.
const SPARE: usize = 2;

/// Bytes per second that a peer must send or receive after the time that every message has.
const RATE: u64 = 16 << 10;

/// Memory that is counted for a reply until its length is known.
const REPLY: u64 = MAX_RECORD as u64;

/// The state that all connections share.
#[derive(Clone)]
pub(super) struct Common {
    pub(super) service: Arc<dyn Service>,
    pub(super) pool: Pool,
    pub(super) limits: Limits,
}

pub(super) struct Connection {
    peer: SocketAddr,
    common: Common,
    memory: Account,
    /// Account of the threads beyond the first.
    helpers: Account,
    socket: Arc<Socket>,
    reading: Mutex<BufReader<Reading>>,
    writing: Mutex<()>,
    threads: AtomicUsize,
    /// Number of threads that read or wait for their turn.
    readers: AtomicUsize,
    /// Time of the last call.
    last_call: Mutex<Instant>,
    served: AtomicBool,
    ended: AtomicBool,
}

/// One descriptor for both directions, and the progress of each direction.
struct Socket {
    stream: TcpStream,
    receives: Progress,
    sends: Progress,
}

struct Reading(Arc<Socket>);

impl Read for Reading {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let received = (&self.0.stream).read(into)?;
        self.0.receives.moved(received);
        Ok(received)
    }
}

impl AsFd for Reading {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.stream.as_fd()
    }
}

struct Writing<'a>(&'a Socket);

impl Write for Writing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let sent = (&self.0.stream).write_vectored(pieces)?;
        self.0.sends.moved(sent);
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        tracing::info!(peer = %self.peer, "disconnected");
    }
}

impl Connection {
    pub(super) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        common: Common,
        memory: Account,
        helpers: Account,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        let socket = Arc::new(Socket {
            stream,
            receives: Progress::default(),
            sends: Progress::default(),
        });
        // A peer that never sends anything is treated as one that does not send the rest of a call.
        socket.receives.begin();
        let reading = Mutex::new(BufReader::with_capacity(HEAD, Reading(socket.clone())));
        Ok(Self {
            peer,
            common,
            memory,
            helpers,
            socket,
            reading,
            writing: Mutex::default(),
            threads: AtomicUsize::new(0),
            readers: AtomicUsize::new(0),
            last_call: Mutex::new(Instant::now()),
            served: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    pub(super) const fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(super) fn candidate<Key>(&self, key: Key) -> Candidate<Key> {
        Candidate {
            address: self.peer.ip(),
            served: self.served.load(Ordering::Relaxed),
            last_message: Some(*self.last_call.lock()),
            key,
        }
    }

    /// The reason to end the connection, if there is one, `elapsed` after the last check.
    pub(super) fn overdue(&self, elapsed: Duration) -> Option<&'static str> {
        let Limits { idle, stall, .. } = self.common.limits;
        let late = |time: Duration, moved: u64| time > stall + Duration::from_secs(moved / RATE);
        let (receives, sends) = (
            self.socket.receives.check(elapsed),
            self.socket.sends.check(elapsed),
        );
        if let State::Busy(time, moved) = sends
            && late(time, moved)
        {
            return Some("it does not receive its replies");
        }
        let working = self.threads.load(Ordering::Acquire) > self.readers.load(Ordering::Acquire);
        match receives {
            State::Busy(time, moved) if late(time, moved) => Some("it does not send the rest of a call"),
            State::Idle(time) if !working && idle.is_some_and(|idle| time >= idle) => Some("it is idle"),
            _ => None,
        }
    }

    /// Starts one more thread if the limits permit. Returns whether the connection has a thread.
    pub(super) fn start_thread(self: &Arc<Self>) -> bool {
        let first = self.threads.load(Ordering::Acquire) == 0;
        let share = if first { None } else { self.helpers.take(1) };
        if !first && share.is_none() {
            return true;
        }
        if self.threads.fetch_add(1, Ordering::AcqRel) >= THREADS {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            return true;
        }
        self.readers.fetch_add(1, Ordering::AcqRel);
        let connection = self.clone();
        let started = std::thread::Builder::new()
            .name("nfs-tcp".to_owned())
            .spawn(move || {
                if let Err(error) = connection.work() {
                    tracing::debug!(peer = %connection.peer, %error, "connection ended");
                    connection.end();
                }
                connection.threads.fetch_sub(1, Ordering::AcqRel);
                drop(share);
            });
        if started.is_err() {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            self.readers.fetch_sub(1, Ordering::AcqRel);
        }
        !first || started.is_ok()
    }

    fn work(self: &Arc<Self>) -> io::Result<()> {
        loop {
            let received = self.next();
            let others = self.readers.fetch_sub(1, Ordering::AcqRel) - 1;
            let (received, reserved) = match received {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return self.socket.stream.shutdown(Shutdown::Read);
                }
                Err(error) => return Err(error),
            };
            if others == 0 {
                self.start_thread();
            }
            self.answer(received, reserved)?;
            if self.readers.fetch_add(1, Ordering::AcqRel) >= SPARE {
                self.readers.fetch_sub(1, Ordering::AcqRel);
                return Ok(());
            }
        }
    }

    /// Receives the next call, and reserves memory for its reply.
    fn next(&self) -> io::Result<(Received, Option<Charge>)> {
        let mut reading = self.reading.lock();
        let receives = &self.socket.receives;
        if reading.fill_buf()?.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        receives.begin();
        let room = Room {
            pool: &self.common.pool,
            charge: &|bytes| self.charge(bytes),
        };
        let received = record::receive(&mut *reading, &room)?;
        receives.end();
        *self.last_call.lock() = Instant::now();
        // Calls with large items have short replies. Nothing more is read from the peer until there
        // is memory for the reply.
        let reserved = match received.item {
            Some(_) => None,
            None => Some(self.charge(REPLY)?),
        };
        Ok((received, reserved))
    }

    fn answer(&self, received: Received, reserved: Option<Charge>) -> io::Result<()> {
        let Received {
            message,
            item,
            charge,
        } = received;
        let request = Request {
            peer: self.peer,
            message: &message,
            item,
            back: None,
        };
        let response = self.common.service.call(request);
        drop((message, charge));
        let Some(Response { message, item }) = response else {
            return Ok(());
        };
        let item = item.as_ref().map(|(at, pieces)| (*at, &pieces[..]));
        let _reserved = reserved.map(|mut reserved| {
            let data = item.map_or(0, |(_, pieces)| pieces.iter().map(|piece| piece.len()).sum());
            reserved.shrink((message.len() + data) as u64);
            reserved
        });
        let _turn = self.writing.lock();
        self.socket.sends.begin();
        record::send(&mut Writing(&self.socket), &message, item)?;
        self.socket.sends.end();
        self.served.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Charges memory to the client, and waits until there is some. The wait does not count as a
    /// delay of the peer.
    fn charge(&self, bytes: u64) -> io::Result<Charge> {
        if let Some(charge) = self.memory.take(bytes) {
            return Ok(charge);
        }
        self.socket.receives.end();
        let start = Instant::now();
        let charge = self.memory.wait(bytes, || {
            self.ended.load(Ordering::Relaxed) || start.elapsed() >= 2 * self.common.limits.stall
        });
        self.socket.receives.begin();
        charge.ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

impl Holder for Connection {
    fn account(&self) -> &Account {
        &self.memory
    }

    fn stuck(&self) -> Option<Duration> {
        let busy = |state| match state {
            State::Busy(time, _) => Some(time),
            State::Idle(_) => None,
        };
        busy(self.socket.receives.last()).max(busy(self.socket.sends.last()))
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = self.socket.stream.shutdown(Shutdown::Both);
    }
}
