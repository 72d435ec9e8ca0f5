//! rpcbind (RFC 1833): finds the port of a program on another machine, and registers the programs
//! of this server with the rpcbind of this machine.
//!
//! Programs over RDMA have the netids `rdma` and `rdma6` (RFC 8166 §9). The other end of a
//! connection is not trusted: its answers must arrive within a time, and have a maximum length.

use crate::client::{Error as ClientError, Outcome};
use crate::rpc::{self, Call, Credential, NoResults, Refusal};
use crate::tcp::{append, fragment, send};
use crate::xdr::{BadXdr, Xdr};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// The socket of the local rpcbind, which identifies the user of a caller.
const SOCKET: &str = "/run/rpcbind.sock";

/// TCP port of rpcbind.
const PORT: u16 = 111;

/// The program: version 2 knows port numbers, and version 4 netids and addresses.
const PORTMAP: (u32, u32) = (100_000, 2);
const RPCBIND: (u32, u32) = (100_000, 4);
const GETPORT: u32 = 3;
const SET: u32 = 1;
const UNSET: u32 = 2;

/// Time for all calls of one connection.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum bytes of an answer: a header with the longest verifier, and a number.
const MAX_REPLY: usize = 1024;

/// Maximum fragments of an answer.
const FRAGMENTS: usize = 8;

/// The transport of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// RPC-over-RDMA.
    Rdma,
}

/// A version of a program at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Program and version.
    pub program: (u32, u32),
    /// The transport.
    pub transport: Transport,
    /// The address at which the server listens.
    pub address: SocketAddr,
}

impl Mapping {
    /// The netid of transport and address family (RFC 5665 §5.2, RFC 8166 §9).
    pub const fn netid(&self) -> &'static str {
        match (self.transport, self.address) {
            (Transport::Tcp, SocketAddr::V4(_)) => "tcp",
            (Transport::Tcp, SocketAddr::V6(_)) => "tcp6",
            (Transport::Rdma, SocketAddr::V4(_)) => "rdma",
            (Transport::Rdma, SocketAddr::V6(_)) => "rdma6",
        }
    }

    /// The universal address: the IP address, and the two bytes of the port as decimal numbers (RFC
    /// 5665 §5.2.3).
    pub fn universal_address(&self) -> String {
        let [high, low] = self.address.port().to_be_bytes();
        format!("{}.{high}.{low}", self.address.ip())
    }

    /// Appends the arguments of SET and UNSET: `rpcb` (RFC 1833 §2.1).
    fn put(&self, out: &mut Vec<u8>) {
        self.program.put(out);
        for text in [self.netid(), &self.universal_address(), env!("CARGO_PKG_NAME")] {
            text.as_bytes().put(out);
        }
    }
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (program, version) = self.program;
        let address = self.universal_address();
        write!(
            f,
            "program {program} version {version}, {} {address}",
            self.netid()
        )
    }
}

/// The reason why rpcbind registers or removes nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no rpcbind.
    #[error("no rpcbind: {SOCKET}: {unix}; 127.0.0.1:{PORT}: {tcp}")]
    Unreachable {
        /// The error of its socket.
        unix: io::Error,
        /// The error of its port.
        tcp: io::Error,
    },
    /// The connection failed, or the answer took too long or was too long.
    #[error("rpcbind: {0}")]
    Io(#[from] io::Error),
    /// The answer has no results.
    #[error("rpcbind: {0}")]
    Rpc(#[from] NoResults),
    /// rpcbind has another address for this program and netid, or its user may not change it.
    #[error(
        "rpcbind has another address for {0}, or this user may not change it \
         (rpcinfo lists what is registered, and rpcinfo -d removes what has ended)"
    )]
    Refused(Mapping),
}

/// Mappings that the local rpcbind has. They are removed when the value is dropped.
#[derive(Debug)]
pub struct Registration(Vec<Mapping>);

impl Registration {
    /// Registers all mappings, or none.
    ///
    /// # Errors
    /// There is no rpcbind, or it refuses a mapping.
    pub fn new(mappings: &[Mapping]) -> Result<Self, Error> {
        let mut rpcbind = Rpcbind::local()?;
        let mut registration = Self(Vec::new());
        for mapping in mappings {
            match rpcbind.change(SET, mapping) {
                Ok(true) => registration.0.push(*mapping),
                Ok(false) => return Err(Error::Refused(*mapping)),
                Err(error) => {
                    // rpcbind may have carried out the call whose answer is missing.
                    registration.0.push(*mapping);
                    return Err(error);
                }
            }
        }
        Ok(registration)
    }

    fn remove(&self) -> Result<(), Error> {
        // rpcbind may have ended the connection, which was idle.
        let mut rpcbind = Rpcbind::local()?;
        let mut removed = Ok(());
        for mapping in &self.0 {
            if !rpcbind.change(UNSET, mapping)? {
                removed = Err(Error::Refused(*mapping));
            }
        }
        removed
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.0.is_empty()
            && let Err(error) = self.remove()
        {
            tracing::warn!(%error, "the programs stay registered");
        }
    }
}

