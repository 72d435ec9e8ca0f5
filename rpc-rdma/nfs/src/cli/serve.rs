//! `urnic-nfs serve`.

use super::ending::Ending;
use super::{Done, bytes, print};
use clap::{Args, ValueEnum};
use rustix::net::sockopt::ipv6_v6only;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use urnic_console::complain;
use urnic_nfs::memory::Pool;
use urnic_nfs::rpcbind::{Mapping, Registration, Transport};
use urnic_nfs::service::Service;
use urnic_nfs::shares::Shares;
use urnic_nfs::tcp::Limits;
use urnic_nfs::tree::{Caller, Directory, InMemory, Tree};
use urnic_nfs::{Options, Server, mount3, nfs3, nfsacl, rdma, tcp};
use urnic_sync::Mutex;

/// Arguments of `serve`.
#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// The directory
    #[arg(required_unless_present = "memory", conflicts_with = "memory")]
    directory: Option<PathBuf>,
    /// Serve a tree in memory of at most this number of bytes: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,
    /// Refuse all changes
    #[arg(long)]
    read_only: bool,
    /// Do not map the clients' root to nobody
    #[arg(long)]
    no_root_squash: bool,
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    listen: IpAddr,
    /// TCP port of NFS and MOUNT; 0 selects a free port. The port is printed
    #[arg(long, value_name = "PORT", default_value_t = 2049)]
    tcp_port: u16,
    /// RDMA port of NFS and MOUNT; 0 selects a free port [default: 20049, if an RDMA device exists]
    #[arg(long, value_name = "PORT")]
    rdma_port: Option<u16>,
    /// Memory for calls and replies in progress, without that of a tree in memory. One client has
    /// at most half of it, and less if others need it
    #[arg(long, value_name = "SIZE", value_parser = bytes, default_value = "1G")]
    buffers: u64,
    /// Connections by TCP, and by RDMA; for one more, the client with the most connections loses
    /// one [default: 512 and 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: Option<u32>,
    /// Time without calls after which the server ends a connection; 0 means never
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    idle_timeout: u32,
    /// Time for a call to arrive, or for a reply to be taken, and one second more for each 16 KiB
    /// of it
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    stall_timeout: u32,
    /// Register NFS, NFSACL and MOUNT with the rpcbind of this machine, until the server ends. If
    /// this fails: warn and serve, or end with an error
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Rpcbind::Off)]
    rpcbind: Rpcbind,
    /// The specification that the RDMA service follows. It differs for RDMA_DONE and for messages
    /// of 16 to 27 bytes: RFC 8166 discards them, and the draft answers them with an error
    #[arg(long, value_name = "SPECIFICATION", value_enum, default_value_t = Profile::Rfc8166)]
    rdma_profile: Profile,
}

/// Whether the server registers with rpcbind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Rpcbind {
    /// The server does not register
    Off,
    /// The server warns if it cannot register
    Warn,
    /// The server does not start if it cannot register
    Require,
}

/// The specification of RPC-over-RDMA.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Profile {
    /// RFC 8166
    Rfc8166,
    /// draft-ietf-nfsv4-rfc5666bis-04
    #[value(name = "draft-04")]
    Draft04,
}

impl From<Profile> for rdma::Profile {
    fn from(profile: Profile) -> Self {
        match profile {
            Profile::Rfc8166 => Self::Rfc8166,
            Profile::Draft04 => Self::Draft04,
        }
    }
}

/// The programs that the server serves at its ports.
const PROGRAMS: [(u32, u32); 3] = [
    (nfs3::PROGRAM, nfs3::VERSION),
    (nfsacl::PROGRAM, nfsacl::VERSION),
    (mount3::PROGRAM, mount3::VERSION),
];

/// Minimum of `--buffers`: a few calls of a few clients.
const LEAST_BUFFERS: u64 = 32 << 20;

/// The share of TCP connections in the descriptors of the process, of which a tree uses three
/// quarters.
const TCP_PART: u64 = 8;
/// The share of RDMA connections in the descriptors of the process. Each connection has several.
const RDMA_PART: u64 = 32;

impl Serve {
    /// Serves until the listener fails. The process may open this number of descriptors.
    pub(crate) fn run(&self, descriptors: u64) -> Done<()> {
        // Before there are threads.
        let ending = (self.rpcbind != Rpcbind::Off).then(Ending::block).transpose()?;
        let buffers = self.buffers.clamp(LEAST_BUFFERS, 1 << 62);
        let pool = Pool::limited(buffers + self.memory.unwrap_or_default().min(1 << 62));
        let shares = Shares::new(buffers);
        let options = Options {
            read_only: self.read_only,
            trust_root: self.no_root_squash,
        };
        let tree = self.tree(&pool, descriptors)?;
        let service: Arc<dyn Service> = Arc::new(Server::new(tree, options));
        let address = SocketAddr::new(self.listen, self.tcp_port);
        let refused = |error| format!("{address}: {error}");
        let listener = TcpListener::bind(address).map_err(refused)?;
        let bound = listener.local_addr().map_err(refused)?;
        print(&format!("urnic-nfs: NFSv3 over TCP at {bound}\n"))?;
        let limits = Limits {
            connections: self.connections(512, descriptors / TCP_PART),
            idle: self.idle(),
            stall: self.stall(),
        };
        let rdma = self.rdma(
            &pool,
            rdma::Options {
                connections: self.connections(256, descriptors / RDMA_PART),
                shares: Some(shares.clone()),
                idle: limits.idle,
                stall: limits.stall,
                profile: self.rdma_profile.into(),
                ..rdma::options()
            },
        )?;
        let rdma_address = rdma.as_ref().map(rdma::Server::address);
        let registration = match ending {
            Some(ending) => self.register(&listener, bound, rdma_address, ending)?,
            None => Arc::default(),
        };
        let ended = std::thread::scope(|scope| {
            if let Some(server) = &rdma {
                scope.spawn(|| {
                    if let Err(error) = server.serve(&*service) {
                        complain("urnic-nfs", &format!("RDMA service ended: {error}"));
                    }
                });
            }
            let ended = tcp::serve(&listener, &service, &pool, &shares, limits).map_err(refused);
            if let Some(server) = &rdma {
                server.stop();
            }
            ended
        });
        drop(registration.lock().take());
        ended
    }

