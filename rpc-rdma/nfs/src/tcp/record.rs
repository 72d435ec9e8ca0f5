//! Records: RPC messages in fragments (RFC 5531 §11).
//!
//! Memory is taken as bytes arrive, not when a peer sends their length. A large item begins in a
//! small buffer and moves to a larger one when this is full. Most items are complete in the socket
//! when their record begins, and are read without an intermediate copy.

use crate::binding::Nfs3;
use crate::memory::{Buffer, PAGE, Pool, Slice};
use crate::xdr::padding;
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::ops::Deref;
use std::os::fd::AsFd;
use urnic_rpc_rdma::binding::bound;
use urnic_rpc_rdma_verbs::shares::Charge;

/// Maximum bytes of a record: a transfer and its headers.
pub(super) const MAX_RECORD: usize = crate::nfs3::MAX_TRANSFER as usize + (64 << 10);

/// Bytes at the beginning of a call in which its item begins.
pub(super) const HEAD: usize = 2048;

/// Length from which an item is read into memory of its own.
const APART: usize = 4096;

/// Maximum bytes of a message outside of the pool.
const SHORT: usize = HEAD + APART;

/// Maximum fragments of a record.
const FRAGMENTS: usize = 1024;

/// Bytes of the first buffer of a long message.
const STEP: usize = 64 << 10;
/// Maximum ratio of the length of a later buffer to the number of available bytes.
const GROWTH: usize = 4;

/// A source of records.
pub trait Source: Read {
    /// Number of bytes that are known to be available.
    fn ready(&self) -> usize {
        0
    }
}

impl Source for &[u8] {}

impl<R: Read + AsFd> Source for BufReader<R> {
    fn ready(&self) -> usize {
        let behind = rustix::io::ioctl_fionread(self.get_ref()).unwrap_or_default();
        self.buffer().len() + usize::try_from(behind).unwrap_or_default()
    }
}

/// Memory for records: a pool, and a function that waits until a number of bytes may be taken, or
/// fails.
#[derive(Clone, Copy)]
pub struct Room<'a> {
    /// The pool.
    pub pool: &'a Pool,
    /// Waits until this number of bytes may be taken.
    pub charge: &'a dyn Fn(u64) -> io::Result<Charge>,
}

/// Memory of the pool, charged to the client.
pub struct Memory {
    buffer: Buffer,
    charge: Charge,
}

impl Room<'_> {
    fn take(&self, len: usize) -> io::Result<Memory> {
        let footprint = len.max(PAGE).next_power_of_two();
        let charge = (self.charge)(footprint as u64)?;
        let buffer = self.pool.take(len).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Memory { buffer, charge })
    }

    /// Memory that begins with `head`.
    fn begin(&self, head: &[u8], end: usize, stream: &impl Source) -> io::Result<Memory> {
        let mut memory = self.take(step(head.len(), end, stream).max(head.len()))?;
        memory.buffer.resize(head.len());
        memory.buffer.copy_from_slice(head);
        Ok(memory)
    }
}

/// Bytes of a buffer for a message of which `have` bytes have arrived, and up to `end` may arrive.
fn step(have: usize, end: usize, stream: &impl Source) -> usize {
    let came = have.saturating_add(stream.ready());
    end.min(came.saturating_mul(GROWTH).max(STEP))
}

impl Memory {
    /// Reads until the buffer has `end` bytes.
    fn fill(&mut self, end: usize, stream: &mut impl Source, room: &Room<'_>) -> io::Result<()> {
        let mut have = self.buffer.len();
        while have < end {
            if have == self.buffer.capacity() {
                *self = room.begin(&self.buffer, end, stream)?;
            }
            let stop = end.min(self.buffer.capacity());
            self.buffer.resize(stop);
            let place = self.buffer.get_mut(have..).ok_or_else(too_long)?;
            stream.read_exact(place)?;
            have = stop;
        }
        Ok(())
    }
}

/// A record. A large item is in memory of its own.
pub struct Received {
    /// The message.
    pub message: Message,
    /// The item, if it is in memory of its own.
    pub item: Option<Slice>,
    /// The charge for the memory of the item.
    pub charge: Option<Charge>,
}

