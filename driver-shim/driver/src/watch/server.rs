//! The server of a stat socket.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, memfd_create, open, unlinkat};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

use super::names;
use super::snapshot::Snapshot;
use urnic_process::fds::InternalFd;

/// The maximum number of requests that one call answers; the next call answers the others.
const MAX_REQUESTS: usize = 16;

/// The socket on which requests arrive. Its name is removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct StatSocket {
    socket: InternalFd,
    folder: InternalFd,
    name: String,
    owner: u32,
}

impl StatSocket {
    /// Opens a stat socket in the folder, and removes the names of processes that have ended.
    ///
    /// # Errors
    /// The errors of the folder; `EMFILE` if no fd is left.
    pub(crate) fn open(folder: &Path) -> Result<StatSocket, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = InternalFd::of_device(open(folder, flags, Mode::empty())?)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let socket = InternalFd::of_device(socket)?;
        let name = {
            let folder = folder.get().ok_or(Errno::BADF)?;
            names::remove_stale(folder);
            names::publish(folder, socket.get().ok_or(Errno::BADF)?)?
        };
        Ok(StatSocket {
            socket,
            folder,
            name,
            owner: std::process::id(),
        })
    }

    /// The descriptor to poll for requests.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.get()
    }

    /// Answers the requests that arrived.
    pub(crate) fn answer(&self, snapshot: impl Fn() -> Snapshot) {
        let Some(socket) = self.socket.get() else { return };
        for _ in 0..MAX_REQUESTS {
            match receive_request(socket) {
                Ok(Some(client)) => {
                    // A client that closed its end gets no answer; this is no error of this
                    // process.
                    if let Err(errno) = send_snapshot(&client, &snapshot()) {
                        tracing::debug!("no answer to a request of `urnic stat`: {errno}");
                    }
                }
                Ok(None) => {}
                Err(_) => return,
            }
        }
    }
}

impl StatSocket {
    /// Unlinks the socket: no program can connect any more.
    pub(crate) fn close(&self) {
        // In a forked child the name is the parent's.
        if self.owner == std::process::id()
            && let Some(folder) = self.folder.get()
        {
            let _ = unlinkat(folder, self.name.as_str(), AtFlags::empty());
        }
    }
}

impl Drop for StatSocket {
    fn drop(&mut self) {
        self.close();
    }
}

/// Receives a request: the client's socket. `None`: the request had no socket, or no fd was left
/// for it.
fn receive_request(socket: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )?;
    Ok(take_fd(&mut ancillary))
}

/// The first fd of the control message; others are closed.
pub(super) fn take_fd(ancillary: &mut RecvAncillaryBuffer<'_>) -> Option<OwnedFd> {
    ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.into_iter().next(),
            _ => None,
        })
        .next()
}

/// Sends one byte and an fd.
pub(super) fn send_fd(
    to: impl AsFd,
    fd: BorrowedFd<'_>,
    address: Option<&SocketAddrUnix>,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let byte = [IoSlice::new(b"?")];
    match address {
        Some(address) => rustix::net::sendmsg_addr(to, address, &byte, &mut ancillary, flags)?,
        None => sendmsg(to, &byte, &mut ancillary, flags)?,
    };
    Ok(())
}

fn send_snapshot(client: &OwnedFd, snapshot: &Snapshot) -> Result<(), Errno> {
    let text = serde_json::to_vec(snapshot).map_err(|_| Errno::INVAL)?;
    let file = memfd_create("urnic stat", MemfdFlags::CLOEXEC)?;
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(&file, rest)?;
        rest = rest.get(n..).unwrap_or_default();
    }
    send_fd(client, file.as_fd(), None)
}
