//! DDP over SCTP (RFC 5043): a network whose streams carry messages. SCTP is the crate
//! [`urnic_sctp`], without I/O; its packets are datagrams of UDP ports (RFC 6951) of another
//! network, which may lose, record or report them.
//!
//! ```text
//! SctpStream ──┐                                   ┌─ Endpoint: associations
//! SctpStream ──┼─ Sessions: messages in the ─ Port ┤
//! SctpListener ┘  order of their DDP-SSN           └─ DatagramSocket: packets
//!          lock, eventfds                        the thread's
//! ```

mod ends;
mod port;
mod session;
mod sessions;
mod thread;

use super::datagram::DatagramOptions;
use super::descriptor::Descriptors;
use super::{ANYWHERE, Ends, Listener, Network, Stream};
use crate::sys::datagrams::path_mtu;
use crate::sys::thread_start::ThreadStart;
use ends::{SctpListener, SctpStream};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{self, SocketFlags, SocketType};
use rustix::rand::{GetRandomFlags, getrandom};
use sessions::{Sessions, SharedSessions};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use thread::{NewPort, Thread};
use urnic_sctp::endpoint::Settings;
use urnic_sync::Mutex;

/// Bytes of an SCTP packet if the MTU of the path is unknown: with the headers of UDP and IPv6 it
/// fits the smallest link of IPv6 (RFC 8200 §5), so also the inside of any tunnel.
const PACKET_LEN: usize = 1280 - UDP_LEN - IPV6_LEN;
/// The MTU of the largest link that is common. Of longer packets, as the loopback network takes
/// them, the library's first window would not fit a socket's receive buffer.
const LARGEST_MTU: usize = 9000;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// Messages that may be in a receive window: as many as fit it, of the shortest kind.
const MOST_UNREAD: usize = 64 << 10;

/// Messages of a session that wait for room in the association: the sessions share it.
const MOST_UNSENT: usize = 64;

/// SCTP over UDP ports of another network.
#[derive(Debug)]
pub(crate) struct Sctp {
    network: Arc<dyn Network>,
    descriptors: Arc<Descriptors>,
    start: ThreadStart,
    state: Mutex<State>,
    /// In a forked child: the thread runs in the parent.
    abandoned: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// Started for the first port.
    thread: Option<Arc<Thread>>,
    ports: Vec<Known>,
}

/// A port that may be in use.
#[derive(Debug)]
struct Known {
    /// Sessions begin there. One end of an association begins them, so that the two ends cannot
    /// choose the same streams; no port that listens has such associations.
    connects: bool,
    traffic_class: u8,
    local: SocketAddr,
    sessions: Weak<Mutex<Sessions>>,
}

