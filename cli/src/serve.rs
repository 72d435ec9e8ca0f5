//! `urnic serve`: the RNIC as a PCI function of other processes, over vfio-user.

use std::ffi::OsString;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ArgMatches;
use clap::builder::{OsStringValueParser, TypedValueParser as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use urnic_faults::Network;
use urnic_model::capture::CaptureFile;
use urnic_model::{BusyPoll, DeviceAddress, ModelConfig, Reach, SctpTransport};
use urnic_process::gids::Gid;
use urnic_process::gids::GidTable;
use urnic_process::log::{Log, LogFilter};
use urnic_serve::{Endpoint, ServeError, Server};

use crate::answer::{Failure, print};

/// The devices to serve, and their clients.
#[derive(Debug, clap::Args)]
pub(crate) struct Offer {
    /// Listen on this unix socket; each connection is a separate function. May be given more than
    /// once
    #[arg(long, value_name = "PATH", required = true, value_parser = OsStringValueParser::new().try_map(socket_path))]
    socket: Vec<PathBuf>,
    /// An address of the functions: ADDR, ADDR/LEN or `host`. May be given more than once
    ///
    /// An address belongs to the --socket before it, or to all sockets if it is given before the
    /// first. Functions connect from and listen on their own addresses only. `host` means all
    /// addresses of this host without confinement: for your own programs, never for a guest.
    /// Without --addr, a function has no address and reaches no peer. A guest can reach every
    /// service that listens on the address of the guest.
    #[arg(long, value_name = "ADDR[/LEN]", value_parser = AddressArgument::parse)]
    addr: Vec<AddressArgument>,
    /// Functions may connect to these addresses although they are this host's own. May be given
    /// more than once
    #[arg(long, value_name = "PREFIX", value_parser = network)]
    allow: Vec<Network>,
    /// Connections at a time to each socket
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// Permissions of the socket files
    #[arg(long, value_name = "OCTAL", default_value = "600", value_parser = mode)]
    mode: u32,
    /// The access to memory without a descriptor, for example a program's heap
    #[arg(long, value_name = "WAY", value_enum, default_value_t = Dma::Auto)]
    dma: Dma,
    /// The way to peers on the same host
    #[arg(long, value_name = "WAY", value_enum, default_value_t = SameHost::Auto)]
    same_host: SameHost,
    /// What carries the packets of connections over SCTP
    #[arg(long, value_name = "WAY", value_enum, default_value_t = Transport::Udp)]
    sctp_transport: Transport,
    /// How long a function's thread polls a connection for the next RDMA Write, Read or atomic of
    /// the peer before it sleeps, in microseconds up to 10000. 0: it always sleeps
    #[arg(long, value_name = "US", default_value_t = micros(BusyPoll::default().limit), value_parser = clap::value_parser!(u16).range(0..=10_000))]
    busy_poll_limit: u16,
    /// The share of one processor that the threads of all functions may spend on that together
    #[arg(long, value_name = "PERCENT", default_value_t = BusyPoll::default().share, value_parser = clap::value_parser!(u32).range(1..=100))]
    busy_poll_share: u32,
    /// Capture the packets of all functions into this file (pcapng, for Wireshark); `%p` is the
    /// server's process number
    #[arg(long, value_name = "FILE", env = "URNIC_PCAP")]
    pcap: Option<PathBuf>,
    /// What to log on standard error: off, error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "FILTER", env = "URNIC_LOG", default_value = "warn")]
    log: String,
}

/// Bytes of a socket's path: `sun_path` of unix(7) without the NUL.
pub(crate) const LONGEST_SOCKET_PATH: usize = 107;

fn micros(time: Duration) -> u16 {
    u16::try_from(time.as_micros()).unwrap_or(u16::MAX)
}

fn socket_path(text: OsString) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let len = path.as_os_str().len();
    if len > LONGEST_SOCKET_PATH {
        return Err(format!(
            "a socket's path has at most {LONGEST_SOCKET_PATH} bytes, not {len}"
        ));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.is_dir() => Err(format!(
            "there is no folder {}: make it, or choose another path",
            folder.display()
        )),
        _ => Ok(path),
    }
}

/// The access to memory that cannot be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Dma {
    /// process_vm_readv(2) and process_vm_writev(2) where the client is of this user and the kernel
    /// allows it, else messages
    Auto,
    /// Messages by which the client itself reads or writes its memory: slower, but the server needs
    /// no permission to access other processes
    Messages,
}