/// A message without its item. A message longer than ordinary calls is in memory of the pool, which
/// is limited.
pub enum Message {
    /// A message of a few kilobytes at most.
    Short(Vec<u8>),
    /// A longer message.
    Long(Memory),
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(memory) => &memory.buffer,
        }
    }
}

impl Message {
    /// The message, extended by `len` bytes of the stream.
    fn and(self, len: usize, stream: &mut impl Source, room: &Room<'_>) -> io::Result<Self> {
        let end = self.len() + len;
        let mut long = match self {
            Self::Short(mut bytes) => {
                // A message takes memory of the pool only when more than this has arrived.
                let short = end.min(SHORT);
                append(stream, short - bytes.len(), &mut bytes)?;
                if end <= SHORT {
                    return Ok(Self::Short(bytes));
                }
                room.begin(&bytes, end, stream)?
            }
            Self::Long(long) => long,
        };
        long.fill(end, stream, room)?;
        Ok(Self::Long(long))
    }
}

fn too_long() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "a record that is longer than any call",
    )
}

/// The length of a fragment, and whether it is the last.
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

/// Appends `len` bytes. Memory is allocated only for bytes that arrive.
pub(crate) fn append(stream: &mut impl Read, len: usize, message: &mut Vec<u8>) -> io::Result<()> {
    let came = stream.take(len as u64).read_to_end(message)?;
    if came < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// Reads a record.
///
/// # Errors
/// The stream fails, the record is too long or has too many fragments, or there is no memory for
/// it.
pub fn receive(stream: &mut impl Source, room: &Room<'_>) -> io::Result<Received> {
    let whole = |message| Received {
        message,
        item: None,
        charge: None,
    };
    let (len, last) = fragment(stream, MAX_RECORD)?;
    let message = Message::Short(Vec::with_capacity(len.min(HEAD)));
    if !last {
        let mut message = message.and(len, stream, room)?;
        for _ in 0..FRAGMENTS {
            let (len, last) = fragment(stream, MAX_RECORD - message.len())?;
            message = message.and(len, stream, room)?;
            if last {
                return Ok(whole(message));
            }
        }
        return Err(too_long());
    }
    let message = message.and(len.min(HEAD), stream, room)?;
    let left = len - message.len();
    if left >= APART
        && let Some((at, count)) = item(&message)
        && at + count + padding(count) == len
    {
        let mut memory = room.begin(&message[at..], count, stream)?;
        memory.fill(count, stream, room)?;
        stream.read_exact(&mut [0; 3][..padding(count)])?;
        let message = Message::Short(message[..at].to_vec());
        let Memory { buffer, charge } = memory;
        return Ok(Received {
            message,
            item: Some(buffer.share()),
            charge: Some(charge),
        });
    }
    message.and(left, stream, room).map(whole)
}

/// The offset and the length of a call's item.
fn item(head: &[u8]) -> Option<(usize, usize)> {
    let at = bound(&[&Nfs3], head).argument?;
    let count = head.get(..at)?.last_chunk()?;
    Some((at, u32::from_be_bytes(*count) as usize))
}

/// Sends a record of one fragment, with the item at its offset.
pub(crate) fn send(
    stream: &mut impl Write,
    message: &[u8],
    item: Option<(usize, &[Slice])>,
) -> io::Result<()> {
    let (at, pieces) = item.unwrap_or((message.len(), &[]));
    let len: usize = pieces.iter().map(|piece| piece.len()).sum();
    let pad = &[0; 3][..padding(len)];
    let bytes = message.len() + len + pad.len();
    let header = (bytes as u32 | 1 << 31).to_be_bytes();
    let (before, after) = message.split_at(at.min(message.len()));
    let ends = [&header[..], before].into_iter();
    let all = ends
        .chain(pieces.iter().map(|piece| &piece[..]))
        .chain([pad, after]);
    let mut all: Vec<_> = all.filter(|bytes| !bytes.is_empty()).map(IoSlice::new).collect();
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
