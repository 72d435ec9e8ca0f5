//! NFS over RDMA (RFC 8267). The devices move the data of calls and replies between the memory of
//! client and server.

use crate::binding::BINDINGS;
use crate::call::{Answer, Outgoing, Transport};
use crate::memory::Pool;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use urnic_rpc_rdma_verbs::{Call, Client, Error};

pub use crate::binding::NFS_PORT;
pub use urnic_rpc_rdma::Profile;
pub use urnic_rpc_rdma_verbs::{Options, Server};

/// The defaults of a client or server, with the bindings of NFSv3, NFSACL and MOUNT.
pub fn options() -> Options {
    Options {
        bindings: &BINDINGS,
        ..Options::default()
    }
}

/// An RDMA connection to a server. When it breaks, the client connects again and repeats the calls
/// without an answer.
pub struct Rdma(Client);

impl Rdma {
    /// Connects, and connects again when the connection breaks, each time within `timeout`.
    ///
    /// # Errors
    /// There is no RDMA device, or the server does not answer.
    pub fn connect(server: SocketAddr, pool: &Pool, timeout: Duration) -> io::Result<Self> {
        let options = Options {
            connect_timeout: timeout,
            ..options()
        };
        Client::with_pool(server, &options, pool)
            .map(Self)
            .map_err(failed)
    }
}

impl Transport for Rdma {
    fn submit(&mut self, call: Outgoing) -> io::Result<()> {
        let call = Call {
            message: call.message,
            argument: call.item,
            result: call.into,
            max_reply: call.max_reply,
        };
        self.0.submit(call).map(drop).map_err(failed)
    }

    fn wait(&mut self) -> io::Result<(u32, Answer)> {
        let (xid, answer) = self.0.wait_any().map_err(failed)?;
        let answer = answer.map_err(failed)?;
        // The length of unused memory is not the length of the data.
        let data = answer
            .result
            .and_then(|(data, placed)| (placed && !data.is_empty()).then_some(data));
        Ok((
            xid,
            Answer {
                message: answer.message,
                data,
            },
        ))
    }
}

fn failed(error: Error) -> io::Error {
    match error {
        Error::Verbs(error) => error,
        Error::Unreachable(_) => io::Error::new(io::ErrorKind::HostUnreachable, error),
        Error::Disconnected | Error::Removed | Error::Invalid(_) | Error::Call(_) => io::Error::other(error),
    }
}
