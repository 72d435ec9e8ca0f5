//! DDP over SCTP (RFC 5043): a network whose streams carry messages. SCTP is the crate
//! [`urnic_sctp`], without I/O, whose packets are datagrams of UDP ports (RFC 6951) of another
//! network, which may lose, record or report them; or it is the kernel's.
//!
//! ```text
//! SctpStream ──┐                                           ┌─ UdpEndpoint: the library,
//! SctpStream ──┼─ Sessions: messages in the ─ Port ─ Endpoint    and a DatagramSocket
//! SctpListener ┘  order of their DDP-SSN                   └─ KernelEndpoint: SCTP sockets
//!          lock, eventfds                        the thread's
//! ```

mod endpoint;
mod ends;
mod kernel;
mod over_udp;
mod path;
mod port;
mod session;
mod sessions;
mod thread;

use super::datagram::DatagramOptions;
use super::descriptor::Descriptors;
use super::{Ends, Listener, Network, Stream};
use crate::sys::thread_start::ThreadStart;
use endpoint::{Endpoint, MakeEndpoint};
use ends::{SctpListener, SctpStream};
use kernel::KernelEndpoint;
use over_udp::UdpEndpoint;
use path::{PACKET_LEN, own_address_towards, packet_len};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sessions::{Sessions, SharedSessions};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once, Weak};
use thread::{NewPort, Thread};
use urnic_sctp::endpoint::Settings;
use urnic_sync::Mutex;

/// Messages that may be in a receive window: as many as fit it, of the shortest kind.
const MOST_UNREAD: usize = 64 << 10;

/// Messages of a session that wait for room in the association: the sessions share it.
const MOST_UNSENT: usize = 64;

/// What carries the packets of SCTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SctpTransport {
    /// UDP: SCTP is a library in the process.
    #[default]
    Udp,
    /// IP: SCTP is the kernel's.
    Kernel,
    /// UDP: SCTP is the kernel's, and packets to a peer go to the UDP port that has the number of
    /// its SCTP port. The kernel's own is `net.sctp.udp_port`.
    KernelUdp,
}

/// The settings of a device's SCTP.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SctpSettings {
    pub(crate) transport: SctpTransport,
    /// A capture or faults are to have the packets.
    pub(crate) is_watched: bool,
    /// Starts the thread.
    pub(crate) start: ThreadStart,
}

/// SCTP over UDP ports of another network, or the kernel's.
#[derive(Debug)]
pub(crate) struct Sctp {
    network: Arc<dyn Network>,
    settings: SctpSettings,
    descriptors: Arc<Descriptors>,
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
    pub(crate) fn new(
        network: Arc<dyn Network>,
        settings: SctpSettings,
        descriptors: Arc<Descriptors>,
    ) -> Sctp {
        Sctp {
            network,
            settings,
            descriptors,
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
        let thread = Thread::start(&sctp.descriptors, sctp.settings.start)?;
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

    /// Binds a port.
    fn bind(
        &mut self,
        sctp: &Sctp,
        local: SocketAddr,
        traffic_class: u8,
        listens: Option<bool>,
    ) -> Result<SharedSessions, Errno> {
        let (local, endpoint) = match sctp.settings.transport {
            SctpTransport::Udp => sctp.bind_udp(local, traffic_class, listens)?,
            SctpTransport::Kernel | SctpTransport::KernelUdp => {
                sctp.bind_kernel(local, traffic_class, listens)?
            }
        };
        let sessions = Arc::new(Mutex::new(Sessions::new(local)));
        self.ports.push(Known {
            connects: listens.is_none(),
            traffic_class,
            local,
            sessions: Arc::downgrade(&sessions),
        });
        self.thread(sctp)?.add(NewPort {
            endpoint,
            sessions: sessions.clone(),
        });
        Ok(sessions)
    }
}

impl Sctp {
    /// Binds a UDP port. Its SCTP port has the same number.
    fn bind_udp(
        &self,
        local: SocketAddr,
        traffic_class: u8,
        listens: Option<bool>,
    ) -> Result<(SocketAddr, MakeEndpoint), Errno> {
        let options = DatagramOptions {
            ipv6_only: listens.unwrap_or(true),
            reports_refused: true,
            long_packets: true,
            ..DatagramOptions::EXCLUSIVE
        };
        let socket = self.network.bind_datagrams(local, options)?;
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
        let make = move || -> Box<dyn Endpoint> {
            let mut library = urnic_sctp::endpoint::Endpoint::new(settings, random);
            library.measure_paths(move |remote| packet_len(remote, local.ip()));
            Box::new(UdpEndpoint::new(library, socket, traffic_class))
        };
        Ok((local, Box::new(make)))
    }

    /// Binds a port of the kernel's SCTP.
    fn bind_kernel(
        &self,
        local: SocketAddr,
        traffic_class: u8,
        listens: Option<bool>,
    ) -> Result<(SocketAddr, MakeEndpoint), Errno> {
        static WITHOUT_SCTP: Once = Once::new();
        static WATCHED: Once = Once::new();
        let options = kernel::Options {
            traffic_class,
            in_udp: self.settings.transport == SctpTransport::KernelUdp,
            listens,
        };
        let endpoint = KernelEndpoint::bind(local, options, &self.descriptors);
        if let Err(Errno::PROTONOSUPPORT | Errno::SOCKTNOSUPPORT) = endpoint {
            WITHOUT_SCTP.call_once(|| {
                tracing::warn!(
                    "this kernel has no SCTP sockets (EPROTONOSUPPORT), so no connection over SCTP can be made: load \
                     the module (modprobe sctp), or use SCTP over UDP (sctp.transport=udp, urnic serve \
                     --sctp-transport udp)"
                );
            });
        }
        let endpoint = endpoint?;
        if self.settings.is_watched {
            WATCHED.call_once(|| {
                tracing::warn!(
                    "the packets of the kernel's SCTP cannot be captured, and no fault acts on them: use SCTP over \
                     UDP (sctp.transport=udp, urnic serve --sctp-transport udp) for pcap and faults"
                );
            });
        }
        let local = endpoint.local();
        Ok((local, Box::new(move || Box::new(endpoint))))
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
