//! The settings, with their defaults.

use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use urnic_wire::mpa::startup::RtrKey;

use crate::error::Source;
use urnic_faults::Network;

/// Defines the values of an option as an enum, each with its name in the configuration.
macro_rules! choice {
    ($(#[$meta:meta])* $choice:ident { $($(#[$of_value:meta])* $value:ident = $name:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum $choice { $($(#[$of_value])* $value,)+ }

        impl $choice {
            /// The name in the configuration.
            pub fn name(self) -> &'static str {
                match self { $($choice::$value => $name,)+ }
            }

            /// The value of this name.
            pub(crate) fn named(name: &str) -> Option<$choice> {
                match name { $($name => Some($choice::$value),)+ _ => None }
            }
        }
    };
}

/// The device that the driver opens (design: devices).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Device {
    /// The model inside this process.
    #[default]
    Inproc,
    /// A model in another process, over the vfio-user socket at this path.
    VfioUser(PathBuf),
    /// A PCI function, by its address (`DDDD:BB:DD.F`).
    Vfio(String),
}

impl fmt::Display for Device {
    /// Writes the device in the form of the option.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Inproc => f.write_str("inproc"),
            Device::VfioUser(path) => write!(f, "vfio-user:{}", path.display()),
            Device::Vfio(address) => write!(f, "vfio:{address}"),
        }
    }
}

/// The zero-length messages that may serve as ready-to-receive indication (RFC 6581 §9.2); at least
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtrTypes {
    /// Zero-length Send (bit B).
    pub send: bool,
    /// Zero-length RDMA Write (bit C).
    pub write: bool,
    /// Zero-length RDMA Read (bit D).
    pub read: bool,
}

/// MPA start-up: requested features and timeouts (RFC 5044 §7, RFC 6581).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mpa {
    /// Request CRCs. They are on when either side requests them (RFC 5044 §7.1.1).
    pub crc: bool,
    /// Request markers in what we receive (RFC 5044 §4.3).
    pub markers: bool,
    /// Highest supported revision: 1 or 2.
    pub revision: u8,
    /// How long an initiator waits for the whole start-up.
    pub startup_timeout_initiator: Duration,
    /// How long a responder waits for the Request.
    pub startup_timeout_responder: Duration,
    /// How long a responder waits for the first FPDU after its Reply.
    pub rtr_timeout: Duration,
    /// The messages that may serve as RTR.
    pub rtr_types: RtrTypes,
    /// Request the peer-to-peer model as initiator: our RTR lets the responder send first (RFC 6581
    /// §9.2).
    pub peer_to_peer: bool,
    /// Accept only the negotiated RTR as the first message, and end the connection otherwise
    /// (conformance EMPA-21).
    pub strict_rtr: bool,
    /// Reject an initiator that accepts fewer Reads than the program on this side requests to send,
    /// instead of sending fewer (RFC 6581 §9.1).
    pub strict_depths: bool,
    /// The RTR frame proposed in 2007, with the spelling of the key that we send; `None` is off.
    /// Only for peers that support it.
    pub rtr_frame: Option<RtrKey>,
}

/// Native connections: connections made by `modify_qp(RTR)`, without a connection manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Native {
    /// Address to listen at; `None` is every address, IPv4 and IPv6.
    pub listen: Option<IpAddr>,
    /// TCP or UDP ports to listen at; `None` leaves the choice to the kernel.
    pub port_range: Option<RangeInclusive<u16>>,
    /// Time without an incoming connection after which the side that should be the responder
    /// connects too.
    pub call_grace: Duration,
    /// How long posted receives stay after the peer's orderly end of stream.
    pub fin_grace: Duration,
    /// Most Requests that a process parks for QPs that have not reached RTR.
    pub max_parked: usize,
    /// How long a Request is parked for a QP that has not reached RTR.
    pub park_timeout: Duration,
    /// Whether requests are accepted from other addresses than that of the peer named at RTR.
    pub allow_nat: bool,
}

/// Busy-polling by the thread of the device in the process, for messages that give the program no
/// completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusyPoll {
    /// How long the thread waits for the next message; 0 = it never busy-polls.
    pub limit: Duration,
    /// Percent of one processor that all devices of the process may spend on that.
    pub share: u32,
}

/// Connections made with rdma_cm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cm {
    /// How long a Send of the peer may find no receive posted before the connection is terminated.
    /// Zero is the strict behaviour of RFC 5041, except for queue pairs to which no receive was
    /// posted yet: their programs have a second to post one.
    ///
    /// The default is for programs written for InfiniBand, where a sender repeats a Send until the
    /// receiver is ready: some post receives a second and more after the peer's first Send.
    /// During this time the stream is not read, so TCP stops the sender and the device buffers
    /// nothing.
    pub rnr_grace: Duration,
    /// The Local ACK Timeout of connections for which the program sets none: 4.096 µs · 2^n, the
    /// time of one attempt to reach the peer; 0 = as long as TCP tries.
    pub ack_timeout: u8,
    /// The port space of connections.
    pub ports: CmPorts,
}

