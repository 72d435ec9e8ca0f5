//! Decodes a stream of bytes and descriptors into messages.

use crate::error::Malformed;
use crate::error::StreamError;
use crate::header::{HEADER_LEN, Header, Kind};
use crate::message::{Reply, Request};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Limits of the messages of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum length of a message in bytes, header included.
    pub message: usize,
    /// Maximum number of descriptors in one message.
    pub fds: usize,
}

/// A whole message, with descriptors of type `F`.
#[derive(Debug)]
pub struct Message<F = OwnedFd> {
    /// The header of the message.
    pub header: Header,
    /// The bytes after the header.
    pub payload: Vec<u8>,
    /// The descriptors that came with it; closed when dropped.
    pub fds: Vec<F>,
}

impl<F> Message<F> {
    /// Whether the message is a reply.
    pub fn is_reply(&self) -> bool {
        matches!(self.header.kind, Kind::Reply { .. })
    }

    /// The payload of a command, parsed.
    ///
    /// # Errors
    ///
    /// [`Malformed`]: the payload is invalid, or the command is unknown.
    pub fn request(&self) -> Result<Request<'_>, Malformed> {
        Request::parse(self.header.command, &self.payload)
    }

    /// The payload of a successful reply, parsed.
    ///
    /// # Errors
    ///
    /// [`Malformed`]: the payload is invalid, or the command is unknown.
    pub fn reply(&self) -> Result<Reply<'_>, Malformed> {
        Reply::parse(self.header.command, &self.payload)
    }
}

/// Splits a stream into messages. Push the result of each read, then take messages until there are
/// none. The decoder then holds at most one unfinished message and one read, and at most the
/// descriptors that one message may carry and that one read returned.
///
/// The caller chooses the type `F` that represents a descriptor: a server that sorts descriptors
/// before it parses the messages stores them sorted.
#[derive(Debug)]
pub struct Decoder<F = OwnedFd> {
    limits: Limits,
    /// Bytes of which `..at` are consumed.
    buffer: Vec<u8>,
    at: usize,
    /// Number of bytes of the stream before `buffer[0]`.
    before: u64,
    /// Descriptors, each with the stream offset of the last byte of the read that returned it.
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
    /// A decoder at the start of a stream, whose descriptors have a type of the caller's choice.
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

    /// Adds the result of one read. Descriptors belong to the message in which the read ended:
    /// Linux returns the bytes of a `sendmsg` that came with descriptors at the end of a read,
    /// never before bytes of a later one.
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

    /// Number of bytes that the unfinished message still needs, as far as is known; at least 1. A
    /// caller that reads no more than that gets one message at a time.
    pub fn missing(&self) -> usize {
        let have = &self.buffer[self.at..];
        let whole = match have.first_chunk().map(Header::parse) {
            Some(Ok(header)) => header.size as usize,
            _ => HEADER_LEN,
        };
        whole.saturating_sub(have.len()).max(1)
    }

    /// Whether a message is unfinished.
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

    /// All stored descriptors belong to the unfinished message.
    fn wait(&self) -> Result<Option<Message<F>>, StreamError> {
        if self.fds.len() > self.limits.fds {
            return Err(StreamError::TooManyFds);
        }
        Ok(None)
    }
}

/// Yields the complete messages. `None` means that more bytes are needed. After an error every
/// further call returns the same error.
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
