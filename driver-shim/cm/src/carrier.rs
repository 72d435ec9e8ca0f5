//! Between MPA start-up, which knows no streams, and those who make connections: streams of a
//! device that is told what to send, and says later what came.

use rustix::io::Errno;

use crate::mpa_startup::{Close, Failure, Heard, Responder};

/// What there is to receive from a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbox {
    /// Nothing yet.
    Empty,
    /// Bytes.
    Bytes,
    /// The end of the stream.
    End,
}

#[cfg(test)]
impl Inbox {
    /// Of a stream from which these have come, and its end or not.
    pub fn of(bytes: &[u8], ended: bool) -> Inbox {
        match (bytes.is_empty(), ended) {
            (false, _) => Inbox::Bytes,
            (true, true) => Inbox::End,
            (true, false) => Inbox::Empty,
        }
    }
}

/// A device's streams, before they belong to queue pairs.
pub trait Carrier {
    /// Sends bytes of an MPA frame.
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno>;
    /// Receives exactly so many bytes, of which the device tells when they are there.
    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno>;
    /// What a receive would find; also while none is outstanding.
    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno>;
    /// Closes a stream. No event of it follows that means anything.
    fn close(&mut self, sid: u32, how: Close);
}

/// A maker of connections, which owns streams, listeners and queue pairs. `W` is what it acts on.
pub trait StreamOwner<W> {
    /// Whether a queue pair is connected by this owner.
    fn has_queue_pair(&self, qid: u32) -> bool;
    /// Whether a listener belongs to this owner.
    fn has_listener(&self, lid: u32) -> bool;
    /// Whether a stream in start-up belongs to this owner.
    fn has_stream(&self, sid: u32) -> bool;
    /// A queue pair received its first FPDU: the fence opens.
    fn first_fpdu(&mut self, world: &mut W, qid: u32);
    /// A listener accepted a stream.
    fn arrived(&mut self, world: &mut W, lid: u32, sid: u32);
    /// A stream is connected, or is not.
    fn connected(&mut self, world: &mut W, sid: u32, outcome: Result<(), Errno>);
    /// The requested bytes of a stream arrived, or fewer if the peer closed it; or an error.
    fn received(&mut self, world: &mut W, sid: u32, bytes: Result<&[u8], Errno>);
    /// A stream ended.
    fn closed(&mut self, world: &mut W, sid: u32);
}

/// The result of bytes of a stream whose Request is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// It is whole: [`Responder::request`].
    Whole,
    /// More of it was asked for.
    More,
    /// Nothing comes of it: hang up so.
    HangUp(Close),
}

/// Hears bytes of a Request: has the carrier fetch what is missing, and say what has to be said to
/// a caller that errs.
pub fn hear_request<C: Carrier + ?Sized>(
    responder: &mut Responder,
    carrier: &mut C,
    sid: u32,
    bytes: Result<&[u8], Errno>,
) -> Due {
    match responder.take(bytes) {
        Ok(Some(Heard::Request)) => Due::Whole,
        Ok(_) => match carrier.receive(sid, responder.wants()) {
            Ok(()) => Due::More,
            Err(_) => Due::HangUp(Close::Abort),
        },
        Err(failure) => {
            tracing::debug!("stream {sid}: {failure}");
            let Failure {
                close, last_words, ..
            } = failure;
            if let Some(words) = last_words {
                let _ = carrier.send(sid, &words);
            }
            Due::HangUp(close)
        }
    }
}