/// The way to peers on the same host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SameHost {
    /// Shared memory, if the peer is urnic too and nothing is captured, else TCP
    Auto,
    /// TCP
    Off,
}

/// What carries the packets of SCTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// UDP: SCTP is a library in the server
    Udp,
    /// IP: SCTP is the kernel's, whose module is needed. --pcap does not have its packets
    Kernel,
    /// UDP: SCTP is the kernel's, and packets go to the UDP port with the number of the peer's SCTP
    /// port
    KernelUdp,
}

impl From<Transport> for SctpTransport {
    fn from(transport: Transport) -> SctpTransport {
        match transport {
            Transport::Udp => SctpTransport::Udp,
            Transport::Kernel => SctpTransport::Kernel,
            Transport::KernelUdp => SctpTransport::KernelUdp,
        }
    }
}

/// An address argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AddressArgument {
    /// All addresses of this host.
    Host,
    /// One address, with its network's prefix length and its interface if they were given.
    One {
        ip: IpAddr,
        len: Option<u32>,
        netdev: Option<String>,
    },
}

fn width(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// `ADDR` or `ADDR/LEN`.
fn address_and_len(text: &str) -> Result<(IpAddr, Option<u32>), String> {
    let (address, len) = match text.split_once('/') {
        Some((address, len)) => (address, Some(len)),
        None => (text, None),
    };
    let ip: IpAddr = address
        .parse()
        .map_err(|_| format!("{address} is no IP address"))?;
    let len = len.map(|len| {
        let number = len.parse().ok().filter(|len| *len <= width(ip));
        number.ok_or_else(|| format!("/{len}: a prefix has 0 to {} bits", width(ip)))
    });
    Ok((ip, len.transpose()?))
}

fn network(text: &str) -> Result<Network, String> {
    let (ip, len) = address_and_len(text)?;
    // The length was checked.
    Network::of(ip, len.map(|len| len as u8)).ok_or_else(|| format!("{text} is no network"))
}

fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "not an octal number up to 777".to_owned())
}

impl AddressArgument {
    fn parse(text: &str) -> Result<AddressArgument, String> {
        if text == "host" {
            return Ok(AddressArgument::Host);
        }
        // The interface of a link-local address precedes the length.
        let (address, len) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let (address, netdev) = match address.split_once('%') {
            Some((address, netdev)) => (address, Some(netdev.to_owned())),
            None => (address, None),
        };
        let (ip, len) = address_and_len(&len.map_or(address.to_owned(), |len| format!("{address}/{len}")))?;
        if ip.is_unspecified() || ip.is_multicast() {
            return Err(format!("{ip} is no address of a device"));
        }
        Ok(AddressArgument::One { ip, len, netdev })
    }

    fn resolve(&self, host: &[Gid]) -> Result<Vec<DeviceAddress>, Failure> {
        let of_gid = |gid: &Gid, len: Option<u32>| DeviceAddress {
            ip: gid.ip,
            scope: gid.scope(),
            prefix_len: len.unwrap_or(gid.prefix_len.into()),
        };
        let (ip, len, netdev) = match self {
            AddressArgument::Host => return Ok(host.iter().map(|gid| of_gid(gid, None)).collect()),
            AddressArgument::One { ip, len, netdev } => (*ip, *len, netdev),
        };
        let fits = |gid: &&Gid| gid.ip == ip && netdev.as_ref().is_none_or(|netdev| *netdev == gid.netdev);
        if let Some(gid) = host.iter().find(fits) {
            return Ok(vec![of_gid(gid, len)]);
        }
        // All of 127.0.0.0/8 belongs to this host, listed or not.
        if ip.is_ipv4() && ip.is_loopback() {
            let prefix_len = len.unwrap_or(8);
            return Ok(vec![DeviceAddress {
                ip,
                scope: 0,
                prefix_len,
            }]);
        }
        let at = netdev
            .as_deref()
            .map_or(String::new(), |netdev| format!(" at {netdev}"));
        Err(Failure::usage(format!(
            "{ip} is no address of this host{at}: add it first (ip address add {ip}/{} dev …)",
            len.unwrap_or(width(ip))
        )))
    }
}

