//! Requests to the kernel's RDMA netlink, for the real devices of the machine.
//!
//! The kernel executes a request within sendto(2), and a further part of a dump within each
//! recvmsg(2). So nothing here waits.

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::message::{Message, kind};

/// Room for one datagram: the kernel makes parts of a dump as long as the reader's buffer, up to
/// this.
const ROOM: usize = 32 << 10;
/// Most bytes of all replies to one request.
const MOST: usize = 4 << 20;

/// The kernel's replies to a request of a socket with this netlink port; `None` if the kernel has
/// no RDMA netlink.
pub fn ask(request: &Message<'_>, port: u32) -> Option<Vec<Vec<u8>>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::RDMA),
    )
    .ok()?;
    let kernel = SocketAddrNetlink::new(0, 0);
    sendto(&socket, request.bytes, SendFlags::empty(), &kernel).ok()?;
    let mut replies = Vec::new();
    let mut total = 0;
    let mut room = vec![0; ROOM];
    while total < MOST {
        let received = match recv(&socket, room.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((_, received)) => room.get(..received).unwrap_or_default(),
            Err(Errno::INTR) => continue,
            Err(_) => break,
        };
        total += received.len();
        let mut ended = received.is_empty();
        for message in Message::all(received) {
            ended |= message.header.kind == kind::DONE;
            replies.push(addressed(&message, port));
        }
        if ended {
            break;
        }
    }
    Some(replies)
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
    use super::super::message::{Header, Writer};
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
}
