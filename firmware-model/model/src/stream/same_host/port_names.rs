//! Abstract unix sockets with the names of ports, by which processes of one user find each other.
//!
//! Any process of the network namespace may bind such a name, or connect to it. So each end asks
//! the kernel for the user at the other end before it reads or sends anything, and closes
//! connections of other users.

use super::blocking::BlockingWork;
use super::messages::LocalSocket;
use super::netlink::Routes;
use super::user::User;
use crate::stream::ANYWHERE;
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::sys::thread_start::ThreadStart;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen as begin_to_listen, shutdown, socket_with,
};
use rustix::process::{Pid, getpid};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// Connections of a listener's unix socket that may wait.
const BACKLOG: i32 = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The name of the unix socket of a port on an address, or on all of them.
fn name(of: Protocol, ip: Option<IpAddr>, port: u16) -> Result<SocketAddrUnix, Errno> {
    let ip = ip.map_or("*".to_owned(), |ip| ip.to_canonical().to_string());
    let name = match of {
        Protocol::Tcp => format!("urnic/{ip}/{port}"),
        Protocol::Udp => format!("urnic/udp/{ip}/{port}"),
        Protocol::Roce => format!("urnic/roce/{ip}/{port}"),
        Protocol::RoceService => format!("urnic/roce/service/{ip}/{port}"),
    };
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// What a name is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::stream) enum Protocol {
    /// A TCP port.
    Tcp,
    /// A UDP port.
    Udp,
    /// The queue pairs of RoCE v2 whose numbers begin with the port.
    Roce,
    /// The services of RoCE's connection manager with the number of the port.
    RoceService,
}

/// The processes of this host that have the device's user.
#[derive(Debug)]
pub(in crate::stream) struct PortNames {
    descriptors: Arc<Descriptors>,
    blocking: Arc<BlockingWork>,
    routes: Routes,
    user: User,
}

impl PortNames {
    /// # Errors
    /// `EPERM`: this process does not belong to one user. `EAGAIN`: threads of earlier devices
    /// still block. Those of opening a netlink socket.
    pub(in crate::stream) fn new(
        descriptors: &Arc<Descriptors>,
        start: ThreadStart,
    ) -> Result<PortNames, Errno> {
        Ok(PortNames {
            descriptors: descriptors.clone(),
            blocking: Arc::new(BlockingWork::new(start)?),
            routes: Routes::new(descriptors)?,
            user: User::of_this_process().ok_or(Errno::PERM)?,
        })
    }

    pub(super) fn descriptors(&self) -> &Arc<Descriptors> {
        &self.descriptors
    }

    /// Whether this is the number of the device's user, and the process still has that user.
    pub(super) fn is_own(&self, uid: u32) -> bool {
        User::of_number(uid) == Some(self.user) && User::of_this_process() == Some(self.user)
    }

    /// Opens the place where others find the port at `local`.
    pub(in crate::stream) fn listen(
        self: &Arc<Self>,
        of: Protocol,
        local: SocketAddr,
    ) -> Result<LocalListener, Errno> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        let socket = self.descriptors.adopt(socket)?;
        let ip = Some(local.ip()).filter(|ip| *ip != ANYWHERE.ip());
        bind(&socket, &name(of, ip, local.port())?)?;
        begin_to_listen(&socket, BACKLOG)?;
        Ok(LocalListener {
            socket: Some(socket),
            peers: self.clone(),
            process: getpid(),
        })
    }

    /// Connects to the process of the device's user that has the port at `remote`, an address of
    /// this host.
    pub(in crate::stream) fn connect(&self, of: Protocol, remote: SocketAddr) -> Option<LocalSocket> {
        self.find(of, remote).ok().map(|(socket, _)| socket)
    }

    /// As [`connect`](Self::connect); returns also whether the process has the port at all
    /// addresses.
    ///
    /// # Errors
    /// `ECONNREFUSED`: no process of the device's user has it; others: that is not known.
    pub(in crate::stream) fn find(
        &self,
        of: Protocol,
        remote: SocketAddr,
    ) -> Result<(LocalSocket, bool), Errno> {
        if !self.routes.is_local(remote.ip()) {
            return Err(Errno::CONNREFUSED);
        }
        if self.blocking.is_full() {
            return Err(Errno::AGAIN);
        }
        let any: IpAddr = match remote.ip().to_canonical() {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let names = [Some(remote.ip()), Some(any), None];
        let names = names
            .into_iter()
            .filter_map(|ip| name(of, ip, remote.port()).ok());
        let (mut unconnected, mut outcome) = (None, Errno::CONNREFUSED);
        for (index, name) in names.enumerate() {
            let socket = match unconnected.take() {
                Some(socket) => socket,
                None => self.socket()?,
            };
            if let Err(errno) = connect(&socket, &name) {
                unconnected = Some(socket);
                if errno != Errno::CONNREFUSED {
                    outcome = errno;
                }
                continue;
            }
            let socket = LocalSocket::new(socket, &self.blocking);
            if socket.uid().is_ok_and(|uid| self.is_own(uid)) {
                return Ok((socket, index > 0));
            }
            tracing::debug!("another user has the name of a port on this host");
        }
        Err(outcome)
    }

    /// A socket that is not connected.
    fn socket(&self) -> Result<Descriptor, Errno> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        self.descriptors.adopt(socket)
    }

    /// Whether packets to an address stay on this host.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        self.routes.is_local(ip)
    }
}

