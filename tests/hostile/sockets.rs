//! The sockets of the devices in this network namespace, and messages to them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, bind, connect, listen, sendmsg, socket_with,
};

/// Most descriptors of a message (SCM_MAX_FD).
pub(crate) const MOST_DESCRIPTORS: usize = 253;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The names of the abstract sockets of devices, without the zero byte.
pub(crate) fn names() -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut names: Vec<String> = table
        .lines()
        .filter_map(|line| Some(line.split_once(" @")?.1.to_owned()))
        .filter(|name| name.starts_with("urnic"))
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The TCP ports that have listeners.
pub(crate) fn listeners() -> Vec<u16> {
    const LISTEN: &str = "0A";
    let mut ports = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        for line in table.lines() {
            let mut fields = line.split_whitespace().skip(1);
            let local = fields.next().and_then(|local| local.rsplit(':').next());
            if let (Some(local), Some(LISTEN)) = (local, fields.nth(1)) {
                ports.extend(u16::from_str_radix(local, 16));
            }
        }
    }
    ports
}

/// The port at the end of a name.
pub(crate) fn port_of(name: &str) -> Option<u16> {
    name.rsplit('/').next()?.parse().ok()
}

fn unix() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Connects to the abstract socket of this name.
pub(crate) fn connected(name: &str) -> Result<OwnedFd, Errno> {
    let socket = unix()?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Takes an abstract name, with a listening socket.
pub(crate) fn taken(name: &str) -> Result<OwnedFd, Errno> {
    let socket = unix()?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    listen(&socket, 64)?;
    Ok(socket)
}

/// Sends a message with descriptors, without waiting.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}