impl Sctp {
    pub(crate) fn new(network: Arc<dyn Network>, descriptors: Arc<Descriptors>, start: ThreadStart) -> Sctp {
        Sctp {
            network,
            descriptors,
            start,
            state: Mutex::default(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Ends all associations, and the thread.
    pub(crate) fn end(&self) {
        let thread = self.state.lock().thread.take();
        if let Some(thread) = thread {
            thread.end(!self.abandoned.load(Ordering::Relaxed));
        }
    }

    /// In a forked child. Async-signal-safe.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }
}

impl State {
    fn thread(&mut self, sctp: &Sctp) -> Result<Arc<Thread>, Errno> {
        if let Some(thread) = &self.thread {
            return Ok(thread.clone());
        }
        let thread = Thread::start(&sctp.descriptors, sctp.start)?;
        self.thread = Some(thread.clone());
        Ok(thread)
    }

    /// The port of this kind and address that is in use.
    fn find(&mut self, wanted: impl Fn(&Known) -> bool) -> Option<SharedSessions> {
        self.ports.retain(|known| known.sessions.strong_count() > 0);
        let found = self.ports.iter().filter(|known| wanted(known));
        let mut found = found.filter_map(|known| known.sessions.upgrade());
        found.find(|sessions| sessions.lock().reserve())
    }

    /// Binds a port. Its SCTP port has the same number.
    fn bind(
        &mut self,
        sctp: &Sctp,
        local: SocketAddr,
        traffic_class: u8,
        listens: Option<bool>,
    ) -> Result<SharedSessions, Errno> {
        let options = DatagramOptions {
            shared: false,
            ipv6_only: listens.unwrap_or(true),
            reports_refused: true,
            long_packets: true,
        };
        let socket = sctp.network.bind_datagrams(local, options)?;
        let local = socket.local();
        let mut random = [0; 16];
        // A read of 16 bytes is never short once the kernel's generator is seeded.
        getrandom(&mut random, GetRandomFlags::empty())?;
        let settings = Settings {
            packet_len: PACKET_LEN,
            unread: MOST_UNREAD,
            unsent_of_stream: MOST_UNSENT,
            listens: listens.is_some(),
            ..Settings::of_port(local.port())
        };
        let sessions = Arc::new(Mutex::new(Sessions::new(local)));
        self.ports.push(Known {
            connects: listens.is_none(),
            traffic_class,
            local,
            sessions: Arc::downgrade(&sessions),
        });
        self.thread(sctp)?.add(NewPort {
            socket,
            settings,
            random,
            traffic_class,
            sessions: sessions.clone(),
        });
        Ok(sessions)
    }
}

impl Network for Sctp {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let from = match local.filter(|local| !local.ip().is_unspecified()) {
            Some(local) => local,
            None => {
                let mut from = own_address_towards(remote)?;
                from.set_port(local.map_or(0, |local| local.port()));
                from
            }
        };
        let mut state = self.state.lock();
        let known = state.find(|known| {
            let is_port = from.port() == 0 || from.port() == known.local.port();
            known.connects && known.traffic_class == traffic_class && is_port && known.local.ip() == from.ip()
        });
        let sessions = match known {
            Some(sessions) => sessions,
            None => state.bind(self, from, traffic_class, None)?,
        };
        let thread = state.thread(self)?;
        let mut guard = sessions.lock();
        let ends = Ends {
            local: guard.local,
            remote,
        };
        let session = guard.connect(ends, &self.descriptors)?;
        drop(guard);
        drop(state);
        thread.ask();
        Ok(Box::new(SctpStream::new(thread, sessions, session)?))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        let mut state = self.state.lock();
        // Sessions of an earlier listener may go on there.
        let known = state.find(|known| !known.connects && local.port() != 0 && known.local == local);
        let sessions = match known {
            Some(sessions) => sessions,
            None => state.bind(self, local, traffic_class, Some(ipv6_only))?,
        };
        let thread = state.thread(self)?;
        let mut guard = sessions.lock();
        let (local, notification) = (guard.local, guard.listen(backlog, &self.descriptors)?);
        drop(guard);
        drop(state);
        thread.ask();
        Ok(Box::new(SctpListener {
            thread,
            sessions,
            local,
            notification,
        }))
    }
}

impl Drop for Sctp {
    fn drop(&mut self) {
        self.end();
    }
}

/// A socket that knows the way to a peer, from an own address if there is one. Nothing is sent.
fn towards(remote: SocketAddr, from: Option<IpAddr>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = net::socket_with(super::family(&remote), SocketType::DGRAM, flags, None)?;
    if let Some(from) = from {
        net::bind(&socket, &SocketAddr::new(from, 0))?;
    }
    net::connect(&socket, &remote)?;
    Ok(socket)
}

/// The longest SCTP packet to a peer, by the MTU that the system knows of the path at present.
fn packet_len(remote: SocketAddr, local: IpAddr) -> usize {
    let from = Some(local).filter(|ip| !ip.is_unspecified());
    let is_ipv6 = remote.is_ipv6();
    let mtu = towards(remote, from).and_then(|socket| path_mtu(socket.as_fd(), is_ipv6));
    let headers = UDP_LEN + if is_ipv6 { IPV6_LEN } else { IPV4_LEN };
    match mtu {
        Ok(mtu) => mtu.min(LARGEST_MTU).saturating_sub(headers),
        Err(errno) => {
            tracing::debug!(%errno, "the MTU of the path to {remote} is unknown");
            PACKET_LEN
        }
    }
}

/// The address from which the system sends packets to a peer.
fn own_address_towards(remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let socket = towards(remote, None)?;
    let local = super::plain(net::getsockname(&socket).ok());
    match local == ANYWHERE {
        true => Err(Errno::NETUNREACH),
        false => Ok(local),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    /// The loopback network has an MTU of 65536 bytes on Linux.
    #[test]
    fn sctp_08_packets_fit_the_path_and_common_links() {
        let v4 = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9);
        for local in [Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST] {
            assert_eq!(packet_len(v4, local.into()), 9000 - 28);
        }
        let v6 = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 9);
        let has_ipv6 = own_address_towards(v6).is_ok();
        let expected = if has_ipv6 { 9000 - 48 } else { PACKET_LEN };
        assert_eq!(packet_len(v6, Ipv6Addr::UNSPECIFIED.into()), expected);
        // An address of another family: no way is known.
        assert_eq!(packet_len(v4, Ipv6Addr::LOCALHOST.into()), 1232);
    }
}
