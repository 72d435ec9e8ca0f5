//! From a stream of bytes and descriptors to messages.

use crate::error::Malformed;
use crate::error::StreamError;
use crate::header::{HEADER_LEN, Header, Kind};
use crate::message::{Reply, Request};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// What a peer may send in one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes, header included.
    pub message: usize,
    /// Descriptors.
    pub fds: usize,
}

/// A whole message, with descriptors of type `F`.
#[derive(Debug)]
pub struct Message<F = OwnedFd> {
    /// Its header.
    pub header: Header,
    /// What is behind the header.
    pub payload: Vec<u8>,
    /// The descriptors that came with it; closed when dropped.
    pub fds: Vec<F>,
}

impl<F> Message<F> {
    /// Whether it answers a command of ours.
    pub fn is_reply(&self) -> bool {
        matches!(self.header.kind, Kind::Reply { .. })
    }

    /// What a command asks.
    ///
    /// # Errors
    ///
    /// Its payload makes no sense, or nobody knows such a command.
    pub fn request(&self) -> Result<Request<'_>, Malformed> {
        Request::parse(self.header.command, &self.payload)
    }

    /// What a reply that is no error says.
    ///
    /// # Errors
    ///
    /// Its payload makes no sense, or nobody knows such a command.
    pub fn reply(&self) -> Result<Reply<'_>, Malformed> {
        Reply::parse(self.header.command, &self.payload)
    }
}

/// Takes a stream apart. Push what each read brought, then take messages until there are none: so
/// at most one unfinished message and one read are held, and no more descriptors than one message
/// may bring and one read brought.
///
/// What stands for a descriptor is the caller's to choose: a server that sorts descriptors before
/// it knows which message they belong to keeps them sorted.
#[derive(Debug)]
pub struct Decoder<F = OwnedFd> {
    limits: Limits,
    /// Bytes of which `..at` are consumed.
    buffer: Vec<u8>,
    at: usize,
    /// Bytes of the stream before `buffer[0]`.
    before: u64,
    /// With the place in the stream of the last byte of the read that brought them.
    fds: VecDeque<(u64, F)>,
    failed: Option<StreamError>,
}

impl Decoder {
    /// A decoder at the start of a stream.
    pub fn new(limits: Limits) -> Decoder {
        Decoder::of_sorted(limits)
    }
}

impl<F> Decoder<F> {
    /// A decoder at the start of a stream, with something of the caller's in the place of
    /// descriptors.
    pub fn of_sorted(limits: Limits) -> Decoder<F> {
        Decoder {
            limits,
            buffer: Vec::new(),
            at: 0,
            before: 0,
            fds: VecDeque::new(),
            failed: None,
        }
    }

    /// Other limits from here on, when they have been agreed upon.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// What one read brought. Descriptors are taken to belong to the message in which the read
    /// ended: Linux gives out the bytes of a `sendmsg` that came with descriptors at the end of a
    /// read, never before bytes of a later one.
    pub fn push(&mut self, bytes: &[u8], fds: impl IntoIterator<Item = F>) {
        if self.failed.is_some() {
            return;
        }
        if self.at == self.buffer.len() || self.at >= 1 << 16 {
            self.buffer.drain(..self.at);
            self.before += self.at as u64;
            self.at = 0;
        }
        self.buffer.extend_from_slice(bytes);
        let last = (self.before + self.buffer.len() as u64).saturating_sub(1);
        self.fds.extend(fds.into_iter().map(|fd| (last, fd)));
    }

    /// Bytes that are still missing from the message that has begun, as far as is known; at least 1. Whoever reads no more than that
    /// gets one message at a time.
    pub fn missing(&self) -> usize {
        let have = &self.buffer[self.at..];
        let whole = match have.first_chunk().map(Header::parse) {
            Some(Ok(header)) => header.size as usize,
            _ => HEADER_LEN,
        };
        whole.saturating_sub(have.len()).max(1)
    }

    /// Whether a message has begun and is not complete.
    pub fn is_in_message(&self) -> bool {
        self.at < self.buffer.len()
    }

    fn take(&mut self) -> Result<Option<Message<F>>, StreamError> {
        let have = &self.buffer[self.at..];
        let header = have.first_chunk().map(Header::parse).transpose()?;
        let Some(header) = header else {
            return self.wait();
        };
        let size = header.size as usize;
        if size > self.limits.message {
            return Err(StreamError::TooLong(header.size));
        }
        let Some(payload) = have.get(HEADER_LEN..size) else {
            return self.wait();
        };
        let payload = payload.to_vec();
        self.at += size;
        let end = self.before + self.at as u64;
        let count = self.fds.iter().take_while(|(place, _)| *place < end).count();
        if count > self.limits.fds {
            return Err(StreamError::TooManyFds);
        }
        let fds = self.fds.drain(..count).map(|(_, fd)| fd).collect();
        Ok(Some(Message { header, payload, fds }))
    }

    /// All descriptors that are here belong to the message that has begun.
    fn wait(&self) -> Result<Option<Message<F>>, StreamError> {
        if self.fds.len() > self.limits.fds {
            return Err(StreamError::TooManyFds);
        }
        Ok(None)
    }
}

/// The messages that are complete. `None` asks for more bytes; an error comes again and again.
impl<F> Iterator for Decoder<F> {
    type Item = Result<Message<F>, StreamError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(error) = self.failed {
            return Some(Err(error));
        }
        let taken = self.take();
        if let Err(error) = taken {
            self.failed = Some(error);
            self.buffer = Vec::new();
            self.at = 0;
            self.fds.clear();
        }
        taken.transpose()
    }
}