/// The socket to which other processes connect to find a port.
#[derive(Debug)]
pub(in crate::stream) struct LocalListener {
    /// Always present, until the value is dropped.
    socket: Option<Descriptor>,
    peers: Arc<PortNames>,
    /// The process that listens. A forked child has a copy.
    process: Pid,
}

impl LocalListener {
    /// The next connection of a process of the device's user. Connections of others are closed. All
    /// count towards `looks`, the number of connections that are examined before the next call.
    pub(in crate::stream) fn accept(&self, looks: &mut usize) -> Option<LocalSocket> {
        let PortNames {
            descriptors,
            blocking,
            ..
        } = &*self.peers;
        while *looks > 0 && !blocking.is_full() {
            *looks -= 1;
            let room = descriptors.room().ok()?;
            let accepted = accept_with(self.socket.as_ref()?, FLAGS).ok()?;
            let socket = LocalSocket::new(room.adopt(accepted), blocking);
            if socket.uid().is_ok_and(|uid| self.peers.is_own(uid)) {
                return Some(socket);
            }
        }
        None
    }
}

impl LocalListener {
    /// Whether this is the process that listens, and not a forked child.
    pub(super) fn is_own(&self) -> bool {
        getpid() == self.process
    }

    /// The descriptor to poll for connections.
    pub(in crate::stream) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for LocalListener {
    /// Connections that wait may have brought descriptors.
    fn drop(&mut self) {
        let Some(socket) = self.socket.take().filter(|_| self.is_own()) else {
            return;
        };
        // No further connection is taken.
        let _ = shutdown(&socket, Shutdown::Both);
        let blocking = &self.peers.blocking;
        if let Ok(waits) = accept_with(&socket, FLAGS) {
            blocking.close((waits, socket));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn peers(descriptors: &Arc<Descriptors>) -> Arc<PortNames> {
        Arc::new(PortNames::new(descriptors, ThreadStart::default()).unwrap())
    }

    /// A port that nothing else has while the value lives.
    fn port() -> (TcpListener, SocketAddr) {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = port.local_addr().unwrap();
        (port, address)
    }

    #[test]
    fn shm_23_processes_of_one_user_find_each_other() {
        let descriptors = Descriptors::new(64, None);
        let peers = peers(&descriptors);
        let (_port, at) = port();
        assert!(peers.connect(Protocol::Tcp, at).is_none());
        let listener = peers.listen(Protocol::Tcp, at).unwrap();
        assert!(listener.accept(&mut 1).is_none());
        let near = peers.connect(Protocol::Tcp, at).unwrap();
        assert!(peers.connect(Protocol::Udp, at).is_none());
        let far = listener.accept(&mut 1).unwrap();
        assert!(!near.is_hung_up());
        drop(far);
        assert!(near.is_hung_up());
    }

    /// A port with the same number at another host is not one of this host.
    #[test]
    fn shm_23_ports_of_other_hosts_are_not_searched() {
        let descriptors = Descriptors::new(64, None);
        let peers = peers(&descriptors);
        let (_port, at) = port();
        let anywhere = SocketAddr::new(ANYWHERE.ip(), at.port());
        let _listener = peers.listen(Protocol::Tcp, anywhere).unwrap();
        assert!(peers.connect(Protocol::Tcp, at).is_some());
        // TEST-NET-1 (RFC 5737).
        let elsewhere = SocketAddr::new([192, 0, 2, 1].into(), at.port());
        assert!(peers.connect(Protocol::Tcp, elsewhere).is_none());
    }

    #[test]
    fn shm_23_a_listener_with_waiting_connections_is_closed() {
        let descriptors = Descriptors::new(64, None);
        let peers = peers(&descriptors);
        let (_port, at) = port();
        let listener = peers.listen(Protocol::Tcp, at).unwrap();
        let waits = peers.connect(Protocol::Tcp, at).unwrap();
        drop(listener);
        crate::testing::mock::wait_for("its end", || waits.is_hung_up().then_some(()));
        assert!(peers.connect(Protocol::Tcp, at).is_none());
    }
}
