//! The messages of an association that the library has, and the peer has not acknowledged.

use std::collections::HashMap;

use dcsctp::api::LifecycleId;

use crate::unsent::Message;

/// Messages that went in one packet.
#[derive(Debug)]
struct Bundle {
    /// The stream of each.
    streams: Vec<u16>,
    /// Of their chunks.
    bytes: usize,
    /// Those that are not acknowledged.
    left: usize,
}

/// Messages that are not acknowledged, also those to be retransmitted, and those that came while an
/// earlier one is missing.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    bundles: HashMap<LifecycleId, Bundle>,
    begun: u64,
    messages: usize,
    bytes: usize,
    by_stream: HashMap<u16, usize>,
}

impl InFlight {
    /// Messages that are not acknowledged.
    pub(crate) fn messages(&self) -> usize {
        self.messages
    }

    /// At least the bytes of their chunks: those of a bundle count until all are acknowledged.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// At least the number of a stream.
    pub(crate) fn of_stream(&self, stream: u16) -> usize {
        self.by_stream.get(&stream).copied().unwrap_or(0)
    }

    /// Adds messages that go in one packet; returns what the library calls each of them.
    pub(crate) fn put(&mut self, messages: &[Message]) -> Option<LifecycleId> {
        self.begun += 1;
        let id = LifecycleId::new(self.begun)?;
        let bundle = Bundle {
            streams: messages.iter().map(|message| message.stream).collect(),
            bytes: messages.iter().map(Message::chunk_len).sum(),
            left: messages.len(),
        };
        for stream in &bundle.streams {
            *self.by_stream.entry(*stream).or_default() += 1;
        }
        self.bytes += bundle.bytes;
        self.messages += messages.len();
        self.bundles.insert(id, bundle);
        Some(id)
    }

    /// One of the messages with this name was acknowledged.
    pub(crate) fn acknowledged(&mut self, id: LifecycleId) {
        let Some(bundle) = self.bundles.get_mut(&id) else {
            return;
        };
        self.messages -= 1;
        bundle.left -= 1;
        if bundle.left > 0 {
            return;
        }
        self.bytes -= bundle.bytes;
        for stream in &bundle.streams {
            if let Some(count) = self.by_stream.get_mut(stream) {
                *count -= 1;
                if *count == 0 {
                    self.by_stream.remove(stream);
                }
            }
        }
        self.bundles.remove(&id);
    }
}
