//! The answer of a process to a request: a memory file with JSON, which is sealed, so that reading
//! it never waits and its size does not change.
//!
//! The reader accepts nothing else. It checks the sender's user before it receives a descriptor,
//! and the descriptor before it reads from it: another process may send anything.

use std::io::IoSlice;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, UCred, recvmsg, sendmsg, socketpair,
};
use rustix::process::{getegid, geteuid, getpid};
use serde::Serialize;
use serde::de::DeserializeOwned;
use urnic_process::{file_length, signals, threads};

/// Longest answer: a device with all its queue pairs has some 24 MiB.
const MAX_ANSWER: u64 = 64 << 20;
/// Descriptors that one message can have (`SCM_MAX_FD`): the kernel closes those that find no room.
const MAX_FDS: usize = 253;
/// Refused descriptors that are being closed at a time; more of them stay open.
const MAX_CLOSING: usize = 16;
/// The seals with which a file does not change while it is read.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// The two ends over which a process answers: the reader's, and the one that the request carries.
pub(super) fn ends() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    set_socket_passcred(&ours, true)?;
    Ok((ours, theirs))
}

/// Sends an answer.
pub(super) fn send(reader: &OwnedFd, answer: &impl Serialize) -> Result<(), Errno> {
    let text = serde_json::to_vec(answer).map_err(|_| Errno::INVAL)?;
    file_length::permits(text.len() as u64)?;
    let file = memfd_create("urnic stat", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        let n = rustix::io::write(&file, rest)?;
        rest = rest.get(n..).unwrap_or_default();
    }
    fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    let fds = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    // Without this, the reader would see the real user of a process that acts for another.
    ancillary.push(SendAncillaryMessage::ScmCredentials(UCred {
        pid: getpid(),
        uid: geteuid(),
        gid: getegid(),
    }));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(reader, &[IoSlice::new(b"!")], &mut ancillary, flags)?;
    Ok(())
}

/// Receives an answer. `None`: no answer has arrived, or another user's process sent it, or it does
/// not have the form that [`send`] makes.
pub(super) fn receive<T: DeserializeOwned>(socket: OwnedFd, until: Instant) -> Option<T> {
    let timeout = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok()?;
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)).ok()?;
    match sender(socket.as_fd()) {
        Ok(uid) if uid == geteuid().as_raw() => {}
        Ok(_) => {
            close_apart(socket);
            return None;
        }
        Err(_) => return None,
    }
    let mut fds = descriptors(socket.as_fd()).ok()?;
    if fds.len() != 1 {
        close_apart(fds);
        return None;
    }
    let file = fds.pop()?;
    match length(file.as_fd()) {
        Some(length) => serde_json::from_slice(&content(&file, length)?).ok(),
        None => {
            close_apart(file);
            None
        }
    }
}

/// A message header of the kernel's and room for the credentials, so that no descriptor fits in.
#[repr(C, align(8))]
struct Credentials([MaybeUninit<u8>; 32]);

/// The user whose process sent the next message. The message stays, with its descriptors.
fn sender(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut space = Credentials([MaybeUninit::new(0); 32]);
    let mut room = RecvAncillaryBuffer::new(&mut space.0);
    let mut byte = [0; 1];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut room, flags)?;
    // rustix has no credentials with the process number 0, which is that of a process that this one
    // cannot see, as one in another container. There are no descriptors to be closed.
    std::mem::forget(room);
    if received.bytes == 0 {
        return Err(Errno::NODATA);
    }
    // SAFETY: each byte was initialised above, and the kernel has stored bytes only.
    let bytes = space.0.map(|byte| unsafe { byte.assume_init() });
    let word = |at: usize| {
        let bytes = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    };
    // `struct cmsghdr` has a length of 8 bytes, the level and the type; then `struct ucred` has
    // pid, uid and gid.
    let (level, kind, uid) = (word(8), word(12), word(20));
    let credentials = (
        libc::SOL_SOCKET.cast_unsigned(),
        libc::SCM_CREDENTIALS.cast_unsigned(),
    );
    match (level, kind) == credentials {
        true => Ok(uid),
        false => Err(Errno::NODATA),
    }
}

/// Receives the next message, and returns its descriptors.
fn descriptors(socket: BorrowedFd<'_>) -> Result<Vec<OwnedFd>, Errno> {
    // The credentials are not needed again.
    set_socket_passcred(socket, false)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0; 1];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags)?;
    let rights = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    Ok(rights.flatten().collect())
}

/// The length of a file of [`send`]; `None`: the file is another one.
fn length(file: BorrowedFd<'_>) -> Option<usize> {
    let stat = fstat(file).ok()?;
    let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    // Only files in memory have seals.
    let is_sealed = is_regular && fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
    let length = u64::try_from(stat.st_size)
        .ok()
        .filter(|length| *length <= MAX_ANSWER)?;
    is_sealed.then_some(length)?.try_into().ok()
}

fn content(file: &OwnedFd, length: usize) -> Option<Vec<u8>> {
    let mut content = vec![0; length];
    let mut read = 0;
    while read < length {
        match rustix::io::pread(file, content.get_mut(read..)?, read as u64) {
            Ok(0) | Err(_) => return None,
            Ok(n) => read += n,
        }
    }
    Some(content)
}

/// Closes what was refused on another thread: close(2) of a socket with SO_LINGER, or of a file of
/// FUSE, waits as long as its owner wants.
fn close_apart(refused: impl Send + 'static) {
    static CLOSING: AtomicUsize = AtomicUsize::new(0);
    // It stays open if no thread takes it.
    let refused = ManuallyDrop::new(refused);
    if CLOSING.fetch_add(1, Ordering::Relaxed) >= MAX_CLOSING {
        CLOSING.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let close = move || {
        drop(ManuallyDrop::into_inner(refused));
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    };
    let thread = Builder::new().name("urnic-closer".to_owned());
    let started = signals::blocked(|| threads::start(thread, close));
    if started.is_err() {
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
