//! `urnic-nfs serve`.

use super::{Done, bytes, print};
use clap::Args;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use urnic_console::complain;
use urnic_nfs::memory::Pool;
use urnic_nfs::service::Service;
use urnic_nfs::shares::Shares;
use urnic_nfs::tcp::Limits;
use urnic_nfs::tree::{Caller, Directory, InMemory, Tree};
use urnic_nfs::{Options, Server, rdma, tcp};

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
}

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
        let buffers = self.buffers.clamp(LEAST_BUFFERS, 1 << 62);
        let pool = Pool::limited(buffers + self.memory.unwrap_or_default().min(1 << 62));
        let shares = Shares::new(buffers);
        let tree: Box<dyn Tree> = match (&self.directory, self.memory) {
            (Some(directory), _) => {
                let tree = Directory::new(directory, pool.clone(), descriptors.min(1 << 16) as usize);
                Box::new(tree.map_err(|error| format!("{}: {error}", directory.display()))?)
            }
            (None, size) => {
                let owner = Caller {
                    uid: rustix::process::geteuid().as_raw(),
                    gid: rustix::process::getegid().as_raw(),
                    groups: Vec::new(),
                };
                let tree = InMemory::new(size.unwrap_or_default(), pool.clone(), &owner);
                Box::new(tree.ok_or("there is no memory")?)
            }
        };
        let options = Options {
            read_only: self.read_only,
            trust_root: self.no_root_squash,
        };
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
                ..rdma::options()
            },
        )?;
        std::thread::scope(|scope| {
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
        })
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