    fn tree(&self, pool: &Pool, descriptors: u64) -> Done<Box<dyn Tree>> {
        let Some(directory) = &self.directory else {
            let owner = Caller {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                groups: Vec::new(),
            };
            let tree = InMemory::new(self.memory.unwrap_or_default(), pool.clone(), &owner);
            return Ok(Box::new(tree.ok_or("there is no memory")?));
        };
        let tree = Directory::new(directory, pool.clone(), descriptors.min(1 << 16) as usize);
        Ok(Box::new(
            tree.map_err(|error| format!("{}: {error}", directory.display()))?,
        ))
    }

    /// Registers the programs at these addresses with rpcbind. The registration ends before one of
    /// the signals ends the process.
    fn register(
        &self,
        listener: &TcpListener,
        tcp: SocketAddr,
        rdma: Option<SocketAddr>,
        ending: Ending,
    ) -> Done<Arc<Mutex<Option<Registration>>>> {
        let both_families = tcp.is_ipv6() && !ipv6_v6only(listener).map_err(|errno| errno.to_string())?;
        let mappings = mappings(tcp, rdma, both_families);
        let registration = match Registration::new(&mappings) {
            Ok(registration) => Some(registration),
            Err(error) if self.rpcbind == Rpcbind::Require => return Err(error.to_string()),
            Err(error) => {
                tracing::warn!(%error, "clients must be told the ports: rpcbind does not know them");
                None
            }
        };
        let registration = Arc::new(Mutex::new(registration));
        let shared = registration.clone();
        ending.after(move || drop(shared.lock().take()))?;
        Ok(registration)
    }

    /// Connections of a transport: the option or the default, limited by the descriptors.
    fn connections(&self, default: u32, descriptors: u64) -> usize {
        let wanted = u64::from(self.max_connections.unwrap_or(default));
        if wanted > descriptors {
            tracing::warn!(
                wanted,
                most = descriptors,
                "fewer connections: raise the limit of open files (ulimit -n)"
            );
        }
        wanted.min(descriptors).max(1) as usize
    }

    fn idle(&self) -> Option<Duration> {
        (self.idle_timeout > 0).then(|| Duration::from_secs(self.idle_timeout.into()))
    }

    fn stall(&self) -> Duration {
        Duration::from_secs(self.stall_timeout.into())
    }

    /// The RDMA listener, if the options request one or a device exists.
    fn rdma(&self, pool: &Pool, options: rdma::Options) -> Done<Option<rdma::Server>> {
        let address = SocketAddr::new(self.listen, self.rdma_port.unwrap_or(rdma::NFS_PORT));
        match rdma::Server::with_pool(address, &options, pool) {
            Ok(server) => {
                print(&format!("urnic-nfs: NFSv3 over RDMA at {}\n", server.address()))?;
                Ok(Some(server))
            }
            Err(error) if self.rdma_port.is_none() => {
                // A machine without a device is no reason for a warning.
                if error.no_device() {
                    tracing::info!(%error, "no RDMA");
                } else {
                    tracing::warn!(%address, %error, "no RDMA");
                }
                Ok(None)
            }
            Err(error) => Err(format!("{address}, RDMA: {error}")),
        }
    }
}

/// The mappings of all programs. A listener at the IPv6 address `::` may be one of both families.
fn mappings(tcp: SocketAddr, rdma: Option<SocketAddr>, both_families: bool) -> Vec<Mapping> {
    let ways = [(Transport::Tcp, Some(tcp)), (Transport::Rdma, rdma)];
    let addresses = ways.into_iter().flat_map(|(transport, address)| {
        let any = address.filter(|address| both_families && address.ip() == Ipv6Addr::UNSPECIFIED);
        let too = any.map(|address| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()));
        let addresses = address.into_iter().chain(too);
        addresses.map(move |address| (transport, address))
    });
    let of_programs = addresses.flat_map(|(transport, address)| {
        PROGRAMS.map(|program| Mapping {
            program,
            transport,
            address,
        })
    });
    of_programs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_both_families_has_four_netids() {
        let address = |text: &str| text.parse().expect("an address");
        let netids = |tcp, rdma, both| {
            let mappings = mappings(tcp, rdma, both);
            let of_nfs = mappings.iter().filter(|mapping| mapping.program == PROGRAMS[0]);
            let netids = of_nfs.map(|mapping| (mapping.netid(), mapping.universal_address()));
            assert_eq!(mappings.len(), 3 * netids.clone().count());
            netids.collect::<Vec<_>>()
        };
        let owned = |netid, address: &str| (netid, address.to_owned());
        assert_eq!(
            netids(address("[::]:2049"), Some(address("[::]:20049")), true),
            [
                owned("tcp6", "::.8.1"),
                owned("tcp", "0.0.0.0.8.1"),
                owned("rdma6", "::.78.81"),
                owned("rdma", "0.0.0.0.78.81")
            ]
        );
        assert_eq!(
            netids(address("[::]:2049"), None, false),
            [owned("tcp6", "::.8.1")]
        );
        let one = |text| netids(address(text), Some(address(text)), true).len();
        assert_eq!((one("[fd77::1]:2049"), one("0.0.0.0:2049")), (2, 2));
    }
}
