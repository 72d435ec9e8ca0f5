//! The process that is asked.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags, memfd_create, open, unlinkat};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg, sendmsg,
    socket_with,
};

use super::{SUFFIX, Snapshot};
use crate::presence::fds::InternalFd;

/// Questions answered in one go; more are looked at the next time round.
const AT_ONCE: usize = 16;

/// Where questions arrive. Its name goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Door {
    socket: InternalFd,
    folder: InternalFd,
    name: String,
    owner: u32,
}

impl Door {
    /// Opens one in the folder.
    ///
    /// # Errors
    /// Those of the folder; `EMFILE`.
    pub(crate) fn open(folder: &Path) -> Result<Door, Errno> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = InternalFd::of_device(open(folder, flags, Mode::empty())?)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        let owner = std::process::id();
        // A process of another PID namespace may have the same number.
        for _ in 0..64 {
            let name = format!("{owner}-{}{SUFFIX}", NEXT.fetch_add(1, Ordering::Relaxed));
            let address = {
                let folder = folder.get().ok_or(Errno::BADF)?;
                place(folder, &name)?
            };
            match bind(&socket, &address) {
                Ok(()) => {
                    return Ok(Door {
                        socket: InternalFd::of_device(socket)?,
                        folder,
                        name,
                        owner,
                    });
                }
                Err(Errno::ADDRINUSE) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::ADDRINUSE)
    }

    /// What to poll.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.get()
    }

    /// Answers who asked meanwhile.
    pub(crate) fn answer(&self, snapshot: impl Fn() -> Snapshot) {
        let Some(socket) = self.socket.get() else { return };
        for _ in 0..AT_ONCE {
            match hear(socket) {
                Ok(Some(asker)) => {
                    // An asker that does not listen any more is his own business.
                    if let Err(errno) = tell(&asker, &snapshot()) {
                        tracing::debug!("a question is not answered: {errno}");
                    }
                }
                Ok(None) => {}
                Err(_) => return,
            }
        }
    }
}

impl Door {
    /// Takes its name away: nobody asks any more.
    pub(crate) fn close(&self) {
        // In a forked child the name is the parent's.
        if self.owner == std::process::id()
            && let Some(folder) = self.folder.get()
        {
            let _ = unlinkat(folder, self.name.as_str(), AtFlags::empty());
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

/// The address of a name in a folder, which may lie deeper than an address can tell.
pub(super) fn place(folder: BorrowedFd<'_>, name: &str) -> Result<SocketAddrUnix, Errno> {
    use std::os::fd::AsRawFd;
    SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", folder.as_raw_fd()))
}

/// Takes a question: the asker's socket. `None`: it had none, or there was no room for it.
fn hear(socket: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut octet = [0; 1];
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut octet)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )?;
    Ok(taken(&mut ancillary))
}

/// The first fd that came along; others are closed.
pub(super) fn taken(ancillary: &mut RecvAncillaryBuffer<'_>) -> Option<OwnedFd> {
    ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.into_iter().next(),
            _ => None,
        })
        .next()
}

/// Sends one octet and an fd.
pub(super) fn pass(to: impl AsFd, fd: BorrowedFd<'_>, address: Option<&SocketAddrUnix>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let octet = [IoSlice::new(b"?")];
    match address {
        Some(address) => rustix::net::sendmsg_addr(to, address, &octet, &mut ancillary, flags)?,
        None => sendmsg(to, &octet, &mut ancillary, flags)?,
    };
    Ok(())
}

fn tell(asker: &OwnedFd, snapshot: &Snapshot) -> Result<(), Errno> {
    let text = serde_json::to_vec(snapshot).map_err(|_| Errno::INVAL)?;
    let file = memfd_create("urnic stat", MemfdFlags::CLOEXEC)?;
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(&file, rest)?;
        rest = rest.get(n..).unwrap_or_default();
    }
    pass(asker, file.as_fd(), None)
}
