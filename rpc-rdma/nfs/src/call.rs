//! The client's end of a transport, with several outstanding calls.

use crate::memory::{Buffer, Slice};
use crate::nfs3::{ReadOk, Reply};
use crate::tcp;
use crate::xdr::{Reader, Xdr};
use rustix::net::sockopt;
use std::collections::HashMap;
use std::io::{self, BufReader, Read};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A call to be sent.
#[derive(Debug)]
pub struct Outgoing {
    /// The RPC message, without the item and its padding.
    pub message: Vec<u8>,
    /// The offset in the message, after the count, of the data of a WRITE or the text of a
    /// SYMLINK, and these bytes.
    pub item: Option<(usize, Slice)>,
    /// Bytes of the longest reply, without the data of a READ.
    pub max_reply: usize,
    /// Memory for the data of a READ.
    pub into: Option<Buffer>,
}

/// The answer to a call.
#[derive(Debug)]
pub struct Answer {
    /// The RPC message.
    pub message: Vec<u8>,
    /// The data of a READ, cut to its length. `None` if there is none, or if it is in the message.
    pub data: Option<Buffer>,
}

/// Carries calls to a server.
pub trait Transport {
    /// Sends a call. Its xid must differ from those of other outstanding calls.
    ///
    /// # Errors
    /// The connection has ended, or the call is too long.
    fn submit(&mut self, call: Outgoing) -> io::Result<()>;

    /// Waits for the next answer to any call, and returns it with its xid.
    ///
    /// # Errors
    /// The connection has ended.
    fn wait(&mut self) -> io::Result<(u32, Answer)>;
}

/// Maximum bytes of a reply without data.
const MAX_REPLY: usize = 2 << 20;

/// Bytes of a READ's reply within which its data begins: RPC header, status, attributes, count,
/// eof, count.
const READ_HEAD: usize = 24 + 4 + 88 + 12;

/// Default time for connecting.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// Time for which the server's machine may send nothing. It is longer than the time for which a
/// server may stop receiving, for example for lack of memory.
const USER_TIMEOUT: Duration = Duration::from_secs(120);
/// Time without a packet after which TCP probes the server, and the interval of the probes.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// A TCP connection to a server.
#[derive(Debug)]
pub struct Tcp {
    stream: BufReader<TcpStream>,
    waiting: HashMap<u32, Option<Buffer>>,
}

impl Tcp {
    /// Connects within [`CONNECT_TIMEOUT`].
    ///
    /// # Errors
    /// The connection fails.
    pub fn connect(server: SocketAddr) -> io::Result<Self> {
        Self::connect_within(server, CONNECT_TIMEOUT)
    }

    /// Connects within a time. If the server's machine disappears later, the connection ends.
    ///
    /// # Errors
    /// The connection fails, or is not established within that time.
    pub fn connect_within(server: SocketAddr, timeout: Duration) -> io::Result<Self> {
        Self::over(TcpStream::connect_timeout(&server, timeout)?)
    }

    /// Uses an existing connection.
    ///
    /// # Errors
    /// An error of the socket.
    pub fn over(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(&stream, KEEPALIVE)?;
        sockopt::set_tcp_user_timeout(&stream, USER_TIMEOUT.as_millis() as u32)?;
        Ok(Self {
            stream: BufReader::with_capacity(2048, stream),
            waiting: HashMap::new(),
        })
    }
}

fn invalid_data(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Transport for Tcp {
    fn submit(&mut self, call: Outgoing) -> io::Result<()> {
        let xid = call
            .message
            .first_chunk()
            .ok_or_else(|| invalid_data("a call without an xid"))?;
        self.waiting.insert(u32::from_be_bytes(*xid), call.into);
        let item = call
            .item
            .as_ref()
            .map(|(at, slice)| (*at, std::slice::from_ref(slice)));
        tcp::send(self.stream.get_mut(), &call.message, item)
    }

    fn wait(&mut self) -> io::Result<(u32, Answer)> {
        let (len, mut last) = tcp::fragment(&mut self.stream, MAX_REPLY)?;
        let mut message = Vec::new();
        tcp::append(&mut self.stream, len.min(READ_HEAD), &mut message)?;
        let xid = message
            .first_chunk()
            .ok_or_else(|| invalid_data("a reply without an xid"))?;
        let xid = u32::from_be_bytes(*xid);
        let into = self
            .waiting
            .remove(&xid)
            .ok_or_else(|| invalid_data("a reply without a call"))?;
        if last
            && let Some(mut data) = into
            && let Some((at, count)) = data_begins(&message)
            && at + count + crate::xdr::padding(count) == len
            && count <= data.len()
        {
            data.resize(count);
            let here = (message.len() - at).min(count);
            data[..here].copy_from_slice(&message[at..at + here]);
            self.stream.read_exact(&mut data[here..])?;
            let left = len - message.len() - (count - here);
            self.stream.read_exact(&mut [0; 3][..left])?;
            message.truncate(at);
            let data = Some(data);
            return Ok((xid, Answer { message, data }));
        }
        tcp::append(&mut self.stream, len - message.len(), &mut message)?;
        while !last {
            let more;
            (more, last) = tcp::fragment(&mut self.stream, MAX_REPLY - message.len())?;
            tcp::append(&mut self.stream, more, &mut message)?;
        }
        Ok((xid, Answer { message, data: None }))
    }
}

/// The offset and the length of the data in the reply to a READ.
fn data_begins(head: &[u8]) -> Option<(usize, usize)> {
    let mut results = crate::rpc::results(head).ok()?;
    let read = Reply::<ReadOk, ()>::take(&mut results).ok()?.ok()?;
    let Reader(rest) = results;
    Some((head.len() - rest.len(), read.len as usize))
}
