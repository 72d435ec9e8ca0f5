//! RPC over TCP: each message is a record of fragments (RFC 5531 §11). The data of a WRITE is read from the socket into memory of the pool, that
//! of a READ goes to the socket from where the tree has it.

use crate::memory::{Buffer, Pool, Slice};
use crate::service::{Request, Response, Service};
use crate::xdr::padding;
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::binding::{Mount3, Nfs3, bound};
use urnic_rpc_rdma_verbs::crowd::longest_idle;

/// Octets of a record, at most: a transfer, and what is around it.
const MAX_RECORD: usize = crate::nfs3::MAX_TRANSFER as usize + (64 << 10);

/// Octets of a call within which its item begins.
const HEAD: usize = 2048;

/// Octets from which on an item is read into memory of its own.
const APART: usize = 4096;

/// Fragments of a record, at most.
const FRAGMENTS: usize = 1024;

/// Connections, and threads of each, at most.
const CONNECTIONS: usize = 512;
const THREADS: usize = 8;

/// Threads of a connection that wait for their turn to read; more end.
const SPARE: usize = 2;

/// How long a peer may take none of what is sent to it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Takes connections for ever, each served by threads of its own.
///
/// # Errors
/// The listener's, if they do not pass.
pub fn serve(listener: &TcpListener, service: &Arc<dyn Service>, pool: &Pool) -> io::Result<()> {
    let mut connections: Vec<Weak<Connection>> = Vec::new();
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if passes(&error) => {
                // Out of descriptors, mostly: to ask again at once would only burn time.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            Err(error) => return Err(error),
        };
        connections.retain(|connection| connection.strong_count() > 0);
        if connections.len() >= CONNECTIONS {
            end_the_idle(&mut connections);
        }
        let connection = match Connection::new(stream, peer, service.clone(), pool.clone()) {
            Ok(connection) => Arc::new(connection),
            Err(error) => {
                tracing::debug!(%peer, %error, "lost at once");
                continue;
            }
        };
        connections.push(Arc::downgrade(&connection));
        tracing::info!(%peer, "connected");
        connection.recruit();
    }
}

/// Ends the connection that has to make room for another.
fn end_the_idle(connections: &mut Vec<Weak<Connection>>) {
    let each = |(index, connection): (usize, &Weak<Connection>)| {
        let connection = connection.upgrade()?;
        let heard = *connection.heard.lock().unwrap_or_else(PoisonError::into_inner);
        Some((connection.peer.ip(), Some(heard), index))
    };
    let Some(index) = longest_idle(connections.iter().enumerate().filter_map(each)) else {
        return;
    };
    if let Some(idle) = connections.swap_remove(index).upgrade() {
        tracing::warn!(peer = %idle.peer, "ended: idle, and {CONNECTIONS} connections are open");
        let _ = idle.socket.shutdown(Shutdown::Both);
    }
}

fn passes(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, InvalidInput, NotConnected};
    error.raw_os_error().is_some() && !matches!(error.kind(), InvalidInput | NotConnected | BrokenPipe)
}

/// One client. Its threads take turns at reading; each answers what it read.
struct Connection {
    peer: SocketAddr,
    service: Arc<dyn Service>,
    pool: Pool,
    socket: Arc<TcpStream>,
    reading: Mutex<BufReader<Reading>>,
    writing: Mutex<()>,
    threads: AtomicUsize,
    /// Of them, those that read or wait to.
    readers: AtomicUsize,
    /// When something last came.
    heard: Mutex<Instant>,
}

/// One descriptor for both directions.
struct Reading(Arc<TcpStream>);

impl Read for Reading {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(into)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        tracing::info!(peer = %self.peer, "disconnected");
    }
}

