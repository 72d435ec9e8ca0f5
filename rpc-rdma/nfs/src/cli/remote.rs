//! SERVER:PATH, and the connection to it.

use super::Done;
use clap::Args;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;
use urnic_nfs::call::{CONNECT_TIMEOUT, Tcp, Transport};
use urnic_nfs::client::{Client, Error};
use urnic_nfs::memory::Pool;
use urnic_nfs::nfs3::{Attributes, Handle, Kind};
use urnic_nfs::{mount3, rdma, rpc, rpcbind};

const TCP_PORT: u16 = 2049;

/// A path on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    host: String,
    path: String,
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = match text.strip_prefix('[') {
            Some(rest) => rest.split_once("]:"),
            None => text.split_once(':'),
        };
        match split {
            Some((host, path)) if !host.is_empty() && path.starts_with('/') => Ok(Self {
                host: host.to_owned(),
                path: path.to_owned(),
            }),
            _ => Err("SERVER:PATH is wanted, the path beginning with /".to_owned()),
        }
    }
}

impl std::fmt::Display for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.path)
    }
}

/// Options of the connection to a server.
#[derive(Args, Debug)]
pub(crate) struct Way {
    /// Use RDMA instead of TCP
    #[arg(long)]
    rdma: bool,
    /// Port of NFS [default: 2049, by RDMA 20049]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// TCP port of MOUNT [default: that of NFS over TCP, or otherwise the port that rpcbind
    /// returns]
    #[arg(long, value_name = "PORT")]
    mount_port: Option<u16>,
    /// Time that the server may be unreachable
    #[arg(long, value_name = "SECONDS", default_value_t = CONNECT_TIMEOUT.as_secs())]
    patience: u64,
}

impl Way {
    fn port(&self) -> u16 {
        self.port
            .unwrap_or(if self.rdma { rdma::NFS_PORT } else { TCP_PORT })
    }

    /// Possible addresses of MOUNT.
    fn mount_port(&self) -> u16 {
        self.mount_port
            .unwrap_or(if self.rdma { TCP_PORT } else { self.port() })
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.patience.max(1))
    }

    fn connect(&self, server: SocketAddr, pool: &Pool) -> io::Result<Box<dyn Transport>> {
        Ok(if self.rdma {
            Box::new(rdma::Rdma::connect(server, pool, self.patience())?)
        } else {
            Box::new(Tcp::connect_within(server, self.patience())?)
        })
    }
}

/// A connection, and a file or directory on the server.
pub(crate) struct Place {
    pub(crate) client: Client,
    /// The directory of the file, or the directory itself.
    pub(crate) dir: Handle,
    /// The name of the file; `None` for a directory.
    pub(crate) name: Option<String>,
}

impl Remote {
    /// The last part of the path.
    pub(crate) fn name(&self) -> Option<&str> {
        self.path.rsplit('/').find(|name| !name.is_empty())
    }

    pub(crate) fn failed(&self, error: &dyn std::fmt::Display) -> String {
        format!("{self}: {error}")
    }

    /// Connects and finds the directory at the path, or the directory of the file there.
    pub(crate) fn reach(&self, way: &Way) -> Done<Place> {
        let failed = |error: Error| self.failed(&error);
        let addresses = (&*self.host, way.port()).to_socket_addrs();
        let addresses: Vec<_> = addresses
            .map_err(|error| format!("{}: {error}", self.host))?
            .collect();
        let mut last = format!("{}: no address", self.host);
        for address in addresses {
            let pool = Pool::new();
            let mut client = match way.connect(address, &pool) {
                Ok(transport) => Client::new(transport, pool),
                Err(error) => {
                    last = format!("{address}: {error}");
                    continue;
                }
            };
            client.null().map_err(failed)?;
            let whole = self.path.as_bytes();
            let (dir, name) = match self.mount(way, address, whole) {
                Ok(dir) => (dir, None),
                Err(Error::Mount(
                    mount3::Status::NotDir | mount3::Status::NoEnt | mount3::Status::Access,
                )) => {
                    let name = self.name().ok_or_else(|| self.failed(&"cannot be mounted"))?;
                    let path = self.path.trim_end_matches('/');
                    let above = &path[..path.len() - name.len()];
                    let above = above.trim_end_matches('/');
                    let above = if above.is_empty() { "/" } else { above };
                    (
                        self.mount(way, address, above.as_bytes()).map_err(failed)?,
                        Some(name.to_owned()),
                    )
                }
                Err(error) => return Err(failed(error)),
            };
            return Ok(Place { client, dir, name });
        }
        Err(last)
    }

    fn mount(&self, way: &Way, server: SocketAddr, path: &[u8]) -> Result<Handle, Error> {
        let ask = |port| {
            let tcp = Tcp::connect_within(SocketAddr::new(server.ip(), port), way.patience())?;
            Client::new(Box::new(tcp), Pool::new()).mount(path)
        };
        match ask(way.mount_port()) {
            Err(Error::Rpc(rpc::NoResults::Refused(_)) | Error::Io(_)) if way.mount_port.is_none() => {
                ask(rpcbind::port(server.ip(), mount3::PROGRAM, mount3::VERSION)?)
            }
            other => other,
        }
    }
}

impl Place {
    /// The file, which must exist.
    pub(crate) fn file(&mut self) -> Result<(Handle, Attributes), Error> {
        match &self.name {
            None => Ok((self.dir, self.client.attributes(self.dir)?)),
            Some(name) => {
                let found = self.client.lookup(self.dir, name.as_bytes())?;
                let attributes = match found.attributes {
                    Some(attributes) => attributes,
                    None => self.client.attributes(found.file)?,
                };
                Ok((found.file, attributes))
            }
        }
    }
}

/// The name of a kind of file.
pub(crate) const fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "a file",
        Kind::Directory => "a directory",
        Kind::Block | Kind::Character => "a device",
        Kind::Symlink => "a symbolic link",
        Kind::Socket => "a socket",
        Kind::Fifo => "a pipe",
    }
}
