//! Messages of netlink(7): the requests in a program's buffer, and the replies to them.
//!
//! ```text
//! 0        4      6       8         12       16
//! | length | type | flags | sequence | port  | attributes …
//! attribute: | length (u16) | type (u16) | value | padding to 4 bytes |
//! ```
//!
//! All numbers are in host byte order. Lengths include the headers, and not the padding.

pub use urnic_process::netlink_attributes::Attributes;
use urnic_process::netlink_attributes::{u16_at, u32_at};

/// Length of a message header (`struct nlmsghdr`).
pub const HEADER: usize = 16;
/// The bit in the type of an attribute that contains attributes (`NLA_F_NESTED`).
const NESTED: u16 = 0x8000;

/// Types of messages that every netlink has.
pub mod kind {
    /// The error, or the acknowledgement, of a request.
    pub const ERROR: u16 = 2;
    /// The end of a dump.
    pub const DONE: u16 = 3;
    /// Types below this one are control messages.
    pub const FIRST: u16 = 16;
}

/// Flags of messages.
pub mod flag {
    /// The message is a request.
    pub const REQUEST: u16 = 1;
    /// The message is a part of a dump.
    pub const MULTI: u16 = 2;
    /// The sender requests an acknowledgement.
    pub const ACK: u16 = 4;
    /// The dump is incomplete.
    pub const DUMP_INTERRUPTED: u16 = 0x10;
    /// The error or acknowledgement contains only the header of the request.
    pub const CAPPED: u16 = 0x100;
    /// The sender requests all objects (`NLM_F_ROOT`, `NLM_F_MATCH`). One of the two bits suffices.
    pub const DUMP: u16 = 0x300;
}

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The message's type.
    pub kind: u16,
    /// Bits of [`flag`].
    pub flags: u16,
    /// The number by which the sender finds the reply.
    pub sequence: u32,
    /// The netlink port of the sender of a request, and of the receiver of a reply.
    pub port: u32,
}

/// A message in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// The header.
    pub header: Header,
    /// The whole message, with its header and without padding.
    pub bytes: &'a [u8],
}

impl<'a> Message<'a> {
    /// The message at the beginning of `bytes`, and the bytes after it; `None` if there is none,
    /// or it is malformed.
    pub fn first(bytes: &'a [u8]) -> Option<(Message<'a>, &'a [u8])> {
        let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let whole = bytes.get(..length).filter(|_| length >= HEADER)?;
        let header = Header {
            kind: u16_at(whole, 4)?,
            flags: u16_at(whole, 6)?,
            sequence: u32_at(whole, 8)?,
            port: u32_at(whole, 12)?,
        };
        let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((Message { header, bytes: whole }, rest))
    }

    /// The messages in a buffer, up to the first malformed one.
    pub fn all(bytes: &'a [u8]) -> impl Iterator<Item = Message<'a>> {
        let mut rest = bytes;
        std::iter::from_fn(move || {
            let (message, after) = Message::first(rest)?;
            rest = after;
            Some(message)
        })
    }

    /// The attributes of the message.
    pub fn attributes(&self) -> Attributes<'a> {
        Attributes(self.bytes.get(HEADER..).unwrap_or_default())
    }
}