/// The TCP port of a program, from the server's rpcbind (RFC 1833 §3, version 2).
///
/// # Errors
/// There is no rpcbind, or the program is not registered there.
pub fn port(server: IpAddr, program: u32, version: u32) -> Outcome<u16> {
    const TCP: u32 = 6;
    let mut rpcbind = Rpcbind(Timed::connect(tcp(server)?, &SocketAddr::new(server, PORT))?);
    let mut arguments = Vec::new();
    ((program, version), (TCP, 0_u32)).put(&mut arguments);
    let port = rpcbind
        .call(PORTMAP, GETPORT, &arguments)
        .map_err(|error| match error {
            Error::Rpc(error) => ClientError::Rpc(error),
            other => ClientError::Io(io::Error::other(other)),
        })?;
    match u16::try_from(port) {
        Ok(0) | Err(_) => Err(NoResults::from(Refusal::NoProgram).into()),
        Ok(port) => Ok(port),
    }
}

/// A connection to rpcbind.
struct Rpcbind(Timed);

impl Rpcbind {
    /// Connects to the rpcbind of this machine.
    fn local() -> Result<Self, Error> {
        let path = SocketAddrUnix::new(SOCKET).map_err(io::Error::from)?;
        let unix = match Timed::connect(socket(AddressFamily::UNIX)?, &path) {
            Ok(connection) => return Ok(Self(connection)),
            Err(error) => error,
        };
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let socket = tcp(loopback)?;
        bind_reserved(&socket, loopback);
        match Timed::connect(socket, &SocketAddr::new(loopback, PORT)) {
            Ok(connection) => Ok(Self(connection)),
            Err(tcp) => Err(Error::Unreachable { unix, tcp }),
        }
    }

    /// Calls SET or UNSET, and returns whether rpcbind has done it.
    fn change(&mut self, procedure: u32, mapping: &Mapping) -> Result<bool, Error> {
        let mut arguments = Vec::new();
        mapping.put(&mut arguments);
        Ok(self.call(RPCBIND, procedure, &arguments)? != 0)
    }

    /// Calls a procedure whose result is a word.
    fn call(&mut self, program: (u32, u32), procedure: u32, arguments: &[u8]) -> Result<u32, Error> {
        // One call at a time, so the xid may be the same.
        const XID: u32 = 1;
        let (program, version) = program;
        let call = Call {
            xid: XID,
            program,
            version,
            procedure,
            credential: Credential::Anonymous,
        };
        send(&mut self.0, &[&call.emit(), arguments].concat(), None)?;
        let reply = self.reply()?;
        if reply.first_chunk() != Some(&XID.to_be_bytes()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a reply to another call").into());
        }
        let mut results = rpc::results(&reply)?;
        let invalid = |error: BadXdr| NoResults::from(error);
        Ok(u32::take(&mut results).map_err(invalid)?)
    }

    fn reply(&mut self) -> io::Result<Vec<u8>> {
        let mut reply = Vec::new();
        for _ in 0..FRAGMENTS {
            let (len, last) = fragment(&mut self.0, MAX_REPLY - reply.len())?;
            append(&mut self.0, len, &mut reply)?;
            if last {
                return Ok(reply);
            }
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a reply of too many fragments",
        ))
    }
}

fn socket(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// A TCP socket for this address.
fn tcp(address: IpAddr) -> io::Result<OwnedFd> {
    socket(match address {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    })
}

/// Binds the socket to a port that only root can use, if possible: over TCP this is how rpcbind
/// recognises root.
fn bind_reserved(socket: &OwnedFd, address: IpAddr) {
    for port in (600..1024).rev() {
        match net::bind(socket, &SocketAddr::new(address, port)) {
            Err(Errno::ADDRINUSE) => {}
            _ => return,
        }
    }
}

/// A connected socket on which all operations together take at most [`TIMEOUT`].
struct Timed {
    socket: OwnedFd,
    end: Instant,
}

impl Timed {
    fn connect(socket: OwnedFd, address: &impl net::addr::SocketAddrArg) -> io::Result<Self> {
        let end = Instant::now() + TIMEOUT;
        let timed = Self { socket, end };
        timed.limit(Timeout::Send)?;
        match net::connect(&timed.socket, address) {
            Ok(()) => Ok(timed),
            // The timeout of a connect (socket(7)).
            Err(Errno::INPROGRESS | Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Limits the next operation to the time that is left.
    fn limit(&self, operation: Timeout) -> io::Result<()> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(set_socket_timeout(&self.socket, operation, Some(left))?)
    }
}

/// The result of an operation whose time may have ended.
fn in_time(result: rustix::io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        other => Ok(other?),
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.limit(Timeout::Recv)?;
        in_time(rustix::io::read(&self.socket, buffer))
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.limit(Timeout::Send)?;
        in_time(net::send(&self.socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