/// The socket that each argument of `--addr` belongs to; `None` = to all.
fn owners(matches: &ArgMatches) -> Vec<Option<usize>> {
    let sockets: Vec<usize> = matches.indices_of("socket").into_iter().flatten().collect();
    let addresses = matches.indices_of("addr").into_iter().flatten();
    addresses
        .map(|at| sockets.iter().rposition(|socket| *socket < at))
        .collect()
}

impl Offer {
    fn endpoint(
        &self,
        number: usize,
        owners: &[Option<usize>],
        host: &[Gid],
        capture: Option<&CaptureFile>,
    ) -> Result<(Endpoint, String), Failure> {
        let path = &self.socket[number];
        let given: Vec<&AddressArgument> = self
            .addr
            .iter()
            .zip(owners)
            .filter(|(_, owner)| owner.is_none_or(|owner| owner == number))
            .map(|(given, _)| given)
            .collect();
        let everywhere = given.contains(&&AddressArgument::Host);
        if everywhere && given.len() > 1 {
            return Err(Failure::usage(
                "--addr host are all addresses: give no other with it",
            ));
        }
        let mut addresses = Vec::new();
        for address in given {
            addresses.extend(address.resolve(host)?);
        }
        let text: Vec<String> = addresses
            .iter()
            .map(|a| format!("{}/{}", a.ip, a.prefix_len))
            .collect();
        let text = match (everywhere, text.is_empty()) {
            (true, _) => format!("all of this host ({})", text.join(", ")),
            (false, true) => "no address".to_owned(),
            (false, false) => text.join(", "),
        };
        let reach = match everywhere {
            true => Reach::Unrestricted,
            false => Reach::Confined {
                host: host.iter().map(|gid| gid.ip).collect(),
                allow: self.allow.clone(),
            },
        };
        let endpoint = Endpoint {
            path: path.clone(),
            mode: self.mode,
            config: ModelConfig {
                addresses,
                reach,
                same_host: self.same_host == SameHost::Auto,
                sctp: self.sctp_transport.into(),
                busy_poll: BusyPoll {
                    limit: Duration::from_micros(self.busy_poll_limit.into()),
                    share: self.busy_poll_share,
                },
                capture: capture
                    .map(|file| file.interface("urnic0", &format!("functions at {}", path.display()))),
                ..ModelConfig::default()
            },
            clients: self.clients.into(),
            process_vm: self.dma == Dma::Auto,
        };
        let line = format!(
            "urnic: serving {text} at {}, {} clients at most\n",
            path.display(),
            self.clients
        );
        Ok((endpoint, line))
    }
}

/// Serves until SIGINT or SIGTERM.
pub(crate) fn serve(offer: &Offer, matches: &ArgMatches) -> Result<ExitCode, Failure> {
    let log = offer.log.trim();
    let Some(filter) = LogFilter::parse(log) else {
        let takes = "a level (off, error, warn, info, debug, trace) or MODULE=LEVEL, with commas between";
        return Err(Failure::usage(format!("log cannot be {log}: it takes {takes}")));
    };
    let log = Log {
        filter,
        stamp: String::new,
        // A log that cannot be written is no reason not to serve.
        write: |_, line: &str| drop(std::io::stderr().write_all(line.as_bytes())),
    };
    // The call fails only if there is a log already.
    let _ = tracing::subscriber::set_global_default(log);
    let pcap = offer.pcap.as_deref().filter(|path| !path.as_os_str().is_empty());
    pcap.map_or(Ok(()), crate::files::prepare_capture)?;
    let capture = pcap.map(|path| CaptureFile::new(path.to_owned(), None));
    let host = GidTable::of_host();
    let owners = owners(matches);
    let mut endpoints = Vec::new();
    let mut lines = String::new();
    for number in 0..offer.socket.len() {
        let (endpoint, line) = offer.endpoint(number, &owners, host.entries(), capture.as_ref())?;
        endpoints.push(endpoint);
        lines.push_str(&line);
    }
    raise_descriptor_limit();
    // Before the first thread starts, so that no thread takes the signals.
    let stop = crate::signals::as_descriptor().map_err(Failure::runtime)?;
    let server = Server::bind(endpoints).map_err(|error| match error {
        ServeError::NoSocket(_) => Failure::usage(error),
        _ => Failure::runtime(error),
    })?;
    print(&lines)?;
    server.run(std::os::fd::AsFd::as_fd(&stop));
    Ok(ExitCode::SUCCESS)
}

