//! The program's socket. It is a netlink socket of the protocol `NETLINK_USERSOCK`, by which
//! processes send messages to each other: so bind(2), poll(2), recvmsg(2) and the options of
//! netlink sockets work as they are. The replies to a request are in the socket's queue when the
//! call that sends the request returns.
//!
//! A second socket sends the replies. The program's socket is connected to it at the first
//! request: from then on the kernel refuses messages of all other processes, and messages that
//! came before are discarded.

use std::sync::Arc;

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, getsockname, recv, sendto,
    socket_with, sockopt,
};

use super::kernel;
use super::message::{Header, Message, Writer, flag, kind};
use urnic_process::fds::InternalFd;

/// The attempts to find a port for the second socket.
const ATTEMPTS: usize = 16;
/// The ports that the kernel gives to sockets of a process that has several: no process has such a
/// number.
const PORTS: u32 = 0x8000_0000;
/// The receive buffer that the program's socket gets, if the system permits it: for a dump with
/// some thousand objects.
const BUFFER: usize = 4 << 20;
/// The part of the buffer that is only for the end of a dump that is too long.
const RESERVED: usize = 16 << 10;
/// The most messages of other processes that are discarded.
const MOST_FOREIGN: usize = 1 << 16;
/// The longest request in bytes.
pub const LONGEST: usize = 8 << 10;

/// The other end of a program's socket.
#[derive(Debug)]
pub struct NetlinkSocket {
    sender: InternalFd,
    /// The netlink port of the program's socket.
    port: u32,
    /// The receive buffer of the program's socket, with the reserved part.
    buffer: usize,
}

