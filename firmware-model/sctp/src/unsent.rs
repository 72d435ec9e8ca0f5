//! The messages of an association that the library does not have yet.

use std::collections::{HashMap, VecDeque};

use urnic_wire::sctp::chunk::Contents;

use crate::settings::chunk_len;

/// A message to be sent.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) stream: u16,
    pub(crate) contents: Contents,
    pub(crate) data: Vec<u8>,
}

impl Message {
    pub(crate) fn chunk_len(&self) -> usize {
        chunk_len(self.data.len())
    }
}

/// Unsent messages, which the streams send in turn.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    /// Those of each stream that has some.
    streams: HashMap<u16, VecDeque<Message>>,
    /// The streams that have some, in the order of their turns.
    turns: VecDeque<u16>,
    /// Of their chunks.
    bytes: usize,
}

impl Unsent {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// The number of a stream.
    pub(crate) fn of_stream(&self, stream: u16) -> usize {
        self.streams.get(&stream).map_or(0, VecDeque::len)
    }

    /// Whether there are some of a stream with this or a higher number.
    pub(crate) fn has_beyond(&self, streams: u16) -> bool {
        self.turns.iter().any(|stream| *stream >= streams)
    }

    pub(crate) fn put(&mut self, message: Message) {
        self.bytes += message.chunk_len();
        let stream = message.stream;
        let of_stream = self.streams.entry(stream).or_default();
        if of_stream.is_empty() {
            self.turns.push_back(stream);
        }
        of_stream.push_back(message);
    }

    /// The next message whose stream may send. `None` if its chunk is longer than `room`: a shorter
    /// one does not overtake it, or it might wait for ever.
    pub(crate) fn next(&mut self, room: usize, may_send: impl Fn(u16) -> bool) -> Option<Message> {
        let turn = self.turns.iter().position(|stream| may_send(*stream))?;
        let stream = *self.turns.get(turn)?;
        let of_stream = self.streams.get_mut(&stream)?;
        of_stream.front().filter(|message| message.chunk_len() <= room)?;
        let message = of_stream.pop_front()?;
        self.bytes -= message.chunk_len();
        self.turns.remove(turn);
        if of_stream.is_empty() {
            self.streams.remove(&stream);
        } else {
            self.turns.push_back(stream);
        }
        Some(message)
    }
}