choice! {
    /// Whether the port numbers of rdma_cm connections are those of TCP.
    CmPorts {
        /// [`Own`](CmPorts::Own) for programs that see a RoCE NIC, else [`Tcp`](CmPorts::Tcp).
        #[default]
        Auto = "auto",
        /// A listener has the TCP port of its number.
        Tcp = "tcp",
        /// A listener has the UDP port of its number, and any TCP port, which initiators query.
        Own = "own",
    }
}

impl CmPorts {
    /// Whether the ports are not those of TCP, for programs that see a device of this kind.
    pub fn are_own(self, identity: Identity) -> bool {
        match self {
            CmPorts::Auto => identity.is_roce(),
            CmPorts::Tcp => false,
            CmPorts::Own => true,
        }
    }
}

choice! {
    /// The lower layer of DDP: the protocol that carries a connection.
    #[derive(Hash, PartialOrd, Ord)]
    Llp {
        /// MPA over TCP (RFC 5044).
        #[default]
        Tcp = "tcp",
        /// SCTP (RFC 5043).
        Sctp = "sctp",
    }
}

choice! {
    /// The protocol of queue pairs.
    Wire {
        /// iWARP: RoCE v2 is used where it is named, and never guessed.
        #[default]
        Auto = "auto",
        /// iWARP.
        Iwarp = "iwarp",
        /// RoCE v2.
        Roce = "roce",
    }
}

choice! {
    /// What carries the packets of SCTP, for the device in the process.
    SctpTransport {
        /// UDP; SCTP is a library in the process.
        #[default]
        Udp = "udp",
        /// IP; SCTP is the kernel's.
        Kernel = "kernel",
        /// UDP; SCTP is the kernel's.
        KernelUdp = "kernel-udp",
    }
}

/// SCTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sctp {
    /// What carries its packets.
    pub transport: SctpTransport,
}

/// Addresses with separate options: a `[[peer]]` of the file. Native connections have of these
/// options [`Config::llp`] and [`Config::wire`] alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub(crate) network: Network,
    /// Keys and values that were checked.
    pub(crate) options: Vec<(&'static str, String)>,
}

/// A `[[device]]` of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    pub(crate) name: Option<String>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) device: Option<Device>,
    /// The place of the section.
    pub(crate) at: Source,
}

/// One device of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The name that programs see.
    pub name: String,
    /// The addresses that the device has; empty: all addresses of the host, or those of a device
    /// that is not in this process.
    pub addresses: Vec<IpAddr>,
    /// The device that the driver opens.
    pub device: Device,
}

choice! {
    /// The kind of RDMA device that programs see. The wire is iWARP with both, unless `wire` says
    /// otherwise.
    Identity {
        /// An iWARP RNIC.
        #[default]
        Iwarp = "iwarp",
        /// A RoCE v2 NIC: an InfiniBand channel adapter with an Ethernet port.
        Roce = "roce",
    }
}

impl Identity {
    /// Whether programs see a RoCE NIC.
    pub fn is_roce(self) -> bool {
        self == Identity::Roce
    }
}

choice! {
    /// The way to peers on the same host for the device in the process.
    SameHost {
        /// Through shared memory, if the peer is urnic too.
        #[default]
        Auto = "auto",
        /// By TCP.
        Off = "off",
    }
}

choice! {
    /// In which order the device in the process places the bytes of peers' RDMA Writes.
    Placement {
        /// In the order of arrival.
        #[default]
        InOrder = "in-order",
        /// The last byte of each segment before the others.
        LastFirst = "last-first",
    }
}

choice! {
    /// Whether programs see the real RDMA devices of the machine, too, and at which place in lists.
    RealDevices {
        /// Before ours.
        First = "first",
        /// After ours.
        #[default]
        Last = "last",
        /// Not at all.
        Hidden = "hidden",
    }
}

choice! {
    /// Whether the program's use of verbs is checked.
    Strict {
        /// No.
        #[default]
        Off = "off",
        /// Findings are reported.
        On = "on",
        /// Findings are reported, and make the program's exit status an error.
        Error = "error",
    }
}

choice! {
    /// When Sends, Writes and immediates complete.
    Completion {
        /// [`Delivered`](Completion::Delivered) on native connections and for all programs that see
        /// a RoCE NIC, else [`Taken`](Completion::Taken).
        #[default]
        Auto = "auto",
        /// When the stream has taken them (RFC 5040 §5.5).
        Taken = "taken",
        /// When the peer has placed or delivered them.
        Delivered = "delivered",
    }
}

impl Completion {
    /// Whether requests on native connections complete when they are delivered.
    pub fn is_delivered_on_native(self) -> bool {
        self != Completion::Taken
    }