impl NetlinkSocket {
    /// Connects the program's socket to a new socket of urnic.
    ///
    /// # Errors
    /// `EMFILE` if no fd is left, `ENOMEM` if no memory is left, `EADDRINUSE` if no port is free.
    pub fn connect(program: BorrowedFd<'_>) -> Result<Arc<NetlinkSocket>, Errno> {
        let sender = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::USERSOCK),
        )?;
        let from = bound(&sender)?;
        connect(program, &SocketAddrNetlink::new(from, 0))?;
        discard(program);
        let _ = set_buffer(program, BUFFER);
        // The kernel doubles the value that is set.
        let buffer = sockopt::socket_recv_buffer_size(program)? / 2;
        set_buffer(program, buffer.saturating_sub(RESERVED))?;
        Ok(Arc::new(NetlinkSocket {
            sender: InternalFd::of_device(sender)?,
            port: port_of(program)?,
            buffer,
        }))
    }

    /// The netlink port of the program's socket.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Queues datagrams in the program's socket, of which `program` is a descriptor. Datagrams for
    /// which there is no room are left out: the end of a dump says that it is incomplete, and each
    /// further request fails with `ENOBUFS`.
    ///
    /// # Errors
    /// `ECONNREFUSED` if the socket is connected to another one by now: another process, which
    /// has the socket from a fork, has sent a request; `ENOBUFS` if not even the first fits.
    pub fn queue(&self, program: BorrowedFd<'_>, datagrams: &[Vec<u8>]) -> Result<(), Errno> {
        for (index, datagram) in datagrams.iter().enumerate() {
            match self.send(datagram) {
                Ok(()) => {}
                Err(Errno::AGAIN) if index > 0 => {
                    return self.cut_short(program, datagrams.get(index..).unwrap_or_default());
                }
                Err(Errno::AGAIN) => return Err(Errno::NOBUFS),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn send(&self, datagram: &[u8]) -> Result<(), Errno> {
        let sender = self.sender.get().ok_or(Errno::CONNREFUSED)?;
        let to = SocketAddrNetlink::new(self.port, 0);
        loop {
            match sendto(sender, datagram, SendFlags::DONTWAIT, &to) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Ends the requests to which these datagrams belong, of which none has room.
    fn cut_short(&self, program: BorrowedFd<'_>, datagrams: &[Vec<u8>]) -> Result<(), Errno> {
        set_buffer(program, self.buffer)?;
        let first = |datagram: &Vec<u8>| Some(Message::first(datagram)?.0.header);
        let mut ended = None;
        let mut sent = Ok(());
        for header in datagrams.iter().filter_map(first) {
            if ended == Some(header.sequence) {
                continue;
            }
            let is_dump = header.flags & flag::MULTI != 0;
            sent = sent.and_then(|()| {
                self.send(&match is_dump && ended.is_none() {
                    true => kernel::cut_off(header),
                    false => no_room(header),
                })
            });
            ended = Some(header.sequence);
        }
        set_buffer(program, self.buffer.saturating_sub(RESERVED))?;
        sent
    }
}

/// The error of a request whose reply, with this header, has no room.
fn no_room(reply: Header) -> Vec<u8> {
    let mut error = Writer::new(Header {
        kind: kind::ERROR,
        flags: flag::CAPPED,
        ..reply
    });
    let request = Header {
        flags: flag::REQUEST,
        ..reply
    };
    let code = -Errno::NOBUFS.raw_os_error();
    error.raw(&code.to_ne_bytes()).raw(&Writer::new(request).finish());
    error.finish()
}

/// Sets the receive buffer of a socket, beyond the limit of the system if the process may do that.
fn set_buffer(socket: BorrowedFd<'_>, bytes: usize) -> Result<(), Errno> {
    sockopt::set_socket_recv_buffer_size_force(socket, bytes)
        .or_else(|_| sockopt::set_socket_recv_buffer_size(socket, bytes))
}

/// Discards the messages in a socket.
fn discard(socket: BorrowedFd<'_>) {
    let mut byte = [0u8];
    for _ in 0..MOST_FOREIGN {
        if recv(socket, byte.as_mut_slice(), RecvFlags::DONTWAIT) == Err(Errno::AGAIN) {
            return;
        }
    }
}

/// Binds a socket to a port that no other socket has.
fn bound(socket: &OwnedFd) -> Result<u32, Errno> {
    let mut last = Errno::ADDRINUSE;
    for _ in 0..ATTEMPTS {
        let mut random = [0; 4];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let port = u32::from_ne_bytes(random) | PORTS;
        match bind(socket, &SocketAddrNetlink::new(port, 0)) {
            Ok(()) => return Ok(port),
            Err(errno) => last = errno,
        }
    }
    Err(last)
}

fn port_of(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    let name = getsockname(socket)?;
    SocketAddrNetlink::try_from(name).map(|name| name.pid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use urnic_process::fds;

    fn socket() -> (OwnedFd, u32) {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::USERSOCK),
        )
        .unwrap();
        let port = bound(&socket).unwrap();
        (socket, port)
    }

    fn received(socket: &OwnedFd) -> Option<Vec<u8>> {
        let mut room = vec![0; 8192];
        let (_, length) = recv(socket, room.as_mut_slice(), RecvFlags::DONTWAIT).ok()?;
        room.truncate(length);
        Some(room)
    }

    #[test]
    fn no_other_process_can_forge_replies() {
        fds::adopt_process();
        let ((program, port), (stranger, _)) = (socket(), socket());
        let to = SocketAddrNetlink::new(port, 0);
        sendto(&stranger, b"early", SendFlags::DONTWAIT, &to).unwrap();
        let other_end = NetlinkSocket::connect(program.as_fd()).unwrap();
        assert_eq!(other_end.port(), port);
        let forged = sendto(&stranger, b"late", SendFlags::DONTWAIT, &to);
        assert_eq!(forged, Err(Errno::CONNREFUSED));
        other_end.queue(program.as_fd(), &[b"reply".to_vec()]).unwrap();
        assert_eq!(received(&program), Some(b"reply".to_vec()));
        assert_eq!(received(&program), None);
    }

    #[test]
    fn a_dump_that_does_not_fit_says_so() {
        fds::adopt_process();
        let (program, port) = socket();
        let other_end = NetlinkSocket::connect(program.as_fd()).unwrap();
        let mut part = Writer::new(Header {
            kind: 5 << 10 | 10,
            flags: flag::MULTI,
            sequence: 3,
            port,
        });
        part.put(1, &[0; 3000]);
        let part = part.finish();
        let mut parts = vec![part.clone(); 20_000];
        let mut next = part.clone();
        next[8..12].copy_from_slice(&4u32.to_ne_bytes());
        parts.extend([next.clone(), next]);
        // Again, after the first dump was read.
        for _ in 0..2 {
            other_end.queue(program.as_fd(), &parts).unwrap();
            let mut messages = std::iter::from_fn(|| received(&program)).collect::<Vec<_>>();
            let error = messages.pop().expect("an error of the next request");
            let (error, _) = Message::first(&error).expect("a message");
            assert_eq!((error.header.kind, error.header.sequence), (kind::ERROR, 4));
            let code = error.bytes[16..20].try_into().expect("4 bytes");
            assert_eq!(i32::from_ne_bytes(code), -Errno::NOBUFS.raw_os_error());
            let last = messages.pop().expect("an end");
            let (end, _) = Message::first(&last).expect("a message");
            assert_eq!(
                (end.header.kind, end.header.flags, end.header.sequence),
                (kind::DONE, flag::MULTI | flag::DUMP_INTERRUPTED, 3)
            );
            assert!(!messages.is_empty() && messages.len() < parts.len());
            assert!(messages.iter().all(|message| *message == part));
        }
    }
}
