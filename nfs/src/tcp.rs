//! RPC over TCP: each message is a record of fragments (RFC 5531 §11). The data of a WRITE is read from the socket into memory of the pool, that
//! of a READ goes to the socket from where the tree has it.

use crate::memory::{Pool, Slice};
use crate::service::{Request, Response, Service};
use crate::xdr::padding;
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use urnic_rpc_rdma::binding::{Mount3, Nfs3, bound};

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
    let connections = Arc::new(AtomicUsize::new(0));
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
        if connections.load(Ordering::Relaxed) >= CONNECTIONS {
            tracing::warn!(%peer, "refused: {CONNECTIONS} connections are open");
            continue;
        }
        let connection = match Connection::new(stream, peer, service.clone(), pool.clone(), &connections) {
            Ok(connection) => Arc::new(connection),
            Err(error) => {
                tracing::debug!(%peer, %error, "lost at once");
                continue;
            }
        };
        tracing::info!(%peer, "connected");
        connection.recruit();
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
    socket: TcpStream,
    reading: Mutex<BufReader<TcpStream>>,
    writing: Mutex<TcpStream>,
    threads: AtomicUsize,
    /// Of them, those that read or wait to.
    readers: AtomicUsize,
    all: Arc<AtomicUsize>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        tracing::info!(peer = %self.peer, "disconnected");
        self.all.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    fn new(
        stream: TcpStream,
        peer: SocketAddr,
        service: Arc<dyn Service>,
        pool: Pool,
        all: &Arc<AtomicUsize>,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        let reading = Mutex::new(BufReader::with_capacity(HEAD, stream.try_clone()?));
        let writing = Mutex::new(stream.try_clone()?);
        all.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            peer,
            service,
            pool,
            socket: stream,
            reading,
            writing,
            threads: AtomicUsize::new(0),
            readers: AtomicUsize::new(0),
            all: all.clone(),
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
            };
            if let Some(Response { message, item }) = self.service.call(request) {
                let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
                send(
                    &mut *writing,
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
    message: Vec<u8>,
    item: Option<Slice>,
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
    let mut message = Vec::with_capacity(len.min(HEAD));
    if !last {
        append(stream, len, &mut message)?;
        for _ in 0..FRAGMENTS {
            let (len, last) = fragment(stream, MAX_RECORD - message.len())?;
            append(stream, len, &mut message)?;
            if last {
                return Ok(Received { message, item: None });
            }
        }
        return Err(too_long());
    }
    append(stream, len.min(HEAD), &mut message)?;
    let left = len - message.len();
    if left >= APART
        && let Some((at, count)) = item(&message)
        && at + count + padding(count) == len
        && let Some(mut memory) = pool.take(count)
    {
        let (here, rest) = memory.split_at_mut(message.len() - at);
        here.copy_from_slice(&message[at..]);
        stream.read_exact(rest)?;
        stream.read_exact(&mut [0; 3][..padding(count)])?;
        message.truncate(at);
        let item = Some(memory.share());
        return Ok(Received { message, item });
    }
    append(stream, left, &mut message)?;
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