impl Connection {
    fn new(stream: TcpStream, peer: SocketAddr, service: Arc<dyn Service>, pool: Pool) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        let socket = Arc::new(stream);
        let reading = Mutex::new(BufReader::with_capacity(HEAD, Reading(socket.clone())));
        Ok(Self {
            peer,
            service,
            pool,
            socket,
            reading,
            writing: Mutex::default(),
            threads: AtomicUsize::new(0),
            readers: AtomicUsize::new(0),
            heard: Mutex::new(Instant::now()),
        })
    }

    /// One thread more, if there may be.
    fn recruit(self: &Arc<Self>) {
        let one_more = |threads| (threads < THREADS).then_some(threads + 1);
        if (self
            .threads
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more))
        .is_err()
        {
            return;
        }
        self.readers.fetch_add(1, Ordering::AcqRel);
        let connection = self.clone();
        let started = std::thread::Builder::new()
            .name("nfs-tcp".to_owned())
            .spawn(move || {
                if let Err(error) = connection.work() {
                    tracing::debug!(peer = %connection.peer, %error, "connection ends");
                    let _ = connection.socket.shutdown(Shutdown::Both);
                }
                connection.threads.fetch_sub(1, Ordering::AcqRel);
            });
        if started.is_err() {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            self.readers.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn work(self: &Arc<Self>) -> io::Result<()> {
        loop {
            let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
            let received = receive(&mut *reading, &self.pool);
            drop(reading);
            *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            let others = self.readers.fetch_sub(1, Ordering::AcqRel) - 1;
            let Received { message, item } = match received {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return self.socket.shutdown(Shutdown::Read);
                }
                Err(error) => return Err(error),
            };
            if others == 0 {
                self.recruit();
            }
            let request = Request {
                peer: self.peer,
                message: &message,
                item,
                back: None,
            };
            if let Some(Response { message, item }) = self.service.call(request) {
                let _turn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
                send(
                    &mut &*self.socket,
                    &message,
                    item.as_ref().map(|(at, pieces)| (*at, &pieces[..])),
                )?;
            }
            if self.readers.fetch_add(1, Ordering::AcqRel) >= SPARE {
                self.readers.fetch_sub(1, Ordering::AcqRel);
                return Ok(());
            }
        }
    }
}

/// A record, its item apart if it is large.
struct Received {
    message: Message,
    item: Option<Slice>,
}

/// What is longer than calls are, but for their items, is in memory of the pool, too: of that there is so much and no more.
enum Message {
    Short(Vec<u8>),
    Long(Buffer),
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Short(octets) => octets,
            Self::Long(octets) => octets,
        }
    }
}

impl Message {
    /// With `len` octets more.
    fn and(self, len: usize, stream: &mut impl Read, pool: &Pool) -> io::Result<Self> {
        let had = self.len();
        let mut long = match self {
            Self::Short(mut octets) if had + len < HEAD + APART => {
                append(stream, len, &mut octets)?;
                return Ok(Self::Short(octets));
            }
            Self::Short(octets) => {
                let mut long = memory(pool, MAX_RECORD)?;
                long[..had].copy_from_slice(&octets);
                long
            }
            Self::Long(long) => long,
        };
        long.resize(had + len);
        let place = long.get_mut(had..).ok_or_else(too_long)?;
        stream.read_exact(place)?;
        Ok(Self::Long(long))
    }
}

/// Memory of the pool, when there is some: meanwhile nothing more is read from the peer.
fn memory(pool: &Pool, len: usize) -> io::Result<Buffer> {
    const LOOK: Duration = Duration::from_millis(10);
    let mut looks = PATIENCE.as_millis() / LOOK.as_millis();
    loop {
        if let Some(memory) = pool.take(len) {
            return Ok(memory);
        }
        looks = looks.checked_sub(1).ok_or(io::ErrorKind::OutOfMemory)?;
        std::thread::sleep(LOOK);
    }
}

fn too_long() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "a record that is longer than any call",
    )
}

/// A fragment's octets, and whether it is the last.
pub(crate) fn fragment(stream: &mut impl Read, room: usize) -> io::Result<(usize, bool)> {
    const LAST: u32 = 1 << 31;
    let mut word = [0; 4];
    stream.read_exact(&mut word)?;
    let word = u32::from_be_bytes(word);
    let len = (word & !LAST) as usize;
    if len > room {
        return Err(too_long());
    }
    Ok((len, word & LAST != 0))
}

