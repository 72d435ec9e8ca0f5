//! Requests: the socket of a process on which they arrive, and the clients that send them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, MemfdFlags, Mode, fchmod, memfd_create, unlinkat};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg_addr, socket_with,
};

use super::snapshot::{Objects, Snapshot};
use super::{answer, names};
use serde::de::DeserializeOwned;
use urnic_presence::{HwCounter, OwnFolder, Presence, Settings, Shown};
use urnic_process::fds::InternalFd;
use urnic_process::file_length;

/// The text of a request for a snapshot.
const SNAPSHOT: &str = "?";
/// The text of a request for the objects of a device.
const OBJECTS: &str = "objects";
/// The beginning of the text of a request to add faults.
const FAULTS: &str = "faults ";
/// The beginning of the text of a request to clear all faults, and then to add some.
const ONLY_FAULTS: &str = "only faults ";
/// Longest text of a request; the rest of a longer one is ignored.
const MAX_REQUEST: usize = 4096;

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

    /// Answers the requests that arrived: for a snapshot, for the objects, or to change the faults.
    pub(crate) fn answer(
        &self,
        snapshot: impl Fn() -> Snapshot,
        objects: impl Fn() -> Objects,
        change_faults: impl Fn(&str, bool) -> Result<Vec<String>, String>,
    ) {
        let Some(socket) = self.socket.get() else { return };
        for _ in 0..MAX_REQUESTS {
            match receive_request(socket) {
                Ok(Some((client, request))) => {
                    let (more, only) = (request.strip_prefix(FAULTS), request.strip_prefix(ONLY_FAULTS));
                    let answered = match more.or(only) {
                        Some(faults) => answer::send(&client, &change_faults(faults, only.is_some())),
                        None if request == OBJECTS => answer::send(&client, &objects()),
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

/// The time limit for the answers of all processes of a folder. Processes that do not answer in
/// time (stopped or overloaded ones) are left out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The homes in which processes of this user may be found; `dir` is the option `present.dir`.
pub fn homes(dir: Option<PathBuf>) -> Vec<PathBuf> {
    let settings = Settings {
        dir,
        ..Settings::default()
    };
    urnic_presence::homes(&settings)
}

/// The snapshots of this user's processes in these homes, by process number and name of the device;
/// with `pid`, only of that process. The names of processes that have ended are removed.
pub fn snapshots(homes: &[PathBuf], pid: Option<u32>) -> Vec<Snapshot> {
    let folders = homes.iter().flat_map(|home| OwnFolder::all(home));
    let mut all: Vec<Snapshot> = folders
        .flat_map(|folder| in_folder(folder.as_fd(), pid))
        .collect();
    all.sort_by(|one, other| (one.pid, &one.name).cmp(&(other.pid, &other.name)));
    all
}

/// The sum of a counter of a device over all processes of this user that see this presence.
fn total(presence: &Presence, device: &Shown, counter: HwCounter) -> u64 {
    of_presence(presence)
        .iter()
        .filter(|snapshot| snapshot.name == device.name())
        .fold(0, |sum, snapshot| sum.wrapping_add(snapshot.value(counter)))
}

/// Makes a file with the present value of a device's file in `hw_counters`.
///
/// # Errors
/// `EMFILE` if no fd is left, `ENOMEM` if no memory is left.
pub fn hw_counter(presence: &Presence, device: &Shown, counter: HwCounter) -> Result<OwnedFd, Errno> {
    let file = memfd_create("hw_counter", MemfdFlags::CLOEXEC)?;
    let text = format!("{}\n", total(presence, device, counter));
    file_length::permits(text.len() as u64)?;
    rustix::io::pwrite(&file, text.as_bytes(), 0)?;
    Ok(file)
}

/// Changes the plan of a process of this user in these homes: clears its faults if `clear` is set,
/// and adds those of `faults`. Returns all faults of the process, or what is wrong with the
/// specification; `None`: the process has no device open, or does not answer.
pub fn change_faults(
    homes: &[PathBuf],
    pid: u32,
    faults: &str,
    clear: bool,
) -> Option<Result<Vec<String>, String>> {
    let request = if clear { ONLY_FAULTS } else { FAULTS }.to_owned() + faults;
    if request.len() > MAX_REQUEST {
        let most = MAX_REQUEST - ONLY_FAULTS.len();
        return Some(Err(format!(
            "a request has at most {most} bytes of faults: send several"
        )));
    }
    let mut folders = homes.iter().flat_map(|home| OwnFolder::all(home));
    folders.find_map(|folder| {
        let names = names::all(folder.as_fd(), Some(pid));
        // The devices of a process have one plan.
        names.iter().find_map(|name| {
            let socket = send_request(folder.as_fd(), name, &request)?;
            answer::receive(socket, Instant::now() + ANSWER_TIMEOUT)
        })
    })
}

/// The snapshots of this user's processes that see this presence.
pub(super) fn of_presence(presence: &Presence) -> Vec<Snapshot> {
    let folder = presence.folder();
    folder.map_or_else(|_| Vec::new(), |folder| in_folder(folder.as_fd(), None))
}

/// The objects that this user's processes have made on devices of this presence.
pub(super) fn objects(presence: &Presence) -> Vec<Objects> {
    let folder = presence.folder();
    folder.map_or_else(|_| Vec::new(), |folder| asked(folder.as_fd(), None, OBJECTS))
}

fn in_folder(folder: BorrowedFd<'_>, pid: Option<u32>) -> Vec<Snapshot> {
    asked(folder, pid, SNAPSHOT)
}

/// The answers of the processes that have a socket in the folder.
fn asked<T: DeserializeOwned>(folder: BorrowedFd<'_>, pid: Option<u32>, request: &str) -> Vec<T> {
    names::remove_stale(folder);
    let sockets: Vec<OwnedFd> = names::all(folder, pid)
        .iter()
        .filter_map(|name| send_request(folder, name, request))
        .collect();
    let until = Instant::now() + ANSWER_TIMEOUT;
    sockets
        .into_iter()
        .filter_map(|socket| answer::receive(socket, until))
        .collect()
}

/// Sends a request to a process. The process answers over the returned socket.
fn send_request(folder: BorrowedFd<'_>, name: &str, text: &str) -> Option<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    let (ours, theirs) = answer::ends().ok()?;
    let fds = [theirs.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let address = names::address(folder, name).ok()?;
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg_addr(
        socket,
        &address,
        &[IoSlice::new(text.as_bytes())],
        &mut ancillary,
        flags,
    ) {
        Ok(_) => Some(ours),
        Err(Errno::CONNREFUSED) => {
            names::remove_refused(folder, name);
            None
        }
        Err(_) => None,
    }
}
