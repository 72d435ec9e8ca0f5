//! `urnic-nfs serve`.

use super::{Done, octets};
use clap::Args;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use urnic_nfs::memory::Pool;
use urnic_nfs::service::Service;
use urnic_nfs::tree::{Caller, Directory, InMemory, Tree};
use urnic_nfs::{Options, Server, rdma, tcp};

/// What to serve, and where.
#[derive(Args, Debug)]
pub(crate) struct Serve {
    /// The directory
    #[arg(required_unless_present = "memory", conflicts_with = "memory")]
    directory: Option<PathBuf>,
    /// A tree in memory instead, empty at first, of at most so many octets: 512M, 2G
    #[arg(long, value_name = "SIZE", value_parser = octets)]
    memory: Option<u64>,
    /// Let nobody change anything
    #[arg(long)]
    read_only: bool,
    /// Clients' root is root here (else nobody)
    #[arg(long)]
    no_root_squash: bool,
    /// Address to listen at
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    listen: IpAddr,
    /// TCP port of NFS and MOUNT; 0 takes any and says which
    #[arg(long, value_name = "PORT", default_value_t = 2049)]
    tcp_port: u16,
    /// RDMA port of NFS and MOUNT; 0 takes any and says which [default: 20049, where there is an RDMA device]
    #[arg(long, value_name = "PORT")]
    rdma_port: Option<u16>,
}

impl Serve {
    pub(crate) fn run(&self) -> Done<()> {
        let pool = Pool::limited((1 << 30) + self.memory.unwrap_or_default().min(1 << 62));
        let tree: Box<dyn Tree> = match (&self.directory, self.memory) {
            (Some(directory), _) => {
                let tree = Directory::new(directory, pool.clone());
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
        println!("urnic-nfs: NFSv3 over TCP at {bound}");
        let rdma = self.rdma(&pool)?;
        std::thread::scope(|scope| {
            if let Some(server) = &rdma {
                scope.spawn(|| {
                    if let Err(error) = server.serve(&*service) {
                        eprintln!("urnic-nfs: no RDMA any more: {error}");
                    }
                });
            }
            let ended = tcp::serve(&listener, &service, &pool).map_err(refused);
            if let Some(server) = &rdma {
                server.stop();
            }
            ended
        })
    }

    /// The listener of RDMA, if it was asked for or there can be one.
    fn rdma(&self, pool: &Pool) -> Done<Option<rdma::Server>> {
        let address = SocketAddr::new(self.listen, self.rdma_port.unwrap_or(rdma::NFS_PORT));
        match rdma::Server::with_pool(address, &rdma::options(), pool) {
            Ok(server) => {
                println!("urnic-nfs: NFSv3 over RDMA at {}", server.address());
                Ok(Some(server))
            }
            Err(error) if self.rdma_port.is_none() => {
                // Where there is none, nobody expects it.
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