/// Appends `len` octets, of which no more is allocated than comes.
pub(crate) fn append(stream: &mut impl Read, len: usize, message: &mut Vec<u8>) -> io::Result<()> {
    let came = stream.take(len as u64).read_to_end(message)?;
    if came < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

fn receive(stream: &mut impl Read, pool: &Pool) -> io::Result<Received> {
    let (len, last) = fragment(stream, MAX_RECORD)?;
    let message = Message::Short(Vec::with_capacity(len.min(HEAD)));
    if !last {
        let mut message = message.and(len, stream, pool)?;
        for _ in 0..FRAGMENTS {
            let (len, last) = fragment(stream, MAX_RECORD - message.len())?;
            message = message.and(len, stream, pool)?;
            if last {
                return Ok(Received { message, item: None });
            }
        }
        return Err(too_long());
    }
    let message = message.and(len.min(HEAD), stream, pool)?;
    let left = len - message.len();
    if left >= APART
        && let Some((at, count)) = item(&message)
        && at + count + padding(count) == len
    {
        let mut memory = memory(pool, count)?;
        let (here, rest) = memory.split_at_mut(message.len() - at);
        here.copy_from_slice(&message[at..]);
        stream.read_exact(rest)?;
        stream.read_exact(&mut [0; 3][..padding(count)])?;
        let message = Message::Short(message[..at].to_vec());
        let item = Some(memory.share());
        return Ok(Received { message, item });
    }
    let message = message.and(left, stream, pool)?;
    Ok(Received { message, item: None })
}

/// Where a call's item begins, and its octets.
fn item(head: &[u8]) -> Option<(usize, usize)> {
    let at = bound(&[&Nfs3, &Mount3], head).argument?;
    let count = head.get(..at)?.last_chunk()?;
    Some((at, u32::from_be_bytes(*count) as usize))
}

/// Sends a record of one fragment, an item put in where it belongs.
pub(crate) fn send(
    stream: &mut impl Write,
    message: &[u8],
    item: Option<(usize, &[Slice])>,
) -> io::Result<()> {
    let (at, pieces) = item.unwrap_or((message.len(), &[]));
    let len: usize = pieces.iter().map(|piece| piece.len()).sum();
    let pad = &[0; 3][..padding(len)];
    let octets = message.len() + len + pad.len();
    let header = (octets as u32 | 1 << 31).to_be_bytes();
    let (before, after) = message.split_at(at.min(message.len()));
    let ends = [&header[..], before].into_iter();
    let all = ends
        .chain(pieces.iter().map(|piece| &piece[..]))
        .chain([pad, after]);
    let mut all: Vec<_> = all
        .filter(|octets| !octets.is_empty())
        .map(IoSlice::new)
        .collect();
    let mut left = &mut all[..];
    while !left.is_empty() {
        match stream.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => IoSlice::advance_slices(&mut left, sent),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MAX_BUFFER;

    #[test]
    fn long_records_take_memory_of_the_pool_whatever_they_are_made_of() {
        let pool = Pool::limited(MAX_BUFFER as u64);
        let octets: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let whole = [&(octets.len() as u32 | 1 << 31).to_be_bytes()[..], &octets].concat();
        let mut pieces = Vec::new();
        for piece in octets.chunks(1000) {
            pieces.extend((piece.len() as u32).to_be_bytes());
            pieces.extend(piece);
        }
        pieces.extend((1_u32 << 31).to_be_bytes());
        for record in [whole, pieces] {
            let received = receive(&mut &record[..], &pool).expect("a record");
            assert!(matches!(received.message, Message::Long(_)));
            assert!(*received.message == octets[..] && received.item.is_none());
            let most = pool.take(MAX_BUFFER);
            assert!(most.is_none(), "a part of it is in use");
        }
    }
}
