//! Requests to the kernel's RDMA netlink, for the real devices of the machine.
//!
//! The kernel executes a request within sendto(2), and a further part of a dump within each
//! recvmsg(2). So nothing here waits.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::message::{Header, Message, Writer, flag, kind};

/// Room for one datagram: the kernel makes parts of a dump as long as the reader's buffer, up to
/// this.
const ROOM: usize = 32 << 10;
/// Most bytes of all replies to one request.
const MOST: usize = 4 << 20;

/// The kernel has no RDMA netlink. Remembered: each attempt to open it makes the kernel start
/// modprobe(8).
static ABSENT: AtomicBool = AtomicBool::new(false);

/// The kernel's replies to a request of a socket with this netlink port; `None` if the kernel has
/// no RDMA netlink.
///
/// # Errors
/// Those of the socket: `EMFILE`, or `EPERM` in a sandbox.
pub fn ask(request: &Message<'_>, port: u32) -> Result<Option<Vec<Vec<u8>>>, Errno> {
    if ABSENT.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let opened = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::RDMA),
    );
    let socket = match opened {
        Err(Errno::PROTONOSUPPORT | Errno::AFNOSUPPORT) => {
            ABSENT.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        opened => opened?,
    };
    let kernel = SocketAddrNetlink::new(0, 0);
    sendto(&socket, request.bytes, SendFlags::empty(), &kernel)?;
    received(&socket, port).map(Some)
}

/// The messages in a socket, addressed to another port. A dump that is cut has an end that says so.
fn received(socket: &OwnedFd, port: u32) -> Result<Vec<Vec<u8>>, Errno> {
    let mut replies = Vec::new();
    let mut total = 0;
    let mut room = vec![0; ROOM];
    let mut part = None;
    while total < MOST {
        let received = match recv(socket, room.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((_, received)) => room.get(..received).unwrap_or_default(),
            Err(Errno::INTR) => continue,
            Err(errno) if errno != Errno::AGAIN && replies.is_empty() => return Err(errno),
            Err(_) => break,
        };
        total += received.len();
        for message in Message::all(received) {
            let header = message.header;
            let is_end = matches!(header.kind, kind::DONE | kind::ERROR);
            part = (!is_end && header.flags & flag::MULTI != 0).then_some(header);
            replies.push(addressed(&message, port));
            if header.kind == kind::DONE {
                return Ok(replies);
            }
        }
        if received.is_empty() {
            break;
        }
    }
    replies.extend(part.map(|part| cut_off(Header { port, ..part })));
    Ok(replies)
}

/// The end of a dump with parts of this header, of which not all were received.
pub(super) fn cut_off(part: Header) -> Vec<u8> {
    let mut end = Writer::new(Header {
        kind: kind::DONE,
        flags: flag::MULTI | flag::DUMP_INTERRUPTED,
        ..part
    });
    end.raw(&0i32.to_ne_bytes());
    end.finish()
}

/// The message, addressed to another port.
fn addressed(message: &Message<'_>, port: u32) -> Vec<u8> {
    let mut bytes = message.bytes.to_vec();
    if let Some(field) = bytes.get_mut(12..16) {
        field.copy_from_slice(&port.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_port_of_a_reply_changes() {
        let header = Header {
            kind: 5 << 10 | 1,
            flags: 2,
            sequence: 7,
            port: 1,
        };
        let mut reply = Writer::new(header);
        reply.put_u32(1, 3);
        let reply = reply.finish();
        let (message, _) = Message::first(&reply).expect("a message");
        let again = addressed(&message, 99);
        let (again, _) = Message::first(&again).expect("a message");
        assert_eq!(again.header, Header { port: 99, ..header });
        assert_eq!(again.attributes(), message.attributes());
    }

    #[test]
    fn a_dump_that_is_cut_has_an_end_that_says_so() {
        let kinds = |with_end: bool| {
            let (socket, kernel) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )
            .unwrap();
            let header = Header {
                kind: 5 << 10 | 1,
                flags: flag::MULTI,
                sequence: 7,
                port: 1,
            };
            let mut sent = vec![Writer::new(header).finish()];
            if with_end {
                let kind = kind::DONE;
                sent.push(Writer::new(Header { kind, ..header }).finish());
            }
            for message in sent {
                rustix::net::send(&kernel, &message, SendFlags::empty()).unwrap();
            }
            let replies = received(&socket, 99).unwrap();
            let headers = replies
                .iter()
                .map(|reply| Message::first(reply).unwrap().0.header);
            headers
                .map(|header| (header.kind, header.flags, header.port))
                .collect::<Vec<_>>()
        };
        let part = (5 << 10 | 1, flag::MULTI, 99);
        assert_eq!(kinds(true), [part, (kind::DONE, flag::MULTI, 99)]);
        let end = (kind::DONE, flag::MULTI | flag::DUMP_INTERRUPTED, 99);
        assert_eq!(kinds(false), [part, end]);
    }
}
