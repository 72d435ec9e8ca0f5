//! The server of a stat socket.

use std::mem::MaybeUninit;

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, fchmod, unlinkat};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socket_with,
};

use super::answer;
use super::names;
use super::snapshot::Snapshot;
use urnic_presence::OwnFolder;
use urnic_process::fds::InternalFd;

/// The text of a request for a snapshot.
pub(super) const SNAPSHOT: &str = "?";
/// The beginning of the text of a request to add faults.
pub(super) const FAULTS: &str = "faults ";
/// The beginning of the text of a request to clear all faults, and then to add some.
pub(super) const ONLY_FAULTS: &str = "only faults ";
/// Longest text of a request; the rest of a longer one is ignored.
pub(super) const MAX_REQUEST: usize = 4096;

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
    pub(crate) fn open(folder: OwnFolder) -> Result<StatSocket, Errno> {
        let folder = InternalFd::of_device(folder.into_fd())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        // Only this user can reach the socket, whatever the umask, and whatever becomes of the
        // folder.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
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

    /// Answers the requests that arrived: for a snapshot, or to change the faults.
    pub(crate) fn answer(
        &self,
        snapshot: impl Fn() -> Snapshot,
        change_faults: impl Fn(&str, bool) -> Result<Vec<String>, String>,
    ) {
        let Some(socket) = self.socket.get() else { return };
        for _ in 0..MAX_REQUESTS {
            match receive_request(socket) {
                Ok(Some((client, request))) => {
                    let (more, only) = (request.strip_prefix(FAULTS), request.strip_prefix(ONLY_FAULTS));
                    let answered = match more.or(only) {
                        Some(faults) => answer::send(&client, &change_faults(faults, only.is_some())),
                        None => answer::send(&client, &snapshot()),
                    };
                    // A client that closed its end gets no answer; this is no error of this
                    // process.
                    if let Err(errno) = answered {
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

/// Receives a request: the client's socket and the text. `None`: the request had no socket, or no
/// fd was left for it.
fn receive_request(socket: BorrowedFd<'_>) -> Result<Option<(OwnedFd, String)>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut text = [0; MAX_REQUEST];
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut text)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )?;
    let text = text.get(..received.bytes).unwrap_or_default();
    let text = String::from_utf8_lossy(text).into_owned();
    Ok(take_fd(&mut ancillary).map(|client| (client, text)))
}

/// The first fd of the control message; others are closed.
fn take_fd(ancillary: &mut RecvAncillaryBuffer<'_>) -> Option<OwnedFd> {
    ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.into_iter().next(),
            _ => None,
        })
        .next()
}