/// Raises the limit of descriptors: each stream and each eventfd takes one, and the default limit
/// is for programs that use `select`.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // If raising fails, the present limit applies.
    let _ = setrlimit(Resource::Nofile, raised);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches};

    fn offer(line: &str) -> Result<Vec<(Endpoint, String)>, String> {
        let words = format!("urnic serve {line}");
        let matches = crate::Cli::command()
            .try_get_matches_from(words.split(' '))
            .map_err(|error| error.to_string())?;
        let cli = crate::Cli::from_arg_matches(&matches).map_err(|error| error.to_string())?;
        let crate::Command::Serve { offer } = cli.command else {
            panic!("serve");
        };
        let owners = owners(matches.subcommand_matches("serve").unwrap());
        let gid = |ip: &str, prefix_len, netdev: &str, ifindex| Gid {
            ip: ip.parse().unwrap(),
            prefix_len,
            ifindex,
            netdev: netdev.to_owned(),
        };
        let host = [
            gid("192.0.2.7", 24, "eth0", 2),
            gid("2001:db8::7", 64, "eth0", 2),
            gid("fe80::7", 64, "eth0", 2),
            gid("fe80::7", 64, "eth1", 3),
        ];
        (0..offer.socket.len())
            .map(|number| {
                offer
                    .endpoint(number, &owners, &host, None)
                    .map_err(|failure| failure.message)
            })
            .collect()
    }

    fn addresses(endpoint: &Endpoint) -> Vec<(String, u32, u32)> {
        let text = |a: &DeviceAddress| (a.ip.to_string(), a.prefix_len, a.scope);
        endpoint.config.addresses.iter().map(text).collect()
    }

    #[test]
    fn an_address_belongs_to_the_socket_before_it_or_to_all() {
        let offers =
            offer("--addr 127.0.0.9 --socket /a --addr 192.0.2.7 --addr 2001:db8::7/48 --socket /b").unwrap();
        let [(a, _), (b, _)] = &offers[..] else {
            panic!("two")
        };
        let loopback = ("127.0.0.9".to_owned(), 8, 0);
        let [v4, v6] = [("192.0.2.7".to_owned(), 24, 0), ("2001:db8::7".to_owned(), 48, 0)];
        assert_eq!(addresses(a), [loopback.clone(), v4, v6]);
        assert_eq!(addresses(b), [loopback]);
        assert_eq!((a.mode, a.clients), (0o600, 16));
    }

    #[test]
    fn functions_are_confined_unless_they_are_the_host() {
        let offers =
            offer("--socket /a --addr 192.0.2.7 --allow 127.0.0.0/8 --socket /b --addr host --socket /c")
                .unwrap();
        let Reach::Confined { host, allow } = &offers[0].0.config.reach else {
            panic!("confined");
        };
        assert_eq!(host.len(), 4);
        assert_eq!(allow, &[network("127.0.0.0/8").unwrap()]);
        assert_eq!(offers[1].0.config.reach, Reach::Unrestricted);
        assert_eq!(offers[1].0.config.addresses.len(), 4);
        assert!(matches!(offers[2].0.config.reach, Reach::Confined { .. }));
        assert!(offers[2].0.config.addresses.is_empty());
        assert!(
            offers[2].1.contains("serving no address at /c"),
            "{}",
            offers[2].1
        );
    }

    #[test]
    fn a_link_local_address_names_its_interface() {
        let offers = offer("--socket /a --addr fe80::7%eth1").unwrap();
        assert_eq!(addresses(&offers[0].0), [("fe80::7".to_owned(), 64, 3)]);
    }

    #[test]
    fn invalid_arguments_are_refused() {
        for (line, word) in [
            ("--addr host", "--socket"),
            ("--socket /a --addr nowhere", "nowhere"),
            ("--socket /a --addr 192.0.2.7/33", "/33"),
            ("--socket /a --addr 0.0.0.0", "0.0.0.0"),
            ("--socket /a --addr 192.0.2.8", "192.0.2.8"),
            ("--socket /a --addr fe80::7%eth2", "eth2"),
            ("--socket /a --addr host --addr 192.0.2.7", "host"),
            ("--socket /a --clients 0", "clients"),
            ("--socket /a --mode 1777", "mode"),
            ("--socket /a --allow 10.0.0.0/x", "/x"),
        ] {
            let error = offer(line).expect_err(line);
            assert!(error.contains(word), "{line}: {error}");
        }
    }
}