    /// Whether requests on rdma_cm connections complete when they are delivered, for programs that
    /// see a device of this kind.
    pub fn is_delivered_on_rdma_cm(self, identity: Identity) -> bool {
        match self {
            Completion::Auto => identity.is_roce(),
            Completion::Taken => false,
            Completion::Delivered => true,
        }
    }
}

choice! {
    /// Ways to a PCI function that the kernel's VFIO offers.
    VfioApi {
        /// The first of the other ways that exists and that this user may use.
        #[default]
        Auto = "auto",
        /// The function's own file, and iommufd.
        Cdev = "cdev",
        /// The file of the function's group, and a container.
        Group = "group",
        /// The file of the function's group, where there is no IOMMU.
        NoIommu = "noiommu",
    }
}

/// The access to a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vfio {
    /// The way to open the function.
    pub api: VfioApi,
}

/// How the device is shown to libibverbs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present {
    /// Folder that holds the presence tree; `None` is `$XDG_RUNTIME_DIR`, `/tmp` or `/dev/shm`.
    pub dir: Option<PathBuf>,
}

/// All settings. [`Config::default`] is the configuration of a machine without any settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The device that the driver opens.
    pub device: Device,
    /// The name of the device, and the first of several names.
    pub name: String,
    /// The number of devices; 1 if there are sections and the number was not set.
    pub devices: u32,
    /// Devices with separate settings.
    pub sections: Vec<Section>,
    /// What to log, as a `tracing` filter; `off` logs nothing.
    pub log: String,
    /// Warn when a verb is refused.
    pub refusals: bool,
    /// The file for the capture of the wire.
    pub pcap: Option<PathBuf>,
    /// The file for a report of each process at its exit.
    pub report: Option<PathBuf>,
    /// The file for the life of each work request.
    pub trace: Option<PathBuf>,
    /// Whether the program's use of verbs is checked.
    pub strict: Strict,
    /// The file that names findings of these checks to leave out.
    pub suppressions: Option<PathBuf>,
    /// Faults that occur on purpose; `Some`: connections and calls follow a plan of faults.
    pub faults: Option<String>,
    /// The kind of RDMA device that programs see.
    pub identity: Identity,
    /// The real RDMA devices of the machine.
    pub real_devices: RealDevices,
    /// When Sends, Writes and immediates complete.
    pub completion: Completion,
    /// The way to peers on the same host.
    pub same_host: SameHost,
    /// The lower layer of connections.
    pub llp: Llp,
    /// The protocol of queue pairs, of those of kind UD always, and of others where no [`Peer`]
    /// says otherwise.
    pub wire: Wire,
    /// The order in which Writes of peers are placed.
    pub placement: Placement,
    /// Busy-polling by the device's thread.
    pub busy_poll: BusyPoll,
    /// MPA start-up.
    pub mpa: Mpa,
    /// SCTP.
    pub sctp: Sctp,
    /// Native connections.
    pub native: Native,
    /// Connections made with rdma_cm.
    pub cm: Cm,
    /// The way to a PCI function.
    pub vfio: Vfio,
    /// How the device is shown to libibverbs.
    pub present: Present,
    /// Peers with separate options.
    pub peers: Vec<Peer>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            device: Device::Inproc,
            name: "urnic0".to_owned(),
            devices: 1,
            sections: Vec::new(),
            log: "warn".to_owned(),
            refusals: true,
            pcap: None,
            report: None,
            trace: None,
            strict: Strict::Off,
            suppressions: None,
            faults: None,
            identity: Identity::Iwarp,
            real_devices: RealDevices::Last,
            completion: Completion::Auto,
            same_host: SameHost::Auto,
            llp: Llp::Tcp,
            wire: Wire::Auto,
            placement: Placement::InOrder,
            busy_poll: BusyPoll {
                limit: Duration::from_micros(50),
                share: 100,
            },
            mpa: Mpa {
                crc: true,
                markers: false,
                revision: 2,
                startup_timeout_initiator: Duration::from_secs(20),
                startup_timeout_responder: Duration::from_secs(10),
                rtr_timeout: Duration::from_secs(10),
                rtr_types: RtrTypes {
                    send: false,
                    write: true,
                    read: true,
                },
                peer_to_peer: true,
                strict_rtr: false,
                strict_depths: false,
                rtr_frame: None,
            },
            sctp: Sctp::default(),
            native: Native {
                listen: None,
                port_range: None,
                call_grace: Duration::from_millis(1000),
                fin_grace: Duration::from_millis(2000),
                max_parked: 1024,
                park_timeout: Duration::from_millis(10_000),
                allow_nat: false,
            },
            cm: Cm {
                rnr_grace: Duration::from_secs(10),
                // The value of the Linux kernel's rdma_cm over RoCE.
                ack_timeout: 18,
                ports: CmPorts::Auto,
            },
            vfio: Vfio::default(),
            present: Present::default(),
            peers: Vec::new(),
        }
    }
}