/// A message that is being written.
#[derive(Debug)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Starts a message.
    pub fn new(header: Header) -> Writer {
        let mut bytes = vec![0; 4];
        bytes.extend(header.kind.to_ne_bytes());
        bytes.extend(header.flags.to_ne_bytes());
        bytes.extend(header.sequence.to_ne_bytes());
        bytes.extend(header.port.to_ne_bytes());
        Writer(bytes)
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds bytes that are no attribute.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Writer {
        self.0.extend(bytes);
        self.pad();
        self
    }

    /// Adds an attribute with this value of at most 64 KiB less 5 bytes.
    pub fn put(&mut self, kind: u16, value: &[u8]) -> &mut Writer {
        let at = self.start(kind);
        self.0.extend(value);
        self.end(at);
        self
    }

    /// Adds a byte.
    pub fn put_u8(&mut self, kind: u16, value: u8) -> &mut Writer {
        self.put(kind, &[value])
    }

    /// Adds a number of 32 bits.
    pub fn put_u32(&mut self, kind: u16, value: u32) -> &mut Writer {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds a number of 64 bits.
    pub fn put_u64(&mut self, kind: u16, value: u64) -> &mut Writer {
        self.put(kind, &value.to_ne_bytes())
    }

    /// Adds text, with a zero at its end.
    pub fn put_text(&mut self, kind: u16, value: &str) -> &mut Writer {
        let at = self.start(kind);
        self.0.extend(value.as_bytes());
        self.0.push(0);
        self.end(at);
        self
    }

    /// Adds an attribute that contains what `inside` adds.
    pub fn nest(&mut self, kind: u16, inside: impl FnOnce(&mut Writer)) -> &mut Writer {
        let at = self.start(kind | NESTED);
        inside(self);
        self.end(at);
        self
    }

    /// The finished message.
    pub fn finish(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        if let Some(field) = self.0.get_mut(..4) {
            field.copy_from_slice(&length.to_ne_bytes());
        }
        self.0
    }

    /// Starts an attribute, and returns its place.
    fn start(&mut self, kind: u16) -> usize {
        let at = self.0.len();
        self.0.extend([0, 0]);
        self.0.extend(kind.to_ne_bytes());
        at
    }

    fn end(&mut self, at: usize) {
        let length = self.0.len() - at;
        debug_assert!(length <= usize::from(u16::MAX), "an attribute of {length} bytes");
        if let Some(field) = self.0.get_mut(at..at + 2) {
            field.copy_from_slice(&(length as u16).to_ne_bytes());
        }
        self.pad();
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use rustix::io::Errno;

    const HEADER_OF_A_REQUEST: Header = Header {
        kind: 5 << 10 | 1,
        flags: flag::REQUEST | flag::ACK,
        sequence: 7,
        port: 9,
    };

    #[test]
    fn a_request_of_rdma_dev_is_read() {
        let mut request = Writer::new(HEADER_OF_A_REQUEST);
        request.put_u32(1, 1024).put_text(2, "urnic0");
        let bytes = request.finish();
        let (message, rest) = Message::first(&bytes).expect("a message");
        assert_eq!((message.header, rest), (HEADER_OF_A_REQUEST, &[][..]));
        assert_eq!(message.attributes().number(1), Ok(Some(1024)));
        assert_eq!(message.attributes().text(2), Some(&b"urnic0"[..]));
        assert_eq!(message.attributes().number(3), Ok(None));
    }

    #[test]
    fn a_number_that_is_too_short_is_out_of_range() {
        let mut request = Writer::new(HEADER_OF_A_REQUEST);
        request.put(1, &[1, 2]);
        let bytes = request.finish();
        let (message, _) = Message::first(&bytes).expect("a message");
        assert_eq!(message.attributes().number(1), Err(Errno::RANGE));
    }

    #[test]
    fn lengths_outside_the_buffer_are_no_message() {
        let bytes = Writer::new(HEADER_OF_A_REQUEST).finish();
        for length in [0u32, 15, 17, u32::MAX] {
            let mut wrong = bytes.clone();
            wrong[..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(Message::first(&wrong), None, "{length}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(values in vec((1u16..0x3fff, vec(any::<u8>(), 0..40)), 0..20)) {
            let mut writer = Writer::new(HEADER_OF_A_REQUEST);
            writer.nest(99, |inside| {
                for (kind, value) in &values {
                    inside.put(*kind, value);
                }
            });
            let bytes = writer.finish();
            let (message, _) = Message::first(&bytes).expect("a message");
            let inside = Attributes(message.attributes().find(99).expect("the nest"));
            let read: Vec<(u16, Vec<u8>)> = inside.all().map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(read, values);
        }

        #[test]
        fn no_buffer_makes_the_parser_panic_or_hang(bytes in vec(any::<u8>(), 0..300)) {
            for message in Message::all(&bytes) {
                prop_assert!(message.bytes.len() >= HEADER);
                let _ = message.attributes().all().count();
            }
        }
    }
}
