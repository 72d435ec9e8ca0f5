//! The assignment of a connection's messages to requests.

use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;

use serde_json::Value;

use super::events::Request;

/// When the first and the last segment of a request's messages passed, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segments {
    pub(super) first: u64,
    pub(super) last: u64,
}

/// A message of a connection.
#[derive(Debug)]
struct Message {
    bytes: u64,
    segments: Segments,
}

/// The messages that requests of one kind send or receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Send,
    Write,
    ReadRequest,
    ReadResponse,
    AtomicRequest,
    AtomicResponse,
}

impl Kind {
    fn of(name: &str) -> Option<Kind> {
        Some(match name {
            "Send" | "SendInv" | "SendSE" | "SendSEInv" => Kind::Send,
            "Write" => Kind::Write,
            "ReadRequest" => Kind::ReadRequest,
            "ReadResponse" => Kind::ReadResponse,
            "AtomicRequest" => Kind::AtomicRequest,
            "AtomicResponse" => Kind::AtomicResponse,
            _ => return None,
        })
    }
}

/// A process, a queue pair, a direction, and a kind.
type Key<'a> = (u64, &'a str, &'a str, Kind);

/// The messages of all connections that belong to no request yet, each kind in the order of time.
pub(super) struct Messages<'a>(HashMap<Key<'a>, VecDeque<Message>>);

impl<'a> Messages<'a> {
    pub(super) fn of(events: &'a [Value]) -> Messages<'a> {
        let mut all = Messages(HashMap::new());
        for event in events {
            let args = &event["args"];
            let (Some(qp), Some(direction), Some(name)) = (
                args["qp"].as_str(),
                args["wire"].as_str(),
                args["message"].as_str(),
            ) else {
                continue;
            };
            let number = |value: &Value| value.as_u64().unwrap_or(0);
            let Some(kind) = Kind::of(name) else { continue };
            let message = Message {
                bytes: number(&args["bytes"]),
                segments: Segments {
                    first: number(&args["first"]),
                    last: number(&args["last"]),
                },
            };
            let key = (number(&event["pid"]), qp, direction, kind);
            all.0.entry(key).or_default().push_back(message);
        }
        all
    }

    /// Takes the messages of a request; requests must come in the order of their queue. `None`: the
    /// request had no messages, for example because it was carried out in the peer's memory.
    pub(super) fn take(&mut self, request: &Request<'a>) -> Option<Segments> {
        let bytes = request.number("bytes");
        // The time of a completion is that at which the device began the turn that completed it.
        let (from, to) = (request.number("posted"), request.number("polled"));
        let mut next = |direction, kind, bytes, from| self.next(request, direction, kind, bytes, from..=to);
        match request.text("opcode") {
            "SEND" => next("sent", Kind::Send, Some(bytes), from),
            "RDMA_WRITE" => next("sent", Kind::Write, Some(bytes), from),
            // It may have come before the receive was posted.
            "RECV" => next("received", Kind::Send, Some(bytes), 0),
            "RDMA_READ" => {
                let asked = next("sent", Kind::ReadRequest, None, from)?;
                let answer = next("received", Kind::ReadResponse, Some(bytes), from)?;
                Some(asked.and(answer))
            }
            "COMP_SWAP" | "FETCH_ADD" => {
                let asked = next("sent", Kind::AtomicRequest, None, from)?;
                let answer = next("received", Kind::AtomicResponse, None, from)?;
                Some(asked.and(answer))
            }
            _ => None,
        }
    }

    /// The next message of this kind and length that passed in a time. Those before it belong to no
    /// request: they opened the connection, or confirm.
    fn next(
        &mut self,
        request: &Request<'a>,
        direction: &'a str,
        kind: Kind,
        bytes: Option<u64>,
        time: RangeInclusive<u64>,
    ) -> Option<Segments> {
        let key = (request.pid, request.text("qp"), direction, kind);
        let messages = self.0.get_mut(&key)?;
        while messages
            .front()
            .is_some_and(|message| message.segments.first < *time.start())
        {
            messages.pop_front();
        }
        let fits = |message: &Message| bytes.is_none_or(|bytes| bytes == message.bytes);
        let at = messages
            .iter()
            .take_while(|message| message.segments.last <= *time.end())
            .position(fits)?;
        messages.drain(..=at).next_back().map(|message| message.segments)
    }
}

impl Segments {
    /// The time from the beginning of a request to the end of its answer.
    fn and(self, answer: Segments) -> Segments {
        Segments {
            first: self.first,
            last: answer.last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::events::requests;
    use super::*;
    use serde_json::json;

    fn message(wire: &str, name: &str, bytes: u64, first: u64, last: u64) -> Value {
        json!({"pid": 7, "args": {
            "qp": "0x1", "wire": wire, "message": name, "bytes": bytes, "first": first, "last": last,
        }})
    }

    fn request(opcode: &str, bytes: u64, posted: u64, polled: u64) -> Value {
        json!({"pid": 7, "args": {
            "qp": "0x1", "opcode": opcode, "bytes": bytes, "posted": posted, "polled": polled,
        }})
    }

    #[test]
    fn a_request_has_its_messages() {
        let events = [
            // The message that opens the connection.
            message("sent", "Write", 0, 1, 2),
            request("RDMA_WRITE", 64, 10, 20),
            message("sent", "Write", 64, 12, 15),
            // Carried out in the peer's memory.
            request("RDMA_WRITE", 64, 21, 22),
            request("RDMA_READ", 9, 30, 50),
            message("sent", "ReadRequest", 28, 31, 32),
            message("received", "ReadResponse", 9, 40, 44),
            request("RDMA_WRITE", 64, 60, 70),
            message("sent", "Write", 64, 61, 62),
            request("RECV", 5, 80, 90),
            message("received", "Send", 5, 70, 71),
            request("LOCAL_INV", 0, 91, 92),
        ];
        let mut messages = Messages::of(&events);
        let found: Vec<_> = requests(&events)
            .map(|request| {
                let segments = messages.take(&request);
                segments.map(|segments| (segments.first, segments.last))
            })
            .collect();
        assert_eq!(
            found,
            [
                Some((12, 15)),
                None,
                Some((31, 44)),
                Some((61, 62)),
                Some((70, 71)),
                None
            ]
        );
    }
}
