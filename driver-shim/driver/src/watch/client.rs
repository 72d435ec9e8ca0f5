//! The client of the stat sockets.

use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SocketFlags, SocketType, recvmsg, socket_with, socketpair,
};
use serde::de::DeserializeOwned;

use super::folder::{folder, of_home};
use super::names;
use super::server::{FAULTS, SNAPSHOT, send_fd, take_fd};
use super::snapshot::Snapshot;
use urnic_presence::{HwCounter, Presence, Settings, Shown, homes};

/// The time limit for the answers of all processes of a folder. Processes that do not answer in
/// time (stopped or overloaded ones) are left out.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Folders in which processes of this user may be found; `dir` is the option `present.dir`.
pub fn folders(dir: Option<PathBuf>) -> Vec<PathBuf> {
    let settings = Settings {
        dir,
        ..Settings::default()
    };
    homes(&settings).iter().map(|home| of_home(home)).collect()
}

/// The snapshots of the processes in these folders, by process number and name of the device; with
/// `pid`, only of that process. The names of processes that have ended are removed.
pub fn snapshots(folders: &[PathBuf], pid: Option<u32>) -> Vec<Snapshot> {
    let mut all: Vec<Snapshot> = folders.iter().flat_map(|folder| in_folder(folder, pid)).collect();
    all.sort_by(|one, other| (one.pid, &one.name).cmp(&(other.pid, &other.name)));
    all
}

/// The sum of a file of a device over all processes of this user that see this presence.
fn total(presence: &Presence, device: &Shown, counter: HwCounter) -> u64 {
    let folder = folder(presence).map(Path::to_owned);
    snapshots(folder.as_slice(), None)
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
    rustix::io::pwrite(&file, text.as_bytes(), 0)?;
    Ok(file)
}

/// Adds faults to the plan of a process in these folders, or none if `faults` is empty. Returns all
/// faults of the process, or what is wrong with the specification; `None`: the process has no
/// device open, or does not answer.
pub fn add_faults(folders: &[PathBuf], pid: u32, faults: &str) -> Option<Result<Vec<String>, String>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    folders.iter().find_map(|folder| {
        let folder = open(folder, flags, Mode::empty()).ok()?;
        let names = names::all(folder.as_fd(), Some(pid));
        // The devices of a process have one plan.
        names.iter().find_map(|name| {
            let socket = send_request(folder.as_fd(), name, &format!("{FAULTS}{faults}"))?;
            receive_answer(&socket, Instant::now() + ANSWER_TIMEOUT)
        })
    })
}

fn in_folder(folder: &Path, pid: Option<u32>) -> Vec<Snapshot> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = open(folder, flags, Mode::empty()) else {
        return Vec::new();
    };
    names::remove_stale(folder.as_fd());
    let sockets: Vec<OwnedFd> = names::all(folder.as_fd(), pid)
        .iter()
        .filter_map(|name| send_request(folder.as_fd(), name, SNAPSHOT))
        .collect();
    let until = Instant::now() + ANSWER_TIMEOUT;
    sockets
        .iter()
        .filter_map(|socket| receive_answer(socket, until))
        .collect()
}

/// Sends a request to a process. The process answers over the returned socket.
fn send_request(folder: BorrowedFd<'_>, name: &str, text: &str) -> Option<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .ok()?;
    match send_fd(
        socket,
        text,
        theirs.as_fd(),
        Some(&names::address(folder, name).ok()?),
    ) {
        Ok(()) => Some(ours),
        Err(Errno::CONNREFUSED) => {
            names::remove_refused(folder, name);
            None
        }
        Err(_) => None,
    }
}

fn receive_answer<T: DeserializeOwned>(socket: &OwnedFd, until: Instant) -> Option<T> {
    let timeout = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok()?;
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)).ok()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut ancillary,
        RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
    )
    .ok()?;
    let file = take_fd(&mut ancillary)?;
    let mut text = Vec::new();
    loop {
        let mut piece = [0; 16 << 10];
        match rustix::io::pread(&file, &mut piece, text.len() as u64).ok()? {
            0 => return serde_json::from_slice(&text).ok(),
            n => text.extend_from_slice(piece.get(..n)?),
        }
    }
}
