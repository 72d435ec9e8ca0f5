//! The owner of the other end of a TCP connection on this host, by sock_diag(7).
//!
//! Any process may bind any name of an abstract unix socket. So an end trusts messages from there
//! only if the sending process has the other end of the TCP connection, or, if the kernel does not
//! report the process (another PID namespace), if its user has that end.

use super::netlink::{Header, NLM_F_REQUEST, Socket};
use crate::stream::descriptor::Descriptors;
use rustix::fs::{CWD, readlinkat};
use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::process::Pid;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use urnic_sync::Mutex;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// `inet_diag_sockid` of linux/inet_diag.h, in network byte order.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct SocketId {
    source_port: [u8; 2],
    destination_port: [u8; 2],
    source: [u8; 16],
    destination: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
}

/// `nlmsghdr` and `inet_diag_req_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy, IntoBytes, Immutable)]
struct Request {
    header: Header,
    family: u8,
    protocol: u8,
    extensions: u8,
    pad: u8,
    states: u32,
    id: SocketId,
}

/// `nlmsghdr` and `inet_diag_msg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
struct Answer {
    header: Header,
    family: u8,
    state: u8,
    timer: u8,
    retransmits: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    send_queue: u32,
    uid: u32,
    inode: u32,
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NO_COOKIE: [u32; 2] = [u32::MAX; 2];
const ANY_STATE: u32 = u32::MAX;
const ESTABLISHED: u8 = 1;

/// The owner of one end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// The number of the user.
    pub(super) uid: u32,
    /// The number of the socket.
    inode: u32,
}

impl Owner {
    /// Whether a process has the socket under this descriptor number; `None`: the system does not
    /// permit this process to find out.
    pub(super) fn is_process(self, process: Pid, number: u32) -> Option<bool> {
        let path = format!("/proc/{}/fd/{number}", process.as_raw_nonzero());
        let expected = format!("socket:[{}]", self.inode);
        match readlinkat(CWD, path, Vec::new()) {
            Ok(target) => Some(target.as_bytes() == expected.as_bytes()),
            Err(Errno::NOENT) => Some(false),
            Err(_) => None,
        }
    }
}

/// A netlink socket for queries of connections.
#[derive(Debug)]
pub(super) struct Owners(Mutex<Socket>);

impl Owners {
    /// # Errors
    /// The system does not permit such queries.
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Result<Owners, Errno> {
        Socket::open(Some(SOCK_DIAG), descriptors)
            .map(Mutex::new)
            .map(Owners)
    }

    /// The owner of the end at `remote` of the established connection between two addresses of this
    /// host.
    pub(super) fn of(&self, local: SocketAddr, remote: SocketAddr) -> Result<Owner, Errno> {
        let (local, remote) = (plain(local), plain(remote));
        let request = Request {
            header: Header::new(SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, size_of::<Request>()),
            family: match remote {
                SocketAddr::V4(_) => libc::AF_INET as u8,
                SocketAddr::V6(_) => libc::AF_INET6 as u8,
            },
            protocol: libc::IPPROTO_TCP as u8,
            extensions: 0,
            pad: 0,
            states: ANY_STATE,
            id: SocketId {
                source_port: remote.port().to_be_bytes(),
                destination_port: local.port().to_be_bytes(),
                source: octets(remote.ip()),
                destination: octets(local.ip()),
                interface: 0,
                cookie: NO_COOKIE,
            },
        };
        let socket = self.0.lock();
        let answer: Answer = socket.ask(request.as_bytes())?;
        // Without a connection the kernel names a listener.
        if answer.header.kind != SOCK_DIAG_BY_FAMILY || answer.state != ESTABLISHED {
            return Err(Errno::SRCH);
        }
        Ok(Owner {
            uid: answer.uid,
            inode: answer.inode,
        })
    }
}

fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// IPv4 in the first four bytes.
fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&v4.octets());
            octets
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn shm_06_the_owner_of_a_connection_is_found() {
        let owners = Owners::new(&Descriptors::new(1, None)).unwrap();
        for at in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let listener = TcpListener::bind(at).unwrap();
            let port = listener.local_addr().unwrap().port();
            let there: SocketAddr = match at {
                "[::1]:0" => format!("[::1]:{port}").parse().unwrap(),
                _ => format!("127.0.0.1:{port}").parse().unwrap(),
            };
            let stream = TcpStream::connect(there).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            let own = Some(rustix::process::getuid().as_raw());
            let (local, remote) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
            assert_eq!(
                owners.of(local, remote).ok().map(|owner| owner.uid),
                own,
                "{at}: the listening end"
            );
            let (local, remote) = (accepted.local_addr().unwrap(), accepted.peer_addr().unwrap());
            assert_eq!(
                owners.of(local, remote).ok().map(|owner| owner.uid),
                own,
                "{at}: the connecting end"
            );
            let number = |socket: &TcpStream| socket.as_raw_fd().cast_unsigned();
            let owner = owners.of(local, remote).unwrap();
            let is_process = |socket| owner.is_process(getpid(), number(socket));
            assert_eq!(
                (is_process(&stream), is_process(&accepted)),
                (Some(true), Some(false))
            );
            assert_eq!(owner.is_process(getpid(), u32::MAX), Some(false), "{at}");
            let other = SocketAddr::new(there.ip(), accepted.peer_addr().unwrap().port() ^ 1);
            assert_eq!(owners.of(other, there), Err(Errno::SRCH), "{at}: a listener");
        }
    }
}
